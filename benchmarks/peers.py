"""kvpass compared with other engines for CPUs, llama.cpp and OpenVINO GenAI, each with its own caches.

    python benchmarks/peers.py                                    # milliseconds per token, by length
    python benchmarks/peers.py --quality                          # how much each cache changes the output

All run SmolLM2-135M-Instruct from the same GGUF. The engines keep its 4-bit weights; kvpass uses the same weights in
float32, in bfloat16, and in bfloat16 with torchao's 8-bit and 4-bit weights. The engines have their own environment (in
``build/peers``, about 250 MB) and each runs in its own process. Variants alternate, so that drift affects all of them
alike. "of context" is the time of a token minus that of one after the first length.

Quality is KL, and agreement of the most likely token, relative to the same engine's uncompressed cache, token by token
after a prompt. llama.cpp's KL is over its 1,000 most likely tokens; OpenVINO reports only one, and so no KL. Bits are
per value at 8,192 tokens: those of llama.cpp's blocks of 32 values, and of kvpass in bfloat16.
"""

import argparse
import copy
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torchao.prototype.quantization.int4.inference_workflow import PrototypeInt4WeightOnlyConfig
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import DynamicCache

import kvpass
from kvpass import models
from kvpass.eval import bits_at, quality, texts
from kvpass.eval.speed import sharing_weights
from kvpass.models.pretrained import download

from decode_e2e import fill
from timing import write

HOME = Path(__file__).parents[1] / "build" / "peers"
PACKAGES = ("xllamacpp", "openvino-genai", "numpy")
CACHES = {"llama.cpp": ("f16", "q8_0", "q4_0"), "openvino": ("f16", "u8", "u4")}
BITS = {"q8_0": 8.5, "q4_0": 4.5}
OURS = ("kivi", "waterfill")
_TOP, _LONG = 1000, 8192


def environment() -> Path:
    """The Python of the engines' environment."""
    python = HOME / "bin" / "python"
    if not python.exists():
        venv.create(HOME, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    return python


class Peer:
    """One engine with one kind of cache, in its process."""

    def __init__(self, engine: str, cache: str, gguf: Path, args) -> None:
        script = Path(__file__).with_name("peer_engines.py")
        context = max(args.lengths) + 64 + args.tokens
        command = [environment(), script, engine, cache, gguf, str(context), str(args.threads)]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self._process = subprocess.Popen(command, **pipes)

    def ask(self, ids: list[int], new: int = 1, top: int = 0) -> dict:
        """The answer of `peer_engines`."""
        self._process.stdin.write(json.dumps(dict(ids=ids, new=new, top=top)) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args[2:4]} ended with {self._process.wait()}.")
        return json.loads(line)

    def milliseconds(self, ids: list[int], new: int) -> float:
        """Time per token, for ``new`` tokens after ``ids``."""
        return self.ask(ids, new)["milliseconds"]

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait()


def _ours(model, ids: list[int], args) -> Callable[[], float]:
    """A function that runs ``--tokens`` steps of ``model`` after the prompt ``ids``, and returns the milliseconds per
    step."""
    cache, prompt = DynamicCache(config=model.config), torch.tensor([ids])
    fill(model, cache, prompt, 0, len(ids))

    def steps() -> float:
        token, begin = prompt[:, -1:], time.perf_counter()
        for _ in range(args.tokens):
            token = model(input_ids=token, past_key_values=cache).logits.argmax(-1)
        return 1e3 * (time.perf_counter() - begin) / args.tokens

    steps()  # compiles
    return steps


def _models(model, wanted: Callable[[str], bool]) -> dict[str, torch.nn.Module]:
    """The ``wanted`` variants of kvpass, by their names in the table."""
    half = copy.deepcopy(model).bfloat16()
    made: dict[str, Callable[[], torch.nn.Module]] = {"transformers, float32": lambda: model}
    for scheme in OURS:
        made[f"{scheme}, float32"] = partial(_applied, sharing_weights(model), scheme)
    made["transformers, bfloat16"] = lambda: half
    made["kivi, bfloat16"] = partial(_applied, sharing_weights(half), "kivi")
    made["kivi, 8-bit weights"] = partial(_applied, copy.deepcopy(half), "kivi", Int8WeightOnlyConfig())
    four = PrototypeInt4WeightOnlyConfig(group_size=32, set_inductor_config=False)
    made["kivi, 4-bit weights"] = partial(_applied, copy.deepcopy(half), "kivi", four)
    made["kivi, 4-bit weights, reduce-overhead"] = partial(
        _applied, copy.deepcopy(half), "kivi", four, "reduce-overhead"
    )
    return {name: make() for name, make in made.items() if wanted(name)}


def _applied(model, scheme: str, weights=None, mode: str | None = None) -> torch.nn.Module:
    if weights is not None:
        quantize_(model, weights)
    return kvpass.apply(model, scheme, mode=mode)


def speed(model, ids: list[int], gguf: Path, args) -> dict:
    """Milliseconds per token, by length and variant."""
    results: dict[int, dict[str, float]] = {}
    asked = tuple(args.variants.split(";"))
    names = [(engine, cache) for engine, caches in CACHES.items() for cache in caches]
    names = [each for each in names if ", ".join(each).startswith(asked)]
    own = _models(model, lambda name: name.startswith(asked))
    for length in args.lengths:
        peers = {f"{engine}, {cache}": Peer(engine, cache, gguf, args) for engine, cache in names}
        prompt = ids[:length]
        turns = {name: _ours(variant, prompt, args) for name, variant in own.items()}
        for name, peer in peers.items():
            peer.ask(prompt)
            turns[name] = partial(peer.milliseconds, prompt, args.tokens)
        if args.ask:
            input(f"{length} tokens are read. Enter to measure: ")
        times = {name: [] for name in turns}
        for _ in range(args.rounds):
            for name, turn in turns.items():
                times[name].append(turn())
        results[length] = {name: statistics.median(each) for name, each in times.items()}
        for peer in peers.values():
            peer.close()
        print(f"{length} tokens: {json.dumps({k: round(v, 1) for k, v in results[length].items()})}", flush=True)
    print("| |" + "".join(f" {length:,} | of context |" for length in args.lengths))
    print("|---|" + "--:|--:|" * len(args.lengths))
    first = results[args.lengths[0]]
    for name in first:
        each = (f"{results[n][name]:.1f} | {results[n][name] - first[name]:.1f}" for n in args.lengths)
        print(f"| {name} | {' | '.join(each)} |")
    return results


def _compared(ask: Callable[[list[int]], dict], reference: list[dict], ids: list[int], start: int) -> tuple:
    """Mean KL from ``reference``, which holds the log-probabilities of likely tokens at each step (None if there is
    only one), and agreement."""
    divergences, agreements = [], []
    for i, expected in enumerate(reference):
        got = dict(ask(ids[: start + i])["likely"])
        least = min(got.values())
        divergences.append(sum(math.exp(p) * (p - got.get(token, least)) for token, p in expected.items()))
        agreements.append(max(got, key=got.get) == max(expected, key=expected.get))
    return statistics.mean(divergences) if len(reference[0]) > 1 else None, statistics.mean(agreements)


def _of_peers(engine: str, gguf: Path, ids: list[int], args) -> dict[str, tuple]:
    """Bits, KL and agreement of an engine's caches, compared with its first one."""
    peers = {cache: Peer(engine, cache, gguf, args) for cache in CACHES[engine]}
    exact, *others = peers.values()
    reference = [dict(exact.ask(ids[: args.prompt + i], top=_TOP)["likely"]) for i in range(args.scored)]
    found = {
        f"{engine}, {cache}": (
            BITS.get(cache), *_compared(partial(peer.ask, top=_TOP), reference, ids, args.prompt)
        )
        for cache, peer in list(peers.items())[1:]
    }  # fmt: skip
    for peer in (exact, *others):
        peer.close()
    return found


def changes(model, tokenizer, gguf: Path, args) -> dict:
    """Bits, KL and agreement of each cache compared with the uncompressed one, by text."""
    half, results = copy.deepcopy(model).bfloat16(), {}
    schemes = {name: {"scheme": name} for name in (*OURS, "kivi-4", "waterfill-3")}
    bits = {name: bits_at(half, scheme, [_LONG])[_LONG] for name, scheme in schemes.items()}
    for text in texts.available():
        tokens = texts.tokens(tokenizer, text, args.prompt + args.scored)
        ids, rows = tokens[0].tolist(), {}
        for engine in CACHES:
            rows |= _of_peers(engine, gguf, ids, args)
        for row in quality.evaluate(model, {text: tokens}, args.prompt, schemes, one_pass=True)[text]:
            if row.scheme in bits:
                rows[row.scheme] = bits[row.scheme], row.kl, sum(row.agreements) / len(row.agreements)
        results[text] = rows
        print(f"\n{text}\n\n| | bits | KL | top-1 |\n|---|--:|--:|--:|")
        for name, (own, kl, agreement) in rows.items():
            known = ("" if one is None else f"{one:.{digits}f}" for one, digits in ((own, 2), (kl, 4)))
            print(f"| {name} | {' | '.join(known)} | {agreement:.1%} |", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="64,512,4096,7680")
    parser.add_argument("--tokens", type=int, default=32, help="of a turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ask", action="store_true", help="wait for a line of input where all is ready to be measured")
    parser.add_argument("--variants", default="", help="only those whose names begin so, by semicolon")
    parser.add_argument("--quality", action="store_true")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--scored", type=int, default=256)
    parser.add_argument("--json", help="also write what was measured to this file")
    args = parser.parse_args()
    args.lengths = [args.prompt + args.scored] if args.quality else [int(n) for n in args.lengths.split(",")]
    torch.set_num_threads(args.threads)
    model, tokenizer = models.load()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        gguf = download(Path(folder))
        if args.quality:
            results = changes(model, tokenizer, gguf, args)
        else:
            ids = texts.tokens(tokenizer, texts.available()[0], max(args.lengths))[0].tolist()
            results = speed(model, ids, gguf, args)
    write(args, torch.device("cpu"), results=results)


if __name__ == "__main__":
    sys.exit(main())

"""What packed blocks cost in quality inside of vLLM: KL and top-1 against vLLM's own cache.

    build/vllm-venv/bin/python benchmarks/serving_kl.py --schemes kivi-sinks smollm2-waterfill

Each text is a prompt and the tokens that follow it, one per step, whatever the engine would choose. Engines run in
processes of their own; a logits processor keeps their scores and makes them go on as the text does.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from serving import STOCK, options, with_model

from kvpass.eval import texts


def forcing():
    """The logits processor. It is made here because this file also runs where vLLM is not imported."""
    from vllm.v1.sample.logits_processor import LogitsProcessor

    class Forcing(LogitsProcessor):
        def __init__(self, vllm_config, device, is_pin_memory):
            self.asked, self.output, self.scores = None, [], []

        def is_argmax_invariant(self):
            return False

        def update_state(self, batch_update):
            for _, sampling, _, output in batch_update.added if batch_update else ():
                self.asked, self.output, self.scores = sampling.extra_args, output, []

        def apply(self, logits):
            if not self.asked:
                return logits
            target = self.asked["tokens"]
            self.scores.append(logits[0].float().log_softmax(-1).clone())
            if len(self.scores) == len(target):
                torch.save(torch.stack(self.scores), self.asked["file"])
            chosen = target[len(self.scores) - 1]
            return torch.full_like(logits, -math.inf).index_fill_(1, torch.tensor([chosen]), 0.0)

    return Forcing


def __getattr__(name):
    if name == "Forcing":
        return forcing()
    raise AttributeError(name)


def serve(job: dict) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=job["model"], enable_prefix_caching=False, logits_processors=["serving_kl:Forcing"], **job["engine"]
    )
    for number, ids in enumerate(job["texts"]):
        scored = ids[job["prompt"] :]
        asked = {"tokens": scored, "file": f"{job['folder']}/{number}.pt"}
        sampling = SamplingParams(temperature=0, max_tokens=len(scored), ignore_eos=True, extra_args=asked)
        llm.generate([{"prompt_token_ids": ids[: job["prompt"]]}], sampling, use_tqdm=False)


def scores(name: str, given: argparse.Namespace, ids: list[list[int]], folder: Path) -> list[torch.Tensor]:
    """The log-probabilities of one engine, ``[tokens, words]`` for each text."""
    folder.mkdir()
    engine = dict(
        dtype=given.dtype, max_model_len=2 * given.prompt, kv_cache_memory_bytes=1 << 29, enforce_eager=True,
        max_num_batched_tokens=given.chunk, skip_tokenizer_init=True,
    )  # fmt: skip
    engine |= options(name)
    job = dict(model=given.model, engine=engine, texts=ids, prompt=given.prompt, folder=str(folder))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment["PYTHONPATH"] = str(Path(__file__).parent)
    done = subprocess.run(
        [sys.executable, __file__, "--job"], input=json.dumps(job), capture_output=True, text=True, env=environment
    )
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])
    return [torch.load(folder / f"{number}.pt").float() for number in range(len(ids))]


def rows(given: argparse.Namespace) -> Iterator[dict]:
    """Of each scheme: KL to vLLM's own cache, half of its 95 % interval, how often the most probable token is the same,
    and the KL on each text."""
    from transformers import AutoTokenizer

    tokenizer, count = AutoTokenizer.from_pretrained(given.model), given.prompt + given.scored
    ids = [texts.tokens(tokenizer, name, count)[0].tolist() for name in given.text.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        stock = scores(STOCK, given, ids, Path(folder) / "stock")
        for number, name in enumerate(given.schemes):
            found = scores(name, given, ids, Path(folder) / str(number))
            pairs = list(zip(stock, found, strict=True))
            kl = [((p.exp() * (p - q)).nan_to_num().sum(-1)) for p, q in pairs]
            same = [(p.argmax(-1) == q.argmax(-1)).float() for p, q in pairs]
            each = torch.cat(kl)
            error = 1.96 * float(each.std()) / len(each) ** 0.5
            of_texts = [float(one.mean()) for one in kl]
            top1 = float(torch.cat(same).mean())
            yield dict(name=name, kl=statistics.mean(of_texts), error=error, top1=top1, of_texts=of_texts)


def main(given: argparse.Namespace) -> None:
    names = given.text.split(",")
    print(f"| {given.prompt} + {given.scored} tokens, {given.dtype} | KL | top-1 | " + " | ".join(names) + " |")
    print("|---|--:|--:|" + len(names) * "--:|", flush=True)
    for row in rows(given):
        of_texts = " | ".join(f"{one:.4f}" for one in row["of_texts"])
        print(f"| {row['name']} | {row['kl']:.4f} ± {row['error']:.4f} | {row['top1']:.1%} | {of_texts} |", flush=True)


def parsed(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of this command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder; by default SmolLM2-135M-Instruct, which is fetched once")
    parser.add_argument("--schemes", nargs="+", default=["kivi-sinks"], help="schemes, or folders of calibrations")
    parser.add_argument("--text", default="prose,code", help="texts that come with kvpass, or files")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--scored", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a step at most")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    return with_model(parser.parse_args(given))


if __name__ == "__main__":
    given = parsed()
    if given.job:
        serve(json.load(sys.stdin))
    else:
        main(given)

"""A million tokens through a tiny model: python benchmarks/soak.py [--tokens N] [--long N] [--json FILE]

Each scheme gets its share in batches, through several caches at once: prompts, steps, turns of some tokens, crops, and
a reset when a text has grown long. Most of it runs in the default lowering, a part under "eager". From time to time a
text is compared with

* a replay: a fresh cache that is fed the same tokens since the last reset. Contents and logits must match bit for bit;
* untouched attention: the original model over a `DynamicCache` with the dequantized contents;

and one text of ``--long`` tokens is compared with states that are fed the same keys and values at once. Memory is read
when a share begins and at every tenth of it. The CPU time of a step is compared between the first and the last tenth at
equal lengths. The script fails if a comparison fails or memory grows. Linux only.
"""

import argparse
import gc
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import kvpass
from kvpass import HeavyHitter, schemes
from kvpass.cache.state import KVState
from kvpass.models.arguments import handing
from kvpass.schemes import SchemeConfig

VOCABULARY, BATCH, TEXTS, LONGEST, PROMPT = 128, 16, 3, 400, 64
SCHEMES = {
    "kivi": schemes.get("kivi", group_size=16),
    "squat": schemes.get("squat", group_size=16, block_size=8),
    "logquant": schemes.get("logquant", group_size=16),
    "h2o": schemes.get("kivi", group_size=16, retention=HeavyHitter(64, recent=48, page_size=16)),
    "qaq": schemes.get("qaq", sigma_s=1e-4, sigma_x=1e-3),
}
EAGER = 0.1  # share of the tokens of each scheme
ROLLBACK = 8  # tokens cropped at a time; all schemes support 16
CLOSE = dict(atol=1e-4, rtol=1e-4)
GROWTH, MORE_TENSORS = 32e6, 200  # allowed growth after the first tenth: bytes, and tensors (tables are kept)


def tiny() -> LlamaForCausalLM:
    """One layer of one head."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1, head_dim=16)
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=1 << 20, **sizes)).eval()


class Text:
    """A cache, and everything that happened to it since it was empty."""

    def __init__(self, model):
        self.model, self.cache, self.log = model, DynamicCache(config=model.config), []

    def feed(self, ids: Tensor) -> Tensor:
        """Logits after ``ids`` ``[B, S]``."""
        self.log.append(ids.tolist())
        return self.model(input_ids=ids, **handing(self.model, self.cache), logits_to_keep=1).logits

    def crop(self, tokens: int) -> None:
        self.log.append(tokens)
        self.cache.crop(-tokens)

    def reset(self) -> None:
        self.log.clear()
        self.cache.reset()

    def replayed(self) -> "Text":
        """A fresh text with the same history."""
        other = Text(self.model)
        for what in self.log:
            other.crop(what) if isinstance(what, int) else other.feed(torch.tensor(what))
        return other

    @property
    def layer(self):
        (layer,) = self.cache.layers
        return layer

    def contents(self) -> tuple[Tensor, Tensor]:
        """Dequantized keys and values."""
        return self.layer.keys + 0, self.layer.values + 0


def check(text: Text, untouched: LlamaForCausalLM, ids: Tensor, replay: bool = True) -> None:
    """Feed ``ids`` ``[B, 1]`` to ``text`` and compare it with untouched attention, and with a `Text.replayed`."""
    contents, seen, again = text.contents(), text.layer.seen, text.replayed() if replay else None
    plain = DynamicCache(config=untouched.config)
    plain.update(*contents, 0)
    expected = untouched(input_ids=ids, **handing(untouched, plain), position_ids=torch.tensor([[seen]])).logits
    if replay:
        assert (again.layer.tokens, again.layer.seen) == (text.layer.tokens, seen)
        for mine, theirs in zip(contents, again.contents(), strict=True):
            assert torch.equal(mine, theirs), "contents differ from those of a replay"
    got = text.feed(ids)
    torch.testing.assert_close(got, expected, **CLOSE, msg=lambda m: f"untouched attention: {m}")
    if replay:
        assert torch.equal(got, again.feed(ids)), "logits differ from those of a replay"


def check_straight(text: Text, untouched: LlamaForCausalLM, chunk: int = 1024) -> None:
    """Compare the contents of a text of one row with those of states that are fed the same keys and values at once.
    With one layer, these do not depend on the past."""
    ids, parts = torch.tensor([[token for (row,) in text.log for token in row]]), []
    for start in range(0, ids.shape[1], chunk):
        plain, part = DynamicCache(config=untouched.config), ids[:, start : start + chunk]
        positions = torch.arange(start, start + part.shape[1])[None]
        untouched(input_ids=part, **handing(untouched, plain), position_ids=positions, logits_to_keep=1)
        parts.append((plain.layers[0].keys, plain.layers[0].values))
    straight = [torch.cat(each, 2) for each in zip(*parts, strict=True)]
    for state, got, x in zip(text.layer.states(), text.contents(), straight, strict=True):
        fed = KVState.allocate(state.spec, *x.shape[:2], x.shape[3], x.dtype, "cpu", ids.shape[1])
        fed.append(x, 0)
        differs = ~torch.isclose(got, fed.dequantize(ids.shape[1]), atol=1e-3)
        assert differs.float().mean() < 1e-3, "contents differ from those fed at once"  # except for rounding ties


class Meter:
    """Memory at marks, and CPU seconds of steps by length."""

    def __init__(self):
        self.bytes, self.tensors, self.steps = [], [], []

    def mark(self) -> None:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.bytes.append(pages * os.sysconf("SC_PAGE_SIZE"))
        self.tensors.append(sum(type(item) is Tensor for item in gc.get_objects()))

    def timed(self, length: int, fn: Callable) -> None:
        begin = time.process_time()  # other processes do not count
        fn()
        self.steps.append((length, time.process_time() - begin))

    def ratio(self, first: int = PROMPT, width: int = 32) -> float | None:
        """Median step of the last tenth relative to the first, at equal lengths; None if no length occurs in both."""
        tenth = len(self.steps) // 10
        parts = []
        for steps in (self.steps[:tenth], self.steps[-tenth:]):
            by_length: dict[int, list[float]] = {}
            for length, seconds in steps:
                by_length.setdefault(length // width, []).append(seconds)
            parts.append({length: statistics.median(each) for length, each in by_length.items()})
        both = parts[0].keys() & parts[1].keys()
        return statistics.median(parts[1][length] / parts[0][length] for length in both) if both else None

    def check(self) -> None:
        assert max(self.bytes[2:]) - self.bytes[1] < GROWTH, f"memory grows: {self.bytes}"
        assert max(self.tensors[2:]) - self.tensors[1] < MORE_TENSORS, f"tensors are left over: {self.tensors}"

    def results(self) -> dict:
        ratio = self.ratio()
        return dict(
            steps=len(self.steps), rss_mb=[round(each / 1e6, 1) for each in self.bytes], tensors=self.tensors,
            step_ms=round(1e3 * statistics.median(seconds for _, seconds in self.steps), 3),
            last_tenth_over_first=ratio and round(ratio, 3),
        )  # fmt: skip


@torch.inference_mode()
def soak(config: SchemeConfig, lowering: str, tokens: int, seed: int = 0) -> dict:
    """Feed ``tokens`` tokens through `TEXTS` alternating caches."""
    rng, random_ids = random.Random(seed), torch.Generator().manual_seed(seed)
    untouched, model = tiny(), kvpass.apply(tiny(), config, lowering=lowering)
    texts, meter, done, marks, checks, resets, crops = [Text(model) for _ in range(TEXTS)], Meter(), 0, 0, 0, 0, 0

    def ids(count: int) -> Tensor:
        nonlocal done
        done += BATCH * count
        return torch.randint(VOCABULARY, (BATCH, count), generator=random_ids)

    begin = time.perf_counter()
    while done < tokens:
        text = rng.choice(texts)
        if not text.log:
            text.feed(ids(rng.randint(2, PROMPT)))
        elif len(text.log) > LONGEST or (what := rng.random()) < 0.01:
            text.reset()
            resets += 1
        elif what < 0.05 and text.layer.tokens > PROMPT:
            text.crop(rng.randint(1, ROLLBACK))
            crops += 1
        elif what < 0.06:
            text.feed(ids(rng.randint(2, 40)))
        for _ in range(rng.randint(1, 40) if text.log else 0):
            meter.timed(text.layer.tokens, lambda text=text: text.feed(ids(1)))
        if done * 10 >= marks * tokens:
            if text.log:
                check(text, untouched, ids(1))
                checks += 2
            meter.mark()
            marks += 1
    meter.mark()
    meter.check()
    return dict(
        lowering=lowering, batch=BATCH, tokens=done, seconds=round(time.perf_counter() - begin, 1), resets=resets,
        crops=crops, checks=checks, **meter.results(),
    )  # fmt: skip


@torch.inference_mode()
def soak_long(config: SchemeConfig, tokens: int) -> dict:
    """Decode one text of ``tokens`` tokens at batch size 1."""
    random_ids = torch.Generator().manual_seed(0)
    untouched, model, meter = tiny(), kvpass.apply(tiny(), config), Meter()
    text, begin, checks = Text(model), time.perf_counter(), 0

    def ids(count: int) -> Tensor:
        return torch.randint(VOCABULARY, (1, count), generator=random_ids)

    text.feed(ids(PROMPT))
    nbytes = []
    for done in range(PROMPT + 1, tokens + 1):
        meter.timed(text.layer.tokens, lambda: text.feed(ids(1)))
        if not done % (tokens // 10):
            check(text, untouched, ids(1), replay=False)
            check_straight(text, untouched)
            checks += 2
            meter.mark()
            nbytes.append(round(kvpass.nbytes(text.cache) / 1e6, 2))
    return dict(
        lowering="auto", batch=1, tokens=text.layer.seen, seconds=round(time.perf_counter() - begin, 1), checks=checks,
        bits_per_value=round(kvpass.bits_per_value(text.cache), 3), cache_mb=nbytes, **meter.results(),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000, help="in all")
    parser.add_argument("--long", type=int, default=100_000, help="of these, the tokens of the long text")
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    names, rows = args.schemes.split(","), []
    share = (args.tokens - args.long) // len(names)
    runs = [(name, "auto", int(share * (1 - EAGER))) for name in names]
    runs += [(name, "eager", share - int(share * (1 - EAGER))) for name in names]
    for name, lowering, tokens in runs:
        rows.append(dict(scheme=name, **soak(SCHEMES[name], lowering, tokens)))
        print(json.dumps(rows[-1]), flush=True)
    if args.long:
        rows.append(dict(scheme="kivi, one text", **soak_long(SCHEMES["kivi"], args.long)))
        print(json.dumps(rows[-1]), flush=True)
    total = sum(row["tokens"] for row in rows)
    print(f"{total} tokens in {sum(row['seconds'] for row in rows):.0f} s, {sum(r['checks'] for r in rows)} checks")
    if args.json:
        versions = {name: version(name) for name in ("torch", "transformers")}
        Path(args.json).write_text(json.dumps(dict(**versions, tokens=total, runs=rows), indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Decode steps of a whole model over a packed cache, against transformers' own caches as users run them: eagerly.

    python benchmarks/decode_e2e.py                                               # SmolLM2-135M-Instruct, by length
    python benchmarks/decode_e2e.py --lengths 512 --max-cache-len 1024,16384      # does capacity change a step?
    python benchmarks/decode_e2e.py --draft 5 --steps 32                          # drafts of 4, with the token before
    python benchmarks/decode_e2e.py --batch 8 --steps 32                          # eight sequences
    python benchmarks/decode_e2e.py --prefill 2048                                # what quantization adds to a prompt
    python benchmarks/decode_e2e.py --scheme kivi,FOLDER                          # two schemes, one of them calibrated

A variant decodes ``--steps`` tokens in a row, so that the mean includes quantizing pages. Variants alternate step by
step, so that machine drift affects all of them alike. "of context" is the time of a step minus that of one after the
first length. Caches are filled by one growing prompt, each by its own model, with shared weights; `QuantizedCache` gets
the keys and values of the default one. It takes a step only every ``--every`` rounds. It quantizes all tokens again
once in 128 steps, which is not counted.
"""

import argparse
import copy
import itertools
import statistics

import torch
from torch.profiler import profile
from transformers import DynamicCache, QuantizedCache

import kvpass
from kvpass import models
from kvpass.cli.shared import scheme as read_scheme
from kvpass.eval import texts
from kvpass.eval.speed import sharing_weights
from kvpass.models.arguments import handing

from timing import seconds, show, write

DEFAULT = "default"
QUANTIZED = {
    f"{backend}, {bits} bits": dict(backend=backend, nbits=bits, axis_key=axis, axis_value=axis)
    for backend, axis in (("quanto", 0), ("hqq", 1))
    for bits in (2, 4)
}
APPENDS = "kvpass::append_", "kvpass::append_layers_"
PACKAGES = {"quanto": "optimum-quanto", "hqq": "hqq"}


def quantized(config) -> dict:
    """Variant -> arguments of `QuantizedCache`, for the installed backends."""
    found, tried = {}, {}
    for name, how in QUANTIZED.items():
        try:
            QuantizedCache(config=config, **how)
            found[name] = how
        except ImportError:
            tried[how["backend"]] = PACKAGES[how["backend"]]
    for backend, package in tried.items():
        print(f"QuantizedCache with {backend} is left out: pip install {package}")
    return found


def fill(model, cache, ids, start: int, stop: int, chunk: int = 512) -> None:
    """Append tokens ``[start, stop)`` of ``ids`` ``[1, N]`` to ``cache``, a chunk at a time."""
    for first in range(start, stop, chunk):
        part = ids[:, first : min(first + chunk, stop)]
        model(input_ids=part, **handing(model, cache), logits_to_keep=1)


def requantized(cache, config, how: dict) -> QuantizedCache:
    """A `QuantizedCache` with the keys and values of ``cache``, quantized like those of a prompt."""
    new = QuantizedCache(config=config, **how)
    for index, layer in enumerate(cache.layers):
        new.update(layer.keys, layer.values, index)
    return new


def measure(variants: dict, caches: dict, ids, length: int, args) -> dict[str, float]:
    """Mean seconds per step by variant, for steps after ``length`` tokens."""
    times = {name: [] for name in caches}
    for step in range(-3, args.steps):  # three to compile and warm up
        first = length + (3 + step) * args.draft
        token = ids[:, first : first + args.draft].expand(args.batch, -1)
        for name, cache in caches.items():
            if name in QUANTIZED and step >= 0 and step % args.every:
                continue
            model = variants[name]
            call = dict(input_ids=token, **handing(model, cache))
            took = seconds(lambda: model(**call), token.device)  # noqa: B023
            if step >= 0:
                times[name].append(took)
    return {name: statistics.fmean(each) for name, each in times.items()}


def by_length(variants: dict, ids, args) -> dict:
    """Mean seconds per step, by length and variant."""
    config = variants[DEFAULT].config
    backends = quantized(config)
    variants = variants | dict.fromkeys(backends, variants[DEFAULT])
    grown = {name: DynamicCache(config=config) for name in variants if name not in backends}
    results, lengths = {}, [int(length) for length in args.lengths.split(",")]
    for start, stop in zip([0, *lengths], lengths, strict=False):
        for name, cache in grown.items():
            fill(variants[name], cache, ids, start, stop)
        caches = {name: copy.deepcopy(cache) for name, cache in grown.items()}
        caches |= {name: requantized(grown[DEFAULT], config, how) for name, how in backends.items()}
        for cache in caches.values():
            cache.batch_repeat_interleave(args.batch)
        results[stop] = means = measure(variants, caches, ids, stop, args)
        context = {name: means[name] - results[lengths[0]][name] for name in means}
        show(f"{stop} tokens", means, {name: f"{each * 1e3:9.3f} ms of context" for name, each in context.items()})
    return results


def prefill(variants: dict, ids, args) -> dict[str, dict[str, float]]:
    """Median seconds of a whole prompt by variant, and the share of storing its keys and values, from a profile of one
    more prompt. The order of variants changes from round to round."""

    def took(model) -> float:
        cache = DynamicCache(config=model.config)
        return seconds(lambda: fill(model, cache, ids, 0, args.prefill, args.prefill), ids.device)

    times, storing = {name: [] for name in variants}, {}
    for turn in range(-1, args.rounds):
        for name, model in list(variants.items())[:: 1 if turn % 2 else -1]:
            each = took(model)
            if turn >= 0:
                times[name].append(each)
    for name, model in variants.items():
        with profile() as found:
            whole = took(model)
        ops = [event for event in found.key_averages() if event.key in APPENDS]
        storing[name] = sum(max(event.cpu_time_total, event.device_time_total) for event in ops) / 1e6 / whole
    medians = {name: statistics.median(each) for name, each in times.items()}
    notes = {name: f"{100 * share:5.2f} % storing" for name, share in storing.items()}
    show(f"a prompt of {args.prefill} tokens", medians, notes)
    return dict(prompt=medians, storing=storing)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--scheme", default="kivi", help="one or more, by comma; may be folders of calibrations")
    parser.add_argument("--lengths", default="64,512,4096,7680", help="increasing")
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--draft", type=int, default=1, help="tokens of a step, all of which are kept")
    parser.add_argument("--batch", type=int, default=1, help="sequences, which are copies of one")
    parser.add_argument("--every", type=int, default=16, help="rounds from one step of a QuantizedCache to the next")
    parser.add_argument("--max-cache-len", default="", help="one packed variant for each, by comma")
    parser.add_argument("--prefill", type=int, help="measure a prompt of as many tokens, and no steps")
    parser.add_argument("--rounds", type=int, default=15, help="of prompts")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", help="also write the seconds to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    plain, tokenizer = models.load(args.model, say=print)
    variants = {DEFAULT: plain}
    capacities = [int(each) for each in args.max_cache_len.split(",") if each] or [None]
    for scheme, capacity in itertools.product(args.scheme.split(","), capacities):
        name = f"{scheme}, {capacity} allocated" if capacity else scheme
        variants[name] = kvpass.apply(sharing_weights(plain), read_scheme(scheme), max_cache_len=capacity)
    tokens = args.prefill or max(map(int, args.lengths.split(","))) + (args.steps + 3) * args.draft
    ids = texts.tokens(tokenizer, "prose", tokens).to(plain.device)
    results = (prefill if args.prefill else by_length)(variants, ids, args)
    write(args, plain.device, seconds=results)


if __name__ == "__main__":
    main()

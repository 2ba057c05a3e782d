"""One decode step over a packed cache: against the model's own cache, and against larger capacities.

    python benchmarks/decode_step.py capacity    # does a step cost the length, or the capacity?
    python benchmarks/decode_step.py length      # a step against the model's default cache, by length

Every variant is measured in turn within one process, step by step, so that drift of the machine hits all alike; figures
are medians, ratios are to the variant named first. A step at a fixed length is repeated by cropping its token again.
"""

import argparse
import json
import platform
import statistics
import time

import torch
from transformers import DynamicCache

import kvpass
from kvpass import models, texts


def one_step(model, token, cache) -> float:
    start = time.perf_counter()
    model(input_ids=token, past_key_values=cache)
    if token.device.type != "cpu":
        torch.accelerator.synchronize(token.device)
    seconds = time.perf_counter() - start
    cache.crop(-1)
    return seconds


@torch.no_grad()
def measure(variants: dict, ids, length: int, rounds: int) -> dict[str, float]:
    """Median seconds of a step at ``length`` for each variant, a model (applied or not) of the same weights."""
    caches, times = {}, {name: [] for name in variants}
    for name, model in variants.items():
        caches[name] = DynamicCache(config=model.config)
        model(input_ids=ids[:, :length], past_key_values=caches[name], logits_to_keep=1)
        for _ in range(3):  # compiles
            one_step(model, ids[:, length : length + 1], caches[name])
    for _ in range(rounds):
        for name, model in variants.items():
            times[name].append(one_step(model, ids[:, length : length + 1], caches[name]))
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def show(title: str, medians: dict[str, float]) -> None:
    base = next(iter(medians.values()))
    print(title)
    for name, seconds in medians.items():
        print(f"  {name:<32} {seconds * 1e3:8.2f} ms  {seconds / base:5.2f}x", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["capacity", "length"])
    parser.add_argument("--model")
    parser.add_argument("--scheme", default="kivi")
    parser.add_argument("--lengths", default="512,2048,4096")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", help="also write the medians, in seconds, to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    def load():
        return models.load(args.model, say=print)

    results = {}
    if args.what == "capacity":
        length = 512
        variants = {}
        for capacity in (1024, 16384):
            model, tokenizer = load()
            variants[f"max_cache_len={capacity}"] = kvpass.apply(model, args.scheme, max_cache_len=capacity)
        ids = texts.tokens(tokenizer, "prose", length + 1).to(model.device)
        results[length] = measure(variants, ids, length, args.rounds)
        show(f"{args.scheme}, one step at length {length}", results[length])
    else:
        plain, tokenizer = load()
        packed = kvpass.apply(load()[0], args.scheme)
        lengths = [int(length) for length in args.lengths.split(",")]
        ids = texts.tokens(tokenizer, "prose", max(lengths) + 1).to(plain.device)
        for length in lengths:
            results[length] = measure({"default cache, eager": plain, args.scheme: packed}, ids, length, args.rounds)
            show(f"one step at length {length}", results[length])
    if args.json:
        about = dict(
            scheme=args.scheme,
            device=torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu",
            threads=args.threads,
            torch=torch.__version__,
            seconds=results,
        )
        with open(args.json, "w") as file:
            json.dump(about, file, indent=1)


if __name__ == "__main__":
    main()

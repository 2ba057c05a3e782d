"""One decode step over a packed cache: against the model's own cache, and against larger capacities.

    python benchmarks/decode_step.py capacity    # does a step cost the length, or the capacity?
    python benchmarks/decode_step.py length      # a step against the model's default cache, by length

Every variant is measured in turn within one process, step by step, so that drift of the machine hits all alike; figures
are medians, ratios are to the variant named first (`kvpass.speed`).
"""

import argparse
import json
import platform

import torch

import kvpass
from kvpass import models, speed, texts


def medians(variants: dict, ids, length: int, rounds: int) -> dict[str, float]:
    """Median seconds of a step at ``length`` for each variant."""
    return {name: each.seconds for name, each in speed.measure(variants, ids, length, rounds).items()}


def show(title: str, steps: dict[str, float]) -> None:
    base = next(iter(steps.values()))
    print(title)
    for name, seconds in steps.items():
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
        results[length] = medians(variants, ids, length, args.rounds)
        show(f"{args.scheme}, one step at length {length}", results[length])
    else:
        plain, tokenizer = load()
        packed = kvpass.apply(load()[0], args.scheme)
        lengths = [int(length) for length in args.lengths.split(",")]
        ids = texts.tokens(tokenizer, "prose", max(lengths) + 1).to(plain.device)
        for length in lengths:
            results[length] = medians({"default cache, eager": plain, args.scheme: packed}, ids, length, args.rounds)
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

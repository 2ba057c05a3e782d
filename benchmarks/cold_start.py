"""What a user waits for: python benchmarks/cold_start.py [--prompt N] [scheme ...]

`kvpass.apply`, the first token and the first decode step of SmolLM2-135M-Instruct, in a process with an empty compile
cache and in a second one that finds what the first compiled. Loading the model is not counted; "untouched" is the model
without kvpass.
"""

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time

UNTOUCHED = "untouched"


def measure(scheme: str, prompt: int) -> None:
    """Print the seconds of each part."""
    import torch
    from transformers import DynamicCache

    import kvpass
    from kvpass import models
    from kvpass.eval import texts

    model, tokenizer = models.load()
    ids = texts.tokens(tokenizer, "prose", prompt + 2)
    cache, times = DynamicCache(config=model.config), [time.perf_counter()]
    if scheme != UNTOUCHED:
        kvpass.apply(model, scheme)
    times.append(time.perf_counter())
    with torch.no_grad():
        for part in (ids[:, :prompt], ids[:, prompt : prompt + 1]):
            model(input_ids=part, past_key_values=cache, logits_to_keep=1)
            times.append(time.perf_counter())
    print("|".join(f" {b - a:.1f} s " for a, b in itertools.pairwise(times)), end="")
    print(f"| {times[-1] - times[0]:.1f} s |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("schemes", nargs="*", default=[UNTOUCHED, "kivi", "squat"])
    args = parser.parse_args()
    if args.measure:
        return measure(args.schemes[0], args.prompt)
    print("| | process | apply | first token | first step | together |\n|---|---|--:|--:|--:|--:|", flush=True)
    for scheme in args.schemes:
        with tempfile.TemporaryDirectory() as folder:
            for process in ("first", "second"):
                command = [sys.executable, __file__, "--measure", "--prompt", str(args.prompt), scheme]
                environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
                line = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
                print(f"| {scheme} | {process} |{line.strip()}", flush=True)


if __name__ == "__main__":
    main()

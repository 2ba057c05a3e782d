"""How long a user waits at first: python benchmarks/cold_start.py [--prompt N] [--layers N] [scheme ...]

Times `kvpass.apply`, the first token and the first decode step of SmolLM2-135M-Instruct, in a process with an empty
compile cache and in a second one that finds what the first compiled. Loading the model is not counted. "untouched" is
the model without kvpass; "static" is the model with transformers' static cache and a forward that torch.compile
compiles for its steps, as ``generate(cache_implementation="static")`` does. A scheme may be the folder of a
calibration. ``--layers`` sets another depth, with random weights.
"""

import argparse
import copy
import itertools
import os
import subprocess
import sys
import tempfile
import time

UNTOUCHED, STATIC = "untouched", "static"


def load(layers: int | None):
    """SmolLM2-135M-Instruct, or a random model of its shape with ``layers`` layers; and its tokenizer."""
    from transformers import LlamaForCausalLM

    from kvpass import models

    model, tokenizer = models.load()
    if layers:
        config = copy.deepcopy(model.config)
        config.num_hidden_layers = layers
        model = LlamaForCausalLM(config).eval()
    return model, tokenizer


def measure(scheme: str, prompt: int, layers: int | None) -> None:
    """Print the seconds of each part."""
    import torch
    from transformers import DynamicCache, StaticCache

    import kvpass
    from kvpass.cli.shared import scheme as read_scheme
    from kvpass.eval import texts
    from kvpass.models.arguments import handing

    model, tokenizer = load(layers)
    ids = texts.tokens(tokenizer, "prose", prompt + 2)
    static = scheme == STATIC
    chosen = None if static or scheme == UNTOUCHED else read_scheme(scheme)
    cache = StaticCache(model.config, max_cache_len=prompt + 2) if static else DynamicCache(config=model.config)
    handed, times, step = handing(model, cache), [time.perf_counter()], model
    if static:
        step = torch.compile(model.forward)
    elif chosen is not None:
        kvpass.apply(model, chosen)
    times.append(time.perf_counter())
    with torch.no_grad():
        for call, part in ((model, ids[:, :prompt]), (step, ids[:, prompt : prompt + 1])):
            call(input_ids=part, **handed, logits_to_keep=1)
            times.append(time.perf_counter())
    print("|".join(f" {b - a:.1f} s " for a, b in itertools.pairwise(times)), end="")
    print(f"| {times[-1] - times[0]:.1f} s |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("schemes", nargs="*", default=[UNTOUCHED, STATIC, "kivi", "squat"])
    args = parser.parse_args()
    if args.measure:
        return measure(args.schemes[0], args.prompt, args.layers)
    print("| | process | apply | first token | first step | together |\n|---|---|--:|--:|--:|--:|", flush=True)
    for scheme in args.schemes:
        with tempfile.TemporaryDirectory() as folder:
            for process in ("first", "second"):
                command = [sys.executable, __file__, "--measure", "--prompt", str(args.prompt), scheme]
                command += ["--layers", str(args.layers)] if args.layers else []
                environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
                line = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
                print(f"| {scheme} | {process} |{line.strip()}", flush=True)


if __name__ == "__main__":
    main()

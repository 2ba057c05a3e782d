"""``kvpass bench``: time the decode steps of schemes side by side."""

import argparse

import torch

from .. import api, models
from ..eval import texts
from ..eval.speed import measure, sharing_weights
from .shared import FULL, SCHEMES, TEXT, at_least, chosen_schemes, numbers, say, stage

HELP = "Time decode steps of schemes and full precision, interleaved in one process."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``kvpass bench``."""
    parser.add_argument("--schemes", default="kivi", help=SCHEMES)
    parser.add_argument("--lengths", type=numbers, default="512,2048", metavar="N,...", help="tokens in the cache")
    parser.add_argument("--rounds", type=at_least(1), default=20, metavar="N", help="steps per scheme; default 20")
    parser.add_argument("--text", default="prose", help=TEXT)


def run(args: argparse.Namespace) -> None:
    """``kvpass bench``."""
    chosen = chosen_schemes(args.schemes)
    model, tokenizer = models.load(args.model, say=say)
    ids = texts.tokens(tokenizer, args.text, max(args.lengths) + 1).to(model.device)
    variants = {
        name: model if scheme is None else api.apply(sharing_weights(model), scheme) for name, scheme in chosen.items()
    }
    for length in args.lengths:
        with stage(f"{length} tokens (each scheme first compiles its step)"):
            speeds = measure(variants, ids, length, args.rounds)
        full = speeds[FULL]
        print(f"\n{'cache, ' + str(length) + ' tokens':<26}{'ms':>10}{'tokens/s':>10}{'time':>8}{'bytes':>15}{'':>8}")
        for name, speed in speeds.items():
            print(
                f"{name:<26}{speed.seconds * 1e3:>10.2f}{1 / speed.seconds:>10.1f}{speed.seconds / full.seconds:>7.2f}x"
                f"{speed.nbytes:>15,}{speed.nbytes / full.nbytes:>7.3f}x"
            )
    print(f"\nMedian of {args.rounds} steps, batch 1, {torch.get_num_threads()} CPU threads, {model.device}.")

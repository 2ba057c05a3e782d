"""``kvpass perplexity``: the perplexity of a whole text."""

import argparse

from .. import models
from ..eval import texts
from ..eval.text_windows import perplexities
from .shared import FULL, SCHEMES, TEXT, at_least, chosen_schemes, out_file, say, stage

HELP = "Measure the perplexity of a whole text, in windows of a fixed context."
DEFAULT = "kivi,kivi-4,waterfill"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``kvpass perplexity``."""
    parser.add_argument("--schemes", default=DEFAULT, help=f"default {DEFAULT}; {SCHEMES}")
    parser.add_argument("--text", default="prose", help=TEXT)
    parser.add_argument("--tokens", type=at_least(2), metavar="N", help="the first N tokens of the text; default all")
    parser.add_argument(
        "--context", type=at_least(2), default=2048, metavar="N", help="tokens of a window; default 2048"
    )
    parser.add_argument(
        "--stride", type=at_least(1), metavar="N", help="tokens scored in each window; default the context"
    )
    parser.add_argument(
        "--resume", type=out_file, metavar="FILE", help="write results after every window, and continue from there"
    )


def run(args: argparse.Namespace) -> None:
    """``kvpass perplexity``."""
    chosen = chosen_schemes(args.schemes)
    model, tokenizer = models.load(args.model, say=say)
    ids = texts.whole(tokenizer, args.text) if args.tokens is None else texts.tokens(tokenizer, args.text, args.tokens)
    ids = ids.to(model.device)
    with stage(f"{args.text}: {ids.shape[1]:,} tokens in windows of {args.context:,}, {', '.join(chosen)}"):
        found = perplexities(model, ids, chosen, args.context, args.stride, file=args.resume)
    print("cache".ljust(24) + f"{'perplexity':>12}{'of full precision':>24}")
    for name, one in found.items():
        ratio, error = one.ratio(found[FULL])
        print(f"{name:<24}{one.value:>12.3f}{f'{ratio:.4f} ± {error:.4f}':>24}")

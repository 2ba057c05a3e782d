"""``kvpass recommend``: the best scheme within a budget of bits."""

import argparse

from .. import models
from ..eval.budget import SHORT_LIST, recommend
from ..eval.tables import QUALITY, aligned
from .shared import TEXTS, add_tokens, at_least, names, prompt_tokens, read_texts, say, stage

HELP = "Measure a short list of schemes within a bit budget, and print the best one with its evidence."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``kvpass recommend``."""
    parser.add_argument("--bits", type=at_least(0, float), required=True, metavar="B", help="maximum bits per value")
    parser.add_argument(
        "--at",
        type=at_least(1),
        default=32768,
        metavar="N",
        help="cache length in tokens at which they count; default 32768",
    )
    parser.add_argument("--text", default="prose,code", help=TEXTS)
    parser.add_argument(
        "--schemes", default=",".join(SHORT_LIST), help=f"schemes to consider; default {', '.join(SHORT_LIST)}"
    )
    parser.add_argument(
        "--most",
        type=at_least(1),
        default=6,
        metavar="N",
        help="measure at most N schemes on all tokens: those that do best on some of them",
    )
    add_tokens(parser)


def run(args: argparse.Namespace) -> None:
    """``kvpass recommend``."""
    prompt = prompt_tokens(args.context, args.score)
    model, tokenizer = models.load(args.model, say=say)
    sources = read_texts(tokenizer, args.text, args.context, model.device)
    with stage(
        f"Schemes of at most {args.bits:g} bits per value at {args.at:,} tokens, scored on {args.score} tokens of "
        f"{', '.join(sources)}"
    ):
        found = recommend(model, sources, prompt, args.bits, at=args.at, schemes=names(args.schemes), most=args.most)
    bits = (f"bits at {args.at:,}", lambda row: f"{found.bits[row.scheme]:.2f}")
    print(aligned(found.rows, [bits, *QUALITY]))
    for name, why in found.refused.items():
        print(f"{name} cannot be used on this model: {why}")
    if found.dropped:
        behind = ", ".join(f"{name} {kl:.4f}" for name, kl in found.dropped.items())
        print(f"Eliminated after some of the tokens, with their mean KL so far: {behind}")
    print(f"\n{found}")

"""``kvpass needle``: passkey retrieval."""

import argparse
import json

from .. import models
from ..eval import texts
from ..eval.retrieval import retrieve
from .shared import SCHEMES, TEXT, at_least, chosen_schemes, names, numbers, out_file, say, stage

HELP = "Hide a number in a text and ask for it: exact matches by length and depth. For instruct models."


def _depths(text: str) -> list[float]:
    found = [at_least(0, float)(part) for part in names(text)]
    if not found or max(found) > 1:
        raise argparse.ArgumentTypeError(f"{text!r}: 0 is the beginning of the text, 1 its end")
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``kvpass needle``."""
    parser.add_argument("--schemes", default="kivi,squat", help=SCHEMES)
    parser.add_argument("--text", default="prose", help=f"filler: {TEXT}")
    parser.add_argument("--lengths", type=numbers, default="512,1024,2048", metavar="N,...", help="tokens of the text")
    parser.add_argument("--depths", type=_depths, default="0,0.5,1", metavar="X,...", help="0: beginning, 1: end")
    parser.add_argument(
        "--repeats", type=at_least(1), default=2, metavar="N", help="hide different numbers at each place"
    )
    parser.add_argument("--json", type=out_file, metavar="FILE", help="write all answers")


def run(args: argparse.Namespace) -> None:
    """``kvpass needle``."""
    chosen = chosen_schemes(args.schemes)
    model, tokenizer = models.load(args.model, say=say)
    filler = texts.tokens(tokenizer, args.text, max(args.lengths))
    questions = len(args.lengths) * len(args.depths) * args.repeats
    with stage(f"{questions} questions for {', '.join(chosen)}"):
        results = retrieve(model, tokenizer, filler, chosen, args.lengths, args.depths, repeats=args.repeats)
    places = [(length, depth) for length in args.lengths for depth in args.depths]
    print("cache".ljust(24) + "".join(f"{f'{length} at {depth:g}':>13}" for length, depth in places) + f"{'all':>8}")
    for name, rows in results.items():
        right = [sum(row.right for row in rows if (row.length, row.depth) == place) for place in places]
        cells = "".join(f"{f'{count}/{args.repeats}':>13}" for count in right)
        print(f"{name:<24}{cells}{sum(right) / questions:>8.0%}")
    if args.json:
        answers = {name: [{**vars(row), "right": row.right} for row in rows] for name, rows in results.items()}
        args.json.write_text(json.dumps(answers, indent=1) + "\n", encoding="utf-8")

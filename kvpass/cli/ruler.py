"""``kvpass ruler``: generated tasks after RULER."""

import argparse
import json
import statistics

from .. import models
from ..eval import texts
from ..eval.synthetic import TASKS, run_ruler
from .shared import FULL, SCHEMES, TEXT, at_least, chosen_schemes, names, numbers, out_file, say, stage

HELP = "Needles, variable tracking and common words after RULER, by length. For instruct models."
_FAILS = 0.5  # a task that full precision scores less than this says nothing about a scheme


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``kvpass ruler``."""
    parser.add_argument("--schemes", default="kivi,kivi-4", help=SCHEMES)
    parser.add_argument("--tasks", default=",".join(TASKS), help=f"comma-separated, of {', '.join(TASKS)}")
    parser.add_argument("--text", default="prose", help=f"filler: {TEXT}")
    parser.add_argument("--lengths", type=numbers, default="4096,8192", metavar="N,...", help="tokens of the text")
    parser.add_argument("--repeats", type=at_least(1), default=4, metavar="N", help="texts per task and length")
    parser.add_argument("--json", type=out_file, metavar="FILE", help="write all answers")


def run(args: argparse.Namespace) -> None:
    """``kvpass ruler``."""
    chosen, tasks = chosen_schemes(args.schemes), names(args.tasks)
    model, tokenizer = models.load(args.model, say=say)
    filler = texts.tokens(tokenizer, args.text, max(args.lengths))
    with stage(f"{', '.join(tasks)} with {', '.join(chosen)}"):
        results = run_ruler(model, tokenizer, filler, chosen, tasks, args.lengths, repeats=args.repeats)
    for length in args.lengths:
        print(f"\n{length:,} tokens, {args.repeats} texts each: mean share of what was asked for\n")
        print("cache".ljust(24) + "".join(f"{task:>18}" for task in tasks))
        means = {
            name: [
                statistics.fmean(row.score for row in rows if (row.task, row.length) == (task, length))
                for task in tasks
            ]
            for name, rows in results.items()
        }
        for name, row in means.items():
            print(name.ljust(24) + "".join(f"{mean:>18.0%}" for mean in row))
        if failed := [task for task, mean in zip(tasks, means[FULL], strict=True) if mean < _FAILS]:
            print(f"\nFull precision itself fails at {', '.join(failed)}: these columns say nothing about a scheme.")
    if args.json:
        answers = {name: [{**vars(row), "score": row.score} for row in rows] for name, rows in results.items()}
        args.json.write_text(json.dumps(answers, indent=1) + "\n", encoding="utf-8")

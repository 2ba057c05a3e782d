"""``kvpass ruler``: generated tasks after RULER."""

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter

from .. import models
from ..eval import texts
from ..eval.synthetic import TASKS, Answer, run_ruler
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
        of_length = {name: [row for row in rows if row.length == length] for name, rows in results.items()}
        print(f"\n{length:,} tokens, {args.repeats} texts each: mean share of what was asked for\n")
        means = _print_means(of_length, tasks, attrgetter("score"), ">18.0%")
        print("\nKL of the next token (nats) within the answers of full precision\n")
        _print_means(of_length, tasks, attrgetter("kl"), ">18.4f")
        if failed := [task for task, mean in zip(tasks, means[FULL], strict=True) if mean < _FAILS]:
            print(f"\nFull precision itself fails at {', '.join(failed)}: the share says nothing about a scheme there.")
    if args.json:
        answers = {name: [{**vars(row), "score": row.score} for row in rows] for name, rows in results.items()}
        args.json.write_text(json.dumps(answers, indent=1) + "\n", encoding="utf-8")


def _print_means(
    results: Mapping[str, Sequence[Answer]], tasks: Sequence[str], figure: Callable[[Answer], float], form: str
) -> dict[str, list[float]]:
    """Print and return the mean ``figure`` of each scheme's answers, by task."""
    print("cache".ljust(24) + "".join(f"{task:>18}" for task in tasks))
    means = {
        name: [statistics.fmean(figure(row) for row in rows if row.task == task) for task in tasks]
        for name, rows in results.items()
    }
    for name, row in means.items():
        print(name.ljust(24) + "".join(f"{mean:{form}}" for mean in row))
    return means

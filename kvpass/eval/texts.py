"""Texts to measure on: texts that come with every Python (technical English and code; no download, the same tokens in
every run), files, and data sets of the Hugging Face hub."""

import sysconfig
from importlib import import_module
from importlib.metadata import metadata
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..errors import KVPassError

_MODULES = (
    "argparse", "dataclasses", "difflib", "doctest", "functools", "inspect",
    "mailbox", "pickle", "statistics", "tarfile", "threading", "typing",
)  # fmt: skip
_HUB = "hub:"
_MOST_CHARACTERS = 8_000_000  # read from a data set
_CHARACTERS_PER_TOKEN = 8  # generous, so that one tokenizer call is nearly always enough


def _prose() -> str:
    """The Python reference as ``help()`` prints it."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def _code() -> str:
    """Source code of some large modules of the standard library."""
    folder = Path(sysconfig.get_path("stdlib"))
    return "\n\n".join((folder / f"{name}.py").read_text(encoding="utf-8") for name in _MODULES)


def _modules() -> str:
    """Source code of other modules of the standard library, disjoint from `_code`."""
    folder = Path(sysconfig.get_path("stdlib"))
    return "\n\n".join((folder / name).read_text(encoding="utf-8") for name in _OTHER_MODULES)


def _manual() -> str:
    """The manual of IDLE, and the docstrings of sympy, which comes with torch: instructions, mathematics, examples with
    numbers."""
    folder = Path(sysconfig.get_path("stdlib")) / "idlelib"
    found = [(folder / name).read_text(encoding="utf-8") for name in _OF_IDLE if (folder / name).exists()]
    found[1:1] = [import_module(f"sympy.{name}").__doc__ or "" for name in _OF_SYMPY]
    import sympy

    found[1:1] = [getattr(sympy, name).__doc__ or "" for name in _DOCUMENTED]
    return "\n\n".join(text for text in found if text)


def _readme() -> str:
    """The descriptions of packages that kvpass depends on: lists, tables, commands, licences."""
    return "\n\n".join(str(metadata(name).get_payload() or "") for name in _PACKAGES)  # type: ignore[attr-defined]


def _stories() -> str:
    """Short stories, letters and dialogues written for kvpass, the last of them in six other languages."""
    return (Path(__file__).parent / "data" / "stories.txt").read_text(encoding="utf-8")


_BUILT_IN = {"prose": _prose, "code": _code}
_TO_CALIBRATE = {"modules": _modules, "manual": _manual, "readme": _readme, "stories": _stories}
_OTHER_MODULES = "ast.py", "asyncio/base_events.py", "unittest/mock.py", "ipaddress.py", "turtle.py"
_OF_IDLE = "README.txt", "HISTORY.txt", "NEWS.txt"
_DOCUMENTED = "Symbol", "Matrix", "solve", "simplify", "Integral", "Sum", "series", "FiniteSet", "Poly"
_OF_SYMPY = "combinatorics.permutations", "matrices", "stats", "geometry", "physics.units"
_PACKAGES = "transformers", "torch", "tqdm", "numpy", "safetensors", "tokenizers", "sympy", "huggingface_hub"


def _hub(source: str) -> str:
    """Rows of a data set, joined by blank lines, from the column "text" or else the first column of strings."""
    if find_spec("datasets") is None:
        raise KVPassError(f"Reading {source!r} needs the package datasets: pip install datasets, or pass a UTF-8 file.")
    from datasets import load_dataset

    name, config, split = (*source.removeprefix(_HUB).split(":"), "", "")[:3]
    try:
        rows = iter(load_dataset(name, config or None, split=split or "test", streaming=True))
        first: dict[str, Any] = next(rows, {})
        strings = [column for column, value in first.items() if isinstance(value, str)]
        if not strings:
            raise ValueError(f"its rows have no text, but {', '.join(first) or 'nothing'}")
        column = "text" if "text" in strings else strings[0]
        parts, count = [], 0
        for row in chain([first], rows):
            parts.append(row[column])
            count += len(row[column])
            if count > _MOST_CHARACTERS:
                break
    except (OSError, ValueError) as error:
        raise KVPassError(
            f"Cannot read the data set {source!r}: {str(error).strip().splitlines()[0]}. Write "
            "hub:dataset[:config[:split]]; the split is test if none is given."
        ) from error
    return "\n\n".join(parts)


def available() -> list[str]:
    """Names of the built-in texts."""
    return list(_BUILT_IN)


def to_calibrate() -> list[str]:
    """Names of the built-in texts for calibrating; they share nothing with the texts of `available`."""
    return list(_TO_CALIBRATE)


def read(source: str) -> str:
    """The text of ``source``: a name from `available`, the path of a UTF-8 file, or ``hub:dataset[:config[:split]]``.

    The last one is a data set of the Hugging Face hub (or a local folder) that `datasets` reads, up to 8 million
    characters of its rows. The built-in texts change a little from one Python version to the next. Raises `KVPassError`
    if the source cannot be read.
    """
    if source.startswith(_HUB):
        return _hub(source)
    built_in = _BUILT_IN | _TO_CALIBRATE
    try:
        return built_in[source]() if source in built_in else Path(source).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ImportError) as error:
        raise KVPassError(
            f"Cannot read the text {source!r}: {error}. Pass {' or '.join(map(repr, _BUILT_IN))}, a UTF-8 file, or "
            "hub:dataset[:config[:split]]."
        ) from error


def tokens(tokenizer: PreTrainedTokenizerBase, source: str, count: int) -> Tensor:
    """The first ``count`` tokens of a text, ``[1, count]`` int64. Raises `KVPassError` if it is shorter."""
    if count < 1:
        raise KVPassError(f"count={count}: ask for at least 1 token of text.")
    text = read(source)
    characters = count * _CHARACTERS_PER_TOKEN
    while True:
        ids = tokenizer(text[:characters], verbose=False)["input_ids"]
        if len(ids) > count or characters >= len(text):  # the end of a truncated text may have split a token
            break
        characters *= 2
    if len(ids) < count:
        raise KVPassError(
            f"The text {source!r} has {len(ids)} tokens, but {count} are needed: ask for fewer, or pass a longer file."
        )
    return torch.tensor([ids[:count]])


def whole(tokenizer: PreTrainedTokenizerBase, source: str) -> Tensor:
    """All tokens of a text, ``[1, N]`` int64."""
    return torch.tensor([tokenizer(read(source), verbose=False)["input_ids"]])

"""Real text that every Python carries: technical English and code. No download, the same tokens at every run."""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from .errors import KVPassError

_MODULES = (
    "argparse", "dataclasses", "difflib", "doctest", "functools", "inspect",
    "mailbox", "pickle", "statistics", "tarfile", "threading", "typing",
)  # fmt: skip
_CHARACTERS_PER_TOKEN = 8  # more than text needs, so that one tokenizer call is nearly always enough


def _prose() -> str:
    """The Python reference as ``help()`` shows it."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def _code() -> str:
    """Sources of some large modules of the standard library."""
    folder = Path(sysconfig.get_path("stdlib"))
    return "\n\n".join((folder / f"{name}.py").read_text(encoding="utf-8") for name in _MODULES)


_BUILT_IN = {"prose": _prose, "code": _code}


def available() -> list[str]:
    """Names of the built-in texts."""
    return list(_BUILT_IN)


def read(source: str) -> str:
    """The whole text of ``source``: a name from `available`, or the path of a UTF-8 file.

    The built-in texts change a little from one Python version to the next.
    """
    try:
        return _BUILT_IN[source]() if source in _BUILT_IN else Path(source).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ImportError) as error:
        raise KVPassError(
            f"Cannot read the text {source!r}: {error}. Pass {' or '.join(map(repr, _BUILT_IN))}, or a UTF-8 file."
        ) from error


def tokens(tokenizer: PreTrainedTokenizerBase, source: str, count: int) -> Tensor:
    """The first ``count`` tokens of a text, ``[1, count]`` int64. Raises `KVPassError` if it is shorter."""
    if count < 1:
        raise KVPassError(f"{count} tokens of text were asked for; ask for at least 1.")
    text = read(source)
    characters = count * _CHARACTERS_PER_TOKEN
    while True:
        ids = tokenizer(text[:characters], verbose=False)["input_ids"]
        if len(ids) > count or characters >= len(text):  # the last token of a cut text may be a cut token
            break
        characters *= 2
    if len(ids) < count:
        raise KVPassError(
            f"The text {source!r} has {len(ids)} tokens, {count} are needed: ask for fewer, or pass a file."
        )
    return torch.tensor([ids[:count]])

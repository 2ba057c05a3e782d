"""Which versions of torch kvpass works with: it relies on a few private APIs, which any release may change. And names
of kvpass that have changed, which work for one more version."""

import re
import warnings

from .errors import KVPassError

OLDEST, NEWEST = (2, 11), (2, 13)
"""The tested releases of torch, from and to. ``pyproject.toml`` has the same bounds."""


def check_torch(version: str) -> None:
    """Raise `KVPassError` if torch is too old, and warn if it is newer than the tested releases."""
    release = tuple(map(int, re.findall(r"\d+", version)[:2]))
    tested = " to ".join(".".join(map(str, bound)) for bound in (OLDEST, NEWEST))
    if release < OLDEST:
        raise KVPassError(f"torch {version} is too old: kvpass is tested with {tested}. Upgrade torch.")
    if release > NEWEST:
        warnings.warn(
            f"torch {version} is newer than the versions kvpass is tested with ({tested}) and may not work. `pytest "
            "tests/test_private_apis.py` in the kvpass repository shows what changed.",
            stacklevel=3,
        )


def warn_renamed(old: str, new: str) -> None:
    """Warn the caller's caller that ``old`` is now ``new``."""
    warnings.warn(f"{old} was renamed to {new}; the old name will be removed.", DeprecationWarning, stacklevel=3)

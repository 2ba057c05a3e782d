"""Which versions of torch kvpass works with: it relies on a few private APIs, which any release may change."""

import re
import warnings

from .errors import KVPassError

OLDEST, NEWEST = (2, 11), (2, 13)
"""The releases of torch that are tested, from and to. The bounds in ``pyproject.toml`` are these."""


def check_torch(version: str) -> None:
    """Raise `KVPassError` for a torch that is too old, and warn of one that is newer than what is tested."""
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

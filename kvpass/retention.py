"""Which tokens stay exact: a policy for any scheme, written as ``Recent(128)``, ``Sinks(4) + Recent(128)`` or
``LogSparse(32)``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from .codec.spec import check_integers
from .errors import KVPassError


@dataclass(frozen=True)
class Retention:
    """Exact tokens of a cache, for keys and values alike.

    window: the window is emptied by a page when it holds this many tokens.
    page_size: tokens that leave at a time; a multiple of the group size of per-channel keys.
    sinks: first tokens that never leave, on top of the window.
    keep: which tokens of the window stay, the most "recent" or a "log"-sparse choice.
    """

    window: int
    page_size: int
    sinks: int = 0
    keep: Literal["recent", "log"] = "recent"

    def __post_init__(self):
        check_integers(self, window=1, page_size=1, sinks=0)
        if self.page_size > self.window:
            raise KVPassError(f"page_size={self.page_size} tokens cannot leave a window of {self.window}.")

    @property
    def storage(self) -> dict:
        """The fields of a `CodecSpec` this policy decides."""
        residual = self.window - self.page_size
        return dict(page_size=self.page_size, residual=residual, sinks=self.sinks, keep=self.keep)


@dataclass(frozen=True)
class Sinks:
    """The first ``tokens`` tokens, to be added to a policy: ``Sinks(4) + Recent(128)``."""

    tokens: int

    def __add__(self, policy: Retention) -> Retention:
        return replace(policy, sinks=policy.sinks + self.tokens)


def Recent(tokens: int, page_size: int | None = None) -> Retention:
    """The newest tokens: ``page_size`` (all, if not given) leave when there are ``tokens``."""
    return Retention(tokens, page_size or tokens)


def LogSparse(window: int) -> Retention:
    """LogQuant's choice: of 3W tokens, every second one of the older 2W leaves, so W .. exact tokens thin out with
    distance. Between 2W and 3W - 1 tokens are exact."""
    return Retention(3 * window, window, keep="log")

"""Which tokens stay exact, and which stay at all: a policy for any scheme, written as ``Recent(128)``,
``Sinks(4) + Recent(128)``, ``LogSparse(32)``, ``HeavyHitter(256, recent=128)`` or ``StreamingLLM(4, recent=1020)``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ..errors import KVPassError
from ..fields import check_integer, check_integers, check_types, shown

_ROLLBACK = 16  # tokens that can be taken back after an eviction, as after a flush


@dataclass(frozen=True)
class Retention:
    """Exact tokens of a cache, for keys and values alike.

    window: the window is emptied by a page when it holds this many tokens.
    page_size: tokens that leave at a time; a multiple of the group size of per-channel keys.
    sinks: first tokens that never leave, on top of the window.
    keep: which tokens of the window stay, the most "recent" or a "log"-sparse choice.
    budget: packed tokens kept at most, a multiple of ``page_size``; None for all.
    evict: what leaves when there are more: the tokens with the least "attention", or the oldest ("age").
    shared: one choice for all heads and layers, by the attention of all.
    """

    window: int
    page_size: int
    sinks: int = 0
    keep: Literal["recent", "log"] = "recent"
    budget: int | None = None
    evict: Literal["attention", "age"] = "attention"
    shared: bool = False

    def __post_init__(self):
        check_types(self)
        check_integers(self, window=1, page_size=1, sinks=0)
        if self.page_size > self.window:
            raise KVPassError(f"page_size={self.page_size} tokens cannot leave a window of {self.window}.")

    @property
    def storage(self) -> dict:
        """The fields of a `CodecSpec` this policy decides."""
        residual = self.window - self.page_size
        storage = dict(page_size=self.page_size, residual=residual, sinks=self.sinks, keep=self.keep)
        if self.budget is None:
            return storage
        rollback = min(_ROLLBACK, self.page_size)
        return storage | dict(budget=self.budget, evict=self.evict, shared_eviction=self.shared, rollback=rollback)

    @property
    def most(self) -> int | None:
        """Tokens stored at most between two calls; None if there is no limit."""
        return None if self.budget is None else self.sinks + self.budget + self.window + _ROLLBACK


@dataclass(frozen=True)
class Sinks:
    """The first ``tokens`` tokens, to be added to a policy: ``Sinks(4) + Recent(128)``."""

    tokens: int

    def __post_init__(self):
        check_integer("sinks", self.tokens, 0)

    def __add__(self, policy: Retention) -> Retention:
        if not isinstance(policy, Retention):
            raise KVPassError(f"Sinks are added to a policy, Sinks(4) + Recent(128), not to {shown(policy)}.")
        return replace(policy, sinks=policy.sinks + self.tokens)


def Recent(tokens: int, page_size: int | None = None) -> Retention:
    """The newest tokens: ``page_size`` (all, if not given) leave when there are ``tokens``."""
    return Retention(tokens, tokens if page_size is None else page_size)


def LogSparse(window: int) -> Retention:
    """LogQuant's choice: of 3W tokens, every second one of the older 2W leaves, so W .. exact tokens thin out with
    distance. Between 2W and 3W - 1 tokens are exact."""
    check_integer("window", window, 1)
    return Retention(3 * window, window, keep="log")


def HeavyHitter(budget: int, recent: int, page_size: int = 32, shared: bool = False) -> Retention:
    """H2O (arXiv 2306.14048): the ``recent`` newest tokens, exact, and the ``budget`` others that were paid the most
    attention so far; the rest is evicted, ``page_size`` tokens at a time. Each KV head keeps its own, by the attention
    of its query heads, unless ``shared``."""
    for name, tokens, least in (("recent", recent, 0), ("page_size", page_size, 1)):
        check_integer(name, tokens, least)
    return Retention(recent + page_size, page_size, budget=budget, shared=shared)


def StreamingLLM(sinks: int, recent: int, exact: int = 32, page_size: int = 32) -> Retention:
    """StreamingLLM (arXiv 2309.17453): the first ``sinks`` and the ``recent`` newest tokens, of which the last
    ``exact`` are not packed; the rest is evicted, ``page_size`` tokens at a time."""
    for name, tokens, least in (("recent", recent, 0), ("exact", exact, 0), ("page_size", page_size, 1)):
        check_integer(name, tokens, least)
    if recent < exact or (recent - exact) % page_size:
        raise KVPassError(f"recent={recent} less exact={exact} must be a multiple of page_size={page_size}.")
    return Retention(exact + page_size, page_size, sinks, budget=recent - exact, evict="age", shared=True)


POLICIES = {
    "h2o": HeavyHitter(256, recent=224),
    "streaming-llm": StreamingLLM(4, recent=480),
}
"""Policies with a name: ``scheme="kivi+h2o"``. Both keep some 500 tokens."""

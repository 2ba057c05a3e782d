"""Which tokens are exact, which are packed, and which stay at all: written as ``Recent(128)``,
``Sinks(4) + Recent(128)``, ``LogSparse(32)``, ``HeavyHitter(256, recent=128)``, ``SnapKV(1024)``,
``StreamingLLM(4, recent=1020)`` or ``LogSparseEviction(64)``."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from ..errors import KVPassError
from ..fields import check_integer, check_integers, check_types, fields_alone, hash_once, shown

_ROLLBACK = 16
_MOST_TOKENS = 1 << 24  # their memory is allocated at once


@dataclass(frozen=True)
class Retention:
    """A retention policy: which tokens are exact, packed or evicted. The first ``sinks`` and the newest tokens are
    exact; those in between are packed a page at a time, and with a budget evicted. States with equal policies hold the
    same tokens.

    window: when the residual window holds this many tokens, one page of them is packed.
    page_size: tokens packed at a time, and written once; a multiple of group_size for per-channel keys.
    sinks: first tokens that always stay exact, in addition to the window.
    keep: which tokens of the window stay, the most "recent" or a "log"-sparse choice (then ``window`` is three times
        ``page_size``).
    budget: maximum number of packed tokens, a multiple of ``page_size``; None keeps all. Tokens beyond it are evicted
        `rollback` tokens after their page was due.
    evict: which tokens are evicted first: those with the lowest "attention" scores so far; those with the lowest
        scores by the "observed" queries, the last of each call, pooled over neighbours (`layout.eviction`); the oldest
        ("age"); or every second one whenever a page leaves the window ("log").
    shared: all heads and layers evict the same tokens, by the scores of all; otherwise each KV head has its own.
    span: in a layer with a sliding window, how many tokens a query sees, itself included; None for all. Whole pages
        behind the window are freed, `rollback` tokens late.
    rollback: tokens that `crop` can remove without loss after a page was packed; with a budget at most a page.
    """

    window: int
    page_size: int
    sinks: int = 0
    keep: Literal["recent", "log"] = "recent"
    budget: int | None = None
    evict: Literal["attention", "observed", "age", "log"] = "attention"
    shared: bool = False
    span: int | None = None
    rollback: int = field(default=_ROLLBACK, repr=False)

    def __post_init__(self) -> None:
        check_types(self)
        check_integers(self, window=1, page_size=1, sinks=0, rollback=0)
        if self.page_size > self.window:
            raise KVPassError(f"page_size={self.page_size} tokens do not fit into a window of {self.window}.")
        if max(self.sinks + self.ring_size, self.budget or 0) > _MOST_TOKENS:
            raise KVPassError(f"Windows, sinks and budgets hold at most {_MOST_TOKENS:,} tokens: use smaller ones.")
        if self.keep == "log" and self.residual != 2 * self.page_size:
            raise KVPassError(
                f"Log-sparse windows keep 2W tokens and move W at a time: residual={self.residual} must be twice "
                f"page_size={self.page_size}."
            )
        if self.budget is not None:
            self._check_eviction(self.budget)
        if self.span is not None:
            self._check_span(self.span)

    def _check_span(self, span: int) -> None:
        check_integers(self, span=1)
        if span - 1 + self.rollback < self.residual:
            raise KVPassError(
                f"span={span}: the {self.residual} newest tokens are exact, so no token of such a window is packed."
            )
        if self.keep != "recent" or self.evicts:
            raise KVPassError("A sliding window needs consecutive tokens: none may be evicted or thinned out.")

    def _check_eviction(self, budget: int) -> None:
        check_integers(self, budget=0)
        if budget % self.page_size or self.rollback > self.page_size:
            raise KVPassError(
                f"budget={budget} must be a multiple of page_size={self.page_size}, and rollback={self.rollback} at "
                "most page_size: tokens are evicted a page at a time."
            )
        if self.evict == "log" and not budget == self.page_size == self.residual:
            raise KVPassError(
                f"Log-sparse eviction keeps W of 2W tokens behind W newest ones: budget={budget}, page_size="
                f"{self.page_size} and residual={self.residual} must be equal."
            )
        if self.keep != "recent":
            raise KVPassError("Log-sparse windows and eviction are alternative retention policies: use one of them.")

    __hash__, __getstate__ = hash_once, fields_alone

    @property
    def evicts(self) -> bool:
        """Whether tokens are evicted beyond a budget."""
        return self.budget is not None

    @cached_property
    def residual(self) -> int:
        """Minimum number of exact tokens in the window."""
        return self.window - self.page_size

    @cached_property
    def ring_size(self) -> int:
        """Slots of the ring, which come after those of the sinks."""
        return self.window + self.rollback

    def packed(self, length: int) -> int:
        """Number of packed tokens if ``length`` tokens are stored: those at ``[sinks, sinks + packed)``."""
        return max(0, length - self.sinks - self.residual) // self.page_size * self.page_size

    def pages(self, length: int) -> int:
        """Pages in use if ``length`` tokens are stored."""
        return self.packed(length) // self.page_size

    def evicted(self, length: int) -> int:
        """How many of ``length`` stored tokens are evicted. Eviction is `rollback` tokens late, so that `crop` never
        needs an evicted token."""
        return 0 if self.budget is None else max(0, self.packed(length - self.rollback) - self.budget)

    def stored(self, length: int) -> int:
        """How many of ``length`` tokens remain stored."""
        return length - self.evicted(length)

    def hidden(self, length: int) -> int:
        """How many of the first of ``length`` stored tokens are behind the sliding window of every later query."""
        return 0 if self.span is None else max(0, length - self.span + 1)

    def freed(self, length: int) -> int:
        """How many tokens, in whole pages after the sinks, can be freed if ``length`` are stored: `crop` of `rollback`
        tokens needs none of them."""
        return max(0, self.hidden(length - self.rollback) - self.sinks) // self.page_size * self.page_size

    @property
    def most(self) -> int | None:
        """The most tokens that are stored between two calls; None if there is no limit."""
        if self.span is not None:
            return self.sinks + self.span - 1 + self.rollback + self.page_size
        return None if self.budget is None else self.sinks + self.budget + self.ring_size


@dataclass(frozen=True)
class Sinks:
    """The first ``tokens`` tokens, to be added to a policy: ``Sinks(4) + Recent(128)``."""

    tokens: int

    def __post_init__(self) -> None:
        check_integer("sinks", self.tokens, 0)

    def __add__(self, policy: Retention) -> Retention:
        if not isinstance(policy, Retention):
            raise KVPassError(
                f"Sinks are added to a retention policy, as in Sinks(4) + Recent(128), not to {shown(policy)}."
            )
        return replace(policy, sinks=policy.sinks + self.tokens)


def Recent(tokens: int, page_size: int | None = None) -> Retention:
    """Keep the newest tokens exact: once there are ``tokens`` of them, ``page_size`` (default: all) are packed."""
    return Retention(tokens, tokens if page_size is None else page_size)


def LogSparse(window: int) -> Retention:
    """LogQuant's policy: of 3W exact tokens, every second one of the older 2W is packed, so exact tokens get sparser
    with distance. Between 2W and 3W - 1 tokens are exact."""
    check_integer("window", window, 1)
    return Retention(3 * window, window, keep="log")


def HeavyHitter(budget: int, recent: int, page_size: int = 32, shared: bool = False) -> Retention:
    """H2O (arXiv 2306.14048): keep the ``recent`` newest tokens, exact, and the ``budget`` others with the most
    attention so far. The rest is evicted, ``page_size`` tokens at a time. Each KV head keeps its own tokens, by the
    attention of its query heads, unless ``shared``."""
    for name, tokens, least in (("recent", recent, 0), ("page_size", page_size, 1)):
        check_integer(name, tokens, least)
    rollback = min(_ROLLBACK, page_size)
    return Retention(recent + page_size, page_size, budget=budget, shared=shared, rollback=rollback)


def SnapKV(budget: int, recent: int = 32, page_size: int = 32, shared: bool = False) -> Retention:
    """SnapKV (arXiv 2404.14469): of a prompt, keep the ``recent`` newest tokens, exact, and the ``budget`` others with
    the most attention from the last 32 queries, after a maximum over 7 neighbours. What decoding adds is evicted down
    to the same budget, where the paper keeps all of it; its queries add to the scores."""
    return replace(HeavyHitter(budget, recent, page_size, shared), evict="observed")


def StreamingLLM(sinks: int, recent: int, exact: int = 32, page_size: int = 32) -> Retention:
    """StreamingLLM (arXiv 2309.17453): keep the first ``sinks`` and the ``recent`` newest tokens; the last ``exact`` of
    those are not packed. The rest is evicted, ``page_size`` tokens at a time."""
    for name, tokens, least in (("recent", recent, 0), ("exact", exact, 0), ("page_size", page_size, 1)):
        check_integer(name, tokens, least)
    if recent < exact or (recent - exact) % page_size:
        raise KVPassError(f"recent={recent} minus exact={exact} must be a multiple of page_size={page_size}.")
    window, budget, rollback = exact + page_size, recent - exact, min(_ROLLBACK, page_size)
    return Retention(window, page_size, sinks, budget=budget, evict="age", shared=True, rollback=rollback)


def LogSparseEviction(window: int) -> Retention:
    """LogQuant's choice of tokens with eviction instead of quantization (its table 2): of 3W tokens, every second one
    of the older 2W is evicted, so between 2W and 3W - 1 tokens stay, and up to `rollback` more. The newest W are
    exact."""
    check_integer("window", window, 1)
    rollback = min(_ROLLBACK, window)
    return Retention(2 * window, window, budget=window, evict="log", shared=True, rollback=rollback)


POLICIES = {
    "h2o": HeavyHitter(256, recent=224),
    "snapkv": SnapKV(448),
    "streaming-llm": StreamingLLM(4, recent=480),
    "log-sparse": LogSparseEviction(192),
}
"""Policies by name, for ``scheme="kivi+h2o"``. Each keeps about 500 tokens."""

"""Where a token is stored: in a sink slot, in a slot of the ring, or in a page. Index arithmetic on the host."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor

from .retention import Retention

LENGTH_OFFSET = 1 << 20
"""A cache of n tokens passes its length to a graph as the *shape* of a length tensor: a zero-stride view, n +
LENGTH_OFFSET long, of one int64 that holds n. The shape makes n a symbolic int (one graph for every length, slices
instead of masks); device kernels read the value. The offset keeps Dynamo from specializing on 0 and 1, and from
unifying n with other dims.
"""
SEEN_OFFSET = 2 * LENGTH_OFFSET
"""The offset for the number of tokens seen, including evicted ones; it differs, so that the two sizes never unify."""

WINDOW_OFFSET = 1 << 28
"""Added to `LENGTH_OFFSET` for the number of tokens that layers with a sliding window store, for the same reason."""

_NEVER = torch.iinfo(torch.int64).max


def length_tensor(n: int, device: torch.device | None = None, offset: int = LENGTH_OFFSET) -> Tensor:
    """The length tensor for ``n``: a zero-stride view, ``n + offset`` long, of one int64 that holds n. The device fills
    it, so that the host does not wait for a copy."""
    return torch.full((1,), n, dtype=torch.int64, device=device).expand(n + offset)


def length_of(length: Tensor, offset: int = LENGTH_OFFSET) -> int:
    """The length that a length tensor stands for; symbolic under tracing, never read from the device."""
    return length.shape[0] - offset


def offset_of(retention: Retention) -> int:
    """The offset of the length tensors of states with this retention policy."""
    return LENGTH_OFFSET if retention.span is None else LENGTH_OFFSET + WINDOW_OFFSET


def on_device(length: Tensor | None, n: int, device: torch.device) -> Tensor:
    """A tensor on ``device`` that holds ``n``: ``length tensor``, unless it is None or on another device."""
    return length if length is not None and length.device == device else length_tensor(n, device)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


class RecentLayout:
    """The newest tokens are exact; the oldest of these leave a page at a time."""

    def __init__(self, retention: Retention):
        self.retention = retention

    def page_tokens(self, first: int, last: int) -> Tensor:
        """The tokens of pages ``[first, last)``, in storage order."""
        size = self.retention.page_size
        return torch.arange(self.retention.sinks + first * size, self.retention.sinks + last * size)

    def in_pages(self, x: Tensor, first: int, last: int) -> Tensor:
        """The tokens of ``x`` ``[B, H, n, D]`` that are in pages ``[first, last)``, in storage order."""
        size = self.retention.page_size
        return x.narrow(2, self.retention.sinks + first * size, (last - first) * size) if last > first else x[:, :, :0]

    def exact(self, n: int) -> Tensor:
        """The exact tokens after the sinks, if ``n`` are stored, in token order."""
        return torch.arange(min(n, self.retention.sinks) + self.retention.packed(n), n)

    def slot(self, token: int) -> int:
        """The ring slot of ``token``."""
        sinks = self.retention.sinks
        return token if token < sinks else sinks + (token - sinks) % self.retention.ring_size

    def slots(self, tokens: Tensor) -> Tensor:
        """The ring slots of ``tokens``."""
        sinks = self.retention.sinks
        return torch.where(tokens < sinks, tokens, sinks + (tokens - sinks) % self.retention.ring_size)

    def packed_before(self, tokens: Tensor, page: int) -> Tensor:
        """Whether each of ``tokens``, none of them sinks, goes to a page before ``page``."""
        return (tokens - self.retention.sinks) // self.retention.page_size < page

    def overwritten(self, tokens: Tensor, stop: int) -> Tensor:
        """Whether a later one of the tokens ``[0, stop)`` takes the slot of each of ``tokens``."""
        return (tokens >= self.retention.sinks) & (tokens + self.retention.ring_size < stop)

    def token_order(self, n: int) -> Tensor | None:
        """The permutation that puts sinks, pages and window into token order; None if they are in that order."""
        return None

    def runs(self, first: int, stop: int) -> Iterator[tuple[int, int]]:
        """The slots of tokens ``[first, stop)``, as first slot and length of each run."""
        sinks, end = self.retention.sinks, self.retention.sinks + self.retention.ring_size
        while first < stop:
            slot = self.slot(first)
            count = min(stop - first, (sinks if first < sinks else end) - slot)
            yield slot, count
            first += count

    def read(self, ring: Tensor, n: int) -> Tensor:
        """The exact tokens after the sinks, if ``n`` are stored, in token order."""
        first = min(n, self.retention.sinks) + self.retention.packed(n)
        return _joined([ring.narrow(2, *run) for run in self.runs(first, n)] or [ring[:, :, :0]])

    def leaving(self, ring: Tensor, n: int, x: Tensor, first: int, last: int) -> Tensor:
        """The tokens of pages ``[first, last)``: those before ``n`` from the ring, the others from ``x``."""
        start, stop = (self.retention.sinks + page * self.retention.page_size for page in (first, last))
        parts = [ring.narrow(2, *run) for run in self.runs(start, min(stop, n))]
        new = max(start, n)
        return _joined([*parts, x.narrow(2, new - n, stop - new)] if stop > new else parts)

    def write(self, rings: Sequence[Tensor], n: int, xs: Sequence[Tensor]) -> None:
        """Store each of ``xs`` ``[B, H, S, D]`` as tokens ``[n, n + S)`` of its ring, leaving out tokens whose slot a
        later one takes."""
        tokens = xs[0].shape[2]
        sinks, stop = self.retention.sinks, n + tokens
        for first, end in ((n, min(stop, sinks)), (max(n, sinks, stop - self.retention.ring_size), stop)):
            for slot, count in self.runs(first, end):
                for ring, x in zip(rings, xs, strict=True):
                    ring[:, :, slot : slot + count] = x if count == tokens else x.narrow(2, first - n, count)
                first += count


@dataclass(frozen=True)
class Moves:
    """The moves of a log-sparse window, as far as they are known. Immutable: `extended` returns a new object, and
    nobody writes to its tensors, so that threads can share it. Token numbers start after the sinks.

    slot, page_of, next: ``[placed]``, for each token its ring slot, the page it goes to, and the token that takes its
        slot afterwards, or `_NEVER` if that is not known yet.
    pages: ``[N, W]``, the tokens of each page.
    exact, free: the exact tokens, oldest first, and the free slots, in the order they are taken.
    holder: ``[window]``, the token that took each slot last, or -1.
    """

    slot: Tensor
    page_of: Tensor
    next: Tensor
    pages: Tensor
    exact: Tensor
    free: Tensor
    holder: Tensor

    @classmethod
    def start(cls, size: int, window: int) -> Self:
        """3W tokens, all placed, none of them moved yet. ``size`` is W."""
        full, slots = 3 * size, torch.arange(window)
        slot, never = slots[:full], torch.full((full,), _NEVER)
        pages = torch.empty((0, size), dtype=torch.int64)
        return cls(slot, never, never, pages, slot, slots[full:], slots.where(slots < full, -1))

    @property
    def placed(self) -> int:
        """Number of tokens whose slot is known."""
        return len(self.slot)

    def extended(self, tokens: int) -> "Moves":
        """The moves with at least ``tokens`` tokens placed, and less than W more."""
        size, exact, free, holder = self.pages.shape[1], self.exact, self.free, self.holder.clone()
        pages, starts = [self.pages], range(self.placed, tokens, size)
        more = len(starts) * size
        slot = torch.cat([self.slot, torch.empty(more, dtype=torch.int64)])
        page_of, later = (torch.cat([known, torch.full((more,), _NEVER)]) for known in (self.page_of, self.next))
        for page, start in enumerate(starts, len(self.pages)):  # one compaction and the W tokens after it
            leaving, new = exact[1 : 2 * size : 2], torch.arange(start, start + size)
            pages.append(leaving[None])
            page_of[leaving] = page
            slots, free = torch.cat([free, slot[leaving]]).split([size, len(free)])
            held = holder[slots]
            later[held[held >= 0]] = new[held >= 0]
            slot[new], holder[slots] = slots, new
            exact = torch.cat([exact[: 2 * size : 2], exact[2 * size :], new])
        return Moves(slot, page_of, later, torch.cat(pages), exact, free, holder)


class LogSparseLayout(RecentLayout):
    """LogQuant (algorithm 1 of the paper): when there are 3W exact tokens, every second one of the older 2W goes to a
    page, so exact tokens get sparser with distance. W is the page size, and ``2 W`` the residual.

    The moves do not depend on data. They are computed once per retention, as far as any caller has needed. Every answer
    comes from a single `Moves`, and does not depend on how far that goes.
    """

    def __init__(self, retention: Retention):
        super().__init__(retention)
        self._size = retention.page_size
        self._moves = Moves.start(self._size, retention.ring_size)

    def _known(self, tokens: int) -> Moves:
        """At least all moves that are due if ``tokens`` tokens after the sinks are stored."""
        moves, need = self._moves, tokens + self._size
        if moves.placed < need:
            moves = self._moves = moves.extended(max(need, 2 * moves.placed))
        return moves

    def _at(self, tokens: Tensor, stop: int = 0) -> tuple[Moves, Tensor]:
        """Moves that cover ``tokens`` and ``[0, stop)``, and ``tokens`` counted from the end of the sinks."""
        behind = (tokens - self.retention.sinks).clamp_min(0)
        return self._known(max(stop, int(behind.max()) + 1 if behind.numel() else 0)), behind

    def page_tokens(self, first: int, last: int) -> Tensor:
        return self._known((last + 2) * self._size).pages[first:last].flatten() + self.retention.sinks

    def in_pages(self, x: Tensor, first: int, last: int) -> Tensor:
        return x.index_select(2, self.page_tokens(first, last).to(x.device))

    def exact(self, n: int) -> Tensor:
        behind = max(0, n - self.retention.sinks)
        page_of = self._known(behind).page_of[:behind]
        return (page_of >= self.retention.pages(n)).nonzero().flatten() + self.retention.sinks

    def slot(self, token: int) -> int:
        return int(self.slots(torch.tensor([token])))

    def slots(self, tokens: Tensor) -> Tensor:
        sinks = self.retention.sinks
        moves, behind = self._at(tokens)
        return torch.where(tokens < sinks, tokens, sinks + moves.slot[behind])

    def packed_before(self, tokens: Tensor, page: int) -> Tensor:
        moves, behind = self._at(tokens, (page + 2) * self._size)
        return moves.page_of[behind] < page

    def overwritten(self, tokens: Tensor, stop: int) -> Tensor:
        moves, behind = self._at(tokens, stop)
        return (tokens >= self.retention.sinks) & (moves.next[behind] < stop - self.retention.sinks)

    def token_order(self, n: int) -> Tensor | None:
        sinks = torch.arange(min(n, self.retention.sinks))
        return torch.cat([sinks, self.page_tokens(0, self.retention.pages(n)), self.exact(n)]).argsort()

    def _select(self, ring: Tensor, tokens: Tensor) -> Tensor:
        return ring.index_select(2, self.slots(tokens).to(ring.device))

    def read(self, ring: Tensor, n: int) -> Tensor:
        return self._select(ring, self.exact(n))

    def leaving(self, ring: Tensor, n: int, x: Tensor, first: int, last: int) -> Tensor:
        tokens, device = self.page_tokens(first, last), ring.device
        known = tokens < n
        if not known.any():
            return x.index_select(2, (tokens - n).to(device))
        out = x.new_empty((*x.shape[:2], len(tokens), x.shape[3]))
        out[:, :, known.to(device)] = self._select(ring, tokens[known])
        out[:, :, ~known.to(device)] = x.index_select(2, (tokens[~known] - n).to(device))
        return out

    def write(self, rings: Sequence[Tensor], n: int, xs: Sequence[Tensor]) -> None:
        stop = n + xs[0].shape[2]
        tokens = torch.arange(n, stop)
        tokens = tokens[~self.overwritten(tokens, stop)]
        for ring, x in zip(rings, xs, strict=True):
            ring.index_copy_(2, self.slots(tokens).to(ring.device), x.index_select(2, (tokens - n).to(x.device)))


@dataclass(frozen=True)
class Writes:
    """How far a ring was written: which of its tokens have lost their slots. Cropped tokens are written again, and only
    later writes count from then on.

    spans: pairs of ``first`` and ``stop``, with ``first`` ascending and ``stop`` descending: since the tokens from
        ``first`` on were written, tokens up to ``stop`` have been written.
    packed: tokens of earlier pages are not in the ring, whatever was written.
    """

    spans: tuple[tuple[int, int], ...] = ()
    packed: int = 0

    def _with(self, spans: Iterable[tuple[int, int]], packed: int) -> "Writes":
        kept: list[tuple[int, int]] = []
        for first, stop in spans:
            while kept and kept[-1][0] >= first:
                kept.pop()
            if not kept or kept[-1][1] > stop:
                kept.append((first, stop))
        return Writes(tuple(kept), packed)

    @lru_cache(maxsize=16)  # noqa: B019  # the states of all layers ask the same
    def wrote(self, start: int, stop: int, packed: int) -> "Writes":
        """The writes after storing tokens ``[start, stop)``; ``packed`` is the number of pages in use at length
        ``start``."""
        older = [(first, max(end, stop)) for first, end in self.spans if first < start]
        return self._with([*older, (start, stop)], min(self.packed, packed))

    def evicted(self, gone: int, packed: int) -> "Writes":
        """The writes after ``gone`` tokens before page ``packed`` were dropped and later ones moved up."""
        return self._with([(max(0, a - gone), b - gone) for a, b in self.spans], max(self.packed, packed))

    def freed(self, gone: int, pages: int) -> "Writes":
        """The writes after the first ``gone`` tokens after the sinks, which filled ``pages`` pages, were freed."""
        return self._with([(max(0, a - gone), b - gone) for a, b in self.spans], max(0, self.packed - pages))

    def lost(self, tokens: Tensor, where: "RecentLayout") -> Tensor:
        """Whether each of ``tokens``, none of them sinks, is no longer in the ring."""
        gone = where.packed_before(tokens, self.packed)
        for (first, stop), (after, _) in pairwise([*self.spans, (_NEVER, 0)]):
            gone |= (tokens >= first) & (tokens < after) & where.overwritten(tokens, stop)
        return gone


@cache
def layout(retention: Retention) -> RecentLayout:
    """The layout for a retention policy."""
    return LogSparseLayout(retention) if retention.keep == "log" else RecentLayout(retention)


@lru_cache(maxsize=64)
def ring_tokens(retention: Retention, n: int, device: torch.device | None = None) -> Tensor:
    """The token in each of the ``sinks + ring_size`` slots, if ``n`` are stored; -1 for slots without an exact
    token."""
    held = torch.full((retention.sinks + retention.ring_size,), -1)
    tokens = torch.cat([torch.arange(min(n, retention.sinks)), layout(retention).exact(n)])
    held[layout(retention).slots(tokens)] = tokens
    return held.to(device)

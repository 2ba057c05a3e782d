"""Where a token lives: in a sink slot, in a slot of the ring, or in a page. Index arithmetic on the host."""

from collections.abc import Iterator
from functools import cache, lru_cache

import torch
from torch import Tensor

from .spec import CodecSpec

LENGTH_OFFSET = 1 << 20
"""A cache of n tokens hands its length to a graph as the *shape* of a zero-stride view, n + LENGTH_OFFSET long, of one
int64 that holds n. The shape makes n a symbolic int (one graph for every length, slices instead of masks); the value
is there for device kernels. The offset keeps 0 and 1 from being specialised and n from being unified with other dims.
"""
SEEN_OFFSET = 2 * LENGTH_OFFSET
"""The same for tokens seen, of which some may have been evicted: it is never the other's size."""

_NEVER = torch.iinfo(torch.int64).max


def carry(n: int, device: torch.device | None = None, offset: int = LENGTH_OFFSET) -> Tensor:
    """The carrier of length ``n``: a zero-stride view, ``n + offset`` long, of one int64 that holds n."""
    return torch.tensor([n], device=device).expand(n + offset)


def length_of(carrier: Tensor, offset: int = LENGTH_OFFSET) -> int:
    """The length a carrier has; symbolic under tracing, never a device read."""
    return carrier.shape[0] - offset


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


class Recent:
    """The newest tokens are exact; the oldest of them leave, a page at a time."""

    def __init__(self, spec: CodecSpec):
        self.spec = spec

    def page_tokens(self, first: int, last: int) -> Tensor:
        """The tokens of pages ``[first, last)``, in storage order."""
        size = self.spec.page_size
        return torch.arange(self.spec.sinks + first * size, self.spec.sinks + last * size)

    def in_pages(self, x: Tensor, first: int, last: int) -> Tensor:
        """Those of the tokens ``[B, H, n, D]`` that are in pages ``[first, last)``, in storage order."""
        size = self.spec.page_size
        return x.narrow(2, self.spec.sinks + first * size, (last - first) * size) if last > first else x[:, :, :0]

    def exact(self, n: int) -> Tensor:
        """The exact tokens behind the sinks once ``n`` are stored, in token order."""
        return torch.arange(min(n, self.spec.sinks) + self.spec.packed(n), n)

    def slot(self, token: int) -> int:
        """The ring slot of ``token``."""
        sinks = self.spec.sinks
        return token if token < sinks else sinks + (token - sinks) % self.spec.window

    def slots(self, tokens: Tensor) -> Tensor:
        """The ring slots of ``tokens``."""
        sinks = self.spec.sinks
        return torch.where(tokens < sinks, tokens, sinks + (tokens - sinks) % self.spec.window)

    def page_of(self, tokens: Tensor) -> Tensor:
        """The page that ``tokens`` behind the sinks go to."""
        return (tokens - self.spec.sinks) // self.spec.page_size

    def overwritten(self, tokens: Tensor, stop: int) -> Tensor:
        """Whether, of tokens ``[0, stop)``, a later one takes the slot of each of ``tokens``."""
        return (tokens >= self.spec.sinks) & (tokens + self.spec.window < stop)

    def token_order(self, n: int) -> Tensor | None:
        """The permutation that puts sinks, pages and window into token order; None where they are."""
        return None

    def runs(self, first: int, stop: int) -> Iterator[tuple[int, int]]:
        """The slots in which tokens ``[first, stop)`` lie, as the first slot and the length of each run."""
        sinks, end = self.spec.sinks, self.spec.sinks + self.spec.window
        while first < stop:
            slot = self.slot(first)
            count = min(stop - first, (sinks if first < sinks else end) - slot)
            yield slot, count
            first += count

    def read(self, ring: Tensor, n: int) -> Tensor:
        """The exact tokens behind the sinks once ``n`` are stored, in token order."""
        first = min(n, self.spec.sinks) + self.spec.packed(n)
        return _joined([ring.narrow(2, *run) for run in self.runs(first, n)] or [ring[:, :, :0]])

    def leaving(self, ring: Tensor, n: int, x: Tensor, first: int, last: int) -> Tensor:
        """The tokens of pages ``[first, last)``, of which those before ``n`` are in the ring, others in ``x``."""
        start, stop = (self.spec.sinks + page * self.spec.page_size for page in (first, last))
        parts = [ring.narrow(2, *run) for run in self.runs(start, min(stop, n))]
        new = max(start, n)
        return _joined([*parts, x.narrow(2, new - n, stop - new)] if stop > new else parts)

    def write(self, ring: Tensor, n: int, x: Tensor) -> None:
        """Store ``x`` ``[B, H, S, D]`` as tokens ``[n, n + S)``; those whose slot is taken again are left out."""
        sinks, stop = self.spec.sinks, n + x.shape[2]
        for first, end in ((n, min(stop, sinks)), (max(n, sinks, stop - self.spec.window), stop)):
            for slot, count in self.runs(first, end):
                ring[:, :, slot : slot + count] = x[:, :, first - n : first - n + count]
                first += count


class LogSparse(Recent):
    """LogQuant (algorithm 1 of the paper): when 3W exact tokens are reached, every second one of the older 2W goes
    to a page, so that exact tokens thin out with distance. W is the page size and ``2 W`` the residual.

    The stream of moves does not depend on data: it is simulated once per spec, as far as any caller has got.
    """

    @torch.inference_mode(False)  # made in any mode, updated in any other
    def __init__(self, spec: CodecSpec):
        super().__init__(spec)
        self._size, full = spec.page_size, 3 * spec.page_size
        self._placed, self._pages = full, []
        self._exact, self._free = torch.arange(full), torch.arange(full, spec.window)
        self._slot, self._page_of, self._next = torch.arange(full), *(torch.full((full,), _NEVER) for _ in range(2))
        self._holder = torch.arange(spec.window).where(torch.arange(spec.window) < full, -1)

    def _step(self) -> None:
        """One compaction, and the W tokens that follow it."""
        size, page = self._size, len(self._pages)
        leaving, new = self._exact[1 : 2 * size : 2], torch.arange(self._placed, self._placed + size)
        self._pages.append(leaving)
        self._page_of[leaving] = page
        self._free = torch.cat([self._free, self._slot[leaving]])
        slots, self._free = self._free[:size], self._free[size:]
        held = self._holder[slots]
        self._next[held[held >= 0]] = new[held >= 0]
        self._holder[slots] = new
        self._slot[new] = slots
        self._exact = torch.cat([self._exact[: 2 * size : 2], self._exact[2 * size :], new])
        self._placed += size

    @torch.inference_mode(False)
    def _simulate(self, tokens: int) -> None:
        """Go on until every move due once ``tokens`` tokens (behind the sinks) are stored is known."""
        if (need := tokens + 2 * self._size) > len(self._slot):
            more = max(need, 2 * len(self._slot)) - len(self._slot)
            self._slot = torch.cat([self._slot, torch.zeros(more, dtype=torch.int64)])
            self._page_of, self._next = (
                torch.cat([known, torch.full((more,), _NEVER)]) for known in (self._page_of, self._next)
            )
        while self._placed < tokens + self._size:
            self._step()

    def _look_up(self, table: str, tokens: Tensor, stop: int = 0) -> Tensor:
        """``table`` at ``tokens``, sinks aside, with the moves of ``[0, stop)`` known."""
        behind = (tokens - self.spec.sinks).clamp_min(0)
        self._simulate(max(stop, int(behind.max()) + 1 if behind.numel() else 0))
        return getattr(self, table)[behind]

    def page_tokens(self, first: int, last: int) -> Tensor:
        self._simulate((last + 2) * self._size)
        return torch.cat([torch.empty(0, dtype=torch.int64), *self._pages[first:last]]) + self.spec.sinks

    def in_pages(self, x: Tensor, first: int, last: int) -> Tensor:
        return x.index_select(2, self.page_tokens(first, last).to(x.device))

    def exact(self, n: int) -> Tensor:
        behind = max(0, n - self.spec.sinks)
        self._simulate(behind)
        return (self._page_of[:behind] >= self.spec.pages(n)).nonzero().flatten() + self.spec.sinks

    def slot(self, token: int) -> int:
        return int(self.slots(torch.tensor([token])))

    def slots(self, tokens: Tensor) -> Tensor:
        sinks = self.spec.sinks
        return torch.where(tokens < sinks, tokens, sinks + self._look_up("_slot", tokens))

    def page_of(self, tokens: Tensor) -> Tensor:
        return self._look_up("_page_of", tokens)

    def overwritten(self, tokens: Tensor, stop: int) -> Tensor:
        return (tokens >= self.spec.sinks) & (self._look_up("_next", tokens, stop) < stop - self.spec.sinks)

    def token_order(self, n: int) -> Tensor | None:
        sinks = torch.arange(min(n, self.spec.sinks))
        return torch.cat([sinks, self.page_tokens(0, self.spec.pages(n)), self.exact(n)]).argsort()

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

    def write(self, ring: Tensor, n: int, x: Tensor) -> None:
        tokens = torch.arange(n, n + x.shape[2])
        tokens = tokens[~self.overwritten(tokens, n + x.shape[2])]
        ring.index_copy_(2, self.slots(tokens).to(ring.device), x.index_select(2, (tokens - n).to(x.device)))


@cache
def layout(spec: CodecSpec) -> Recent:
    """The layout a spec asks for."""
    return LogSparse(spec) if spec.keep == "log" else Recent(spec)


@lru_cache(maxsize=64)
def ring_tokens(spec: CodecSpec, n: int, device: torch.device | None = None) -> Tensor:
    """The token that each of the ``sinks + window`` ring slots holds once ``n`` are stored, -1 where none is exact."""
    held = torch.full((spec.sinks + spec.window,), -1)
    tokens = torch.cat([torch.arange(min(n, spec.sinks)), layout(spec).exact(n)])
    held[layout(spec).slots(tokens)] = tokens
    return held.to(device)

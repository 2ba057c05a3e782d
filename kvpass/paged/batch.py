"""The requests of one step of a server: their new tokens, the pages that are due, and the blocks these are in.

A server keeps memory in blocks of a fixed number of tokens, and a block table for each request. Everything here is
arithmetic on whole vectors: neither this file nor its callers loop over requests or pages.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..layout.retention import Retention

_TILE = 64  # minimum number of a request's queries that are attended together
_SLACK = 1.25  # padded size over real size, at most


def ragged(counts: Tensor) -> tuple[Tensor, Tensor]:
    """For ``counts[i]`` items of each i, in a row: the owner of each item, and its index there, both ``[sum(counts)]``
    int64."""
    owner = torch.repeat_interleave(counts)
    first = counts.cumsum(0) - counts
    return owner, torch.arange(len(owner), device=counts.device) - first[owner]


def once(find: Callable[..., Any]) -> Callable[..., Any]:
    """Cache the results of a method of a batch by its arguments, because all layers of a step ask for the same."""

    @wraps(find)
    def get(batch: Any, *arguments: Any) -> Any:
        found = vars(batch).setdefault("_found", {})
        key = (find.__name__, *(id(one) if isinstance(one, tuple) else one for one in arguments))
        if key not in found:
            found[key] = find(batch, *arguments)
        return found[key]

    return get


class BlockTable(NamedTuple):
    """blocks: ``[R, n]`` int64, the blocks of each request. size: tokens, or slots, per block."""

    blocks: Tensor
    size: int

    def find(self, owner: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """The block of token (or slot) ``index`` of request ``owner``, and its place in that block."""
        return self.blocks[owner, index // self.size], index % self.size


class Due(NamedTuple):
    """Pages that leave the window, M of them.

    owner, first: ``[M]``, the request of each, and the first block of that request.
    page: ``[M]``, its number in the request.
    block, slot: ``[M]``, where the page is stored.
    tokens: block and place ``[M, P]`` of the page's tokens in the window.
    """

    owner: Tensor
    first: Tensor
    page: Tensor
    block: Tensor
    slot: Tensor
    tokens: tuple[Tensor, Tensor]


class Tiles(NamedTuple):
    """Queries that are attended together, in N tiles.

    owner: ``[N]``, the request of each tile.
    rows: ``[N, Q]``, indices of its tokens among all new ones; the last one is repeated as padding.
    positions: ``[N, Q]``, their positions in the request.
    """

    owner: Tensor
    rows: Tensor
    positions: Tensor


class Contexts(NamedTuple):
    """What N tiles of queries attend to.

    past, total: ``[N]``, tokens of their requests before this step, and with the new ones.
    first: ``[N]``, the position of their first query.
    packed, half: ``[N]``, numbers of pages whose keys and values are packed, and of those whose keys are.
    blocks, window: ``[N, n]``, blocks of their pages, and of their exact tokens.
    """

    past: Tensor
    first: Tensor
    total: Tensor
    packed: Tensor
    half: Tensor
    blocks: Tensor
    window: Tensor


class Rows(NamedTuple):
    """Requests that bring one token, B of them. Their pages are grouped into units of a few, M units in total.

    row: ``[B]``, indices of their tokens among all new ones. first: ``[B]``, their first blocks. length: ``[B]``, their
        tokens, including the new one.
    block, slot: ``[M, G]``, the pages of each unit whose keys and values are packed; the last one is repeated as
        padding.
    owner, pages: ``[M]``, the row that each unit belongs to, and its number of pages.
    units, counts: ``[U, B]`` and ``[B]``, the units of each row, and how many there are.
    half_block, half_slot: ``[B, X]``, pages of which only the keys are packed. half: ``[B]``, how many there are.
    tail_block, tail_place: ``[E, B]``, tokens after those pages, in the window. tail: ``[B]``, how many there are.

    Indices that are summed over come first in ``units`` and the tail, so that vectors run over channels.
    """

    row: Tensor
    first: Tensor
    length: Tensor
    block: Tensor
    slot: Tensor
    owner: Tensor
    pages: Tensor
    units: Tensor
    counts: Tensor
    half_block: Tensor
    half_slot: Tensor
    half: Tensor
    tail_block: Tensor
    tail_place: Tensor
    tail: Tensor


def at_least_two(x: Tensor) -> Tensor:
    """``x`` with at least two entries along its first dim, because varying dims of a compiled kernel must not be 1."""
    return x if len(x) > 1 else torch.cat([x, x])


@dataclass(frozen=True)
class Batch:
    """Requests of one step, R of them.

    start: ``[R + 1]`` int64, where each request's new tokens begin among all new ones.
    past, total: ``[R]`` int64, tokens stored before this step and after it.
    pages, window: block tables of pages, in slots, and of exact tokens.
    lead: slots of a request's first block that hold no page.
    most: the most new tokens of a request, if the host knows it. With 1, every request brings one, and no step waits
        for the device. Requests without any, which pad a batch, may come last; then so does padding of the new tokens.
    """

    start: Tensor
    past: Tensor
    total: Tensor
    pages: BlockTable
    window: BlockTable
    lead: int
    most: int | None = None

    @cached_property
    def new(self) -> tuple[Tensor, Tensor]:
        """The request of each new token, and its position: ``[T]`` each."""
        owner, index = ragged(self.total - self.past)
        return owner, self.past[owner] + index

    @cached_property
    def longest(self) -> int:
        """The most new tokens of a request."""
        return int((self.total - self.past).max()) if self.most is None else self.most

    @cached_property
    def in_window(self) -> tuple[Tensor, Tensor]:
        """The window block of each new token, and its place there: ``[T]`` each."""
        return self.window.find(*self.new)

    def page(self, owner: Tensor, page: Tensor) -> tuple[Tensor, Tensor]:
        """The block and the slot of pages ``page`` of requests ``owner``."""
        return self.pages.find(owner, page + self.lead)

    @once
    def sinks(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """The new tokens among the first ``count`` of their requests: their indices among all new ones, the first block
        of their request, and their position."""
        owner, positions = self.new
        rows = (positions < count).nonzero().flatten()
        return rows, self.pages.blocks[owner[rows], 0], positions[rows]

    @once
    def due(self, retention: Retention) -> Due:
        """The pages that leave the window in this step."""
        first = pages_of(self.past, retention)
        owner, page = ragged(pages_of(self.total, retention) - first)
        page = page + first[owner]
        within = torch.arange(retention.page_size, device=page.device)
        tokens = self.window.find(owner[:, None], retention.sinks + page[:, None] * retention.page_size + within)
        return Due(owner, self.pages.blocks[owner, 0], page, *self.page(owner, page), tokens)

    @cached_property
    def tiles(self) -> list[Tiles]:
        """All queries, in one list entry for requests that bring one token and one for requests that bring more."""
        if self.most == 1:
            owner = torch.arange(len(self.past), device=self.past.device)
            return [Tiles(owner, self.start[:-1, None], self.past[:, None])]
        new = self.total - self.past
        kinds = ((new == 1).nonzero().flatten(), (new > 1).nonzero().flatten())
        return [self._tiled(one, _tile_size(new[one])) for one in kinds if len(one)]

    def _tiled(self, requests: Tensor, size: int) -> Tiles:
        new = (self.total - self.past)[requests]
        which, tile = ragged((new + size - 1) // size)
        owner = requests[which]
        within = tile[:, None] * size + torch.arange(size, device=new.device)
        within = within.minimum(new[which, None] - 1)
        return Tiles(owner, self.start[owner, None] + within, self.past[owner, None] + within)

    @once
    def contexts(self, tiles: Tiles, key: Retention, value: Retention) -> Contexts:
        """The contexts of ``tiles``."""
        owner = tiles.owner
        past, tables = self.past[owner], (self.pages.blocks[owner], self.window.blocks[owner])
        first = tiles.positions[:, 0].contiguous()
        return Contexts(past, first, self.total[owner], pages_of(past, value), pages_of(past, key), *tables)

    @once
    def rows(self, tiles: Tiles, key: Retention, value: Retention, at_once: int) -> Rows:
        """`Rows` for ``tiles`` of one token each, with ``at_once`` pages per unit. Values never leave the window before
        keys."""
        owner, size, device = at_least_two(tiles.owner), key.page_size, tiles.owner.device
        past, total = self.past[owner], self.total[owner]
        packed, half = pages_of(past, value), pages_of(past, key)
        counts = (packed + at_once - 1) // at_once
        row, unit = ragged(counts)
        if len(row) < 2:  # padding, also if there are none; it belongs to no request
            row, unit = (torch.cat([one, one.new_zeros(2)])[:2] for one in (row, unit))
        pages = (packed[row] - unit * at_once).clamp(0, at_once)
        page = unit[:, None] * at_once + torch.arange(at_once, device=device)
        block, slot = self.page(owner[row, None], torch.minimum(page, (packed[row, None] - 1).clamp_min(0)))
        starts = (counts.cumsum(0) - counts)[:, None]
        units = starts + torch.arange(max(2, int(counts.max())), device=device)
        units = torch.minimum(units, starts + (counts[:, None] - 1).clamp_min(0)).clamp_max(len(row) - 1)
        extra = max(1, -(-(value.residual - key.residual) // size))
        page = packed[:, None] + torch.arange(extra, device=device)
        half_block, half_slot = self.page(owner[:, None], torch.minimum(page, (half[:, None] - 1).clamp_min(0)))
        begin = torch.minimum(total, key.sinks + packed * size)
        token = begin[:, None] + torch.arange(value.window, device=device)
        tail_block, tail_place = self.window.find(owner[:, None], torch.minimum(token, total[:, None] - 1))
        return Rows(
            at_least_two(tiles.rows[:, 0]), self.pages.blocks[owner, 0], total, block, slot, row, pages,
            units.T.contiguous(), counts,
            half_block, half_slot, half - packed, tail_block.T.contiguous(), tail_place.T.contiguous(), total - begin,
        )  # fmt: skip


def pages_of(length: Tensor, retention: Retention) -> Tensor:
    """`Retention.pages` of a vector of lengths."""
    return (length - retention.sinks - retention.residual).clamp_min(0) // retention.page_size


def _tile_size(new: Tensor) -> int:
    """The largest number of queries per tile that needs little padding, for requests that bring ``new`` tokens each."""
    most, total = int(new.max()), int(new.sum())
    best = size = min(_TILE, most)
    while size < most:
        size = min(2 * size, most)
        if int(((new + size - 1) // size).sum()) * size <= _SLACK * total:
            best = size
    return best

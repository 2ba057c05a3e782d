"""The requests of one step of a server: which tokens each brings, which pages are due, and in which blocks they lie.

A server keeps memory in blocks of a fixed number of tokens, and for each request a table of those that are its own. All
of this is arithmetic on whole vectors: nothing here, and nothing that uses it, loops over requests or pages.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..layout.retention import Retention

_TILE = 64  # queries of a request that are attended to together, at least
_SLACK = 1.25  # share of them that may be padding


def ragged(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Of ``counts[i]`` things of each i, in a row: whose each is, and which of them: ``[sum(counts)]`` int64 both."""
    owner = torch.repeat_interleave(counts)
    first = counts.cumsum(0) - counts
    return owner, torch.arange(len(owner), device=counts.device) - first[owner]


def once(find: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a batch that finds the same for the same arguments: all layers of a step ask for it."""

    @wraps(find)
    def get(batch: Any, *arguments: Any) -> Any:
        found = vars(batch).setdefault("_found", {})
        key = (find.__name__, *(id(one) if isinstance(one, tuple) else one for one in arguments))
        if key not in found:
            found[key] = find(batch, *arguments)
        return found[key]

    return get


class BlockTable(NamedTuple):
    """blocks: ``[R, n]`` int64, of each request. size: tokens, or slots, of a block."""

    blocks: Tensor
    size: int

    def find(self, owner: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """The block of the ``index``-th token, or slot, of request ``owner``, and its place there."""
        return self.blocks[owner, index // self.size], index % self.size


class Due(NamedTuple):
    """Pages that leave the window, M of them.

    owner, first: ``[M]``, the request of each, and its first block. block, slot: ``[M]``, where the page will lie.
    tokens: block and place ``[M, P]`` in the window of the tokens in it.
    """

    owner: Tensor
    first: Tensor
    block: Tensor
    slot: Tensor
    tokens: tuple[Tensor, Tensor]


class Tiles(NamedTuple):
    """Queries that are attended to together. owner: ``[N]``, the request of each tile. rows: ``[N, Q]``, its tokens
    among the new ones of all, and the last one again where there are no more. positions: ``[N, Q]``, in their
    requests."""

    owner: Tensor
    rows: Tensor
    positions: Tensor


class Rows(NamedTuple):
    """Requests that bring one token, B of them, and their pages in units of a few, M of all requests together.

    row: ``[B]``, their tokens among the new ones of all. first: ``[B]``, their first blocks. length: ``[B]``, their
        tokens, the new one among them.
    block, slot: ``[M, G]``, the pages of each unit whose keys and values are packed; the last one is repeated.
    owner, pages: ``[M]``, the row each unit belongs to, and how many pages it has.
    units, counts: ``[U, B]`` and ``[B]``, the units of each row, and how many there are.
    half_block, half_slot: ``[B, X]``, pages whose keys alone are packed. half: ``[B]``, how many there are.
    tail_block, tail_place: ``[E, B]``, the tokens behind those units, in the window. tail: ``[B]``, how many there are.

    What is summed up over its second index lies the other way round: vectors are then made of channels.
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
    """``x`` with two entries along its first dim, if it has one: dims of a compiled kernel that vary are not 1."""
    return x if len(x) > 1 else torch.cat([x, x])


@dataclass(frozen=True)
class Batch:
    """Requests of one step, R of them.

    start: ``[R + 1]`` int64, where the new tokens of each begin among those of all.
    past, total: ``[R]`` int64, tokens stored before this step, and once its own are.
    pages, window: where pages lie, by slots, and tokens that are exact.
    lead: slots of a request's first block that hold no page.
    """

    start: Tensor
    past: Tensor
    total: Tensor
    pages: BlockTable
    window: BlockTable
    lead: int

    @cached_property
    def new(self) -> tuple[Tensor, Tensor]:
        """Whose each new token is, and its position: ``[T]`` both."""
        owner, index = ragged(self.total - self.past)
        return owner, self.past[owner] + index

    @cached_property
    def in_window(self) -> tuple[Tensor, Tensor]:
        """Block of the window of each new token, and its place there: ``[T]`` both."""
        return self.window.find(*self.new)

    def page(self, owner: Tensor, page: Tensor) -> tuple[Tensor, Tensor]:
        """The block of pages of requests, and the slot there."""
        return self.pages.find(owner, page + self.lead)

    @once
    def sinks(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of those new tokens that are among the first ``count``: which they are of all new ones, the first block of
        their request, and their position."""
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
        return Due(owner, self.pages.blocks[owner, 0], *self.page(owner, page), tokens)

    @cached_property
    def tiles(self) -> list[Tiles]:
        """All queries: those of requests that bring one token, and those of requests that bring more."""
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
    def contexts(self, tiles: Tiles, key: Retention, value: Retention) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Of the requests of ``tiles``, which are of one token each: ``[N]`` tokens, pages whose keys and values are
        packed, and pages whose keys are; and the blocks of their pages, and of their windows, ``[N, n]``."""
        owner = tiles.owner
        past, tables = self.past[owner], (self.pages.blocks[owner], self.window.blocks[owner])
        return self.total[owner], pages_of(past, value), pages_of(past, key), *tables

    @once
    def rows(self, tiles: Tiles, key: Retention, value: Retention, at_once: int) -> Rows:
        """Those of ``tiles``, which are of one token each, with ``at_once`` pages in a unit. Values do not leave the
        window before keys."""
        owner, size, device = at_least_two(tiles.owner), key.page_size, tiles.owner.device
        past, total = self.past[owner], self.total[owner]
        packed, half = pages_of(past, value), pages_of(past, key)
        counts = (packed + at_once - 1) // at_once
        row, unit = ragged(counts)
        if len(row) < 2:  # of none too: they belong to nobody
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
    """`Retention.pages` of many lengths."""
    return (length - retention.sinks - retention.residual).clamp_min(0) // retention.page_size


def _tile_size(new: Tensor) -> int:
    """The most queries of a tile, of requests that bring ``new`` each, for which little of all is padding."""
    most, total = int(new.max()), int(new.sum())
    best = size = min(_TILE, most)
    while size < most:
        size = min(2 * size, most)
        if int(((new + size - 1) // size).sum()) * size <= _SLACK * total:
            best = size
    return best

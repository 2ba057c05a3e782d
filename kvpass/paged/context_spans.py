"""Contexts in a server's blocks, as spans of tokens with one layout, planned once per step for all layers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..layout.retention import Retention
from .batch import Batch, Tiles, once, pages_of

HIDDEN = -1e30
"""The score of hidden tokens: below all others, but finite, so that rows with only hidden tokens stay defined."""

_SMALL = 1024  # spans of up to this many tokens are joined


class Places(NamedTuple):
    """Where C tokens of A tiles are.

    block, place: ``[A, C]`` in the window; or first blocks ``[A, 1]`` and sinks ``[A, C]``; or blocks and slots of
    pages ``[A, C / P]``.
    page: of pages, their numbers in their requests ``[A, C / P]``.
    """

    kind: Literal["pages", "window", "sinks"]
    block: Tensor
    place: Tensor
    page: Tensor | None = None


@dataclass(frozen=True)
class Span:
    """C tokens of the context of each of A tiles, which are attended together.

    tiles: ``[A]``. first: ``[A]``, first blocks of their requests.
    parts: where keys and values are, part after part.
    mask: ``[A, 1, 1 or Q, C]`` float32, `HIDDEN` where a query does not see a token, otherwise 0; None if all see all.
    """

    tiles: Tensor
    first: Tensor
    parts: tuple[tuple[Places, Places], ...]
    mask: Tensor | None


class _Part(NamedTuple):
    """A part of a `Span`. seen: ``[A, 1 or Q, C]`` bool."""

    tiles: Tensor
    keys: Places
    values: Places
    seen: Tensor


@once
def spans(batch: Batch, tiles: Tiles, key: Retention, value: Retention, at_once: int) -> list[Span]:
    """The contexts of ``tiles``. Every token is in one span, and the first span covers all tiles. A span has at most
    ``at_once`` tokens over all its tiles, but at least one page of each."""
    found: list[Span] = []
    group: list[_Part] = []
    for part in _parts(batch, tiles, key, value, at_once):
        if group and (
            len(part.tiles) != len(group[0].tiles)  # parts with equally many tiles have the same tiles
            or sum(one.seen.shape[-1] for one in (*group, part)) * len(part.tiles) > _SMALL
        ):
            found.append(_joined(batch, tiles, group))
            group = []
        group.append(part)
    return [*found, _joined(batch, tiles, group)]


def _joined(batch: Batch, tiles: Tiles, parts: list[_Part]) -> Span:
    parts = sorted(parts, key=lambda part: part.seen.shape[1])  # partly visible parts last: kernels skip what is hidden
    queries = max(part.seen.shape[1] for part in parts)
    seen = torch.cat([part.seen.expand(-1, queries, -1) for part in parts], -1)
    mask = None if seen.all() else torch.where(seen, 0.0, HIDDEN).unsqueeze(1)
    some = parts[0].tiles
    first = batch.pages.blocks[tiles.owner[some], 0]
    return Span(some, first, tuple((part.keys, part.values) for part in parts), mask)


def _parts(batch: Batch, tiles: Tiles, key: Retention, value: Retention, at_once: int) -> Iterator[_Part]:
    """Sinks, exact tokens, tokens whose keys or values are in pages, and tokens of which both are. The first part
    covers all tiles, and every query sees some of it."""
    size, sinks, device = key.page_size, key.sinks, tiles.owner.device
    past, total = batch.past[tiles.owner], batch.total[tiles.owner]
    k_pages, v_pages = pages_of(past, key), pages_of(past, value)
    both, either = torch.minimum(k_pages, v_pages), torch.maximum(k_pages, v_pages)

    def pages(owner: Tensor, page: Tensor) -> Places:
        return Places("pages", *batch.page(owner[:, None], page), page)

    def exact(owner: Tensor, token: Tensor) -> Places:
        return Places("window", *batch.window.find(owner[:, None], token))

    if sinks:
        token = torch.arange(sinks, device=device)
        everyone = torch.arange(len(past), device=device)
        there = torch.minimum(token, total[:, None] - 1)  # missing tokens are hidden; their bytes are arbitrary
        where = Places("sinks", batch.pages.blocks[tiles.owner, :1], there)
        yield _Part(everyone, where, where, token <= tiles.positions[..., None])
    begin = torch.minimum(total, sinks + either * size)
    left = tiles.positions[:, -1] + 1 - begin  # no query sees tokens after the last one of its tile
    for start, count, some in _runs(left, at_once):
        token = begin[some, None] + start + torch.arange(count, device=device)
        seen = token[:, None] <= tiles.positions[some, :, None]
        where = exact(tiles.owner[some], torch.minimum(token, tiles.positions[some, -1:]))
        yield _Part(some, where, where, seen)
    some = (k_pages != v_pages).nonzero().flatten()
    if len(some):
        owner, last = tiles.owner[some], either[some, None]
        page = both[some, None] + torch.arange(int((either - both).max()), device=device)
        token = sinks + page[..., None] * size + torch.arange(size, device=device)
        seen = (page < last).repeat_interleave(size, 1)
        token = torch.where(seen, token.flatten(1), past[some, None] - 1)
        packed, unpacked = pages(owner, torch.minimum(page, last - 1)), exact(owner, token)
        keys_first = key.residual < value.residual
        yield _Part(some, *((packed, unpacked) if keys_first else (unpacked, packed)), seen[:, None])
    for start, count, some in _runs(both, max(1, at_once // size)):
        page = start + torch.arange(count, device=device)
        seen = (page < both[some, None]).repeat_interleave(size, 1)
        where = pages(tiles.owner[some], torch.minimum(page, both[some, None] - 1))
        yield _Part(some, where, where, seen[:, None])


def _runs(counts: Tensor, at_once: int) -> Iterator[tuple[int, int, Tensor]]:
    """Parts of ``counts[i]`` items of each tile i: the start of the part, its size at most, and the tiles that have
    some of it."""
    most, start = int(counts.max()), 0
    while start < most:
        some = (counts > start).nonzero().flatten()
        count = min(max(1, at_once // len(some)), most - start)
        yield start, count, some
        start += count

"""Page-relative RoPE: rotates the keys of a page as if its middle token stood at position 0.

The rotary embedding of the middle token is undone for all keys of the page. Keys stay rotated relative to each other by
their distance, and the statistics of a page do not depend on its position. A query is rotated back once per page. Of a
page's positions, only the rotation of its middle token has to be stored.

A mean that is subtracted from such keys is rotated as if the tokens of the page were consecutive. The rotations after
the middle mirror those before it. If tokens are not consecutive, the page is less well centred, but it is still read
correctly.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .rope import parse_rope, rotate, rotate_pairs


class PageTables(NamedTuple):
    """Rotary tables ``[B, P + N, p]`` for pages of P tokens: P consecutive tokens, then the middle tokens of N pages.

    rope: the text that describes the rotation (`codec.rope`).
    """

    cos: Tensor
    sin: Tensor
    rope: str


def middle(size: int) -> int:
    """Index of the middle token of a page of ``size`` tokens."""
    return size // 2


def rows(tokens: int, size: int) -> int:
    """Number of table rows for ``tokens`` tokens, packed or not. The last row may be for a page that has no tokens
    yet."""
    return size + tokens // size + 2


def _inverse(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Tables of the inverse rotation, which also undo the scaling of the tables."""
    norm = cos.square() + sin.square()
    return cos / norm, -sin / norm


def turned_back(x: Tensor, cos: Tensor, sin: Tensor, rope: str) -> Tensor:
    """Inverse of `codec.rope.rotate`; float32."""
    pairs, _ = parse_rope(rope)
    return rotate(x.float(), *_inverse(cos[..., :pairs].float(), sin[..., :pairs].float()), rope)


def _of_pages(page_tables: PageTables, first: int, count: int, size: int) -> tuple[Tensor, Tensor]:
    """Tables of the middles of ``count`` pages from ``first`` on, ``[B, count, p]`` float32."""
    pairs, start = parse_rope(page_tables.rope)[0], size + first
    cos, sin = (table[:, start : start + count, :pairs].float() for table in page_tables[:2])
    return cos, sin


def numbered(angles: Tensor, starts: Tensor, first: int, count: int, sinks: int, size: int) -> tuple[Tensor, Tensor]:
    """Rows ``[first, first + count)`` of page tables that are computed from token numbers: ``[B, count, p]`` float64.

    angles: ``[p]`` float32, the rotation of each channel pair from one token to the next, in radians.
    starts: ``[B, 1]`` int64, the number of padding tokens at the start.
    """
    row = torch.arange(first, first + count, device=angles.device)
    token = torch.where(row < size, row, sinks + (row - size) * size + middle(size) - starts)
    turned = token.double().unsqueeze(-1) * angles.double()
    return turned.cos(), turned.sin()


def to_page_rope(x: Tensor, page_tables: PageTables | None, first: int, size: int) -> Tensor:
    """Convert rotated keys ``[B, H, N * P, D]`` of pages from ``first`` on to page-relative RoPE; keeps the dtype."""
    if page_tables is None:
        return x
    cos, sin = _inverse(*_of_pages(page_tables, first, x.shape[2] // size, size))
    return rotate(x, cos.repeat_interleave(size, 1), sin.repeat_interleave(size, 1), page_tables.rope)


def from_page_rope(x: Tensor, page_tables: PageTables | None, first: int, size: int) -> Tensor:
    """Inverse of `to_page_rope`."""
    if page_tables is None:
        return x
    cos, sin = _of_pages(page_tables, first, x.shape[2] // size, size)
    return rotate(x, cos.repeat_interleave(size, 1), sin.repeat_interleave(size, 1), page_tables.rope)


def before_middle(page_tables: PageTables, size: int) -> tuple[Tensor, Tensor]:
    """Rotations of a page's tokens relative to its middle, up to the middle: tables ``[B, P / 2 + 1, p]`` float32."""
    at = middle(size)
    cos, sin = (table[:, : at + 1, : parse_rope(page_tables.rope)[0]].float() for table in page_tables[:2])
    return rotate_pairs(cos, sin, *_inverse(cos[:, at:], sin[:, at:]))


def neighbours(page_tables: PageTables, size: int) -> tuple[Tensor, Tensor]:
    """Rotations of all tokens of a page relative to its middle: tables ``[B, P, p]`` float32."""
    cos, sin = before_middle(page_tables, size)
    behind = slice(2 * middle(size) - size + 1, middle(size))
    return torch.cat([cos, cos[:, behind].flip(1)], 1), torch.cat([sin, -sin[:, behind].flip(1)], 1)


def mean_in_page(mean: Tensor, page_tables: PageTables | None, size: int) -> Tensor:
    """The mean of keys before rotary embedding, ``[B, H, 1, D]``, rotated for each token of a page: ``[B, H, P, D]``
    float32. Without page-relative RoPE (``page_tables`` is None) it is not rotated: ``[B, H, 1, D]``."""
    if page_tables is None:
        return mean.float()
    cos, sin = neighbours(page_tables, size)
    return rotate(mean.float().expand(len(cos), -1, size, -1), cos, sin, page_tables.rope)


def mean_of_tokens(mean: Tensor, page_tables: PageTables | None, size: int, tokens: int) -> Tensor:
    """`mean_in_page` for ``tokens`` tokens of whole pages: ``[B, H, tokens, D]``; ``[B, H, 1, D]`` without
    page-relative RoPE."""
    each = mean_in_page(mean, page_tables, size)
    return each if page_tables is None else each.repeat(1, 1, tokens // size, 1)


def before_rotation(x: Tensor, page_tables: PageTables | None, size: int) -> Tensor:
    """Undo page-relative RoPE of keys ``[B, H, N * P, D]``: keys before any rotation."""
    if page_tables is None:
        return x
    cos, sin = (table.repeat(1, x.shape[2] // size, 1) for table in neighbours(page_tables, size))
    return rotate(x.float(), cos, -sin, page_tables.rope)


def seen_from(q: Tensor, page_tables: PageTables, page: Tensor, size: int) -> Tensor:
    """Rotate queries ``[B, H, S, D]`` back by the page middle of ``page`` ``[S]``, one page per query.

    The queries have rotary embedding. The result can be multiplied with page-relative keys of that page.
    """
    at = size + page.to(page_tables.cos.device)
    cos, sin = (table.index_select(1, at) for table in page_tables[:2])
    return turned_back(q, cos, sin, page_tables.rope)


def store_page_tables(
    tables: Sequence[Tensor], given: Sequence[Tensor], length: Tensor, n: int, sinks: int, size: int
) -> None:
    """Store the rows of the rotary tables that page-relative RoPE needs in ``tables`` (the first two of `PageTables`).

    given: ``[B or 1, S, p]``, the rotary tables of tokens ``[n, n + S)``.
    length: holds ``n`` on the device, so a captured call is correct at every length but 0.
    sinks, size: number of sink tokens, and of tokens per page.

    The consecutive tokens are the last of the first call. If that call has fewer than a page, they are the first tokens
    stored.
    """
    (_, tokens, pairs), device = given[0].shape, length.device
    first, before = length[:1], max(0, tokens - size) if n == 0 else 0
    pages, neighbour = (torch.arange(count, device=device) for count in (tokens // size + 2, size))
    pages = pages + ((first - sinks) // size).clamp_min(0)
    index = torch.cat([neighbour, size + pages])
    at = torch.cat([neighbour - first + before, sinks + pages * size + middle(size) - first])
    if n == 0:
        for table in tables:
            table[:, :size] = 0
    old = [table[..., :pairs].index_select(1, index) for table in tables]
    free = torch.stack(old).eq(0).all(0).all(-1) | (index >= size)  # rows of consecutive tokens are written once
    taken = (free & (at >= 0) & (at < tokens)).unsqueeze(-1)
    for table, new, there in zip(tables, given, old, strict=True):
        rows_of_call = new.index_select(1, at.clamp(0, tokens - 1))
        table[..., :pairs].index_copy_(1, index, torch.where(taken, rows_of_call, there))

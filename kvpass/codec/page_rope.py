"""Keys with page-relative RoPE: turned back by the rotary embedding of the middle token of theirs.

Neighbours in a page stay turned against each other, as their distance says, and pages are alike wherever they are. A
query is turned once for a page, and what its middle was turned by is all that has to be known of a page's positions.

A mean that is subtracted in frames is turned as in a page whose tokens are at neighbouring positions, those behind the
middle as those before it, the other way. A page whose tokens are not is less well centred, and read right all the same.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .rope import parse_rope, rotate, rotate_pairs


class PageTables(NamedTuple):
    """Rotary tables ``[B, P + N, p]``, for pages of P tokens: those of P neighbours, and of the middles of N pages.

    rope: the text of the rotation (`codec.rope`).
    """

    cos: Tensor
    sin: Tensor
    rope: str


def middle(size: int) -> int:
    """Which token of a page its frame is that of."""
    return size // 2


def rows(tokens: int, size: int) -> int:
    """Rows that tables of ``tokens`` tokens, packed or not, have; the last may be of a page that has not begun."""
    return size + tokens // size + 2


def _inverse(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """What undoes a rotation, and whatever its tables are scaled by."""
    norm = cos.square() + sin.square()
    return cos / norm, -sin / norm


def turned_back(x: Tensor, cos: Tensor, sin: Tensor, rope: str) -> Tensor:
    """`codec.rope.rotate`, undone: float32."""
    pairs, _ = parse_rope(rope)
    return rotate(x.float(), *_inverse(cos[..., :pairs].float(), sin[..., :pairs].float()), rope)


def _of_tokens(page_tables: PageTables, first: int, tokens: int, size: int) -> tuple[Tensor, Tensor]:
    """The tables of the frames of ``tokens`` tokens in pages from ``first`` on."""
    start, count = size + first, tokens // size
    cos, sin = (table[:, start : start + count].repeat_interleave(size, 1) for table in page_tables[:2])
    return cos, sin


def numbered(angles: Tensor, starts: Tensor, first: int, count: int, sinks: int, size: int) -> tuple[Tensor, Tensor]:
    """Rows ``[first, first + count)`` of the tables of frames that go by the numbers of tokens, ``[B, count, p]``
    float64.

    angles: ``[p]`` float32, by how much each pair of channels is turned from a token to the next.
    starts: ``[B, 1]`` int64, the tokens before the first that counts: padding.
    """
    row = torch.arange(first, first + count, device=angles.device)
    token = torch.where(row < size, row, sinks + (row - size) * size + middle(size) - starts)
    turned = token.double().unsqueeze(-1) * angles.double()
    return turned.cos(), turned.sin()


def to_page_rope(x: Tensor, page_tables: PageTables | None, first: int, size: int) -> Tensor:
    """Keys ``[B, H, N * P, D]``, rotated, as pages from ``first`` on take them; in their dtype."""
    if page_tables is None:
        return x
    return turned_back(x, *_of_tokens(page_tables, first, x.shape[2], size), page_tables.rope).to(x.dtype)


def from_page_rope(x: Tensor, page_tables: PageTables | None, first: int, size: int) -> Tensor:
    """Inverse of `to_page_rope`."""
    if page_tables is None:
        return x
    return rotate(x, *_of_tokens(page_tables, first, x.shape[2], size), page_tables.rope)


def before_middle(page_tables: PageTables, size: int) -> tuple[Tensor, Tensor]:
    """How tokens of a page up to its middle are turned against it: tables ``[B, P / 2 + 1, p]`` float32."""
    at = middle(size)
    cos, sin = (table[:, : at + 1, : parse_rope(page_tables.rope)[0]].float() for table in page_tables[:2])
    return rotate_pairs(cos, sin, *_inverse(cos[:, at:], sin[:, at:]))


def neighbours(page_tables: PageTables, size: int) -> tuple[Tensor, Tensor]:
    """How all tokens of a page are turned against its middle: tables ``[B, P, p]`` float32."""
    cos, sin = before_middle(page_tables, size)
    behind = slice(2 * middle(size) - size + 1, middle(size))
    return torch.cat([cos, cos[:, behind].flip(1)], 1), torch.cat([sin, -sin[:, behind].flip(1)], 1)


def mean_in_page(mean: Tensor, page_tables: PageTables | None, size: int) -> Tensor:
    """A mean of keys before rotary embedding, ``[B, H, 1, D]``, as it is at each token of a page: ``[B, H, P, D]``
    float32; ``[B, H, 1, D]`` without frames."""
    if page_tables is None:
        return mean.float()
    cos, sin = neighbours(page_tables, size)
    return rotate(mean.float().expand(len(cos), -1, size, -1), cos, sin, page_tables.rope)


def mean_of_tokens(mean: Tensor, page_tables: PageTables | None, size: int, tokens: int) -> Tensor:
    """`mean_in_page` of as many tokens of whole pages: ``[B, H, tokens, D]``; ``[B, H, 1, D]`` without frames."""
    each = mean_in_page(mean, page_tables, size)
    return each if page_tables is None else each.repeat(1, 1, tokens // size, 1)


def before_rotation(x: Tensor, page_tables: PageTables | None, size: int) -> Tensor:
    """Tokens ``[B, H, N * P, D]`` with page-relative RoPE, as they would be without any turn."""
    if page_tables is None:
        return x
    cos, sin = (table.repeat(1, x.shape[2] // size, 1) for table in neighbours(page_tables, size))
    return rotate(x.float(), cos, -sin, page_tables.rope)


def seen_from(q: Tensor, page_tables: PageTables, page: Tensor, size: int) -> Tensor:
    """Queries ``[B, H, S, D]``, rotated, each as a key with page-relative RoPE, of ``page`` ``[S]``, sees it."""
    at = size + page.to(page_tables.cos.device)
    cos, sin = (table.index_select(1, at) for table in page_tables[:2])
    return turned_back(q, cos, sin, page_tables.rope)


def store_page_tables(
    tables: Sequence[Tensor], given: Sequence[Tensor], length: Tensor, n: int, sinks: int, size: int
) -> None:
    """Take from the rotary tables ``given``, ``[B or 1, S, p]``, of tokens ``[n, n + S)`` what frames need of them.

    Neighbours are the last tokens of the first call, or if it has not as many as a page, the first tokens there are.
    ``length`` holds ``n`` on the device: a captured call is right at all lengths but 0.
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
    free = torch.stack(old).eq(0).all(0).all(-1) | (index >= size)  # neighbours stay
    taken = (free & (at >= 0) & (at < tokens)).unsqueeze(-1)
    for table, new, there in zip(tables, given, old, strict=True):
        rows_of_call = new.index_select(1, at.clamp(0, tokens - 1))
        table[..., :pairs].index_copy_(1, index, torch.where(taken, rows_of_call, there))

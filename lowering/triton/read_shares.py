"""Reads pages with calibrated bit widths (`kvpass.codec.shares`) in kernels.

A page holds all heads of a layer, and the number of its fields varies by head. So kernels read a table of where the
fields of each coordinate are (`share_rows`), and put codes together from up to three pairs of bits and a single bit.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from kvpass.codec.transform_coding import PAIRS

_LEVELS: tl.constexpr = tl.constexpr(PAIRS)
LINES = tl.constexpr(PAIRS + 2)
"""Lines of the table of a rank: where the pairs of each level are, where single bits are, and four numbers: bytes per
row of pairs, of single bits and of gains, and where the gains of the head are."""


class PagesOfHead(NamedTuple):
    """Pages of a KV head with calibrated bit widths.

    bytes, marks: pointers to the pages of the sample, and to the head's column of their masks.
    size: bytes per page.
    places: pointer to the table of the head.
    heads: bytes per row of masks.
    """

    bytes: tl.tensor
    size: tl.tensor
    places: tl.tensor
    marks: tl.tensor
    heads: tl.constexpr


@triton.jit
def marks_of(pages, page, row, there):
    """The bytes in ``row`` of the masks of high-precision tokens of each ``page``; 0 where a page is not ``there``."""
    at = page[:, None] * pages.size + row * pages.heads
    return tl.load(pages.marks + at, mask=there[:, None], other=0)


@triton.jit
def gains_of(pages, page, token, there, RANK: tl.constexpr, WIDTH: tl.constexpr):
    """Stored gains of each ``token`` of a rank of its ``page``; other bytes of the page where the head has no bits and
    codes are 0."""
    numbers = pages.places + (RANK * LINES + LINES - 1) * WIDTH
    row, start = tl.load(numbers + 2), tl.load(numbers + 3)
    return tl.load(pages.bytes + (page * pages.size + start + token * row), mask=there, other=0)


@triton.jit
def _plane(word, pairs, PLANE: tl.constexpr):
    """Codes in a plane of ``word``: the bytes of three pairs of bits and of a single bit, which is the highest bit of a
    code with ``pairs`` pairs."""
    code = word >> (24 + 2 * PLANE) & 1
    code = code << 2 * pairs
    for level in tl.static_range(_LEVELS):
        code |= (word >> (8 * level + 2 * PLANE) & 3) << 2 * level
    return code.to(tl.float32)


@triton.jit
def codes_of(pages, first, page, line, there, RANK: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Codes minus their midpoints, by plane: four tiles ``[rows, coordinates]``. They are exact in 16 bits.

    first, page, line: the first page of the tile, and for each row its page after that and its line, of ``ROWS``.
    there: ``[rows, 1]``, whether the page exists.
    """
    table, column = pages.places + RANK * LINES * WIDTH, tl.arange(0, WIDTH)
    numbers = table + (LINES - 1) * WIDTH
    start = (first + page) * pages.size  # depends on the loop, so that no offset of a tile stays in a register
    single = tl.load(table + _LEVELS * WIDTH + column)
    later, short = line // (ROWS // 2), line % (ROWS // 2)  # a plane of pairs is two planes of single bits
    at = (start + short * tl.load(numbers + 1))[:, None] + single[None, :]
    word = tl.load(pages.bytes + at, mask=there & (single >= 0)[None, :], other=0).to(tl.int32) >> later[:, None] << 24
    at, pairs = (start + line * tl.load(numbers))[:, None], (single < 0).to(tl.int32) * 0
    for level in tl.static_range(_LEVELS):
        place = tl.load(table + level * WIDTH + column)
        byte = tl.load(pages.bytes + (at + place[None, :]), mask=there & (place >= 0)[None, :], other=0)
        word |= byte.to(tl.int32) << 8 * level
        pairs += (place >= 0).to(tl.int32)
    pairs, bits = pairs[None, :], 2 * pairs + (single >= 0).to(tl.int32)
    middle = (tl.exp2(bits.to(tl.float32)) - 1)[None, :] * 0.5
    return (
        _plane(word, pairs, 0) - middle, _plane(word, pairs, 1) - middle, _plane(word, pairs, 2) - middle,
        _plane(word, pairs, 3) - middle,
    )  # fmt: skip


@triton.jit
def share_rows(
    basis, widths, share, steps, rows, places, own, DIM: tl.constexpr, SIZE: tl.constexpr, HEADS: tl.constexpr,
    WIDTH: tl.constexpr, PAGE: tl.constexpr, RANKS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Write the table of where fields are to ``places`` ``[BH, ranks, LINES, WIDTH]`` int32, offsets in a page, -1
    where there is none; and the contribution of each coordinate to the channels of a token, per unit of code and gain,
    to ``rows`` ``[BH, ranks * WIDTH, D]``.

    share: ``[ranks, 3, H + 1]`` int32. own: number of heads that ``basis`` and ``widths`` have.
    Grid: KV heads of all samples; ranks; runs of ``CHANNELS`` channels.
    """
    group, rank, coordinate = tl.program_id(0), tl.program_id(1), tl.arange(0, WIDTH)
    of_basis, head, real = group % own, group % HEADS, coordinate < DIM
    width = tl.load(widths + (of_basis * RANKS + rank) * DIM + coordinate, mask=real, other=0).to(tl.int32)
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    mine = (channel[None, :] // SIZE == coordinate[:, None] // SIZE) & (channel < DIM)[None, :] & real[:, None]
    at = basis + of_basis.to(tl.int64) * DIM * SIZE + coordinate[:, None] * SIZE + channel[None, :] % SIZE
    found = tl.load(at, mask=mine, other=0).to(tl.float32) * tl.load(steps + width)[:, None]
    at = rows + ((group.to(tl.int64) * RANKS + rank) * WIDTH + coordinate[:, None]) * DIM + channel[None, :]
    tl.store(at, found.to(rows.dtype.element_ty), mask=(channel < DIM)[None, :])
    if tl.program_id(2) == 0:
        start, tokens = (PAGE // 8 * HEADS if RANKS > 1 else 0), PAGE // RANKS
        if rank > 0:  # the second of two
            pairs, singles = tl.load(share + HEADS), tl.load(share + 2 * HEADS + 1)
            start += tokens // 4 * pairs + tokens // 8 * singles + tokens * tl.load(share + 3 * HEADS + 2)
        columns = share + rank * 3 * (HEADS + 1)
        table = places + (group * RANKS + rank) * LINES * WIDTH + coordinate
        column, count = start + tl.load(columns + head), width // 2
        for level in tl.static_range(_LEVELS):
            there = (count > level).to(tl.int32)
            tl.store(table + level * WIDTH, tl.where(there > 0, column + tl.cumsum(there, 0) - there, -1))
            column += tl.sum(there, 0)
        row = tl.load(columns + HEADS)
        start += tokens // 4 * row
        columns += HEADS + 1
        there = width % 2
        column = start + tl.load(columns + head) + tl.cumsum(there, 0) - there
        tl.store(table + _LEVELS * WIDTH, tl.where(there > 0, column, -1))
        single_row = tl.load(columns + HEADS)
        start += tokens // 8 * single_row
        columns += HEADS + 1
        gain, gain_row = tl.load(columns + head), tl.load(columns + HEADS)
        of_gains = tl.where(tl.load(columns + head + 1) > gain, start + gain, 0)
        numbers = tl.where(coordinate == 0, row, tl.where(coordinate == 1, single_row, gain_row))
        tl.store(table + (_LEVELS + 1) * WIDTH, tl.where(coordinate == 3, of_gains, numbers))

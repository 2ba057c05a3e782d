"""Reads pages that hold all heads of a layer (`kvpass.codec.layer_pages`) in kernels.

The number of fields varies by head. So kernels read a table of where the
fields of each coordinate are (`share_rows`), and put codes together from up to three pairs of bits and a single bit,
two coordinates at a time.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from kvpass.codec.transform_coding import PAIRS

_LEVELS: tl.constexpr = tl.constexpr(PAIRS)
_SHALLOW: tl.constexpr = tl.constexpr(2)  # levels that most heads need
LINES = tl.constexpr(PAIRS + 5)
"""Lines of the table of a rank.

- Where the pairs of bits of each level are, and, in a fourth line, the single bits: offsets in a page by coordinate,
  those with even numbers first; 0 where a coordinate has no such field.
- Two lines of masks, by two coordinates: the bits of codes that each level, and the single bits, fill.
- A line of shifts, by coordinate, even ones first: where the single bit of a code belongs.
- A line of numbers: bytes per row of pairs, of single bits and of gains; where the gains of the head are; and how many
  levels the head needs.
"""


class PagesOfHead(NamedTuple):
    """Pages that hold all heads, as one KV head sees them.

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
def _pair_bytes(pages, at, table, WIDTH: tl.constexpr):
    """The bytes of pairs of coordinates, each ``[rows, coordinates / 2]``. at: the offset of each row. table: where the
    fields of a level are."""
    pair = tl.arange(0, WIDTH // 2)
    even, odd = tl.load(table + pair)[None, :], tl.load(table + WIDTH // 2 + pair)[None, :]
    return tl.load(pages.bytes + (at + even)).to(tl.int32), tl.load(pages.bytes + (at + odd)).to(tl.int32)


@triton.jit
def _plane(words, masks, PLANE: tl.constexpr):
    """Codes in a plane: the pairs of bits of each level, and the highest bit of codes with a single bit."""
    codes = words[0] >> 2 * PLANE & masks[0]
    for i in tl.static_range(1, len(words)):  # level ``i - 1``
        if i <= PLANE + 1:
            codes |= words[i] >> 2 * (PLANE + 1 - i) & masks[i]
        else:
            codes |= words[i] << 2 * (i - 1 - PLANE) & masks[i]
    return codes


@triton.jit
def _codes(pages, start, line, table, ROWS: tl.constexpr, WIDTH: tl.constexpr, LEVELS: tl.constexpr):
    """`codes_of` for coordinates that need up to ``LEVELS`` pairs of bits. start: the offset of each row's page."""
    pair, numbers = tl.arange(0, WIDTH // 2), table + (LINES - 1) * WIDTH
    of_masks, shifts = table + (_LEVELS + 1) * WIDTH, table + (LINES - 2) * WIDTH
    later, short = (line // (ROWS // 2))[:, None], line % (ROWS // 2)  # a plane of pairs is two planes of single bits
    low, high = _pair_bytes(pages, (start + short * tl.load(numbers + 1))[:, None], table + _LEVELS * WIDTH, WIDTH)
    low = low >> later << tl.load(shifts + pair)[None, :]
    words = (low | high >> later << tl.load(shifts + WIDTH // 2 + pair)[None, :],)
    masks = (tl.load(of_masks + _LEVELS * (WIDTH // 2) + pair)[None, :],)
    at = (start + line * tl.load(numbers))[:, None]
    for level in tl.static_range(LEVELS):
        low, high = _pair_bytes(pages, at, table + level * WIDTH, WIDTH)
        words = words + (low | high << 16,)  # noqa: RUF005  (Triton has no unpacking)
        masks = masks + (tl.load(of_masks + level * (WIDTH // 2) + pair)[None, :],)  # noqa: RUF005
    return _plane(words, masks, 0), _plane(words, masks, 1), _plane(words, masks, 2), _plane(words, masks, 3)


@triton.jit
def codes_of(pages, page, line, RANK: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Codes by plane: four tiles of words, ``[rows, coordinates / 2]``. A word holds the codes of two coordinates.

    page, line: the page of each row, and its line, of ``ROWS``.
    """
    table, start = pages.places + RANK * LINES * WIDTH, page * pages.size
    if tl.load(table + (LINES - 1) * WIDTH + 4) > _SHALLOW:
        a, b, c, d = _codes(pages, start, line, table, ROWS, WIDTH, _LEVELS)
    else:
        a, b, c, d = _codes(pages, start, line, table, ROWS, WIDTH, _SHALLOW)
    return a, b, c, d


@triton.jit
def _halves_of(x, WIDTH: tl.constexpr):
    """The values of coordinates with even, and with odd numbers."""
    return tl.split(tl.reshape(x, (WIDTH // 2, 2)))


@triton.jit
def share_rows(
    basis, widths, steps, rows, places, middles, own, DIM: tl.constexpr, SIZE: tl.constexpr, HEADS: tl.constexpr,
    PADDED: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, RANKS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Write tables of where the fields of heads are to ``places`` ``[BH, ranks, LINES, WIDTH]`` int32; what each
    coordinate adds to the channels of a token, per unit of code and gain, to ``rows`` ``[BH, ranks * WIDTH, D]``; and
    the midpoints of codes to ``middles`` ``[BH, ranks * WIDTH]``.

    own: number of heads that ``basis`` and ``widths`` have. PADDED: ``HEADS``, rounded up to a power of two.
    Grid: KV heads of all samples; ranks; runs of ``CHANNELS`` channels.
    """
    group, rank, coordinate = tl.program_id(0), tl.program_id(1), tl.arange(0, WIDTH)
    of_basis, head, real = group % own, group % HEADS, coordinate < DIM
    width = tl.load(widths + (of_basis * RANKS + rank) * DIM + coordinate, mask=real, other=0).to(tl.int32)
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    mine = (channel[None, :] // SIZE == coordinate[:, None] // SIZE) & (channel < DIM)[None, :] & real[:, None]
    at = basis + of_basis.to(tl.int64) * DIM * SIZE + coordinate[:, None] * SIZE + channel[None, :] % SIZE
    found = tl.load(at, mask=mine & (width > 0)[:, None], other=0).to(tl.float32) * tl.load(steps + width)[:, None]
    at = rows + ((group.to(tl.int64) * RANKS + rank) * WIDTH + coordinate[:, None]) * DIM + channel[None, :]
    tl.store(at, found.to(rows.dtype.element_ty), mask=(channel < DIM)[None, :])
    if tl.program_id(2) == 0:
        middle = (tl.exp2(width.to(tl.float32)) - 1) * 0.5
        tl.store(middles + (group * RANKS + rank) * WIDTH + coordinate, middle)
        table = places + (group * RANKS + rank) * LINES * WIDTH
        of_sample = widths + (group // HEADS * HEADS % own * RANKS).to(tl.int64) * DIM
        _store_table(table, of_sample, width, rank, head, DIM, HEADS, PADDED, WIDTH, PAGE, RANKS)


@triton.jit
def _counts(
    widths, rank, DIM: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    RANKS: tl.constexpr,
):  # fmt: skip
    """The numbers of pairs, single bits and gains of each head of a layer in a rank, ``[PADDED]`` each. widths:
    ``[H, ranks, D]``."""
    head, coordinate = tl.arange(0, PADDED)[:, None], tl.arange(0, WIDTH)[None, :]
    at = widths + (head * RANKS + rank) * DIM + coordinate
    width = tl.load(at, mask=(head < HEADS) & (coordinate < DIM), other=0).to(tl.int32)
    return tl.sum(width // 2, 1), tl.sum(width % 2, 1), tl.max((width > 0).to(tl.int32), 1)


@triton.jit
def _before(counts, head):
    """The sum of the ``counts`` of the heads before ``head``."""
    return tl.sum(tl.where(tl.arange(0, counts.shape[0]) < head, counts, 0), 0)


@triton.jit
def _store_table(
    table, widths, width, rank, head, DIM: tl.constexpr, HEADS: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Write the lines of the ``table`` of a head's rank, whose coordinates have ``width`` bits. widths: those of all
    heads, ``[H, ranks, D]``."""
    coordinate, pair = tl.arange(0, WIDTH), tl.arange(0, WIDTH // 2)
    place = coordinate // 2 + coordinate % 2 * (WIDTH // 2)
    half = 16 * (coordinate % 2)
    start, tokens = (PAGE // 8 * HEADS if RANKS > 1 else 0), PAGE // RANKS
    if rank > 0:  # the second of two
        pairs, singles, has_gain = _counts(widths, 0, DIM, PADDED, HEADS, WIDTH, RANKS)
        start += tokens // 4 * tl.sum(pairs, 0) + tokens // 8 * tl.sum(singles, 0) + tokens * tl.sum(has_gain, 0)
    pairs, singles, has_gain = _counts(widths, rank, DIM, PADDED, HEADS, WIDTH, RANKS)
    masks, column, count = table + (_LEVELS + 1) * WIDTH, start + _before(pairs, head), width // 2
    for level in tl.static_range(_LEVELS):
        there = (count > level).to(tl.int32)
        tl.store(table + level * WIDTH + place, tl.where(there > 0, column + tl.cumsum(there, 0) - there, 0))
        column += tl.sum(there, 0)
        even, odd = _halves_of(there * 3 << 2 * level << half, WIDTH)
        tl.store(masks + level * (WIDTH // 2) + pair, even | odd)
    row = tl.sum(pairs, 0)
    start += tokens // 4 * row
    there = width % 2
    column = start + _before(singles, head) + tl.cumsum(there, 0) - there
    tl.store(table + _LEVELS * WIDTH + place, tl.where(there > 0, column, 0))
    even, odd = _halves_of(there << 2 * count << half, WIDTH)
    tl.store(masks + _LEVELS * (WIDTH // 2) + pair, even | odd)
    tl.store(table + (LINES - 2) * WIDTH + place, 2 * count + half)
    single_row, gain_row = tl.sum(singles, 0), tl.sum(has_gain, 0)
    start += tokens // 8 * single_row
    of_gains = tl.where(tl.max(width, 0) > 0, start + _before(has_gain, head), 0)
    numbers = tl.where(coordinate == 0, row, tl.where(coordinate == 1, single_row, gain_row))
    numbers = tl.where(coordinate == 3, of_gains, tl.where(coordinate == 4, tl.max(count, 0), numbers))
    tl.store(table + (LINES - 1) * WIDTH + coordinate, numbers)

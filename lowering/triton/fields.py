"""Pages with widths by channel (`kvpass.codec.allocation`) as kernels see them, and what a query is worth to their
fields.

A tile is the tokens of one rank of a few pages by a run of fields of one kind, a *piece*. Queries take what fields
stand for, once a page, so that fields are multiplied as they are stored: in the mantissa of a power of two, which comes
out of the sums again by the sums of the weights.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .scores import LOG2E, Rope, parts_of

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_PLANES: tl.constexpr = tl.constexpr(4)  # of pairs of bits


class Piece(NamedTuple):
    """A run of fields of ``bits`` bits of one rank. start: of the rank's fields of that kind, in the bytes of a page.
    row: bytes from row to row. first, real: the run in such a row. width: ``real`` padded to a power of two. at: where
    the run begins among the padded fields of a head."""

    bits: int
    start: int
    row: int
    first: int
    real: int
    width: int
    at: int


class Fields(NamedTuple):
    """What a kernel knows of pages of keys or values when it is compiled.

    size: bytes of a page. tokens: of a page of one rank. gains: where they begin, by rank. pieces: by rank. width:
    padded fields of a head. ranked: whether a page begins with who is rich.
    """

    size: int
    page: int
    tokens: int
    gains: tuple[int, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    width: int
    ranked: bool
    sinks: int
    residual: int


class Number(NamedTuple):
    """How fields become floats: two at a time in words that end in ``mantissa`` bits, or in float32 if there is no
    mantissa. power: of two whose last bit is worth 1."""

    dtype: tl.dtype
    mantissa: int
    exponent: int


@triton.constexpr_function
def _piece(fields, rank, index):
    return fields.pieces[rank][index]


@triton.constexpr_function
def pieces_of(fields, rank):
    """How many there are."""
    return len(fields.pieces[rank])


@triton.constexpr_function
def ranks_of(fields):
    return len(fields.pieces)


@triton.constexpr_function
def piece_at(fields, rank, index):
    """Where a piece begins among all fields, and how wide it is."""
    piece = fields.pieces[rank][index]
    return piece.at, piece.width, piece.bits


@triton.constexpr_function
def _gains_at(fields, rank):
    return fields.gains[rank]


@triton.jit
def pages_of(n, L: tl.constexpr):
    """How many pages there are once ``n`` tokens are stored (`Retention.packed`)."""
    return tl.maximum(n - L.sinks - L.residual, 0) >> (L.page.bit_length() - 1)


@triton.jit
def tile_tokens(PAGES: tl.constexpr, L: tl.constexpr):
    """The page of each token of a tile, from the first of its pages on, and its place among those of its rank."""
    rows: tl.constexpr = L.tokens // _PLANES
    index = tl.arange(0, PAGES * L.tokens)
    row = index // _PLANES
    return row // rows, index % _PLANES * rows + row % rows


@triton.constexpr_function
def _shift(plane, number):
    """How far a field is moved so that it lies in the mantissa, and the power of two whose bit there is worth 1."""
    at = 2 * plane
    moved = max(0, at + 2 - number.mantissa) if number.mantissa else 0
    return moved, at - moved


@triton.constexpr_function
def _constants(plane, bits, number):
    moved, at = _shift(plane, number)
    one = number.exponent + number.mantissa - at << number.mantissa
    return moved, ((1 << bits) - 1 << at) * 0x00010001, one * 0x00010001


@triton.constexpr_function
def _powers(number):
    return tuple(2.0 ** (number.mantissa - _shift(plane, number)[1]) if number.mantissa else 0.0 for plane in range(4))


@triton.jit
def powers(PAGES: tl.constexpr, L: tl.constexpr, N: tl.constexpr):
    """What is added to the fields of each token of a tile."""
    of: tl.constexpr = _powers(N)
    plane = tl.arange(0, PAGES * L.tokens) % _PLANES
    return tl.where(plane < 2, tl.where(plane == 0, of[0], of[1]), tl.where(plane == 2, of[2], of[3]))


@triton.jit
def _spread(word):
    """Two bytes, each low in a half of its own."""
    if _INTERPRETED:
        spread = word & 0xFF | (word & 0xFF00) << 8
    else:
        spread = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, 0x4140;", "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1
        )
    return spread


@triton.jit
def _in_order(a, b, c, d):
    """Planes of rows ``[rows, .]`` one token after the other: ``[rows * 4, .]``."""
    of_rows = tl.join(tl.join(a, b), tl.join(c, d)).permute(0, 3, 2, 1)
    return tl.reshape(of_rows, (a.shape[0] * 4, a.shape[1]))


@triton.jit
def _number(word, PLANE: tl.constexpr, BITS: tl.constexpr, N: tl.constexpr):
    how: tl.constexpr = _constants(PLANE, BITS, N)
    return (word >> how[0]) & how[1] | how[2] if how[0] else word & how[1] | how[2]


@triton.jit
def _float(byte, PLANE: tl.constexpr, BITS: tl.constexpr):
    return ((byte >> 2 * PLANE & 2**BITS - 1) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def piece_fields(
    pages, first, stop, RANK: tl.constexpr, INDEX: tl.constexpr, PAGES: tl.constexpr, L: tl.constexpr, N: tl.constexpr
):
    """Fields of ``PAGES`` pages from the ``first`` on, those before ``stop``: ``[tokens, width]``, and to each is added
    what `powers` say."""
    P: tl.constexpr = _piece(L, RANK, INDEX)
    rows: tl.constexpr = L.tokens // _PLANES
    row = tl.arange(0, PAGES * rows)
    page, line = first + row // rows, row % rows
    there = (page < stop)[:, None]
    if P.bits == 1:  # a plane of pairs is two of single bits
        later, line = line // (rows // 2), line % (rows // 2)
    if N.mantissa:
        column = tl.arange(0, P.width // 2)
        line = page * (L.size // 2) + P.start // 2 + line * (P.row // 2)
        at = pages.to(tl.pointer_type(tl.uint16), bitcast=True) + P.first // 2 + line[:, None] + column[None, :]
        if P.real < P.width:
            there = there & (column < P.real // 2)[None, :]
        word = _spread(tl.load(at, mask=there, other=0).to(tl.int32))
        if P.bits == 1:
            word = word >> later[:, None]
        words = _in_order(
            _number(word, 0, P.bits, N), _number(word, 1, P.bits, N), _number(word, 2, P.bits, N),
            _number(word, 3, P.bits, N),
        )  # fmt: skip
        both = tl.join(words.to(tl.int16), (words >> 16).to(tl.int16)).to(N.dtype, bitcast=True)
        fields = tl.reshape(both, (words.shape[0], P.width))
    else:
        column = tl.arange(0, P.width)
        line = page * L.size + P.start + line * P.row
        at = pages + P.first + line[:, None] + column[None, :]
        byte = tl.load(at, mask=there & (column < P.real)[None, :], other=0).to(tl.int32)
        if P.bits == 1:
            byte = byte >> later[:, None]
        fields = _in_order(
            _float(byte, 0, P.bits), _float(byte, 1, P.bits), _float(byte, 2, P.bits), _float(byte, 3, P.bits)
        ).to(N.dtype)
    return fields


@triton.jit
def gains_of(pages, page, stop, token, RANK: tl.constexpr, L: tl.constexpr):
    """The gains of tokens of a rank, 0 from page ``stop`` on."""
    start: tl.constexpr = _gains_at(L, RANK)
    stored = tl.load(pages + page * L.size + start + token, mask=page < stop, other=0)
    return tl.exp2((stored.to(tl.float32) - 128) / 16)


@triton.jit
def field_rows(
    basis, places, columns, weights, out, DIM: tl.constexpr, SIZE: tl.constexpr, FIELDS: tl.constexpr,
    WIDTH: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """What 1 in each padded field adds to the channels of a token of gain 1, ``[BH, WIDTH, D]``. Grid: heads, runs of
    ``COUNT`` fields. ``columns`` says which field each is, -1 for none."""
    group, field = tl.program_id(0).to(tl.int64), tl.program_id(1) * COUNT + tl.arange(0, COUNT)
    column = tl.load(columns + field)
    place = tl.load(places + group * FIELDS + column, mask=column >= 0, other=0)
    coordinate, weight = place % DIM, tl.load(weights + place // DIM)
    channel = tl.arange(0, triton.next_power_of_2(DIM))
    mine = (channel[None, :] // SIZE == coordinate[:, None] // SIZE) & (channel < DIM)[None, :] & (column >= 0)[:, None]
    at = basis + group * DIM * SIZE + coordinate[:, None] * SIZE + channel[None, :] % SIZE
    rows = tl.load(at, mask=mine, other=0).to(tl.float32) * weight[:, None]
    at = out + (group * WIDTH + field[:, None]) * DIM + channel[None, :]
    tl.store(at, rows.to(out.dtype.element_ty), mask=(channel < DIM)[None, :])


@triton.jit
def _turned_back(q, rope, page, asked, parts, R: tl.constexpr, L: tl.constexpr):
    """Parts of queries as the middle token of their page sees them."""
    channel, real = parts[0]
    pair = channel // 2 if R.interleaved else channel
    token = L.sinks + page * L.page + L.page // 2
    at = rope.sample + token[:, None] * rope.row + pair[None, :]
    known = asked[:, None] & real[None, :]
    cos = tl.load(rope.cos + at, mask=known, other=0).to(tl.float32)
    sin = tl.load(rope.sin + at, mask=known, other=0).to(tl.float32)
    return (q[0] * cos + q[1] * sin, q[1] * cos - q[0] * sin) + q[2:]  # noqa: RUF005


@triton.jit(do_not_specialize=["rows", "table_batch", "table_row", "capacity"])
def page_queries(
    q, rows_of_fields, cos, sin, out, sums, length, scale, rows, capacity, table_batch, table_row,
    GROUPS: tl.constexpr, R: tl.constexpr, L: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """What 1 in each field of a page adds to the scores of each query row, as powers of two: ``[BH, pages, rows,
    WIDTH]``; and by rank, their sum, and that of what the middle of each field adds: ``[BH, pages, rows, ranks, 2]``.

    Grid: KV heads of all samples; tiles of pages times rows. Without tables all pages are one.
    """
    pages = pages_of(tl.load(length).to(tl.int32), L) if cos is not None else 1
    first = tl.program_id(1) * TILE
    if first >= pages * rows:
        return
    group, index = tl.program_id(0).to(tl.int64), first + tl.arange(0, TILE)
    page, row, asked = index // rows, index % rows, index < pages * rows
    rope, parts, split = Rope(cos, sin, group // GROUPS * table_batch, table_row, None, 0), parts_of(R), ()
    for i in tl.static_range(len(parts)):
        channel, real = parts[i]
        at = q + (group * rows + row)[:, None] * R.dim + channel[None, :]
        part = tl.load(at, mask=asked[:, None] & real[None, :], other=0).to(tl.float32)
        split = split + (part * (scale * LOG2E),)  # noqa: RUF005
    if R.pairs:
        split = _turned_back(split, rope, page, asked, parts, R, L)
    line = group * capacity * rows + index
    for rank in tl.static_range(ranks_of(L)):
        total, middle = tl.zeros((TILE,), tl.float32), tl.zeros((TILE,), tl.float32)
        for i in tl.static_range(pieces_of(L, rank)):
            where: tl.constexpr = piece_at(L, rank, i)
            field = where[0] + tl.arange(0, where[1])
            found = tl.zeros((TILE, where[1]), tl.float32)
            for j in tl.static_range(len(parts)):
                channel, real = parts[j]
                at = rows_of_fields + (group * L.width + field[None, :]) * R.dim + channel[:, None]
                b = tl.load(at, mask=real[:, None], other=0)
                found = tl.dot(split[j].to(N.dtype), b.to(N.dtype), found, input_precision=PRECISION)
            kept = found.to(out.dtype.element_ty)
            tl.store(out + line[:, None] * L.width + field[None, :], kept, mask=asked[:, None])
            of_piece = tl.sum(kept.to(tl.float32), 1)
            total += of_piece
            middle += of_piece * ((2 ** where[2] - 1) / 2)
        at = sums + (line * ranks_of(L) + rank) * 2
        tl.store(at, total, mask=asked)
        tl.store(at + 1, middle, mask=asked)


@triton.jit(do_not_specialize=["rows", "table_batch", "table_row", "capacity"])
def order_tokens(
    q, pages, cos, sin, center, tokens, mean, length, scale, rows, capacity, table_batch, table_row,
    GROUPS: tl.constexpr, HEADS: tl.constexpr, R: tl.constexpr, L: tl.constexpr, PRECISION: tl.constexpr,
    PAGES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """In the order in which pages keep their tokens: which each is, ``[BH, capacity * P]``, and with ``center``, the
    products of query rows with the mean of the keys as it is turned there, ``[BH, rows, capacity * P]``.

    Grid: runs of pages; runs of KV heads of all samples, which read the tables once.
    """
    stop = pages_of(tl.load(length).to(tl.int32), L)
    first, runs = tl.program_id(0) * PAGES, tl.cdiv(GROUPS, HEADS)
    if first >= stop:
        return
    sample, head = (tl.program_id(1) // runs).to(tl.int64), tl.program_id(1) % runs * HEADS
    index = tl.arange(0, PAGES * L.page)
    page, token = first + index // L.page, index % L.page
    there, number = page < stop, L.sinks + page * L.page + token
    parts = parts_of(R)
    if center is not None:
        channel, real = parts[0]
        pair = channel // 2 if R.interleaved else channel
        at = sample * table_batch + number[:, None] * table_row + pair[None, :]
        known = there[:, None] & real[None, :]
        c = tl.load(cos + at, mask=known, other=0).to(tl.float32)
        s = tl.load(sin + at, mask=known, other=0).to(tl.float32)
    for group in range(sample * GROUPS + head, sample * GROUPS + tl.minimum(head + HEADS, GROUPS)):
        slot = token
        if L.ranked:
            byte = pages + (group * capacity + page) * L.size + token % (L.page // 8)
            rich = tl.load(byte, mask=there, other=0).to(tl.int32) >> token // (L.page // 8) & 1
            before = tl.reshape(tl.cumsum(tl.reshape(rich, (PAGES, L.page)), 1), (PAGES * L.page,)) - rich
            slot = tl.where(rich != 0, before, token - before + L.page // 2)
        place = page * L.page + slot
        tl.store(tokens + group * capacity * L.page + place, number, mask=there)
        if center is not None:
            for start in range(0, rows, TILE):
                row = start + tl.arange(0, TILE)
                asked, split, means = row < rows, (), ()
                for i in tl.static_range(len(parts)):
                    channel, real = parts[i]
                    at, known = q + (group * rows + row)[:, None] * R.dim + channel[None, :], asked[:, None] & real[None, :]
                    part = tl.load(at, mask=known, other=0).to(tl.float32) * (scale * LOG2E)
                    split = split + (part,)  # noqa: RUF005
                    of_channel = tl.load(center + group * R.dim + channel, mask=real, other=0).to(tl.float32)
                    means = means + (of_channel[None, :],)  # noqa: RUF005
                along = split[0] * means[0] + split[1] * means[1]
                across = split[1] * means[0] - split[0] * means[1]
                found = tl.dot(along, tl.trans(c), input_precision=PRECISION)
                found = tl.dot(across, tl.trans(s), found, input_precision=PRECISION)
                if len(parts) > 2:
                    found += tl.sum(split[2] * means[2], 1)[:, None]
                at = mean + (group * rows + row)[:, None] * capacity * L.page + place[None, :]
                tl.store(at, found, mask=asked[:, None] & there[None, :])



"""Reads pages with per-channel bit widths (`kvpass.codec.allocation`) in kernels, and transforms queries to their
fields.

A tile has the tokens of one rank of a few pages as rows, and a run of fields of one kind, a *piece*, as columns. The
weights of fields are multiplied into queries once per page, so fields are multiplied as stored: in the mantissa of a
power of two. This offset is subtracted at the end, with the sums of the weights.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .scores import LOG2E, Rope, parts_of

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_PLANES: tl.constexpr = tl.constexpr(4)  # pairs of bits per byte


class Piece(NamedTuple):
    """A run of fields of ``bits`` bits of one rank.

    start: offset of the rank's fields of that kind in a page, in bytes.
    row: bytes per row.
    first, real: start and length of the run in a row.
    width: ``real`` padded to a power of two.
    at: start of the run among the padded fields of a head.
    """

    bits: int
    start: int
    row: int
    first: int
    real: int
    width: int
    at: int


class Fields(NamedTuple):
    """Compile-time layout of pages of keys or values.

    size: bytes per page.
    tokens: tokens per page and rank.
    gains: offset of the gains of each rank.
    pieces: the pieces of each rank.
    width: number of padded fields of a head.
    ranked: whether a page starts with the mask of rich tokens.
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
    """How fields become floats of ``dtype``.

    Two at a time: a field is in the lowest of the ``mantissa`` bits of a power of two whose last bit has weight 1. If
    ``mantissa`` is 0, fields are converted one by one. byte: the high byte of that power of two.
    """

    dtype: tl.dtype
    mantissa: int
    byte: int


@triton.constexpr_function
def _piece(fields, rank, index):
    return fields.pieces[rank][index]


@triton.constexpr_function
def pieces_of(fields, rank):
    """Number of pieces of a rank."""
    return len(fields.pieces[rank])


@triton.constexpr_function
def ranks_of(fields):
    return len(fields.pieces)


@triton.constexpr_function
def middle_of(fields, rank, index):
    """The midpoint of the fields of a piece, which represents 0 (`kvpass.codec.transform_coding.middle`)."""
    return (2.0 ** fields.pieces[rank][index].bits - 1) / 2


@triton.jit
def columns_of(L: tl.constexpr, RANK: tl.constexpr, INDEX: tl.constexpr):
    """Indices of the fields of a piece among the padded fields of a head."""
    P: tl.constexpr = _piece(L, RANK, INDEX)
    return P.at + tl.arange(0, P.width)


@triton.jit
def pages_of(n, L: tl.constexpr):
    """Number of pages if ``n`` tokens are stored (`Retention.packed`)."""
    return tl.maximum(n - L.sinks - L.residual, 0) >> (L.page.bit_length() - 1)


@triton.jit
def tile_tokens(PAGES: tl.constexpr, L: tl.constexpr):
    """The page of each token of a tile, relative to the first page, and the token's index in its rank."""
    rows: tl.constexpr = L.tokens // _PLANES
    index = tl.arange(0, PAGES * L.tokens)
    row = index // _PLANES
    return row // rows, index % _PLANES * rows + row % rows


@triton.jit
def tile_places(RANK: tl.constexpr, PAGES: tl.constexpr, L: tl.constexpr):
    """The places at which `order_tokens` writes the data of each token of a tile."""
    index = tl.arange(0, PAGES * L.tokens)
    return index // L.tokens * L.page + RANK * L.tokens + index % L.tokens


@triton.jit
def _in_tiles(slot, L: tl.constexpr):
    """Convert slots of a page to places such that the tokens of a tile are adjacent."""
    rows: tl.constexpr = L.tokens // _PLANES
    token = slot % L.tokens
    return slot - token + token % rows * _PLANES + token // rows


@triton.constexpr_function
def power_of(number):
    """The offset of all fields."""
    return 2.0**number.mantissa if number.mantissa else 0.0


@triton.constexpr_function
def _moved(plane, mantissa):
    """The right shift that moves the fields of a plane into the mantissa."""
    return max(0, 2 * plane + 2 - mantissa)


@triton.constexpr_function
def _mask(plane, bits, number):
    """Mask of the bits of a field, and of the power of two, in both halves of a word."""
    return ((1 << bits) - 1 << 2 * plane - _moved(plane, number.mantissa) | number.byte << 8) * 0x00010001


@triton.constexpr_function
def _last_place(number):
    """The bit position of the fields of the last plane in their floats."""
    return 6 - _moved(3, number.mantissa) if number.mantissa else 0


@triton.constexpr_function
def headroom_of(number):
    """Exponent of the power of two by which weights of values are multiplied. Without it, small weights divided by the
    powers of `places_of` would lose precision in float16."""
    return 6 if number.mantissa else 0


@triton.jit
def places_of(token, L: tl.constexpr, N: tl.constexpr):
    """Exponent of the power of two by which the fields of each token of a rank are multiplied."""
    if N.mantissa == 0:
        return token * 0
    plane = token // (L.tokens // _PLANES)
    return tl.where(plane < _PLANES - 1, 2 * plane, _last_place(N))


@triton.jit
def _halves(word, N: tl.constexpr):
    """Spread four bytes over the halves of two words, each below the high byte of the power of two. Each word takes one
    instruction, which the assembler does not split."""
    if _INTERPRETED:
        power: tl.constexpr = N.byte * 0x01000100
        first = word & 0xFF | (word & 0xFF00) << 8 | power
        second = word >> 16 & 0xFF | (word >> 16 & 0xFF00) << 8 | power
    else:
        POWER: tl.constexpr = "0x64" if N.mantissa == 10 else "0x43"
        first = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, " + POWER + ", 0x4140;", "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1
        )
        second = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, " + POWER + ", 0x4342;", "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1
        )
    return tl.reshape(tl.join(first, second), (word.shape[0], 2 * word.shape[1]))


@triton.jit
def _as_loaded(x):
    """Hide the origin of ``x`` from the compiler. If it sees that words were joined from halves, it chooses an order of
    operands that takes one move per word."""
    if not _INTERPRETED:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return x


@triton.jit
def _in_order(a, b, c, d):
    """Interleave the planes of rows, each ``[rows, .]``, by token: ``[rows * 4, .]``."""
    of_rows = tl.join(tl.join(a, b), tl.join(c, d)).permute(0, 3, 2, 1)
    return tl.reshape(of_rows, (a.shape[0] * 4, a.shape[1]))


@triton.jit
def _float(byte, PLANE: tl.constexpr, BITS: tl.constexpr):
    return ((byte >> 2 * PLANE & 2**BITS - 1) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def piece_fields(
    pages, first, stop, RANK: tl.constexpr, INDEX: tl.constexpr, PAGES: tl.constexpr, L: tl.constexpr, N: tl.constexpr
):
    """Fields of ``PAGES`` pages from the ``first`` on, up to ``stop``: ``[tokens, width]``. They are multiplied by
    powers of two (`places_of`), and `power_of` is added."""
    P: tl.constexpr = _piece(L, RANK, INDEX)
    rows: tl.constexpr = L.tokens // _PLANES
    row = tl.arange(0, PAGES * rows)
    page, line = row // rows, row % rows  # loop-invariant, so 32-bit offsets without the first page
    there = (page < stop - first)[:, None]
    if P.bits == 1:  # a plane of pairs is two planes of single bits
        later, line = line // (rows // 2), line % (rows // 2)
    if N.mantissa:
        column = tl.arange(0, P.width // 4)
        line = page * (L.size // 4) + (P.start + P.first) // 4 + line * (P.row // 4)
        at = pages.to(tl.pointer_type(tl.int32), bitcast=True) + first * (L.size // 4)
        at += line[:, None] + column[None, :]
        if P.real < P.width:
            there = there & (column < P.real // 4)[None, :]
        word = tl.load(at, mask=there, other=0)
        if P.bits == 1:
            word = word >> later[:, None]
        low, high = _halves(word, N), _halves(word >> _moved(3, N.mantissa), N)
        words = _in_order(
            low & _mask(0, P.bits, N), low & _mask(1, P.bits, N), low & _mask(2, P.bits, N), high & _mask(3, P.bits, N)
        )
        both = tl.join(words.to(tl.int16), (words >> 16).to(tl.int16)).to(N.dtype, bitcast=True)
        fields = _as_loaded(tl.reshape(both, (words.shape[0], P.width)))
    else:
        column = tl.arange(0, P.width)
        line = page * L.size + P.start + P.first + line * P.row
        at = pages + first * L.size + (line[:, None] + column[None, :])
        byte = tl.load(at, mask=there & (column < P.real)[None, :], other=0).to(tl.int32)
        if P.bits == 1:
            byte = byte >> later[:, None]
        fields = _in_order(
            _float(byte, 0, P.bits), _float(byte, 1, P.bits), _float(byte, 2, P.bits), _float(byte, 3, P.bits)
        ).to(N.dtype)
    return fields


@triton.jit
def field_rows(
    basis, places, columns, weights, out, DIM: tl.constexpr, SIZE: tl.constexpr, FIELDS: tl.constexpr,
    WIDTH: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Write the contribution of each padded field to the channels of a token, per unit of field and gain:
    ``[BH, WIDTH, D]``.

    Grid: heads; runs of ``COUNT`` fields. ``columns`` is the field of each column, -1 for padding.
    """
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
def _scaled_parts(q, asked, scale, parts):
    """The parts of query rows, scaled so that products are scores in units of log2. q: one pointer per row."""
    queries = ()
    for i in tl.static_range(len(parts)):
        channel, real = parts[i]
        part = tl.load(q[:, None] + channel[None, :], mask=asked[:, None] & real[None, :], other=0).to(tl.float32)
        queries = queries + (part * (scale * LOG2E),)  # noqa: RUF005  (Triton has no unpacking)
    return queries


@triton.jit
def _parts_of_mean(center, parts):
    """The parts of the mean of the keys of a head."""
    means = ()
    for i in tl.static_range(len(parts)):
        channel, real = parts[i]
        means = means + (tl.load(center + channel, mask=real, other=0).to(tl.float32)[None, :],)  # noqa: RUF005
    return means


@triton.jit
def _tables(rope, row, there, parts, R: tl.constexpr):
    """Rows of the rotary tables."""
    channel, real = parts[0]
    pair = channel // 2 if R.interleaved else channel
    at, known = rope.sample + row[:, None] * rope.row + pair[None, :], there[:, None] & real[None, :]
    cos, sin = tl.load(rope.cos + at, mask=known, other=0), tl.load(rope.sin + at, mask=known, other=0)
    return cos.to(tl.float32), sin.to(tl.float32)


@triton.jit
def _turned_back(q, rope, page, asked, parts, R: tl.constexpr, L: tl.constexpr):
    """Rotate the parts of queries back by the middle token of their page."""
    cos, sin = _tables(rope, L.page + page, asked, parts, R)
    return (q[0] * cos + q[1] * sin, q[1] * cos - q[0] * sin) + q[2:]  # noqa: RUF005


@triton.jit(do_not_specialize=["rows", "capacity"])
def page_queries(
    q, rows_of_fields, cos, sin, out, sums, length, scale, rows, capacity, table_batch, table_row,
    GROUPS: tl.constexpr, R: tl.constexpr, L: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Write the contribution of each field of a page to the scores of each query row, per unit of field and in units of
    log2: ``[BH, pages, rows, WIDTH]``. Also write, per rank, the sum of these contributions, and the sum of the
    contributions of the fields' midpoints: ``[BH, pages, rows, ranks, 2]``.

    Grid: KV heads of all samples; tiles of pages times rows. Without rotary tables, all pages share one result.
    """
    pages = pages_of(tl.load(length).to(tl.int32), L) if cos is not None else 1
    first = tl.program_id(1) * TILE
    if first >= pages * rows:
        return
    group, index = tl.program_id(0).to(tl.int64), first + tl.arange(0, TILE)
    page, row, asked = index // rows, index % rows, index < pages * rows
    rope, parts = Rope(cos, sin, group // GROUPS * table_batch, table_row, None, 0), parts_of(R)
    split = _scaled_parts(q + (group * rows + row) * R.dim, asked, scale, parts)
    if R.pairs:
        split = _turned_back(split, rope, page, asked, parts, R, L)
    line = group * capacity * rows + index
    for rank in tl.static_range(ranks_of(L)):
        total, middle = tl.zeros((TILE,), tl.float32), tl.zeros((TILE,), tl.float32)
        for i in tl.static_range(pieces_of(L, rank)):
            field = columns_of(L, rank, i)
            found = tl.zeros((TILE, field.shape[0]), tl.float32)
            for j in tl.static_range(len(parts)):
                channel, real = parts[j]
                at = rows_of_fields + (group * L.width + field[None, :]) * R.dim + channel[:, None]
                b = tl.load(at, mask=real[:, None], other=0)
                found = tl.dot(split[j].to(N.dtype), b.to(N.dtype), found, input_precision=PRECISION)
            kept = found.to(out.dtype.element_ty)
            tl.store(out + line[:, None] * L.width + field[None, :], kept, mask=asked[:, None])
            of_piece = tl.sum(kept.to(tl.float32), 1)
            total += of_piece
            middle += of_piece * middle_of(L, rank, i)
        at = sums + (line * ranks_of(L) + rank) * 2
        tl.store(at, total, mask=asked)
        tl.store(at + 1, middle, mask=asked)


@triton.jit
def _slots(pages, page, token, there, PAGES: tl.constexpr, L: tl.constexpr):
    """The slot of each token in its page (`kvpass.codec.allocation.slots`)."""
    if not L.ranked:
        return token
    marks: tl.constexpr = L.page // 8
    rich = tl.load(pages + page * L.size + token % marks, mask=there, other=0).to(tl.int32) >> token // marks & 1
    before = tl.reshape(tl.cumsum(tl.reshape(rich, (PAGES, L.page)), 1), rich.shape) - rich
    return tl.where(rich != 0, before, token - before + L.tokens)


@triton.constexpr_function
def _gains_at(fields, rank):
    return fields.gains[rank]


@triton.jit
def _write_gains(pages, gains, page, position, stop, L: tl.constexpr, N: tl.constexpr, HEADROOM: tl.constexpr):
    """Write the factor for sums of stored fields, per token: its gain without the powers of `places_of`, times 2 to the
    power ``HEADROOM``."""
    token = position % L.tokens
    for rank in tl.static_range(ranks_of(L)):
        there = (page < stop) & (position // L.tokens == rank)
        stored = tl.load(pages + page * L.size + _gains_at(L, rank) + token, mask=there, other=0)
        gain = tl.exp2((stored.to(tl.float32) - 128) / 16 + HEADROOM - places_of(token, L, N).to(tl.float32))
        tl.store(gains + page * L.page + _in_tiles(position, L), gain, mask=there)


@triton.jit
def _neighbours(rope, page, token, there, parts, R: tl.constexpr, L: tl.constexpr):
    """Tables that rotate the mean of the keys at each token of a page (`kvpass.codec.page_rope`): the rotation of the
    page's middle, plus that of the token relative to the middle."""
    cos, sin = _tables(rope, L.page + page, there, parts, R)
    behind = token > L.page // 2
    c, s = _tables(rope, tl.where(behind, L.page - token, token), there, parts, R)
    c0, s0 = _tables(rope, token * 0 + L.page // 2, there, parts, R)
    norm = tl.maximum(c0 * c0 + s0 * s0, 1e-30)
    along, across = (c * c0 + s * s0) / norm, (s * c0 - c * s0) / norm
    across = tl.where(behind[:, None], -across, across)
    return cos * along - sin * across, sin * along + cos * across


@triton.jit
def _mean_scores(q, center, cos, sin, asked, scale, parts, PRECISION: tl.constexpr):
    """Scores of query rows with the rotated mean of the keys, in units of log2. q: one pointer per row."""
    queries, means = _scaled_parts(q, asked, scale, parts), _parts_of_mean(center, parts)
    along = queries[0] * means[0] + queries[1] * means[1]
    across = queries[1] * means[0] - queries[0] * means[1]
    found = tl.dot(along, tl.trans(cos), input_precision=PRECISION)
    found = tl.dot(across, tl.trans(sin), found, input_precision=PRECISION)
    if len(parts) > 2:
        found += tl.sum(queries[2] * means[2], 1)[:, None]
    return found


@triton.jit(do_not_specialize=["rows"])
def order_tokens(
    q, k_pages, v_pages, cos, sin, center, tokens, k_gains, v_gains, mean, length, scale, rows, k_capacity, v_capacity,
    table_batch, table_row, GROUPS: tl.constexpr, HEADS: tl.constexpr, R: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr, PAGES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write data of the tokens in pages, in the order in which tiles read them.

    Writes the token ids and the gains of keys and values, ``[BH, capacity * P]``. With ``center``, also writes the
    products of query rows with the mean of the keys, rotated for each token, ``[BH, rows, capacity * P]``.

    Grid: runs of pages; runs of KV heads of all samples. A run of heads reads the tables once.
    """
    n = tl.load(length).to(tl.int32)
    stop, v_stop = pages_of(n, K), pages_of(n, V)
    first, runs = tl.program_id(0) * PAGES, tl.cdiv(GROUPS, HEADS)
    if first >= stop:
        return
    sample, head = (tl.program_id(1) // runs).to(tl.int64), tl.program_id(1) % runs * HEADS
    index = tl.arange(0, PAGES * K.page)
    page, token = first + index // K.page, index % K.page
    there, number, parts = page < stop, K.sinks + page * K.page + token, parts_of(R)
    if center is not None:
        rope = Rope(cos, sin, sample * table_batch, table_row, None, 0)
        c, s = _neighbours(rope, page, token, there, parts, R, K)
    for group in range(sample * GROUPS + head, sample * GROUPS + tl.minimum(head + HEADS, GROUPS)):
        keys, values = k_pages + group * k_capacity * K.size, v_pages + group * v_capacity * V.size
        place = page * K.page + _in_tiles(_slots(keys, page, token, there, PAGES, K), K)
        tl.store(tokens + group * k_capacity * K.page + place, number, mask=there)
        _write_gains(keys, k_gains + group * k_capacity * K.page, page, token, stop, K, N, 0)
        _write_gains(values, v_gains + group * k_capacity * K.page, page, token, v_stop, V, N, headroom_of(N))
        if center is not None:
            for start in range(0, rows, TILE):
                row = start + tl.arange(0, TILE)
                line, asked = group * rows + row, row < rows
                found = _mean_scores(q + line * R.dim, center + group * R.dim, c, s, asked, scale, parts, PRECISION)
                into = mean + line[:, None] * k_capacity * K.page + place[None, :]
                tl.store(into, found, mask=asked[:, None] & there[None, :])

"""Reads pages with per-channel bit widths (`kvpass.codec.allocation`, `kvpass.codec.layer_pages`) in kernels.

A tile has the tokens of one rank of a few pages as rows, and a run of fields of one kind, a *piece*, as columns. The
weights of fields are multiplied into queries once per page, so fields are multiplied as stored: in the mantissa of a
power of two. This offset is subtracted at the end, with the sums of the weights.

If a page holds all heads, the number of fields varies by head and layer, and is not known when a kernel is compiled.
There the only piece of a rank has one column per coordinate, for its code (`read_shares`), and midpoints are read.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .read_shares import LINES, PagesOfHead, codes_of, gains_of, marks_of

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_PLANES: tl.constexpr = tl.constexpr(4)  # pairs of bits per byte
LEAST = tl.constexpr(32)  # minimum columns of a product; all pieces have multiples of that


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

    size: bytes per page; 0 if pages hold all heads: it varies by layer.
    tokens: tokens per page and rank.
    gains: offset of the gains of each rank.
    pieces: the pieces of each rank.
    width: number of padded fields of a head.
    ranked: whether a page starts with the mask of rich tokens.
    shared: whether pages hold all heads.
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
    shared: bool = False


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
def runs_of(fields):
    """Number of runs of ``LEAST`` padded fields."""
    return fields.width // LEAST.value


@triton.constexpr_function
def runs_of_piece(fields, rank, index):
    """Number of runs of ``LEAST`` fields of a piece."""
    return fields.pieces[rank][index].width // LEAST.value


@triton.constexpr_function
def first_run(fields, rank, index):
    """The first run of ``LEAST`` fields of a piece."""
    return fields.pieces[rank][index].at // LEAST.value


@triton.constexpr_function
def piece_number(fields, rank, index):
    """Index of a piece among the pieces of all ranks."""
    return sum(len(pieces) for pieces in fields.pieces[:rank]) + index


@triton.constexpr_function
def ranks_of(fields):
    return len(fields.pieces)


@triton.constexpr_function
def middle_of(fields, rank, index):
    """The midpoint of the fields of a piece, which represents 0 (`kvpass.codec.transform_coding.middle`)."""
    return (2.0 ** fields.pieces[rank][index].bits - 1) / 2


@triton.jit
def pages_of_head(pages, places, size, group, capacity, HEADS: tl.constexpr, L: tl.constexpr):
    """The pages of a KV head in a pool of ``capacity`` pages, as the functions below take them: a pointer or, if
    pages hold all heads, `PagesOfHead`. places: the result of `share_rows`. size: bytes per page."""
    if L.shared:
        head = group % HEADS
        sample = pages + group // HEADS * capacity * size
        found = PagesOfHead(sample, size, places + group * _table_size(L), sample + head, HEADS)
    else:
        found = pages + group * capacity * L.size
    return found


@triton.constexpr_function
def _table_size(fields):
    return len(fields.pieces) * LINES.value * fields.pieces[0][0].width


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
    """The place of each token of a tile in its page, in the order of `page_places`."""
    return RANK * L.tokens + tl.arange(0, PAGES * L.tokens) % L.tokens


@triton.jit
def slots_of(rich, token, TOKENS: tl.constexpr, DIM: tl.constexpr):
    """`kvpass.codec.token_ranks.slots`: the slot of each ``token``, along ``DIM``, of pages whose ranks have ``TOKENS``
    tokens. rich: 1 for high-precision tokens, else 0."""
    before = tl.cumsum(rich, DIM) - rich
    return tl.where(rich != 0, before, token - before + TOKENS)


@triton.jit
def page_places(pages, page, there, L: tl.constexpr):
    """The place of each token of each ``page``, ``[pages, P]``: the tokens of a rank are adjacent, in the order of the
    rows of a tile. Pages that are not ``there`` are not read."""
    token = tl.arange(0, L.page)[None, :]
    if L.ranked:
        marks: tl.constexpr = L.page // 8
        if L.shared:
            marked = marks_of(pages, page, token % marks, there)
        else:
            marked = tl.load(pages + page[:, None] * L.size + token % marks, mask=there[:, None], other=0)
        slot = slots_of(marked.to(tl.int32) >> token // marks & 1, token, L.tokens, 1)
    else:
        slot = token + page[:, None] * 0
    rows: tl.constexpr = L.tokens // _PLANES
    of_rank = slot % L.tokens
    return slot - of_rank + of_rank % rows * _PLANES + of_rank // rows


@triton.jit
def tile_numbers(pages, first, stop, RANK: tl.constexpr, PAGES: tl.constexpr, L: tl.constexpr):
    """The token ids of a tile."""
    page, _ = tile_tokens(PAGES, L)
    places = page_places(pages, first + page, page < stop - first, L)
    found = places == tile_places(RANK, PAGES, L)[:, None]
    token = tl.sum(tl.where(found, tl.arange(0, L.page)[None, :], 0), 1)
    return L.sinks + (first + page) * L.page + token


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
    if N.mantissa == 0 or L.shared:
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
def _as_floats(words, N: tl.constexpr):
    """The halves of words as floats: ``[rows, 2 * columns]``."""
    both = tl.join(words.to(tl.int16), (words >> 16).to(tl.int16)).to(N.dtype, bitcast=True)
    return _as_loaded(tl.reshape(both, (words.shape[0], 2 * words.shape[1])))


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
    if L.shared:
        codes = codes_of(pages, tl.minimum(first + page, stop - 1), line, RANK, rows, P.width)
        words = _in_order(codes[0], codes[1], codes[2], codes[3])
        if N.mantissa:
            fields = _as_floats(words | N.byte * 0x01000100, N)
        else:
            fields = tl.reshape(tl.join(words & 0xFFFF, words >> 16), (words.shape[0], P.width)).to(N.dtype)
    elif N.mantissa:
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
        fields = _as_floats(words, N)
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


@triton.constexpr_function
def _gains_at(fields, rank):
    return fields.gains[rank]


@triton.jit
def tile_gains(
    pages, first, stop, RANK: tl.constexpr, PAGES: tl.constexpr, L: tl.constexpr, N: tl.constexpr,
    HEADROOM: tl.constexpr,
):  # fmt: skip
    """Factors for sums of stored fields, by token of a tile: gains without the powers of `places_of`, times 2 to the
    power ``HEADROOM``."""
    page, token = tile_tokens(PAGES, L)
    there, start = page < stop - first, _gains_at(L, RANK)
    if L.shared:
        stored = gains_of(pages, first + page, token, there, RANK, L.pieces[0][0].width)
    elif N.mantissa:  # four bytes at a time, which the compiler can prefetch
        at = pages.to(tl.pointer_type(tl.int32), bitcast=True) + first * (L.size // 4)
        word = tl.load(at + (page * (L.size // 4) + start // 4 + token // 4), mask=there, other=0)
        stored = word >> token % 4 * 8 & 0xFF
    else:
        stored = tl.load(pages + first * L.size + (page * L.size + start + token), mask=there, other=0)
    return tl.exp2(stored.to(tl.float32) / 16 + (HEADROOM - 8 - places_of(token, L, N).to(tl.float32)))

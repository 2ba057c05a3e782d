"""Reads packed pages in kernels: unpacks and dequantizes bytes in registers.

Kernels iterate over *rows*: row f of a pool is row ``f % T`` of page ``f // T``, and has one token of each of the
page's planes, T tokens apart. Its bytes are loaded once, as one word. A shift and a mask then extract a plane, at any
bit width, and the codes become the mantissa of a float, which avoids integer conversions. If products have 16 bits and
all planes are read together, two channels share each instruction instead (`paired_values`).
"""

import math
from typing import NamedTuple

import triton
import triton.language as tl

from kvpass.codec.bitpack import FIELDS

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


class Layout(NamedTuple):
    """Compile-time layout of a packed tensor.

    code: number of values per code.
    channelwise, group: whether scales are per channel, and the group size.
    planes: tokens per row; the same for keys and values.
    residual, window: minimum number of tokens after the pages, and the number of slots for them.
    pairs, interleaved: rotation of tokens when they are read (`kvpass.codec.rope`); 0 pairs means none.
    two_level: scales are 8-bit codes (`kvpass.codec.second_level`).
    boosted: number of boosted channels per page (`kvpass.codec.boost`).
    """

    bits: int
    code: int
    channelwise: bool
    group: int
    page: int
    planes: int
    sinks: int
    residual: int
    window: int
    dim: int
    pairs: int = 0
    interleaved: bool = False
    two_level: bool = False
    boosted: int = 0


class Pool(NamedTuple):
    """Pointers to the data of a KV head of a packed tensor; None for tensors that it does not have.

    scale, zero_point: scales and zero points. With two-level scales: the 8-bit codes of both, and the second-level
        scales and zero points.
    points: the points of the grid.
    lower, boosted: lower codes and indices of boosted channels.
    """

    codes: tl.tensor
    scale: tl.tensor
    zero_point: tl.tensor
    points: tl.tensor | None
    lower: tl.tensor | None
    boosted: tl.tensor | None


@triton.constexpr_function
def _params(layout):
    """Number of scales per page."""
    if layout.channelwise:
        return layout.page // layout.group * layout.dim
    return layout.page * (layout.dim // layout.group)


@triton.jit
def zero_points_of(zero_point, head, params, L: tl.constexpr):
    """Pointer to the zero points of a head. params: stride between heads in scales."""
    SIZE: tl.constexpr = _params(L)
    return zero_point + head * (params // (2 * SIZE) * 4 if L.two_level else params)


@triton.jit
def boosted_of(lower, boosted, head, stride, L: tl.constexpr):
    """Pointers to the lower codes and indices of the boosted channels of a head. stride: stride between heads in
    bytes of codes."""
    pages = stride // (L.page * L.bits // 8 * L.dim)
    return lower + head * pages * (L.page * L.bits // 8 * L.boosted), boosted + head * pages * L.boosted


@triton.jit
def columns(GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """The channel of each column of a tile, and whether it exists: groups are padded to powers of two."""
    size: tl.constexpr = triton.next_power_of_2(GROUP)
    column = tl.arange(0, size * triton.next_power_of_2(GROUPS))
    if size == GROUP:
        return column, column < GROUP * GROUPS
    return column // size * GROUP + column % size, (column % size < GROUP) & (column // size < GROUPS)


@triton.jit
def channels(L: tl.constexpr, CODE: tl.constexpr):
    """`columns` for whole tokens, with ``CODE`` channels per code."""
    return columns(L.dim // CODE if L.channelwise else L.group // CODE, 1 if L.channelwise else L.dim // L.group)


@triton.constexpr_function
def _places(layout):
    """log2 of the number of rows per page, for shifts instead of signed divisions."""
    return (layout.page // layout.planes).bit_length() - 1


@triton.jit
def packed_rows(n, L: tl.constexpr):
    """Number of rows of pages if ``n`` tokens are stored (`Retention.packed`)."""
    pages = tl.maximum(n - L.sinks - L.residual, 0) >> (L.page.bit_length() - 1)
    return pages * (L.page // L.planes)


@triton.jit
def tokens_of(first, stop, ROWS: tl.constexpr, L: tl.constexpr):
    """The tokens of rows ``[first, first + ROWS)`` in plane 0, and whether they are before row ``stop``."""
    own = tl.arange(0, ROWS)
    rows = first + own
    return L.sinks + (rows >> _places(L)) * L.page + (rows & (L.page // L.planes - 1)), own < stop - first


@triton.jit
def words(codes, first, stop, column, real, ROWS: tl.constexpr, L: tl.constexpr, LOWER: tl.constexpr = False):
    """The packed codes of rows ``[first, first + ROWS)``, one word each: ``[ROWS, columns]``; 0 from row ``stop`` on.
    ``LOWER`` reads the lower codes of boosted channels."""
    tokens: tl.constexpr = L.page // L.planes
    across: tl.constexpr = L.boosted if LOWER else L.dim // L.code
    wide: tl.constexpr = L.planes * L.bits > 32
    rows = first + tl.arange(0, ROWS)
    line = (rows >> _places(L)) * (L.page * L.bits // 8) + (rows & (tokens - 1))
    byte = codes + line[:, None] * across + column[None, :]
    there = (tl.arange(0, ROWS) < stop - first)[:, None] & real[None, :]
    word = tl.zeros(byte.shape, tl.int64 if wide else tl.int32)
    for i in tl.static_range(L.planes * L.bits // 8):
        word |= tl.load(byte + i * tokens * across, mask=there, other=0).to(word.dtype) << 8 * i
    return word


class Form(NamedTuple):
    """How pairs of channels are unpacked.

    A word has one byte of each channel, at the low end of 16 bits, combined with the power of two of ``dtype`` whose
    last mantissa bit has weight 1. mantissa: mantissa bits of ``dtype``. power: that power of two, in both halves.
    """

    dtype: tl.dtype
    mantissa: int
    power: int


@triton.constexpr_function
def form_of(points, L, dtype, together):
    """The `Form` for products of ``dtype``, or None if channels cannot be paired.

    It is None if values are looked up, rotated or boosted, have two-level scales, or are multiplied in float32, and if
    planes are not all read together, because they are then not known at compile time.
    """
    odd = (L.dim if L.channelwise else L.group) % 2
    if points is not None or L.pairs or L.two_level or L.boosted or odd or dtype == tl.float32 or together < L.planes:
        return None
    return Form(dtype, 10, 0x64006400) if dtype == tl.float16 else Form(dtype, 7, 0x43004300)


@triton.jit
def _apart(word, F: tl.constexpr):
    """Spread two bytes over the halves of a word, combined with the power of two of the form. This takes one
    instruction, which the assembler does not split. With masks and shifts, it would recreate the constant at each
    use."""
    if _INTERPRETED:
        spread = word.to(tl.int32) & 0xFF | (word.to(tl.int32) & 0xFF00) << 8 | F.power
    else:
        POWER: tl.constexpr = "0x64" if F.mantissa == 10 else "0x43"
        spread = tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, " + POWER + ", 0x4140; prmt.b32 $1, $2, " + POWER + ", 0x4342;", "=r,=r,r", [word],
            dtype=tl.int32, is_pure=True, pack=2,
        )  # fmt: skip
    return spread


@triton.jit
def paired_words(pool, first, stop, ROWS: tl.constexpr, L: tl.constexpr, F: tl.constexpr):
    """The bytes of rows ``[first, first + ROWS)``: one tile ``[ROWS, pairs of channels]`` per byte of a row."""
    tokens: tl.constexpr = L.page // L.planes
    count: tl.constexpr = L.planes * L.bits // 8
    column, real = channels(L, 2)
    rows = first + tl.arange(0, ROWS)
    line = (rows >> _places(L)) * (L.page * L.bits // 8) + (rows & (tokens - 1))
    at = pool.codes.to(tl.pointer_type(tl.uint16), bitcast=True) + line[:, None] * (L.dim // 2) + column[None, :]
    there = (tl.arange(0, ROWS) < stop - first)[:, None] & real[None, :]
    read = ()
    for i in tl.static_range(count):
        word = tl.load(at + i * tokens * (L.dim // 2), mask=there, other=0)
        read = read + (_apart(word, F),)  # noqa: RUF005  (Triton has no unpacking)
    return read


@triton.constexpr_function
def _fields(plane, bits, planes, most):
    """Locations of the codes of a plane: byte of the row, first bit in the byte, width, first bit of the code; for each
    bit field, or part of at most ``most`` bits."""
    found, first, place = [], 0, 0
    for width in FIELDS[bits]:
        count = planes * width // 8
        byte, at = first + plane % count, plane // count * width
        found += [(byte, at + i, min(most, width), place + i) for i in range(0, width, most)]
        first, place = first + count, place + width
    return tuple(found)


@triton.jit
def _halves(words, DTYPE: tl.constexpr):
    """The halves of words as adjacent floats. The compiler leaves them in their words."""
    both = tl.join(words.to(tl.int16), (words >> 16).to(tl.int16)).to(DTYPE, bitcast=True)
    return tl.reshape(both, (words.shape[0], 2 * words.shape[1]))


@triton.jit
def _both(a, b, c, DTYPE: tl.constexpr):
    """``a * b + c`` for both halves of words, rounded once."""
    if _INTERPRETED:
        low = _fused(a, b, c, DTYPE).to(tl.int32) & 0xFFFF
        words = low | _fused(a >> 16, b >> 16, c >> 16, DTYPE).to(tl.int32) << 16
    else:
        words = tl.inline_asm_elementwise(
            "fma.rn.bf16x2 $0, $1, $2, $3;" if DTYPE.is_bf16() else "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r",
            [a, b, c], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return words


@triton.jit
def _fused(a, b, c, DTYPE: tl.constexpr):
    x, y, z = _low(a, DTYPE), _low(b, DTYPE), _low(c, DTYPE)
    return (x * y + z).to(DTYPE).to(tl.int16, bitcast=True)


@triton.jit
def _low(word, DTYPE: tl.constexpr):
    return word.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.constexpr_function
def _words_of(value, dtype):
    """``value``, which is 0 or plus or minus a power of two, in both halves of a word."""
    sign, exponent = (0x8000 if value < 0 else 0), math.frexp(abs(value))[1] - 1
    half = sign | (exponent + 15 << 10 if dtype == tl.float16 else exponent + 127 << 7)
    word = half | half << 16
    return word - (1 << 32 if sign else 0)


@triton.jit
def _number(word, AT: tl.constexpr, WIDTH: tl.constexpr, PLACE: tl.constexpr, F: tl.constexpr):
    """``WIDTH`` bits of each byte, from bit ``AT`` on, as floats times ``2**PLACE``, in words.

    If the mantissa is long enough, the bits are not shifted. One exact multiply-add subtracts the power of two and
    scales the bits, for two channels at once.
    """
    SHIFT: tl.constexpr = AT if F.mantissa < AT + WIDTH else 0
    FIELD: tl.constexpr = (2**WIDTH - 1 << AT - SHIFT) * 0x00010001
    STEP: tl.constexpr = 2.0 ** (PLACE + SHIFT - AT)
    x = word >> SHIFT & FIELD | F.power if SHIFT else word & (FIELD | F.power)
    factor = tl.full((), _words_of(STEP, F.dtype), tl.int32)
    return _both(x, factor, tl.full((), _words_of(-STEP * 2**F.mantissa, F.dtype), tl.int32), F.dtype)


@triton.jit
def _twice(word, odd):
    """Repeat the lower half of a word, or the upper half if ``odd`` is 1, in both halves; one instruction."""
    if _INTERPRETED:
        half = word >> 16 * odd & 0xFFFF
        twice = half | half << 16
    else:
        twice = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, $2;", "=r,r,r", [word, 0x1010 + 0x2222 * odd], dtype=tl.int32, is_pure=True, pack=1
        )
    return twice


@triton.jit
def _repeated(start, where, known, shape: tl.constexpr, dim: tl.constexpr):
    """Load scales or zero points at ``where`` and repeat them along ``dim`` to ``shape``: one per pair of channels, or
    one for several channels."""
    words = start.to(tl.pointer_type(tl.int32), bitcast=True)  # words are prefetched, smaller types are not
    if dim == 1:
        word = tl.load(words + where, mask=known, other=0)
    else:
        word = _twice(tl.load(words + (where >> 1), mask=known, other=0), where & 1)
    word = tl.broadcast_to(tl.expand_dims(word, dim), shape)
    return tl.reshape(word, (shape[0] * shape[1], shape[2]) if dim == 1 else (shape[0], shape[1] * shape[2]))


@triton.jit
def _params_of(first, stop, plane, ROWS: tl.constexpr, L: tl.constexpr):
    """The indices of the scales of rows ``[first, first + ROWS)`` of a plane: groups along tokens, or tokens.

    There is one index per run of rows that share scales. Also returns whether each is before row ``stop``.
    """
    tokens: tl.constexpr = L.page // L.planes
    if L.channelwise:
        run: tl.constexpr = min(L.group, tokens, ROWS)
        own = tl.arange(0, ROWS // run) * run
        row = first + own
        line = (row >> _places(L)) * (L.page // L.group) + plane * tokens // L.group + (row & (tokens - 1)) // L.group
    else:
        own = tl.arange(0, ROWS)
        row = first + own
        line = (row >> _places(L)) * L.page + plane * tokens + (row & (tokens - 1))
    return line, own < stop - first


@triton.jit
def paired_values(read, pool, first, stop, PLANE: tl.constexpr, L: tl.constexpr, F: tl.constexpr):
    """Dequantize a plane of the rows that `paired_words` has ``read``, as `values`, but in 16 bits."""
    rows: tl.constexpr = read[0].shape[0]
    pairs: tl.constexpr = read[0].shape[1]
    WHERE: tl.constexpr = _fields(PLANE, L.bits, L.planes, 4 if F.mantissa < 8 else 8)
    x = _number(read[WHERE[0][0]], WHERE[0][1], WHERE[0][2], WHERE[0][3], F)
    for i in tl.static_range(1, len(WHERE)):
        more = _number(read[WHERE[i][0]], WHERE[i][1], WHERE[i][2], WHERE[i][3], F)
        x = _both(x, tl.full((), _words_of(1.0, F.dtype), tl.int32), more, F.dtype)
    line, there = _params_of(first, stop, PLANE, rows, L)
    if L.channelwise:
        column, real = channels(L, 2)
        where, known = line[:, None] * (L.dim // 2) + column[None, :], there[:, None] & real[None, :]
        shape: tl.constexpr = (line.shape[0], rows // line.shape[0], pairs)
        dim: tl.constexpr = 1
    else:
        groups: tl.constexpr = L.dim // L.group
        padded: tl.constexpr = triton.next_power_of_2(groups)
        group = tl.arange(0, padded)
        where, known = line[:, None] * groups + group[None, :], there[:, None] & (group < groups)[None, :]
        shape: tl.constexpr = (rows, padded, pairs // padded)
        dim: tl.constexpr = 2
    scale = _repeated(pool.scale, where, known, shape, dim)
    return _halves(_both(x, scale, _repeated(pool.zero_point, where, known, shape, dim), F.dtype), F.dtype)


@triton.jit
def _field(word, plane, FIRST: tl.constexpr, WIDTH: tl.constexpr, PLANES: tl.constexpr):
    """The bits of a plane in the bit field that starts at byte ``FIRST`` of the word."""
    count: tl.constexpr = PLANES * WIDTH // 8
    return (word >> ((FIRST + plane % count) * 8 + plane // count * WIDTH)).to(tl.int32) & ((1 << WIDTH) - 1)


@triton.jit
def _codes(word, plane, BITS: tl.constexpr, PLANES: tl.constexpr):
    """The codes of a plane. 3 bits are a 2-bit and a 1-bit field, 6 bits a 4-bit and a 2-bit field."""
    if BITS % 3:
        return _field(word, plane, 0, BITS, PLANES)
    high: tl.constexpr = BITS // 3
    low = _field(word, plane, 0, 2 * high, PLANES)
    return low | _field(word, plane, PLANES * high // 4, high, PLANES) << 2 * high


@triton.jit
def _unscaled(code, points, CODE: tl.constexpr):
    """The unscaled values of codes: the codes themselves, or the ``CODE`` adjacent coordinates of grid points.

    Assembly loads the points, because the compiler would prefetch them into shared memory one by one, which took eight
    times as long as attention over floats on an H100.
    """
    if points is None:
        return (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    elif CODE == 1:
        if _INTERPRETED:
            return tl.load(points + code)
        else:
            return tl.inline_asm_elementwise(
                "ld.global.nc.b32 $0, [$1];", "=f,l", [points + code], dtype=tl.float32, is_pure=True, pack=1
            )
    else:
        at = points.to(tl.pointer_type(tl.int64), bitcast=True) + code
        if _INTERPRETED:
            both = tl.load(at)
            first, second = both.to(tl.int32), (both >> 32).to(tl.int32)
        else:
            first, second = tl.inline_asm_elementwise(
                "ld.global.nc.v2.b32 {$0, $1}, [$2];", "=r,=r,l", [at], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
            )
        return tl.reshape(tl.join(first, second).to(tl.float32, bitcast=True), (code.shape[0], 2 * code.shape[1]))


@triton.jit
def _boosts(pool, first, stop, channel, plane, ROWS: tl.constexpr, L: tl.constexpr):
    """The contribution of lower codes to a plane of rows of one page, at channels ``channel``. A product with a 0-1
    matrix moves the codes to their columns."""
    column = tl.arange(0, max(16, triton.next_power_of_2(L.boosted)))
    real = column < L.boosted
    code = _codes(words(pool.lower, first, stop, column, real, ROWS, L, True), plane, L.bits, L.planes)
    mine = tl.load(pool.boosted + (first >> _places(L)) * L.boosted + column, mask=real, other=-1)
    ones = (mine[:, None] == channel[None, :]).to(tl.float16)
    return tl.dot(code.to(tl.float16), ones, input_precision="ieee") * 0.5**L.bits


@triton.jit
def _second_level(pool, line, where, known, WHICH: tl.constexpr, L: tl.constexpr):
    """Two-level scales (``WHICH`` 0) or zero points (1) of ``line``, dequantized; ``where`` is the index of their
    codes."""
    SIZE: tl.constexpr = _params(L)
    lines: tl.constexpr = L.page // L.group if L.channelwise else L.page
    page = line[:, None] >> (lines.bit_length() - 1)
    code = tl.load(pool.scale + where + (page + WHICH) * SIZE, mask=known, other=0).to(tl.float32)
    step = tl.load(pool.zero_point + page * 4 + WHICH * 2, mask=known, other=0).to(tl.float32)
    return code * step + tl.load(pool.zero_point + page * 4 + WHICH * 2 + 1, mask=known, other=0).to(tl.float32)


@triton.jit
def _params_at(start, where, known, L: tl.constexpr):
    """Scales or zero points at ``where``, float32. Per-token ones of 16 bits are loaded as words, because words are
    prefetched and smaller types are not."""
    dtype: tl.constexpr = start.dtype.element_ty
    if L.channelwise or dtype.primitive_bitwidth != 16:
        found = tl.load(start + where, mask=known, other=0)
    else:
        word = tl.load(start.to(tl.pointer_type(tl.int32), bitcast=True) + (where >> 1), mask=known, other=0)
        found = (word >> (where & 1) * 16).to(tl.int16).to(dtype, bitcast=True)
    return found.to(tl.float32)


@triton.jit
def values(word, pool, first, stop, channel, real, plane, L: tl.constexpr, WHOLE: tl.constexpr):
    """Dequantize a plane of the rows of ``word``: ``[rows, columns]`` float32.

    channel, real: the results of `channels` if ``WHOLE``; otherwise any channels, which may be parts of groups.

    Tokens that share scales do so along whole runs of rows. Groups on grids have no zero point.
    """
    x = _unscaled(_codes(word, plane, L.bits, L.planes), pool.points, L.code)
    if L.boosted:
        x += _boosts(pool, first, stop, channel, plane, word.shape[0], L)
    line, there = _params_of(first, stop, plane, word.shape[0], L)
    if L.channelwise:
        where, known = line[:, None] * L.dim + channel[None, :], there[:, None] & real[None, :]
        shape: tl.constexpr = (line.shape[0], x.shape[0] // line.shape[0], x.shape[1])
        dim: tl.constexpr = 1
    else:
        groups: tl.constexpr = L.dim // L.group
        padded: tl.constexpr = triton.next_power_of_2(groups) if WHOLE else x.shape[1]
        group = tl.arange(0, padded) if WHOLE else channel // L.group
        counts = group < groups if WHOLE else real
        where, known = line[:, None] * groups + group[None, :], there[:, None] & counts[None, :]
        shape: tl.constexpr = (x.shape[0], padded, x.shape[1] // padded)
        dim: tl.constexpr = 2
    if L.two_level:
        scale = _second_level(pool, line, where, known, 0, L)
        zero_point = _second_level(pool, line, where, known, 1, L)
        return tl.reshape(tl.reshape(x, shape) * tl.expand_dims(scale, dim) + tl.expand_dims(zero_point, dim), x.shape)
    by_group = tl.reshape(x, shape) * tl.expand_dims(_params_at(pool.scale, where, known, L), dim)
    if pool.points is None:
        by_group += tl.expand_dims(_params_at(pool.zero_point, where, known, L), dim)
    return tl.reshape(by_group, x.shape)

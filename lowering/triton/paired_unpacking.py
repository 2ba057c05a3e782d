"""Unpacks and dequantizes pages in 16 bits: two channels share each instruction.

This is `unpacking.values` for products of 16 bits whose planes are all read together.
"""

import math
from typing import NamedTuple

import triton
import triton.language as tl

from kvpass.codec.bitpack import FIELDS

from .unpacking import INTERPRETED, channels, lines_of, lines_of_params, param_rows


class PairFormat(NamedTuple):
    """How pairs of channels are unpacked.

    A word has one byte of each channel, at the low end of 16 bits, combined with the power of two of ``dtype`` whose
    last mantissa bit has weight 1. mantissa: mantissa bits of ``dtype``. power: that power of two, in both halves.
    """

    dtype: tl.dtype
    mantissa: int
    power: int


@triton.constexpr_function
def pair_format(points, L, dtype, together):
    """The `PairFormat` for products of ``dtype``, or None if channels cannot be paired.

    It is None if values are looked up, rotated or boosted, have two-level scales, or are multiplied in float32, and if
    planes are not all read together, because they are then not known at compile time.
    """
    odd = (L.dim if L.channelwise else L.group) % 2
    if points is not None or L.pairs or L.two_level or L.boosted or odd or dtype == tl.float32 or together < L.planes:
        return None
    return PairFormat(dtype, 10, 0x64006400) if dtype == tl.float16 else PairFormat(dtype, 7, 0x43004300)


@triton.jit
def _spread_bytes(word, F: tl.constexpr):
    """Spread two bytes over the halves of a word, combined with the power of two of the format. This takes one
    instruction, which the assembler does not split. With masks and shifts, it would recreate the constant at each
    use."""
    if INTERPRETED:
        spread = word.to(tl.int32) & 0xFF | (word.to(tl.int32) & 0xFF00) << 8 | F.power
    else:
        POWER: tl.constexpr = "0x64" if F.mantissa == 10 else "0x43"
        spread = tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, " + POWER + ", 0x4140; prmt.b32 $1, $2, " + POWER + ", 0x4342;", "=r,=r,r", [word],
            dtype=tl.int32, is_pure=True, pack=2,
        )  # fmt: skip
    return spread


@triton.jit
def load_paired_words(pool, first, stop, ROWS: tl.constexpr, L: tl.constexpr, F: tl.constexpr):
    """The bytes of rows ``[first, first + ROWS)``: one tile ``[ROWS, pairs of channels]`` per byte of a row."""
    tokens: tl.constexpr = L.page // L.planes
    count: tl.constexpr = L.planes * L.bits // 8
    column, col_mask = channels(L, 2)
    rows, in_bounds = first + tl.arange(0, ROWS), tl.arange(0, ROWS) < stop - first
    codes, line = lines_of(pool.codes, pool, rows, rows & (tokens - 1), in_bounds, L.page * L.bits // 8, L)
    at = codes.to(tl.pointer_type(tl.uint16), bitcast=True) + line[:, None] * (L.dim // 2) + column[None, :]
    row_mask = in_bounds[:, None] & col_mask[None, :]
    read = ()
    for i in tl.static_range(count):
        word = tl.load(at + i * tokens * (L.dim // 2), mask=row_mask, other=0)
        read = read + (_spread_bytes(word, F),)  # noqa: RUF005  (Triton has no unpacking)
    return read


@triton.constexpr_function
def _bit_fields(plane, bits, planes, most):
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
def _as_floats(words, DTYPE: tl.constexpr):
    """The halves of words as adjacent floats. The compiler leaves them in their words."""
    halves = tl.join(words.to(tl.int16), (words >> 16).to(tl.int16)).to(DTYPE, bitcast=True)
    return tl.reshape(halves, (words.shape[0], 2 * words.shape[1]))


@triton.jit
def _paired_fma(a, b, c, DTYPE: tl.constexpr):
    """``a * b + c`` for both halves of words, rounded once."""
    if INTERPRETED:
        low = _fma_of_low_half(a, b, c, DTYPE).to(tl.int32) & 0xFFFF
        words = low | _fma_of_low_half(a >> 16, b >> 16, c >> 16, DTYPE).to(tl.int32) << 16
    else:
        words = tl.inline_asm_elementwise(
            "fma.rn.bf16x2 $0, $1, $2, $3;" if DTYPE.is_bf16() else "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r",
            [a, b, c], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return words


@triton.jit
def _fma_of_low_half(a, b, c, DTYPE: tl.constexpr):
    x, y, z = _low_half(a, DTYPE), _low_half(b, DTYPE), _low_half(c, DTYPE)
    return (x * y + z).to(DTYPE).to(tl.int16, bitcast=True)


@triton.jit
def _low_half(word, DTYPE: tl.constexpr):
    return word.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.constexpr_function
def _in_both_halves(value, dtype):
    """``value``, which is 0 or plus or minus a power of two, in both halves of a word."""
    sign, exponent = (0x8000 if value < 0 else 0), math.frexp(abs(value))[1] - 1
    half = sign | (exponent + 15 << 10 if dtype == tl.float16 else exponent + 127 << 7)
    word = half | half << 16
    return word - (1 << 32 if sign else 0)


@triton.jit
def _paired_codes(word, AT: tl.constexpr, WIDTH: tl.constexpr, PLACE: tl.constexpr, F: tl.constexpr):
    """``WIDTH`` bits of each byte, from bit ``AT`` on, as floats times ``2**PLACE``, in words.

    If the mantissa is long enough, the bits are not shifted. One exact multiply-add subtracts the power of two and
    scales the bits, for two channels at once.
    """
    SHIFT: tl.constexpr = AT if F.mantissa < AT + WIDTH else 0
    FIELD: tl.constexpr = (2**WIDTH - 1 << AT - SHIFT) * 0x00010001
    STEP: tl.constexpr = 2.0 ** (PLACE + SHIFT - AT)
    x = word >> SHIFT & FIELD | F.power if SHIFT else word & (FIELD | F.power)
    factor = tl.full((), _in_both_halves(STEP, F.dtype), tl.int32)
    return _paired_fma(x, factor, tl.full((), _in_both_halves(-STEP * 2**F.mantissa, F.dtype), tl.int32), F.dtype)


@triton.jit
def _repeat_half(word, odd):
    """Repeat the lower half of a word, or the upper half if ``odd`` is 1, in both halves; one instruction."""
    if INTERPRETED:
        half = word >> 16 * odd & 0xFFFF
        word = half | half << 16
    else:
        word = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, $2;", "=r,r,r", [word, 0x1010 + 0x2222 * odd], dtype=tl.int32, is_pure=True, pack=1
        )
    return word


@triton.jit
def _load_repeated(start, where, in_bounds, shape: tl.constexpr, dim: tl.constexpr):
    """Load scales or zero points at ``where`` and repeat them along ``dim`` to ``shape``: one per pair of channels, or
    one for several channels."""
    words = start.to(tl.pointer_type(tl.int32), bitcast=True)  # words are prefetched, smaller types are not
    if dim == 1:
        word = tl.load(words + where, mask=in_bounds, other=0)
    else:
        word = _repeat_half(tl.load(words + (where >> 1), mask=in_bounds, other=0), where & 1)
    word = tl.broadcast_to(tl.expand_dims(word, dim), shape)
    return tl.reshape(word, (shape[0] * shape[1], shape[2]) if dim == 1 else (shape[0], shape[1] * shape[2]))


@triton.jit
def paired_values(read, pool, first, stop, PLANE: tl.constexpr, L: tl.constexpr, F: tl.constexpr):
    """Dequantize a plane of the rows that `load_paired_words` has ``read``, as `values`, but in 16 bits."""
    rows: tl.constexpr = read[0].shape[0]
    pairs: tl.constexpr = read[0].shape[1]
    WHERE: tl.constexpr = _bit_fields(PLANE, L.bits, L.planes, 4 if F.mantissa < 8 else 8)
    x = _paired_codes(read[WHERE[0][0]], WHERE[0][1], WHERE[0][2], WHERE[0][3], F)
    for i in tl.static_range(1, len(WHERE)):
        more = _paired_codes(read[WHERE[i][0]], WHERE[i][1], WHERE[i][2], WHERE[i][3], F)
        x = _paired_fma(x, tl.full((), _in_both_halves(1.0, F.dtype), tl.int32), more, F.dtype)
    row, within, row_mask = param_rows(first, stop, PLANE, rows, L)
    scale, line = lines_of(pool.scale, pool, row, within, row_mask, lines_of_params(L), L)
    zero_point, _ = lines_of(pool.zero_point, pool, row, within, row_mask, lines_of_params(L), L)
    if L.channelwise:
        column, col_mask = channels(L, 2)
        where, in_bounds = line[:, None] * (L.dim // 2) + column[None, :], row_mask[:, None] & col_mask[None, :]
        shape: tl.constexpr = (line.shape[0], rows // line.shape[0], pairs)
        dim: tl.constexpr = 1
    else:
        groups: tl.constexpr = L.dim // L.group
        padded: tl.constexpr = triton.next_power_of_2(groups)
        group = tl.arange(0, padded)
        where, in_bounds = line[:, None] * groups + group[None, :], row_mask[:, None] & (group < groups)[None, :]
        shape: tl.constexpr = (rows, padded, pairs // padded)
        dim: tl.constexpr = 2
    factor = _load_repeated(scale, where, in_bounds, shape, dim)
    added = _load_repeated(zero_point, where, in_bounds, shape, dim)
    return _as_floats(_paired_fma(x, factor, added, F.dtype), F.dtype)

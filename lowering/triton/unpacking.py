"""Packed pages, read by a kernel: from bytes to values without leaving registers.

Kernels walk over *rows*: row f of a pool is row ``f % T`` of page ``f // T``, and stands for one token of each of the
page's planes, T apart. Its bytes are loaded once, as one word. A plane then takes a shift and a mask, whatever the
width, and its codes become the mantissa of a float, so that no integer is converted. Where products are of 16 bits and
all planes are taken together, two channels share each instruction instead (`paired_values`).
"""

import math
from typing import NamedTuple

import triton
import triton.language as tl

from kvpass.codec.bitpack import FIELDS

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


class Layout(NamedTuple):
    """What a kernel knows of a packed tensor when it is compiled: its spec, and how pages are walked over.

    code: values of a code. planes: tokens of a row, as many as keys and values can be unpacked in together. residual:
    tokens behind the pages at least; window: slots for them. pairs, interleaved: the rotation (`kvpass.codec.rope`) of
    tokens as they are read; no pairs, none. two_level: scales are codes (`kvpass.codec.second_level`). boosted:
    channels of a page with lower codes (`kvpass.codec.boost`).
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
    """Pointers to a KV head of a packed tensor, None for what it has not; ``points`` are those of its grid.

    Where scales are codes, ``scale`` are these and those of zero points, ``zero_point`` the two numbers that either
    stands under. lower, boosted: codes and places of channels in twice the bits.
    """

    codes: tl.tensor
    scale: tl.tensor
    zero_point: tl.tensor
    points: tl.tensor | None
    lower: tl.tensor | None
    boosted: tl.tensor | None


@triton.constexpr_function
def _params(layout):
    """Scales of a page."""
    if layout.channelwise:
        return layout.page // layout.group * layout.dim
    return layout.page * (layout.dim // layout.group)


@triton.jit
def zero_points_of(zero_point, head, params, L: tl.constexpr):
    """Those of a head, of a pointer to the first; params: scales from head to head."""
    SIZE: tl.constexpr = _params(L)
    return zero_point + head * (params // (2 * SIZE) * 4 if L.two_level else params)


@triton.jit
def boosted_of(lower, boosted, head, stride, L: tl.constexpr):
    """Lower codes and places of boosted channels of a head, of pointers to the first; stride: from head to head."""
    pages = stride // (L.page * L.bits // 8 * L.dim)
    return lower + head * pages * (L.page * L.bits // 8 * L.boosted), boosted + head * pages * L.boosted


@triton.jit
def columns(GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """The channel of each column of a tile, and whether there is one: groups are padded to powers of two."""
    size: tl.constexpr = triton.next_power_of_2(GROUP)
    column = tl.arange(0, size * triton.next_power_of_2(GROUPS))
    if size == GROUP:
        return column, column < GROUP * GROUPS
    return column // size * GROUP + column % size, (column % size < GROUP) & (column // size < GROUPS)


@triton.jit
def channels(L: tl.constexpr, CODE: tl.constexpr):
    """`columns` of whole tokens, of codes for ``CODE`` channels each."""
    return columns(L.dim // CODE if L.channelwise else L.group // CODE, 1 if L.channelwise else L.dim // L.group)


@triton.constexpr_function
def _places(layout):
    """Which power of two the rows of a page are: they are counted by shifts, not by signed divisions."""
    return (layout.page // layout.planes).bit_length() - 1


@triton.jit
def packed_rows(n, L: tl.constexpr):
    """How many rows of pages there are once ``n`` tokens are stored (`Retention.packed`)."""
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
    """All codes of rows ``[first, first + ROWS)``, ``[ROWS, columns]``, 0 from ``stop`` on; or the ``LOWER`` ones."""
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
    """How pairs of channels are unpacked: a byte of each in one word, at the end of its 16 bits, under the power of two
    whose last mantissa bit is worth 1; ``mantissa`` bits of ``dtype``."""

    dtype: tl.dtype
    mantissa: int
    power: int


@triton.constexpr_function
def form_of(points, L, dtype, together):
    """The `Form` for products of ``dtype``. None where values are looked up, rotated, boosted, under scales that are
    codes, or multiplied in float32, or where planes are not known when the kernel is compiled, because they are not all
    taken together."""
    odd = (L.dim if L.channelwise else L.group) % 2
    if points is not None or L.pairs or L.two_level or L.boosted or odd or dtype == tl.float32 or together < L.planes:
        return None
    return Form(dtype, 10, 0x64006400) if dtype == tl.float16 else Form(dtype, 7, 0x43004300)


@triton.jit
def _apart(word, F: tl.constexpr):
    """Two bytes of a word, each low in a half of its own under the power of two of the form. In one instruction, which
    the assembler does not take apart: of masks and shifts it makes the constant anew wherever it is used."""
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
    """The bytes of rows ``[first, first + ROWS)``: a tile ``[ROWS, pairs of channels]`` for each byte of a row."""
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
    """Where a plane has its codes: byte of the row, first bit there, width, first bit of the code; for each bit field,
    or parts of ``most`` bits."""
    found, first, place = [], 0, 0
    for width in FIELDS[bits]:
        count = planes * width // 8
        byte, at = first + plane % count, plane // count * width
        found += [(byte, at + i, min(most, width), place + i) for i in range(0, width, most)]
        first, place = first + count, place + width
    return tuple(found)


@triton.jit
def _halves(words, DTYPE: tl.constexpr):
    """The halves of words, beside each other, as floats. The compiler leaves them in their words."""
    both = tl.join(words.to(tl.int16), (words >> 16).to(tl.int16)).to(DTYPE, bitcast=True)
    return tl.reshape(both, (words.shape[0], 2 * words.shape[1]))


@triton.jit
def _both(a, b, c, DTYPE: tl.constexpr):
    """``a * b + c`` of both halves of words, rounded once."""
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
    """A power of two, or 0, or the negative of one, in both halves of a word."""
    sign, exponent = (0x8000 if value < 0 else 0), math.frexp(abs(value))[1] - 1
    half = sign | (exponent + 15 << 10 if dtype == tl.float16 else exponent + 127 << 7)
    word = half | half << 16
    return word - (1 << 32 if sign else 0)


@triton.jit
def _number(word, AT: tl.constexpr, WIDTH: tl.constexpr, PLACE: tl.constexpr, F: tl.constexpr):
    """``WIDTH`` bits of each byte, from bit ``AT`` on, as floats times ``2**PLACE``, in words.

    They stay where they are in the mantissa, if it is that long, and one multiply-add, which is exact, takes the power
    of two away and moves them to their place: for two channels at once, as sums and products of 16 bits are.
    """
    SHIFT: tl.constexpr = AT if F.mantissa < AT + WIDTH else 0
    FIELD: tl.constexpr = (2**WIDTH - 1 << AT - SHIFT) * 0x00010001
    STEP: tl.constexpr = 2.0 ** (PLACE + SHIFT - AT)
    x = word >> SHIFT & FIELD | F.power if SHIFT else word & (FIELD | F.power)
    factor = tl.full((), _words_of(STEP, F.dtype), tl.int32)
    return _both(x, factor, tl.full((), _words_of(-STEP * 2**F.mantissa, F.dtype), tl.int32), F.dtype)


@triton.jit
def _twice(word, odd):
    """The lower half of a word in both of its halves, the upper one where ``odd`` is 1; in one instruction, too."""
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
    """Scales or zero points at ``where``, along ``dim`` as often as ``shape`` says: those of pairs of channels, or one
    for many channels."""
    words = start.to(tl.pointer_type(tl.int32), bitcast=True)  # which are read ahead, and what is smaller is not
    if dim == 1:
        word = tl.load(words + where, mask=known, other=0)
    else:
        word = _twice(tl.load(words + (where >> 1), mask=known, other=0), where & 1)
    word = tl.broadcast_to(tl.expand_dims(word, dim), shape)
    return tl.reshape(word, (shape[0] * shape[1], shape[2]) if dim == 1 else (shape[0], shape[1] * shape[2]))


@triton.jit
def _params_of(first, stop, plane, ROWS: tl.constexpr, L: tl.constexpr):
    """The groups along tokens, or the tokens, that rows ``[first, first + ROWS)`` of a plane take their scales from,
    one for each run of rows that share theirs, and whether it is before row ``stop``."""
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
    """A plane of the rows of which `paired_words` were ``read``, dequantized as `values` does, but in 16 bits."""
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
    """What a plane has of a bit field that begins at byte ``FIRST`` of the word."""
    count: tl.constexpr = PLANES * WIDTH // 8
    return (word >> ((FIRST + plane % count) * 8 + plane // count * WIDTH)).to(tl.int32) & ((1 << WIDTH) - 1)


@triton.jit
def _codes(word, plane, BITS: tl.constexpr, PLANES: tl.constexpr):
    """The codes of a plane. 3 bits are a field of 2 and one of 1, 6 bits one of 4 and one of 2."""
    if BITS % 3:
        return _field(word, plane, 0, BITS, PLANES)
    high: tl.constexpr = BITS // 3
    low = _field(word, plane, 0, 2 * high, PLANES)
    return low | _field(word, plane, PLANES * high // 4, high, PLANES) << 2 * high


@triton.jit
def _unscaled(code, points, CODE: tl.constexpr):
    """What codes stand for: themselves, or the ``CODE`` coordinates of a grid's point, beside each other."""
    if points is None:
        return (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    elif CODE == 1:
        return tl.load(points + code)
    else:
        both = tl.load(points.to(tl.pointer_type(tl.int64), bitcast=True) + code)
        pairs = tl.join(both.to(tl.int32), (both >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
        return tl.reshape(pairs, (code.shape[0], 2 * code.shape[1]))


@triton.jit
def _boosts(pool, first, stop, channel, plane, ROWS: tl.constexpr, L: tl.constexpr):
    """What lower codes add to those of a plane of rows, which are of one page, at channels ``channel``: a product with
    ones puts them in their columns."""
    column = tl.arange(0, max(16, triton.next_power_of_2(L.boosted)))
    real = column < L.boosted
    code = _codes(words(pool.lower, first, stop, column, real, ROWS, L, True), plane, L.bits, L.planes)
    mine = tl.load(pool.boosted + (first >> _places(L)) * L.boosted + column, mask=real, other=-1)
    ones = (mine[:, None] == channel[None, :]).to(tl.float16)
    return tl.dot(code.to(tl.float16), ones, input_precision="ieee") * 0.5**L.bits


@triton.jit
def _second_level(pool, line, where, known, WHICH: tl.constexpr, L: tl.constexpr):
    """Scales (``WHICH`` 0), or zero points (1), of codes of them at ``where`` in their page; those of ``line``."""
    SIZE: tl.constexpr = _params(L)
    lines: tl.constexpr = L.page // L.group if L.channelwise else L.page
    page = line[:, None] >> (lines.bit_length() - 1)
    code = tl.load(pool.scale + where + (page + WHICH) * SIZE, mask=known, other=0).to(tl.float32)
    step = tl.load(pool.zero_point + page * 4 + WHICH * 2, mask=known, other=0).to(tl.float32)
    return code * step + tl.load(pool.zero_point + page * 4 + WHICH * 2 + 1, mask=known, other=0).to(tl.float32)


@triton.jit
def _params_at(start, where, known, L: tl.constexpr):
    """Scales or zero points at ``where``, float32. Those of tokens come in words, if they are of 16 bits, because a
    word is read ahead, and what is smaller is not."""
    dtype: tl.constexpr = start.dtype.element_ty
    if L.channelwise or dtype.primitive_bitwidth != 16:
        found = tl.load(start + where, mask=known, other=0)
    else:
        word = tl.load(start.to(tl.pointer_type(tl.int32), bitcast=True) + (where >> 1), mask=known, other=0)
        found = (word >> (where & 1) * 16).to(tl.int16).to(dtype, bitcast=True)
    return found.to(tl.float32)


@triton.jit
def values(word, pool, first, stop, channel, real, plane, L: tl.constexpr, WHOLE: tl.constexpr):
    """A plane of the rows of ``word``, dequantized: ``[rows, columns]`` float32.

    channel, real: those of `channels` if ``WHOLE``, otherwise any; tokens that share scales do so along whole runs of
    rows, channels along groups, of which there are only parts if not ``WHOLE``. Groups on grids have no zero point.
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

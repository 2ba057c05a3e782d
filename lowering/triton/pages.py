"""Packed pages, read by a kernel: from bytes to values without leaving registers.

Kernels walk over *rows*: row f of a pool is row ``f % T`` of page ``f // T``, and stands for one token of each of the
page's planes, T apart. Its bytes are loaded once, as one word. A plane then takes a shift and a mask, whatever the
width, and its codes become the mantissa of a float, so that no integer is converted.
"""

import triton
import triton.language as tl


@triton.jit
def columns(GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """The channel of each column of a tile, and whether there is one: groups are padded to powers of two."""
    size: tl.constexpr = triton.next_power_of_2(GROUP)
    column = tl.arange(0, size * triton.next_power_of_2(GROUPS))
    if size == GROUP:
        return column, column < GROUP * GROUPS
    return column // size * GROUP + column % size, (column % size < GROUP) & (column // size < GROUPS)


@triton.jit
def words(
    codes, first, stop, channel, real, ROWS: tl.constexpr, BITS: tl.constexpr, PAGE: tl.constexpr,
    PLANES: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """All codes of rows ``[first, first + ROWS)``, ``[ROWS, columns]``, 0 from ``stop`` on."""
    tokens: tl.constexpr = PAGE // PLANES
    wide: tl.constexpr = PLANES * BITS > 32
    rows = first + tl.arange(0, ROWS)
    line = rows // tokens * (PAGE * BITS // 8) + rows % tokens
    byte = codes + line[:, None] * DIM + channel[None, :]
    there = (rows < stop)[:, None] & real[None, :]
    word = tl.zeros(byte.shape, tl.int64 if wide else tl.int32)
    for i in tl.static_range(PLANES * BITS // 8):
        word |= tl.load(byte + i * tokens * DIM, mask=there, other=0).to(word.dtype) << 8 * i
    return word


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
        pairs = tl.join(tl.load(points + 2 * code), tl.load(points + 2 * code + 1))
        return tl.reshape(pairs, (code.shape[0], 2 * code.shape[1]))


@triton.jit
def values(
    word, scale, zero_point, points, first, stop, channel, real, plane, BITS: tl.constexpr, CODE: tl.constexpr,
    CHANNELWISE: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, PLANES: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """A plane of the rows of ``word``, dequantized: ``[rows, columns]`` float32.

    channel, real: from `columns`; tokens that share scales do so along whole runs of rows, channels along groups.
    points: those of the grid, if there is one: then groups have no zero point.
    """
    tokens: tl.constexpr = PAGE // PLANES
    x = _unscaled(_codes(word, plane, BITS, PLANES), points, CODE)
    if CHANNELWISE:
        run: tl.constexpr = min(GROUP, tokens, word.shape[0])
        row = first + tl.arange(0, word.shape[0] // run) * run
        group = row // tokens * (PAGE // GROUP) + plane * tokens // GROUP + row % tokens // GROUP
        where, known = group[:, None] * DIM + channel[None, :], (row < stop)[:, None] & real[None, :]
    else:
        groups: tl.constexpr = DIM // GROUP
        row, group = first + tl.arange(0, word.shape[0]), tl.arange(0, triton.next_power_of_2(groups))
        token = row // tokens * PAGE + plane * tokens + row % tokens
        where, known = token[:, None] * groups + group[None, :], (row < stop)[:, None] & (group < groups)[None, :]
    s = tl.load(scale + where, mask=known, other=0).to(tl.float32)
    if points is not None:
        by_group = tl.reshape(x, (x.shape[0], s.shape[1], x.shape[1] // s.shape[1])) * s[:, :, None]
        return tl.reshape(by_group, x.shape)
    z = tl.load(zero_point + where, mask=known, other=0).to(tl.float32)
    if CHANNELWISE:
        by_group = tl.reshape(x, (s.shape[0], run, x.shape[1])) * s[:, None, :] + z[:, None, :]
    else:
        by_group = tl.reshape(x, (x.shape[0], s.shape[1], x.shape[1] // s.shape[1])) * s[:, :, None] + z[:, :, None]
    return tl.reshape(by_group, x.shape)

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
def _codes(word, plane, BITS: tl.constexpr, PLANES: tl.constexpr):
    """The codes of a plane. 3 bits are a field of 2 in the first bytes, and one of 1 in the last."""
    low: tl.constexpr = 2 if BITS == 3 else BITS
    bytes_: tl.constexpr = PLANES * low // 8
    code = (word >> (plane % bytes_ * 8 + plane // bytes_ * low)).to(tl.int32) & ((1 << low) - 1)
    return code | (word >> (16 + plane) & 1) << 2 if BITS == 3 else code


@triton.jit
def values(
    word, scale, zero_point, first, stop, channel, real, plane, BITS: tl.constexpr, CHANNELWISE: tl.constexpr,
    GROUP: tl.constexpr, PAGE: tl.constexpr, PLANES: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """A plane of the rows of ``word``, dequantized: ``[rows, columns]`` float32.

    channel, real: from `columns`; tokens that share scales do so along whole runs of rows, channels along groups.
    """
    tokens: tl.constexpr = PAGE // PLANES
    x = (_codes(word, plane, BITS, PLANES) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
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
    z = tl.load(zero_point + where, mask=known, other=0).to(tl.float32)
    if CHANNELWISE:
        by_group = tl.reshape(x, (s.shape[0], run, x.shape[1])) * s[:, None, :] + z[:, None, :]
    else:
        by_group = tl.reshape(x, (x.shape[0], s.shape[1], x.shape[1] // s.shape[1])) * s[:, :, None] + z[:, :, None]
    return tl.reshape(by_group, x.shape)

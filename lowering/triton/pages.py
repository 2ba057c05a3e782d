"""Packed pages, read by a kernel: from bytes to values without leaving registers.

Kernels walk over *rows*: row f of a pool is row ``f % T`` of page ``f // T``, and stands for one token of each of the
page's planes, T apart. A plane takes a shift and a mask, whatever the width. The codes land in the mantissa of a float
between 1 and 2, so that no integer is converted, and the multiply-add of scale and zero point takes the 1 back.
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
def _field(
    codes, page, row, channel, there, PLANE: tl.constexpr, FIRST: tl.constexpr, AT: tl.constexpr, WIDTH: tl.constexpr,
    BITS: tl.constexpr, PAGE: tl.constexpr, PLANES: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """One bit field of a plane, where it belongs in the mantissa. It fills byte rows from ``FIRST`` on."""
    lines: tl.constexpr = PAGE * WIDTH // 8
    skipped: tl.constexpr = PLANE * (PAGE // PLANES)
    top: tl.constexpr = 23 - BITS + AT
    line = page * (PAGE * BITS // 8) + FIRST + skipped % lines + row
    byte = tl.load(codes + line[:, None] * DIM + channel[None, :], mask=there, other=0).to(tl.int32)
    return (byte << (top - skipped // lines * WIDTH)) & (((1 << WIDTH) - 1) << top)


@triton.jit
def values(
    codes, scale, zero_point, first, stop, channel, real, ROWS: tl.constexpr, PLANE: tl.constexpr, BITS: tl.constexpr,
    CHANNELWISE: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, PLANES: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Plane ``PLANE`` of rows ``[first, first + ROWS)``, dequantized: ``[ROWS, columns]`` float32, 0 from ``stop`` on.

    channel, real: from `columns`; tokens that share scales do so along whole runs of rows, channels along groups.
    """
    tokens: tl.constexpr = PAGE // PLANES
    rows = first + tl.arange(0, ROWS)
    page, row = rows // tokens, rows % tokens
    there = (rows < stop)[:, None] & real[None, :]
    if BITS == 3:
        low = _field(codes, page, row, channel, there, PLANE, 0, 0, 2, BITS, PAGE, PLANES, DIM)
        high = _field(codes, page, row, channel, there, PLANE, PAGE // 4, 2, 1, BITS, PAGE, PLANES, DIM)
        mantissa = low | high
    else:
        mantissa = _field(codes, page, row, channel, there, PLANE, 0, 0, BITS, BITS, PAGE, PLANES, DIM)
    x = (mantissa | 0x3F800000).to(tl.float32, bitcast=True)
    if CHANNELWISE:
        run: tl.constexpr = min(GROUP, tokens, ROWS)
        starts = first + tl.arange(0, ROWS // run) * run
        group = starts // tokens * (PAGE // GROUP) + (PLANE * tokens + starts % tokens) // GROUP
        where, known = group[:, None] * DIM + channel[None, :], (starts < stop)[:, None] & real[None, :]
    else:
        groups: tl.constexpr = DIM // GROUP
        group = tl.arange(0, triton.next_power_of_2(groups))
        token = page * PAGE + PLANE * tokens + row
        where, known = token[:, None] * groups + group[None, :], (rows < stop)[:, None] & (group < groups)[None, :]
    s = tl.load(scale + where, mask=known, other=0).to(tl.float32) * (1 << BITS)
    z = tl.load(zero_point + where, mask=known, other=0).to(tl.float32) - s
    if CHANNELWISE:
        by_group = tl.reshape(x, (ROWS // run, run, x.shape[1])) * s[:, None, :] + z[:, None, :]
    else:
        by_group = tl.reshape(x, (ROWS, s.shape[1], x.shape[1] // s.shape[1])) * s[:, :, None] + z[:, :, None]
    return tl.reshape(by_group, x.shape)

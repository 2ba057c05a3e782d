"""Packed pages, written by a kernel: how they are cut into tiles, and from codes in registers to bytes."""

from typing import NamedTuple

import triton
import triton.language as tl

from .unpacking import columns


class Codec(NamedTuple):
    """What a kernel knows when it is compiled: the spec, how parameters are rounded, and how pages are cut into tiles
    (`configs.EncodeConfig`; ``span`` is the block that is compensated at a time).

    code: values of a code; ``group``, ``dim`` and ``span`` count codes. points: those of the grid, 0 for uniform codes.
    refit: whether the scale is fitted to the codes.
    """

    bits: int
    code: int
    points: int
    channelwise: bool
    group: int
    page: int
    planes: int
    dim: int
    eta: float
    refit: bool
    params: tl.dtype
    eps: float
    tiny: float
    rows: int
    span: int
    spans: int


@triton.jit
def nearest(x, DTYPE: tl.constexpr):
    """``x`` rounded to what ``DTYPE`` holds, ties to even, as float32."""
    if DTYPE.is_bf16():  # spelled out: the interpreter would cut bits off
        bits = x.to(tl.uint32, bitcast=True)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def tile_of(first, C: tl.constexpr):
    """The tokens of a program's tile in their page, its columns, and which of those there are."""
    column, real = columns(C.span, C.spans)
    column += tl.program_id(2) * C.span * C.spans
    token = tl.arange(0, C.planes * C.rows)
    token = token // C.rows * (C.page // C.planes) + first + token % C.rows
    return token, column, real & (column < C.dim)


@triton.jit
def head_at(x, page, pages, x_batch, x_head, x_token, HEADS: tl.constexpr, C: tl.constexpr):
    """Where the tokens of page ``page`` begin, of all samples' and heads' pages."""
    lead = page // pages
    return x + lead // HEADS * x_batch + lead % HEADS * x_head + page % pages * C.page * x_token


@triton.jit
def _pack(out, codes, column, real, first, SHIFT: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr):
    """Bits ``[SHIFT, SHIFT + WIDTH)`` of codes ``[planes * rows, columns]``, to byte rows of a field at ``out``."""
    planes: tl.constexpr = 8 // WIDTH
    lines: tl.constexpr = codes.shape[0] // planes
    field = tl.reshape((codes >> SHIFT) & ((1 << WIDTH) - 1), (planes, lines, codes.shape[1]))
    line = tl.arange(0, lines)
    line = line // C.rows * (C.page // C.planes) + first + line % C.rows
    packed = tl.sum(field << (tl.arange(0, planes) * WIDTH)[:, None, None], 0)
    tl.store(out + line[:, None] * C.dim + column[None, :], packed.to(tl.uint8), mask=real[None, :])


@triton.jit
def pack_fields(codes, code, column, real, first, C: tl.constexpr):
    """Codes of a tile into the page at ``codes``. 3 bits are a field of 2 and one of 1, 6 bits one of 4 and of 2."""
    if C.bits % 3:
        _pack(codes, code, column, real, first, 0, C.bits, C)
    else:
        high: tl.constexpr = C.bits // 3
        _pack(codes, code, column, real, first, 0, 2 * high, C)
        _pack(codes + C.page * high // 4 * C.dim, code, column, real, first, 2 * high, high, C)


@triton.jit
def store_along_tokens(parameter, stored, page, channel, real, C: tl.constexpr):
    """A parameter of all groups of a page in some channels."""
    groups: tl.constexpr = C.page // C.group
    at = (page * groups + tl.arange(0, groups)[:, None]) * C.dim + channel[None, :]
    tl.store(parameter + at, stored.to(C.params), mask=real[None, :])


@triton.jit
def store_along_channels(parameter, stored, page, token, C: tl.constexpr):
    """A parameter of the groups of a tile's tokens."""
    groups: tl.constexpr = C.dim // C.group
    of_tile = tl.arange(0, stored.shape[1])
    group = tl.program_id(2) * C.spans + of_tile
    at, kept = (page * C.page + token[:, None]) * groups + group[None, :], (of_tile < C.spans) & (group < groups)
    tl.store(parameter + at, stored.to(C.params), mask=kept[None, :])

"""Writes packed pages in kernels: divides pages into tiles, and packs codes from registers into bytes."""

from typing import NamedTuple

import triton
import triton.language as tl

from .unpacking import columns


class Codec(NamedTuple):
    """Compile-time constants of a kernel: the spec, the rounding of parameters, and the tiles of pages.

    code: number of values per code. ``group``, ``dim`` and ``span`` count codes.
    points: number of grid points; 0 for uniform quantization.
    refit: whether the scale is fitted to the codes.
    params, eps, tiny: dtype of scales and zero points, and its rounding margins.
    rows, span, spans: see `configs.QuantizeConfig`. With compensation, ``span`` is the block size.
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
    """``x`` rounded to ``DTYPE``, ties to even, as float32."""
    if DTYPE.is_bf16():  # explicit, because the interpreter truncates
        bits = x.to(tl.uint32, bitcast=True)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def tile_of(first, C: tl.constexpr):
    """The tokens of a program's tile, as indices in their page, its columns, and which columns exist."""
    column, col_mask = columns(C.span, C.spans)
    column += tl.program_id(2) * C.span * C.spans
    token = tl.arange(0, C.planes * C.rows)
    token = token // C.rows * (C.page // C.planes) + first + token % C.rows
    return token, column, col_mask & (column < C.dim)


@triton.jit
def head_at(x, page, pages, x_batch, x_head, x_token, HEADS: tl.constexpr, C: tl.constexpr):
    """Pointer to the first token of ``page``, which counts the pages of all samples and heads."""
    lead = page // pages
    return x + lead // HEADS * x_batch + lead % HEADS * x_head + page % pages * C.page * x_token


@triton.jit
def _pack(out, codes, column, col_mask, first, SHIFT: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr):
    """Write bits ``[SHIFT, SHIFT + WIDTH)`` of codes ``[planes * rows, columns]`` to the byte rows of a bit field at
    ``out``."""
    planes: tl.constexpr = 8 // WIDTH
    lines: tl.constexpr = codes.shape[0] // planes
    field = tl.reshape((codes >> SHIFT) & ((1 << WIDTH) - 1), (planes, lines, codes.shape[1]))
    line = tl.arange(0, lines)
    line = line // C.rows * (C.page // C.planes) + first + line % C.rows
    packed = tl.sum(field << (tl.arange(0, planes) * WIDTH)[:, None, None], 0)
    tl.store(out + line[:, None] * C.dim + column[None, :], packed.to(tl.uint8), mask=col_mask[None, :])


@triton.jit
def pack_fields(codes, code, column, col_mask, first, C: tl.constexpr):
    """Pack the codes of a tile into the page at ``codes``. 3 bits are a 2-bit and a 1-bit field, 6 bits a 4-bit and a
    2-bit field."""
    if C.bits % 3:
        _pack(codes, code, column, col_mask, first, 0, C.bits, C)
    else:
        high: tl.constexpr = C.bits // 3
        _pack(codes, code, column, col_mask, first, 0, 2 * high, C)
        _pack(codes + C.page * high // 4 * C.dim, code, column, col_mask, first, 2 * high, high, C)


@triton.jit
def store_along_tokens(parameter, stored, page, channel, col_mask, C: tl.constexpr):
    """Store a parameter of all groups along the tokens of a page, for some channels."""
    groups: tl.constexpr = C.page // C.group
    at = (page * groups + tl.arange(0, groups)[:, None]) * C.dim + channel[None, :]
    tl.store(parameter + at, stored.to(C.params), mask=col_mask[None, :])


@triton.jit
def store_along_channels(parameter, stored, page, token, C: tl.constexpr):
    """Store a parameter of the groups along channels, for the tokens of a tile."""
    groups: tl.constexpr = C.dim // C.group
    of_tile = tl.arange(0, stored.shape[1])
    group = tl.program_id(2) * C.spans + of_tile
    at, kept = (page * C.page + token[:, None]) * groups + group[None, :], (of_tile < C.spans) & (group < groups)
    tl.store(parameter + at, stored.to(C.params), mask=kept[None, :])

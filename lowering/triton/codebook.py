"""Rotates tokens and quantizes them on grids, bit for bit like the reference.

Sums and products have the order of the reference. Only products with signs are fused, which is exact. The root mean
square of a group is summed in another order, but in float64 and rounded to 16 bits, so less than one scale in a billion
differs.
"""

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpass.codec.codebook import grid
from kvpass.codec.hadamard import signs

from .configs import ROTATED, ROTATING_WARPS
from .packing import head_at, nearest, pack_fields, store_along_channels, tile_of


@triton.jit(do_not_specialize=["runs", "blocks"])
def hadamard_runs(
    x, signs, out, runs, blocks, x_batch, x_head, x_token, HEADS: tl.constexpr, SIZE: tl.constexpr,
    OF_TOKEN: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Apply a random-sign Hadamard transform to runs of ``SIZE`` channels.

    Grid: ``blocks`` of ``ROWS`` runs, for each head of all samples. Each stage computes sums and differences of
    adjacent channels and moves the lowest bit of the channel index to the top. After all stages the order is the
    original one.
    """
    lead = tl.program_id(0) // blocks
    run = (tl.program_id(0) % blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel, row_mask = (run % OF_TOKEN * SIZE)[:, None] + tl.arange(0, SIZE)[None, :], (run < runs)[:, None]
    x += (lead // HEADS).to(tl.int64) * x_batch + (lead % HEADS).to(tl.int64) * x_head
    out += lead.to(tl.int64) * runs * SIZE
    y = tl.load(x + (run // OF_TOKEN * x_token)[:, None] + channel, mask=row_mask, other=0).to(tl.float32)
    y *= tl.load(signs + channel)
    for _ in tl.static_range(STAGES):
        first, second = tl.split(tl.reshape(y, (ROWS, SIZE // 2, 2)))
        y = tl.reshape(tl.permute(tl.join(first + second, first - second), (0, 2, 1)), (ROWS, SIZE))
    tl.store(out + (run * SIZE)[:, None] + tl.arange(0, SIZE)[None, :], y, mask=row_mask)


@cache
def _signs(channels: int, seed: int, device: torch.device) -> Tensor:
    return signs(channels, seed, device)


def hadamard(x: Tensor, seed: int) -> Tensor:
    """`kvpass.codec.hadamard.hadamard` of ``[B, H, T, D]``."""
    batch, heads, tokens, channels = x.shape
    size = channels & -channels
    of_token, rows = channels // size, max(1, ROTATED // size)
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    runs = tokens * of_token
    blocks = triton.cdiv(runs, rows)
    hadamard_runs[blocks * heads * batch,](
        x, _signs(channels, seed, x.device), out, runs, blocks, *x.stride()[:3], heads, size, of_token,
        size.bit_length() - 1, rows, num_warps=ROTATING_WARPS, enable_fp_fusion=True,
    )  # fmt: skip
    return out.div_(math.sqrt(size))  # PyTorch's division uses a reciprocal like the reference


@cache
def table(name: str, device: torch.device) -> Tensor:
    """The points of a grid, each followed by minus half its squared norm: ``[n, d + 1]``. A point's product with a
    vector plus this term measures closeness."""
    points = grid(name, device)
    return torch.cat([points, -(points.square().sum(1, keepdim=True) / 2)], 1)


@triton.jit
def _nearest_points(vectors, points, C: tl.constexpr):
    """The codes of vectors, which are given as one tensor per coordinate. Ties go to the first point."""
    dims: tl.constexpr = C.code
    best, code = tl.full(vectors[0].shape, -float("inf"), tl.float32), tl.zeros(vectors[0].shape, tl.int32)
    for point in tl.range(0, C.points, loop_unroll_factor=4):
        at = points + point * (C.code + 1)
        closeness = tl.load(at + C.code)
        for i in tl.static_range(dims):
            closeness = closeness + vectors[i] * tl.load(at + i)
        nearer = closeness > best
        best, code = tl.where(nearer, closeness, best), tl.where(nearer, point, code)
    return code


@triton.jit
def _fit_size(groups, code, counts, points, C: tl.constexpr):
    """`kvpass.codec.codebook.fit_size`, as float32."""
    dims: tl.constexpr = C.code
    product, square = tl.zeros(code.shape, tl.float64), tl.zeros(code.shape, tl.float64)
    for i in tl.static_range(dims):
        value = tl.load(points + code * (C.code + 1) + i).to(tl.float64)
        product += groups[i].to(tl.float64) * value
        square += value * value
    square = tl.sum(tl.where(counts, square, 0.0), 2)
    return (tl.sum(product, 2) / tl.where(square > 0, square, 1.0)).to(tl.float32)


@triton.jit(do_not_specialize=["pages"])
def quantize_on_grid(
    x, points, codes, scale, pages, x_batch, x_head, x_token, HEADS: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Quantize pages on a grid of points. Grid: that of `quantize.quantize_pages`. A column is a code; there is one
    tensor per coordinate."""
    page, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * C.rows
    token, column, col_mask = tile_of(first, C)
    x = head_at(x, page, pages, x_batch, x_head, x_token, HEADS, C) + token[:, None] * x_token
    dims: tl.constexpr = C.code
    shape: tl.constexpr = (token.shape[0], triton.next_power_of_2(C.spans), triton.next_power_of_2(C.span))
    groups, square = (), tl.zeros(shape, tl.float64)
    for i in tl.static_range(dims):
        y = tl.load(x + column[None, :] * C.code + i, mask=col_mask[None, :], other=0).to(tl.float32)
        groups = groups + (tl.reshape(y, shape),)  # noqa: RUF005  (Triton has no unpacking)
        square += groups[i].to(tl.float64) * groups[i].to(tl.float64)
    size = tl.sqrt(tl.sum(square, 2) / (C.group * C.code)).to(tl.float32)
    stored = nearest(size, C.params) + size * 0  # NaN where a value is not finite
    divisor = tl.broadcast_to(tl.where(stored > 0, stored, 1.0)[:, :, None], shape)
    units = ()
    for i in tl.static_range(dims):
        units = units + (tl.div_rn(groups[i], divisor),)  # noqa: RUF005
    code = _nearest_points(units, points, C)
    if C.refit:
        size = _fit_size(groups, code, tl.reshape(col_mask, (1, shape[1], shape[2])), points, C)
        stored = nearest(size, C.params) + size * 0
    code = tl.reshape(code, (token.shape[0], column.shape[0]))
    pack_fields(codes + page * (C.page * C.bits // 8) * C.dim, code, column, col_mask, first, C)
    store_along_channels(scale, stored, page, token, C)

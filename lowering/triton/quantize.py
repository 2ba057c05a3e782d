"""Quantizes and packs whole pages in one kernel, bit for bit like the reference. Grids and rotations are in `codebook`.

Divisions are correctly rounded and nothing is fused, because any difference could change a code. Only subspace
compensation is not bit for bit: its products are summed in another order, so a value halfway between two codes may
become either. These products consist of three tensor-core products each, which are about as precise as float32 and need
fewer registers.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpass.codec.bitpack import num_planes
from kvpass.codec.codebook import grid
from kvpass.codec.spec import CodecSpec, parse
from kvpass.codec.tensors import page_shapes

from ..append import APPENDED
from ..table import DispatchKey, implements
from .codebook import hadamard, quantize_on_grid, table
from .configs import (
    COMPENSATED,
    COMPENSATING_WARPS,
    INTERPRETED,
    QUANTIZING_WARPS,
    WIDTHS,
    power_of_two,
    quantize_config,
    refuses_device,
)
from .packing import Codec, head_at, nearest, pack_fields, store_along_channels, store_along_tokens, tile_of
from .unpacking import columns

QUANTIZED = WIDTHS | {"per=channel", "per=token", "eta", "fit=lsq", "rotation", "grid", "subspace"}


@triton.jit
def _round_toward(x, DTYPE: tl.constexpr, UP: tl.constexpr, EPS: tl.constexpr, TINY: tl.constexpr):
    """`kvpass.codec.affine.round_toward`, as float32."""
    rounded, margin = nearest(x, DTYPE), tl.abs(x) * EPS + TINY
    if UP:
        return tl.where(rounded < x, nearest(x + margin, DTYPE), rounded)
    return tl.where(rounded > x, nearest(x - margin, DTYPE), rounded)


@triton.jit
def quantize_tile(x, col_mask, C: tl.constexpr):
    """Quantize a tile ``[tokens, columns]``: its codes, and the scales and zero points of its groups as stored."""
    if C.channelwise:
        groups = tl.reshape(x, (C.page // C.group, C.group, x.shape[1]))
        counts = col_mask[None, None, :]
    else:
        groups = tl.reshape(x, (x.shape[0], triton.next_power_of_2(C.spans), triton.next_power_of_2(C.span)))
        counts = tl.reshape(col_mask, (1, groups.shape[1], groups.shape[2]))
    dim: tl.constexpr = 1 if C.channelwise else 2
    top: tl.constexpr = 2**C.bits - 1.0
    zero = _round_toward(tl.min(tl.where(counts, groups, float("inf")), dim), C.params, False, C.eps, C.tiny)
    zero += tl.sum(groups * 0, dim)  # NaN where a value is not finite
    span = tl.max(tl.where(counts, groups, -float("inf")), dim) - zero
    step = _round_toward(tl.div_rn(span, tl.full(span.shape, top, tl.float32)), C.params, True, C.eps, C.tiny)
    divisor = tl.expand_dims(tl.where(step > 0, step, 1.0), dim)
    code = tl.div_rn(groups - tl.expand_dims(zero, dim), tl.broadcast_to(divisor, groups.shape))
    code = tl.minimum(tl.maximum(code, 0.0), top) + 8388608.0  # rounds half to even, into the mantissa
    code = tl.reshape(code.to(tl.int32, bitcast=True) & (2**C.bits - 1), x.shape)
    if C.eta > 0:
        zero = nearest(zero + C.eta * top * step, C.params)
        step = nearest((1 - 2 * C.eta) * step, C.params)
    return code, step, zero


@triton.jit(do_not_specialize=["pages"])
def quantize_pages(
    x, codes, scale, zero_point, pages, x_batch, x_head, x_token, HEADS: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Quantize and pack pages. Grid: pages of all samples and heads; runs of ``rows`` rows; blocks of ``spans`` times
    ``span`` channels."""
    page, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * C.rows
    token, channel, col_mask = tile_of(first, C)
    x = head_at(x, page, pages, x_batch, x_head, x_token, HEADS, C)
    x = tl.load(x + token[:, None] * x_token + channel[None, :], mask=col_mask[None, :], other=0).to(tl.float32)
    code, step, zero = quantize_tile(x, col_mask, C)
    pack_fields(codes + page * (C.page * C.bits // 8) * C.dim, code, channel, col_mask, first, C)
    if C.channelwise:
        store_along_tokens(scale, step, page, channel, col_mask, C)
        store_along_tokens(zero_point, zero, page, channel, col_mask, C)
    else:
        store_along_channels(scale, step, page, token, C)
        store_along_channels(zero_point, zero, page, token, C)


@triton.jit(do_not_specialize=["pages"])
def quantize_compensated(
    x, answers, codes, scale, zero_point, pages, x_batch, x_head, x_token, HEADS: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Quantize and pack pages with subspace compensation. Grid: pages of all samples and heads.

    ``span`` channels are quantized at a time. Their error adjusts the remaining channels by the compensation matrix
    ``answers`` (`kvpass.codec.subspace.compensation_matrix`).
    """
    page = tl.program_id(0).to(tl.int64)
    column, col_mask = columns(C.span, 1)
    token = tl.arange(0, C.page)
    x = head_at(x, page, pages, x_batch, x_head, x_token, HEADS, C)
    rest: tl.constexpr = C.dim - C.span
    answers += page // pages * rest * rest
    codes += page * (C.page * C.bits // 8) * C.dim
    errors = ()
    for block in tl.static_range(C.dim // C.span):
        channel = block * C.span + column
        y = tl.load(x + token[:, None] * x_token + channel[None, :], mask=col_mask[None, :], other=0).to(tl.float32)
        for before in tl.static_range(block):
            at = (channel - C.span)[:, None] * rest + before * C.span + column[None, :]
            answer = tl.load(answers + at, mask=col_mask[:, None] & col_mask[None, :], other=0).to(tl.float32)
            y += tl.dot(errors[before], tl.trans(answer), input_precision="tf32x3")
        code, step, zero = quantize_tile(y, col_mask, C)
        pack_fields(codes, code, channel, col_mask, 0, C)
        store_along_tokens(scale, step, page, channel, col_mask, C)
        store_along_tokens(zero_point, zero, page, channel, col_mask, C)
        by_group = tl.reshape(code, (C.page // C.group, C.group, code.shape[1])).to(tl.float32)
        error = tl.reshape(by_group * step[:, None, :] + zero[:, None, :], y.shape) - y
        errors = errors + (tl.where(col_mask[None, :], error, 0.0),)  # noqa: RUF005  (Triton has no unpacking)


def _refuses_blocks(blocks: int, size: int, page_size: int) -> str | None:
    if blocks > 2:
        return f"the errors of {blocks} channel blocks do not fit into registers."
    if size < 16 or not power_of_two(size):
        return f"subspace compensation needs blocks of 16, 32, 64 or 128 channels, not {size}."
    if page_size * blocks * size > COMPENSATED:
        return f"the errors of {page_size} tokens with {blocks * size} channels do not fit into registers."
    return None


def refuses(dispatch: DispatchKey) -> str | None:
    if reason := refuses_device(dispatch):
        return reason
    spec = parse(dispatch.specs[0])
    codes, subspace = spec.quantizer, spec.quantizer.subspace
    if codes.fit != "minmax" and not codes.grid:
        return "least-squares fits of uniform codes sort each group, which the kernel does not."
    if not power_of_two(spec.page_size) or spec.page_size > 512:
        return f"page_size must be a power of two of at most 512, not {spec.page_size}."
    if subspace is not None:
        return _refuses_blocks(dispatch.head_dim // subspace.block_size, subspace.block_size, spec.page_size)
    return None


def codec_of(spec: CodecSpec, head_dim: int, dtype: torch.dtype) -> Codec:
    """The constants of a kernel that quantizes by ``spec``, with scales and zero points of ``dtype``."""
    codes, planes, info = spec.quantizer, num_planes(spec.bits), torch.finfo(dtype)
    config = quantize_config(spec, planes, head_dim)
    return Codec(
        codes.bits, codes.dim, len(grid(codes.grid)) if codes.grid else 0, codes.per == "channel",
        codes.group_size // codes.dim, spec.page_size, planes, codes.columns(head_dim), codes.eta, codes.fit == "lsq",
        tl.bfloat16 if dtype == torch.bfloat16 else tl.float16, info.eps, info.smallest_normal * info.eps,
        config.rows, config.span, config.spans,
    )  # fmt: skip


@implements("quantize", "triton", has=(QUANTIZED | APPENDED,), refuses=refuses, by_name_only=INTERPRETED)
def quantize(x: Tensor, fitted: Sequence[Tensor], spec: CodecSpec) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, tokens, head_dim = x.shape
    pages = tokens // spec.page_size
    codes, scale, zero_point = (
        x.new_empty((batch, heads, pages, *shape), dtype=dtype)
        for shape, dtype in page_shapes(spec, head_dim, x.dtype).values()
    )
    if not codes.numel():
        return codes, scale, zero_point
    if x.stride(-1) != 1:
        x = x.contiguous()
    codec, programs = codec_of(spec, head_dim, scale.dtype), batch * heads * pages
    with torch.cuda.device_of(x):
        if spec.transform.rotation is not None:
            x = hadamard(x, spec.transform.rotation)
        rest = pages, *x.stride()[:3], heads, codec
        if spec.quantizer.subspace is not None:
            quantize_compensated[programs,](
                x, fitted[0].contiguous(), codes, scale, zero_point, *rest, num_warps=COMPENSATING_WARPS,
                enable_fp_fusion=False,
            )  # fmt: skip
            return codes, scale, zero_point
        tiles = programs, codec.page // codec.planes // codec.rows, triton.cdiv(codec.dim, codec.span * codec.spans)
        options = dict(num_warps=QUANTIZING_WARPS, enable_fp_fusion=False)
        if spec.quantizer.grid:
            quantize_on_grid[tiles](x, table(spec.quantizer.grid, x.device), codes, scale, *rest, **options)
        else:
            quantize_pages[tiles](x, codes, scale, zero_point, *rest, **options)
    return codes, scale, zero_point

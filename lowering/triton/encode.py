"""Quantize and pack whole pages in one kernel, bit for bit as the reference does.

Divisions are correctly rounded and nothing is fused, because a code that flips is another code. Only where errors are
compensated it is not bit for bit: products are summed in another order, so a value between two codes may take either.
They are made of three tensor-core products, about as exact as float32 and without its registers.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpass.codec.affine import params_dtype
from kvpass.codec.pack import num_planes
from kvpass.codec.spec import CodecSpec, parse

from ..table import Site, implements
from .configs import (
    COMPENSATED,
    COMPENSATING_WARPS,
    ENCODING_WARPS,
    INTERPRETED,
    encode_config,
    power_of_two,
    refuses_device,
)
from .pages import columns


class Codec(NamedTuple):
    """What a kernel knows when it is compiled: the spec, how parameters are rounded, and how pages are cut into tiles
    (`configs.EncodeConfig`; ``span`` is the block that is compensated at a time)."""

    bits: int
    channelwise: bool
    group: int
    page: int
    planes: int
    dim: int
    eta: float
    params: tl.dtype
    eps: float
    tiny: float
    rows: int
    span: int
    spans: int


@triton.jit
def _nearest(x, DTYPE: tl.constexpr):
    """``x`` rounded to what ``DTYPE`` holds, ties to even, as float32."""
    if DTYPE.is_bf16():  # spelled out: the interpreter would cut bits off
        bits = x.to(tl.uint32, bitcast=True)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def _round_toward(x, DTYPE: tl.constexpr, UP: tl.constexpr, EPS: tl.constexpr, TINY: tl.constexpr):
    """`kvpass.codec.affine.round_toward`, as float32."""
    nearest, margin = _nearest(x, DTYPE), tl.abs(x) * EPS + TINY
    if UP:
        return tl.where(nearest < x, _nearest(x + margin, DTYPE), nearest)
    return tl.where(nearest > x, _nearest(x - margin, DTYPE), nearest)


@triton.jit
def _quantize(x, real, C: tl.constexpr):
    """Codes of a tile ``[tokens, columns]``, and the scales and zero points of its groups as they are stored."""
    if C.channelwise:
        groups = tl.reshape(x, (C.page // C.group, C.group, x.shape[1]))
        counts = real[None, None, :]
    else:
        groups = tl.reshape(x, (x.shape[0], triton.next_power_of_2(C.spans), triton.next_power_of_2(C.span)))
        counts = tl.reshape(real, (1, groups.shape[1], groups.shape[2]))
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
        zero = _nearest(zero + C.eta * top * step, C.params)
        step = _nearest((1 - 2 * C.eta) * step, C.params)
    return code, step, zero


@triton.jit
def _pack(out, codes, channel, real, first, SHIFT: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr):
    """Bits ``[SHIFT, SHIFT + WIDTH)`` of codes ``[planes * rows, columns]``, to byte rows of a field at ``out``."""
    planes: tl.constexpr = 8 // WIDTH
    lines: tl.constexpr = codes.shape[0] // planes
    field = tl.reshape((codes >> SHIFT) & ((1 << WIDTH) - 1), (planes, lines, codes.shape[1]))
    line = tl.arange(0, lines)
    line = line // C.rows * (C.page // C.planes) + first + line % C.rows
    packed = tl.sum(field << (tl.arange(0, planes) * WIDTH)[:, None, None], 0)
    tl.store(out + line[:, None] * C.dim + channel[None, :], packed.to(tl.uint8), mask=real[None, :])


@triton.jit
def _pack_fields(codes, code, channel, real, first, C: tl.constexpr):
    """Codes of a tile into the page at ``codes``."""
    if C.bits == 3:
        _pack(codes, code, channel, real, first, 0, 2, C)
        _pack(codes + C.page // 4 * C.dim, code, channel, real, first, 2, 1, C)
    else:
        _pack(codes, code, channel, real, first, 0, C.bits, C)


@triton.jit
def _store_along_tokens(scale, zero_point, step, zero, page, channel, real, C: tl.constexpr):
    """The parameters of all groups of a page in some channels."""
    groups: tl.constexpr = C.page // C.group
    at = (page * groups + tl.arange(0, groups)[:, None]) * C.dim + channel[None, :]
    tl.store(scale + at, step.to(C.params), mask=real[None, :])
    tl.store(zero_point + at, zero.to(C.params), mask=real[None, :])


@triton.jit(do_not_specialize=["pages"])
def encode_pages(
    x, codes, scale, zero_point, pages, x_batch, x_head, x_token, HEADS: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Grid: pages of all samples and heads, runs of ``rows`` rows, blocks of ``spans`` times ``span`` channels."""
    page, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * C.rows
    channel, real = columns(C.span, C.spans)
    channel += tl.program_id(2) * C.span * C.spans
    real &= channel < C.dim
    token = tl.arange(0, C.planes * C.rows)
    token = token // C.rows * (C.page // C.planes) + first + token % C.rows
    lead = page // pages
    x += lead // HEADS * x_batch + lead % HEADS * x_head + page % pages * C.page * x_token
    x = tl.load(x + token[:, None] * x_token + channel[None, :], mask=real[None, :], other=0).to(tl.float32)
    code, step, zero = _quantize(x, real, C)
    _pack_fields(codes + page * (C.page * C.bits // 8) * C.dim, code, channel, real, first, C)
    if C.channelwise:
        _store_along_tokens(scale, zero_point, step, zero, page, channel, real, C)
    else:
        groups: tl.constexpr = C.dim // C.group
        of_tile = tl.arange(0, step.shape[1])
        group = tl.program_id(2) * C.spans + of_tile
        at, kept = (page * C.page + token[:, None]) * groups + group[None, :], (of_tile < C.spans) & (group < groups)
        tl.store(scale + at, step.to(C.params), mask=kept[None, :])
        tl.store(zero_point + at, zero.to(C.params), mask=kept[None, :])


@triton.jit(do_not_specialize=["pages"])
def encode_compensated(
    x, answers, codes, scale, zero_point, pages, x_batch, x_head, x_token, HEADS: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Grid: pages of all samples and heads. A block of ``span`` channels is quantized at a time, and its error moves
    those still to come, as ``answers`` say (`kvpass.codec.subspace.compensation_matrix`)."""
    page = tl.program_id(0).to(tl.int64)
    column, real = columns(C.span, 1)
    lead, token = page // pages, tl.arange(0, C.page)
    x += lead // HEADS * x_batch + lead % HEADS * x_head + page % pages * C.page * x_token
    rest: tl.constexpr = C.dim - C.span
    answers += lead * rest * rest
    codes += page * (C.page * C.bits // 8) * C.dim
    errors = ()
    for block in tl.static_range(C.dim // C.span):
        channel = block * C.span + column
        y = tl.load(x + token[:, None] * x_token + channel[None, :], mask=real[None, :], other=0).to(tl.float32)
        for before in tl.static_range(block):
            at = (channel - C.span)[:, None] * rest + before * C.span + column[None, :]
            answer = tl.load(answers + at, mask=real[:, None] & real[None, :], other=0).to(tl.float32)
            y += tl.dot(errors[before], tl.trans(answer), input_precision="tf32x3")
        code, step, zero = _quantize(y, real, C)
        _pack_fields(codes, code, channel, real, 0, C)
        _store_along_tokens(scale, zero_point, step, zero, page, channel, real, C)
        by_group = tl.reshape(code, (C.page // C.group, C.group, code.shape[1])).to(tl.float32)
        error = tl.reshape(by_group * step[:, None, :] + zero[:, None, :], y.shape) - y
        errors = errors + (tl.where(real[None, :], error, 0.0),)  # noqa: RUF005  (Triton has no unpacking)


def _refuses_blocks(blocks: int, size: int, page_size: int) -> str | None:
    if blocks > 2:
        return f"errors of {blocks} blocks of channels do not fit the registers."
    if size < 16 or not power_of_two(size):
        return f"errors are those of blocks of 16, 32, 64 or 128 channels, not {size}."
    if page_size * blocks * size > COMPENSATED:
        return f"errors of {page_size} tokens of {blocks * size} channels do not fit the registers."
    return None


def refuses(site: Site) -> str | None:
    if reason := refuses_device(site):
        return reason
    spec = parse(site.specs[0])
    if spec.adaptive is not None:
        return "widths that differ from token to token are coded by their cache."
    if spec.raw:
        return "floats stored as they are need no kernel."
    if spec.grid or spec.rotation is not None:
        return "encoding on grids and rotating first are not in the kernel."
    if spec.fit != "minmax":
        return "least-squares fits sort each group."
    if not power_of_two(spec.page_size) or spec.page_size > 512:
        return f"pages hold a power of two tokens, up to 512, not {spec.page_size}."
    if spec.subspace is not None:
        return _refuses_blocks(site.head_dim // spec.subspace.block_size, spec.subspace.block_size, spec.page_size)
    return None


def _codec(spec: CodecSpec, head_dim: int, dtype: torch.dtype) -> Codec:
    planes, info = num_planes(spec.bits), torch.finfo(dtype)
    config = encode_config(spec, planes, head_dim)
    return Codec(
        spec.bits, spec.per == "channel", spec.group_size, spec.page_size, planes, head_dim, spec.eta,
        tl.bfloat16 if dtype == torch.bfloat16 else tl.float16, info.eps, info.smallest_normal * info.eps,
        config.rows, config.span, config.spans,
    )  # fmt: skip


@implements("encode", "triton", refuses=refuses, by_name_only=INTERPRETED)
def encode(x: Tensor, compensation: Tensor | None, spec: CodecSpec) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, tokens, head_dim = x.shape
    pages, dtype, lead = tokens // spec.page_size, params_dtype(x.dtype), x.shape[:2]
    codes = x.new_empty((*lead, pages, spec.rows, head_dim), dtype=torch.uint8)
    scale, zero_point = (x.new_empty((*lead, pages, *spec.params_shape(head_dim)), dtype=dtype) for _ in range(2))
    if not codes.numel():
        return codes, scale, zero_point
    if x.stride(-1) != 1:
        x = x.contiguous()
    codec, programs = _codec(spec, head_dim, dtype), batch * heads * pages
    rest = codes, scale, zero_point, pages, *x.stride()[:3], heads, codec
    with torch.cuda.device_of(x):
        if spec.subspace is not None:
            encode_compensated[programs,](
                x, compensation.contiguous(), *rest, num_warps=COMPENSATING_WARPS, enable_fp_fusion=False
            )
        else:
            blocks = triton.cdiv(head_dim, codec.span * codec.spans)
            encode_pages[programs, codec.page // codec.planes // codec.rows, blocks](
                x, *rest, num_warps=ENCODING_WARPS, enable_fp_fusion=False
            )
    return codes, scale, zero_point

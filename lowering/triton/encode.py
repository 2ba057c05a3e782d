"""Quantize and pack whole pages in one kernel, bit for bit as the reference does.

Divisions are correctly rounded and nothing is fused, because a code that flips is another code.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpass.codec.affine import params_dtype
from kvpass.codec.pack import num_planes
from kvpass.codec.spec import CodecSpec, parse

from ..append import append
from ..table import Site, implements
from .configs import INTERPRETED, encode_config, power_of_two, refuses_device
from .pages import columns


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
def _pack(
    out, codes, channel, real, first, SHIFT: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Bits ``[SHIFT, SHIFT + WIDTH)`` of codes ``[planes * ROWS, columns]``, to byte rows of a field at ``out``."""
    planes: tl.constexpr = 8 // WIDTH
    lines: tl.constexpr = codes.shape[0] // planes
    field = tl.reshape((codes >> SHIFT) & ((1 << WIDTH) - 1), (planes, lines, codes.shape[1]))
    line = tl.arange(0, lines)
    line = line // ROWS * TOKENS + first + line % ROWS
    packed = tl.sum(field << (tl.arange(0, planes) * WIDTH)[:, None, None], 0)
    tl.store(out + line[:, None] * DIM + channel[None, :], packed.to(tl.uint8), mask=real[None, :])


@triton.jit(do_not_specialize=["pages"])
def encode_pages(
    x, codes, scale, zero_point, pages, x_batch, x_head, x_token, HEADS: tl.constexpr, BITS: tl.constexpr,
    CHANNELWISE: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, PLANES: tl.constexpr, DIM: tl.constexpr,
    ETA: tl.constexpr, PARAMS: tl.constexpr, EPS: tl.constexpr, TINY: tl.constexpr, ROWS: tl.constexpr,
    SPAN: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """Grid: pages of all samples and heads, runs of ROWS rows, blocks of SPANS times SPAN channels."""
    page, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS
    tokens: tl.constexpr = PAGE // PLANES
    channel, real = columns(SPAN, SPANS)
    channel += tl.program_id(2) * SPAN * SPANS
    real &= channel < DIM
    token = tl.arange(0, PLANES * ROWS)
    token = token // ROWS * tokens + first + token % ROWS
    lead = page // pages
    x += lead // HEADS * x_batch + lead % HEADS * x_head + page % pages * PAGE * x_token
    x = tl.load(x + token[:, None] * x_token + channel[None, :], mask=real[None, :], other=0).to(tl.float32)
    if CHANNELWISE:
        x = tl.reshape(x, (PAGE // GROUP, GROUP, x.shape[1]))
        counts = real[None, None, :]
    else:
        x = tl.reshape(x, (x.shape[0], triton.next_power_of_2(SPANS), triton.next_power_of_2(SPAN)))
        counts = tl.reshape(real, (1, x.shape[1], x.shape[2]))
    dim: tl.constexpr = 1 if CHANNELWISE else 2

    zero = _round_toward(tl.min(tl.where(counts, x, float("inf")), dim), PARAMS, False, EPS, TINY)
    zero += tl.sum(x * 0, dim)  # NaN where a value is not finite
    span = tl.max(tl.where(counts, x, -float("inf")), dim) - zero
    step = _round_toward(tl.div_rn(span, tl.full(span.shape, 2**BITS - 1.0, tl.float32)), PARAMS, True, EPS, TINY)
    divisor = tl.expand_dims(tl.where(step > 0, step, 1.0), dim)
    code = tl.div_rn(x - tl.expand_dims(zero, dim), tl.broadcast_to(divisor, x.shape))
    code = tl.minimum(tl.maximum(code, 0.0), 2**BITS - 1.0) + 8388608.0  # rounds half to even, into the mantissa
    code = tl.reshape(code.to(tl.int32, bitcast=True) & (2**BITS - 1), (PLANES * ROWS, channel.shape[0]))
    if ETA > 0:
        zero = _nearest(zero + ETA * (2**BITS - 1) * step, PARAMS)
        step = _nearest((1 - 2 * ETA) * step, PARAMS)

    codes += page * (PAGE * BITS // 8) * DIM
    if BITS == 3:
        _pack(codes, code, channel, real, first, 0, 2, tokens, ROWS, DIM)
        _pack(codes + PAGE // 4 * DIM, code, channel, real, first, 2, 1, tokens, ROWS, DIM)
    else:
        _pack(codes, code, channel, real, first, 0, BITS, tokens, ROWS, DIM)
    if CHANNELWISE:
        groups: tl.constexpr = PAGE // GROUP
        where = tl.arange(0, groups)[:, None] * DIM + channel[None, :]
        at, kept = page * groups * DIM + where, real[None, :]
    else:
        groups: tl.constexpr = DIM // GROUP
        group = tl.program_id(2) * SPANS + tl.arange(0, x.shape[1])
        at = (page * PAGE + token[:, None]) * groups + group[None, :]
        kept = ((tl.arange(0, x.shape[1]) < SPANS) & (group < groups))[None, :]
    tl.store(scale + at, step.to(PARAMS), mask=kept)
    tl.store(zero_point + at, zero.to(PARAMS), mask=kept)


def _refuses(site: Site) -> str | None:
    if reason := refuses_device(site):
        return reason
    spec = parse(site.specs[0])
    if spec.adaptive is not None:
        return "widths that differ from token to token are coded by their cache."
    if spec.raw:
        return "floats stored as they are need no kernel."
    if spec.grid or spec.rotation is not None or spec.subspace is not None:
        return "encoding on grids, rotating first and compensating errors are not in the kernel."
    if spec.fit != "minmax":
        return "least-squares fits sort each group."
    if not power_of_two(spec.page_size) or spec.page_size > 512:
        return f"pages hold a power of two tokens, up to 512, not {spec.page_size}."
    return None


@implements("encode", "triton", refuses=_refuses, by_name_only=INTERPRETED)
def encode(x: Tensor, compensation: None, spec: CodecSpec) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, tokens, head_dim = x.shape
    pages, dtype, lead = tokens // spec.page_size, params_dtype(x.dtype), x.shape[:2]
    codes = x.new_empty((*lead, pages, spec.rows, head_dim), dtype=torch.uint8)
    scale, zero_point = (x.new_empty((*lead, pages, *spec.params_shape(head_dim)), dtype=dtype) for _ in range(2))
    if not codes.numel():
        return codes, scale, zero_point
    if x.stride(-1) != 1:
        x = x.contiguous()
    planes, info = num_planes(spec.bits), torch.finfo(dtype)
    config = encode_config(spec, planes, head_dim)
    blocks = triton.cdiv(head_dim, config.span * config.spans)
    grid = batch * heads * pages, spec.page_size // planes // config.rows, blocks
    with torch.cuda.device_of(x):
        encode_pages[grid](
            x, codes, scale, zero_point, pages, *x.stride()[:3], heads, spec.bits, spec.per == "channel",
            spec.group_size, spec.page_size, planes, head_dim, spec.eta,
            tl.bfloat16 if dtype == torch.bfloat16 else tl.float16, info.eps, info.smallest_normal * info.eps,
            config.rows, config.span, config.spans, num_warps=config.warps, enable_fp_fusion=False,
        )  # fmt: skip
    return codes, scale, zero_point


@implements("append_", "triton", refuses=_refuses, by_name_only=INTERPRETED)
def append_(*args) -> None:
    append(encode, *args)

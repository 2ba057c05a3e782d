"""Attention of a few query tokens over codes: one program for each split of the packed tokens, and one for the exact.

All query heads of a KV head are rows of one tile, so that codes are unpacked once. Keys and values are dequantized in
registers, by one multiply-add a code: with 16 rows that is less work than folding a scale for every 32 tokens into the
queries, and it rounds as the reference does. The splits meet in a second kernel, by their log-sum-exp.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpass.codec.grid import grid
from kvpass.codec.hadamard import basis
from kvpass.codec.pack import num_planes
from kvpass.codec.pool import whole
from kvpass.codec.predict import looks_below
from kvpass.codec.spec import CodecSpec, parse

from ..table import FEW, Site, implements
from .configs import INTERPRETED, attend_config, power_of_two, refuses_device, split_size
from .pages import columns, values, words


@triton.jit
def _ring_rows(ring, tokens, there, channel, real, WINDOW: tl.constexpr, SINKS: tl.constexpr, DIM: tl.constexpr):
    """Exact ``tokens`` of the past, zeros where they are not ``there``."""
    slots = tl.where(tokens < SINKS, tokens, SINKS + (tokens - SINKS) % WINDOW)
    return tl.load(ring + slots[:, None] * DIM + channel[None, :], mask=there[:, None] & real[None, :], other=0)


@triton.jit
def _exact_rows(
    ring, new, tokens, n, stop, channel, real, WINDOW: tl.constexpr, SINKS: tl.constexpr, DIM: tl.constexpr
):
    """Exact ``tokens``, those from ``n`` on out of the present."""
    past = _ring_rows(ring, tokens, tokens < n, channel, real, WINDOW, SINKS, DIM)
    there = ((tokens >= n) & (tokens < stop))[:, None] & real[None, :]
    present = tl.load(new + (tokens - n)[:, None] * DIM + channel[None, :], mask=there, other=0)
    return tl.where(there, present, past)


@triton.jit
def _scores(q, k, shift, scale, mask, tokens, seen, SOFTCAP: tl.constexpr, BOOL_MASK: tl.constexpr):
    """Scores ``[M, N]``, -inf where a key is not ``seen`` (which broadcasts). ``mask`` is a pointer for each row."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if shift is not None:
        scores += shift[:, None]
    scores *= scale
    if SOFTCAP > 0:
        scores = SOFTCAP - 2 * SOFTCAP / (tl.exp(2 / SOFTCAP * scores) + 1)  # tanh
    if mask is not None:
        bias = tl.load(mask[:, None] + tokens[None, :], mask=seen, other=0)
        if BOOL_MASK:
            seen = seen & (bias != 0)
        else:
            scores += bias.to(tl.float32)
    return tl.where(seen, scores, -float("inf"))


@triton.jit
def _rescale(peak, total, out, highest):
    """Move a running softmax to a peak that is at least ``highest``; also returns what to subtract from scores."""
    new = tl.maximum(peak, highest)
    base = tl.where(new == -float("inf"), 0.0, new)  # nothing was seen yet
    factor = tl.exp(peak - base)
    return new, total * factor, out * factor[:, None], base


@triton.jit
def _over_pages(
    peak, total, out, q, shift, scale, mask, first, stop, k_codes, k_scale, k_zero, k_points, v_codes, v_scale, v_zero,
    v_points, v_ring, k_channel, k_real, v_channel, v_real, V_EXACT: tl.constexpr, SOFTCAP: tl.constexpr,
    BOOL_MASK: tl.constexpr, K_BITS: tl.constexpr, K_CODE: tl.constexpr, K_CHANNELWISE: tl.constexpr,
    K_GROUP: tl.constexpr, V_BITS: tl.constexpr, V_CODE: tl.constexpr, V_CHANNELWISE: tl.constexpr,
    V_GROUP: tl.constexpr, V_WINDOW: tl.constexpr, SINKS: tl.constexpr, PAGE: tl.constexpr, PLANES: tl.constexpr,
    TOGETHER: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, OPERAND: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Take the tokens of rows ``[first, first + ROWS)`` into the softmax, ``TOGETHER`` planes at a time."""
    rows = first + tl.arange(0, ROWS)
    there = rows < stop
    of_plane: tl.constexpr = PAGE // PLANES
    tokens = SINKS + rows // of_plane * PAGE + rows % of_plane
    column, real = columns(
        DIM // K_CODE if K_CHANNELWISE else K_GROUP // K_CODE, 1 if K_CHANNELWISE else DIM // K_GROUP
    )
    k_words = words(k_codes, first, stop, column, real, ROWS, K_BITS, PAGE, PLANES, DIM // K_CODE)
    if not V_EXACT:
        column, real = columns(
            DIM // V_CODE if V_CHANNELWISE else V_GROUP // V_CODE, 1 if V_CHANNELWISE else DIM // V_GROUP
        )
        v_words = words(v_codes, first, stop, column, real, ROWS, V_BITS, PAGE, PLANES, DIM // V_CODE)
    for part in tl.range(0, PLANES, TOGETHER, num_stages=STAGES):
        scores, highest = (), tl.full((q.shape[0], ROWS), -float("inf"), tl.float32)
        for i in tl.static_range(TOGETHER):
            k = values(
                k_words, k_scale, k_zero, k_points, first, stop, k_channel, k_real, part + i, K_BITS, K_CODE,
                K_CHANNELWISE, K_GROUP, PAGE, PLANES, DIM,
            ).to(OPERAND)  # fmt: skip
            at = tokens + (part + i) * of_plane
            s = _scores(q, k, shift, scale, mask, at, there[None, :], SOFTCAP, BOOL_MASK)
            scores = scores + (s,)  # noqa: RUF005  (Triton has no unpacking)
            highest = tl.maximum(highest, s)
        peak, total, out, base = _rescale(peak, total, out, tl.max(highest, 1))
        weights = tl.zeros_like(highest)
        for i in tl.static_range(TOGETHER):
            if V_EXACT:
                at = tokens + (part + i) * of_plane
                v = _ring_rows(v_ring, at, there, v_channel, v_real, V_WINDOW, SINKS, DIM)
            else:
                v = values(
                    v_words, v_scale, v_zero, v_points, first, stop, v_channel, v_real, part + i, V_BITS, V_CODE,
                    V_CHANNELWISE, V_GROUP, PAGE, PLANES, DIM,
                )  # fmt: skip
            p = tl.exp(scores[i] - base[:, None])
            weights += p
            out = tl.dot(p.to(OPERAND), v.to(OPERAND), out, input_precision="ieee")
        total += tl.sum(weights, 1)
    return peak, total, out


@triton.jit(
    do_not_specialize=["n", "queries", "k_rows", "v_rows", "rows_of_split", "mask_batch", "mask_head", "mask_query"]
)
def attend_split(
    q, k_codes, k_scale, k_zero, k_ring, v_codes, v_scale, v_zero, v_ring, k_new, v_new, q_packed, shift, k_points,
    v_points, mask, partial, lse, n, queries, scale, k_rows, v_rows, rows_of_split, k_stride, k_params, v_stride,
    v_params, mask_batch, mask_head, mask_query,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, CAUSAL: tl.constexpr, SOFTCAP: tl.constexpr, BOOL_MASK: tl.constexpr,
    K_BITS: tl.constexpr, K_CODE: tl.constexpr, K_CHANNELWISE: tl.constexpr, K_GROUP: tl.constexpr,
    K_WINDOW: tl.constexpr, V_BITS: tl.constexpr, V_CODE: tl.constexpr, V_CHANNELWISE: tl.constexpr,
    V_GROUP: tl.constexpr, V_WINDOW: tl.constexpr,
    SINKS: tl.constexpr, PAGE: tl.constexpr, PLANES: tl.constexpr, TOGETHER: tl.constexpr, DIM: tl.constexpr,
    M: tl.constexpr, ROWS: tl.constexpr, EXACT: tl.constexpr, OPERAND: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Grid: splits of the packed tokens and one for all others, tiles of M query rows, KV heads of all samples.

    Rows are those of `pages`: the first ``v_rows`` are packed in keys and in values, up to ``k_rows`` in keys alone.
    Keys in pages see the queries ``q_packed``, which are rotated if they are, and ``shift`` is added to their products.
    """
    split, splits, group = tl.program_id(0), tl.num_programs(0) - 1, tl.program_id(2).to(tl.int64)
    k_channel, k_real = columns(DIM if K_CHANNELWISE else K_GROUP, 1 if K_CHANNELWISE else DIM // K_GROUP)
    v_channel, v_real = columns(DIM if V_CHANNELWISE else V_GROUP, 1 if V_CHANNELWISE else DIM // V_GROUP)
    k_codes, k_scale, k_zero = k_codes + group * k_stride, k_scale + group * k_params, k_zero + group * k_params
    v_codes, v_scale, v_zero = v_codes + group * v_stride, v_scale + group * v_params, v_zero + group * v_params
    k_ring, v_ring = k_ring + group * (SINKS + K_WINDOW) * DIM, v_ring + group * (SINKS + V_WINDOW) * DIM
    k_new, v_new = k_new + group * queries * DIM, v_new + group * queries * DIM

    heads: tl.constexpr = HEADS // GROUPS
    row = tl.program_id(1) * M + tl.arange(0, M)
    asked, query = row < heads * queries, row % queries
    of_q = (group * heads * queries + row)[:, None] * DIM + k_channel[None, :]
    rotated = tl.load(q_packed + of_q, mask=asked[:, None] & k_real[None, :], other=0).to(OPERAND)
    if shift is not None:
        shift = tl.load(shift + group * heads * queries + row, mask=asked, other=0)
    if mask is not None:
        head = group % GROUPS * heads + row // queries
        mask += group // GROUPS * mask_batch + tl.where(asked, head * mask_head + query * mask_query, 0)
    peak, total = tl.full((M,), -float("inf"), tl.float32), tl.zeros((M,), tl.float32)
    out = tl.zeros((M, v_channel.shape[0]), tl.float32)

    if split < splits:
        start = split * rows_of_split
        for first in tl.range(start, min(start + rows_of_split, v_rows), ROWS, num_stages=STAGES):
            peak, total, out = _over_pages(
                peak, total, out, rotated, shift, scale, mask, first, v_rows, k_codes, k_scale, k_zero, k_points,
                v_codes, v_scale, v_zero, v_points, v_ring, k_channel, k_real, v_channel, v_real, False, SOFTCAP,
                BOOL_MASK, K_BITS, K_CODE, K_CHANNELWISE, K_GROUP, V_BITS, V_CODE, V_CHANNELWISE, V_GROUP, V_WINDOW,
                SINKS, PAGE, PLANES, TOGETHER, DIM, ROWS, OPERAND, STAGES,
            )  # fmt: skip
    else:
        for first in tl.range(v_rows, k_rows, ROWS, num_stages=1):
            peak, total, out = _over_pages(
                peak, total, out, rotated, shift, scale, mask, first, k_rows, k_codes, k_scale, k_zero, k_points,
                v_codes, v_scale, v_zero, v_points, v_ring, k_channel, k_real, v_channel, v_real, True, SOFTCAP,
                BOOL_MASK, K_BITS, K_CODE, K_CHANNELWISE, K_GROUP, V_BITS, V_CODE, V_CHANNELWISE, V_GROUP, V_WINDOW,
                SINKS, PAGE, PLANES, TOGETHER, DIM, ROWS, OPERAND, STAGES,
            )  # fmt: skip
        packed, stop = k_rows * PLANES, n + queries
        exact_q = tl.load(q + of_q, mask=asked[:, None] & k_real[None, :], other=0).to(OPERAND)
        for first in tl.range(0, stop - packed, EXACT, num_stages=1):
            tokens = first + tl.arange(0, EXACT)
            tokens = tl.where(tokens < SINKS, tokens, tokens + packed)
            seen = tokens[None, :] < stop
            if CAUSAL:
                seen = tokens[None, :] <= n + query[:, None]
            k = _exact_rows(k_ring, k_new, tokens, n, stop, k_channel, k_real, K_WINDOW, SINKS, DIM)
            s = _scores(exact_q, k.to(OPERAND), None, scale, mask, tokens, seen, SOFTCAP, BOOL_MASK)
            peak, total, out, base = _rescale(peak, total, out, tl.max(s, 1))
            p = tl.exp(s - base[:, None])
            v = _exact_rows(v_ring, v_new, tokens, n, stop, v_channel, v_real, V_WINDOW, SINKS, DIM)
            out = tl.dot(p.to(OPERAND), v.to(OPERAND), out, input_precision="ieee")
            total += tl.sum(p, 1)

    at = (group * (splits + 1) + split) * heads * queries + row
    divisor = tl.where(total > 0, total, 1.0)
    out = out / divisor[:, None]
    tl.store(partial + at[:, None] * DIM + v_channel[None, :], out, mask=asked[:, None] & v_real[None, :])
    tl.store(lse + at, tl.where(total > 0, peak + tl.log(divisor), -float("inf")), mask=asked)


@triton.jit(do_not_specialize=["rows", "splits", "queries"])
def merge_splits(
    partial, lse, sinks, out, rows, splits, queries, HEADS: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """Grid: every query row. ``sinks`` are logits of each head that have no value."""
    row, channel = tl.program_id(0).to(tl.int64), tl.arange(0, triton.next_power_of_2(DIM))
    group, within = row // rows, row % rows
    peak, total, merged = -float("inf"), 0.0, tl.zeros((channel.shape[0],), tl.float32)
    if sinks is not None:
        peak, total = tl.load(sinks + row // queries % HEADS).to(tl.float32), 1.0
    for first in range(0, splits, SPLITS):
        split = first + tl.arange(0, SPLITS)
        at = (group * splits + split) * rows + within
        logs = tl.load(lse + at, mask=split < splits, other=-float("inf"))
        new = tl.maximum(peak, tl.max(logs, 0))
        base = tl.where(new == -float("inf"), 0.0, new)
        weights, factor = tl.exp(logs - base), tl.exp(peak - base)
        there = (split < splits)[:, None] & (channel < DIM)[None, :]
        parts = tl.load(partial + at[:, None] * DIM + channel[None, :], mask=there, other=0)
        merged = merged * factor + tl.sum(parts * weights[:, None], 0)
        total, peak = total * factor + tl.sum(weights, 0), new
    merged = merged / tl.where(total > 0, total, 1.0)
    tl.store(out + row * DIM + channel, merged.to(out.dtype.element_ty), mask=channel < DIM)


_OPERANDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _of(prefix: str, spec: CodecSpec) -> dict:
    """What the kernel knows of one tensor at compile time."""
    fields = dict(
        BITS=spec.bits, CODE=spec.dim, CHANNELWISE=spec.per == "channel", GROUP=spec.group_size, WINDOW=spec.window
    )
    return {f"{prefix}_{name}": value for name, value in fields.items()}


def constants(k_spec: CodecSpec, v_spec: CodecSpec, heads: int, groups: int, head_dim: int, rows: int, dtype):
    """The constants of `attend_split` for ``rows`` query rows a KV head, and how to launch it."""
    planes = max(num_planes(spec.bits) for spec in (k_spec, v_spec))
    lattice = bool(k_spec.grid or v_spec.grid)
    tile = 16 if rows <= 16 or head_dim > 128 or lattice or dtype == torch.float32 else 32
    config = attend_config(planes, head_dim, dtype.itemsize, tile, lattice)
    operand = torch.float32 if INTERPRETED else dtype  # the interpreter cannot multiply bfloat16
    fixed = dict(
        HEADS=heads, GROUPS=groups, **_of("K", k_spec), **_of("V", v_spec), SINKS=k_spec.sinks, PAGE=k_spec.page_size,
        PLANES=planes, TOGETHER=config.together, DIM=head_dim, M=tile, ROWS=config.rows, EXACT=config.exact,
        OPERAND=_OPERANDS[operand], STAGES=config.stages,
    )  # fmt: skip
    return fixed, config


def _refuses(site: Site) -> str | None:
    if reason := refuses_device(site):
        return reason
    if not site.queries:
        return f"it is written for 1 to {FEW} query tokens."
    if not 16 <= site.head_dim <= 256:
        return f"heads have 16 to 256 channels, not {site.head_dim}."
    key, value = specs = [parse(text) for text in site.specs]
    if key.adaptive is not None or value.adaptive is not None:
        return "widths that differ from token to token have to be decoded."
    if key.keep == "log":
        return "tokens that thin out with distance are not in the order of their slots."
    if key.pre_rope:
        return "keys are not rotated in the kernel."
    if key.raw or value.raw:
        return "floats stored as they are need no kernel."
    if any(spec.dim > 2 for spec in specs):
        return "grids have up to 2 dimensions."
    if looks_below(key.predictor) or value.predictor:
        return "what predictors left over has to be decoded."
    if (key.page_size, key.sinks, key.keep) != (value.page_size, value.sinks, value.keep):
        return "keys and values must share page size, sinks and the choice of exact tokens."
    if not power_of_two(key.page_size):
        return f"pages hold a power of two tokens, not {key.page_size}."
    if value.residual < key.residual:
        return "values must not leave the window before keys."
    return None


def _packed_queries(q: Tensor, groups: int, spec: CodecSpec, center: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The queries that keys in pages see, rotated instead of them, and their products with the mean of the keys."""
    shift = None
    if center is not None:
        rows = q.float().view(q.shape[0], groups, -1, q.shape[3])
        shift = (rows * center.float()).sum(-1)
    if spec.rotation is None:
        return q, shift
    return (q.float() @ basis(q.shape[3], spec.rotation, q.device)).to(q.dtype), shift


@implements("attend", "triton", refuses=_refuses, by_name_only=INTERPRETED)
def attend(
    q, key, value, n, k_new, v_new, mask, causal, scale, softcap, k_spec, v_spec, rotary=None, sinks=None, center=None
) -> Tensor:
    batch, heads, queries, head_dim = q.shape
    groups = k_new.shape[1]
    rows = heads // groups * queries
    key, value = (
        [*(whole(pool, spec.pages(n)) for pool in pools), ring]
        for spec, (*pools, ring) in ((k_spec, key), (v_spec, value))
    )
    q, k_new, v_new = (tensor.contiguous() for tensor in (q, k_new, v_new))
    fixed, config = constants(k_spec, v_spec, heads, groups, head_dim, rows, q.dtype)
    k_rows, v_rows = (spec.packed(n) // fixed["PLANES"] for spec in (k_spec, v_spec))
    tiles = triton.cdiv(rows, fixed["M"])
    rows_of_split = split_size(v_rows, fixed["ROWS"], batch * groups * tiles, q.device)
    splits = triton.cdiv(v_rows, rows_of_split) + 1
    partial = q.new_empty((batch * groups, splits, rows, head_dim), dtype=torch.float32)
    lse, strides = partial.new_empty(partial.shape[:3]), (0, 0, 0)
    if mask is not None:
        mask = (mask.view(torch.uint8) if mask.dtype == torch.bool else mask).contiguous()
        strides = [stride if size > 1 else 0 for stride, size in zip(mask.stride()[:3], mask.shape[:3], strict=True)]
    rotated, shift = _packed_queries(q, groups, k_spec, center)
    points = (grid(spec.grid, q.device) if spec.grid else None for spec in (k_spec, v_spec))
    out = torch.empty_like(q)
    with torch.cuda.device_of(q):
        attend_split[splits, tiles, batch * groups](
            q, *key, *value, k_new, v_new, rotated, shift, *points, mask, partial, lse, n, queries, scale, k_rows,
            v_rows, rows_of_split, key[0].stride(1), key[1].stride(1), value[0].stride(1), value[1].stride(1), *strides,
            CAUSAL=causal and queries > 1, SOFTCAP=softcap, BOOL_MASK=mask is not None and mask.dtype == torch.uint8,
            **fixed, num_warps=config.warps,
        )  # fmt: skip
        if v_spec.rotation is not None:
            partial[:, :-1] = partial[:, :-1] @ basis(head_dim, v_spec.rotation, q.device).mT
        merge_splits[batch * heads * queries,](partial, lse, sinks, out, rows, splits, queries, heads, head_dim, 16)
    return out

"""Attention of a few query tokens over packed pages: one program per split of the packed tokens, and one for the exact
tokens.

All query heads of a KV head are rows of one tile, so codes are unpacked once. Keys and values are dequantized in
registers by multiply-adds. With 16 rows this is less work than folding a scale per 32 tokens into the queries, and it
rounds like the reference. A second kernel merges the splits by their log-sum-exp.
"""

import triton
import triton.language as tl

from .paired_unpacking import load_paired_words, pair_format, paired_values
from .scores import (
    LOG2E,
    Call,
    Rope,
    exact_keys,
    exact_tokens,
    from_start,
    mask_lines,
    page_keys,
    page_words,
    parts_of,
    query_rows,
    query_tiles,
    ring_rows,
    scores,
    seen_by,
    shifts_of,
    with_present,
)
from .unpacking import (
    Pool,
    boosted_of,
    channels,
    load_words,
    packed_rows,
    row_tokens,
    values,
    zero_points_of,
)


@triton.jit
def rescaled(peak, total, out, highest):
    """Rescale a running softmax to a peak of at least ``highest``. Also returns the number to subtract from scores."""
    new = tl.maximum(peak, highest)
    base = tl.where(new == -float("inf"), 0.0, new)  # no token was visible yet
    factor = tl.exp2(peak - base)
    return new, total * factor, out * factor[:, None], base


@triton.jit
def _over_pages(
    peak, total, out, q, shift, scale, mask, start, begin, end, stop, key, value, v_ring, rope, parts,
    V_EXACT: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr,
    TOGETHER: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add the tokens of rows ``[begin, end)`` to the softmax, ``TOGETHER`` planes at a time."""
    of_plane: tl.constexpr = K.page // K.planes
    v_channel, v_col_mask = channels(V, 1)
    K_FORMAT: tl.constexpr = pair_format(key.points, K, Q.operand, TOGETHER)
    V_FORMAT: tl.constexpr = pair_format(value.points, V, Q.operand, TOGETHER)
    for first in tl.range(begin, end, ROWS, num_stages=1 if V_EXACT else STAGES):
        tokens, token_mask = row_tokens(first, stop, ROWS, K)
        k_words = page_words(key, first, stop, parts, ROWS, K, K_FORMAT)
        if not V_EXACT and V_FORMAT is not None:
            v_words = load_paired_words(value, first, stop, ROWS, V, V_FORMAT)
        elif not V_EXACT:
            column, col_mask = channels(V, V.code)
            v_words = load_words(value, first, stop, column, col_mask, ROWS, V)
        for part in tl.range(0, K.planes, TOGETHER, num_stages=STAGES):
            logits, highest = (), tl.full((q[0].shape[0], ROWS), -float("inf"), tl.float32)
            for i in tl.static_range(TOGETHER):
                at = tokens + (part + i) * of_plane
                k = page_keys(
                    k_words,
                    key,
                    first,
                    stop,
                    at,
                    token_mask,
                    part + i if K_FORMAT is None else i,
                    rope,
                    parts,
                    K,
                    K_FORMAT,
                )
                s = scores(q, k, shift, scale, mask, at, from_start(token_mask[None, :], at, start), Q)
                logits = logits + (s,)  # noqa: RUF005  (Triton has no unpacking)
                highest = tl.maximum(highest, s)
            peak, total, out, base = rescaled(peak, total, out, tl.max(highest, 1))
            weights = tl.zeros_like(highest)
            for i in tl.static_range(TOGETHER):
                if V_EXACT:
                    v = ring_rows(v_ring, tokens + (part + i) * of_plane, token_mask, v_channel, v_col_mask, V)
                elif V_FORMAT is not None:
                    v = paired_values(v_words, value, first, stop, i, V, V_FORMAT)
                else:
                    v = values(v_words, value, first, stop, v_channel, v_col_mask, part + i, V, True)
                p = tl.exp2(logits[i] - base[:, None])
                weights += p
                out = tl.dot(p.to(Q.operand), v.to(Q.operand), out, input_precision="ieee")
            total += tl.sum(weights, 1)
    return peak, total, out


@triton.jit(do_not_specialize=["queries", "new", "mask_batch", "mask_head", "mask_query"])
def attend_split(
    q, k_codes, k_scale, k_zero, k_ring, v_codes, v_scale, v_zero, v_ring, k_new, v_new, q_packed, shift, k_points,
    v_points, lower, boosted, cos, sin, center, mask, starts, partial, partial_lse, length, queries, new, scale,
    k_stride, k_params, v_stride, v_params, table_batch, table_row, mask_batch, mask_head, mask_query,
    Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, TOGETHER: tl.constexpr,
    EXACT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attention over one split of the packed tokens, or over all other tokens.

    Grid: KV heads of all samples, which may be more than 65,535; splits of the packed tokens, then one program for all
    other tokens, which is short; tiles of M query rows.

    The number of stored tokens is read from ``length``, and everything that depends on it is computed here. So a grid
    is valid for any number of tokens, which the splits share. The first ``v_rows`` rows of pages are packed in keys and
    values; further rows up to ``k_rows`` are packed in keys only. Keys in pages are multiplied with the queries
    ``q_packed``, which are rotated instead of the keys, and ``shift`` is added to the products. ``starts`` is the
    number of padding tokens of each sample. ``new``: tokens of ``k_new``; none in cross-attention.
    """
    n = tl.load(length).to(tl.int32)
    k_rows, v_rows = packed_rows(n, K), packed_rows(n, V)
    group = tl.program_id(0).to(tl.int64)
    if lower is not None:
        lower, boosted = boosted_of(lower, boosted, group, k_stride, K)
    k_zero = zero_points_of(k_zero, group, k_params, K)
    key = Pool(k_codes + group * k_stride, k_scale + group * k_params, k_zero, k_points, lower, boosted)
    v_zero = zero_points_of(v_zero, group, v_params, V)
    value = Pool(v_codes + group * v_stride, v_scale + group * v_params, v_zero, v_points, None, None)
    k_ring, v_ring = k_ring + group * (K.sinks + K.window) * K.dim, v_ring + group * (V.sinks + V.window) * K.dim
    k_new, v_new = k_new + group * new * K.dim, v_new + group * new * K.dim
    rope = Rope(cos, sin, group // Q.groups * table_batch, table_row, center, group * K.dim)
    start = tl.load(starts + group // Q.groups).to(tl.int32) if starts is not None else None
    call = Call(n, queries, new, scale, shift, mask, mask_batch, mask_head, mask_query, start)

    attend_tile(
        q, q_packed, key, value, k_ring, v_ring, k_new, v_new, rope, call, n, n + new, k_rows, v_rows, partial,
        partial_lse, Q, K, V, ROWS, TOGETHER, EXACT, STAGES,
    )  # fmt: skip


@triton.jit
def attend_tile(
    q, q_packed, key, value, k_ring, v_ring, k_new, v_new, rope, call, stored, stop, k_rows, v_rows, partial,
    partial_lse, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, TOGETHER: tl.constexpr,
    EXACT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """What a program of `attend_split` does. The first ``stored`` of ``stop`` tokens are in pages and rings, and the
    others are new."""
    group, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1) - 1
    mask, shift, scale, start = call.mask, call.shift, call.scale, call.start
    row, row_mask, query = query_rows(tl.program_id(2) * Q.tile, group, call, Q)
    shift = shifts_of(row, row_mask, call) if shift is not None else None
    mask = mask_lines(row, row_mask, query, group, call, Q) if mask is not None else None
    parts = parts_of(K)
    v_channel, v_col_mask = channels(V, 1)
    M: tl.constexpr = Q.tile
    peak, total = tl.full((M,), -float("inf"), tl.float32), tl.zeros((M,), tl.float32)
    out = tl.zeros((M, v_channel.shape[0]), tl.float32)

    rotated = query_tiles(q_packed, row, row_mask, parts, K.dim, Q)
    if split < splits:
        rows_of_split = tl.cdiv(tl.cdiv(v_rows, ROWS), splits) * ROWS
        begin = split * rows_of_split
        peak, total, out = _over_pages(
            peak, total, out, rotated, shift, scale, mask, start, begin, min(begin + rows_of_split, v_rows), v_rows,
            key, value, v_ring, rope, parts, False, Q, K, V, ROWS, TOGETHER, STAGES,
        )  # fmt: skip
    else:
        peak, total, out = _over_pages(
            peak, total, out, rotated, shift, scale, mask, start, v_rows, k_rows, k_rows, key, value, v_ring, rope,
            parts, True, Q, K, V, ROWS, TOGETHER, STAGES,
        )  # fmt: skip
        packed = k_rows * K.planes
        if K.places and Q.causal:  # a tile of a prompt has many tokens, and these may be its first
            query = tl.minimum(query, stop - 1 - call.n)
            stop = call.n + tl.max(query, 0) + 1
        exact_q = query_tiles(q, row, row_mask, parts, K.dim, Q)
        for first in tl.range(0, stop - packed, EXACT, num_stages=1):
            tokens = exact_tokens(first, packed, EXACT, K)
            k = exact_keys(k_ring, k_new, tokens, stored, stop, rope, parts, K)
            s = scores(exact_q, k, None, scale, mask, tokens, seen_by(query, tokens, call, Q), Q)
            peak, total, out, base = rescaled(peak, total, out, tl.max(s, 1))
            p = tl.exp2(s - base[:, None])
            v = ring_rows(v_ring, tokens, tokens < stored, v_channel, v_col_mask, V)
            v = with_present(v, v_new, tokens, stored, stop, v_channel, v_col_mask, V)
            out = tl.dot(p.to(Q.operand), v.to(Q.operand), out, input_precision="ieee")
            total += tl.sum(p, 1)

    at = row + (group * splits + split) * (Q.heads // Q.groups) * call.queries
    divisor = tl.where(total > 0, total, 1.0)
    out = out / divisor[:, None]
    tl.store(partial + at[:, None] * K.dim + v_channel[None, :], out, mask=row_mask[:, None] & v_col_mask[None, :])
    tl.store(partial_lse + at, tl.where(total > 0, peak + tl.log2(divisor), -float("inf")), mask=row_mask)


@triton.jit(do_not_specialize=["rows", "splits", "queries"])
def merge_splits(
    partial, partial_lse, sinks, out, lse, rows, splits, queries, HEADS: tl.constexpr, DIM: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """Merge the results of splits. Grid: every query row.

    ``sinks`` are logits of each head without values. ``lse`` receives the log-sum-exp of the row, inf if it sees no
    token; ``partial_lse``, that of the splits, is in units of log2.
    """
    row, channel = tl.program_id(0).to(tl.int64), tl.arange(0, triton.next_power_of_2(DIM))
    group, within = row // rows, row % rows
    peak, total, merged = -float("inf"), 0.0, tl.zeros((channel.shape[0],), tl.float32)
    if sinks is not None:
        peak, total = tl.load(sinks + row // queries % HEADS).to(tl.float32) * LOG2E, 1.0
    for first in range(0, splits, SPLITS):
        split = first + tl.arange(0, SPLITS)
        at = (group * splits + split) * rows + within
        logs = tl.load(partial_lse + at, mask=split < splits, other=-float("inf"))
        new = tl.maximum(peak, tl.max(logs, 0))
        base = tl.where(new == -float("inf"), 0.0, new)
        weights, factor = tl.exp2(logs - base), tl.exp2(peak - base)
        in_bounds = (split < splits)[:, None] & (channel < DIM)[None, :]
        parts = tl.load(partial + at[:, None] * DIM + channel[None, :], mask=in_bounds, other=0)
        merged = merged * factor + tl.sum(parts * weights[:, None], 0)
        total, peak = total * factor + tl.sum(weights, 0), new
    divisor = tl.where(total > 0, total, 1.0)
    merged = merged / divisor
    tl.store(out + row * DIM + channel, merged.to(out.dtype.element_ty), mask=channel < DIM)
    if lse is not None:
        tl.store(lse + row, tl.where(total > 0, (peak + tl.log2(divisor)) / LOG2E, float("inf")))

"""Computes the attention mass of each token: recomputes scores, and subtracts the log-sum-exp of each query row.

Query rows that do not count, such as padding, have an infinite log-sum-exp, so their weights are 0.
"""

import triton
import triton.language as tl

from .scores import (
    LOG2E,
    Call,
    Rope,
    exact_keys,
    exact_tokens,
    mask_lines,
    page_keys,
    page_words,
    parts_of,
    query_rows,
    query_tiles,
    scores,
    seen_by,
    shifts_of,
)
from .unpacking import Pool, boosted_of, row_tokens, zero_points_of


@triton.jit
def _mass(
    q, k, call, tokens, parts, lse, group, PACKED: tl.constexpr, LARGEST: tl.constexpr, Q: tl.constexpr,
    K: tl.constexpr,
):  # fmt: skip
    """Attention mass of ``tokens`` over all query rows of a KV head: the sum, or the largest weight."""
    total = tl.zeros((tokens.shape[0],), tl.float32)
    for first in tl.range(0, Q.heads // Q.groups * call.queries, Q.tile, num_stages=1):
        row, row_mask, query = query_rows(first, group, call, Q)
        shift = shifts_of(row, row_mask, call) if PACKED and call.shift is not None else None
        mask = mask_lines(row, row_mask, query, group, call, Q) if call.mask is not None else None
        tiles, visible = query_tiles(q, row, row_mask, parts, K.dim, Q), seen_by(query, tokens, call, Q)
        s = scores(tiles, k, shift, call.scale, mask, tokens, visible, Q)
        share = tl.exp2(s - (tl.load(lse + row, mask=row_mask, other=float("inf")) * LOG2E)[:, None])
        total = tl.maximum(total, tl.max(share, 0)) if LARGEST else total + tl.sum(share, 0)
    return total


@triton.jit(
    do_not_specialize=[
        "n",
        "queries",
        "k_rows",
        "tiles",
        "table_batch",
        "table_row",
        "mask_batch",
        "mask_head",
        "mask_query",
    ]
)
def sum_attention(
    q, k_codes, k_scale, k_zero, k_ring, k_new, q_packed, shift, k_points, lower, boosted, cos, sin, center, mask, lse,
    mass, n, queries, scale, k_rows, tiles, k_stride, k_params, table_batch, table_row, mask_batch, mask_head,
    mask_query, LARGEST: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Write the attention mass of all tokens. Grid: for each KV head of all samples, ``tiles`` of packed rows, then of
    exact tokens."""
    tile, group = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    if lower is not None:
        lower, boosted = boosted_of(lower, boosted, group, k_stride, K)
    k_zero = zero_points_of(k_zero, group, k_params, K)
    key = Pool(k_codes + group * k_stride, k_scale + group * k_params, k_zero, k_points, lower, boosted)
    rope = Rope(cos, sin, group // Q.groups * table_batch, table_row, center, group * K.dim)
    call, parts = Call(n, queries, queries, scale, shift, mask, mask_batch, mask_head, mask_query), parts_of(K)
    packed, stop = tl.cdiv(k_rows, ROWS), n + queries
    mass += group * stop
    if tile < packed:
        first = tile * ROWS
        tokens, token_mask = row_tokens(first, k_rows, ROWS, K)
        read = page_words(key, first, k_rows, parts, ROWS, K)
        for plane in tl.range(0, K.planes, num_stages=1):
            at = tokens + plane * (K.page // K.planes)
            k = page_keys(read, key, first, k_rows, at, token_mask, plane, rope, parts, K)
            tl.store(mass + at, _mass(q_packed, k, call, at, parts, lse, group, True, LARGEST, Q, K), mask=token_mask)
    else:
        k_ring, k_new = k_ring + group * (K.sinks + K.window) * K.dim, k_new + group * queries * K.dim
        exact = exact_tokens((tile - packed) * EXACT, k_rows * K.planes, EXACT, K)
        k = exact_keys(k_ring, k_new, exact, n, stop, rope, parts, K)
        share = _mass(q, k, call, exact, parts, lse, group, False, LARGEST, Q, K)
        tl.store(mass + exact, share, mask=exact < stop)

"""Attention of a few query tokens over a packed latent (MLA): keys are the latent and the rotary part, values are the
latent.

All query heads are rows of one KV head. A tile of the latent is dequantized once, and is multiplied with the queries
and then with the weights. Splits are those of `attend`, whose second kernel merges them.
"""

import triton
import triton.language as tl

from .attend import rescaled
from .scores import (
    Call,
    exact_tokens,
    from_start,
    mask_lines,
    query_rows,
    ring_rows,
    scores,
    seen_by,
    with_present,
)
from .unpacking import Pool, channels, load_words, packed_rows, row_tokens, values, zero_points_of


@triton.jit
def _queries(q, row, row_mask, Q: tl.constexpr, L: tl.constexpr, R: tl.constexpr):
    """The parts of query rows that are multiplied with the latent and with the rotary part."""
    column, col_mask = channels(L, 1)
    rotary, rotary_mask = channels(R, 1)
    start = q + row[:, None] * (L.dim + R.dim)
    of_latent = tl.load(start + column[None, :], mask=row_mask[:, None] & col_mask[None, :], other=0)
    of_rotary = tl.load(start + L.dim + rotary[None, :], mask=row_mask[:, None] & rotary_mask[None, :], other=0)
    return of_latent.to(Q.operand), of_rotary.to(Q.operand)


@triton.jit
def _over_pages(
    peak, total, out, q, scale, mask, start, begin, end, stop, latent, rotary, r_ring, R_EXACT: tl.constexpr,
    Q: tl.constexpr, L: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add the tokens of rows ``[begin, end)`` to the softmax, a plane at a time."""
    of_plane: tl.constexpr = L.page // L.planes
    channel, col_mask = channels(L, 1)
    r_channel, r_mask = channels(R, 1)
    code, code_mask = channels(L, L.code)
    r_code, r_code_mask = channels(R, R.code)
    for first in tl.range(begin, end, ROWS, num_stages=STAGES):
        tokens, token_mask = row_tokens(first, stop, ROWS, L)
        words = load_words(latent, first, stop, code, code_mask, ROWS, L)
        if not R_EXACT:
            r_words = load_words(rotary, first, stop, r_code, r_code_mask, ROWS, R)
        for plane in tl.range(0, L.planes, num_stages=1):
            at = tokens + plane * of_plane
            x = values(words, latent, first, stop, channel, col_mask, plane, L, True).to(Q.operand)
            if R_EXACT:
                r = ring_rows(r_ring, at, token_mask, r_channel, r_mask, R)
            else:
                r = values(r_words, rotary, first, stop, r_channel, r_mask, plane, R, True)
            s = scores(q, (x, r), None, scale, mask, at, from_start(token_mask[None, :], at, start), Q)
            peak, total, out, base = rescaled(peak, total, out, tl.max(s, 1))
            p = tl.exp2(s - base[:, None])
            out = tl.dot(p.to(Q.operand), x, out, input_precision="ieee")
            total += tl.sum(p, 1)
    return peak, total, out


@triton.jit(do_not_specialize=["queries", "new", "mask_batch", "mask_head", "mask_query"])
def attend_latent(
    q, l_codes, l_scale, l_zero, l_ring, r_codes, r_scale, r_zero, r_ring, l_new, r_new,
    mask, starts, partial, partial_lse, length, queries, new, scale, l_stride, l_params, r_stride, r_params, mask_batch,
    mask_head, mask_query, Q: tl.constexpr, L: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, EXACT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Attention over one split of the packed tokens, or over all other tokens: the grid and the arguments are those of
    `attend.attend_split`, with the latent (l) in place of keys and the rotary part (r) in place of values. The latter
    is packed no earlier."""
    n = tl.load(length).to(tl.int32)
    l_rows, r_rows = packed_rows(n, L), packed_rows(n, R)
    group, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1) - 1
    l_zero, r_zero = zero_points_of(l_zero, group, l_params, L), zero_points_of(r_zero, group, r_params, R)
    latent = Pool(l_codes + group * l_stride, l_scale + group * l_params, l_zero, None, None, None)
    rotary = Pool(r_codes + group * r_stride, r_scale + group * r_params, r_zero, None, None, None)
    l_ring, r_ring = l_ring + group * (L.sinks + L.window) * L.dim, r_ring + group * (R.sinks + R.window) * R.dim
    l_new, r_new = l_new + group * new * L.dim, r_new + group * new * R.dim
    start = tl.load(starts + group // Q.groups).to(tl.int32) if starts is not None else None
    call = Call(n, queries, new, scale, None, mask, mask_batch, mask_head, mask_query, start)

    row, row_mask, query = query_rows(tl.program_id(2) * Q.tile, group, call, Q)
    mask = mask_lines(row, row_mask, query, group, call, Q) if mask is not None else None
    channel, col_mask = channels(L, 1)
    r_channel, r_mask = channels(R, 1)
    peak, total = tl.full((Q.tile,), -float("inf"), tl.float32), tl.zeros((Q.tile,), tl.float32)
    out = tl.zeros((Q.tile, channel.shape[0]), tl.float32)
    q = _queries(q, row, row_mask, Q, L, R)
    if split < splits:
        rows_of_split = tl.cdiv(tl.cdiv(r_rows, ROWS), splits) * ROWS
        begin = split * rows_of_split
        peak, total, out = _over_pages(
            peak, total, out, q, scale, mask, start, begin, min(begin + rows_of_split, r_rows), r_rows, latent, rotary,
            r_ring, False, Q, L, R, ROWS, STAGES,
        )  # fmt: skip
    else:
        peak, total, out = _over_pages(
            peak, total, out, q, scale, mask, start, r_rows, l_rows, l_rows, latent, rotary, r_ring, True, Q, L, R,
            ROWS, STAGES,
        )  # fmt: skip
        stop, packed = n + new, l_rows * L.planes
        for first in tl.range(0, stop - packed, EXACT, num_stages=1):
            tokens = exact_tokens(first, packed, EXACT, L)
            x = ring_rows(l_ring, tokens, tokens < n, channel, col_mask, L)
            x = with_present(x, l_new, tokens, n, stop, channel, col_mask, L)
            r = ring_rows(r_ring, tokens, tokens < n, r_channel, r_mask, R)
            r = with_present(r, r_new, tokens, n, stop, r_channel, r_mask, R)
            s = scores(q, (x, r), None, scale, mask, tokens, seen_by(query, tokens, call, Q), Q)
            peak, total, out, base = rescaled(peak, total, out, tl.max(s, 1))
            p = tl.exp2(s - base[:, None])
            out = tl.dot(p.to(Q.operand), x.to(Q.operand), out, input_precision="ieee")
            total += tl.sum(p, 1)

    at = row + (group * splits + split) * (Q.heads // Q.groups) * call.queries
    divisor = tl.where(total > 0, total, 1.0)
    where = partial + at[:, None] * L.dim + channel[None, :]
    tl.store(where, out / divisor[:, None], mask=row_mask[:, None] & col_mask[None, :])
    tl.store(partial_lse + at, tl.where(total > 0, peak + tl.log2(divisor), -float("inf")), mask=row_mask)

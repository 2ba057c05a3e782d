"""Attention of a few query tokens over pages with per-channel bit widths.

There is one program for each split of the pages, and one for all other tokens. The rows of a tile are query rows times
the pages of an iteration. Each row scores only its own page, because the weights of fields for a query differ by page.
The softmaxes of the rows are merged at the end of a split. Values are summed as fields, and converted to channels after
the splits.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .read_fields import (
    columns_of,
    first_run,
    headroom_of,
    middle_of,
    pages_of,
    pages_of_head,
    piece_fields,
    piece_number,
    pieces_of,
    places_of,
    power_of,
    ranks_of,
    runs_of,
    runs_of_piece,
    tile_gains,
    tile_numbers,
    tile_places,
    tile_tokens,
)
from .scores import (
    LOG2E,
    Call,
    exact_keys,
    exact_tokens,
    mask_lines,
    parts_of,
    query_tiles,
    ring_rows,
    scores,
    seen_by,
    with_present,
)
from .unpacking import channels

_COUNTED: tl.constexpr = tl.constexpr(16)  # columns of a product of weights; the first two hold sums of weights


class QueryRows(NamedTuple):
    """The rows of a tile.

    row, line: index of the query row in its KV head, and among all.
    valid: whether the row exists.
    query: index of the query token.
    page: index of the row's page within an iteration.
    mask: pointer to the row's line of the mask.
    """

    row: tl.tensor
    line: tl.tensor
    valid: tl.tensor
    query: tl.tensor
    page: tl.tensor
    mask: tl.tensor | None


class PageQueries(NamedTuple):
    """Pointers to the results of `page_queries` for a KV head.

    stride: query rows from one page to the next; 0 if all pages share one result.
    mean: products with the mean of the keys, to be added to scores: one per row or, with page-relative RoPE, one per
        row and token.
    """

    fields: tl.tensor
    sums: tl.tensor
    stride: tl.tensor
    mean: tl.tensor | None


@triton.jit
def _rank_scores(
    pages, queries, call, rows, first, stop, RANK: tl.constexpr, PAGES: tl.constexpr, Q: tl.constexpr,
    K: tl.constexpr, N: tl.constexpr, PAGE_ROPE: tl.constexpr,
):  # fmt: skip
    """Scores of query rows with the tokens of a rank, ``[rows, tokens]``, -inf for tokens of other pages than the
    row's."""
    page, token = tile_tokens(PAGES, K)
    line, valid = rows.page * queries.stride + rows.row, rows.valid & (rows.page < stop - first)
    sums = queries.sums + first * queries.stride * runs_of(K) + line * runs_of(K)
    total, middle = tl.zeros(line.shape, tl.float32), tl.zeros(line.shape, tl.float32)
    for i in tl.static_range(pieces_of(K, RANK)):
        for run in tl.static_range(runs_of_piece(K, RANK, i)):
            of_run = tl.load(sums + (first_run(K, RANK, i) + run), mask=valid, other=0)
            total += of_run
            middle += of_run * middle_of(K, RANK, i)
    times = tl.exp2(places_of(token, K, N).to(tl.float32))
    if K.shared:  # the sums are those of what stands for 0
        s = tl.zeros((line.shape[0], token.shape[0]), tl.float32) - total[:, None]
    else:
        s = total[:, None] * -power_of(N) - middle[:, None] * times[None, :]
    for i in tl.static_range(pieces_of(K, RANK)):
        field = columns_of(K, RANK, i)
        at = queries.fields + first * queries.stride * K.width + (line[:, None] * K.width + field[None, :])
        q = tl.load(at, mask=valid[:, None], other=0)
        k = piece_fields(pages, first, stop, RANK, i, PAGES, K, N)
        s = tl.dot(q.to(Q.operand), tl.trans(k), s, input_precision="tf32x3")
    s *= tile_gains(pages, first, stop, RANK, PAGES, K, N, 0)[None, :]
    own = valid[:, None] & (rows.page[:, None] == page[None, :])
    if queries.mean is not None and PAGE_ROPE:
        at = first * queries.stride * K.page + (line[:, None] * K.page + tile_places(RANK, PAGES, K)[None, :])
        s += tl.load(queries.mean + at, mask=own, other=0)
    elif queries.mean is not None:
        s += tl.load(queries.mean + rows.row, mask=rows.valid, other=0)[:, None]
    if Q.softcap > 0:
        top: tl.constexpr = Q.softcap * LOG2E
        s = top - 2 * top / (tl.exp2(s * (2 / Q.softcap)) + 1)  # tanh
    if rows.mask is not None:
        number = tile_numbers(pages, first, stop, RANK, PAGES, K)
        bias = tl.load(rows.mask[:, None] + number[None, :], mask=own, other=0)
        if Q.bool_mask:
            own = own & (bias != 0)
        else:
            bias = bias.to(tl.float32)
            s += tl.where(bias < -2e38, bias, bias * LOG2E)
    return tl.where(own, s, -float("inf"))


@triton.jit
def _moved(peak, highest):
    """Update the peak of a running softmax to at least ``highest``. Returns the new peak, the number to subtract from
    scores, and the factor for earlier sums."""
    new = tl.maximum(peak, highest)
    base = tl.where(new == -float("inf"), 0.0, new)  # no token was seen yet
    return new, base, tl.exp2(peak - base)


@triton.jit
def _of_all_pages(x, PAGES: tl.constexpr):
    """Sum over the pages of each query row: ``[rows * PAGES, .]`` -> ``[rows, .]``."""
    return tl.sum(tl.reshape(x, (x.shape[0] // PAGES, PAGES, x.shape[1])), 1)


@triton.jit
def _common(peak, total, PAGES: tl.constexpr):
    """Factors that normalize the sums of all rows of a query to a common peak and a total of 1, and the query's
    log-sum-exp."""
    of_query = tl.reshape(peak, (peak.shape[0] // PAGES, PAGES))
    highest = tl.max(of_query, 1)
    base = tl.where(highest == -float("inf"), 0.0, highest)
    factor = tl.exp2(of_query - base[:, None])
    sums = tl.sum(tl.reshape(total, of_query.shape) * factor, 1)
    divisor = tl.where(sums > 0, sums, 1.0)
    factor = tl.reshape(factor / divisor[:, None], peak.shape)
    return factor, tl.where(sums > 0, base + tl.log2(divisor), -float("inf"))


@triton.jit
def _first_rows(lines, there, PAGES: tl.constexpr):
    """One row per query: its line, and whether it exists."""
    shape: tl.constexpr = (lines.shape[0] // PAGES, PAGES)
    return tl.min(tl.reshape(lines, shape), 1), tl.max(tl.reshape(there.to(tl.int32), shape), 1) != 0


@triton.jit
def _packed_split(
    pages, values, middles, queries, call, rows, begin, end, out, lse, PAGES: tl.constexpr, Q: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, N: tl.constexpr, PAGE_ROPE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the weighted sums of the fields of values in pages ``[begin, end)``, ``[rows, V.width]``, to ``out``, and
    the log-sum-exp to ``lse``.

    The offsets and midpoints of fields are subtracted at the end, with sums of the weights as the products round them.
    middles: those of values, if pages hold all heads.
    """
    M: tl.constexpr = Q.tile
    tokens: tl.constexpr = PAGES * V.tokens
    RANKS: tl.constexpr = ranks_of(V)
    _, token = tile_tokens(PAGES, V)
    column = tl.arange(0, _COUNTED)[None, :]
    times = tl.exp2(tl.where(column == 0, 0, places_of(token, V, N)[:, None]).to(tl.float32))
    times = tl.where(column < 2, times, 0.0).to(Q.operand)
    peak, total = tl.full((M,), -float("inf"), tl.float32), tl.zeros((M, tokens), tl.float32)
    sums, weights = (), ()
    for rank in tl.static_range(RANKS):
        weights = weights + (tl.zeros((M, _COUNTED), tl.float32),)  # noqa: RUF005  (Triton has no unpacking)
        for i in tl.static_range(pieces_of(V, rank)):
            sums = sums + (tl.zeros((M, columns_of(V, rank, i).shape[0]), tl.float32),)  # noqa: RUF005
    for first in tl.range(begin, end, PAGES, num_stages=STAGES):
        logits, highest = (), tl.full((M, tokens), -float("inf"), tl.float32)
        for rank in tl.static_range(RANKS):
            s = _rank_scores(pages, queries, call, rows, first, end, rank, PAGES, Q, K, N, PAGE_ROPE)
            logits = logits + (s,)  # noqa: RUF005
            highest = tl.maximum(highest, s)
        peak, base, factor = _moved(peak, tl.max(highest, 1))
        total *= factor[:, None]
        new_sums, new_weights = (), ()
        for rank in tl.static_range(RANKS):
            p = tl.exp2(logits[rank] - base[:, None])
            total += p
            p *= tile_gains(values, first, end, rank, PAGES, V, N, headroom_of(N))[None, :]
            p = p.to(Q.operand)
            so_far = weights[rank] * factor[:, None]
            new_weights = new_weights + (tl.dot(p, times, so_far, input_precision="tf32x3"),)  # noqa: RUF005
            for i in tl.static_range(pieces_of(V, rank)):
                v = piece_fields(values, first, end, rank, i, PAGES, V, N)
                so_far = sums[piece_number(V, rank, i)] * factor[:, None]
                new_sums = new_sums + (tl.dot(p, v, so_far, input_precision="tf32x3"),)  # noqa: RUF005
        sums, weights = new_sums, new_weights
    factor, logs = _common(peak, tl.sum(total, 1), PAGES)
    factor *= 2.0 ** -headroom_of(N)
    line, there = _first_rows(rows.line, rows.valid, PAGES)
    tl.store(lse + line, logs, mask=there)
    for rank in tl.static_range(RANKS):
        added = tl.sum(tl.where(column == 0, weights[rank], 0.0), 1) * power_of(N)
        all_of = tl.sum(tl.where(column == 1, weights[rank], 0.0), 1)
        for i in tl.static_range(pieces_of(V, rank)):
            less = (added + all_of * middle_of(V, rank, i))[:, None]
            if V.shared:
                less += all_of[:, None] * tl.load(middles + columns_of(V, rank, i))[None, :]
            found = _of_all_pages((sums[piece_number(V, rank, i)] - less) * factor[:, None], PAGES)
            at = out + line[:, None] * V.width + columns_of(V, rank, i)[None, :]
            tl.store(at, found, mask=there[:, None])


@triton.jit
def _exact_split(
    pages, k_ring, v_ring, k_new, v_new, q, queries, call, rows, begin, end, out, lse,
    PAGES: tl.constexpr, EXACT: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    R: tl.constexpr, W: tl.constexpr, PAGE_ROPE: tl.constexpr,
):  # fmt: skip
    """Write the weighted sums of all other values, ``[rows, D]``: tokens of pages ``[begin, end)``, whose keys are
    packed and whose values are exact, and tokens whose keys are exact too. R, W: layouts of exact keys and values."""
    M: tl.constexpr = Q.tile
    parts = parts_of(R)
    channel, real = channels(W, 1)
    peak, total = tl.full((M,), -float("inf"), tl.float32), tl.zeros((M,), tl.float32)
    found = tl.zeros((M, channel.shape[0]), tl.float32)
    for first in tl.range(begin, end, PAGES, num_stages=1):
        for rank in tl.static_range(ranks_of(K)):
            s = _rank_scores(pages, queries, call, rows, first, end, rank, PAGES, Q, K, N, PAGE_ROPE)
            peak, base, factor = _moved(peak, tl.max(s, 1))
            p = tl.exp2(s - base[:, None])
            page, _ = tile_tokens(PAGES, K)
            number = tile_numbers(pages, first, end, rank, PAGES, K)
            v = ring_rows(v_ring, number, page < end - first, channel, real, W)
            found = tl.dot(p.to(Q.operand), v.to(Q.operand), found * factor[:, None], input_precision="tf32x3")
            total = total * factor + tl.sum(p, 1)
    once = rows.valid & (rows.page == 0)
    q = query_tiles(q, rows.line, once, parts, R.dim, Q)
    packed, stop = end * K.page, call.n + call.new
    for first in tl.range(0, stop - packed, EXACT, num_stages=1):
        tokens = exact_tokens(first, packed, EXACT, R)
        k = exact_keys(k_ring, k_new, tokens, call.n, stop, None, parts, R)
        seen = seen_by(rows.query, tokens, call, Q) & once[:, None]
        s = scores(q, k, None, call.scale, rows.mask, tokens, seen, Q)
        peak, base, factor = _moved(peak, tl.max(s, 1))
        p = tl.exp2(s - base[:, None])
        v = ring_rows(v_ring, tokens, tokens < call.n, channel, real, W)
        v = with_present(v, v_new, tokens, call.n, stop, channel, real, W)
        found = tl.dot(p.to(Q.operand), v.to(Q.operand), found * factor[:, None], input_precision="tf32x3")
        total = total * factor + tl.sum(p, 1)
    factor, logs = _common(peak, total, PAGES)
    line, there = _first_rows(rows.line, rows.valid, PAGES)
    tl.store(lse + line, logs, mask=there)
    found = _of_all_pages(found * factor[:, None], PAGES)
    at_channel = out + line[:, None] * R.dim + channel[None, :]
    tl.store(at_channel, found, mask=there[:, None] & real[None, :])


@triton.jit(do_not_specialize=["queries", "new", "k_size", "v_size", "mask_batch", "mask_head", "mask_query"])
def attend_fields(
    q, k_pages, k_places, k_ring, v_pages, v_places, middles, v_ring, k_new, v_new, fields, sums, mean, mask, summed,
    exact, lse, length, queries, new, scale, k_size, v_size, k_capacity, v_capacity, mask_batch, mask_head, mask_query,
    PAGES: tl.constexpr, EXACT: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    W: tl.constexpr, N: tl.constexpr, PAGE_ROPE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attention over pages with per-channel bit widths.

    Grid: KV heads of all samples; splits of the pages, then one program for all other tokens, which is short; tiles of
    query rows.

    The number of stored tokens is read from ``length``. The ``queries`` query tokens are the last of the ``new``
    tokens, or there are no new ones (cross-attention). ``fields``, ``sums`` and ``mean`` are results of `page_queries`,
    with one page for all unless ``PAGE_ROPE``. ``summed`` receives the sums of the splits, in fields; ``exact``, the
    sums of the last program, in channels; ``lse``, the log-sum-exp of all.

    If pages hold all heads, ``k_places``, ``v_places`` and ``middles``, those of values, are results of
    `share_rows`, and pages have ``k_size`` and ``v_size`` bytes.
    """
    n = tl.load(length).to(tl.int32)
    k_stop, v_stop = pages_of(n, K), pages_of(n, V)
    group, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1) - 1
    of_head = Q.heads // Q.groups * queries
    call = Call(n, queries, new, scale, None, mask, mask_batch, mask_head, mask_query)
    index = tl.arange(0, Q.tile)  # each query row once per page of an iteration
    row = tl.program_id(2) * (Q.tile // PAGES) + index // PAGES
    line, valid, query = group * of_head + row, row < of_head, row % queries
    lines = mask_lines(line, valid, query, group, call, Q) if mask is not None else None
    rows = QueryRows(row, line, valid, query, index % PAGES, lines)
    room = group * (k_capacity if PAGE_ROPE else 1) * of_head
    if mean is not None:
        mean += room * (K.page if PAGE_ROPE else 1)
    of_pages = PageQueries(
        fields + room * K.width, sums + room * runs_of(K), of_head if PAGE_ROPE else 0, mean
    )  # fmt: skip
    key = pages_of_head(k_pages, k_places, k_size, group, k_capacity, Q.groups, K)
    value = pages_of_head(v_pages, v_places, v_size, group, v_capacity, Q.groups, V)
    if middles is not None:
        middles += group * V.width
    if split < splits:
        of_split = tl.cdiv(tl.cdiv(v_stop, PAGES), splits) * PAGES
        begin = split * of_split
        _packed_split(
            key, value, middles, of_pages, call, rows, begin, min(begin + of_split, v_stop),
            summed + (group * (splits - 1) + split) * of_head * V.width, lse + (group * splits + split) * of_head,
            PAGES, Q, K, V, N, PAGE_ROPE, STAGES,
        )  # fmt: skip
    else:
        k_ring, v_ring = k_ring + group * (R.sinks + R.window) * R.dim, v_ring + group * (W.sinks + W.window) * W.dim
        k_new, v_new = k_new + group * new * R.dim, v_new + group * new * R.dim
        _exact_split(
            key, k_ring, v_ring, k_new, v_new, q, of_pages, call, rows, v_stop, k_stop, exact,
            lse + (group + 1) * splits * of_head, PAGES, EXACT, Q, K, N, R, W, PAGE_ROPE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "splits", "queries"])
def merge_fields(
    summed, partial_lse, sinks, merged, of_exact, lse, rows, splits, queries, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    SPLITS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Write the normalized sums of all splits, in fields: ``[BH, rows, WIDTH]``; and the factor of the sums of exact
    tokens, ``[BH, rows]``. Grid: every query row; runs of ``COUNT`` fields.

    ``sinks`` are logits of each head without values. ``lse`` receives the log-sum-exp of the row, -inf if it sees no
    token.
    """
    row, run, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, SPLITS)
    group, within, field = row // rows, row % rows, run * COUNT + tl.arange(0, COUNT)
    logs = partial_lse + group * (splits + 1) * rows + within
    exact = tl.load(logs + splits * rows)
    peak, total, found = exact, 1.0, tl.zeros((COUNT,), tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + row // queries % HEADS).to(tl.float32) * LOG2E
        peak = tl.maximum(exact, sink)
        total = tl.exp2(exact - peak) + tl.exp2(sink - peak)
    elif exact == -float("inf"):
        total = 0.0
    for first in range(0, splits, SPLITS):
        there, at = first + split < splits, group * splits + first + split
        log = tl.load(logs + (first + split) * rows, mask=there, other=-float("inf"))
        part = tl.load(summed + (at * rows + within)[:, None] * WIDTH + field[None, :], mask=there[:, None], other=0)
        new = tl.maximum(peak, tl.max(log, 0))
        base = tl.where(new == -float("inf"), 0.0, new)
        weights, factor = tl.exp2(log - base), tl.exp2(peak - base)
        found = found * factor + tl.sum(part * weights[:, None], 0)
        total, peak = total * factor + tl.sum(weights, 0), new
    divisor = tl.where(total > 0, total, 1.0)
    tl.store(merged + row * WIDTH + field, found / divisor)
    if run == 0:
        tl.store(of_exact + row, tl.exp2(exact - tl.where(peak == -float("inf"), 0.0, peak)) / divisor)
        if lse is not None:
            found_lse = tl.where(peak < -2e38, peak, (peak + tl.log2(divisor)) / LOG2E)  # `scores` keeps the lowest
            tl.store(lse + row, tl.where(total > 0, found_lse, -float("inf")))


@triton.jit(do_not_specialize=["rows"])
def fields_to_channels(
    merged, exact, of_exact, rows_of_fields, out, rows, DIM: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """Convert sums of values in fields to channels, and add those of exact tokens. Grid: every query row; runs of
    ``CHANNELS`` channels."""
    row, channel = tl.program_id(0).to(tl.int64), tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    real, found = channel < DIM, tl.zeros((COUNT, CHANNELS), tl.float32)
    for i in tl.static_range(WIDTH // COUNT):
        field = i * COUNT + tl.arange(0, COUNT)
        at = rows_of_fields + (row // rows * WIDTH + field[:, None]) * DIM + channel[None, :]
        sums = tl.load(merged + row * WIDTH + field)
        found += sums[:, None] * tl.load(at, mask=real[None, :], other=0)
    added = tl.load(exact + row * DIM + channel, mask=real, other=0) * tl.load(of_exact + row)
    tl.store(out + row * DIM + channel, (tl.sum(found, 0) + added).to(out.dtype.element_ty), mask=real)

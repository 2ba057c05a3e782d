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
    headroom_of,
    middle_of,
    pages_of,
    piece_fields,
    pieces_of,
    places_of,
    power_of,
    ranks_of,
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


class Asked(NamedTuple):
    """The rows of a tile.

    row, line: index of the query row in its KV head, and among all.
    there: whether the row exists.
    query: index of the query token.
    page: index of the row's page within an iteration.
    mask: pointer to the row's line of the mask.
    """

    row: tl.tensor
    line: tl.tensor
    there: tl.tensor
    query: tl.tensor
    page: tl.tensor
    mask: tl.tensor | None


class Worth(NamedTuple):
    """Results of `kvpass.lowering.triton.read_fields` for query rows; pointers to the data of a KV head.

    fields, sums: results of `page_queries`.
    page: stride between pages.
    tokens, gains: ids and gains of the tokens.
    mean: added to scores: one per row or, if ``mean_row`` is given, one per row and token.
    """

    fields: tl.tensor
    sums: tl.tensor
    page: tl.tensor
    tokens: tl.tensor
    gains: tl.tensor
    mean: tl.tensor | None
    mean_row: tl.tensor


@triton.constexpr_function
def _number_of(fields, rank, index):
    """Index of a piece among the pieces of all ranks."""
    return sum(len(pieces) for pieces in fields.pieces[:rank]) + index


@triton.jit
def _rank_scores(
    pages, worth, call, asked, first, stop, RANK: tl.constexpr, PAGES: tl.constexpr, Q: tl.constexpr,
    K: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Scores of query rows with the tokens of a rank, ``[rows, tokens]``, -inf for tokens of other pages than the
    row's. Also returns the places of the tokens in pages."""
    page, token = tile_tokens(PAGES, K)
    line, known = asked.page * worth.page + asked.row, asked.there & (asked.page < stop - first)
    fields, sums = worth.fields + first * worth.page * K.width, worth.sums + first * worth.page * (2 * ranks_of(K))
    at = (line * ranks_of(K) + RANK) * 2
    total, middle = tl.load(sums + at, mask=known, other=0), tl.load(sums + (at + 1), mask=known, other=0)
    times = tl.exp2(places_of(token, K, N).to(tl.float32))
    s = total[:, None] * -power_of(N) - middle[:, None] * times[None, :]
    for i in tl.static_range(pieces_of(K, RANK)):
        field = columns_of(K, RANK, i)
        q = tl.load(fields + (line[:, None] * K.width + field[None, :]), mask=known[:, None], other=0)
        k = piece_fields(pages, first, stop, RANK, i, PAGES, K, N)
        s = tl.dot(q.to(Q.operand), tl.trans(k), s, input_precision="ieee")
    place, there = tile_places(RANK, PAGES, K), page < stop - first
    s *= tl.load(worth.gains + first * K.page + place, mask=there, other=0)[None, :]
    own = known[:, None] & (asked.page[:, None] == page[None, :])
    if worth.mean_row is not None:
        at = asked.row[:, None] * worth.mean_row + place[None, :]
        s += tl.load(worth.mean + first * K.page + at, mask=own, other=0)
    elif worth.mean is not None:
        s += tl.load(worth.mean + asked.row, mask=asked.there, other=0)[:, None]
    if Q.softcap > 0:
        top: tl.constexpr = Q.softcap * LOG2E
        s = top - 2 * top / (tl.exp2(s * (2 / Q.softcap)) + 1)  # tanh
    if asked.mask is not None:
        number = tl.load(worth.tokens + first * K.page + place, mask=there, other=0)
        bias = tl.load(asked.mask[:, None] + number[None, :], mask=own, other=0)
        if Q.bool_mask:
            own = own & (bias != 0)
        else:
            bias = bias.to(tl.float32)
            s += tl.where(bias < -2e38, bias, bias * LOG2E)
    return tl.where(own, s, -float("inf")), first * K.page + place


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
    pages, values, gains, worth, call, asked, begin, end, out, lse, PAGES: tl.constexpr, Q: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the weighted sums of the fields of values in pages ``[begin, end)``, ``[rows, V.width]``, to ``out``, and
    the log-sum-exp to ``lse``.

    The offsets and midpoints of fields are subtracted at the end, with sums of the weights as the products round them.
    """
    M: tl.constexpr = Q.tile
    tokens: tl.constexpr = PAGES * V.tokens
    RANKS: tl.constexpr = ranks_of(V)
    page, token = tile_tokens(PAGES, V)
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
            s, _ = _rank_scores(pages, worth, call, asked, first, end, rank, PAGES, Q, K, N)
            logits = logits + (s,)  # noqa: RUF005
            highest = tl.maximum(highest, s)
        peak, base, factor = _moved(peak, tl.max(highest, 1))
        total *= factor[:, None]
        new_sums, new_weights = (), ()
        for rank in tl.static_range(RANKS):
            p = tl.exp2(logits[rank] - base[:, None])
            total += p
            gain = tl.load(gains + first * V.page + tile_places(rank, PAGES, V), mask=page < end - first, other=0)
            p = (p * gain[None, :]).to(Q.operand)
            so_far = weights[rank] * factor[:, None]
            new_weights = new_weights + (tl.dot(p, times, so_far, input_precision="ieee"),)  # noqa: RUF005
            for i in tl.static_range(pieces_of(V, rank)):
                v = piece_fields(values, first, end, rank, i, PAGES, V, N)
                so_far = sums[_number_of(V, rank, i)] * factor[:, None]
                new_sums = new_sums + (tl.dot(p, v, so_far, input_precision="ieee"),)  # noqa: RUF005
        sums, weights = new_sums, new_weights
    factor, logs = _common(peak, tl.sum(total, 1), PAGES)
    factor *= 2.0 ** -headroom_of(N)
    line, there = _first_rows(asked.line, asked.there, PAGES)
    tl.store(lse + line, logs, mask=there)
    for rank in tl.static_range(RANKS):
        added = tl.sum(tl.where(column == 0, weights[rank], 0.0), 1) * power_of(N)
        all_of = tl.sum(tl.where(column == 1, weights[rank], 0.0), 1)
        for i in tl.static_range(pieces_of(V, rank)):
            less = added + all_of * middle_of(V, rank, i)
            found = _of_all_pages((sums[_number_of(V, rank, i)] - less[:, None]) * factor[:, None], PAGES)
            at = out + line[:, None] * V.width + columns_of(V, rank, i)[None, :]
            tl.store(at, found, mask=there[:, None])


@triton.jit
def _exact_split(
    pages, k_ring, v_ring, k_new, v_new, q, worth, call, asked, begin, end, out, lse,
    PAGES: tl.constexpr, EXACT: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, N: tl.constexpr,
    R: tl.constexpr, W: tl.constexpr,
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
            s, place = _rank_scores(pages, worth, call, asked, first, end, rank, PAGES, Q, K, N)
            peak, base, factor = _moved(peak, tl.max(s, 1))
            p = tl.exp2(s - base[:, None])
            there = place < end * K.page
            number = tl.load(worth.tokens + place, mask=there, other=0)
            v = ring_rows(v_ring, number, there, channel, real, W)
            found = tl.dot(p.to(Q.operand), v.to(Q.operand), found * factor[:, None], input_precision="ieee")
            total = total * factor + tl.sum(p, 1)
    once = asked.there & (asked.page == 0)
    q = query_tiles(q, asked.line, once, parts, R.dim, Q)
    packed, stop = end * K.page, call.n + call.queries
    for first in tl.range(0, stop - packed, EXACT, num_stages=1):
        tokens = exact_tokens(first, packed, EXACT, R)
        k = exact_keys(k_ring, k_new, tokens, call.n, stop, None, parts, R)
        seen = seen_by(asked.query, tokens, call, Q) & once[:, None]
        s = scores(q, k, None, call.scale, asked.mask, tokens, seen, Q)
        peak, base, factor = _moved(peak, tl.max(s, 1))
        p = tl.exp2(s - base[:, None])
        v = ring_rows(v_ring, tokens, tokens < call.n, channel, real, W)
        v = with_present(v, v_new, tokens, call.n, stop, channel, real, W)
        found = tl.dot(p.to(Q.operand), v.to(Q.operand), found * factor[:, None], input_precision="ieee")
        total = total * factor + tl.sum(p, 1)
    factor, logs = _common(peak, total, PAGES)
    line, there = _first_rows(asked.line, asked.there, PAGES)
    tl.store(lse + line, logs, mask=there)
    found = _of_all_pages(found * factor[:, None], PAGES)
    at_channel = out + line[:, None] * R.dim + channel[None, :]
    tl.store(at_channel, found, mask=there[:, None] & real[None, :])


@triton.jit(do_not_specialize=["queries", "mask_batch", "mask_head", "mask_query"])
def attend_fields(
    q, k_pages, k_ring, v_pages, v_ring, k_new, v_new, fields, sums, tokens, k_gains, v_gains, mean, mask, out, partial,
    lse, length, queries, scale, k_capacity, v_capacity, mean_row, mask_batch, mask_head, mask_query,
    PAGES: tl.constexpr, EXACT: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    W: tl.constexpr, N: tl.constexpr, FRAMED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attention over pages with per-channel bit widths.

    Grid: KV heads of all samples; splits of the pages, then one program for all other tokens, which is short; tiles of
    query rows.

    The number of stored tokens is read from ``length``. ``fields`` and ``sums`` are results of `page_queries`, with one
    page for all unless ``FRAMED`` (page-relative RoPE). ``tokens`` and ``mean`` are results of `order_tokens`. ``out``
    receives the sums of the splits, in fields. ``partial`` receives the sums of the last program, in channels, after
    room for the splits. ``lse`` receives the log-sum-exp of all.
    """
    n = tl.load(length).to(tl.int32)
    k_stop, v_stop = pages_of(n, K), pages_of(n, V)
    group, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1) - 1
    rows = Q.heads // Q.groups * queries
    call = Call(n, queries, scale, None, mask, mask_batch, mask_head, mask_query)
    index = tl.arange(0, Q.tile)  # each query row once per page of an iteration
    row = tl.program_id(2) * (Q.tile // PAGES) + index // PAGES
    line, there, query = group * rows + row, row < rows, row % queries
    lines = mask_lines(line, there, query, group, call, Q) if mask is not None else None
    asked = Asked(row, line, there, query, index % PAGES, lines)
    places, room = group * k_capacity * K.page, k_capacity if FRAMED else 1
    fields, sums = fields + group * room * rows * K.width, sums + group * room * rows * (2 * ranks_of(K))
    if mean is not None:
        mean += group * rows * (mean_row if mean_row is not None else 1)
    worth = Worth(fields, sums, rows if FRAMED else 0, tokens + places, k_gains + places, mean, mean_row)
    k_pages, v_pages = k_pages + group * k_capacity * K.size, v_pages + group * v_capacity * V.size
    if split < splits:
        of_split = tl.cdiv(tl.cdiv(v_stop, PAGES), splits) * PAGES
        begin = split * of_split
        _packed_split(
            k_pages, v_pages, v_gains + places, worth, call, asked, begin, min(begin + of_split, v_stop),
            out + (group * (splits - 1) + split) * rows * V.width, lse + (group * splits + split) * rows, PAGES, Q, K,
            V, N, STAGES,
        )  # fmt: skip
    else:
        k_ring, v_ring = k_ring + group * (R.sinks + R.window) * R.dim, v_ring + group * (W.sinks + W.window) * W.dim
        k_new, v_new = k_new + group * queries * R.dim, v_new + group * queries * R.dim
        _exact_split(
            k_pages, k_ring, v_ring, k_new, v_new, q, worth, call, asked, v_stop, k_stop,
            partial + (group + 1) * splits * rows * R.dim, lse + (group + 1) * splits * rows, PAGES, EXACT, Q, K, V, N,
            R, W,
        )  # fmt: skip

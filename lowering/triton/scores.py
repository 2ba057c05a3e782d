"""Computes scores of query rows with packed or exact keys, for attention and for attention mass.

A key is a tuple of parts. There is one part, unless keys are rotated when they are read. Then the parts are the first
channels of all rotary pairs, the second channels, and the channels that are not rotated. A product is the sum of the
products of the parts, so no channel moves between columns.
"""

import math
from typing import NamedTuple

import triton
import triton.language as tl

from .paired_unpacking import load_paired_words, paired_values
from .unpacking import Table, channels, load_words, offset_of, values

LOG2E: tl.constexpr = tl.constexpr(math.log2(math.e))  # exp2 takes a third of the instructions of exp


class Rules(NamedTuple):
    """Compile-time constants of a call. tile: query rows per tile. operand: dtype of the operands of products."""

    heads: int
    groups: int
    causal: bool
    softcap: float
    bool_mask: bool
    tile: int
    operand: tl.dtype


class Call(NamedTuple):
    """A call: ``new`` tokens after ``n`` stored ones. The ``queries`` query tokens are the last of the new ones, except
    in cross-attention, which has no new tokens.

    shift: added to products with packed keys, one number per query row.
    mask, mask_batch, mask_head, mask_query: the mask and its strides.
    start: the first token of the sample that is not padding; None without padding.
    """

    n: tl.tensor
    queries: tl.tensor
    new: tl.tensor
    scale: tl.tensor
    shift: tl.tensor | None
    mask: tl.tensor | None
    mask_batch: tl.tensor
    mask_head: tl.tensor
    mask_query: tl.tensor
    start: tl.tensor | None = None


class Rope(NamedTuple):
    """Rotation of keys before they are scored: a mean is added, then rotary tables are applied.

    sample, row: offset of the sample's tables, and stride between tokens. head: offset of the mean of the head.
    """

    cos: tl.tensor | None
    sin: tl.tensor | None
    sample: tl.tensor
    row: tl.tensor
    center: tl.tensor | None
    head: tl.tensor


class Window(NamedTuple):
    """The exact tokens of a KV head of a request in a server's blocks.

    sinks, tokens: pointers to the sinks, and to the head in block 0. table: the table of ``tokens``.
    """

    sinks: tl.tensor | None
    tokens: tl.tensor
    table: Table


@triton.jit
def _channel_run(FIRST: tl.constexpr, COUNT: tl.constexpr, STEP: tl.constexpr):
    """Channels of a part, and which of them exist. Products need at least 16."""
    index = tl.arange(0, max(16, triton.next_power_of_2(COUNT)))
    return FIRST + index * STEP, index < COUNT


@triton.jit
def parts_of(L: tl.constexpr):
    """The channel of each column of each part, and whether it exists."""
    if not L.pairs:
        parts = (channels(L, 1),)
    elif L.interleaved:
        parts = (_channel_run(0, L.pairs, 2), _channel_run(1, L.pairs, 2))
    else:
        parts = (_channel_run(0, L.pairs, 1), _channel_run(L.pairs, L.pairs, 1))
    if L.pairs and 2 * L.pairs < L.dim:
        parts = parts + (_channel_run(2 * L.pairs, L.dim - 2 * L.pairs, 1),)  # noqa: RUF005  (Triton has no unpacking)
    return parts


@triton.jit
def query_rows(first, group, call, Q: tl.constexpr):
    """Query rows ``[first, first + tile)`` of a KV head: their indices among all rows, whether they exist, and their
    query tokens."""
    heads: tl.constexpr = Q.heads // Q.groups
    row = first + tl.arange(0, Q.tile)
    return group * heads * call.queries + row, row < heads * call.queries, row % call.queries


@triton.jit
def shifts_of(row, row_mask, call):
    """The numbers to add to the products of query rows with packed keys."""
    return tl.load(call.shift + row, mask=row_mask, other=0)


@triton.jit
def mask_lines(row, row_mask, query, group, call, Q: tl.constexpr):
    """Pointers to the line of the mask of each query row."""
    head = row // call.queries % Q.heads
    line = tl.where(row_mask, head * call.mask_head + query.to(tl.int64) * call.mask_query, 0)
    return call.mask + group // Q.groups * call.mask_batch + line


@triton.jit
def query_tiles(q, row, row_mask, parts, DIM: tl.constexpr, Q: tl.constexpr):
    """The parts of query rows."""
    tiles = ()
    for i in tl.static_range(len(parts)):
        channel, col_mask = parts[i]
        at, in_bounds = row[:, None] * DIM + channel[None, :], row_mask[:, None] & col_mask[None, :]
        tiles = tiles + (tl.load(q + at, mask=in_bounds, other=0).to(Q.operand),)  # noqa: RUF005
    return tiles


@triton.jit
def _rotated(k, rope, tokens, token_mask, parts, L: tl.constexpr):
    """`kvpass.codec.rope.rotate` of the parts of keys."""
    channel, col_mask = parts[0]
    pair = channel // 2 if L.interleaved else channel
    at, in_bounds = tokens[:, None] * rope.row + pair[None, :], token_mask[:, None] & col_mask[None, :]
    cos = tl.load(rope.cos + rope.sample + at, mask=in_bounds, other=0).to(tl.float32)
    sin = tl.load(rope.sin + rope.sample + at, mask=in_bounds, other=0).to(tl.float32)
    return (k[0] * cos - k[1] * sin, k[1] * cos + k[0] * sin) + k[2:]  # noqa: RUF005


@triton.jit
def page_words(pool, first, stop, parts, ROWS: tl.constexpr, L: tl.constexpr, F: tl.constexpr = None):
    """`load_words` of each part; `load_paired_words` if there is a format."""
    if F is not None:
        read = load_paired_words(pool, first, stop, ROWS, L, F)
    else:
        parts = parts if L.pairs else (channels(L, L.code),)
        read = ()
        for i in tl.static_range(len(parts)):
            column, col_mask = parts[i]
            read = read + (load_words(pool, first, stop, column, col_mask, ROWS, L),)  # noqa: RUF005
    return read


@triton.jit
def page_keys(read, pool, first, stop, tokens, token_mask, plane, rope, parts, L: tl.constexpr, F: tl.constexpr = None):
    """The parts of the keys in a plane of rows that `page_words` has ``read``. tokens: the tokens of the plane."""
    if F is not None:
        k = (paired_values(read, pool, first, stop, plane, L, F),)
    else:
        k = ()
        for i in tl.static_range(len(parts)):
            channel, col_mask = parts[i]
            part = values(read[i], pool, first, stop, channel, col_mask, plane, L, not L.pairs)
            if rope.center is not None:
                part += tl.load(rope.center + rope.head + channel, mask=col_mask, other=0).to(tl.float32)[None, :]
            k = k + (part,)  # noqa: RUF005
    return _rotated(k, rope, tokens, token_mask, parts, L) if L.pairs else k


@triton.jit
def ring_rows(ring, tokens, token_mask, channel, col_mask, L: tl.constexpr):
    """Exact ``tokens`` of the past; zeros where ``token_mask`` is False. ring: a pointer, or a `Window`."""
    if L.places:
        start = ring.tokens + offset_of(ring.table, tokens, token_mask, L.places)
        if ring.sinks is not None:
            start = tl.where(tokens < L.sinks, ring.sinks + tokens * L.dim, start)
        start = start[:, None]
    else:
        slots = tl.where(tokens < L.sinks, tokens, L.sinks + (tokens - L.sinks) % L.window)
        start = ring + slots[:, None] * L.dim
    return tl.load(start + channel[None, :], mask=token_mask[:, None] & col_mask[None, :], other=0)


@triton.jit
def with_present(past, new, tokens, n, stop, channel, col_mask, L: tl.constexpr):
    """Rows of the ``past``; for ``tokens`` from ``n`` on, rows of the call's ``new`` tokens instead. new: None if all
    are stored."""
    if new is not None:
        token_mask = ((tokens >= n) & (tokens < stop))[:, None] & col_mask[None, :]
        rows = tl.load(new + (tokens - n)[:, None] * L.dim + channel[None, :], mask=token_mask, other=0)
        past = tl.where(token_mask, rows, past)
    return past


@triton.jit
def exact_keys(ring, new, tokens, n, stop, rope, parts, L: tl.constexpr):
    """The parts of exact keys. Keys of the call are already rotated."""
    past, k = (), ()
    for i in tl.static_range(len(parts)):
        channel, col_mask = parts[i]
        past = past + (ring_rows(ring, tokens, tokens < n, channel, col_mask, L),)  # noqa: RUF005
    if L.pairs:
        past = _rotated(past, rope, tokens, tokens < n, parts, L)
    for i in tl.static_range(len(parts)):
        channel, col_mask = parts[i]
        k = k + (with_present(past[i], new, tokens, n, stop, channel, col_mask, L),)  # noqa: RUF005
    return k


@triton.jit
def exact_tokens(first, packed, EXACT: tl.constexpr, L: tl.constexpr):
    """Token ids of exact tokens from the ``first`` on. The ``packed`` tokens after the sinks are skipped."""
    tokens = first + tl.arange(0, EXACT)
    return tl.where(tokens < L.sinks, tokens, tokens + packed)


@triton.jit
def seen_by(query, tokens, call, Q: tl.constexpr):
    """Which ``tokens`` each query sees; a single row if it is the same for all."""
    last = call.n + call.new - (call.queries - query[:, None] if Q.causal else 1)
    return from_start(tokens[None, :] <= last, tokens, call.start)


@triton.jit
def from_start(visible, tokens, start):
    """``visible`` without the tokens before ``start``."""
    return visible if start is None else visible & (tokens >= start)[None, :]


@triton.jit
def scores(q, k, shift, scale, mask, tokens, visible, Q: tl.constexpr):
    """Scores ``[M, N]`` in units of log2, so that weights are ``exp2`` of them; -inf if a key is not ``visible`` (which
    broadcasts). mask: one pointer per row."""
    s = tl.dot(q[0], tl.trans(k[0].to(q[0].dtype)), input_precision="ieee")
    for i in tl.static_range(1, len(q)):
        s = tl.dot(q[i], tl.trans(k[i].to(q[i].dtype)), s, input_precision="ieee")
    if shift is not None:
        s += shift[:, None]
    if Q.softcap > 0:
        top: tl.constexpr = Q.softcap * LOG2E
        s = top - 2 * top / (tl.exp2(s * (2 / Q.softcap * LOG2E * scale)) + 1)  # tanh
    else:
        s *= scale * LOG2E
    if mask is not None:
        bias = tl.load(mask[:, None] + tokens[None, :], mask=visible, other=0)
        if Q.bool_mask:
            visible = visible & (bias != 0)
        else:
            bias = bias.to(tl.float32)
            s += tl.where(bias < -2e38, bias, bias * LOG2E)  # keeps the lowest number finite
    return tl.where(visible, s, -float("inf"))

"""Scores of query rows with keys, packed or exact: what attention and the account of it have in common.

A key is a tuple of parts: one, or where keys are rotated as they are read, the first channels of all pairs, the second,
and those left alone. A product is then the sum of those of the parts, and no channel moves between columns.
"""

import math
from typing import NamedTuple

import triton
import triton.language as tl

from .unpacking import channels, paired_values, paired_words, values, words

LOG2E: tl.constexpr = tl.constexpr(math.log2(math.e))  # powers of two cost a third of the instructions of those of e


class Rules(NamedTuple):
    """What is known of a call when a kernel is compiled. tile: query rows of a tile. operand: dtype of products."""

    heads: int
    groups: int
    causal: bool
    softcap: float
    bool_mask: bool
    tile: int
    operand: tl.dtype


class Call(NamedTuple):
    """What is asked: ``queries`` behind ``n`` tokens. shift: added to products with packed keys, one a query row. The
    mask comes with its strides. start: the first token that the sample has, None if it has all."""

    n: tl.tensor
    queries: tl.tensor
    scale: tl.tensor
    shift: tl.tensor | None
    mask: tl.tensor | None
    mask_batch: tl.tensor
    mask_head: tl.tensor
    mask_query: tl.tensor
    start: tl.tensor | None = None


class Rope(NamedTuple):
    """What keys take before they are scored, if they are rotated: a mean is added, and tables of a sample turn them.

    sample, row: where the tables of a sample begin, and from token to token. head: where the mean of a head begins.
    """

    cos: tl.tensor | None
    sin: tl.tensor | None
    sample: tl.tensor
    row: tl.tensor
    center: tl.tensor | None
    head: tl.tensor


@triton.jit
def _run(FIRST: tl.constexpr, COUNT: tl.constexpr, STEP: tl.constexpr):
    """Channels of a part, and which there are; products take 16 at least."""
    index = tl.arange(0, max(16, triton.next_power_of_2(COUNT)))
    return FIRST + index * STEP, index < COUNT


@triton.jit
def parts_of(L: tl.constexpr):
    """The channel of each column of each part, and whether there is one."""
    if not L.pairs:
        parts = (channels(L, 1),)
    elif L.interleaved:
        parts = (_run(0, L.pairs, 2), _run(1, L.pairs, 2))
    else:
        parts = (_run(0, L.pairs, 1), _run(L.pairs, L.pairs, 1))
    if L.pairs and 2 * L.pairs < L.dim:
        parts = parts + (_run(2 * L.pairs, L.dim - 2 * L.pairs, 1),)  # noqa: RUF005  (Triton has no unpacking)
    return parts


@triton.jit
def query_rows(first, group, call, Q: tl.constexpr):
    """Rows ``[first, first + tile)`` of a KV head: each one's number among all, whether there is one, its query."""
    heads: tl.constexpr = Q.heads // Q.groups
    row = first + tl.arange(0, Q.tile)
    return group * heads * call.queries + row, row < heads * call.queries, row % call.queries


@triton.jit
def shifts_of(of_all, asked, call):
    """What is added to the products of query rows with packed keys."""
    return tl.load(call.shift + of_all, mask=asked, other=0)


@triton.jit
def mask_lines(of_all, asked, query, group, call, Q: tl.constexpr):
    """Where the line of the mask begins that each query row has."""
    head = of_all // call.queries % Q.heads
    line = tl.where(asked, head * call.mask_head + query.to(tl.int64) * call.mask_query, 0)
    return call.mask + group // Q.groups * call.mask_batch + line


@triton.jit
def query_tiles(q, of_all, asked, parts, DIM: tl.constexpr, Q: tl.constexpr):
    """The parts of query rows."""
    tiles = ()
    for i in tl.static_range(len(parts)):
        channel, real = parts[i]
        at, known = of_all[:, None] * DIM + channel[None, :], asked[:, None] & real[None, :]
        tiles = tiles + (tl.load(q + at, mask=known, other=0).to(Q.operand),)  # noqa: RUF005
    return tiles


@triton.jit
def _rotated(k, rope, tokens, there, parts, L: tl.constexpr):
    """`kvpass.codec.rope.rotate` of the parts of keys."""
    channel, real = parts[0]
    pair = channel // 2 if L.interleaved else channel
    at, known = tokens[:, None] * rope.row + pair[None, :], there[:, None] & real[None, :]
    cos = tl.load(rope.cos + rope.sample + at, mask=known, other=0).to(tl.float32)
    sin = tl.load(rope.sin + rope.sample + at, mask=known, other=0).to(tl.float32)
    return (k[0] * cos - k[1] * sin, k[1] * cos + k[0] * sin) + k[2:]  # noqa: RUF005


@triton.jit
def page_words(pool, first, stop, parts, ROWS: tl.constexpr, L: tl.constexpr, F: tl.constexpr = None):
    """`words` of each part; with a form `paired_words`."""
    if F is not None:
        read = paired_words(pool, first, stop, ROWS, L, F)
    else:
        parts = parts if L.pairs else (channels(L, L.code),)
        read = ()
        for i in tl.static_range(len(parts)):
            column, real = parts[i]
            read = read + (words(pool.codes, first, stop, column, real, ROWS, L),)  # noqa: RUF005
    return read


@triton.jit
def page_keys(read, pool, first, stop, tokens, there, plane, rope, parts, L: tl.constexpr, F: tl.constexpr = None):
    """The parts of the keys in a plane of rows, ``read`` by `page_words`; ``tokens`` are those of the plane."""
    if F is not None:
        k = (paired_values(read, pool, first, stop, plane, L, F),)
    else:
        k = ()
        for i in tl.static_range(len(parts)):
            channel, real = parts[i]
            part = values(read[i], pool, first, stop, channel, real, plane, L, not L.pairs)
            if rope.center is not None:
                part += tl.load(rope.center + rope.head + channel, mask=real, other=0).to(tl.float32)[None, :]
            k = k + (part,)  # noqa: RUF005
    return _rotated(k, rope, tokens, there, parts, L) if L.pairs else k


@triton.jit
def ring_rows(ring, tokens, there, channel, real, L: tl.constexpr):
    """Exact ``tokens`` of the past, zeros where they are not ``there``."""
    slots = tl.where(tokens < L.sinks, tokens, L.sinks + (tokens - L.sinks) % L.window)
    return tl.load(ring + slots[:, None] * L.dim + channel[None, :], mask=there[:, None] & real[None, :], other=0)


@triton.jit
def with_present(past, new, tokens, n, stop, channel, real, L: tl.constexpr):
    """Rows of the ``past``, and where ``tokens`` are ``n`` or later those of the call."""
    there = ((tokens >= n) & (tokens < stop))[:, None] & real[None, :]
    return tl.where(there, tl.load(new + (tokens - n)[:, None] * L.dim + channel[None, :], mask=there, other=0), past)


@triton.jit
def exact_keys(ring, new, tokens, n, stop, rope, parts, L: tl.constexpr):
    """The parts of exact keys; those of the call are rotated already."""
    past, k = (), ()
    for i in tl.static_range(len(parts)):
        channel, real = parts[i]
        past = past + (ring_rows(ring, tokens, tokens < n, channel, real, L),)  # noqa: RUF005
    if L.pairs:
        past = _rotated(past, rope, tokens, tokens < n, parts, L)
    for i in tl.static_range(len(parts)):
        channel, real = parts[i]
        k = k + (with_present(past[i], new, tokens, n, stop, channel, real, L),)  # noqa: RUF005
    return k


@triton.jit
def exact_tokens(first, packed, EXACT: tl.constexpr, L: tl.constexpr):
    """Exact tokens from the ``first`` on; ``packed`` ones lie behind the sinks."""
    tokens = first + tl.arange(0, EXACT)
    return tl.where(tokens < L.sinks, tokens, tokens + packed)


@triton.jit
def seen_by(query, tokens, call, Q: tl.constexpr):
    """Which of ``tokens`` there are for each of the queries; one row for all if they are the same."""
    last = call.n + (query[:, None] if Q.causal else call.queries - 1)
    return from_start(tokens[None, :] <= last, tokens, call.start)


@triton.jit
def from_start(seen, tokens, start):
    """Which of the ``tokens`` that are ``seen`` are not before ``start``."""
    return seen if start is None else seen & (tokens >= start)[None, :]


@triton.jit
def scores(q, k, shift, scale, mask, tokens, seen, Q: tl.constexpr):
    """Scores ``[M, N]`` as powers of two, -inf where a key is not ``seen`` (which broadcasts). ``mask`` is a pointer
    for each row."""
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
        bias = tl.load(mask[:, None] + tokens[None, :], mask=seen, other=0)
        if Q.bool_mask:
            seen = seen & (bias != 0)
        else:
            bias = bias.to(tl.float32)
            s += tl.where(bias < -2e38, bias, bias * LOG2E)  # the lowest number stays finite, and -inf as it is
    return tl.where(seen, s, -float("inf"))

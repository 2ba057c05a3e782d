"""Transforms queries for pages with per-channel bit widths: to the fields of each page, and to the mean of its keys.

The weights of fields are multiplied into queries once per page, so that fields can be multiplied as they are stored
(`read_fields`).
"""

import triton
import triton.language as tl

from .read_fields import page_places, pages_of, pages_of_head, power_of
from .scores import LOG2E, Rope, parts_of


@triton.jit
def field_rows(
    basis, places, columns, weights, out, DIM: tl.constexpr, SIZE: tl.constexpr, FIELDS: tl.constexpr,
    WIDTH: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Write the contribution of each padded field to the channels of a token, per unit of field and gain:
    ``[BH, WIDTH, D]``.

    Grid: heads; runs of ``COUNT`` fields. ``columns`` is the field of each column, -1 for padding.
    """
    group, field = tl.program_id(0).to(tl.int64), tl.program_id(1) * COUNT + tl.arange(0, COUNT)
    column = tl.load(columns + field)
    place = tl.load(places + group * FIELDS + column, mask=column >= 0, other=0)
    coordinate, weight = place % DIM, tl.load(weights + place // DIM)
    channel = tl.arange(0, triton.next_power_of_2(DIM))
    mine = (channel[None, :] // SIZE == coordinate[:, None] // SIZE) & (channel < DIM)[None, :] & (column >= 0)[:, None]
    at = basis + group * DIM * SIZE + coordinate[:, None] * SIZE + channel[None, :] % SIZE
    rows = tl.load(at, mask=mine, other=0).to(tl.float32) * weight[:, None]
    at = out + (group * WIDTH + field[:, None]) * DIM + channel[None, :]
    tl.store(at, rows.to(out.dtype.element_ty), mask=(channel < DIM)[None, :])


@triton.jit
def _tables(rope, row, there, parts, R: tl.constexpr):
    """Rows of the rotary tables."""
    channel, real = parts[0]
    pair = channel // 2 if R.interleaved else channel
    at, known = rope.sample + row[:, None] * rope.row + pair[None, :], there[:, None] & real[None, :]
    cos, sin = tl.load(rope.cos + at, mask=known, other=0), tl.load(rope.sin + at, mask=known, other=0)
    return cos.to(tl.float32), sin.to(tl.float32)


@triton.jit
def _parts_of_mean(center, parts):
    """The parts of the mean of the keys of a head."""
    means = ()
    for i in tl.static_range(len(parts)):
        channel, real = parts[i]
        means = means + (tl.load(center + channel, mask=real, other=0).to(tl.float32)[None, :],)  # noqa: RUF005  (Triton has no unpacking)
    return means


@triton.jit
def mean_rows(
    center, cos, sin, out, table_batch, table_row, GROUPS: tl.constexpr, R: tl.constexpr, L: tl.constexpr
):  # fmt: skip
    """Write the mean of the keys, rotated from the middle of a page to each of its tokens (`kvpass.codec.page_rope`):
    ``[BH, P, D]``. Grid: KV heads of all samples."""
    group, parts, token = tl.program_id(0).to(tl.int64), parts_of(R), tl.arange(0, L.page)
    rope, there = Rope(cos, sin, group // GROUPS * table_batch, table_row, None, 0), token >= 0
    behind = token > L.page // 2
    c, s = _tables(rope, tl.where(behind, L.page - token, token), there, parts, R)
    c0, s0 = _tables(rope, token * 0 + L.page // 2, there, parts, R)
    norm = tl.maximum(c0 * c0 + s0 * s0, 1e-30)
    along, across = (c * c0 + s * s0) / norm, (s * c0 - c * s0) / norm
    across = tl.where(behind[:, None], -across, across)
    mean = _parts_of_mean(center + group * R.dim, parts)
    turned = (mean[0] * along - mean[1] * across, mean[1] * along + mean[0] * across) + mean[2:]  # noqa: RUF005
    for i in tl.static_range(len(parts)):
        channel, real = parts[i]
        at = out + (group * L.page + token[:, None]) * R.dim + channel[None, :]
        tl.store(
            at,
            tl.broadcast_to(turned[i], at.shape).to(out.dtype.element_ty),
            mask=tl.broadcast_to(real[None, :], at.shape),
        )


@triton.jit
def _scaled_parts(q, asked, scale, parts):
    """The parts of query rows, scaled so that products are scores in units of log2. q: one pointer per row."""
    queries = ()
    for i in tl.static_range(len(parts)):
        channel, real = parts[i]
        part = tl.load(q[:, None] + channel[None, :], mask=asked[:, None] & real[None, :], other=0).to(tl.float32)
        queries = queries + (part * (scale * LOG2E),)  # noqa: RUF005  (Triton has no unpacking)
    return queries


@triton.jit
def _turned_back(q, rope, page, asked, parts, R: tl.constexpr, L: tl.constexpr):
    """Rotate the parts of queries back by the middle token of their page."""
    cos, sin = _tables(rope, L.page + page, asked, parts, R)
    return (q[0] * cos + q[1] * sin, q[1] * cos - q[0] * sin) + q[2:]  # noqa: RUF005


@triton.jit
def _transposed(rows, line, parts, DIM: tl.constexpr):
    """The parts of lines of a matrix ``[., DIM]``, transposed."""
    found = ()
    for i in tl.static_range(len(parts)):
        channel, real = parts[i]
        found = found + (tl.load(rows + line[None, :] * DIM + channel[:, None], mask=real[:, None], other=0),)  # noqa: RUF005
    return found


@triton.jit(do_not_specialize=["rows", "capacity", "size"])
def page_queries(
    q, rows_of_fields, middles, rows_of_mean, k_pages, k_places, size, cos, sin, out, sums, mean, length, scale, rows,
    capacity, table_batch, table_row, GROUPS: tl.constexpr, R: tl.constexpr, L: tl.constexpr, N: tl.constexpr,
    TILE: tl.constexpr, COUNT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the contribution of each field of a page to the scores of each query row, per unit of field and in units of
    log2: ``[BH, pages, rows, WIDTH]``. Also write the sum of every ``COUNT`` of them: ``[BH, pages, rows, WIDTH /
    COUNT]``. With ``middles`` ``[BH, WIDTH]``, it is their sum times the number that stands for 0: the midpoint of a
    field plus the offset of `Number`.

    With ``rows_of_mean``, also write the products of the mean of the keys with each query row, by token of the page in
    the order of tiles: ``[BH, pages, rows, P]``.

    Grid: KV heads of all samples; tiles of pages times rows. Without rotary tables, all pages share one result.
    """
    pages = pages_of(tl.load(length).to(tl.int32), L) if cos is not None else 1
    first = tl.program_id(1) * TILE
    if first >= pages * rows:
        return
    group, index = tl.program_id(0).to(tl.int64), first + tl.arange(0, TILE)
    page, row, valid = index // rows, index % rows, index < pages * rows
    rope, parts = Rope(cos, sin, group // GROUPS * table_batch, table_row, None, 0), parts_of(R)
    line = group * capacity * rows + index
    tokens: tl.constexpr = L.page
    runs: tl.constexpr = L.width // COUNT
    split = _scaled_parts(q + (group * rows + row) * R.dim, valid, scale, parts)
    if R.pairs:
        split = _turned_back(split, rope, page, valid, parts, R, L)
    for j in tl.static_range(len(parts)):
        split = split[:j] + (split[j].to(N.dtype),) + split[j + 1 :]  # noqa: RUF005  (Triton has no unpacking)
    if rows_of_mean is not None:
        of_mean = _transposed(rows_of_mean, group * tokens + tl.arange(0, tokens), parts, R.dim)
        mean_scores = tl.zeros((TILE, tokens), tl.float32)
        for j in tl.static_range(len(parts)):
            mean_scores = tl.dot(split[j], of_mean[j].to(N.dtype), mean_scores, input_precision="tf32x3")
        pages_here = pages_of_head(k_pages, k_places, size, group, capacity, GROUPS, L)
        at = mean + line[:, None] * tokens + page_places(pages_here, page, valid, L)
        tl.store(tl.trans(at), tl.trans(mean_scores), mask=valid[None, :])  # transposed: adjacent threads, one line
    for run in tl.range(0, runs, num_stages=STAGES):
        field = run * COUNT + tl.arange(0, COUNT)
        columns = _transposed(rows_of_fields, group * L.width + field, parts, R.dim)
        found = tl.zeros((TILE, COUNT), tl.float32)
        for j in tl.static_range(len(parts)):
            found = tl.dot(split[j], columns[j].to(N.dtype), found, input_precision="tf32x3")
        kept = found.to(out.dtype.element_ty)
        tl.store(out + line[:, None] * L.width + field[None, :], kept, mask=valid[:, None])
        of_zero = kept.to(tl.float32)
        if middles is not None:
            of_zero *= (tl.load(middles + group * L.width + field) + power_of(N))[None, :]
        tl.store(sums + line * runs + run, tl.sum(of_zero, 1), mask=valid)

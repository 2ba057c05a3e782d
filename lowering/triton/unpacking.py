"""Reads packed pages in kernels: unpacks and dequantizes bytes in registers.

Kernels iterate over *rows*: row f of a pool is row ``f % T`` of page ``f // T``, and has one token of each of the
page's planes, T tokens apart. Its bytes are loaded once, as one word. A shift and a mask then extract a plane, at any
bit width, and the codes become the mantissa of a float, which avoids integer conversions. If products have 16 bits and
all planes are read together, two channels share each instruction instead (`paired_unpacking`).
"""

from typing import NamedTuple

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


class Layout(NamedTuple):
    """Compile-time layout of a packed tensor.

    code: number of values per code.
    channelwise, group: whether scales are per channel, and the group size.
    planes: tokens per row; the same for keys and values.
    residual, window: minimum number of tokens after the pages, and the number of slots for them.
    pairs, interleaved: rotation of tokens when they are read (`kvpass.codec.rope`); 0 pairs means none.
    two_level: scales are 8-bit codes (`kvpass.codec.second_level`).
    boosted: number of boosted channels per page (`kvpass.codec.boost`).
    slots, places: pages, and exact tokens, per block of a server; 0 if they lie one after the other.
    """

    bits: int
    code: int
    channelwise: bool
    group: int
    page: int
    planes: int
    sinks: int
    residual: int
    window: int
    dim: int
    pairs: int = 0
    interleaved: bool = False
    two_level: bool = False
    boosted: int = 0
    slots: int = 0
    places: int = 0


class Table(NamedTuple):
    """Where a request's pages, or exact tokens, are in a server's blocks.

    blocks: pointer to the numbers of the request's blocks. lead: places of its first block that are skipped.
    block, place: strides between blocks, and between places of a block.
    """

    blocks: tl.tensor
    lead: tl.tensor
    block: tl.tensor
    place: tl.tensor


class Pool(NamedTuple):
    """Pointers to the data of a KV head of a packed tensor; None for tensors that it does not have.

    scale, zero_point: scales and zero points. With two-level scales: the 8-bit codes of both, and the second-level
        scales and zero points.
    points: the points of the grid.
    lower, boosted: lower codes and indices of boosted channels.
    table: the table of pages, with strides in bytes.
    """

    codes: tl.tensor
    scale: tl.tensor
    zero_point: tl.tensor
    points: tl.tensor | None
    lower: tl.tensor | None
    boosted: tl.tensor | None
    table: Table | None = None


@triton.constexpr_function
def params_per_page(layout):
    """Number of scales per page."""
    if layout.channelwise:
        return layout.page // layout.group * layout.dim
    return layout.page * (layout.dim // layout.group)


@triton.jit
def zero_points_of(zero_point, head, params, L: tl.constexpr):
    """Pointer to the zero points of a head. params: stride between heads in scales."""
    SIZE: tl.constexpr = params_per_page(L)
    return zero_point + head * (params // (2 * SIZE) * 4 if L.two_level else params)


@triton.jit
def boosted_of(lower, boosted, head, stride, L: tl.constexpr):
    """Pointers to the lower codes and indices of the boosted channels of a head. stride: stride between heads in
    bytes of codes."""
    pages = stride // (L.page * L.bits // 8 * L.dim)
    return lower + head * pages * (L.page * L.bits // 8 * L.boosted), boosted + head * pages * L.boosted


@triton.jit
def columns(GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """The channel of each column of a tile, and whether it exists: groups are padded to powers of two."""
    size: tl.constexpr = triton.next_power_of_2(GROUP)
    column = tl.arange(0, size * triton.next_power_of_2(GROUPS))
    if size == GROUP:
        return column, column < GROUP * GROUPS
    return column // size * GROUP + column % size, (column % size < GROUP) & (column // size < GROUPS)


@triton.jit
def channels(L: tl.constexpr, CODE: tl.constexpr):
    """`columns` for whole tokens, with ``CODE`` channels per code."""
    return columns(L.dim // CODE if L.channelwise else L.group // CODE, 1 if L.channelwise else L.dim // L.group)


@triton.constexpr_function
def rows_per_page_log2(layout):
    """log2 of the number of rows per page, for shifts instead of signed divisions."""
    return (layout.page // layout.planes).bit_length() - 1


@triton.jit
def packed_rows(n, L: tl.constexpr):
    """Number of rows of pages if ``n`` tokens are stored (`Retention.packed`)."""
    pages = tl.maximum(n - L.sinks - L.residual, 0) >> (L.page.bit_length() - 1)
    return pages * (L.page // L.planes)


@triton.jit
def row_tokens(first, stop, ROWS: tl.constexpr, L: tl.constexpr):
    """The tokens of rows ``[first, first + ROWS)`` in plane 0, and whether they are before row ``stop``."""
    own = tl.arange(0, ROWS)
    rows = first + own
    return L.sinks + (rows >> rows_per_page_log2(L)) * L.page + (rows & (L.page // L.planes - 1)), own < stop - first


@triton.jit
def offset_of(table, index, in_bounds, SIZE: tl.constexpr):
    """Offset of the page or token ``index`` of a request, whose blocks have ``SIZE`` of them."""
    at = index + table.lead
    block = tl.load(table.blocks + at // SIZE, mask=in_bounds, other=0)
    return block * table.block + at % SIZE * table.place


@triton.jit
def moved(data, offset):
    """``data`` moved by ``offset`` bytes."""
    return data + offset // (data.dtype.element_ty.primitive_bitwidth // 8)


@triton.jit
def lines_of(data, pool, row, line, in_bounds, LINES: tl.constexpr, L: tl.constexpr):
    """Find ``line`` of the page of each row in a tensor of pages with ``LINES`` lines. Returns the pointers that lines
    are counted from, and the numbers of the lines."""
    page = row >> rows_per_page_log2(L)
    if L.slots:
        data = moved(data, offset_of(pool.table, page, in_bounds, L.slots)[:, None])
    else:
        line += page * LINES
    return data, line


@triton.jit
def load_words(pool, first, stop, column, col_mask, ROWS: tl.constexpr, L: tl.constexpr, LOWER: tl.constexpr = False):
    """The packed codes of rows ``[first, first + ROWS)``, one word each: ``[ROWS, columns]``; 0 from row ``stop`` on.
    ``LOWER`` reads the lower codes of boosted channels."""
    tokens: tl.constexpr = L.page // L.planes
    across: tl.constexpr = L.boosted if LOWER else L.dim // L.code
    wide: tl.constexpr = L.planes * L.bits > 32
    rows, in_bounds = first + tl.arange(0, ROWS), tl.arange(0, ROWS) < stop - first
    codes = pool.lower if LOWER else pool.codes
    codes, line = lines_of(codes, pool, rows, rows & (tokens - 1), in_bounds, L.page * L.bits // 8, L)
    byte = codes + line[:, None] * across + column[None, :]
    row_mask = in_bounds[:, None] & col_mask[None, :]
    word = tl.zeros(byte.shape, tl.int64 if wide else tl.int32)
    for i in tl.static_range(L.planes * L.bits // 8):
        word |= tl.load(byte + i * tokens * across, mask=row_mask, other=0).to(word.dtype) << 8 * i
    return word


@triton.jit
def param_rows(first, stop, plane, ROWS: tl.constexpr, L: tl.constexpr):
    """The scales of rows ``[first, first + ROWS)`` of a plane: for each run of rows that share them, its first row, the
    line of its scales in their page (groups along tokens, or tokens), and whether it is before row ``stop``."""
    tokens: tl.constexpr = L.page // L.planes
    if L.channelwise:
        run: tl.constexpr = min(L.group, tokens, ROWS)
        own = tl.arange(0, ROWS // run) * run
        row = first + own
        line = plane * tokens // L.group + (row & (tokens - 1)) // L.group
    else:
        own = tl.arange(0, ROWS)
        row = first + own
        line = plane * tokens + (row & (tokens - 1))
    return row, line, own < stop - first


@triton.constexpr_function
def lines_of_params(layout):
    """Lines of scales per page."""
    return layout.page // layout.group if layout.channelwise else layout.page


@triton.jit
def _bit_field(word, plane, FIRST: tl.constexpr, WIDTH: tl.constexpr, PLANES: tl.constexpr):
    """The bits of a plane in the bit field that starts at byte ``FIRST`` of the word."""
    count: tl.constexpr = PLANES * WIDTH // 8
    return (word >> ((FIRST + plane % count) * 8 + plane // count * WIDTH)).to(tl.int32) & ((1 << WIDTH) - 1)


@triton.jit
def _codes(word, plane, BITS: tl.constexpr, PLANES: tl.constexpr):
    """The codes of a plane. 3 bits are a 2-bit and a 1-bit field, 6 bits a 4-bit and a 2-bit field."""
    if BITS % 3:
        return _bit_field(word, plane, 0, BITS, PLANES)
    high: tl.constexpr = BITS // 3
    low = _bit_field(word, plane, 0, 2 * high, PLANES)
    return low | _bit_field(word, plane, PLANES * high // 4, high, PLANES) << 2 * high


@triton.jit
def _unscaled(code, points, CODE: tl.constexpr):
    """The unscaled values of codes: the codes themselves, or the ``CODE`` adjacent coordinates of grid points.

    Assembly loads the points, because the compiler would prefetch them into shared memory one by one, which took eight
    times as long as attention over floats on an H100.
    """
    if points is None:
        return (code | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    elif CODE == 1:
        if INTERPRETED:
            return tl.load(points + code)
        else:
            return tl.inline_asm_elementwise(
                "ld.global.nc.b32 $0, [$1];", "=f,l", [points + code], dtype=tl.float32, is_pure=True, pack=1
            )
    else:
        at = points.to(tl.pointer_type(tl.int64), bitcast=True) + code
        if INTERPRETED:
            both = tl.load(at)
            first, second = both.to(tl.int32), (both >> 32).to(tl.int32)
        else:
            first, second = tl.inline_asm_elementwise(
                "ld.global.nc.v2.b32 {$0, $1}, [$2];", "=r,=r,l", [at], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
            )
        return tl.reshape(tl.join(first, second).to(tl.float32, bitcast=True), (code.shape[0], 2 * code.shape[1]))


@triton.jit
def _boosted_values(pool, first, stop, channel, plane, ROWS: tl.constexpr, L: tl.constexpr):
    """The contribution of lower codes to a plane of rows of one page, at channels ``channel``. A product with a 0-1
    matrix moves the codes to their columns."""
    column = tl.arange(0, max(16, triton.next_power_of_2(L.boosted)))
    col_mask = column < L.boosted
    code = _codes(load_words(pool, first, stop, column, col_mask, ROWS, L, True), plane, L.bits, L.planes)
    boosted_channel = tl.load(
        pool.boosted + (first >> rows_per_page_log2(L)) * L.boosted + column, mask=col_mask, other=-1
    )
    ones = (boosted_channel[:, None] == channel[None, :]).to(tl.float16)
    return tl.dot(code.to(tl.float16), ones, input_precision="ieee") * 0.5**L.bits


@triton.jit
def _second_level(levels, params, line, where, in_bounds, WHICH: tl.constexpr, L: tl.constexpr):
    """Two-level scales (``WHICH`` 0) or zero points (1) of ``line``, dequantized; ``where`` is the index of their
    codes among ``levels``."""
    SIZE: tl.constexpr = params_per_page(L)
    lines: tl.constexpr = lines_of_params(L)
    page = line[:, None] >> (lines.bit_length() - 1)
    code = tl.load(levels + where + (page + WHICH) * SIZE, mask=in_bounds, other=0).to(tl.float32)
    step = tl.load(params + page * 4 + WHICH * 2, mask=in_bounds, other=0).to(tl.float32)
    return code * step + tl.load(params + page * 4 + WHICH * 2 + 1, mask=in_bounds, other=0).to(tl.float32)


@triton.jit
def _params_at(start, where, in_bounds, L: tl.constexpr):
    """Scales or zero points at ``where``, float32. Per-token ones of 16 bits are loaded as words, because words are
    prefetched and smaller types are not."""
    dtype: tl.constexpr = start.dtype.element_ty
    if L.channelwise or dtype.primitive_bitwidth != 16:
        found = tl.load(start + where, mask=in_bounds, other=0)
    else:
        word = tl.load(start.to(tl.pointer_type(tl.int32), bitcast=True) + (where >> 1), mask=in_bounds, other=0)
        found = (word >> (where & 1) * 16).to(tl.int16).to(dtype, bitcast=True)
    return found.to(tl.float32)


@triton.jit
def values(word, pool, first, stop, channel, col_mask, plane, L: tl.constexpr, WHOLE: tl.constexpr):
    """Dequantize a plane of the rows of ``word``: ``[rows, columns]`` float32.

    channel, col_mask: the results of `channels` if ``WHOLE``; otherwise any channels, which may be parts of groups.

    Tokens that share scales do so along whole runs of rows. Groups on grids have no zero point.
    """
    x = _unscaled(_codes(word, plane, L.bits, L.planes), pool.points, L.code)
    if L.boosted:
        x += _boosted_values(pool, first, stop, channel, plane, word.shape[0], L)
    row, within, row_mask = param_rows(first, stop, plane, word.shape[0], L)
    scale, line = lines_of(pool.scale, pool, row, within, row_mask, lines_of_params(L), L)
    if L.channelwise:
        where, in_bounds = line[:, None] * L.dim + channel[None, :], row_mask[:, None] & col_mask[None, :]
        shape: tl.constexpr = (line.shape[0], x.shape[0] // line.shape[0], x.shape[1])
        dim: tl.constexpr = 1
    else:
        groups: tl.constexpr = L.dim // L.group
        padded: tl.constexpr = triton.next_power_of_2(groups) if WHOLE else x.shape[1]
        group = tl.arange(0, padded) if WHOLE else channel // L.group
        counts = group < groups if WHOLE else col_mask
        where, in_bounds = line[:, None] * groups + group[None, :], row_mask[:, None] & counts[None, :]
        shape: tl.constexpr = (x.shape[0], padded, x.shape[1] // padded)
        dim: tl.constexpr = 2
    if pool.points is None:
        zero_point, _ = lines_of(pool.zero_point, pool, row, within, row_mask, lines_of_params(L), L)
    if L.two_level:
        factor = _second_level(scale, zero_point, line, where, in_bounds, 0, L)
        added = _second_level(scale, zero_point, line, where, in_bounds, 1, L)
        return tl.reshape(tl.reshape(x, shape) * tl.expand_dims(factor, dim) + tl.expand_dims(added, dim), x.shape)
    by_group = tl.reshape(x, shape) * tl.expand_dims(_params_at(scale, where, in_bounds, L), dim)
    if pool.points is None:
        by_group += tl.expand_dims(_params_at(zero_point, where, in_bounds, L), dim)
    return tl.reshape(by_group, x.shape)

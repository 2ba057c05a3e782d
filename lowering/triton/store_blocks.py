"""Stores the new tokens of requests in a server's blocks, and quantizes the pages that leave the window.

What depends on a length is read from memory on the device. A grid has room for the most tokens that a request may
bring, and programs without work end at once.
"""

import triton
import triton.language as tl

from .packing import pack_fields, store_along_channels, store_along_tokens, tile_of
from .quantize import quantize_tile
from .unpacking import Table, moved, offset_of


@triton.jit(do_not_specialize=["blocks_row", "window_row"])
def write_exact(
    k, v, window, k_sinks, v_sinks, start, past, total, blocks, window_blocks, blocks_row, window_row, k_token, k_head,
    v_token, v_head, block_bytes, head_bytes, window_block, window_head, window_place, DIM: tl.constexpr,
    SINKS: tl.constexpr, PLACES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Write the new tokens ``k`` and ``v`` to blocks of the window and, if they are sinks, to the first block.

    Grid: requests; KV heads; runs of ``TOKENS`` new tokens of a request. Arguments as in `attend_blocks.attend_blocks`;
    ``start`` is where the new tokens of each request begin among all new ones.
    """
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    new = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    stored = tl.load(past + request)
    there = new < tl.load(total + request) - stored
    token, row = stored + new, tl.load(start + request) + new
    channel = tl.arange(0, triton.next_power_of_2(DIM))
    in_bounds = there[:, None] & (channel < DIM)[None, :]
    key = tl.load(k + head * k_head + row[:, None] * k_token + channel[None, :], mask=in_bounds)
    value = tl.load(v + head * v_head + row[:, None] * v_token + channel[None, :], mask=in_bounds)
    table = Table(window_blocks + request * window_row, 0, window_block, window_place)
    at = window + head * window_head + offset_of(table, token, there, PLACES)[:, None] + channel[None, :]
    tl.store(at, key, mask=in_bounds)
    tl.store(at + DIM, value, mask=in_bounds)
    if SINKS:
        offset = tl.load(blocks + request * blocks_row) * block_bytes + head * head_bytes
        at, is_sink = token[:, None] * DIM + channel[None, :], in_bounds & (token < SINKS)[:, None]
        tl.store(moved(k_sinks, offset) + at, key, mask=is_sink)
        tl.store(moved(v_sinks, offset) + at, value, mask=is_sink)


@triton.jit
def _pages_of(n, SINKS: tl.constexpr, RESIDUAL: tl.constexpr, PAGE: tl.constexpr):
    """`Retention.pages`."""
    return tl.maximum(n - SINKS - RESIDUAL, 0) // PAGE


@triton.jit(do_not_specialize=["pages", "blocks_row", "window_row"])
def quantize_due(
    window, codes, scale, zero_point, past, total, pages, blocks, window_blocks, blocks_row, window_row, lead,
    block_bytes, head_bytes, slot_bytes, window_block, window_head, window_place, HEADS: tl.constexpr,
    SINKS: tl.constexpr, RESIDUAL: tl.constexpr, SLOTS: tl.constexpr, PLACES: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Quantize and pack the pages that leave the window in this step: keys, or values if ``window`` begins at them.

    Grid: KV heads of each of ``pages`` pages of each request; then as `quantize.quantize_pages`.
    """
    which = tl.program_id(0).to(tl.int64)
    head, request = which % HEADS, which // HEADS // pages
    page = _pages_of(tl.load(past + request), SINKS, RESIDUAL, C.page) + which // HEADS % pages
    if page < _pages_of(tl.load(total + request), SINKS, RESIDUAL, C.page):
        first = tl.program_id(1) * C.rows
        token, channel, col_mask = tile_of(first, C)
        tokens = Table(window_blocks + request * window_row, 0, window_block, window_place)
        x = window + head * window_head + offset_of(tokens, SINKS + page * C.page + token, token >= 0, PLACES)[:, None]
        x = tl.load(x + channel[None, :], mask=col_mask[None, :], other=0).to(tl.float32)
        code, step, zero = quantize_tile(x, col_mask, C)
        table = Table(blocks + request * blocks_row, lead, block_bytes, slot_bytes)
        offset = head * head_bytes + offset_of(table, page, page >= 0, SLOTS)
        pack_fields(moved(codes, offset), code, channel, col_mask, first, C)
        if C.channelwise:
            store_along_tokens(moved(scale, offset), step, 0, channel, col_mask, C)
            store_along_tokens(moved(zero_point, offset), zero, 0, channel, col_mask, C)
        else:
            store_along_channels(moved(scale, offset), step, 0, token, C)
            store_along_channels(moved(zero_point, offset), zero, 0, token, C)

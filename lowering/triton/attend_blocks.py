"""Attention of tiles of a request's new tokens over a server's blocks: `attend` with block tables.

What depends on a length is read from memory on the device, so a grid is valid for any lengths that its block table
holds.
"""

import triton
import triton.language as tl

from .attend import attend_tile
from .scores import Call, Rope, Window
from .unpacking import Pool, Table, moved, packed_rows


@triton.jit(do_not_specialize=["queries", "blocks_row", "window_row"])
def attend_blocks(
    q, k_codes, k_scale, k_zero, k_sinks, v_codes, v_scale, v_zero, v_sinks, window, q_packed, shift, k_points,
    v_points, partial, partial_lse, past, first, total, queries, blocks, window_blocks, blocks_row, window_row, scale,
    lead, block_bytes, head_bytes, slot_bytes, window_block, window_head, window_place, Q: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, TOGETHER: tl.constexpr, EXACT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Attention over one split of a request's packed tokens, or over all its other tokens. Grid, splits and results are
    those of `attend.attend_split`, for tiles instead of samples.

    past, total: number of tokens of each tile's request before this step, and with the new ones, which are in the
        window. Without any, the output is 0.
    first, queries: the first token of each tile, and the number of tokens. Tokens after the last one repeat it.
    blocks, window_blocks: block tables, with rows of ``blocks_row`` and ``window_row`` entries.
    block_bytes, head_bytes, slot_bytes: strides of pages and, from block to block and head to head, of sinks.
    window_block, window_head, window_place: strides of the window in elements.
    """
    group = tl.program_id(0).to(tl.int64)
    tile, head = group // Q.groups, group % Q.groups
    n, stop = tl.load(past + tile).to(tl.int32), tl.load(total + tile).to(tl.int32)
    begin = n
    if Q.causal:
        begin = tl.load(first + tile).to(tl.int32)
        stop = min(stop, begin + queries)
    blocks, window_blocks = blocks + tile * blocks_row, window_blocks + tile * window_row
    pages, offset = Table(blocks, lead, block_bytes, slot_bytes), head * head_bytes
    k_codes, k_scale, k_zero = moved(k_codes, offset), moved(k_scale, offset), moved(k_zero, offset)
    v_codes, v_scale, v_zero = moved(v_codes, offset), moved(v_scale, offset), moved(v_zero, offset)
    # built here, because functions that Triton 3.6 compiles cannot return None
    key = Pool(k_codes, k_scale, k_zero, k_points, None, None, pages)
    value = Pool(v_codes, v_scale, v_zero, v_points, None, None, pages)
    if k_sinks is not None:
        offset += tl.load(blocks) * block_bytes
        k_sinks, v_sinks = moved(k_sinks, offset), moved(v_sinks, offset)
    tokens, window = Table(window_blocks, 0, window_block, window_place), window + head * window_head
    attend_tile(
        q, q_packed, key, value, Window(k_sinks, window, tokens), Window(v_sinks, window + V.dim, tokens), None, None,
        Rope(None, None, 0, 0, None, 0),
        Call(begin, queries if Q.causal else 1, queries if Q.causal else 1, scale, shift, None, 0, 0, 0), stop, stop,
        packed_rows(n, K), packed_rows(n, V), partial, partial_lse, Q, K, V, ROWS, TOGETHER, EXACT, STAGES,
    )  # fmt: skip

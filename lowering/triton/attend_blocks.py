"""Attention of one token of each request over a server's blocks: `attend` with block tables.

What depends on a length is read from memory on the device, so a grid is valid for any lengths that its block table
holds.
"""

import triton
import triton.language as tl

from .attend import attend_tile
from .scores import Call, Rope, Window
from .unpacking import Pool, Table, moved, packed_rows


@triton.jit(do_not_specialize=["blocks_row", "window_row"])
def attend_blocks(
    q, k_codes, k_scale, k_zero, k_sinks, v_codes, v_scale, v_zero, v_sinks, window, q_packed, shift, k_points,
    v_points, partial, partial_lse, total, blocks, window_blocks, blocks_row, window_row, scale, lead, block_bytes,
    head_bytes, slot_bytes, window_block, window_head, window_place, Q: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, ROWS: tl.constexpr, TOGETHER: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attention over one split of a request's packed tokens, or over all its other tokens. Grid, splits and results are
    those of `attend.attend_split`.

    total: number of tokens of each request, with the new one, which is in the window. Without any, the output is 0.
    blocks, window_blocks: block tables, with rows of ``blocks_row`` and ``window_row`` entries.
    block_bytes, head_bytes, slot_bytes: strides of pages and, from block to block and head to head, of sinks.
    window_block, window_head, window_place: strides of the window in elements.
    """
    group = tl.program_id(0).to(tl.int64)
    request, head = group // Q.groups, group % Q.groups
    stored = tl.load(total + request).to(tl.int32)
    n = stored - 1  # what is packed depends on the tokens before this step
    blocks, window_blocks = blocks + request * blocks_row, window_blocks + request * window_row
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
        Rope(None, None, 0, 0, None, 0), Call(n, 1, scale, shift, None, 0, 0, 0), stored, packed_rows(n, K),
        packed_rows(n, V), partial, partial_lse, Q, K, V, ROWS, TOGETHER, EXACT, STAGES,
    )  # fmt: skip

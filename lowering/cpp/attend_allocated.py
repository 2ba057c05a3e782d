"""Attention of a few query tokens per sample on CPUs, for keys and values with per-channel bit widths
(`kvpass.codec.allocation`, `kvpass.codec.layer_pages`).

The kernel computes scores, weights and values of a few pages at a time, and then of the exact tokens.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from kvpass.codec.allocation import Allocation
from kvpass.codec.layer_pages import LayerPages
from kvpass.codec.rope import parse_rope
from kvpass.codec.spec import CodecSpec
from kvpass.codec.tensors import Pack
from kvpass.layout.pool import capacity

from ..call_types import AttendCall
from .allocated import PAGE_FILES, common_of, defines_of, fields_type, look_up_table
from .attend_codes import DTYPES, LANES, SOFTMAX_TYPES, as_tokens, at_a_time, outputs, softmax_arguments
from .build import BYTES, FLOATS, FRACTION, NUMBER, WRITTEN_BYTES, build, source, text

_NO_TURN = 0, False


@cache
def serves(key: CodecSpec, value: CodecSpec, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether `allocated_attend.cpp` supports these specs, for tokens of ``dtype``."""
    transform = key.transform
    of_keys, of_values = key.codec, value.codec
    return (
        dtype in DTYPES
        and isinstance(of_keys, (Allocation, LayerPages))
        and type(of_keys) is type(of_values)
        and of_keys.block_size == of_values.block_size
        and key.retention == value.retention
        and key.retention.keep == "recent"
        and not key.needs_importance
        and not (transform.pre_rope or transform.predictor or transform.rotation)
        and not (head_dim % LANES or key.page_size % LANES)
    )


def attention_source(key: CodecSpec, value: CodecSpec, head_dim: int, queries: int, dtype: torch.dtype) -> str:
    """The C++ source of attention over parts of a context (allocated_parts.h), without a kernel."""
    sides = (("keys", key, "allocated_scores.h"), ("values", value, "allocated_values.h"))
    parts = [text(defines_of(spec, head_dim), *PAGE_FILES, file, namespace=name) for name, spec, file in sides]
    tokens = source(common_of(key, head_dim, queries, dtype), "tokens.h")
    return "".join([tokens, *parts, text({}, "allocated_parts.h")])


@cache
def _kernel(key: CodecSpec, value: CodecSpec, head_dim: int, queries: int, dtype: torch.dtype) -> Callable[..., None]:
    windows = dict(KEY_WINDOW=key.retention.ring_size, VALUE_WINDOW=value.retention.ring_size)
    side = [BYTES, BYTES, fields_type(key)]
    types = [BYTES, WRITTEN_BYTES, *side, *side, *7 * [BYTES], FLOATS, *16 * [NUMBER]]
    types += [*SOFTMAX_TYPES, NUMBER, FRACTION]
    parts = attention_source(key, value, head_dim, queries, dtype)
    return build(parts + text(windows, "rings.h", "allocated_attend.cpp"), types)


def attend(call: AttendCall[Pack]) -> list[Tensor]:
    """What ``call`` returns, which has a few query tokens, and as many new keys and values or none."""
    q, key, value, n, k_new, v_new = call[:6]
    k_spec, v_spec = call.specs
    (batch, q_heads, tokens, head_dim), (_, heads, present, _), dtype = q.shape, k_new.shape, key.ring.dtype
    queries = q_heads // heads * tokens
    pages = k_spec.retention.pages(n)
    sides, rooms = [], []
    for pack, spec in zip((key, value), call.specs, strict=True):
        (pool,), (basis, fields) = pack.pools, pack.dequantizes_with(spec)
        rooms.append(capacity(pool, pages))
        sides += [x.contiguous() for x in (pool, basis, fields)]
        of_samples = int(len(basis) == batch)
    q, *exact = (as_tokens(x, dtype) for x in (q, key.ring, value.ring, k_new, v_new))
    (out, lse), page_tables = outputs(call, q), key.page_tables
    (pairs, interleaved), cos, sin = _NO_TURN, q, q
    if page_tables is not None:
        (pairs, interleaved), cos, sin = parse_rope(page_tables.rope), *(as_tokens(x, dtype) for x in page_tables[:2])
    center = key.fitted.get("center")
    _kernel(k_spec.stored_as, v_spec.stored_as, head_dim, at_a_time(queries, tokens), dtype)(
        q, out, *sides, *exact, cos, sin, q if center is None else center.contiguous(),
        look_up_table(q.device), batch, heads, n, present, pages, *rooms, cos.shape[1], cos.shape[2], pairs,
        int(interleaved), int(center is not None), of_samples, queries, tokens, int(call.causal),
        *softmax_arguments(call, q, lse), torch.get_num_threads(), call.scale,
    )  # fmt: skip
    return [out, *lse]

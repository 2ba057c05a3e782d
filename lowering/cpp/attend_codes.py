"""Attention of a few query tokens per sample on CPUs, over uniform codes or points of a grid. Values have per-token
scales, and keys per-channel scales (KIVI, arXiv:2402.02750) or per-token scales (QuaRot, HIGGS).

Codes are read in place. Scales are multiplied into the queries, scores and weights instead of into the codes.
"""

from collections.abc import Callable
from functools import cache, lru_cache
from math import ceil

import torch
from torch import Tensor

from kvpass.codec.bitpack import FIELDS
from kvpass.codec.codebook import grid
from kvpass.codec.hadamard import basis
from kvpass.codec.spec import CodecSpec
from kvpass.codec.tensors import Pack
from kvpass.layout.pool import capacity
from kvpass.layout.retention import Retention
from kvpass.layout.window import layout

from ..call_types import AttendCall
from .build import BYTES, FLOATS, FRACTION, INT64S, NUMBER, WRITTEN_BYTES, WRITTEN_FLOATS, build, source

BLOCK = 4
"""Queries at a time, if a call has several tokens."""
MOST = 8
"""Query heads of a KV head at a time, if a call has one token: sums of more do not fit into registers."""
LANES = 16
"""Largest number of vector lanes. Page and group sizes are multiples of it."""
_CHANNEL = {"per=channel", "per=token", "keep=log", *(f"bits={bits}" for bits in FIELDS)}
_TOKEN = _CHANNEL | {"rotation", "grid"}
SOFTMAX_TYPES = BYTES, *4 * [NUMBER], FLOATS, NUMBER, WRITTEN_FLOATS, NUMBER
"""Types of the arguments that `softmax_arguments` returns."""
DTYPES = torch.float32, torch.bfloat16
_TYPES = [BYTES, WRITTEN_BYTES, *10 * [BYTES], *4 * [FLOATS], BYTES]
_TYPES += [INT64S, *17 * [NUMBER], *SOFTMAX_TYPES, NUMBER, FRACTION]
_IN_CODE_ORDER, _TO_CODES, _FROM_CODES, _CENTER = 1, 2, 4, 8  # Reading of attend_parts.h


@cache
def serves(key: CodecSpec, value: CodecSpec, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether `channel_codes.h` or `token_codes.h` supports these specs, for tokens of ``dtype``."""
    return (
        dtype in DTYPES
        and value.retention.residual >= key.retention.residual
        and (key.retention.keep == "recent" or key.retention == value.retention)
        and key.retention.keep == value.retention.keep
        and (key.page_size, key.retention.sinks) == (value.page_size, value.retention.sinks)
        and not any(spec.quantizer.raw for spec in (key, value))
        and not any(size % LANES for size in (head_dim, key.page_size))
        and (_by_channel(key, value) or by_token(key, value))
    )


def _by_channel(key: CodecSpec, value: CodecSpec) -> bool:
    """Whether `channel_codes.h` supports these specs."""
    return (
        all(spec.stored_as.features <= _CHANNEL for spec in (key, value))
        and (key.quantizer.per, value.quantizer.per) == ("channel", "token")
        and not any(spec.quantizer.group_size % LANES for spec in (key, value))
    )


def by_token(key: CodecSpec, value: CodecSpec) -> bool:
    """Whether `token_codes.h` supports these specs."""
    return (
        key.stored_as.features <= _TOKEN | {"center"}
        and value.stored_as.features <= _TOKEN
        and (key.quantizer.per, value.quantizer.per) == ("token", "token")
        and not any(spec.quantizer.group_size // spec.quantizer.dim % LANES for spec in (key, value))
    )


def defines_of(key: CodecSpec, value: CodecSpec, head_dim: int, queries: int, dtype: torch.dtype) -> dict[str, int]:
    """The macros of the sources of `parts_of`."""
    found = dict(
        HEAD=head_dim, QUERIES=queries, PAGE=key.page_size, KEY_BITS=key.bits, VALUE_BITS=value.bits,
        KEY_GROUP=key.quantizer.group_size, VALUE_GROUP=value.quantizer.group_size, SINKS=key.retention.sinks,
        BFLOAT16=int(dtype == torch.bfloat16),
    )  # fmt: skip
    for name, quantizer in (("KEY", key.quantizer), ("VALUE", value.quantizer)) if by_token(key, value) else ():
        points = len(grid(quantizer.grid)) if quantizer.grid else 0
        found |= {f"{name}_DIM": quantizer.dim, f"{name}_POINTS": points}
    return found


def parts_of(key: CodecSpec, value: CodecSpec) -> tuple[str, ...]:
    """Sources of attention over parts of a context, without a kernel."""
    return "tokens.h", "unpack.h", "token_codes.h" if by_token(key, value) else "channel_codes.h", "attend_parts.h"


@cache
def _kernel(key: CodecSpec, value: CodecSpec, head_dim: int, queries: int, dtype: torch.dtype) -> Callable[..., None]:
    defines = defines_of(key, value, head_dim, queries, dtype)
    defines |= dict(KEY_WINDOW=key.retention.ring_size, VALUE_WINDOW=value.retention.ring_size)
    return build(source(defines, *parts_of(key, value), "rings.h", "attend_codes.cpp"), _TYPES)


@cache
def _points(spec: CodecSpec) -> Tensor | None:
    """The points of a grid, ``[d, n]`` float32; None for uniform codes."""
    return grid(spec.quantizer.grid).T.contiguous() if spec.quantizer.grid else None


@cache
def _to_codes(spec: CodecSpec, head_dim: int) -> Tensor | None:
    """The matrix ``[D, D]`` that rotates tokens as ``spec`` does and brings channels of one place in all codes next to
    each other; None if it changes nothing."""
    rotation, dim = spec.transform.rotation, spec.quantizer.dim
    if rotation is None and dim == 1:
        return None
    rotated = torch.eye(head_dim) if rotation is None else basis(head_dim, rotation)
    return rotated.unflatten(1, (-1, dim)).transpose(1, 2).flatten(1).contiguous()


@cache
def _fixed(key: CodecSpec, value: CodecSpec, head_dim: int) -> tuple[int, tuple[Tensor | None, ...]]:
    """`reading_of` without a center."""
    if not by_token(key, value):
        return 0, (None,) * 4
    to_codes, from_codes = (_to_codes(spec, head_dim) for spec in (key, value))
    from_codes = None if from_codes is None else from_codes.T.contiguous()
    given = _IN_CODE_ORDER + (to_codes is not None) * _TO_CODES + (from_codes is not None) * _FROM_CODES
    return given, (_points(key), _points(value), to_codes, from_codes)


def reading_of(
    key: CodecSpec, value: CodecSpec, head_dim: int, center: Tensor | None
) -> tuple[int, list[Tensor | None]]:
    """``given`` of Reading (attend_parts.h), and its arguments: points of keys and values, matrices to and from code
    order, and what was subtracted from keys."""
    given, fixed = _fixed(key.stored_as, value.stored_as, head_dim)
    return given + (center is not None) * _CENTER, [*fixed, center]


@lru_cache(maxsize=8)  # all layers ask the same
def _slots(retention: Retention, n: int) -> Tensor | None:
    """The slots of the exact tokens after the sinks, if ``n`` are stored and these are not the newest ones."""
    if retention.keep == "recent":
        return None
    where = layout(retention)
    return where.slots(where.exact(n))


def attend(call: AttendCall[Pack]) -> list[Tensor]:
    """What ``call`` returns, which has a few query tokens, and as many new keys and values or none."""
    q, key, value, n, k_new, v_new = call[:6]
    k_spec, v_spec = call.specs
    (batch, q_heads, tokens, head_dim), (_, heads, present, _), dtype = q.shape, k_new.shape, key.ring.dtype
    queries = q_heads // heads * tokens
    key_pages, packed = (spec.retention.pages(n) for spec in (k_spec, v_spec))
    rooms = [capacity(pool, pages) for pack, pages in ((key, key_pages), (value, packed)) for pool in pack.pools]
    pools = [pool.contiguous() for pack in (key, value) for pool in pack.pools]
    q, *exact = (as_tokens(x, dtype) for x in (q, key.ring, value.ring, k_new, v_new))
    out, lse = outputs(call, q)
    given, reading = reading_of(k_spec, v_spec, head_dim, key.fitted.get("center"))
    slots = _slots(k_spec.retention, n)
    _kernel(k_spec.stored_as, v_spec.stored_as, head_dim, at_a_time(queries, tokens), dtype)(
        q, out, *pools, *exact, *(q if x is None else x for x in (*reading, slots)), batch, heads, n, present, packed,
        key_pages, *rooms, int(slots is not None), given, queries, tokens, int(call.causal),
        *softmax_arguments(call, q, lse), torch.get_num_threads(), call.scale,
    )  # fmt: skip
    return [out, *lse]


def outputs(call: AttendCall[Pack], q: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The tensors for the output of ``call`` with queries ``q`` and, if it asks for it, for the log-sum-exp."""
    lse = [torch.empty(q.shape[:3], dtype=torch.float32)] if call.with_lse else []
    return torch.empty_like(q), lse


def at_a_time(queries: int, tokens: int) -> int:
    """How many of the ``queries`` queries of a KV head the kernels attend with at a time. If they are those of several
    ``tokens``, their number does not matter, so that one kernel serves them all."""
    return ceil(queries / ceil(queries / MOST)) if tokens == 1 else BLOCK


_NONE, _BOOL, _ADDED = range(3)  # Mask::Kind of tokens.h


def softmax_arguments(call: AttendCall[Pack], q: Tensor, lse: list[Tensor]) -> tuple[Tensor | int, ...]:
    """The mask of ``call``, its kind and its strides (tokens.h), its sinks, and ``lse`` of `outputs`. q: its queries,
    which stand in for what is missing."""
    mask, sinks = call.mask, (q, 0) if call.sinks is None else (call.sinks.float().contiguous(), 1)
    others = *sinks, *((lse[0], 1) if lse else (q, 0))
    if mask is None:
        return q, _NONE, 0, 0, 0, *others
    kind = _BOOL if mask.dtype == torch.bool else _ADDED
    if kind == _ADDED and mask.dtype != q.dtype:
        mask = mask.to(q.dtype)
    mask = mask.expand(*q.shape[:3], call.n + call.k_new.shape[2])  # a decoder's own mask may have fewer dims
    if mask.stride(3) != 1:
        mask = mask.contiguous()
    return mask, kind, *mask.stride()[:3], *others


def as_tokens(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` contiguous and in ``dtype``, as the kernel reads it. Checking the dtype takes a tenth of the time of
    ``to``."""
    return x.contiguous() if x.dtype == dtype else x.to(dtype).contiguous()

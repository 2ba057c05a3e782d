"""Attention of a few query tokens on CPUs, for verifying drafts: dequantizes and multiplies a few pages at a time.

Dequantized pages are still in the processor's caches when they are multiplied. K and V are never dequantized as a
whole.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from kvpass.codec.rope import rotate
from kvpass.codec.spec import parse
from kvpass.codec.tensors import Pack

from ..call_types import AttendCall, DequantizeCall
from ..reference import attention_weights, causal_mask, pieces, with_starts
from ..table import FEW, DispatchKey, implements, refuses_shapes
from . import dense
from .pages import dequantize_all

_VALUES = 1 << 19  # values to dequantize at a time


def _rotated(parts: Iterator[Tensor], cos: Tensor, sin: Tensor, rope: str) -> Iterator[Tensor]:
    """Apply rotary embedding to keys that are stored before it."""
    first = 0
    for keys in parts:
        tokens = slice(first, first + keys.shape[2])
        yield rotate(keys, cos[:, tokens], sin[:, tokens], rope)
        first = tokens.stop


def _refuses(dispatch: DispatchKey) -> str | None:
    if dispatch.device != "cpu":
        return "it runs on CPUs."
    if not dispatch.specs:
        return "the past is already dequantized."
    if dispatch.queries < 2:
        return f"it attends with 2 to {FEW} query tokens."
    if why := refuses_shapes(dispatch):
        return why
    if "attention mass" in dispatch.extras:
        return "it does not return attention mass."
    retentions = [parse(text).retention for text in dispatch.specs]
    if any(retention.keep == "log" for retention in retentions):
        return "log-sparse windows do not keep tokens in order."
    if any(retention.evicts for retention in retentions):
        return "it does not support eviction."
    return None


@implements("attend", "inductor-drafts", has=dense.ATTENDED, refuses=_refuses, lowering="inductor")
def attend(call: AttendCall[Pack]) -> list[Tensor]:
    """The output of ``call``, computed in pieces. A past that fits into one piece is dequantized as a whole."""
    if call.n * call.key.ring[:, :, 0].numel() <= _VALUES:
        return dense.attend(call)
    return [in_pieces(with_starts(call))]


def in_pieces(call: AttendCall[Pack]) -> Tensor:
    """The output ``[B, H_q, S, D]`` of ``call``, which has no ``starts``."""
    q, key, value, n, k_new, v_new, mask = call[:7]
    batch, heads, queries, _ = q.shape
    rows = (q.float() * call.scale).unflatten(1, (k_new.shape[1], -1)).flatten(2, 3)  # grouped by KV head
    at_once = max(1, _VALUES // (call.k_spec.page_size * key.ring[:, :, 0].numel()))
    keys = pieces(dequantize_all, DequantizeCall(key, n, call.k_spec), at_once)
    keys = keys if call.rotary is None else _rotated(keys, *call.rotary)
    scores = torch.cat([rows @ k.float().mT for k in chain(keys, (k_new,))], -1)
    tokens = scores.shape[-1]
    if call.causal:
        mask = causal_mask(queries, tokens, q.device)
    weights = attention_weights(scores.view(batch, heads, queries, -1), mask, call.softcap, call.sinks)
    weights = weights.view(*rows.shape[:3], -1)
    out: Any = 0.0
    first = 0
    for v in chain(pieces(dequantize_all, DequantizeCall(value, n, call.v_spec), at_once), (v_new,)):
        out = out + weights[..., first : first + v.shape[2]] @ v.float()
        first += v.shape[2]
    return out.view(batch, heads, queries, -1).to(q.dtype)

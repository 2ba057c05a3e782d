"""Attention of some query tokens over codes on a CPU, as drafts are verified.

Pages are decoded a few at a time: when they are multiplied they are still in the caches of the processor, and K and V
are never there as a whole.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from kvpass.codec.rope import rotate
from kvpass.codec.spec import CodecSpec

from ..reference import attention_weights, causal_mask, pieces
from ..table import FEW
from .pages import decode_all

_VALUES = 1 << 19  # decoded at a time


def serves(q: Tensor, ring: Tensor, n: int, specs: Sequence[CodecSpec]) -> bool:
    """Whether `attend` is faster than to decode everything: on a CPU, and where that does not fit its caches. Tokens
    have to be in their order, which those of log-sparse windows are not."""
    few, large = q.shape[2] <= FEW, n * ring[:, :, 0].numel() > _VALUES
    return q.device.type == "cpu" and few and large and all(spec.retention.keep != "log" for spec in specs)


def _rotated(parts: Iterator[Tensor], cos: Tensor, sin: Tensor, rope: str) -> Iterator[Tensor]:
    """Keys, that were stored before rotary embedding, behind it."""
    first = 0
    for keys in parts:
        tokens = slice(first, first + keys.shape[2])
        yield rotate(keys, cos[:, tokens], sin[:, tokens], rope)
        first = tokens.stop


def attend(
    q, key, value, n, k_new, v_new, mask, causal, scale, softcap, k_spec, v_spec, rotary=None, sinks=None
) -> Tensor:
    """The output of `kvpass.lowering.reference.attend`."""
    batch, heads, queries, _ = q.shape
    rows = (q.float() * scale).unflatten(1, (k_new.shape[1], -1)).flatten(2, 3)  # those of a KV head together
    at_once = max(1, _VALUES // (k_spec.page_size * key.ring[:, :, 0].numel()))
    keys = pieces(decode_all, key, n, k_spec, at_once=at_once)
    keys = keys if rotary is None else _rotated(keys, *rotary)
    scores = torch.cat([rows @ k.float().mT for k in chain(keys, (k_new,))], -1)
    tokens = scores.shape[-1]
    if causal:
        mask = causal_mask(queries, tokens, q.device)
    weights = attention_weights(scores.view(batch, heads, queries, -1), mask, softcap, sinks).view(*rows.shape[:3], -1)
    out: Any = 0.0
    first = 0
    for v in chain(pieces(decode_all, value, n, v_spec, at_once=at_once), (v_new,)):
        out = out + weights[..., first : first + v.shape[2]] @ v.float()
        first += v.shape[2]
    return out.view(batch, heads, queries, -1).to(q.dtype)

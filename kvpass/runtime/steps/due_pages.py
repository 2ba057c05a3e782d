"""Pack the pages that are due after a replayed step, which only fills windows."""

from typing import Any

import torch
from torch import Tensor

from kvpass.lowering.append import stands_alone

from ...cache.cache_state import CacheState
from ...cache.state import KVState
from ...layout.window import layout, length_tensor


def is_due(cache: CacheState, tokens: int) -> bool:
    """Whether storing ``tokens`` more tokens completes a page."""
    retentions = {spec.retention for layer in cache.layers for spec in (layer.plan.key, layer.plan.value)}
    stored = cache.tokens
    return any(retention.pages(stored) < retention.pages(stored + tokens) for retention in retentions)


def pack_again(cache: CacheState, n: int) -> None:
    """Pack the pages that are due now that token ``n`` is in its window. The token is appended again, from its slot in
    the ring; in one call for all layers that store alike, because plain PyTorch quantizes pages of most schemes."""
    length = length_tensor(n, cache.device)
    together: dict[Any, list[KVState]] = {}
    for state in sorted((state for layer in cache.layers for state in layer.states()), key=_follows_keys):
        merged = state.source is None and stands_alone(state.spec)
        alike = state.text, state.ring.device, id(state.rotary)
        together.setdefault(alike if merged else id(state), []).append(state)
    for states in together.values():
        _append(states, length, n, cache.lowering)


def _append(states: list[KVState], length: Tensor, n: int, lowering: str) -> None:
    first = states[0]
    slot = layout(first.spec.retention).slot(n)
    tokens = [state.ring.narrow(2, slot, 1) for state in states]
    if len(states) == 1:
        torch.ops.kvpass.append_(
            first.handles, length, tokens[0], None, None, first.text, lowering, **first.tables(),
            keys=first.keys,
        )  # fmt: skip
        return
    keys = [tensor for state in states for tensor in state.keys or ()] if _follows_keys(first) else None
    tensors = [tensor for state in states for tensor in state.handles]
    torch.ops.kvpass.append_layers_(tensors, length, tokens, first.text, lowering, **first.tables(), keys=keys)


def _follows_keys(state: KVState) -> bool:
    """Whether the pages of the layer's keys have to be packed before those of ``state``."""
    return state.spec.quantizer.follows_keys

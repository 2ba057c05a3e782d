"""Pack the pages that are due after a replayed step, which only fills windows."""

from typing import Any

import torch
from torch import Tensor

from kvpass.lowering.append import MERGED

from ...cache.cache_state import CacheState
from ...cache.state import KVState
from ...codec.tensors import of_pages
from ...layout.window import layout, length_tensor


def is_due(cache: CacheState, tokens: int) -> bool:
    """Whether storing ``tokens`` more tokens completes a page."""
    retentions = {spec.retention for layer in cache.layers for spec in (layer.plan.key, layer.plan.value)}
    stored = cache.tokens
    return any(retention.pages(stored) < retention.pages(stored + tokens) for retention in retentions)


def pack_again(cache: CacheState, n: int) -> None:
    """Pack the pages that are due now that token ``n`` is in its window. The token is appended again, from its slot in
    the ring."""
    length = length_tensor(n, cache.device)
    alike: dict[str, list[tuple[KVState, Tensor]]] = {}
    for layer in cache.layers:
        for state in layer.states():
            slot = layout(state.spec.retention).slot(n)
            x = state.ring.narrow(2, slot, 1)
            if _is_alone(state):
                alike.setdefault(state.text, []).append((state, x))
                continue
            torch.ops.kvpass.append_(
                state.handles, length, x, None, None, state.text, cache.lowering, **state.tables(),
                key_pages=state.key_pages,
            )  # fmt: skip
    for text, of_layers in alike.items():
        tensors: list[Any] = [tensor for state, _ in of_layers for tensor in state.handles]
        torch.ops.kvpass.append_layers_(tensors, length, [x for _, x in of_layers], text, cache.lowering)


def _is_alone(state: KVState) -> bool:
    """Whether stored values depend only on the tokens of ``state`` itself."""
    fitted = state.pack[len(of_pages(state.spec)) + 1 :]
    return not fitted and state.source is None and state.spec.features <= MERGED

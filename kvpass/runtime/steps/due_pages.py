"""Pages that are due behind a step that only filled windows."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvpass.lowering.append import MERGED

from ...cache.layer import PackedLayer
from ...cache.state import KVState
from ...codec.tensors import of_pages
from ...layout.window import carry, layout


def is_due(layers: Sequence[PackedLayer], tokens: int) -> bool:
    """Whether a page is packed when that many ``tokens`` more are stored."""
    retentions = {spec.retention for layer in layers for spec in (layer.plan.key, layer.plan.value)}
    stored = layers[0].tokens
    return any(retention.pages(stored) < retention.pages(stored + tokens) for retention in retentions)


def pack_again(layers: Sequence[PackedLayer], n: int) -> None:
    """Pack what is due once token ``n`` is stored, which it is: it is appended again, as it lies in its window."""
    length = carry(n, layers[0].geometry.device)
    alike: dict[tuple[str, str], list[tuple[KVState, Tensor]]] = {}
    for layer in layers:
        for state in layer.states():
            slot = layout(state.spec.retention).slot(n)
            x = state.ring.narrow(2, slot, 1)
            if _is_alone(state):
                alike.setdefault((state.text, layer.lowering), []).append((state, x))
                continue
            torch.ops.kvpass.append_(
                state.handles, length, x, None, None, state.text, layer.lowering, **state.tables(),
                key_pages=state.key_pages,
            )  # fmt: skip
    for (text, lowering), of_layers in alike.items():
        tensors: list[Any] = [tensor for state, _ in of_layers for tensor in state.handles]
        torch.ops.kvpass.append_layers_(tensors, length, [x for _, x in of_layers], text, lowering)


def _is_alone(state: KVState) -> bool:
    """Whether what is stored depends on the tokens of ``state`` alone."""
    fitted = state.pack[len(of_pages(state.spec)) + 1 :]
    return not fitted and state.source is None and state.spec.features <= MERGED

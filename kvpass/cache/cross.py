"""Cross-attention of an encoder-decoder: keys and values written once, from the encoder, and read at every step."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..errors import KVPassError
from ..layout.window import carry
from ..schemes import LayerPlan
from .context import ForwardContext
from .layer import PackedLayer
from .state import KVState


class CrossLayer(PackedLayer):
    """A layer of a cross-attention cache. Attention reads ``keys`` and ``values`` of a layer that is written; while a
    forward is running they are plain decodes, which the pass fuses with it."""

    is_cross = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if self.context is None or self.tokens:
            raise KVPassError(
                "A packed cross-attention cache is written once, by the first forward. For other encoder inputs pass "
                "a fresh cache, or call cache.reset() first."
            )
        batch, _, tokens, _ = key_states.shape
        if self.batch != batch:  # a reset cache may be used at another batch size
            self.forget()
        self._allocate(batch, self.max_cache_len or tokens)
        for which, (state, x) in enumerate(zip(self.states(), (key_states, value_states), strict=True)):
            state.reserve(tokens)
            self._append(state, self._placed(x), which)
            state.wrote(0, tokens)
        self.tokens = self.seen = tokens
        self.filled = True
        self.context = ForwardContext(self.key_state.carrier(tokens))
        return key_states, value_states

    def _view(self, state: KVState) -> Tensor:
        return super()._view(state) if self.context is None else self._decode(state, None)


@contextmanager
def running(layers: Sequence[CacheLayerMixin], self_attention: PackedLayer) -> Iterator[None]:
    """Within it a forward may write the cross-attention ``layers``, if they are empty, and read them at any length.

    self_attention: a layer of the other half, whose rows are the same. If it is as new and these are not, a reset came
        no further than that.
    """
    packed = [layer for layer in layers if isinstance(layer, CrossLayer)]
    for layer in layers:
        if layer not in packed and layer.is_initialized:
            torch._dynamo.maybe_mark_dynamic(layer.keys, 2)
            torch._dynamo.maybe_mark_dynamic(layer.values, 2)
    if packed:
        tokens = packed[0].tokens
        forgotten = tokens and not (self_attention.tokens or self_attention.edits or self_attention.crops)
        for layer in packed:
            layer.refuse_unless_whole()
            if (layer.tokens, layer.edits) != (tokens, self_attention.edits) or forgotten:
                raise KVPassError(
                    "The cross-attention layers of this cache are inconsistent with each other or with the "
                    "self-attention layers: writing, reordering or resetting them failed or was interrupted. Pass a "
                    "fresh cache, or call cache.reset()."
                )
        context = ForwardContext(carry(tokens, packed[0].geometry.device))
        if tokens > 1:
            torch._dynamo.maybe_mark_dynamic(context.length, 0)
        for layer in packed:
            layer.context = context
    try:
        yield
    finally:
        for layer in packed:
            layer.context = None


def cross_plan(plan: LayerPlan) -> LayerPlan | str:
    """``plan``, if cross-attention can be stored by it, or why not."""
    why = None
    if plan.evicts or plan.adaptive:
        why = "this scheme selects tokens as they arrive, and an encoder's tokens arrive all at once"
    elif plan.needs_queries or plan.needs_importance:
        why = "this scheme is fitted to queries, and the encoder's output is stored before there are any"
    elif plan.looks_at_previous or plan.key_source is not None or plan.value_source is not None:
        why = "this scheme reads other layers, which works for self-attention only"
    elif plan.key.transform.keeps_tables:
        why = "it has no rotary embedding to undo"
    return plan if why is None else f"cross-attention: {why}. To pack it, use another scheme, such as 'kivi'"

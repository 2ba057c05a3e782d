"""Cross-attention layers of an encoder-decoder: keys and values are written once, from the encoder, and read at every
step."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..errors import KVPassError
from ..layout.window import length_of, length_tensor
from ..schemes import LayerGeometry, LayerPlan
from .cache_state import CacheState
from .context import ForwardContext
from .layer import PackedLayer
from .refusals import stored
from .state import KVState


class CrossLayer(PackedLayer):
    """A packed cross-attention layer. It is written once, during the first forward. From then on attention reads its
    ``keys`` and ``values``. During a forward these are calls of ``kvpass::dequantize``, which the pass fuses with
    attention."""

    is_cross = True

    def __init__(self, plan: LayerPlan, geometry: LayerGeometry, cache: CacheState):
        super().__init__(plan, geometry, cache)
        self.written = False

    @property
    def tokens(self) -> int:
        """Number of encoder tokens that are stored; 0 before this layer is written."""
        return self.cache.tokens if self.written else 0

    @stored
    def is_initialized(self) -> bool:
        """Whether the layer is written."""
        return self.written

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        cache = self.cache
        if cache.context is None or self.written:
            raise KVPassError(
                "A packed cross-attention cache is written once, by the first forward. For other encoder inputs pass "
                "a fresh cache, or call cache.reset() first."
            )
        batch, _, tokens, _ = key_states.shape
        if any(layer.is_initialized for layer in cache.layers) and (cache.batch, cache.tokens) != (batch, tokens):
            raise KVPassError(
                f"The model stores {tokens} tokens of its encoder in one cross-attention layer and {cache.tokens} in "
                "others. All layers of a packed cache have the same length and batch size. Call kvpass.remove(model); "
                "this model is not supported."
            )
        if self.is_allocated and len(self.key_state.ring) != batch:  # after a reset the batch size may change
            self.forget()
        self._allocate(batch, self.max_cache_len or tokens)
        for which, (state, x) in enumerate(zip(self.states(), (key_states, value_states), strict=True)):
            state.reserve(tokens)
            self._append(state, self._placed(x), which)
            state.wrote(0, tokens)
        cache.batch, cache.tokens, cache.seen = batch, tokens, tokens
        self.written = True
        return key_states, value_states

    def _view(self, state: KVState) -> Tensor:
        context = self.cache.context
        if context is None:
            return super()._view(state)
        if not length_of(context.length):  # written during this forward
            return state.dequantize(self.tokens, self.cache.lowering)
        return self._dequantize(state, None)

    def _stored(self) -> int:
        context = self.cache.context
        written_before = context is not None and length_of(context.length)
        return written_before or self.tokens

    def forget(self) -> None:
        super().forget()
        self.written = False

    def reset(self) -> None:
        with self.cache.resetting(self):
            for state in self.states():
                state.reset()
            self.written = False


@contextmanager
def running(layers: Sequence[CacheLayerMixin], own: CacheState) -> Iterator[None]:
    """A context in which a forward may write empty cross-attention ``layers``, and read them at any length.

    own: the state of the self-attention layers, which have the same rows. If ``own`` is empty and the state of
        ``layers`` is not, a reset was interrupted between the two.
    """
    packed = [layer for layer in layers if isinstance(layer, CrossLayer)]
    for layer in layers:
        if layer not in packed and layer.is_initialized:
            torch._dynamo.maybe_mark_dynamic(layer.keys, 2)
            torch._dynamo.maybe_mark_dynamic(layer.values, 2)
    cross = packed[0].cache if packed else None
    if cross is not None:
        _refuse_unless_consistent(cross, packed, own)
        cross.context = ForwardContext(length_tensor(cross.tokens, cross.device))
        if cross.tokens > 1:
            torch._dynamo.maybe_mark_dynamic(cross.context.length, 0)
    try:
        yield
    finally:
        if cross is not None:
            cross.context = None


def _refuse_unless_consistent(cross: CacheState, layers: list[CrossLayer], own: CacheState) -> None:
    cross.refuse_unless_whole()
    some_written = len({layer.written for layer in layers}) > 1
    forgotten = cross.tokens and not (own.tokens or own.edits or own.crops)
    if cross.layers != layers or some_written or cross.edits != own.edits or forgotten:
        raise KVPassError(
            "The cross-attention layers of this cache are inconsistent with each other or with the self-attention "
            "layers: writing, reordering or resetting them failed or was interrupted. Pass a fresh cache, or call "
            "cache.reset()."
        )


def cross_plan(plan: LayerPlan) -> LayerPlan | str:
    """``plan`` if it can store cross-attention, otherwise the reason why not."""
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

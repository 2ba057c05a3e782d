"""Cross-attention layers: keys and values are written from an encoder's output, once or once for each image, and read
at every step."""

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
from .refusals import TWICE, removed_tokens, stored


class CrossLayer(PackedLayer):
    """A packed cross-attention layer. The first forward writes it; a later one may add to it, such as an image in a
    later turn of a chat. What arrives is packed when the forward has succeeded. In other forwards attention reads its
    ``keys`` and ``values``; in a graph these are calls of ``kvpass::dequantize``, which the pass fuses with
    attention."""

    is_cross = True

    def __init__(self, plan: LayerPlan, geometry: LayerGeometry, cache: CacheState):
        super().__init__(plan, geometry, cache)
        self.written = 0
        self.arrived: tuple[Tensor, Tensor] | None = None

    @property
    def tokens(self) -> int:
        """Number of encoder tokens that are stored; 0 before this layer is written."""
        return self.written

    @stored
    def is_initialized(self) -> bool:
        """Whether the layer is written."""
        return self._stored() > 0

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        context = self.cache.context
        if context is None:
            raise KVPassError(
                "A packed cross-attention layer is written by a forward of the model that kvpass was applied to. Call "
                "model(...) or model.generate(...), with a fresh cache for other encoder inputs."
            )
        if self.arrived is not None:
            raise KVPassError(TWICE)
        self.arrived = key_states, value_states
        if length_of(context.length):
            past = [self._dequantize(state, None) for state in self.states()]
            key_states, value_states = (torch.cat(pair, 2) for pair in zip(past, self.arrived, strict=True))
        return key_states, value_states

    def store(self) -> None:
        """Store what arrived in the forward that ends."""
        batch, _, new, _ = self.arrived[0].shape
        before, total = self.written, self.written + new
        if self.is_allocated and len(self.key_state.ring) != batch:  # after a reset the batch size may change
            self.forget()
        self._allocate(batch, self.max_cache_len or total)
        for which, (state, x) in enumerate(zip(self.states(), self.arrived, strict=True)):
            state.reserve(total)
            state.wrote(before, total)
            self._append(state, self._placed(x), which)
        self.cache.batch, self.cache.tokens, self.cache.seen = batch, total, total
        self.written = total

    def _stored(self) -> int:
        context = self.cache.context
        in_graph = context is not None and torch.compiler.is_dynamo_compiling()
        return length_of(context.length) if in_graph else self.tokens  # `tokens` would be a constant of the graph

    def crop(self, tokens_to_remove: int) -> None:
        """Keep everything: tokens of the text are removed, and the encoder's output stays."""
        removed_tokens(tokens_to_remove)

    def take_back(self, stored: int) -> bool:
        """After a failed forward, forget what it added to ``stored`` tokens. Returns whether the layer is restored."""
        if not all(state.lossless_crop(stored) for state in self.states()):
            return False
        self.cache.tokens = self.cache.seen = self.written = stored
        for state in () if stored else self.states():
            state.reset()
        return True

    def forget(self) -> None:
        super().forget()
        self.written = 0

    def reset(self) -> None:
        with self.cache.resetting(self):
            for state in self.states():
                state.reset()
            self.written = 0


@contextmanager
def running(layers: Sequence[CacheLayerMixin], own: CacheState) -> Iterator[None]:
    """A context in which a forward may write cross-attention ``layers``, and read them at any length.

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
        if cross is not None:
            _store([layer for layer in packed if layer.arrived is not None])
    finally:
        if cross is not None:
            for layer in packed:
                layer.arrived = None
            cross.context = None


def _store(layers: Sequence[CrossLayer]) -> None:
    """Store what arrived in ``layers``. Raises `KVPassError`, before any of them changes, if sizes differ or do not fit
    what is stored."""
    shapes = {(len(x), x.shape[2]) for layer in layers for x in layer.arrived[:1]}
    stored = {(layer.cache.batch, layer.written) for layer in layers if layer.written}
    if len(shapes) > 1 or any(batch != rows for batch, _ in shapes for rows, _ in stored):
        raise KVPassError(
            f"The model stores {sorted(shapes)} rows and tokens of its encoder in cross-attention layers, behind "
            f"{sorted(stored)}. All layers of a packed cache have the same length and batch size. Pass a fresh cache."
        )
    for layer in layers:
        layer.store()


def _refuse_unless_consistent(cross: CacheState, layers: list[CrossLayer], own: CacheState) -> None:
    cross.refuse_unless_whole()
    unequal = {layer.written for layer in layers} != {cross.tokens}
    forgotten = cross.tokens and not (own.tokens or own.edits or own.crops)
    if cross.layers != layers or unequal or cross.edits != own.edits or forgotten:
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

"""Run one forward over a cache, all or nothing: if it fails, the cache is rolled back or marked inconsistent."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache, EncoderDecoderCache

from ..cache.cache_state import CacheState
from ..cache.context import ForwardContext
from ..cache.cross import CrossLayer
from ..cache.layer import PackedLayer
from ..cache.sliding import SlidingLayer
from ..cache.swap import cache_layers, cross_layers
from ..errors import KVPassError
from ..layout.window import LENGTH_OFFSET, SEEN_OFFSET, length_tensor, offset_of

_REPLACED = tuple(
    getattr(cache_utils, name)
    for name in ("DynamicLayer", "DynamicSlidingWindowLayer", "DynamicIndexedLayer")
    if hasattr(cache_utils, name)
)
"""Layers that replace their tensors when tokens are added, and never write to them."""


def start_forward(state: CacheState, batch: int, new_tokens: int) -> int:
    """Prepare a cache for one forward. Returns the number of tokens already stored.

    batch, new_tokens: the sizes that the caller passes to the model. The model may pass other sizes to its layers, for
        instance if it puts image tokens before the text; `_expect` then prepares the cache again.

    Raises `KVPassError` if the cache is full, inconsistent, or of another batch size. The cache is then unchanged. It
    is also unchanged if memory runs out.
    """
    stored = state.tokens
    state.refuse_unless_whole()
    refuse_what_does_not_fit(state, batch, new_tokens)
    state.whole = False
    try:
        context = ForwardContext(_varying(length_tensor(stored, state.device), stored))
        context.expect = partial(_expect, state)
        for layer in state.layers:
            if isinstance(layer, SlidingLayer):
                retention, offset = layer.plan.key.retention, offset_of(layer.plan.key.retention)
                if retention not in context.window_lengths:
                    of_window = length_tensor(layer.tokens, state.device, offset)
                    context.window_lengths[retention] = _varying(of_window, stored)
        if state.retention.evicts:
            context.seen_length = _varying(length_tensor(state.seen, offset=SEEN_OFFSET), stored)
        _make_room(state, batch, new_tokens, context)
    except BaseException:
        if not stored:
            state.forget()
        finish_forward(state, 0, succeeded=False)
        raise
    return stored


def refuse_what_does_not_fit(state: CacheState, batch: int, new_tokens: int) -> None:
    """Raise `KVPassError` if ``new_tokens`` more tokens in ``batch`` rows do not fit the cache."""
    stored, capacity = state.tokens, state.max_cache_len
    if capacity is not None and state.retention.stored(stored + new_tokens) > capacity:
        raise KVPassError(
            f"The cache is full: {stored} tokens are stored and {new_tokens} more exceed max_cache_len={capacity}."
        )
    if stored and state.batch != batch:
        raise KVPassError(f"The cache holds a batch of {state.batch}, but this call has a batch of {batch}.")


@torch.compiler.disable  # layers call it between the graphs of a step with graph breaks
def _expect(state: CacheState, batch: int, new_tokens: int) -> None:
    """Prepare a cache again, during a forward, for the sizes that the model passes to the first layer."""
    context = state.context
    assert context is not None  # a forward is running
    if any(layer.updated for layer in state.layers):
        raise KVPassError(
            f"The model stores {context.new_tokens} tokens in some cache layers and {new_tokens} in others. All "
            "layers of a packed cache have the same length. Call kvpass.remove(model); this model is not supported."
        )
    refuse_what_does_not_fit(state, batch, new_tokens)
    _make_room(state, batch, new_tokens, context)


def check_all_updated(layers: Collection[PackedLayer]) -> None:
    """Raise `KVPassError` if a forward has stored tokens in some ``layers`` and none in others."""
    missing = [layer.geometry.index for layer in layers if not layer.updated]
    if 0 < len(missing) < len(layers):
        raise KVPassError(
            f"The model stored nothing in cache layers {', '.join(map(str, missing))} in this forward, but it did in "
            "the others. All layers of a packed cache have the same length. Call kvpass.remove(model); this use of "
            "the model is not supported."
        )


def _make_room(state: CacheState, batch: int, new_tokens: int, context: ForwardContext) -> None:
    context.arriving = torch.empty(new_tokens, 0)
    if new_tokens > 1:
        torch._dynamo.maybe_mark_dynamic(context.arriving, 0)
    context.edges = _edges(state.layers, batch, state.tokens, new_tokens)
    if state.retention.evicts:
        for heads in {layer.deciding_heads for layer in state.layers}:
            shape = batch, heads, state.retention.budget
            context.slots[heads] = torch.zeros(shape, dtype=torch.int64, device=state.device)
    state.prepare(batch, new_tokens, context)


def _varying(length: Tensor, stored: int) -> Tensor:
    if stored > 1:  # 0 and 1 are separate forms of call, so their graphs may be specialized
        torch._dynamo.mark_dynamic(length, 0)
    return length


def length_tensor_of(length: Tensor, n: int) -> Tensor:
    """A length tensor of length ``n`` that views ``length``, a tensor of one element that holds ``n``."""
    return _varying(length.expand(n + LENGTH_OFFSET), n)


def _edges(layers: list[PackedLayer], batch: int, stored: int, new_tokens: int) -> tuple[Tensor, Tensor] | None:
    """Scratch space for the keys and values that leave the window in this forward, as dequantized in one layer and in
    those below it (`codec.predictor.with_below`)."""
    plan, geometry = layers[-1].plan, layers[-1].geometry
    if not any(layer.plan.looks_at_previous for layer in layers):
        return None
    retention, total = plan.key.retention, stored + new_tokens
    tokens = max(retention.page_size, retention.packed(total) - retention.packed(stored))
    if gone := retention.evicted(total):
        tokens = retention.packed(total) - gone  # an eviction may reassign every packed token
    shape = (batch, plan.layers_below * geometry.num_key_value_heads, tokens, geometry.head_dim)
    keys, values = (torch.empty(shape, dtype=geometry.dtype, device=geometry.device) for _ in range(2))
    if new_tokens > 1 or plan.evicts:
        for edge in (keys, values):
            torch._dynamo.mark_dynamic(edge, 2)
    return keys, values


def finish_forward(
    state: CacheState, new_tokens: int, succeeded: bool, undo: Callable[[], bool] = lambda: True, ran: bool = True
) -> None:
    """End the forward that `start_forward` began: commit it or roll it back. ``undo`` rolls back other layers (see
    `remember`), and returns whether it succeeded. ``ran``: whether any of the model may have run; otherwise nothing was
    written, such as a recurrent state, and the cache is as before."""
    for ref in (state.context.reads or ()) if state.context is not None else ():
        if (read := ref()) is not None:
            read.finish(succeeded)
    if succeeded:
        state.commit(new_tokens)
    elif not all([state.abandon(new_tokens), undo()]) and ran:
        return
    state.whole = True


def remember(cache: Cache, state: CacheState, storing_no_text: Collection[int] = ()) -> Callable[[], bool]:
    """A function that restores the unpacked layers of ``cache``, and its cross-attention layers, to their present
    state. It returns whether it succeeded.

    storing_no_text: indices of layers that hold something other than text, such as an image.

    Raises `KVPassError` unless the unpacked layers hold as many tokens as the packed layers, with the state ``state``,
    have seen.
    """
    own = {index: layer for index, layer in enumerate(cache_layers(cache)) if not isinstance(layer, PackedLayer)}
    with_text = [layer for index, layer in own.items() if index not in storing_no_text]
    _refuse_other_lengths(with_text, state.seen, cross_layers(cache))
    others = list(own.values())
    kept = [dict(vars(layer)) for layer in others]
    cross = [(layer, layer.tokens) for layer in cross_layers(cache) if isinstance(layer, CrossLayer)]
    updated = dict(cache.is_updated) if isinstance(cache, EncoderDecoderCache) else {}

    def undo() -> bool:
        for layer, attributes in zip(others, kept, strict=True):
            layer.__dict__ = attributes
        restored = [layer.take_back(tokens) for layer, tokens in cross]
        if isinstance(cache, EncoderDecoderCache):
            cache.is_updated = updated
        return all(restored) and all(type(layer) in _REPLACED for layer in others)

    return undo


def _refuse_other_lengths(layers: list, seen: int, cross: list) -> None:
    for layer in layers:
        own = type(layer) in _REPLACED and layer.is_initialized and layer not in cross
        if own and layer.get_seq_length() != seen:
            raise KVPassError(
                f"This cache is inconsistent: an unpacked layer holds {layer.get_seq_length()} tokens, the packed "
                f"layers {seen}. An operation on all layers failed or was interrupted. Pass a fresh cache, or call "
                "cache.reset()."
            )

"""One forward over a cache, all or nothing: if it fails, the cache is rolled back or marked inconsistent."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, EncoderDecoderCache

from ..cache.context import ForwardContext
from ..cache.layer import PackedLayer
from ..cache.swap import cache_layers, cross_layers, packed_layers
from ..errors import KVPassError
from ..layout.window import LENGTH_OFFSET, SEEN_OFFSET, carry

_REPLACED = DynamicLayer, DynamicSlidingWindowLayer
"""Layers whose tensors are replaced by others when tokens are added, never written."""


def start_forward(layers: list[PackedLayer], batch: int, new_tokens: int) -> int:
    """Prepare all packed layers of a cache for one forward; returns the tokens already stored.

    batch, new_tokens: what the caller hands to the model. The model may hand other sizes to its layers, for instance
    with image tokens in front of the text; `_expect` then prepares them again.

    Raises `KVPassError` if the cache is full, inconsistent, or of another batch size; nothing is changed then, nor when
    there is no memory for more tokens.
    """
    first = layers[0]
    stored = first.tokens
    for layer in layers:
        layer.refuse_unless_whole()
    if len({(layer.tokens, layer.seen, layer.edits, layer.crops) for layer in layers}) > 1:
        raise KVPassError(
            "The layers of this cache are inconsistent: reordering, selecting, cropping or resetting it failed or was "
            "interrupted. Pass a fresh cache, or call cache.reset()."
        )
    _refuse_what_does_not_fit(first, batch, new_tokens)
    for layer in layers:
        layer.whole = False
    try:
        _prepare(layers, batch, stored, new_tokens)
    except BaseException:
        if not stored:
            _forget(layers)
        finish_forward(layers, 0, succeeded=False)
        raise
    return stored


def _refuse_what_does_not_fit(first: PackedLayer, batch: int, new_tokens: int) -> None:
    stored, capacity = first.tokens, first.max_cache_len
    if capacity is not None and first.plan.key.retention.stored(stored + new_tokens) > capacity:
        raise KVPassError(
            f"The cache is full: {stored} tokens are stored and {new_tokens} more exceed max_cache_len={capacity}."
        )
    if stored and first.batch != batch:
        raise KVPassError(f"The cache holds a batch of {first.batch}, but this call has a batch of {batch}.")


@torch.compiler.disable  # where a step runs in pieces, layers call it between them
def _expect(layers: list[PackedLayer], batch: int, new_tokens: int) -> None:
    """Prepare ``layers`` for what the model hands to the first of them in a forward that has begun."""
    first = layers[0]
    if any(layer.updated for layer in layers):
        raise KVPassError(
            f"The model stores {first.context.new_tokens} tokens in some cache layers and {new_tokens} in others. All "
            "layers of a packed cache have the same length. Call kvpass.remove(model); this model is not supported."
        )
    _refuse_what_does_not_fit(first, batch, new_tokens)
    _make_room(layers, batch, new_tokens, first.context)


def check_all_updated(layers: list[PackedLayer]) -> None:
    """Raise `KVPassError` if a forward has stored tokens in some ``layers`` and none in others."""
    missing = [layer.geometry.index for layer in layers if not layer.updated]
    if 0 < len(missing) < len(layers):
        raise KVPassError(
            f"The model stored nothing in cache layers {', '.join(map(str, missing))} in this forward, but it did in "
            "the others. All layers of a packed cache have the same length. Call kvpass.remove(model); this use of "
            "the model is not supported."
        )


def _forget(layers: list[PackedLayer]) -> None:
    for layer in layers:
        layer.forget()


def _prepare(layers: list[PackedLayer], batch: int, stored: int, new_tokens: int) -> None:
    first = layers[0]
    context = ForwardContext(_varying(carry(stored, first.geometry.device), stored))
    context.expect = partial(_expect, layers)
    if first.evicts:
        context.seen_length = _varying(carry(first.seen, offset=SEEN_OFFSET), stored)
    _make_room(layers, batch, new_tokens, context)


def _make_room(layers: list[PackedLayer], batch: int, new_tokens: int, context: ForwardContext) -> None:
    if any(layer.batch != batch for layer in layers):  # a reset cache may be used at another batch size
        _forget(layers)
    first = layers[0]
    context.arriving = torch.empty(new_tokens, 0)
    if new_tokens > 1:
        torch._dynamo.maybe_mark_dynamic(context.arriving, 0)
    context.edges = _edges(layers, batch, first.tokens, new_tokens)
    for heads, budget in {(layer.deciding_heads, layer.plan.key.retention.budget) for layer in layers if layer.evicts}:
        context.slots[heads] = torch.zeros(batch, heads, budget, dtype=torch.int64, device=first.geometry.device)
    for layer in layers:
        layer.prepare(batch, new_tokens, context)
    if first.pool is not None:
        first.pool.refresh()


def _varying(carrier: Tensor, stored: int) -> Tensor:
    if stored > 1:  # 0 and 1 are cases of their own, and what is traced there may say so
        torch._dynamo.mark_dynamic(carrier, 0)
    return carrier


def carrier_of(length: Tensor, n: int) -> Tensor:
    """The carrier of length ``n``, which is what ``length`` holds."""
    return _varying(length.expand(n + LENGTH_OFFSET), n)


def _edges(layers: list[PackedLayer], batch: int, stored: int, new_tokens: int) -> tuple[Tensor, Tensor] | None:
    """Room for one layer's reconstruction of the keys and values that leave the window in this forward."""
    plan, geometry = layers[-1].plan, layers[-1].geometry
    if not any(layer.plan.looks_at_previous for layer in layers):
        return None
    retention, total = plan.key.retention, stored + new_tokens
    tokens = max(retention.page_size, retention.packed(total) - retention.packed(stored))
    if gone := retention.evicted(total):
        tokens = retention.packed(total) - gone  # all that is packed may change hands
    shape = (batch, geometry.num_key_value_heads, tokens, geometry.head_dim)
    keys, values = (torch.empty(shape, dtype=geometry.dtype, device=geometry.device) for _ in range(2))
    if new_tokens > 1 or plan.evicts:
        for edge in (keys, values):
            torch._dynamo.mark_dynamic(edge, 2)
    return keys, values


def finish_forward(
    layers: list[PackedLayer], new_tokens: int, succeeded: bool, undo: Callable[[], bool] = lambda: True
) -> None:
    """End the forward `start_forward` began. ``undo`` takes back what it did to others (see `remember`), and returns
    whether it could."""
    if succeeded:
        for layer in layers:
            layer.commit(new_tokens)
        if layers[0].pool is not None:
            layers[0].pool.refresh()
    elif not all([layer.abandon(new_tokens) for layer in layers] + [undo()]):
        return
    for layer in layers:
        layer.whole = True


def remember(cache: Cache, storing_no_text: Collection[int] = ()) -> Callable[[], bool]:
    """What puts the layers of ``cache`` that are not packed, and those of cross-attention, back to where they are now;
    returns whether it could. Raises `KVPassError` if those that are not packed hold other tokens than those that are.

    storing_no_text: indices of layers that hold something else, such as an image.
    """
    own = {index: layer for index, layer in enumerate(cache_layers(cache)) if not isinstance(layer, PackedLayer)}
    _refuse_other_lengths(cache, [layer for index, layer in own.items() if index not in storing_no_text])
    others = list(own.values())
    kept = [dict(vars(layer)) for layer in others]
    unwritten = [layer for layer in cross_layers(cache) if isinstance(layer, PackedLayer) and not layer.tokens]
    updated = dict(cache.is_updated) if isinstance(cache, EncoderDecoderCache) else {}

    def undo() -> bool:
        for layer, attributes in zip(others, kept, strict=True):
            layer.__dict__ = attributes
        for layer in unwritten:
            layer.reset()
        if isinstance(cache, EncoderDecoderCache):
            cache.is_updated = updated
        return all(type(layer) in _REPLACED for layer in others)

    return undo


def _refuse_other_lengths(cache: Cache, others: list) -> None:
    seen, cross = packed_layers(cache)[0].seen, cross_layers(cache)
    for layer in others:
        own = type(layer) in _REPLACED and layer.is_initialized and layer not in cross
        if own and layer.get_seq_length() != seen:
            raise KVPassError(
                f"This cache is inconsistent: an unpacked layer holds {layer.get_seq_length()} tokens, the packed "
                f"layers {seen}. An operation on all layers failed or was interrupted. Pass a fresh cache, or call "
                "cache.reset()."
            )

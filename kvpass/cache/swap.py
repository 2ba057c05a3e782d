"""Install packed layers in a transformers cache: `PackedLayer` for full attention, `CrossLayer` for cross-attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    EncoderDecoderCache,
)

from ..errors import KVPassError
from ..schemes import LayerGeometry, LayerPlan
from .adaptive_state import PlanePool
from .cache_state import CacheState
from .cross import CrossLayer
from .kinds import layer_class, replaced_by
from .layer import PackedLayer
from .per_cache import Importance, RotaryState
from .sliding import SlidingLayer
from .state import KVState, ModelTensors, SharedTensors
from .stateful import StatefulLayer, states_of

Plans = dict[int, tuple[LayerPlan, LayerGeometry]]


def cache_layers(cache: Cache) -> list[Any]:
    """All layers of a cache, in model order. With an encoder, self-attention comes before cross-attention."""
    return [layer for part in parts_of(cache) for layer in part.layers]


def parts_of(cache: Cache) -> list[Cache]:
    """The cache of self-attention, and that of cross-attention if the model has an encoder."""
    if isinstance(cache, EncoderDecoderCache):
        return [cache.self_attention_cache, cache.cross_attention_cache]
    return [cache]


def packed_layers(cache: Cache) -> list[PackedLayer]:
    """The packed self-attention layers of a cache, in model order."""
    return [layer for layer in cache_layers(cache) if isinstance(layer, PackedLayer) and not layer.is_cross]


def state_of(cache: Cache) -> CacheState | None:
    """The state of the packed self-attention layers of a cache; None if it has none. Raises `KVPassError` if these are
    not exactly the layers made for one cache."""
    layers = packed_layers(cache)
    state = next((layer.cache for layer in layers), None)
    if state is not None and state.layers != layers:
        raise KVPassError(
            "The packed layers of this cache are not those it was made with: layers are missing or come from another "
            "cache. Pass a fresh cache; to copy one, call copy.deepcopy(cache)."
        )
    return state


def cross_layers(cache: Cache) -> list[Any]:
    """The cross-attention layers of a cache. Those that are not packed are known only if the model has an encoder."""
    if isinstance(cache, EncoderDecoderCache):
        return list(cache.cross_attention_cache.layers)
    return [layer for layer in cache.layers if isinstance(layer, CrossLayer)]


def layers_of(cache: object) -> Callable[[], None]:
    """A function that restores the present layers of ``cache``."""
    parts = parts_of(cache) if isinstance(cache, Cache) else []
    before = [(part, list(part.layers), part.layer_class_to_replicate) for part in parts]

    def put_back() -> None:
        for part, layers, replicated in before:
            part.layers[:], part.layer_class_to_replicate = layers, replicated

    return put_back


def _fresh_layers(cache: Cache, plans: Plans) -> list[Any]:
    """The layers of ``cache``. Raises `KVPassError` unless the planned layers are plain and empty."""
    if getattr(cache, "offloading", False):
        raise KVPassError("Offloaded caches are not supported: pass a plain DynamicCache or StaticCache.")
    layers: list[Any] = list(cache.layers)
    while cache.layer_class_to_replicate is not None and len(layers) <= max(plans, default=-1):
        layers.append(cache.layer_class_to_replicate())
    for index, (_, geometry) in plans.items():
        old = layers[index] if index < len(layers) else None
        kinds = replaced_by(geometry)
        if type(old) not in kinds:
            found, planned = "missing" if old is None else type(old).__name__, kinds[0].__name__
            raise KVPassError(
                f"Layer {index} of the cache is {found}, but kvpass planned for {planned}: pass a fresh "
                "DynamicCache(config=model.config), or no cache. assistant_early_exit is not supported: use "
                "assistant_model."
            )
        if (old.is_initialized and int(old.get_seq_length())) or _has_state(old):
            raise KVPassError(
                f"The cache already holds {int(old.get_seq_length())} full-precision tokens. kvpass packs a cache from "
                "its first token on: pass a fresh cache, or run the prompt again. Prefix tuning, which pre-fills "
                "caches, is not supported."
            )
    return layers


def _has_state(layer: Any) -> bool:
    return any(state is not None for _, states in states_of(layer) for state in states.values())


def swap_cross_layers(cache: Cache, plans: Plans, owner: str, lowering: str) -> None:
    """Replace the planned cross-attention layers of a fresh cache in place. Raises the errors of `swap_layers`."""
    part = parts_of(cache)[-1]
    layers = _fresh_layers(part, plans)
    state = CacheState(owner, lowering, _capacity(layers, plans))
    for index, (plan, geometry) in plans.items():
        layers[index] = CrossLayer(plan, geometry, state)
    part.layers[:] = layers
    part.layer_class_to_replicate = None


def swap_layers(
    cache: Cache,
    plans: Plans,
    owner: str,
    lowering: str,
    max_cache_len: int | None,
    predictors: dict[int, tuple[SharedTensors, SharedTensors]],
) -> CacheState:
    """Replace the planned layers of a fresh ``cache`` in place; the cache object stays the same. Returns the state of
    the new layers.

    Raises `KVPassError`, and leaves the cache unchanged, if it is offloaded, already holds tokens, or does not have the
    plain layers that ``plans`` were made for.
    """
    layers = _fresh_layers(cache, plans)
    state = CacheState(owner, lowering, _capacity(layers, plans, max_cache_len))
    for index, layer in new_layers(state, plans, predictors).items():
        if isinstance(layer, (SlidingLayer, StatefulLayer)):
            layer.record_past = getattr(layers[index], "record_past", False)
        layers[index] = layer
    cache.layers[:] = layers
    cache.layer_class_to_replicate = None
    return state


def _capacity(layers: list[Any], plans: Plans, default: int | None = None) -> int | None:
    """The number of tokens that all planned ``layers`` can store; None if there is no limit."""
    windows = {index: geometry.window for index, (_, geometry) in plans.items() if geometry.window is not None}
    each: list[int | None] = [default]
    for index in plans:
        most = getattr(layers[index], "max_cache_len", None)
        each.append(None if most == windows.get(index) else most)  # a static layer may be as long as its window
    return min((capacity for capacity in each if capacity is not None), default=None)


def new_layers(
    state: CacheState, plans: Plans, predictors: dict[int, tuple[SharedTensors, SharedTensors]]
) -> dict[int, PackedLayer]:
    """Empty layers of the cache with the new ``state``, by index, with references to each other: to layers whose
    quantized values they use, that decide what is evicted, or that they are predicted from."""
    layers = {index: layer_class(geometry)(plan, geometry, state) for index, (plan, geometry) in plans.items()}
    state.slides = any(isinstance(layer, SlidingLayer) for layer in layers.values())
    rotary_owners: dict[Any, PackedLayer] = {}
    evicting = [layer for layer in layers.values() if layer.plan.evicts]
    if any(layer.plan.adaptive for layer in layers.values()):
        state.pool = PlanePool()
    for index, layer in layers.items():
        plan = layer.plan
        layer.key_source = None if plan.key_source is None else layers[plan.key_source]
        layer.value_source = None if plan.value_source is None else layers[plan.value_source]
        if plan.looks_at_previous or plan.calibrated or plan.shares_out:
            layer.predictors = predictors[index]
        if plan.key.transform.keeps_tables:  # page-relative RoPE has rows for pages, so retention matters too
            by_page = plan.key.transform.page_rope or layer.geometry.window is not None
            same = by_page and plan.key.retention
            angles = None if layer.angles is None else (plan.key.transform.numbered, *layer.angles.tolist())
            layer.rotary_owner = rotary_owners.setdefault((same, angles), layer)
        layer.importance_owner = evicting[0] if plan.key.retention.shared else layer
        if plan.looks_at_previous:
            layer.previous_layer = layers[layer.geometry.previous_layer]
            layer.previous_layer.predicts_next = True
    return layers


def nbytes(cache: Cache) -> int:
    """Bytes of every tensor reachable from ``cache``: quantized values, scales, zero points, windows, sinks,
    compensation matrices and slack, and layers in full precision. Storage shared by several tensors counts once.
    Calibrated tensors that all caches of a model share (`kvpass.codec.shares`) count towards the model, not here."""
    storages, seen, stack = {}, set(), [cache]
    of_model: set[int] = set()
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            storages[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, ModelTensors):
            of_model.update(tensor.untyped_storage().data_ptr() for tensor in item)
        elif isinstance(item, (list, tuple)):
            stack.extend(item)
        elif isinstance(item, (Cache, CacheLayerMixin, KVState, RotaryState, Importance)):
            stack.extend(vars(item).values())
    return sum(size for place, size in storages.items() if place not in of_model)


def num_values(cache: Cache) -> int:
    """Number of key and value elements of all tokens that the cache has seen, evicted ones included. Keys of indexers
    count. A layer with a sliding window counts with the tokens in its window."""
    total = 0
    for layer in cache_layers(cache):
        if isinstance(layer, PackedLayer):
            for state in layer.states():
                seen = layer.seen if layer.geometry.window is None else min(layer.seen, layer.geometry.window - 1)
                total += state.ring.shape[0] * state.ring.shape[1] * state.ring.shape[3] * seen
        elif getattr(layer, "is_initialized", False) and isinstance(getattr(layer, "keys", None), Tensor):
            total += layer.keys.numel() + layer.values.numel()
        if isinstance(indexer_keys := getattr(layer, "indexer_keys", None), Tensor):
            total += indexer_keys.numel()
    return total


def bits_per_value(cache: Cache) -> float:
    """`nbytes` in bits, divided by the number of key and value elements of all tokens seen, evicted ones included.
    Raises `KVPassError` for an empty cache."""
    values = num_values(cache)
    if not values:
        raise KVPassError("The cache is empty: run the model first.")
    return 8 * nbytes(cache) / values

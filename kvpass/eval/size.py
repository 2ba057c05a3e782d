"""The size of a cache of any length, computed from shapes: nothing of that size is allocated."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from .. import schemes
from ..cache.indexed import IndexedLayer
from ..cache.layer import PackedLayer
from ..cache.sliding import SlidingLayer, plans_of
from ..cache.state import SharedTensors
from ..cache.swap import Plans, swap_layers
from ..errors import KVPassError
from ..models.encoded import has_encoder
from ..models.probe import fresh_cache, probe_cache
from ..schemes import CalibratedWaterfillConfig, LayerGeometry, SchemeConfig
from ..schemes.calibrated import Calibration

Scheme = str | dict[str, Any] | SchemeConfig | Calibration | None
"""What `kvpass.apply` takes as ``scheme``; None is full precision."""


class DependsOnTextError(KVPassError):
    """The storage of this scheme has no fixed size, because it depends on what the model reads."""


@dataclass(frozen=True)
class Footprint:
    """nbytes: bytes of everything a cache keeps; values: number of K and V values of the tokens seen."""

    nbytes: int
    values: int

    @property
    def bits_per_value(self) -> float:
        """Everything the cache keeps, in bits per K or V value."""
        return 8 * self.nbytes / self.values


def footprint(model: nn.Module, scheme: Scheme, tokens: int) -> Footprint:
    """The size of a cache of ``model`` after a prompt of ``tokens`` tokens, at batch size 1.

    scheme: as in `kvpass.apply`; None is full precision.

    The result is exact: the cache is laid out on PyTorch's meta device. Tensors that a calibration shares among all
    caches of the model are not counted (`kvpass.codec.shares`). While decoding, storage grows by four pages or 3 % at a
    time, so a cache that grew token by token may hold that much more.

    Raises `DependsOnTextError` for schemes whose storage depends on the text (QAQ). Raises `KVPassError` for
    encoder-decoders, less than one token, and schemes that need a calibration but come without one.
    """
    return _footprints(model, scheme, [tokens])[0]


def bits_at(model: nn.Module, scheme: Scheme, lengths: Sequence[int]) -> dict[int, float | None]:
    """Bits per value at each length, from `footprint`; None if they depend on the text."""
    try:
        sizes = _footprints(model, scheme, lengths)
    except DependsOnTextError:
        return dict.fromkeys(lengths)
    return {tokens: size.bits_per_value for tokens, size in zip(lengths, sizes, strict=True)}


def _footprints(model: nn.Module, scheme: Scheme, lengths: Sequence[int]) -> list[Footprint]:
    if has_encoder(model):
        raise KVPassError("An encoder-decoder's cache has two lengths: fill one and call kvpass.bits_per_value.")
    if min(lengths) < 1:
        raise KVPassError(f"A cache of {min(lengths)} tokens holds no values: use lengths of at least 1.")
    filled, layers = probe_cache(model)
    fixed, predictors, plans = 0, {}, {}
    if isinstance(scheme, Calibration):
        of_model = isinstance(scheme.scheme, CalibratedWaterfillConfig)  # shared by all caches: counted with the model
        fixed, plans = 0 if of_model else scheme.nbytes, _plans(scheme.scheme, layers)
        predictors = {i: (SharedTensors(key), SharedTensors(value)) for i, (key, value) in scheme.predictors.items()}
    elif scheme is not None:
        config = schemes.get(scheme)
        if config.needs_calibration:
            raise KVPassError(f"{config.name!r} must be calibrated on the model first: call kvpass.calibrate.")
        plans = _plans(config, layers)
    found = []
    for tokens in lengths:
        empty = fresh_cache(model)
        state = swap_layers(empty, plans, owner="", lowering="reference", max_cache_len=None, predictors=predictors)
        state.allocate(1, tokens)
        sizes = [_fill(layer, old, tokens) for layer, old in zip(_as_many(empty, filled), filled.layers, strict=True)]
        found.append(Footprint(sum(size.nbytes for size in sizes) + fixed, sum(size.values for size in sizes)))
    return found


def _plans(config: SchemeConfig, layers: dict[int, LayerGeometry | str]) -> Plans:
    packed = {
        i: replace(layer, device=torch.device("meta")) for i, layer in layers.items() if not isinstance(layer, str)
    }
    plans, _ = plans_of(config, packed)
    if any(plan.adaptive for plan, _ in plans.values()):
        raise DependsOnTextError(
            f"What {config.name!r} keeps depends on the text: measure its bits at a length instead, with "
            "kvpass.bits_per_value."
        )
    return plans


def _as_many(empty: Cache, filled: Cache) -> list[Any]:
    """All layers of ``empty``, including those that it creates lazily."""
    missing = len(filled.layers) - len(empty.layers)
    return [*empty.layers, *(type(layer)() for layer in filled.layers[len(filled.layers) - missing :])]


def _fill(layer: Any, filled: Any, tokens: int) -> Footprint:
    """The size of ``layer`` after a prompt: it has room for one if it is packed, and is empty otherwise. ``filled`` is
    the same layer of a cache in use."""
    if isinstance(layer, PackedLayer):
        if isinstance(layer, SlidingLayer):
            layer.free(tokens)
            tokens = min(tokens, layer.window - 1)
        if isinstance(layer, IndexedLayer):
            layer.fill_beside(_indexed(filled, tokens))
        return Footprint(layer.nbytes, layer.geometry.values_per_token * tokens)
    keys, values = getattr(filled, "keys", None), getattr(filled, "values", None)
    if not isinstance(keys, Tensor) or not isinstance(values, Tensor) or not keys.numel():
        return Footprint(0, 0)
    layer.update(*(x.new_empty((1, x.shape[1], tokens, x.shape[3]), device="meta") for x in (keys, values)))
    held = layer.keys, layer.values, *_indexed(filled, tokens).values()
    # keys and values in a sliding window: views of the whole prompt, until the next step
    return Footprint(sum(x.nbytes for x in held), sum(x.numel() for x in held))


def _indexed(filled: Any, tokens: int) -> dict[str, Tensor]:
    """The keys of the indexer of the layer ``filled``, for a prompt of ``tokens`` tokens; nothing if it has none."""
    keys = getattr(filled, "indexer_keys", None)
    return {} if keys is None else {"indexer_keys": keys.new_empty((1, tokens, keys.shape[-1]), device="meta")}

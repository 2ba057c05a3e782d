"""Bytes of a cache of any length, from the shapes it would have: nothing of that size is allocated."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from .. import schemes
from ..cache.layer import PackedLayer
from ..cache.state import SharedTensors
from ..cache.swap import Plans, swap_layers
from ..errors import KVPassError
from ..models.encoded import has_encoder
from ..models.probe import fresh_cache, probe_cache
from ..schemes import CalibratedWaterfillConfig, LayerGeometry, SchemeConfig
from ..schemes.calibrated import Calibration

Scheme = str | dict[str, Any] | SchemeConfig | Calibration | None
"""What `kvpass.apply` takes, and None for full precision."""


class DependsOnTextError(KVPassError):
    """A scheme whose storage has no size of its own: it depends on what the model reads."""


@dataclass(frozen=True)
class Footprint:
    """nbytes: bytes of everything a cache keeps; values: the K and V values of the tokens seen."""

    nbytes: int
    values: int

    @property
    def bits_per_value(self) -> float:
        """All bytes kept, in bits, over the K and V values."""
        return 8 * self.nbytes / self.values


def footprint(model: nn.Module, scheme: Scheme, tokens: int) -> Footprint:
    """What a cache of ``model`` takes behind a prompt of ``tokens`` tokens, batch 1, with `kvpass.apply`'s ``scheme``
    or, for None, in full precision, without what a calibration gave the model for all its caches
    (`kvpass.codec.shares`). Exact: the cache is laid out on PyTorch's meta device. While decoding,
    pages are allocated four, or 3 %, at a time: a cache that grew token by token may have that much more.

    Raises `DependsOnTextError` for schemes whose storage depends on the text (QAQ), and `KVPassError` for
    encoder-decoders, less than one token, and schemes that need calibration and have none.
    """
    return _footprints(model, scheme, [tokens])[0]


def bits_at(model: nn.Module, scheme: Scheme, lengths: Sequence[int]) -> dict[int, float | None]:
    """Bits a value at each length, by `footprint`; None where they depend on the text."""
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
        of_model = isinstance(scheme.scheme, CalibratedWaterfillConfig)  # no cache's: counted with the model
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
    plans = {i: (config.plan_of(layer), layer) for i, layer in packed.items()}
    if any(plan.adaptive for plan, _ in plans.values()):
        raise DependsOnTextError(
            f"What {config.name!r} keeps depends on the text: measure its bits at a length instead, with "
            "kvpass.bits_per_value."
        )
    return plans


def _as_many(empty: Cache, filled: Cache) -> list[Any]:
    """The layers of ``empty``, those not made yet included."""
    missing = len(filled.layers) - len(empty.layers)
    return [*empty.layers, *(type(layer)() for layer in filled.layers[len(filled.layers) - missing :])]


def _fill(layer: Any, filled: Any, tokens: int) -> Footprint:
    """The size of ``layer`` after a prompt: it has room for one if it is packed, and is empty otherwise. ``filled`` is
    the same layer of a cache in use."""
    if isinstance(layer, PackedLayer):
        heads, head_dim = layer.geometry.num_key_value_heads, layer.geometry.head_dim
        return Footprint(layer.nbytes, 2 * heads * head_dim * tokens)
    keys, values = getattr(filled, "keys", None), getattr(filled, "values", None)
    if not isinstance(keys, Tensor) or not isinstance(values, Tensor) or not keys.numel():
        return Footprint(0, 0)
    layer.update(*(x.new_empty((1, x.shape[1], tokens, x.shape[3]), device="meta") for x in (keys, values)))
    held = (layer.keys, layer.values)  # in a sliding window views of the whole prompt, until the next step
    return Footprint(sum(x.nbytes for x in held), sum(x.numel() for x in held))

"""A first look at a model: what its cache layers hold, and what stands in the way of capturing it."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from ..errors import KVPassError
from ..schemes import LayerGeometry, geometries
from .arguments import CACHE, handing, takes_cache

_SLIDING = "It is bounded already; where texts fit the window, sliding_window=None in the config packs the same results"


def probe(model: nn.Module) -> dict[int, LayerGeometry | str]:
    """What each cache layer of ``model`` holds: its geometry, or the reason it is not packed. Runs two tokens. Layers
    of cross-attention come behind those of self-attention.

    Raises `KVPassError` if the model has no attention over a transformers cache.
    """
    return probe_cache(model)[1]


def probe_cache(model: nn.Module) -> tuple[Cache, dict[int, LayerGeometry | str]]:
    """The cache that two tokens through ``model`` fill, and what `probe` says of its layers."""
    config, kind = getattr(model, "config", None), type(model).__name__
    if config is None or not takes_cache(model):
        raise KVPassError(
            f"No attention over a KV cache found in {kind}: kvpass needs a transformers decoder whose forward takes "
            f"{CACHE}, or example_inputs for another kind of decoder. If this is a wrapper, apply to the model inside."
        )
    _refuse_offloaded(model)
    try:
        cache = fresh_cache(model)
        with torch.no_grad():
            model(**some_tokens(model), **handing(model, cache), use_cache=True)
    except Exception as error:
        other = "" if isinstance(model, PreTrainedModel) else ". Another kind of decoder is packed with example_inputs"
        raise KVPassError(f"Two tokens through {kind} with a growing cache failed: {error}{other}") from error
    layers = _geometries(cache)
    if not any(isinstance(layer, LayerGeometry) and not layer.cross for layer in layers.values()):
        reasons = sorted({layer for layer in layers.values() if isinstance(layer, str)})
        why = "; ".join(reasons) or "its cache stayed empty"
        raise KVPassError(f"No attention that can be packed found in {kind}: {why}.")
    return cache, layers


class AttentionSeen(TorchFunctionMode):
    """Within it, ``seen`` fills with calls of SDPA: channels of a head -> query heads, and the scale of products."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, tuple[int, float]] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            query, scale = args[0] if args else kwargs["query"], kwargs.get("scale")
            self.seen.setdefault(query.shape[-1], (query.shape[1], query.shape[-1] ** -0.5 if scale is None else scale))
        return func(*args, **kwargs)


def _refuse_offloaded(model: nn.Module) -> None:
    if any(parameter.is_meta for parameter in model.parameters()):
        raise KVPassError(
            f"Weights of {type(model).__name__} are not on a device (offloaded by accelerate, or on meta): load the "
            "model without offloading. A packed cache leaves it more room."
        )


def has_encoder(model: nn.Module) -> bool:
    """Whether ``model`` is an encoder-decoder: its own arguments are called ``decoder_*``."""
    return getattr(getattr(model, "config", None), "is_encoder_decoder", False)


def fresh_cache(model: nn.Module) -> Cache:
    """An empty growing cache of the kind ``model`` makes itself."""
    config: Any = model.config
    if has_encoder(model):
        return EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
    return DynamicCache(config=config)


def some_tokens(model: nn.Module, batch: int = 1, count: int = 2) -> dict[str, Any]:
    """Inputs of ``count`` tokens for ``model``, the first two of its vocabulary in turn; an encoder has run already,
    whatever its own inputs are."""
    device = next(model.parameters()).device
    ids = torch.arange(count, device=device).remainder(2).expand(batch, -1)
    if not has_encoder(model):
        return dict(input_ids=ids)
    seq2seq: Any = model
    size = seq2seq.config.get_text_config(encoder=True).hidden_size
    hidden = torch.zeros(batch, 2, size, dtype=seq2seq.dtype, device=device)
    return dict(decoder_input_ids=ids, encoder_outputs=BaseModelOutput(last_hidden_state=hidden))


def _geometries(cache: Cache) -> dict[int, LayerGeometry | str]:
    """What `probe` found in each layer of ``cache``."""
    if isinstance(cache, EncoderDecoderCache):
        own, cross = (_geometries(part) for part in (cache.self_attention_cache, cache.cross_attention_cache))
        for index, layer in cross.items():
            reason = f"cross-attention: {layer}"
            own[len(cross) + index] = replace(layer, cross=True) if isinstance(layer, LayerGeometry) else reason
        return own
    return geometries([_keys(layer) for layer in cache.layers])


def _keys(layer: object) -> Tensor | str:
    """What a cache layer keeps as keys, or why it is not packed."""
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if type(layer) is not DynamicLayer:
        bounded = f". {_SLIDING}" if getattr(layer, "is_sliding", False) else ""
        return f"{type(layer).__name__}: not full attention over a growing cache, stays as it is{bounded}"
    if not isinstance(keys, Tensor) or keys.ndim != 4 or not keys.numel():
        return "the layer stored no keys: it has no attention, or reads what another layer stored"
    if keys.shape != values.shape:
        shapes = f"keys {tuple(keys.shape)} and values {tuple(values.shape)} differ in shape"
        return f"{shapes}: latent attention (MLA) is small as it is, and is not supported"
    return keys


def refuse_hooked(model: nn.Module, what: str, instead: str) -> None:
    """Raise `KVPassError` if accelerate runs Python around the layers of ``model``: for ``what``, and what to do
    instead."""
    _refuse_offloaded(model)
    hooked = [name for name, module in model.named_modules() if name and hasattr(module, "_hf_hook")]
    if hooked:
        raise KVPassError(
            f"accelerate has put hooks on {len(hooked)} modules ({hooked[0]}, ...), and {what}: {instead}, or load the "
            "model on one device. If it is, accelerate.hooks.remove_hook_from_module(model, recurse=True) helps."
        )

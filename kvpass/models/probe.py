"""Inspect a model: what its cache layers hold, and what prevents capturing it."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache

from ..accelerate_hooks import device_of, refuse_missing_weights
from ..cache.sliding import sliding_plan
from ..cache.swap import parts_of
from ..errors import KVPassError
from ..schemes import CalibratedWaterfillConfig, LayerGeometry, SchemeConfig, geometries
from .arguments import CACHE, CACHE_NAMES, handing, keeping, takes_cache
from .encoded import encoded, encoded_images, has_encoder
from .unpacked import StoresNoText, held_by, indexer_dim, states_kept, window_of


def probe(model: nn.Module) -> dict[int, LayerGeometry | str]:
    """For each cache layer of ``model``, its geometry or the reason why it is not packed. Runs two tokens.
    Cross-attention layers of an encoder-decoder come after those of self-attention.

    Raises `KVPassError` if the model has no attention over a transformers cache.
    """
    return probe_cache(model)[1]


def full_attention(layers: Mapping[int, LayerGeometry | str]) -> dict[int, LayerGeometry | str]:
    """``layers``, with reasons for those with a sliding window or of cross-attention, for what is only done with layers
    of full attention."""
    found = _of_own_text(layers)
    for index, layer in found.items():
        if isinstance(layer, LayerGeometry) and layer.window is not None:
            found[index] = (
                f"sliding-window attention over {layer.window} tokens: only layers of full attention take part"
            )
    return found


def _of_own_text(layers: Mapping[int, LayerGeometry | str]) -> dict[int, LayerGeometry | str]:
    """``layers``, with a reason for those of cross-attention."""
    why = StoresNoText("cross-attention: only layers of self-attention take part")
    return {i: why if isinstance(layer, LayerGeometry) and layer.cross else layer for i, layer in layers.items()}


def calibrated_layers(
    scheme: SchemeConfig, layers: Mapping[int, LayerGeometry | str]
) -> dict[int, LayerGeometry | str]:
    """``layers``, with reasons for those that a calibration of ``scheme`` leaves out: layers of cross-attention, and
    those with a sliding window, unless the scheme sets bit widths by layer and packing the window saves memory."""
    if not isinstance(scheme, CalibratedWaterfillConfig):
        return full_attention(layers)
    found = _of_own_text(layers)
    for index, layer in found.items():
        if isinstance(layer, LayerGeometry) and layer.window is not None:
            plan = sliding_plan(scheme, layer)
            found[index] = plan if isinstance(plan, str) else layer
    return found


def probe_cache(model: nn.Module) -> tuple[Cache, dict[int, LayerGeometry | str]]:
    """A cache filled with two tokens by ``model``, and the result of `probe` for its layers."""
    config, kind = getattr(model, "config", None), type(model).__name__
    if config is None or not takes_cache(model):
        raise KVPassError(
            f"No attention over a KV cache found in {kind}: kvpass needs a transformers decoder whose forward takes "
            f"{CACHE}, or example_inputs for any other "
            f"decoder.{_decoder_inside(model) or ' If this is a wrapper, apply to the model inside.'}"
        )
    refuse_missing_weights(model)
    try:
        with torch.no_grad():
            cache = _filled(model)
    except KVPassError:
        raise
    except Exception as error:
        other = (
            ""
            if isinstance(model, PreTrainedModel)
            else " For a decoder from outside transformers pass example_inputs."
        )
        raise KVPassError(
            f"{kind} failed when kvpass ran it on two tokens with an empty cache to see what its layers keep: "
            f"{str(error).rstrip('.')}.{other or _decoder_inside(model) or ' Use this model without kvpass.'}"
        ) from error
    text_config = config.get_text_config(decoder=True)
    layers = _with_images(model, _geometries(cache, text_config), text_config)
    if not _packable(layers):
        reasons = sorted({layer for layer in layers.values() if isinstance(layer, str)})
        why = "; ".join(reasons) or "its cache stayed empty"
        raise KVPassError(
            f"No packable attention found in {kind}: {why}. Unless a reason says otherwise, use this model without "
            "kvpass."
        )
    return cache, layers


class AttentionSeen(TorchFunctionMode):
    """Within this context, ``seen`` collects the calls of SDPA: head_dim -> number of query heads, and the scale of the
    scores."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, tuple[int, float]] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            query, scale = args[0] if args else kwargs["query"], kwargs.get("scale")
            self.seen.setdefault(query.shape[-1], (query.shape[1], query.shape[-1] ** -0.5 if scale is None else scale))
        return func(*args, **kwargs)


def fresh_cache(model: nn.Module) -> Cache:
    """An empty growing cache, as ``generate`` creates it for ``model``. Cross-attention layers have no window, because
    they read the whole encoder output."""
    config: Any = model.config
    cache = DynamicCache(config=config)
    if not has_encoder(model):
        return cache
    cross = DynamicCache(config=config)
    cross.layers[:] = [DynamicLayer() for _ in cross.layers]
    return EncoderDecoderCache(cache, cross)


def some_tokens(model: nn.Module, batch: int = 1, count: int = 2) -> dict[str, Any]:
    """Inputs of ``count`` tokens for ``model``, alternating the first two of its vocabulary. Encoder outputs are
    included."""
    device = device_of(model)
    ids = torch.arange(count, device=device).remainder(2).expand(batch, -1)
    if not has_encoder(model):
        return dict(input_ids=ids)
    return dict(decoder_input_ids=ids, encoder_outputs=encoded(model, batch, 2))


def as_generate_passes(
    model: nn.Module, batch: int, count: int, seen: int, *, padding: int = 0, logits: int = 1
) -> dict[str, Any]:
    """The arguments that ``generate`` passes for the last ``count`` of ``seen`` tokens.

    padding: number of padding tokens on the left of the first row.
    logits: for how many tokens logits are requested.
    """
    inputs = some_tokens(model, batch, count)
    encoded = getattr(inputs.get("encoder_outputs"), "last_hidden_state", None)
    device = device_of(model)
    mask = torch.ones(batch, seen if encoded is None else encoded.shape[1], dtype=torch.long, device=device)
    mask[0, :padding] = 0
    inputs["attention_mask"] = mask
    if encoded is None and "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)[:, -count:]
    return inputs | keeping(model, logits)


def _filled(model: nn.Module) -> Cache:
    """A cache that ``model`` has filled with two tokens. Raises `KVPassError` if the model creates a cache of its own
    class or adds layers to one, because what it does with those is unknown."""
    fresh, inputs = fresh_cache(model), some_tokens(model)
    before = _classes(fresh)
    try:
        made = _cache_in(model(**inputs, use_cache=True))
    except Exception as error:  # the model may need a cache to be passed
        made, failed = None, error
    else:
        failed = None
    if made is not None:
        _refuse_own_class(model, made)
    if made is None or _classes(made) != before:
        try:
            model(**inputs, **handing(model, fresh), use_cache=True)
        except Exception as error:
            raise failed or error from None
        made = fresh
    if (added := sum(map(len, _classes(made))) - sum(map(len, before))) > 0:
        raise KVPassError(
            f"{type(model).__name__} adds {added} layers to its cache during a forward, as a looped decoder does that "
            "keeps keys and values for each loop. kvpass packs only layers that a cache has before its first token: "
            "use this model without kvpass."
        )
    return made


def _refuse_own_class(model: nn.Module, cache: Any) -> None:
    own = [part for part in parts_of(cache) if type(part) is not DynamicCache]
    if own:
        classes = " and ".join(sorted({type(part).__name__ for part in own}))
        beside = sorted({name for part in own for name in vars(part).keys() - vars(DynamicCache()).keys()})
        kept = f", which keeps {', '.join(beside)} beside its layers" if beside else ""
        raise KVPassError(
            f"{type(model).__name__} creates its own cache class, {classes}{kept}. kvpass replaces layers, and packs "
            "only transformers' DynamicCache and StaticCache, which keep everything in layers: use this model without "
            "kvpass."
        )


def _cache_in(output: Any) -> Any:
    """The cache in the output of a forward. None if there is none, or if it is tuples of tensors, as in older
    models."""
    named = [output[name] for name in CACHE_NAMES if name in output] if isinstance(output, dict) else output
    return next((part for part in named if part is not None and not isinstance(part, (tuple, Tensor))), None)


def _decoder_inside(model: nn.Module) -> str:
    """A sentence that names the submodule of ``model`` that can be packed by itself; empty if there is none."""
    for name, module in model.named_modules():
        if not name or not isinstance(module, PreTrainedModel) or not takes_cache(module):
            continue
        try:
            with torch.no_grad():
                layers = _geometries(_filled(module), module.config.get_text_config(decoder=True))
        except Exception:  # only a candidate
            continue
        if _packable(layers):
            return f" Apply kvpass to the decoder inside: kvpass.apply(model.{name}), a {type(module).__name__}."
    return ""


def _packable(layers: dict[int, LayerGeometry | str]) -> bool:
    return any(isinstance(layer, LayerGeometry) and not layer.cross for layer in layers.values())


def _classes(cache: Cache) -> list[list[type]]:
    return [[type(layer) for layer in part.layers] for part in parts_of(cache)]


def _geometries(cache: Cache, config: PretrainedConfig) -> dict[int, LayerGeometry | str]:
    """The result of `probe` for each layer of ``cache``."""
    own, *cross = (geometries([held_by(layer, config) for layer in part.layers]) for part in parts_of(cache))
    own = _with_windows(own, parts_of(cache)[0].layers)
    for layers in cross:
        for index, layer in layers.items():
            reason = f"cross-attention: {layer}"
            own[len(layers) + index] = replace(layer, cross=True) if isinstance(layer, LayerGeometry) else reason
    return own


def _with_images(
    model: nn.Module, layers: dict[int, LayerGeometry | str], config: PretrainedConfig
) -> dict[int, LayerGeometry | str]:
    """``layers``, with the geometry of those that store nothing of a text but the encoder's output for an image."""
    images = encoded_images(model, tokens=3)
    if not images or not any(isinstance(layer, StoresNoText) for layer in layers.values()):
        return layers
    cache, found = fresh_cache(model), dict(layers)
    try:
        with torch.no_grad():
            model(**some_tokens(model), **images, **handing(model, cache), use_cache=True)
    except Exception:  # the argument means something else here
        return layers
    for index, held in geometries([held_by(layer, config) for layer in cache.layers]).items():
        if isinstance(layers[index], StoresNoText) and isinstance(held, LayerGeometry):
            found[index] = replace(held, cross=True, previous_layer=None)
    return found


def _with_windows(layers: dict[int, LayerGeometry | str], of_cache: Sequence[Any]) -> dict[int, LayerGeometry | str]:
    """``layers`` with the sliding window, the states and the indexer of each cache layer. No layer is predicted from
    one with a window."""
    found, previous = dict(layers), None
    for index, layer in layers.items():
        if isinstance(layer, LayerGeometry):
            one, window = of_cache[index], window_of(of_cache[index])
            found[index] = replace(
                layer, window=window, states=states_kept(one), indexer_dim=indexer_dim(one), previous_layer=previous
            )
            previous = index if window is None else previous
    return found

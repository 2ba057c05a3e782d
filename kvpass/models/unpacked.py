"""Say what a cache layer holds, or why it stays in full precision, from its class and the tensors it keeps. No other
file knows the cache layers of transformers that are not packed."""

from typing import Any

from torch import Tensor
from transformers import PretrainedConfig, cache_utils
from transformers.cache_utils import DynamicLayer

from ..schemes.geometry import Held, unequal

_NOTHING = "keeps nothing: this layer has no attention, or attends to what another layer stores"
_LINEAR = "keeps a recurrent or convolution state of fixed size and no KV cache, so there is nothing to pack"
_WITH_STATE = "LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer"
_KNOWN = {"DummyLayer": _NOTHING, "LinearAttentionLayer": _LINEAR}
"""Names of layer classes of `transformers.cache_utils`; older versions lack some."""


class StoresNoText(str):
    """The reason for a layer that does not store one entry per token, so that its length says nothing about the tokens
    read."""


_NO_TEXT = StoresNoText(
    "it stored nothing for two tokens of text: it has no attention, reads what another layer stores, or attends to "
    "images or sound only. Whatever it keeps stays in full precision"
)


def held_by(layer: object, config: PretrainedConfig) -> Held | str:
    """The keys and values of a filled cache layer, or why it cannot be packed. ``config`` is the decoder's."""
    kind = type(layer)
    if kind is DynamicLayer:
        return _of_full_attention(layer, config)
    if kind is cache_utils.DynamicSlidingWindowLayer or states_kept(layer) or indexer_dim(layer) is not None:
        return _of_full_attention(layer, config)
    if _is_of_transformers(layer) and kind.__name__ in _KNOWN:
        return f"{kind.__name__}: {_KNOWN[kind.__name__]}"
    names = ", ".join(_names(layer)) or "no tensors yet"
    return (
        f"{kind.__name__}: a cache layer class of the model's own, which keeps {names}. kvpass packs only "
        "transformers' DynamicLayer, so it stays in full precision"
    )


def _of_full_attention(layer: Any, config: PretrainedConfig) -> Held | str:
    keys, values = layer.keys, layer.values
    if not isinstance(keys, Tensor) or keys.ndim != 4 or not keys.numel():
        return _NO_TEXT
    if why := unequal(keys, values):
        return f"{why}. It stays in full precision"
    shared = keys.shape[1] == values.shape[1] == 1
    return Held(keys, values, shared and keys.shape[-1] == getattr(config, "kv_lora_rank", None))


def window_of(layer: object) -> int | None:
    """How many tokens a query sees in a cache layer with a sliding window; None if it has none."""
    return layer.sliding_window if isinstance(layer, cache_utils.DynamicSlidingWindowLayer) else None


def states_kept(layer: Any) -> int:
    """How many recurrent or convolution states a cache layer keeps besides keys and values."""
    return layer.number_of_states if type(layer).__name__ in _WITH_STATE and _is_of_transformers(layer) else 0


def indexer_dim(layer: Any) -> int | None:
    """Number of channels of the indexer's keys in a filled cache layer of sparse attention; 0 if the layer uses another
    layer's selection, None if it is no such layer."""
    if type(layer) is not getattr(cache_utils, "DynamicIndexedLayer", None):
        return None
    return 0 if layer.indexer_keys is None else layer.indexer_keys.shape[-1]


def _is_of_transformers(layer: object) -> bool:
    return type(layer) is getattr(cache_utils, type(layer).__name__, None)


def _names(layer: object) -> list[str]:
    """Attributes in which ``layer`` keeps, or will keep, tensors; entries of a dict may still be None."""
    found = []
    for name, value in vars(layer).items():
        parts = list(value.values()) if isinstance(value, dict) else [value] if isinstance(value, Tensor) else []
        if not name.startswith("_") and parts and all(part is None or isinstance(part, Tensor) for part in parts):
            found.append(name)
    return found

"""The geometry of cache layers: heads, channels, and what else a layer keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Heads(NamedTuple):
    """The geometry of keys or of values: ``number`` heads of ``dim`` channels."""

    number: int
    dim: int


@dataclass(frozen=True)
class LayerGeometry:
    """One cache layer of a model, which stores keys ``[B, H_k, T, D_k]`` and values ``[B, H_v, T, D_v]``.

    index: its index among ``num_layers``.
    num_key_value_heads, head_dim: H_k and D_k.
    previous_layer: the last packed layer before it, if there is one.
    cross: whether it is cross-attention, over the output of an encoder.
    num_value_heads, value_head_dim: H_v and D_v; 0 stands for H_k and D_k.
    latent: whether this is latent attention (MLA), whose "keys" are the latent that keys and values are expanded from,
        and whose "values" are the part of the keys with rotary embedding.
    states: number of recurrent or convolution states that the layer keeps besides its keys and values.
    window: how many tokens a query sees at most, itself included, if the layer has a sliding window.
    indexer_dim: if this is sparse attention: number of channels of the keys, one for each token, by which an indexer
        selects tokens; 0 if the layer uses another layer's selection.
    """

    index: int
    num_layers: int
    num_key_value_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    previous_layer: int | None = None
    cross: bool = False
    num_value_heads: int = 0
    value_head_dim: int = 0
    latent: bool = False
    window: int | None = None
    states: int = 0
    indexer_dim: int | None = None

    def __post_init__(self) -> None:
        for name, of_keys in (("num_value_heads", self.num_key_value_heads), ("value_head_dim", self.head_dim)):
            object.__setattr__(self, name, getattr(self, name) or of_keys)

    @property
    def heads(self) -> tuple[Heads, Heads]:
        """The geometry of the keys and that of the values."""
        return Heads(self.num_key_value_heads, self.head_dim), Heads(self.num_value_heads, self.value_head_dim)

    @property
    def sizes(self) -> list[int]:
        """The heads and channels of the keys, followed by those of the values if they differ."""
        return [size for heads in dict.fromkeys(self.heads) for size in heads]

    @property
    def values_per_token(self) -> int:
        """Number of key and value elements that a token takes, keys of an indexer included."""
        return sum(heads.number * heads.dim for heads in self.heads) + (self.indexer_dim or 0)


class Held(NamedTuple):
    """The two tensors of a filled cache layer, ``[B, H_k, T, D_k]`` and ``[B, H_v, T, D_v]``. For ``latent`` see
    `LayerGeometry`."""

    keys: Tensor
    values: Tensor
    latent: bool = False


def unequal(keys: Tensor, values: Tensor) -> str:
    """Why these are not the keys and values of a cache layer that can be packed; empty if they may be. They may differ
    in heads and channels."""
    if any(x.ndim != 4 for x in (keys, values)):
        return f"expected keys and values of four dims, not {list(keys.shape)} and {list(values.shape)}"
    if not (keys.numel() and values.numel()):
        return f"keys {list(keys.shape)} or values {list(values.shape)} are empty, and both are packed or neither"
    if (keys.shape[0], keys.shape[2]) != (values.shape[0], values.shape[2]):
        return f"keys {list(keys.shape)} and values {list(values.shape)} do not hold the same tokens"
    if keys.device != values.device:
        return f"keys on {keys.device} and values on {values.device} are on different devices"
    return ""


def geometries(held: Sequence[Held | str]) -> dict[int, LayerGeometry | str]:
    """The layers of a model by index. ``held`` has, for each layer, what it holds or why it is not packed."""
    layers: dict[int, LayerGeometry | str] = {}
    previous_layer = None
    for index, one in enumerate(held):
        if isinstance(one, str):
            layers[index] = one
        else:
            (_, heads, _, dim), (_, num_value_heads, _, value_dim) = one.keys.shape, one.values.shape
            layers[index] = LayerGeometry(
                index, len(held), heads, dim, one.keys.dtype, one.keys.device, previous_layer,
                num_value_heads=num_value_heads, value_head_dim=value_dim, latent=one.latent,
            )  # fmt: skip
            previous_layer = index
    return layers

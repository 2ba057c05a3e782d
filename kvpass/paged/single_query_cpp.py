"""Attention over a server's blocks on CPUs, for requests with one token each and the storage that `attend_codes`
reads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..lowering.cpp.attend_codes import defines_of
from ..lowering.cpp.attend_codes import serves as serves_codes
from ..lowering.cpp.build import build, source
from .batch import Batch, Tiles

_SOURCE = Path(__file__).with_name("single_query.cpp")
_TYPES = ["const uint8_t*", "uint8_t*", *5 * ["const int64_t*"], *9 * ["const uint8_t*"], *14 * ["int64_t"], "float"]


def serves(layer: Any) -> bool:
    """Whether this kernel serves a `kvpass.paged.paged_attention.Layer`."""
    window, specs = layer.window, (layer.key, layer.value)
    return (
        window.device.type == "cpu" and not layer.softcap and serves_codes(*specs, window.shape[-1] // 2, window.dtype)
    )


class Attention:
    """Attention over the blocks of one layer that is served; what all steps share is looked up once."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._kernels: dict[int, Callable[..., None]] = {}
        window, pools, heads = layer.window, (*layer.blocks.key, *layer.blocks.value), layer.blocks.head
        sinks = [heads.get(f"{side}.sinks", window) for side in ("key", "value")]
        self._tensors = *pools, *sinks, window
        codes = pools[0]  # one-byte elements, so strides are in bytes; all pools have the same
        self._where = *codes.stride()[:3], codes.shape[2]
        self._window = *window.stride()[:3], window.shape[2]

    def __call__(self, q: Tensor, batch: Batch, tiles: Tiles) -> Tensor:
        """Attention of ``tiles`` of one token each, among ``q`` ``[T, H_q, D]``: ``[N, H_q, D]``, as what is stored."""
        layer, heads = self._layer, self._layer.window.shape[1]
        total, packed, half, blocks, window = batch.contexts(tiles, layer.key.retention, layer.value.retention)
        q = q[tiles.rows[:, 0]].to(layer.window.dtype)
        out = torch.empty_like(q)
        self._kernel(q.shape[1] // heads)(
            q, out, total, packed, half, blocks, window, *self._tensors, len(q), heads, blocks.shape[1],
            window.shape[1], *self._where, batch.lead, *self._window, torch.get_num_threads(), layer.scale,
        )  # fmt: skip
        return out

    def _kernel(self, queries: int) -> Callable[..., None]:
        if queries not in self._kernels:
            key, value, window = self._layer.key, self._layer.value, self._layer.window
            defines = defines_of(key, value, window.shape[-1] // 2, queries, window.dtype)
            self._kernels[queries] = build(source(defines, "tokens.h", "codes.h", _SOURCE), _TYPES)
        return self._kernels[queries]

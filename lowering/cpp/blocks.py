"""Attention of one token of each of many requests over a server's blocks on CPUs, where keys have a scale for each
channel of a page and values for each token (KIVI, arXiv:2402.02750): codes are read where they lie, and multiplied by
what queries, or weights, make of scales.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvpass.codec.bitpack import FIELDS
from kvpass.layout.batch import Batch, Tiles

from .build import build, source

_LANES = 16
"""Vectors have so many lanes at most: pages and groups are multiples of it."""
_SERVED = {f"bits={bits}" for bits, fields in FIELDS.items() if len(fields) == 1}
_SERVED |= {"per=channel", "per=token", "keep=recent", "codec=", "evict=attention", "fit=minmax", "predictor="}
_DTYPES = torch.float32, torch.bfloat16
_TYPES = ["const float*", "float*", *5 * ["const int64_t*"], *9 * ["const uint8_t*"], *14 * ["int64_t"]]


def serves(layer: Any) -> bool:
    """Whether there is a kernel for a `kvpass.lowering.blocks.Layer`."""
    key, value, dim = layer.key, layer.value, layer.window.shape[-1] // 2
    return (
        layer.window.device.type == "cpu"
        and layer.window.dtype in _DTYPES
        and not layer.softcap
        and value.retention.residual >= key.retention.residual
        and all(not spec.quantizer.raw and spec.stored_as.features <= _SERVED for spec in (key, value))
        and (key.quantizer.per, value.quantizer.per) == ("channel", "token")
        and key.quantizer.group_size == key.page_size
        and not any(size % _LANES for size in (dim, key.page_size, value.quantizer.group_size))
    )


class Attention:
    """Attention over the blocks of one layer that is served; what all steps share is looked up once."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._kernels: dict[int, Callable[..., None]] = {}
        window, pools, heads = layer.window, (*layer.blocks.key, *layer.blocks.value), layer.blocks.head
        sinks = [heads.get(f"{side}.sinks", window) for side in ("key", "value")]
        self._tensors = *pools, *sinks, window
        codes = pools[0]  # of one byte, so strides are bytes, which are those of all pools
        self._where = *codes.stride()[:3], codes.shape[2]
        self._window = *window.stride()[:3], window.shape[2]

    def __call__(self, q: Tensor, batch: Batch, tiles: Tiles) -> Tensor:
        """Attention of ``tiles`` of one token each, among ``q`` ``[T, H_q, D]``: ``[N, H_q, D]`` float32."""
        layer, heads = self._layer, self._layer.window.shape[1]
        total, packed, half, blocks, window = batch.contexts(tiles, layer.key.retention, layer.value.retention)
        q = q[tiles.rows[:, 0]].float() * layer.scale
        out = torch.empty_like(q)
        self._kernel(q.shape[1] // heads)(
            q, out, total, packed, half, blocks, window, *self._tensors, len(q), heads, blocks.shape[1],
            window.shape[1], *self._where, batch.lead, *self._window, torch.get_num_threads(),
        )  # fmt: skip
        return out

    def _kernel(self, queries: int) -> Callable[..., None]:
        if queries not in self._kernels:
            key, value, window = self._layer.key, self._layer.value, self._layer.window
            defines = dict(
                HEAD=window.shape[-1] // 2, QUERIES=queries, PAGE=key.page_size, KEY_BITS=key.bits,
                VALUE_BITS=value.bits, GROUP=value.quantizer.group_size, SINKS=key.retention.sinks,
                BFLOAT16=int(window.dtype == torch.bfloat16),
            )  # fmt: skip
            self._kernels[queries] = build(source(defines, "blocks.cpp"), _TYPES)
        return self._kernels[queries]

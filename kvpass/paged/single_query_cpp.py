"""Attention over a server's blocks on CPUs, for requests with one token each and the storage that
`kvpass.lowering.cpp.attend_codes` reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..codec.spec import parse
from ..lowering.cpp.attend_codes import at_a_time, defines_of, parts_of, reading_of, serves
from ..lowering.cpp.build import BYTES, FLOATS, FRACTION, INT64S, NUMBER, WRITTEN_BYTES, build, source
from ..lowering.table import DispatchKey
from .batch import Batch, Tiles

if TYPE_CHECKING:
    from .paged_attention import Layer

_SOURCES = [Path(__file__).with_name(name) for name in ("exact_tokens.h", "single_query.cpp")]
_TYPES = [BYTES, WRITTEN_BYTES, *5 * [INT64S], *9 * [BYTES], *4 * [FLOATS], BYTES, *16 * [NUMBER], FRACTION]


HAS = None
"""The features that are supported are those of `kvpass.lowering.cpp.attend_codes.serves`."""


def refuses_call(dispatch: DispatchKey) -> str | None:
    """Why kernels of single queries cannot serve ``dispatch``, whatever is stored, or None."""
    if dispatch.device != "cpu":
        return "it runs on CPUs."
    if dispatch.extras:
        return f"it does not support {', '.join(dispatch.extras)}."
    return None


def refuses(dispatch: DispatchKey) -> str | None:
    """Why there is no kernel for ``dispatch``, or None."""
    if why := refuses_call(dispatch):
        return why
    key, value = map(parse, dispatch.specs)
    if dispatch.dtype is None or not serves(key, value, dispatch.head_dim, dispatch.dtype):
        return "it has no kernel for this codec, head_dim and dtype."
    return None


class SingleQueryAttention:
    """Attention over the blocks of one layer; what all steps share is looked up once."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self._kernels: dict[int, Callable[..., None]] = {}
        window, pools, heads = layer.window, (*layer.blocks.key, *layer.blocks.value), layer.blocks.head
        sinks = [heads.get(f"{side}.sinks", window) for side in ("key", "value")]
        self._tensors, self._centers = (*pools, *sinks, window), heads.get("key.center")
        codes = pools[0]  # one-byte elements, so strides are in bytes; all pools have the same
        self._where = *codes.stride()[:3], codes.shape[2]
        self._window = *window.stride()[:3], window.shape[2]

    def __call__(self, q: Tensor, batch: Batch, tiles: Tiles) -> Tensor:
        """Attention of ``tiles`` of one token each, among ``q`` ``[T, H_q, D]``: ``[N, H_q, D]``, as what is stored."""
        layer, heads = self._layer, self._layer.window.shape[1]
        found = batch.contexts(tiles, layer.key.retention, layer.value.retention)
        q = q[tiles.rows[:, 0]].to(layer.window.dtype)
        out = torch.empty_like(q)
        queries = q.shape[1] // heads
        center = None if self._centers is None else self._centers[found.blocks[:, 0]].contiguous()
        given, reading = reading_of(layer.key, layer.value, q.shape[2], center)
        self._kernel(at_a_time(queries, 1))(
            q, out, found.total, found.packed, found.half, found.blocks, found.window, *self._tensors,
            *(q if x is None else x for x in reading), len(q), heads, found.blocks.shape[1], found.window.shape[1],
            *self._where, batch.lead, *self._window, given, queries, torch.get_num_threads(), layer.scale,
        )  # fmt: skip
        return out

    def _kernel(self, queries: int) -> Callable[..., None]:
        if queries not in self._kernels:
            key, value, window = self._layer.key, self._layer.value, self._layer.window
            defines = defines_of(key, value, window.shape[-1] // 2, queries, window.dtype)
            self._kernels[queries] = build(source(defines, *parts_of(key, value), *_SOURCES), _TYPES)
        return self._kernels[queries]

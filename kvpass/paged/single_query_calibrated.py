"""Attention over a server's blocks on CPUs, for requests with one token each and calibrated bit widths
(`kvpass.codec.shares`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..codec.page_rope import before_middle
from ..codec.rope import parse_rope
from ..codec.shares import Shares
from ..codec.spec import parse
from ..lowering.cpp.allocated import look_up_table
from ..lowering.cpp.attend_allocated import attention_source, serves
from ..lowering.cpp.build import BYTES, FLOATS, FRACTION, INT32S, INT64S, NUMBER, WRITTEN_BYTES, build, text
from ..lowering.table import DispatchKey
from .batch import Batch, Tiles
from .single_query_cpp import refuses_call

if TYPE_CHECKING:
    from .paged_attention import Layer

HAS = None
"""The features that are supported are those of `kvpass.lowering.cpp.attend_allocated.serves`."""

_SOURCES = [Path(__file__).with_name(name) for name in ("exact_tokens.h", "single_query_calibrated.cpp")]
_SIDE = [BYTES, BYTES, INT32S]  # basis, widths, share
_TYPES = [BYTES, WRITTEN_BYTES, *4 * [INT64S], *5 * [BYTES], *_SIDE, *_SIDE, BYTES]
_TYPES += [*5 * [FLOATS], *16 * [NUMBER], FRACTION]


def refuses(dispatch: DispatchKey) -> str | None:
    """Why there is no kernel for ``dispatch``, or None."""
    if why := refuses_call(dispatch):
        return why
    key, value = map(parse, dispatch.specs)
    if not isinstance(key.codec, Shares) or key.codec.adapts or dispatch.dtype is None:
        return "it reads pages with calibrated bit widths."
    if not serves(key, value, dispatch.head_dim, dispatch.dtype):
        return "it has no kernel for this codec, head_dim and dtype."
    return None


class SingleQueryAttention:
    """Attention over the blocks of one layer; what all steps share is looked up once."""

    def __init__(self, layer: Layer) -> None:
        assert layer.calibrated is not None, "these pages need the tensors of a calibration"
        self._layer, self._calibrated = layer, layer.calibrated
        self._kernels: dict[int, Callable[..., None]] = {}
        window, (key,), (value,), heads = layer.window, layer.blocks.key, layer.blocks.value, layer.blocks.head
        sinks = [heads.get(f"{side}.sinks", window) for side in ("key", "value")]
        fitted = [
            tensors[name].contiguous()
            for tensors in (self._calibrated.key, self._calibrated.value)
            for name in ("basis", "widths", "share")
        ]
        self._tensors = key, value, *sinks, window, *fitted, self._calibrated.key["center"].contiguous()
        self._table = look_up_table(window.device)
        self._where = key.stride(0), key.stride(2), key.shape[2]
        self._sink_head = sinks[0].stride(1) * sinks[0].element_size()
        self._window = *window.stride()[:3], window.shape[2]
        self._middles = self._relative = (torch.zeros(1), torch.zeros(1))
        self._rope = 0, False
        if (neighbours := self._calibrated.neighbours) is not None:
            self._rope = parse_rope(neighbours.rope)
            cos, sin = (table[0, :-1].T.contiguous() for table in before_middle(neighbours, layer.key.page_size))
            self._relative = cos, sin
            self._rotate(1)

    def __call__(self, q: Tensor, batch: Batch, tiles: Tiles) -> Tensor:
        """Attention of ``tiles`` of one token each, among ``q`` ``[T, H_q, D]``: ``[N, H_q, D]``, as what is stored."""
        layer, heads = self._layer, self._layer.window.shape[1]
        found = batch.contexts(tiles, layer.key.retention, layer.value.retention)
        q = q[tiles.rows[:, 0]].to(layer.window.dtype)
        out = torch.empty_like(q)
        if self._rope[0] and (pages := int(found.packed.max())) > len(self._middles[0]):
            self._rotate(2 * pages)
        self._kernel(q.shape[1] // heads)(
            q, out, found.total, found.packed, found.blocks, found.window, *self._tensors, *self._middles,
            *self._relative, self._table, len(q), heads, found.blocks.shape[1], found.window.shape[1], *self._where,
            batch.lead, self._sink_head, *self._window, self._rope[0], int(self._rope[1]), torch.get_num_threads(),
            layer.scale,
        )  # fmt: skip
        return out

    def _rotate(self, pages: int) -> None:
        """Find the rotations of the middle tokens of a request's first ``pages`` pages."""
        page = torch.arange(pages, device=self._layer.window.device)
        self._middles = self._calibrated.turned(self._calibrated.middles(page))[:2]

    def _kernel(self, queries: int) -> Callable[..., None]:
        if queries not in self._kernels:
            key, value, window = self._layer.key, self._layer.value, self._layer.window
            parts = attention_source(key.stored_as, value.stored_as, window.shape[-1] // 2, queries, window.dtype)
            self._kernels[queries] = build(parts + text({}, *_SOURCES), _TYPES)
        return self._kernels[queries]

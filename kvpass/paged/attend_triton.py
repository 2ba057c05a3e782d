"""Attention over a server's blocks on GPUs, for tiles of one or more tokens of a request.

Everything that depends on lengths and block tables stays on the device: nothing waits for it, and a grid only depends
on the sizes of tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..codec.hadamard import basis
from ..codec.spec import parse
from ..errors import KVPassError
from ..lowering.table import DispatchKey
from ..lowering.triton.attend import merge_splits
from ..lowering.triton.attend_blocks import attend_blocks
from ..lowering.triton.configs import WIDTHS, cdiv, refuses_device, splits_of
from ..lowering.triton.kernel_arguments import MERGED_AT_ONCE, OPERANDS, operand_dtype
from ..lowering.triton.launch import case_of, layouts_of, points_of, refuses_pages
from ..lowering.triton.scores import Rules
from ..lowering.triton.tuned import configured
from .batch import Batch, Tiles

if TYPE_CHECKING:
    from .paged_attention import Layer

_VALUES = WIDTHS | {"per=channel", "per=token", "rotation", "grid", "codec=second-level"}
_WORD = 4  # bytes

HAS = _VALUES | {"center"}, _VALUES
"""Features of keys, and of values, that are supported."""


def refuses(dispatch: DispatchKey) -> str | None:
    """Why there is no kernel for ``dispatch``, whose features are supported, or None."""
    if reason := refuses_device(dispatch):
        return reason
    if others := set(dispatch.extras) - {"softcap"}:
        return f"it does not support {', '.join(sorted(others))}."
    return refuses_pages([parse(text) for text in dispatch.specs], dispatch.head_dim)


class TiledAttention:
    """Attention over the blocks of one layer; what all steps share is looked up once.

    Raises `KVPassError` if blocks are not aligned to words.
    """

    def __init__(self, layer: Layer) -> None:
        self._layer, window, codes = layer, layer.window, layer.blocks.key[0]
        self._specs = layer.key, layer.value
        self._heads, self._head_dim = window.shape[1], window.shape[-1] // 2
        self._bytes = codes.stride()[:3]  # of one-byte elements; all pools have the same in bytes
        pools = *layer.blocks.key, *layer.blocks.value
        if any(stride % _WORD for stride in self._bytes) or any(pool.data_ptr() % _WORD for pool in pools):
            raise KVPassError(
                f"Blocks, heads and pages are {self._bytes} bytes apart, but the kernel reads words: use a block size "
                f"that is a multiple of {_WORD}."
            )
        sinks = [layer.blocks.head.get(f"{side}.sinks") for side in ("key", "value")]
        self._stored = *layer.blocks.key, sinks[0], *layer.blocks.value, sinks[1], window
        layouts = layouts_of(self._specs, "", self._head_dim)
        self._layouts = [one._replace(slots=codes.shape[2], places=window.shape[2]) for one in layouts]
        self._points = [points_of(spec, window.device) for spec in self._specs]

    @cached_property
    def _bases(self) -> list[Tensor | None]:
        """The rotations of keys and of values."""
        seeds = [spec.transform.rotation for spec in self._specs]
        return [None if seed is None else basis(self._head_dim, seed, self._layer.window.device) for seed in seeds]

    def __call__(self, q: Tensor, batch: Batch, tiles: Tiles) -> Tensor:
        """Attention of ``tiles`` of tokens among ``q`` ``[T, H_q, D]``: ``[N, Q, H_q, D]``, as what is stored."""
        layer, window, device = self._layer, self._layer.window, self._layer.window.device
        found = batch.contexts(tiles, layer.key.retention, layer.value.retention)
        blocks, tokens, (count, queries) = found.blocks, found.window, tiles.rows.shape
        q = q[tiles.rows].to(window.dtype).transpose(1, 2).contiguous()
        q_heads, groups, K = q.shape[1], count * self._heads, self._layouts[0]
        rows = q_heads // self._heads * queries
        config = configured(case_of(self._specs, "", self._head_dim, rows, q.dtype, False), device)
        capacity, tiled = blocks.shape[1] * K.slots * (K.page // K.planes), cdiv(rows, config.queries)
        splits = splits_of(capacity, config, groups * tiled, device) + 1
        rules = Rules(
            q_heads, self._heads, queries > 1, layer.softcap, False, config.queries, OPERANDS[operand_dtype(q.dtype)]
        )
        partial = torch.empty((groups, splits, rows, self._head_dim), dtype=torch.float32, device=device)
        partial_lse, out, (rotation, back) = partial.new_empty(partial.shape[:3]), torch.empty_like(q), self._bases
        packed = q if rotation is None else (q.float() @ rotation).to(q.dtype)
        with torch.cuda.device_of(q):
            attend_blocks[groups, splits, tiled](
                q, *self._stored, packed, self._shift(q, blocks), *self._points, partial, partial_lse, found.past,
                found.first, found.total, queries, blocks, tokens, blocks.stride(0), tokens.stride(0), layer.scale,
                batch.lead, *self._bytes, *window.stride()[:3], rules, *self._layouts, config.rows, config.together,
                config.exact, config.stages, num_warps=config.warps, maxnreg=config.registers, enable_fp_fusion=True,
            )  # fmt: skip
            if back is not None:
                partial[:, :-1] = partial[:, :-1] @ back.mT
            merge_splits[count * q_heads * queries,](
                partial, partial_lse, None, out, None, rows, splits, queries, q_heads, self._head_dim, MERGED_AT_ONCE,
                enable_fp_fusion=True,
            )  # fmt: skip
        return out.transpose(1, 2)

    def _shift(self, q: Tensor, blocks: Tensor) -> Tensor | None:
        """The products of queries with the means of their requests' keys, ``[N, H_q, Q]`` float32."""
        center = self._layer.blocks.head.get("key.center")
        if center is None:
            return None
        of_heads = center[blocks[:, 0]].float().unsqueeze(2)  # [N, H, 1, 1, D]
        shift: Tensor = (q.unflatten(1, (self._heads, -1)).float() * of_heads).sum(-1)
        return shift


def attention_of_one(layer: Layer) -> Callable[[Tensor, Batch, Tiles], Tensor]:
    """`TiledAttention` of one token of each request: ``[N, H_q, D]``."""
    attention = TiledAttention(layer)
    return lambda q, batch, tiles: attention(q, batch, tiles).squeeze(1)

"""Storing the tokens of a step in a server's blocks on GPUs: one launch writes exact tokens, and two quantize the pages
that are due, of keys and of values. Nothing waits for the device if the batch knows how many tokens a request brings.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..lowering.table import DispatchKey
from ..lowering.triton.configs import QUANTIZING_WARPS, WIDTHS, cdiv
from ..lowering.triton.quantize import codec_of
from ..lowering.triton.quantize import refuses as refuses_quantizing
from ..lowering.triton.store_blocks import quantize_due, write_exact
from .batch import Batch

if TYPE_CHECKING:
    from .paged_attention import Layer

_TOKENS = 16  # per program

HAS = (WIDTHS | {"per=channel", "per=token", "eta"},) * 2
"""Features of keys, and of values, that are supported."""


def refuses(dispatch: DispatchKey) -> str | None:
    """Why there is no kernel for ``dispatch``, whose features are supported, or None."""
    reasons = (refuses_quantizing(replace(dispatch, specs=(text,))) for text in dispatch.specs)
    return next((reason for reason in reasons if reason), None)


class Storing:
    """Storing in the blocks of one layer; what all steps share is looked up once."""

    def __init__(self, layer: Layer) -> None:
        self._layer, window, codes = layer, layer.window, layer.blocks.key[0]
        self._heads, self._head_dim = window.shape[1], window.shape[-1] // 2
        self._bytes, self._slots = codes.stride()[:3], codes.shape[2]  # all pools have the same strides in bytes
        self._sinks = [layer.blocks.head.get(f"{side}.sinks") for side in ("key", "value")]

    def __call__(self, batch: Batch, k: Tensor, v: Tensor) -> None:
        """Store the new tokens ``k`` and ``v`` ``[T, H, D]`` of a batch, and quantize the pages that are due."""
        layer, window, sinks = self._layer, self._layer.window, self._layer.key.retention.sinks
        k, v = (x.to(window.dtype) for x in (k, v))
        k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
        blocks, tokens, most = batch.pages.blocks, batch.window.blocks, batch.longest
        rows, requests = (blocks.stride(0), tokens.stride(0)), len(batch.past)
        per_program = min(_TOKENS, 1 << (most - 1).bit_length())
        with torch.cuda.device_of(window):
            write_exact[requests, self._heads, cdiv(most, per_program)](
                k, v, window, *self._sinks, batch.start, batch.past, batch.total, blocks, tokens, *rows,
                *k.stride()[:2], *v.stride()[:2], *self._bytes[:2], *window.stride()[:3], self._head_dim, sinks,
                window.shape[2], per_program, enable_fp_fusion=False,
            )  # fmt: skip
            for (_, spec, pools, _), exact in zip(layer.sides, layer.windows, strict=True):
                codec, pages = codec_of(spec, self._head_dim, pools[1].dtype), cdiv(most, spec.page_size)
                tiles = codec.page // codec.planes // codec.rows, cdiv(codec.dim, codec.span * codec.spans)
                quantize_due[requests * pages * self._heads, *tiles](
                    exact, *pools, batch.past, batch.total, pages, blocks, tokens, *rows, batch.lead, *self._bytes,
                    *window.stride()[:3], self._heads, sinks, spec.retention.residual, self._slots, window.shape[2],
                    codec, num_warps=QUANTIZING_WARPS, enable_fp_fusion=False,
                )  # fmt: skip

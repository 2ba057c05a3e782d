"""Quantizes the channels of all heads of a token together: rotations and groups cross heads (HIGGS, QuaRot, AQUA-KV).

A group of 1,024 channels spans the 8 heads of 128 that most models have, and its scale takes 16 / 1,024 bits per value.
Heads can then no longer be dequantized one by one, so no kernel reads these pages as they are stored: they are
dequantized before attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import KVPassError
from ..fields import check_integers
from .codec import Codec, Kept
from .pages import AFFINE
from .spec import CodecSpec


def _columns(spec: CodecSpec, head_dim: int) -> tuple[int, int]:
    if head_dim % spec.quantizer.dim:
        raise KVPassError(f"Vectors of {spec.quantizer.dim} channels do not divide head_dim={head_dim}.")
    return spec.rows, spec.quantizer.columns(head_dim)


def _scales(spec: CodecSpec, head_dim: int) -> tuple[int, int]:
    heads = AcrossHeads.of(spec).heads
    return -(-spec.page_size * (heads * head_dim // spec.quantizer.group_size) // heads), 1


def _zero_points(spec: CodecSpec, head_dim: int) -> tuple[int, int]:
    return spec.zero_shape(head_dim) if spec.quantizer.grid else _scales(spec, head_dim)


@dataclass(frozen=True)
class AcrossHeads(Codec, name="across-heads"):
    """Per-token quantization in which the ``heads`` heads of a layer count as one of ``heads * head_dim`` channels.

    Codes are stored by head. The scales of a page, ``page_size * channels / group_size`` of them, are dealt out to the
    heads in order, with zeros after the last.
    """

    heads: int

    tensors = {
        "codes": Kept(_columns, torch.uint8),
        "scale": Kept(_scales),
        "zero_point": Kept(_zero_points),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integers(self, heads=1)

    def channels(self, head_dim: int) -> int:
        return self.heads * head_dim

    def check(self, spec: CodecSpec) -> None:
        quantizer = spec.quantizer
        if quantizer.per != "token" or quantizer.raw:
            raise KVPassError("Groups across heads consist of the channels of one token: use per-token quantization.")

    def quantize(self, x: Tensor, spec: CodecSpec, fitted: Sequence[Tensor] = ()) -> tuple[Tensor, Tensor, Tensor]:
        """Quantize whole pages ``[B, H, N * P, D]``. H is a multiple of ``heads``: layers may be quantized together."""
        return self.by_head(AFFINE.quantize(self.by_token(x), spec.plain), spec, x.shape[3])

    def by_token(self, x: Tensor) -> Tensor:
        """``[B, L * heads, T, D]``: ``[B, L, T, heads * D]``."""
        if x.shape[1] % self.heads:
            raise KVPassError(f"Groups across {self.heads} heads cannot be formed of {x.shape[1]} heads.")
        tokens: Tensor = x.unflatten(1, (-1, self.heads)).transpose(2, 3).flatten(3)
        return tokens

    def by_head(self, kept: Sequence[Tensor], spec: CodecSpec, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
        """The page tensors of heads, of those that ``spec.plain`` has for `by_token`."""
        codes, scale, zero_point = kept
        codes = codes.unflatten(-1, (self.heads, -1)).movedim(-2, 2).flatten(1, 2)
        none = scale.new_empty(*codes.shape[:3], *_zero_points(spec, head_dim))
        return codes.contiguous(), self._dealt(scale), none if spec.quantizer.grid else self._dealt(zero_point)

    def dequantize(self, codes: Tensor, scale: Tensor, zero_point: Tensor, spec: CodecSpec) -> Tensor:
        """Inverse of `quantize` up to rounding: ``[B, H, N * P, D]`` float32."""
        joined = codes.unflatten(1, (-1, self.heads)).movedim(2, -2).flatten(-2)
        groups = self.channels(codes.shape[-1] * spec.quantizer.dim) // spec.quantizer.group_size
        scale = self._collected(scale, spec.page_size, groups)
        if not spec.quantizer.grid:
            zero_point = self._collected(zero_point, spec.page_size, groups)
        tokens: Tensor = AFFINE.dequantize(joined, scale, zero_point, spec.plain)
        out: Tensor = tokens.unflatten(-1, (self.heads, -1)).transpose(2, 3).flatten(1, 2)
        return out

    def _dealt(self, parameters: Tensor) -> Tensor:
        """Parameters of whole tokens, ``[B, L, N, P, G]``, by head: ``[B, L * heads, N, M, 1]``."""
        flat: Tensor = parameters.flatten(3)
        padded: Tensor = F.pad(flat, (0, -flat.shape[-1] % self.heads))
        by_head: Tensor = padded.unflatten(-1, (self.heads, -1, 1)).movedim(3, 2).flatten(1, 2)
        return by_head.contiguous()

    def _collected(self, parameters: Tensor, page_size: int, groups: int) -> Tensor:
        """Inverse of `_dealt`."""
        by_page = parameters.unflatten(1, (-1, self.heads)).movedim(2, 3).flatten(3)
        out: Tensor = by_page[..., : page_size * groups].unflatten(-1, (-1, groups))
        return out

    def describe(self, quantizer: str) -> str:
        return f"{quantizer} across {self.heads} heads"


def across_heads(spec: CodecSpec, heads: int, head_dim: int) -> CodecSpec:
    """``spec`` with groups that cross the ``heads`` heads of a layer; a group is at most all channels of a token."""
    size = min(spec.quantizer.group_size, heads * head_dim)
    return replace(spec, quantizer=replace(spec.quantizer, group_size=size, codec=AcrossHeads(heads)))

"""Quantizes pairs of channels as radius and angle (PolarQuant, arXiv 2502.00527).

Rotary embedding rotates channels in pairs, and only one channel of a pair may be large. As points of a plane, the pairs
lie on an arc whose radius hardly changes from token to token. Pairs are channels ``(i, i + D / 2)``. The first half of
a token's codes are radii, the second half angles in ``[-pi, pi]``, in radians. Both use uniform quantization.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import KVPassError
from .codec import Codec, Kept
from .pages import Affine, dequantize_pages, quantize_pages
from .spec import CodecSpec


def polar(x: Tensor) -> Tensor:
    """Convert ``[..., D]`` to radii and angles, ``[..., D]`` float32."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([torch.hypot(first, second), torch.atan2(second, first)], -1)


def cartesian(x: Tensor) -> Tensor:
    """Inverse of `polar`."""
    radius, angle = x.chunk(2, -1)
    return torch.cat([radius * angle.cos(), radius * angle.sin()], -1)


def _even(spec: CodecSpec, head_dim: int) -> tuple[int, int]:
    if head_dim % 2:
        raise KVPassError(f"head_dim={head_dim} must be even: channels are quantized in pairs.")
    return spec.rows, head_dim


@dataclass(frozen=True)
class Polar(Codec, name="polar"):
    """Uniform quantization of channel pairs as radius and angle."""

    tensors = {**Affine.tensors, "codes": Kept(_even, torch.uint8)}
    dequantizes_any_bytes = True

    def check(self, spec: CodecSpec) -> None:
        quantizer, of = spec.quantizer, spec.transform
        if quantizer.per != "channel" or quantizer.raw or quantizer.grid or quantizer.subspace is not None:
            raise KVPassError("Radii and angles use uniform per-channel quantization: no grid, raw floats or subspace.")
        if of.rotation is not None:
            raise KVPassError(
                "Polar quantization pairs channels, which a Hadamard rotation would mix: use rotation=None."
            )

    def quantize(self, x: Tensor, spec: CodecSpec, fitted: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        """Quantize the radii and angles of whole pages ``[B, H, N * P, D]``, as `quantize_pages`."""
        return quantize_pages(polar(x).to(x.dtype), spec.plain)

    def dequantize(self, codes: Tensor, scale: Tensor, zero_point: Tensor, spec: CodecSpec) -> Tensor:
        """Inverse of `quantize` up to rounding: ``[B, H, N * P, D]`` float32."""
        return cartesian(dequantize_pages(codes, scale, zero_point, spec.plain))

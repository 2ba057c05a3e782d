"""Scales and zero points of a page in 8 bits each, under one 16-bit scale and zero point of the page for either (double
quantization, QLoRA, arXiv 2305.14314, section 3).

Codes are assigned under what is stored, so that only the ends of a group's range are off, by half a step of theirs: a
group of equal values need not come back exactly.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import KVPassError
from .affine import assign, dequantize, fit_minmax
from .codec import Codec, Kept
from .pages import AFFINE, Affine, dequantize_pages, quantize_pages
from .spec import CodecSpec

_BITS = 8


def compress(scale: Tensor, zero_point: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and zero points of pages ``[..., G, C]`` -> their codes ``[..., 2 G, C]`` uint8, and scale and zero point
    of those of either ``[..., 2, 2]``, in the dtype they had."""
    both = torch.stack([scale.float(), zero_point.float()], -3).flatten(-2)  # [..., 2, G * C]
    params = torch.stack(fit_minmax(both, -1, _BITS, scale.dtype), -1)  # [..., 2, 1, 2]
    levels = assign(both, params[..., 0], params[..., 1], _BITS)
    return levels.unflatten(-1, scale.shape[-2:]).flatten(-3, -2), params.squeeze(-2)


def expand(levels: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse of `compress`, float32."""
    of_each, zero_of_each = params[..., None, None, :].unbind(-1)  # [..., 2, 1, 1]
    scale, zero_point = dequantize(levels.unflatten(-2, (2, -1)), of_each, zero_of_each).unbind(-3)
    return scale, zero_point


def _levels(spec: CodecSpec, head_dim: int) -> tuple[int, int]:
    groups, columns = spec.params_shape(head_dim)
    return 2 * groups, columns


@dataclass(frozen=True)
class SecondLevel(Codec, name="second-level"):
    """Scales and zero points in 8 bits each, under a scale and a zero point of the page."""

    tensors = {
        "codes": Affine.tensors["codes"],
        "levels": Kept(_levels, torch.uint8),
        "params": Kept(lambda spec, head_dim: (2, 2)),
    }
    dequantizes_any_bytes = True

    def check(self, spec: CodecSpec) -> None:
        quantizer = spec.quantizer
        if quantizer.raw or quantizer.grid or quantizer.eta:
            raise KVPassError("8-bit scales need uniform quantization: no grid, raw floats or eta.")

    def quantize(self, x: Tensor, spec: CodecSpec, fitted: Sequence[Tensor] = ()) -> tuple[Tensor, Tensor, Tensor]:
        """What is kept of whole pages ``[B, H, N * P, D]``: codes as `quantize_pages` has them, `levels` and
        `params`."""
        _, scale, zero_point = quantize_pages(x, spec.plain, fitted)
        levels, params = compress(scale, zero_point)
        taken = torch.ones((*scale.shape[:-2], 1, 1), dtype=torch.bool, device=x.device)
        codes, *_ = AFFINE.quantize(x, spec.plain, fitted, (*expand(levels, params), taken))
        return codes, levels, params

    def dequantize(self, codes: Tensor, levels: Tensor, params: Tensor, spec: CodecSpec) -> Tensor:
        """Inverse of `quantize` up to rounding: ``[B, H, N * P, D]`` float32."""
        return dequantize_pages(codes, *expand(levels, params), spec.plain)

"""Quantizes the scales and zero points of a page to 8 bits (double quantization, QLoRA, arXiv 2305.14314, section 3).

The scales of a page share a 16-bit scale and zero point, and so do its zero points. Values are quantized with the
stored, rounded parameters. So only the ends of a group's range have an additional error, of half a step of the
parameters. A group of equal values may not dequantize exactly.
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
    """Quantize scales and zero points of pages, each ``[..., G, C]``.

    Returns their codes ``[..., 2 G, C]`` uint8, and the second-level scale and zero point of the scales and of the zero
    points, ``[..., 2, 2]`` in the dtype of ``scale``.
    """
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
    """Uniform quantization whose scales and zero points have 8 bits each, with second-level parameters per page."""

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
        """Quantize whole pages ``[B, H, N * P, D]`` to codes, as `quantize_pages`, and ``levels`` and ``params``, as
        `compress`."""
        _, scale, zero_point = quantize_pages(x, spec.plain, fitted)
        levels, params = compress(scale, zero_point)
        taken = torch.ones((*scale.shape[:-2], 1, 1), dtype=torch.bool, device=x.device)
        codes, *_ = AFFINE.quantize(x, spec.plain, fitted, (*expand(levels, params), taken))
        return codes, levels, params

    def dequantize(self, codes: Tensor, levels: Tensor, params: Tensor, spec: CodecSpec) -> Tensor:
        """Inverse of `quantize` up to rounding: ``[B, H, N * P, D]`` float32."""
        return dequantize_pages(codes, *expand(levels, params), spec.plain)

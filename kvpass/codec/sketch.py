"""Adds a 1-bit sketch of the quantization error: the signs of its random projections, and its norm (QJL, arXiv
2406.03482; TurboQuant, arXiv 2504.19874, algorithm 2).

With the sketch, inner products with dequantized tokens are unbiased over rotations, up to terms of order 1 / head_dim.
Quantization with least squared error alone shrinks them. The papers project with a matrix of normal variables. Here the
projection is another random-sign Hadamard rotation, which takes no memory. Its rows are orthogonal, as in QJL's code.
So the squared error is pi / 2 - 1 times the quantization error, instead of pi / 2 times.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import KVPassError
from .affine import params_dtype
from .bitpack import byte_rows, pack, smallest_page, unpack
from .codec import Codec, Kept
from .hadamard import hadamard, inverse_hadamard
from .pages import Affine, dequantize_pages, quantize_pages
from .spec import CodecSpec


def _seed(spec: CodecSpec) -> int:
    return (spec.transform.rotation or 0) + 1


@dataclass(frozen=True)
class Sketched(Codec, name="sketched"):
    """Quantized values, and a 1-bit sketch of the quantization error."""

    tensors = {
        **Affine.tensors,
        "signs": Kept(lambda spec, head_dim: (byte_rows(spec.page_size, 1), head_dim), torch.uint8),
        "norm": Kept(lambda spec, head_dim: (spec.page_size, 1)),
    }
    dequantizes_any_bytes = True

    def check(self, spec: CodecSpec) -> None:
        if spec.page_size % smallest_page(1):
            raise KVPassError(
                f"page_size={spec.page_size} must be a multiple of 8, so that sign bits fill whole bytes."
            )

    def quantize(self, x: Tensor, spec: CodecSpec, fitted: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        """Quantize whole pages ``[B, H, N * P, D]``.

        Returns codes, scale and zero point as `quantize_pages`, signs ``[B, H, N, P / 8, D]`` uint8 and 16-bit norms
        ``[B, H, N, P, 1]``.
        """
        kept = quantize_pages(x, spec.plain)
        left = (x.float() - dequantize_pages(*kept, spec.plain)).unflatten(2, (-1, spec.page_size))
        signs = (hadamard(left, _seed(spec)) > 0).to(torch.uint8)
        return *kept, pack(signs, 1), left.double().norm(dim=-1, keepdim=True).to(params_dtype(x.dtype))

    def dequantize(
        self, codes: Tensor, scale: Tensor, zero_point: Tensor, signs: Tensor, norm: Tensor, spec: CodecSpec
    ) -> Tensor:
        """Inverse of `quantize`, unbiased: ``[B, H, N * P, D]`` float32."""
        projected = 2.0 * unpack(signs, 1).float() - 1
        sketch = inverse_hadamard(projected, _seed(spec)) * (norm.float() * math.sqrt(math.pi / (2 * signs.shape[-1])))
        return dequantize_pages(codes, scale, zero_point, spec.plain) + sketch.flatten(2, 3)

"""Adds a low-rank approximation of the quantization error to uniform quantization, and keeps outliers exact (GEAR,
arXiv 2403.05527).

The error of a page is stored as a product of two thin matrices, with least squared error. The paper computes them by
power iteration.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import KVPassError
from ..fields import check_integers
from .affine import params_dtype
from .codec import Kept
from .outliers import OUTLIERS, Outliers, merge, places, split
from .pages import Affine, dequantize_pages, quantize_pages
from .spec import CodecSpec


def _rank(spec: CodecSpec, head_dim: int) -> int:
    if ErrorTerm.of(spec).rank > min(spec.page_size, head_dim):
        raise KVPassError(
            f"rank={ErrorTerm.of(spec).rank} must be at most {min(spec.page_size, head_dim)}, the rank of a page of "
            f"{spec.page_size} x {head_dim} values."
        )
    return ErrorTerm.of(spec).rank


@dataclass(frozen=True)
class ErrorTerm(Outliers, name="error-term"):
    """Uniform quantization with a low-rank matrix for the error of each page, and exact outliers.

    share: fraction of a page's values that are kept exact.
    rank: rank of the matrix.
    """

    rank: int

    tensors = {
        **Affine.tensors,
        **OUTLIERS,
        "tall": Kept(lambda spec, head_dim: (spec.page_size, _rank(spec, head_dim))),
        "wide": Kept(lambda spec, head_dim: (_rank(spec, head_dim), head_dim)),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integers(self, rank=0)

    def check(self, spec: CodecSpec) -> None:
        quantizer = spec.quantizer
        if quantizer.raw or quantizer.grid or quantizer.subspace is not None or spec.transform.rotation is not None:
            raise KVPassError(
                "A low-rank error term needs uniform quantization: no grid, raw floats, subspace or rotation."
            )

    def quantize(self, x: Tensor, spec: CodecSpec, fitted: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        """Quantize whole pages ``[B, H, N * P, D]``.

        Returns codes, scale and zero point as `quantize_pages`, outliers and their positions (`codec.outliers`), and
        16-bit matrices ``[B, H, N, P, r]`` and ``[B, H, N, r, D]``.
        """
        pages = x.float().unflatten(2, (-1, spec.page_size))
        rest, values, positions = split(pages, spec, x.dtype)
        kept = quantize_pages(rest.flatten(2, 3).to(x.dtype), spec.plain)
        left = pages - dequantize_pages(*kept, spec.plain).view(pages.shape)
        left = left.flatten(-2).scatter(-1, places(positions), 0.0).view(pages.shape)
        finite = left.double().nan_to_num(0.0, 0.0, 0.0)  # `check_finite` detects non-finite values in the scales
        (u, s, vh), rank = torch.linalg.svd(finite, full_matrices=False), ErrorTerm.of(spec).rank
        root = s[..., :rank].sqrt()
        matrices = u[..., :rank] * root.unsqueeze(-2), vh[..., :rank, :] * root.unsqueeze(-1)
        return *kept, values, positions, *(each.to(params_dtype(x.dtype)) for each in matrices)

    def dequantize(self, *kept_and_spec: Any) -> Tensor:
        """Inverse of `quantize` up to the error that the matrices do not capture: ``[B, H, N * P, D]`` float32."""
        codes, scale, zero_point, values, positions, tall, wide, spec = kept_and_spec
        pages = dequantize_pages(codes, scale, zero_point, spec.plain).unflatten(2, (-1, spec.page_size))
        return merge(pages + tall.float() @ wide.float(), values, positions).flatten(2, 3)

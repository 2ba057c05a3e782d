"""Quantizes with a non-uniform datatype fitted to each page, and keeps outliers exact (nuqX of KVQuant, arXiv
2401.18079, section 3.3).

Values are normalized to the range of their group. The points of least squared error are shared by all groups of a page.
KVQuant itself fits one datatype per layer offline, weighted by gradients: see `codec.datatype`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import KVPassError
from .affine import params_dtype
from .bitpack import pack, unpack
from .codec import Kept
from .outliers import OUTLIERS, Outliers, merge, split
from .pages import Affine, dequantize_groups, grouped
from .spec import CodecSpec

_ITERATIONS = 16


def nearest(x: Tensor, points: Tensor) -> Tensor:
    """Index of the nearest of ascending ``points`` ``[..., n]`` for each value of ``x`` ``[..., V]``: ``[..., V]``
    int64."""
    return torch.searchsorted((points[..., 1:] + points[..., :-1]) / 2, x.contiguous())


def fit_points(x: Tensor, bits: int, weight: Tensor | None = None, iterations: int = _ITERATIONS) -> Tensor:
    """Fit ascending points ``[..., 2**bits]`` to values ``x`` ``[..., V]`` in [0, 1], by Lloyd's algorithm.

    weight: ``[..., V]``, the weights of the values; None means equal weights. The algorithm starts from equidistant
    points. A point that is nearest to no value does not move.
    """
    weight = torch.ones_like(x) if weight is None else weight
    points = torch.linspace(0, 1, 2**bits, dtype=x.dtype, device=x.device).expand(*x.shape[:-1], -1).contiguous()
    for _ in range(iterations):
        codes = nearest(x, points)
        mass = torch.zeros_like(points).scatter_add(-1, codes, weight)
        total = torch.zeros_like(points).scatter_add(-1, codes, weight * x)
        points = torch.where(mass > 0, total / torch.where(mass > 0, mass, 1), points)
    return points


def in_range(groups: Tensor, low: Tensor, span: Tensor) -> Tensor:
    """Normalize ``groups`` to [0, 1] by the range that starts at ``low``; 0 if ``span`` is 0."""
    return ((groups - low.float()) / torch.where(span > 0, span, 1).float()).clamp(0, 1)


def split_in_range(pages: Tensor, spec: CodecSpec, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Normalize pages ``[..., P, D]`` to the ranges of their groups, without outliers.

    Returns the normalized pages, 16-bit span and minimum of the groups, outliers and their positions
    (`codec.outliers`).
    """
    rest, values, positions = split(pages, spec, dtype)
    groups, dim = grouped(rest, spec.quantizer)
    low, high = groups.amin(dim, keepdim=True).to(params_dtype(dtype)), groups.amax(dim, keepdim=True)
    span = (high - low.float()).to(low.dtype)
    units = in_range(groups, low, span).reshape(pages.shape)
    return units, span.squeeze(dim), low.squeeze(dim), values, positions


def check_datatype(spec: CodecSpec) -> None:
    """Raise `KVPassError` if ``spec`` cannot be used with a fitted datatype."""
    quantizer, rotation = spec.quantizer, spec.transform.rotation
    if quantizer.bits > 4 or quantizer.grid or quantizer.subspace is not None or rotation is not None:
        raise KVPassError("A fitted datatype has 1 to 4 bits and takes unrotated values: no grid or rotation.")
    if quantizer.fit != "minmax" or quantizer.eta:
        raise KVPassError("A fitted datatype uses the range of its group: fit='minmax' and eta=0.")


@dataclass(frozen=True)
class PageDatatype(Outliers, name="nuq"):
    """A non-uniform datatype fitted to each page, and exact outliers.

    share: fraction of a page's values that are kept exact.
    """

    tensors = {**Affine.tensors, "points": Kept(lambda spec, head_dim: (1, 2**spec.bits)), **OUTLIERS}

    def check(self, spec: CodecSpec) -> None:
        check_datatype(spec)

    def quantize(self, x: Tensor, spec: CodecSpec, fitted: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        """Quantize whole pages ``[B, H, N * P, D]``.

        Returns codes, the span of each group as scale and its minimum as zero point, 16-bit points
        ``[B, H, N, 1, 2**bits]``, outliers and their positions (`codec.outliers`).
        """
        pages = x.float().unflatten(2, (-1, spec.page_size))
        units, span, low, values, positions = split_in_range(pages, spec, x.dtype)
        points = fit_points(units.flatten(-2), spec.bits).to(span.dtype)
        codes = nearest(units.flatten(-2), points.float()).to(torch.uint8).view(pages.shape)
        return pack(codes, spec.bits), span, low, points.unsqueeze(-2), values, positions

    def dequantize(self, *kept_and_spec: Any) -> Tensor:
        """Inverse of `quantize` up to rounding: ``[B, H, N * P, D]`` float32."""
        codes, scale, zero_point, points, values, positions, spec = kept_and_spec
        which = unpack(codes, spec.bits)
        units = points.squeeze(-2).float().gather(-1, which.flatten(-2).long()).view(which.shape)
        pages = dequantize_groups(units, scale, zero_point, spec.quantizer)
        return merge(pages, values, positions).flatten(2, 3)

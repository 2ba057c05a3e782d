"""Codes under a datatype that is fitted to a page: values in the range of their group, and the points of least squared
error for them, the same for all groups (nuqX of KVQuant, arXiv 2401.18079, section 3.3), beside outliers that are kept
exactly. KVQuant fits a datatype to each layer beforehand, weighted by gradients: see `codec.datatype`."""

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
from .pages import Affine, grouped
from .spec import CodecSpec

_ITERATIONS = 16


def nearest(x: Tensor, points: Tensor) -> Tensor:
    """Which of ascending ``points`` ``[..., n]`` is nearest to each of ``[..., V]``: ``[..., V]`` int64."""
    return torch.searchsorted((points[..., 1:] + points[..., :-1]) / 2, x.contiguous())


def fit_points(x: Tensor, bits: int, weight: Tensor | None = None, iterations: int = _ITERATIONS) -> Tensor:
    """Ascending points ``[..., 2**bits]`` for values ``[..., V]`` in [0, 1] of equal or given ``weight``, by Lloyd's
    algorithm from points of equal distance, which keep their place where no value is nearest."""
    weight = torch.ones_like(x) if weight is None else weight
    points = torch.linspace(0, 1, 2**bits, dtype=x.dtype, device=x.device).expand(*x.shape[:-1], -1).contiguous()
    for _ in range(iterations):
        codes = nearest(x, points)
        mass = torch.zeros_like(points).scatter_add(-1, codes, weight)
        total = torch.zeros_like(points).scatter_add(-1, codes, weight * x)
        points = torch.where(mass > 0, total / torch.where(mass > 0, mass, 1), points)
    return points


def in_range(groups: Tensor, low: Tensor, span: Tensor) -> Tensor:
    """``groups`` in units of a range from ``low`` on, in [0, 1]; 0 where the range is."""
    return ((groups - low.float()) / torch.where(span > 0, span, 1).float()).clamp(0, 1)


def split_in_range(pages: Tensor, spec: CodecSpec, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Pages ``[..., P, D]`` in the range of their groups, without outliers; the span and the least value of groups, in
    16 bits, outliers and their positions (`codec.outliers`)."""
    rest, values, positions = split(pages, spec, dtype)
    groups, dim = grouped(rest, spec.quantizer)
    low, high = groups.amin(dim, keepdim=True).to(params_dtype(dtype)), groups.amax(dim, keepdim=True)
    span = (high - low.float()).to(low.dtype)
    units = in_range(groups, low, span).reshape(pages.shape)
    return units, span.squeeze(dim), low.squeeze(dim), values, positions


def check_datatype(spec: CodecSpec) -> None:
    """Raise `KVPassError` for what is not coded under a datatype."""
    quantizer, rotation = spec.quantizer, spec.transform.rotation
    if quantizer.bits > 4 or quantizer.grid or quantizer.subspace is not None or rotation is not None:
        raise KVPassError("A fitted datatype has 1 to 4 bits and takes unrotated values: no grid or rotation.")
    if quantizer.fit != "minmax" or quantizer.eta:
        raise KVPassError("A fitted datatype uses the range of its group: fit='minmax' and eta=0.")


@dataclass(frozen=True)
class PageDatatype(Outliers, name="nuq"):
    """A datatype that is fitted to each page, beside outliers.

    share: of the values of a page, those that are kept exactly.
    """

    tensors = {**Affine.tensors, "points": Kept(lambda spec, head_dim: (1, 2**spec.bits)), **OUTLIERS}

    def check(self, spec: CodecSpec) -> None:
        check_datatype(spec)

    def quantize(self, x: Tensor, spec: CodecSpec, fitted: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        """What is kept of whole pages ``[B, H, N * P, D]``: codes, the range of groups as scale and their least value
        as
        zero point, points ``[B, H, N, 1, 2**bits]`` of 16 bits, outliers and their positions (`codec.outliers`)."""
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
        groups, dim = grouped(units, spec.quantizer)
        pages = (groups * scale.float().unsqueeze(dim) + zero_point.float().unsqueeze(dim)).reshape(units.shape)
        return merge(pages, values, positions).flatten(2, 3)

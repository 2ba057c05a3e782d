"""Codes under a datatype that is fitted to a page: values in the range of their group, and the points of least squared
error for them, the same for all groups (nuqX of KVQuant, arXiv 2401.18079, section 3.3), beside outliers that are kept
exactly. KVQuant fits a datatype to each layer beforehand, weighted by gradients."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import KVPassError
from .affine import params_dtype
from .bitpack import pack, unpack
from .kept import CODECS, Codec, Kept
from .outliers import OUTLIERS, merge, split
from .pages import grouped
from .spec import CodecSpec

_ITERATIONS = 16


def nearest(x: Tensor, points: Tensor) -> Tensor:
    """Which of ascending ``points`` ``[..., n]`` is nearest to each of ``[..., V]``: ``[..., V]`` int64."""
    return torch.searchsorted((points[..., 1:] + points[..., :-1]) / 2, x.contiguous())


def fit_points(x: Tensor, bits: int) -> Tensor:
    """Ascending points ``[..., 2**bits]`` for values ``[..., V]`` in [0, 1], by Lloyd's algorithm from points of equal
    distance, which keep their place where no value is nearest."""
    points = torch.linspace(0, 1, 2**bits, dtype=x.dtype, device=x.device).expand(*x.shape[:-1], -1).contiguous()
    for _ in range(_ITERATIONS):
        codes = nearest(x, points)
        mass = torch.zeros_like(points).scatter_add(-1, codes, torch.ones_like(x))
        total = torch.zeros_like(points).scatter_add(-1, codes, x)
        points = torch.where(mass > 0, total / mass.clamp_min(1), points)
    return points


def encode(x: Tensor, spec: CodecSpec, fitted: Sequence[Tensor], stored: None = None) -> tuple[Tensor, ...]:
    """What is kept of whole pages ``[B, H, N * P, D]``: codes, the range of groups as scale and their least value as
    zero point, points ``[B, H, N, 1, 2**bits]`` of 16 bits, outliers and their positions (`codec.outliers`)."""
    pages, dtype = x.float().unflatten(2, (-1, spec.page_size)), params_dtype(x.dtype)
    rest, values, positions = split(pages, spec, x.dtype)
    groups, dim = grouped(rest, spec.quantizer)
    low, high = groups.amin(dim, keepdim=True).to(dtype), groups.amax(dim, keepdim=True)
    span = (high - low.float()).to(dtype)
    units = (
        ((groups - low.float()) / torch.where(span > 0, span, 1).float()).clamp(0, 1).reshape(pages.shape).flatten(-2)
    )
    points = fit_points(units, spec.bits).to(dtype)
    codes = nearest(units, points.float()).to(torch.uint8).view(pages.shape)
    return pack(codes, spec.bits), span.squeeze(dim), low.squeeze(dim), points.unsqueeze(-2), values, positions


def decode(*kept_and_spec: Any) -> Tensor:
    """Inverse of `encode` up to rounding: ``[B, H, N * P, D]`` float32."""
    codes, scale, zero_point, points, values, positions, spec = kept_and_spec
    which = unpack(codes, spec.bits)
    units = points.squeeze(-2).float().gather(-1, which.flatten(-2).long()).view(which.shape)
    groups, dim = grouped(units, spec.quantizer)
    pages = (groups * scale.float().unsqueeze(dim) + zero_point.float().unsqueeze(dim)).reshape(units.shape)
    return merge(pages, values, positions).flatten(2, 3)


def _check(spec: CodecSpec) -> None:
    quantizer, rotation = spec.quantizer, spec.transform.rotation
    if quantizer.bits > 4 or quantizer.grid or quantizer.subspace is not None or rotation is not None:
        raise KVPassError("A datatype is fitted for 1 to 4 bits, and values as they are: no grid or rotation.")
    if quantizer.fit != "minmax" or quantizer.eta:
        raise KVPassError("A fitted datatype has the range of a group: fit='minmax', and eta=0.")


CODECS["nuq"] = Codec(
    {**CODECS[""].tensors, "points": Kept(lambda spec, head_dim: (1, 2**spec.bits)), **OUTLIERS},
    encode,
    decode,
    check=_check,
)

"""Vector grids (HIGGS): quantizes every d consecutive values to the nearest of n points.

Groups are scaled to unit size first. The points are optimal for a normal vector; ``benchmarks/build_grids.py`` computes
them.
"""

import math
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from ..errors import KVPassError

_CHUNK = 1 << 22  # distances computed at a time


@cache
def _grids() -> dict[str, Tensor]:
    return load_file(Path(__file__).with_name("codebooks.safetensors"))


def names() -> list[str]:
    """Names of the available grids. "d2n16" has 16 points in 2 dimensions: 4 bits for 2 values."""
    return sorted(_grids(), key=lambda name: tuple(map(int, name[1:].split("n"))))


@cache
def grid(name: str, device: torch.device | None = None) -> Tensor:
    """The points of a grid, ``[n, d]`` float32. Raises `KVPassError` if there is no grid of that name."""
    if name not in _grids():
        raise KVPassError(f"There is no grid {name!r}; choose one of {', '.join(names())}.")
    return _grids()[name].to(device)


def grid_shape(name: str) -> tuple[int, int]:
    """The dimension d of a grid, and the bit width of its codes."""
    points, dim = grid(name).shape
    return dim, math.ceil(math.log2(points))


def fit_rms(groups: Tensor, dtype: torch.dtype) -> Tensor:
    """Root mean square of each group along the last dim (kept with size 1), in ``dtype``."""
    return groups.double().square().mean(-1, keepdim=True).sqrt().to(dtype)


def fit_size(groups: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Least-squares scale of each group, given its grid values ``values``: shape and dtype as `fit_rms`; 0 if all
    values are 0."""
    groups, values = groups.double(), values.double()
    square = values.square().sum(-1, keepdim=True)
    return ((groups * values).sum(-1, keepdim=True) / torch.where(square > 0, square, 1.0)).to(dtype)


def assign_points(x: Tensor, points: Tensor) -> Tensor:
    """Index of the nearest of ``points`` ``[n, d]`` for every d consecutive values of ``x`` ``[..., D]``:
    ``[..., D / d]`` uint8."""
    vectors = x.unflatten(-1, (-1, points.shape[1])).flatten(0, -2)
    weight, out = points.square().sum(1) / 2, []
    for chunk in vectors.split(max(1, _CHUNK // len(points))):
        # sums in a fixed order, which a matrix product does not guarantee
        closeness = -weight
        for i in range(points.shape[1]):
            closeness = closeness + chunk[:, i : i + 1] * points[:, i]
        out.append(closeness.argmax(-1).to(torch.uint8))
    return torch.cat(out).view(*x.shape[:-1], x.shape[-1] // points.shape[1])


def look_up(codes: Tensor, points: Tensor) -> Tensor:
    """The values of codes ``[..., D / d]``: ``[..., D]`` float32."""
    return points[codes.long()].flatten(-2)

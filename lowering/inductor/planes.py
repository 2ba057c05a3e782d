"""Computes scores and weighted sums plane by plane (`kvpass.codec.bitpack`), independently of the codec."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor


class Planes(NamedTuple):
    """The tokens of pages in ``runs`` planes of consecutive tokens. ``values(plane)`` dequantizes one plane,
    ``[BH, N, T, D]`` float32, still rotated."""

    runs: int
    values: Callable[[int], Tensor]


def in_storage_order(by_head: Sequence[Tensor], planes: int) -> Tensor:
    """Combine scores of planes, each ``[BH, N, T]``, to ``[BH, R, N * P]``. The planes of a query head are adjacent in
    ``by_head``."""
    return torch.stack(tuple(by_head), 1).unflatten(1, (-1, planes)).transpose(2, 3).flatten(2)


def weighted_sum(weights: Tensor, planes: Sequence[Tensor]) -> Tensor:
    """Sum of the values of planes, each ``[BH, N, T, D]``, weighted by ``weights`` ``[BH, R, N, P]``:
    ``[BH, R, D]``."""
    by_plane = weights.unflatten(-1, (len(planes), -1))
    products = [[by_plane[:, r, :, j, :, None] * v for r in range(weights.shape[1])] for j, v in enumerate(planes)]
    return torch.stack([reduce(torch.add, of_head).sum((1, 2)) for of_head in zip(*products, strict=True)], 1)


def mean_scores(q: Tensor, center: Tensor) -> Tensor:
    """Products of ``q`` ``[BH, R, D]`` with the mean of the keys ``[B, H, 1, D]``: ``[BH, R, 1]``."""
    return (q * center.flatten(0, 1).float()).sum(-1, keepdim=True)

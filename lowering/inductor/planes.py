"""What attention makes of pages, plane by plane (`kvpass.codec.bitpack`), and of their mean, whatever their codec."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor


class Planes(NamedTuple):
    """Tokens of pages, in ``runs`` of neighbours; ``values`` of one are ``[BH, N, T, D]`` float32, still rotated."""

    runs: int
    values: Callable[[int], Tensor]


def in_storage_order(by_head: Sequence[Tensor], planes: int) -> Tensor:
    """Scores of planes ``[BH, N, T]``, those of a query head one behind the other: ``[BH, R, N * P]``."""
    return torch.stack(tuple(by_head), 1).unflatten(1, (-1, planes)).transpose(2, 3).flatten(2)


def weighted_sum(weights: Tensor, planes: Sequence[Tensor]) -> Tensor:
    """The values of planes, ``[BH, N, T, D]`` each, weighted by ``[BH, R, N, P]``: ``[BH, R, D]``."""
    by_plane = weights.unflatten(-1, (len(planes), -1))
    products = [[by_plane[:, r, :, j, :, None] * v for r in range(weights.shape[1])] for j, v in enumerate(planes)]
    return torch.stack([reduce(torch.add, of_head).sum((1, 2)) for of_head in zip(*products, strict=True)], 1)


def mean_scores(q: Tensor, center: Tensor) -> Tensor:
    """``q`` ``[BH, R, D]`` with the mean of the keys, ``[B, H, 1, D]``: ``[BH, R, 1]``."""
    return (q * center.flatten(0, 1).float()).sum(-1, keepdim=True)

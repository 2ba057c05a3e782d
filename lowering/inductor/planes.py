"""What attention makes of pages plane by plane (`kvpass.codec.bitpack`), whatever their codec."""

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor


def in_storage_order(by_head: Sequence[Tensor], planes: int) -> Tensor:
    """Scores of planes ``[BH, N, T]``, those of a query head one behind the other: ``[BH, R, N * P]``."""
    return torch.stack(tuple(by_head), 1).unflatten(1, (-1, planes)).transpose(2, 3).flatten(2)


def weighted_sum(weights: Tensor, planes: Sequence[Tensor]) -> Tensor:
    """The values of planes, ``[BH, N, T, D]`` each, weighted by ``[BH, R, N, P]``: ``[BH, R, D]``."""
    by_plane = weights.unflatten(-1, (len(planes), -1))
    products = [[by_plane[:, r, :, j, :, None] * v for r in range(weights.shape[1])] for j, v in enumerate(planes)]
    return torch.stack([reduce(torch.add, of_head).sum((1, 2)) for of_head in zip(*products, strict=True)], 1)

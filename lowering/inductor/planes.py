"""What attention makes of pages, plane by plane (`kvpass.codec.bitpack`), and of their mean, whatever their codec."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from kvpass.codec.rope import split_pairs


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


def mean_scores(q: Tensor, center: Tensor, tables: tuple[Tensor, Tensor] | None, rope: str) -> Tensor:
    """``q`` ``[BH, R, D]`` with the mean of the keys, ``[B, H, 1, D]``, as it is turned at tokens with rotary tables
    ``[B, T, p]``: ``[BH, R, T]``, or ``[BH, R, 1]``."""
    mean = center.flatten(0, 1).float()
    if tables is None:
        return (q * mean).sum(-1, keepdim=True)
    batch = tables[0].shape[0]
    (q1, q2, q_rest), (m1, m2, m_rest) = split_pairs(q, rope), split_pairs(mean, rope)
    turns = (one.unflatten(0, (batch, -1)).flatten(1, 2) for one in (q1 * m1 + q2 * m2, q2 * m1 - q1 * m2))
    along, across = (one @ table.float().mT for one, table in zip(turns, tables, strict=True))  # [B, H * R, T]
    scores = (along + across).unflatten(1, (-1, q.shape[1])).flatten(0, 1)
    return scores + (q_rest * m_rest).sum(-1, keepdim=True) if q_rest.shape[-1] else scores

"""Fits the mean of keys per channel, which is subtracted before quantization."""

import torch
from torch import Tensor

_SIGNIFICANT = 3.0  # standard errors


def fit_center(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Mean over the tokens of ``x`` ``[B, H, T, D]``: ``[B, H, 1, D]`` in ``dtype``; 0 where it is not significant."""
    return fit_centers(x, torch.arange(len(x), device=x.device), len(x), dtype)


def fit_centers(x: Tensor, owner: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """`fit_center` for each of ``count`` requests: ``[count, H, 1, D]`` in ``dtype``.

    x: ``[M, H, P, D]``, blocks of tokens. owner: ``[M]``, the request that each block belongs to.
    """
    x = x.double()
    none = x.new_zeros(count, x.shape[1], x.shape[3])
    tokens = none.new_zeros(count, 1, 1).index_add(0, owner, none.new_full((len(x), 1, 1), x.shape[2]))
    mean = none.index_add(0, owner, x.sum(2)) / tokens
    spread = none.index_add(0, owner, (x - mean[owner].unsqueeze(2)).square().sum(2)) / (tokens - 1)
    error = torch.where(tokens > 1, (spread / tokens).sqrt(), torch.inf)
    return torch.where(mean.abs() > _SIGNIFICANT * error, mean, 0.0).to(dtype).unsqueeze(2)

"""The mean of keys, which is subtracted from them before they are coded: one for every channel."""

import torch
from torch import Tensor

_SIGNIFICANT = 3.0  # standard errors


def fit_center(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The mean over tokens of ``[B, H, T, D]``, 0 where it may as well be chance: ``[B, H, 1, D]`` in ``dtype``."""
    return fit_centers(x, torch.arange(len(x), device=x.device), len(x), dtype)


def fit_centers(x: Tensor, owner: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """The same of ``count`` requests, of tokens ``[M, H, P, D]`` the m-th of which are those of request ``owner[m]``:
    ``[count, H, 1, D]`` in ``dtype``."""
    x = x.double()
    none = x.new_zeros(count, x.shape[1], x.shape[3])
    tokens = none.new_zeros(count, 1, 1).index_add(0, owner, none.new_full((len(x), 1, 1), x.shape[2]))
    mean = none.index_add(0, owner, x.sum(2)) / tokens
    spread = none.index_add(0, owner, (x - mean[owner].unsqueeze(2)).square().sum(2)) / (tokens - 1)
    error = torch.where(tokens > 1, (spread / tokens).sqrt(), torch.inf)
    return torch.where(mean.abs() > _SIGNIFICANT * error, mean, 0.0).to(dtype).unsqueeze(2)

"""The mean of keys, which is subtracted from them before they are coded: one for every channel."""

import torch
from torch import Tensor

_SIGNIFICANT = 3.0  # standard errors


def fit_center(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The mean over tokens of ``[B, H, T, D]``, 0 where it may as well be chance: ``[B, H, 1, D]`` in ``dtype``."""
    x = x.double()
    mean, tokens = x.mean(2, keepdim=True), x.shape[2]
    error = x.std(2, keepdim=True) / tokens**0.5 if tokens > 1 else torch.full_like(mean, torch.inf)
    return torch.where(mean.abs() > _SIGNIFICANT * error, mean, 0.0).to(dtype)

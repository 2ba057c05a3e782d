"""Rotates channels by a random-sign Hadamard matrix (QuaRot, HIGGS).

The rotation spreads outliers over the channels of a head, so that every channel is close to normal. Its transpose is
its inverse. It is computed as sums and differences in a fixed order, so compiled and eager results are bitwise equal.
"""

import math
from functools import cache

import torch
from torch import Tensor


def signs(channels: int, seed: int, device: torch.device | None = None) -> Tensor:
    """Pseudo-random -1 and 1, ``[channels]`` float32: a hash of seed and channel, the same on every device."""
    mixed = torch.arange(1, channels + 1, device=device) * 0x1E3779B1 + (seed + 1) * 0x05EBCA6B
    for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & 0xFFFFFFFF
    return 1.0 - 2.0 * ((mixed ^ (mixed >> 15)) & 1).float()


def _hadamard(x: Tensor) -> Tensor:
    """Multiply by Sylvester's orthonormal matrix, in runs of the largest power of two that divides the number of
    channels."""
    channels = x.shape[-1]
    size = channels & -channels
    half = 1
    while half < size:
        pairs = x.unflatten(-1, (channels // (2 * half), 2, half))
        first, second = pairs.unbind(-2)
        x = torch.stack([first + second, first - second], -2).flatten(-3)
        half *= 2
    return x / math.sqrt(size)


def hadamard(x: Tensor, seed: int | None) -> Tensor:
    """Rotate ``x`` ``[..., D]`` float32. ``seed=None`` returns ``x`` unchanged."""
    return x if seed is None else _hadamard(x * signs(x.shape[-1], seed, x.device))


def inverse_hadamard(x: Tensor, seed: int | None) -> Tensor:
    """Inverse of `hadamard`."""
    return x if seed is None else _hadamard(x) * signs(x.shape[-1], seed, x.device)


@cache
def basis(channels: int, seed: int, device: torch.device | None = None) -> Tensor:
    """The rotation as a matrix ``[D, D]`` float32: ``hadamard(x) = x @ basis``."""
    return hadamard(torch.eye(channels, device=device), seed)

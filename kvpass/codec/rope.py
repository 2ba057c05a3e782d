"""Applies rotary embedding to dequantized keys (RoFormer, arXiv 2104.09864), for keys stored before it.

A text describes the rotation: "half-p" rotates channel pairs (i, i + p), "interleaved-p" pairs (2 i, 2 i + 1), for
i < p; channels from 2 p on are not rotated. Tables hold the cosine and sine for each stored token, including any
scaling by the model: ``[B, T, >= p]``.
"""

from functools import cache

import torch
from torch import Tensor


@cache
def parse_rope(rope: str) -> tuple[int, bool]:
    """The number of pairs, and whether they are interleaved."""
    kind, pairs = rope.split("-")
    return int(pairs), {"half": False, "interleaved": True}[kind]


def split_pairs(x: Tensor, rope: str) -> tuple[Tensor, Tensor, Tensor]:
    """Split ``[..., D]`` into the first and second channels of pairs, each ``[..., p]``, and the unrotated channels."""
    pairs, interleaved = parse_rope(rope)
    first, second = (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)) if interleaved else (
        slice(0, pairs), slice(pairs, 2 * pairs)
    )  # fmt: skip
    return x[..., first], x[..., second], x[..., 2 * pairs :]


def rotate_pairs(first: Tensor, second: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate each pair by its angle."""
    return first * cos - second * sin, second * cos + first * sin


def rope_of(pairs: int, interleaved: bool) -> str:
    """Inverse of `parse_rope`; "" for no pairs."""
    return f"{'interleaved' if interleaved else 'half'}-{pairs}" if pairs else ""


def rotate(x: Tensor, cos: Tensor, sin: Tensor, rope: str) -> Tensor:
    """Rotate ``x`` ``[B, H, T, D]`` by the first T rows of the tables. Computes in float32, returns the dtype of
    ``x``."""
    first, second, rest = split_pairs(x.float(), rope)
    cos, sin = (table[:, None, : x.shape[2], : first.shape[-1]].float() for table in (cos, sin))
    out = torch.empty(x.shape, device=x.device)
    to_first, to_second, to_rest = split_pairs(out, rope)  # written in place: new memory takes longer than products
    to_first.copy_(first).mul_(cos).sub_(second * sin)
    to_second.copy_(second).mul_(cos).add_(first * sin)
    to_rest.copy_(rest)
    return out.to(x.dtype)

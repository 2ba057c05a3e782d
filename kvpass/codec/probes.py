"""Samples the prompt's queries, to estimate which tokens of a page get attention (probes of ZipCache, arXiv 2405.14256,
section 4.2)."""

import math

import torch
from torch import Tensor

from .codec import Kept

QUERIES = 32
"""Number of queries to keep per KV head."""
PROBES = Kept(lambda spec, head_dim: (QUERIES, head_dim))
"""Declares the queries as a tensor of a sequence."""


def some_queries(q: Tensor, valid: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Sample `QUERIES` queries of each KV head at even distances: ``[B, H, Q, D]`` in ``dtype``.

    They are divided by ``sqrt(head_dim)``, as in attention.

    q: ``[B, H, N, D]``, the queries of each KV head.
    valid: ``[B, N]`` bool, False for padding, which is not sampled. None means no padding.
    """
    if valid is None:
        valid = torch.ones(len(q), q.shape[2], dtype=torch.bool, device=q.device)
    index = sampled(valid, QUERIES)
    chosen = q.gather(2, index[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3]))
    return (chosen.float() / math.sqrt(q.shape[3])).to(dtype)


def sampled(valid: Tensor, count: int) -> Tensor:
    """The indices of ``count`` of the tokens that are ``valid`` ``[B, N]``, at even distances: ``[B, count]`` int64."""
    those = torch.argsort(~valid, dim=-1, stable=True)
    apart = (torch.arange(count, device=valid.device) + 0.5) / count
    return those.gather(-1, (valid.sum(-1, keepdim=True) * apart).long())

"""Some of the prompt's queries, kept to say which tokens of a page attention will look at (probes of ZipCache, arXiv
2405.14256, section 4.2)."""

import math

import torch
from torch import Tensor

from .codec import Kept

QUERIES = 32
"""How many are kept."""
PROBES = Kept(lambda spec, head_dim: (QUERIES, head_dim))
"""They as a tensor of a sequence."""


def some_queries(q: Tensor, valid: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`QUERIES` of those of a KV head, ``[B, H, N, D]``, that are no padding, as far apart as can be, and scaled as
    attention does: ``[B, H, Q, D]``.

    valid: ``[B, N]`` bool.
    """
    if valid is None:
        valid = torch.ones(len(q), q.shape[2], dtype=torch.bool, device=q.device)
    those = torch.argsort(~valid, dim=-1, stable=True)
    apart = (torch.arange(QUERIES, device=q.device) + 0.5) / QUERIES
    index = those.gather(-1, (valid.sum(-1, keepdim=True) * apart).long())
    chosen = q.gather(2, index[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3]))
    return (chosen.float() / math.sqrt(q.shape[3])).to(dtype)

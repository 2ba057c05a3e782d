"""Computes the query-subspace compensation of SQuat (arXiv 2503.24358, appendix B and C).

Let P = I + lambda Q^T Q over the kept query directions. If a block of channels has a fixed error d, then ``e^T P e`` is
minimal over the remaining channels at ``-P_rr^{-1} P_rb d``. By the block inverse this equals the paper's ``B_t H_t d``
(eq. 6), but it needs no inverse of P.
"""

import torch
from torch import Tensor

from .quantizer import Subspace


def precision_matrix(q: Tensor, subspace: Subspace, valid: Tensor | None = None) -> Tensor:
    """The matrix P for queries ``q``: ``[B, H_kv, D, D]`` float64.

    q: ``[B, H_kv, N, D]``, the query heads of each KV head concatenated along N.
    valid: ``[B, N]`` bool, False for padding, which is ignored. None means no padding.
    """
    q = q.double()
    if valid is not None:
        q = q * valid[:, None, :, None]
    energy, directions = torch.linalg.eigh(q.mT @ q)
    rank = min(subspace.rank, q.shape[-1])
    energy, directions = energy[..., -rank:].clamp_min(0), directions[..., -rank:]
    if subspace.relative:
        per_channel = q.square().sum((-1, -2)).unsqueeze(-1) / q.shape[-1]
        energy = torch.where(per_channel > 0, energy / per_channel, 0.0)
    update: Tensor = (directions * energy[..., None, :]) @ directions.mT
    return torch.eye(q.shape[-1], dtype=q.dtype, device=q.device) + subspace.weight * update


def compensation_matrix(precision: Tensor, block_size: int) -> Tensor:
    """The compensation matrix: the columns of block t are ``-P_rr^{-1} P_rt``, the response of all later channels to a
    unit error in block t.

    ``[B, H_kv, D, D]`` -> ``[B, H_kv, D - block_size, D - block_size]``, block lower triangular (row 0 is channel
    ``block_size``).
    """
    size = precision.shape[-1]
    out = torch.zeros_like(precision[..., block_size:, block_size:])
    for start in range(0, size - block_size, block_size):
        rest = slice(start + block_size, size)
        block = slice(start, start + block_size)
        out[..., start:, start : start + block_size] = -torch.linalg.solve(
            precision[..., rest, rest], precision[..., rest, block]
        )
    return out

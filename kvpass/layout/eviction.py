"""Importance of tokens, who stays when there is a budget, and the slots they keep.

Importance is one float32 for every stored token, in the order of storage, ``[B, H, n]`` with H the KV heads, or 1 where
all heads and layers keep the same. With a budget, ``-inf`` marks padding: it is never attended to, and goes first.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .retention import Retention


def choose(importance: Tensor, occupied: int, budget: int) -> Tensor:
    """The ``budget`` most important of the candidates ``[B, H, occupied + L]``, the first of which occupy slots: for
    each slot the candidate that has it from now on, ``[B, H, budget]`` int64.

    Those that have a slot and stay keep it; the others take the free ones in order.
    """
    winners = torch.zeros_like(importance, dtype=torch.bool)
    winners.scatter_(-1, importance.topk(budget, -1).indices, True)
    own = torch.arange(budget, device=importance.device)
    free = torch.ones_like(winners[..., :budget])
    free[..., :occupied] = ~winners[..., :occupied]
    arriving = occupied + winners[..., occupied:].logical_not().sort(dim=-1, stable=True).indices
    turn = (free.cumsum(-1) - 1).clamp(0, arriving.shape[-1] - 1)
    return torch.where(free, arriving.gather(-1, turn), own)


def update_importance(
    importance: Tensor, n: int, tokens: int, scores: Sequence[Tensor], valid: Tensor | None, retention: Retention
) -> Tensor:
    """Account for ``tokens`` new tokens behind the ``n`` of ``importance``: ``[B, H, n + tokens]``.

    scores: attention paid to each, ``[B, H_kv, n + tokens]``, from every layer that has a say; unused for "age".
    valid: ``[B, tokens]`` bool, False for padding; None for no padding.
    """
    past = importance[..., :n]
    if retention.evict == "age":  # minus the tokens since: small where it counts, however many have been seen
        past, new = past - tokens, torch.arange(-tokens, 0, device=past.device).expand(*past.shape[:2], -1).to(past)
    else:
        total = torch.stack([s.sum(1, keepdim=True) if retention.shared else s for s in scores]).sum(0)
        past, new = past + total[..., :n], total[..., n:]
    if valid is not None:
        new = new.masked_fill(~valid[:, None], -torch.inf)
    return torch.cat([past, new], -1)


def evict(x: Tensor, slots: Tensor, gone: int, retention: Retention) -> Tensor:
    """``x`` ``[B, H, n, ...]``, one entry for every stored token, without the ``gone`` that lost their place."""
    first, end = retention.sinks, retention.sinks + retention.budget + gone
    index = slots.view(*slots.shape, *[1] * (x.ndim - 3)).expand(*x.shape[:2], -1, *x.shape[3:])
    return torch.cat([x[:, :, :first], x[:, :, first:end].gather(2, index), x[:, :, end:]], 2)

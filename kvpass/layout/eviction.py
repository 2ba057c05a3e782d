"""Attention mass of tokens, which tokens stay within a budget, and the slots they occupy.

Importance, the attention mass, is one float32 for every stored token, in storage order: ``[B, H, n]`` with H the KV
heads, or 1 if all heads and layers keep the same tokens. With a budget, ``-inf`` marks padding, which gets no attention
and is evicted first.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .retention import Retention

OBSERVED, POOLED = 32, 7
"""SnapKV's settings: the number of last queries of a call whose attention counts, and of neighbours that share it."""


def choose(importance: Tensor, occupied: int, budget: int) -> Tensor:
    """For each slot, the candidate that occupies it from now on: ``[B, H, budget]`` int64.

    Those are the ``budget`` most important of the candidates ``[B, H, occupied + L]``, the first of which occupy slots
    already. Candidates that stay keep their slots; the others take the free ones in order.
    """
    winners = torch.zeros_like(importance, dtype=torch.bool)
    winners.scatter_(-1, importance.topk(budget, -1).indices, True)
    own = torch.arange(budget, device=importance.device)
    free = torch.ones_like(winners[..., :budget])
    free[..., :occupied] = ~winners[..., :occupied]
    arriving = occupied + winners[..., occupied:].logical_not().sort(dim=-1, stable=True).indices
    turn = (free.cumsum(-1) - 1).clamp(0, arriving.shape[-1] - 1)
    return torch.where(free, arriving.gather(-1, turn), own)


def every_second(age: Tensor, budget: int) -> Tensor:
    """Importance of the candidates of "log" eviction: 1 for the ``budget`` that stay, 0 for the others.

    age: ``[B, H, n]``, ascending from the oldest. Whenever ``budget`` more tokens arrive, every second one of all
    stays, beginning with the oldest (LogQuant, algorithm 1).
    """
    order = age.argsort(-1)
    kept = order[..., :budget]
    for page in order[..., budget:].split(budget, -1):
        kept = torch.cat([kept, page], -1)[..., ::2]
    return torch.zeros_like(age).scatter(-1, kept, 1.0)


def pooled(mass: Tensor) -> Tensor:
    """The attention mass ``[B, H, n]`` of the tokens of a call, as SnapKV compares it: the largest of `POOLED`
    neighbours. The last `OBSERVED` tokens, whose queries it comes from, stay as they are."""
    before, own = mass[..., :-OBSERVED], mass[..., -OBSERVED:]
    return torch.cat([F.max_pool1d(before, POOLED, 1, POOLED // 2), own], -1) if before.shape[-1] else mass


def update_importance(
    importance: Tensor, n: int, tokens: int, scores: Sequence[Tensor], valid: Tensor | None, retention: Retention
) -> Tensor:
    """``importance`` ``[B, H, n]`` extended by ``tokens`` new tokens: ``[B, H, n + tokens]``.

    scores: attention mass of each token, ``[B, H_kv, n + tokens]``, from every layer that counts; unused for "age" and
        "log".
    valid: ``[B, tokens]`` bool, False for padding; None for no padding.
    """
    past = importance[..., :n]
    if retention.evict in ("age", "log"):  # minus the number of later tokens, which stays small for recent ones
        past, new = past - tokens, torch.arange(-tokens, 0, device=past.device).expand(*past.shape[:2], -1).to(past)
    else:
        total = torch.stack([s.sum(1, keepdim=True) if retention.shared else s for s in scores]).sum(0)
        past, new = past + total[..., :n], total[..., n:]
        if retention.evict == "observed":
            new = pooled(new)
    if valid is not None:
        new = new.masked_fill(~valid[:, None], -torch.inf)
    return torch.cat([past, new], -1)


def evict(x: Tensor, slots: Tensor, gone: int, retention: Retention) -> Tensor:
    """``x`` ``[B, H, n, ...]``, one entry per stored token, without the ``gone`` tokens that lost their slots."""
    first, end = retention.sinks, retention.sinks + retention.budget + gone
    index = slots.view(*slots.shape, *[1] * (x.ndim - 3)).expand(*x.shape[:2], -1, *x.shape[3:])
    return torch.cat([x[:, :, :first], x[:, :, first:end].gather(2, index), x[:, :, end:]], 2)

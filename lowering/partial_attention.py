"""Attention over some of the tokens that queries see, in a form that can be combined with attention over the others.

The softmax is that of the given tokens alone. The logarithm of its denominator says how much it counts. Only this file
calls torch's CPU flash attention by itself; see ``tests/test_private_apis.py``.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class Partial(NamedTuple):
    """Attention over some tokens.

    out: ``[B, H, S, D]`` float32; zeros for queries that see none of the tokens.
    lse: ``[B, H, S]`` float32, the log of the sum of the exponentials of all scores; -inf for such queries.
    """

    out: Tensor
    lse: Tensor

    @classmethod
    def over_nothing(cls, shape: tuple[int, ...], device: torch.device) -> "Partial":
        """Attention over no token, with an output of ``shape``."""
        return cls(torch.zeros(shape, device=device), torch.full(shape[:3], -torch.inf, device=device))

    def and_also(self, other: "Partial") -> "Partial":
        """Attention over the tokens of both. Overwrites ``self.out``."""
        lse = torch.logaddexp(self.lse, other.lse)
        mine, others = ((part.lse - lse).exp().nan_to_num(0).unsqueeze(-1) for part in (self, other))
        return Partial(self.out.mul_(mine).addcmul_(other.out, others), lse)

    def with_sinks(self, sinks: Tensor) -> "Partial":
        """Attention in which the logits ``sinks`` ``[H]`` join the softmax without a value. Overwrites ``self.out``."""
        lse = torch.logaddexp(self.lse, sinks.float().view(1, -1, 1))
        return Partial(self.out.mul_((self.lse - lse).exp().unsqueeze(-1)), lse)


def attend_partially(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, softcap: float = 0.0, causal: bool = False
) -> Partial:
    """Attention of ``q`` ``[B, H, S, D]`` over ``k`` ``[B, H, T, D]`` and ``v`` ``[B, H, T, D_v]``, with T > 0.

    bias: added to the scores, ``[B or 1, H or 1, S or 1, T]`` float; -inf hides a token.
    causal: query i sees the tokens up to i. Not allowed with ``bias``.
    """
    if softcap or q.device.type != "cpu" or k.shape[-1] != v.shape[-1] or q.dtype not in _SERVED:
        return _spelled_out(q, k, v, bias, scale, softcap, causal)
    out, lse = _flash(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    if bias is not None:  # torch returns 0 for queries that see nothing
        lse = lse.masked_fill((bias == -torch.inf).all(-1), -torch.inf)
    return Partial(out.float(), lse)


_SERVED = torch.float32, torch.bfloat16, torch.float16


def _spelled_out(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, softcap: float, causal: bool
) -> Partial:
    scores = q.float() @ k.float().mT * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    if causal:
        scores = scores.masked_fill(
            ~torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(), -torch.inf
        )
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp().nan_to_num(0)
    return Partial(weights @ v.float(), lse)

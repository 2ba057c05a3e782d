"""Attention of many queries over a part of a context on a CPU (flash attention, arXiv:2205.14135), and what parts are
added up by."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from kvpass.layout.spans import HIDDEN

from .build import build, source

_TYPES = [*4 * ["const float*"], *2 * ["float*"], *7 * ["int64_t"]]


@cache
def _kernel(head_dim: int) -> Callable[..., None]:
    return build(source(dict(HEAD=head_dim, HIDDEN=HIDDEN), "flash.cpp"), _TYPES)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention of scaled ``q`` ``[N, H_q, Q, D]`` over ``k`` and ``v`` ``[N, H, C, D]``, all float32: its output, and
    the logarithm of the sum of its weights ``[N, H_q, Q, 1]``.

    mask: ``[N, 1, 1 or Q, C]``, added to scores, or None.
    """
    q, k, v = (x.contiguous() for x in (q, k, v))
    (batch, q_heads, queries, head_dim), (heads, tokens) = q.shape, k.shape[1:3]
    out, logsum = torch.empty_like(q), q.new_empty(batch, q_heads, queries, 1)
    mask_rows = 0 if mask is None else mask.shape[2]
    _kernel(head_dim)(
        q, k, v, q if mask is None else mask.contiguous(), out, logsum, batch, heads, q_heads // heads * queries,
        queries, tokens, mask_rows, torch.get_num_threads(),
    )  # fmt: skip
    return out, logsum

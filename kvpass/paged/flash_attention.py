"""Attention of many queries over a part of a context on a CPU (flash attention, arXiv:2205.14135), accumulated over
parts."""

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ..lowering.cpp.build import FLOATS, INT64S, NUMBER, WRITTEN_FLOATS, build, source
from .context_spans import HIDDEN

DTYPES = torch.float32, torch.bfloat16
"""Dtypes of keys and values. bfloat16 products use the processor's instructions, if it has them."""
_SOURCE = Path(__file__).with_name("flash_attention.cpp")
_GIVEN = {torch.float32: FLOATS, torch.bfloat16: "const uint16_t*"}


@cache
def _kernel(head_dim: int, scale: float, dtype: torch.dtype) -> Callable[..., None]:
    defines = dict(HEAD=head_dim, FACTOR=scale / math.log(2), BFLOAT16=int(dtype == torch.bfloat16), HIDDEN=HIDDEN)
    types = [*3 * [_GIVEN[dtype]], FLOATS, INT64S, *2 * [WRITTEN_FLOATS], *7 * [NUMBER]]
    return build(source(defines, _SOURCE), types)


class Parts:
    """Attention of ``q`` ``[N, H_q, Q, D]`` over a context, part by part.

    Over all parts so far: ``out``, float32 of that shape, and ``logsum`` ``[N, H_q, Q]``, the logarithm of the sum of
    weights.
    """

    def __init__(self, q: Tensor, scale: float) -> None:
        self._q, self._scale = q.contiguous(), scale
        self.out = torch.zeros_like(self._q, dtype=torch.float32)
        self.logsum = self.out.new_full(q.shape[:3], torch.finfo(torch.float32).min)

    def add(self, tiles: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
        """Add a part of the context of the tiles ``tiles`` ``[A]``: keys and values ``[A, H, C, D]`` of one of
        `DTYPES`, the dtype of the queries.

        mask: ``[A, 1, 1 or Q, C]``, added to scores, or None.
        """
        (_, q_heads, queries, head_dim), (batch, heads, tokens, _) = self._q.shape, k.shape
        added = self.out if mask is None else mask.contiguous()  # without a mask, the argument is not read
        _kernel(head_dim, self._scale, k.dtype)(
            self._q, k.contiguous(), v.contiguous(), added, tiles.contiguous(), self.out, self.logsum, batch, heads,
            q_heads // heads * queries, queries, tokens, 0 if mask is None else mask.shape[2], torch.get_num_threads(),
        )  # fmt: skip

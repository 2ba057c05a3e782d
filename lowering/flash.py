"""Attention over a part of a context on a CPU, and what parts are added up by. The only file that knows torch's private
operator for it; see ``tests/test_private_apis.py``."""

import torch
from torch import Tensor

LEAST = -1e30
"""A score below all others that leaves differences of two, and rows whose tokens are all hidden, defined."""


def serves(device: torch.device, softcap: float) -> bool:
    """Whether `attend` can."""
    return device.type == "cpu" and not softcap


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of ``q`` ``[N, H_q, Q, D]`` over ``k`` and ``v`` ``[N, H, C, D]``, all float32: its output, and the
    logarithm of the sum of its weights ``[N, H_q, Q, 1]``, which is very small where nothing is seen.

    seen: ``[N, 1 or Q, C]`` bool, or None where all is.
    """
    shape, heads, mask = q.shape, k.shape[1], None
    if seen is None:  # heads that share keys are rows of one
        q = q.reshape(len(q), heads, -1, shape[-1])
    else:
        k, v = (x.repeat_interleave(shape[1] // heads, 1) for x in (k, v))
        mask = torch.where(seen, 0.0, LEAST).unsqueeze(1)
    out, logsum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask, scale=scale)
    return out.reshape(shape), logsum.reshape(*shape[:-1], 1)

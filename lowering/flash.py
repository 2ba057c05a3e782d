"""Attention over a part of a context on a CPU, and what parts are added up by. The only file that knows torch's private
operator for it; see ``tests/test_private_apis.py``."""

import torch
from torch import Tensor


def serves(device: torch.device, softcap: float) -> bool:
    """Whether `attend` can."""
    return device.type == "cpu" and not softcap


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of ``q`` ``[N, H_q, Q, D]`` over ``k`` and ``v`` ``[N, H, C, D]``, all of one dtype: its output, and
    the logarithm of the sum of its weights ``[N, H_q, Q, 1]`` float32.

    mask: ``[N, 1, 1 or Q, C]``, added to scores, or None.
    """
    shape, heads = q.shape, k.shape[1]
    if mask is None or mask.shape[2] == 1:  # heads that share keys are rows of one
        q = q.reshape(len(q), heads, -1, shape[-1])
    else:
        k, v = (x.repeat_interleave(shape[1] // heads, 1) for x in (k, v))
    out, logsum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask, scale=scale)
    return out.reshape(shape), logsum.reshape(*shape[:-1], 1)

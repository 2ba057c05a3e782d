"""Attention of one token of each sample of a cache in C++, of those specs there is a kernel for."""

from collections.abc import Callable

import torch
from torch import Tensor

from kvpass.codec.spec import CodecSpec

from . import attend_allocated, attend_codes

_MOST = 8  # queries of a KV head: sums of more do not stay in registers


def kernel_of(
    key: CodecSpec, value: CodecSpec, head_dim: int, dtype: torch.dtype, queries: int, device: torch.device
) -> Callable[..., Tensor] | None:
    """What attends to a cache of these specs, of tokens of ``dtype`` and KV heads of as many ``queries``, without a
    mask, a softcap and sinks in the softmax; None if nothing does."""
    if device.type != "cpu" or queries > _MOST:
        return None
    asked = key, value, head_dim, dtype
    return next((one.attend for one in (attend_codes, attend_allocated) if one.serves(*asked)), None)

"""Arguments that all attention kernels take in the same form."""

import torch
import triton.language as tl
from torch import Tensor

from .configs import INTERPRETED

OPERANDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
MAX_VALUES = 1 << 31  # values per head: kernels use 32-bit offsets within a head
MERGED_AT_ONCE = 16  # splits to merge at a time


def operand_dtype(dtype: torch.dtype) -> torch.dtype:
    """The datatype of products for queries of ``dtype``."""
    return torch.float32 if INTERPRETED and dtype == torch.bfloat16 else dtype  # the interpreter has no bfloat16


def mask_and_strides(mask: Tensor | None) -> tuple[Tensor | None, tuple[int, ...]]:
    """The mask as kernels read it, and its strides of samples, heads and queries; 0 where it has one for all."""
    if mask is None:
        return None, (0, 0, 0)
    mask = (mask.view(torch.uint8) if mask.dtype == torch.bool else mask).contiguous()
    sizes = zip(mask.stride()[:3], mask.shape[:3], strict=True)
    return mask, tuple(stride if size > 1 else 0 for stride, size in sizes)

"""Arguments that all attention kernels take in the same form."""

import torch
import triton.language as tl
from torch import Tensor

from kvpass.errors import KVPassError

from ..call_types import AttendCall
from .configs import INTERPRETED
from .scores import Rules

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


def rules_of(call: AttendCall, mask: Tensor | None, tile: int) -> Rules:
    """The compile-time constants of ``call`` in tiles of ``tile`` query rows. mask: that of `mask_and_strides`."""
    return Rules(
        call.q.shape[1], call.k_new.shape[1], call.causal and call.q.shape[2] > 1, call.softcap,
        mask is not None and mask.dtype == torch.uint8, tile, OPERANDS[operand_dtype(call.q.dtype)],
    )  # fmt: skip


def check_values(tokens: int, widest: int, what: str) -> None:
    """Raise `KVPassError` for more ``tokens`` than kernels can index. widest: the most values per token in a tensor of
    a head; what: the tokens, for the error."""
    if tokens * widest >= MAX_VALUES:
        raise KVPassError(
            f"The Triton kernels support up to {MAX_VALUES // widest - 1} tokens of {what}, not {tokens}: use "
            "kvpass.apply(..., lowering='reference')."
        )

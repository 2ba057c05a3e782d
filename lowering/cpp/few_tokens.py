"""Registers the C++ attention of a few query tokens per sample, for the specs that have a kernel."""

from collections.abc import Callable

import torch
from torch import Tensor

from kvpass.codec.spec import CodecSpec, parse
from kvpass.codec.tensors import Pack

from ..call_types import AttendCall
from ..inductor.page_view import ATTENDED
from ..reference import with_past, with_starts
from ..table import FEW, LSE, DispatchKey, implements
from . import attend_allocated, attend_codes

_EXTRAS = "mask", "padding", "sinks", LSE


def kernel_of(
    key: CodecSpec, value: CodecSpec, head_dim: int, dtype: torch.dtype
) -> Callable[..., list[Tensor]] | None:
    """The kernel for caches with these specs and tokens of ``dtype``; None if there is none. It takes an `AttendCall`
    and returns its outputs."""
    case = key, value, head_dim, dtype
    return next((one.attend for one in (attend_codes, attend_allocated) if one.serves(*case)), None)


def _refuses(dispatch: DispatchKey) -> str | None:
    if dispatch.device != "cpu":
        return "it runs on CPUs."
    if not dispatch.specs:
        return "the past is already dequantized."
    if not dispatch.queries:
        return f"it attends with at most {FEW} query tokens."
    if dispatch.dtype is None:
        return "the dtypes of queries and cache differ."
    if other := [name for name in dispatch.extras if name not in _EXTRAS]:
        return f"it does not support {', '.join(other)}."
    key, value = map(parse, dispatch.specs)
    if kernel_of(key, value, dispatch.head_dim, dispatch.dtype) is None:
        return "it has no kernel for this codec, head_dim and dtype."
    if key.retention.keep != "recent" and {"mask", "padding"} & set(dispatch.extras):
        return "it reads pages of tokens that are not consecutive, so it cannot apply a mask."
    return None


@implements("attend", "cpp", has=ATTENDED, refuses=_refuses)
def attend(call: AttendCall[Pack]) -> list[Tensor]:
    kernel = kernel_of(call.k_spec, call.v_spec, call.q.shape[3], call.q.dtype)
    assert kernel is not None, "the table asks `_refuses` first"
    return kernel(with_past(with_starts(call)))

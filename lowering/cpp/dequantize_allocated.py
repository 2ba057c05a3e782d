"""Dequantizes pages with per-channel bit widths (`kvpass.codec.allocation`, `kvpass.codec.layer_pages`) on CPUs."""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from kvpass.codec.allocation import Allocation
from kvpass.codec.by_head import ByHead
from kvpass.codec.shares import Shares
from kvpass.codec.spec import CodecSpec, parse

from .. import reference
from ..append import PER_CHANNEL_PAGES
from ..call_types import DequantizeCall
from ..inductor.pages import CPU_KERNELS, dequantize_all
from ..table import DispatchKey, implements
from .allocated import fields_type, look_up_table, page_source
from .build import BYTES, FLOATS, NUMBER, WRITTEN_FLOATS, build, text

_CODECS = Allocation, ByHead, Shares


@cache
def _kernel(spec: CodecSpec, head_dim: int) -> Callable[..., None]:
    types = [BYTES, FLOATS, fields_type(spec), FLOATS, WRITTEN_FLOATS, *5 * [NUMBER]]
    return build(page_source(spec, head_dim) + text({}, "dequantize_allocated.cpp"), types)


def dequantize_pages(kept: Sequence[Tensor], spec: CodecSpec) -> Tensor:
    """`kvpass.codec.pages.dequantize_pages` of these codecs: ``[B, H, N * P, D]`` float32."""
    pages, basis, fields = kept
    (batch, _, count, *_), (_, heads, head_dim, _) = pages.shape, basis.shape
    out = torch.empty(batch, heads, count * spec.page_size, head_dim)
    _kernel(spec.stored_as, head_dim)(
        pages.contiguous(), basis.float().contiguous(), fields.contiguous(), look_up_table(pages.device), out, batch,
        heads, count, int(len(basis) == batch), torch.get_num_threads(),
    )  # fmt: skip
    return out


CPU_KERNELS.update({codec.name: dequantize_pages for codec in _CODECS})


def refuses(dispatch: DispatchKey) -> str | None:
    """Why these kernels cannot serve ``dispatch``, or None if they can."""
    if dispatch.device != "cpu":
        return "it runs on CPUs."
    if not all(isinstance(parse(spec).codec, _CODECS) for spec in dispatch.specs):
        return "it has no kernel for this codec."
    return None


@implements("dequantize", "cpp", has=(PER_CHANNEL_PAGES,), refuses=refuses, lowering="inductor")
def dequantize(call: DequantizeCall) -> Tensor:
    return reference.read(dequantize_all, call)

"""The functions that quantize and dequantize whole pages outside of a graph."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kvpass.codec.spec import CodecSpec

from .cpp import shares_pages
from .inductor.pages import dequantize_all
from .reference import dequantize_predicted
from .table import DispatchKey, Implementation, select


class Codecs(NamedTuple):
    """The functions that quantize and dequantize pages: ``quantize(x, fitted, spec)``, and ``dequantize(kept, spec, (),
    ())``."""

    quantize: Callable[..., tuple[Tensor, ...]]
    dequantize: Callable[..., Tensor]


def codecs_for(spec: CodecSpec, device: torch.device, head_dim: int, lowering: str = "auto") -> Codecs:
    """The implementations that quantize and dequantize pages of ``spec``, chosen by the dispatch table. Raises
    `KVPassError` if there is none."""

    def chosen(op: str) -> Implementation:
        return select(DispatchKey(op, device.type, (str(spec),), head_dim=head_dim), lowering)

    own = {"inductor": dequantize_all, shares_pages.NAME: shares_pages.dequantize_pages}
    dequantize = own.get(chosen("dequantize").name, dequantize_predicted)
    return Codecs(chosen("quantize").run, dequantize)

"""The functions that quantize and dequantize whole pages outside of a graph."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kvpass.codec.spec import CodecSpec

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

    compiled = chosen("dequantize").lowering == "inductor"
    return Codecs(chosen("quantize").run, dequantize_all if compiled else dequantize_predicted)

"""Quantizes pages with per-channel bit widths (`kvpass.codec.allocation`, `kvpass.codec.layer_pages`) on CPUs."""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from kvpass.codec.affine import check_finite
from kvpass.codec.spec import CodecSpec
from kvpass.codec.token_ranks import Ranked
from kvpass.codec.transform_coding import DISTORTION, GAINS_TRIED, LEAST_GAIN, OCTAVE, STEPS, UNIT

from ..append import PER_CHANNEL_PAGES, append, append_layers
from ..call_types import AppendCall, AppendLayersCall
from ..table import DispatchKey, implements
from .allocated import fields_type, page_source
from .attend_codes import LANES
from .build import BYTES, FLOATS, FRACTION, INT64S, NUMBER, WRITTEN_BYTES, build, text
from .dequantize_allocated import refuses


@cache
def _kernel(spec: CodecSpec, head_dim: int) -> Callable[..., None]:
    types = [FLOATS, BYTES, fields_type(spec), *2 * [FLOATS], INT64S, WRITTEN_BYTES]
    types += [*7 * [NUMBER], *2 * [FRACTION]]
    return build(page_source(spec, head_dim) + text({}, "quantize_allocated.cpp"), types)


@cache
def _constants() -> tuple[Tensor, Tensor, Tensor]:
    """Step sizes and squared errors by bit width, and the gains to try, as offsets of their levels."""
    return torch.tensor(STEPS), torch.tensor(DISTORTION), torch.tensor(GAINS_TRIED)


def _refuses(dispatch: DispatchKey) -> str | None:
    if (reason := refuses(dispatch)) is not None:
        return reason
    return "it reads a vector of channels at a time." if dispatch.head_dim % LANES else None


@implements("quantize", "cpp", has=(PER_CHANNEL_PAGES,), refuses=_refuses, lowering="inductor")
def quantize(x: Tensor, fitted: Sequence[Tensor], spec: CodecSpec) -> tuple[Tensor]:
    batch, heads, tokens, head_dim = x.shape
    codec, pages = spec.codec, tokens // spec.page_size
    assert isinstance(codec, Ranked), "the table asks `_refuses` first"
    size, basis, fields, chosen = codec.opened(fitted, spec)
    units, high_mask = codec.units(x, basis, spec, chosen)
    check_finite(units)
    out = torch.zeros(batch, 1 if codec.whole_layer else heads, pages, 1, size, dtype=torch.uint8)
    _kernel(spec.stored_as, head_dim)(
        units.contiguous(), out if high_mask is None else high_mask.contiguous(), fields.contiguous(), *_constants(),
        out, len(GAINS_TRIED), batch, heads, pages, int(len(fields) == batch), UNIT, torch.get_num_threads(),
        float(OCTAVE), LEAST_GAIN,
    )  # fmt: skip
    return (out,)


@implements("append_", "cpp", has=(PER_CHANNEL_PAGES,), refuses=_refuses, lowering="inductor")
def append_(call: AppendCall) -> None:
    append(quantize, call)


@implements("append_layers_", "cpp", has=(PER_CHANNEL_PAGES,), refuses=_refuses, lowering="inductor")
def append_layers_(call: AppendLayersCall) -> None:
    append_layers(quantize, call)

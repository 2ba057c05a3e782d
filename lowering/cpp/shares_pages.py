"""Quantizes pages that hold all heads (`kvpass.codec.layer_pages`) on CPUs."""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from kvpass.codec.affine import check_finite
from kvpass.codec.layer_pages import LayerPages
from kvpass.codec.spec import CodecSpec, parse
from kvpass.codec.transform_coding import DISTORTION, GAINS_TRIED, LEAST_GAIN, OCTAVE, STEPS, UNIT

from ..append import append, append_layers
from ..call_types import AppendCall, AppendLayersCall
from ..table import DispatchKey, implements
from .attend_allocated import shared_defines
from .attend_codes import LANES
from .build import build, source, text

NAME = "cpp-layer-pages"
_FEATURES = {
    "codec=shares", "codec=by_head", "codec.follows", "codec.adapts", "codec.ranked", "codec.rich_pairs",
    "codec.rich_singles", "per=token", "bits=8", "center", "page_rope", "numbered",
}  # fmt: skip
_BYTES, _INTS, _FLOATS, _NUMBER = "const uint8_t*", "const int32_t*", "const float*", "int64_t"
_TYPES = {
    "shares_quantize": [_FLOATS, _BYTES, _BYTES, *2 * [_FLOATS], "const int64_t*", "uint8_t*", *7 * [_NUMBER],
                        *2 * ["float"]],
}  # fmt: skip


@cache
def _kernel(name: str, spec: CodecSpec, head_dim: int) -> Callable[..., None]:
    defines = dict(QUERIES=1, HEAD=head_dim, BLOCK=LayerPages.of(spec).block_size, PAGE=spec.page_size)
    files = text(shared_defines(spec, head_dim), "allocated.h", "shares_pages.h", f"{name}.cpp")
    return build(source(defines) + files, _TYPES[name])


@cache
def _constants() -> tuple[Tensor, Tensor, Tensor]:
    """Step sizes and squared errors by bit width, and the gains to try, as offsets of their levels."""
    return torch.tensor(STEPS), torch.tensor(DISTORTION), torch.tensor(GAINS_TRIED)


def _refuses(dispatch: DispatchKey) -> str | None:
    if dispatch.device != "cpu":
        return "it runs on CPUs."
    if not all(isinstance(parse(spec).codec, LayerPages) for spec in dispatch.specs):
        return "its pages hold all heads of a layer."
    return "it reads a vector of channels at a time." if dispatch.head_dim % LANES else None


@implements("quantize", NAME, has=(_FEATURES,), refuses=_refuses, lowering="inductor")
def quantize(x: Tensor, fitted: Sequence[Tensor], spec: CodecSpec) -> tuple[Tensor]:
    codec = LayerPages.of(spec)
    size, basis, widths, chosen = codec.opened(fitted, spec)
    batch, heads, tokens, head_dim = x.shape
    units, high_mask = codec.units(x, basis, spec, chosen)
    check_finite(units)
    pages = tokens // spec.page_size
    out = torch.zeros(batch, 1, pages, 1, size, dtype=torch.uint8)
    _kernel("shares_quantize", spec.stored_as, head_dim)(
        units.contiguous(), widths if high_mask is None else high_mask.contiguous(),
        widths.contiguous(), *_constants(), out, len(GAINS_TRIED), batch, heads, pages, int(len(widths) == batch),
        UNIT, torch.get_num_threads(), float(OCTAVE), LEAST_GAIN,
    )  # fmt: skip
    return (out,)


@implements("append_", NAME, has=(_FEATURES,), refuses=_refuses, lowering="inductor")
def append_(call: AppendCall) -> None:
    append(quantize, call)


@implements("append_layers_", NAME, has=(_FEATURES,), refuses=_refuses, lowering="inductor")
def append_layers_(call: AppendLayersCall) -> None:
    append_layers(quantize, call)

"""Quantizes tokens to the points of a grid (`kvpass.codec.codebook`) on CPUs."""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from kvpass.codec.across_heads import AcrossHeads
from kvpass.codec.affine import params_dtype
from kvpass.codec.bitpack import FIELDS
from kvpass.codec.codebook import grid
from kvpass.codec.hadamard import signs
from kvpass.codec.spec import CodecSpec, parse

from ..append import APPENDED, PLACES, append, append_layers
from ..call_types import AppendCall, AppendLayersCall
from ..table import DispatchKey, implements
from .attend_codes import DTYPES, LANES
from .build import build, source

BYTES, FLOATS, NUMBER = "const uint8_t*", "const float*", "int64_t"
"""C++ types of the arguments of a kernel."""
_TYPES = [BYTES, *3 * [FLOATS], *2 * ["uint8_t*"], *2 * [NUMBER]]
_FEATURES = {"grid", "rotation", "per=token", "codec=across-heads", *(f"bits={bits}" for bits in FIELDS)}


@cache
def _kernel(spec: CodecSpec, head_dim: int, dtype: torch.dtype) -> Callable[..., None]:
    quantizer = spec.quantizer
    defines = dict(
        HEAD=head_dim, PAGE=spec.page_size, QUERIES=1, SINKS=0, BITS=spec.bits, DIM=quantizer.dim,
        POINTS=len(grid(quantizer.grid)), GROUP=quantizer.group_size, ROTATED=int(spec.transform.rotation is not None),
        UNIT=1, BFLOAT16=int(dtype == torch.bfloat16),
    )  # fmt: skip
    return build(source(defines, "tokens.h", "unpack.h", "to_units.h", "quantize_grid.cpp"), _TYPES, fused=False)


@cache
def _fixed(spec: CodecSpec, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """The points ``[d, n]``, half of their squared norms as `assign_points` computes them, and the signs of the
    rotation."""
    points = grid(spec.quantizer.grid)
    return points.T.contiguous(), points.square().sum(1) / 2, signs(head_dim, spec.transform.rotation or 0)


def _refuses(dispatch: DispatchKey) -> str | None:
    if dispatch.device != "cpu":
        return "it runs on CPUs."
    (spec,) = map(parse, dispatch.specs)
    if not spec.quantizer.grid:
        return "it quantizes to grids alone."
    if spec.codec.channels(dispatch.head_dim) // spec.quantizer.dim % LANES:
        return f"it needs a multiple of {LANES} codes per token."
    return None


@implements("quantize", "cpp-grid", has=(_FEATURES | APPENDED,), refuses=_refuses, lowering="inductor")
def quantize(x: Tensor, fitted: Sequence[Tensor], spec: CodecSpec) -> tuple[Tensor, ...]:
    if isinstance(spec.codec, AcrossHeads):
        joined = quantize(spec.codec.by_token(x), fitted, spec.plain)
        return spec.codec.by_head(joined, spec, x.shape[3])
    (batch, heads, tokens, head_dim), dtype = x.shape, params_dtype(x.dtype)
    pages = batch, heads, tokens // spec.page_size
    x = x.contiguous() if x.dtype in DTYPES else x.float().contiguous()
    codes = torch.empty(*pages, spec.rows, head_dim // spec.quantizer.dim, dtype=torch.uint8)
    scale = torch.empty(*pages, *spec.params_shape(head_dim), dtype=dtype)
    _kernel(spec.stored_as, head_dim, x.dtype)(
        x, *_fixed(spec.stored_as, head_dim), codes, scale, scale.shape[:3].numel(), torch.get_num_threads()
    )
    return codes, scale, torch.empty(*pages, *spec.zero_shape(head_dim), dtype=dtype)


@implements("append_", "cpp-grid", has=(_FEATURES | APPENDED,), refuses=_refuses, lowering="inductor")
def append_(call: AppendCall) -> None:
    append(quantize, call)


@implements("append_layers_", "cpp-grid", has=(_FEATURES | PLACES,), refuses=_refuses, lowering="inductor")
def append_layers_(call: AppendLayersCall) -> None:
    append_layers(quantize, call)

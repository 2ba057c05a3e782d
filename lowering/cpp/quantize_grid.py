"""Quantizes tokens to the points of a grid (`kvpass.codec.codebook`) on CPUs."""

import math
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from kvpass.codec.across_heads import AcrossHeads
from kvpass.codec.bitpack import FIELDS
from kvpass.codec.codebook import grid
from kvpass.codec.hadamard import signs
from kvpass.codec.spec import CodecSpec, parse
from kvpass.codec.tensors import page_shapes

from ..append import APPENDED, PLACES, append, append_layers
from ..call_types import AppendCall, AppendLayersCall
from ..table import DispatchKey, implements
from .attend_codes import DTYPES, LANES
from .build import BYTES, FLOATS, NUMBER, WRITTEN_BYTES, build, source

_TYPES = [BYTES, *3 * [FLOATS], *2 * [WRITTEN_BYTES], *2 * [NUMBER]]
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


def quantize_tokens(
    kernel: Callable[..., Callable[..., None]], fixed: Sequence[Tensor], x: Tensor, spec: CodecSpec
) -> tuple[Tensor, ...]:
    """The page tensors of tokens ``x`` ``[B, H, T, D]``.

    kernel: compiles, for a spec, a head dimension and a dtype, the function that writes codes and scales.
    fixed: what that reads besides the tokens.
    """
    batch, heads, tokens, head_dim = x.shape
    pages = batch, heads, tokens // spec.page_size
    kept = tuple(
        torch.empty(*pages, *shape, dtype=dtype) for shape, dtype in page_shapes(spec, head_dim, x.dtype).values()
    )
    x = x.contiguous() if x.dtype in DTYPES else x.float().contiguous()
    run = kernel(spec.stored_as, head_dim, x.dtype)
    run(x, *fixed, *kept[:2], math.prod(pages), torch.get_num_threads())
    return kept


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
    return quantize_tokens(_kernel, _fixed(spec.stored_as, x.shape[3]), x, spec)


@implements("append_", "cpp-grid", has=(_FEATURES | APPENDED,), refuses=_refuses, lowering="inductor")
def append_(call: AppendCall) -> None:
    append(quantize, call)


@implements("append_layers_", "cpp-grid", has=(_FEATURES | PLACES,), refuses=_refuses, lowering="inductor")
def append_layers_(call: AppendLayersCall) -> None:
    append_layers(quantize, call)

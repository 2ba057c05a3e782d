"""Quantizes and dequantizes pages with kernels that Inductor fuses: one per codec and head shape, for every length.

Pages are independent and run along one merged dim, so a prompt and a single page use the same kernel.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvpass.codec.bitpack import FIELDS, unpack
from kvpass.codec.codebook import grid, look_up
from kvpass.codec.hadamard import basis
from kvpass.codec.pages import Affine, dequantize_groups, dequantize_pages, quantize_pages
from kvpass.codec.predictor import PREDICTORS, page_rows, parse_predictor, run, weights
from kvpass.codec.quantizer import UNIFORM
from kvpass.codec.second_level import SecondLevel, expand
from kvpass.codec.spec import CodecSpec

from .. import reference
from ..append import APPENDED, PLACES, append, append_layers
from ..call_types import AppendCall, AppendLayersCall, DequantizeCall
from ..table import DispatchKey, implements
from .aot import Input, Kernel, Program

WIDTHS = frozenset(f"bits={bits}" for bits in FIELDS)
_GROUPS = {"per=channel", "per=token"}
_QUANTIZED = _GROUPS | {f"bits={bits}" for bits in UNIFORM} | {"eta", "subspace"}
_DEQUANTIZED = _GROUPS | WIDTHS | PLACES | {"rotation", "grid", "center", *(f"predictor={name}" for name in PREDICTORS)}
_DEQUANTIZED |= {"codec=second-level"}
_PAGES = 7  # pages to trace `quantize` and `dequantize` with


def _run(kernel: Kernel, spec: CodecSpec, inputs: Sequence[Tensor | None], constants: Sequence[Tensor | None] = ()):
    """Run ``kernel`` on inputs ``[M, ...]`` for any number of pages M. Returns its outputs, and M.

    A single page is run as two, because kernels cannot have a dynamic size of 1.
    """
    pages = next(tensor.shape[0] for tensor in inputs if tensor is not None)
    if pages == 1:
        inputs = tuple(None if tensor is None else tensor.expand(2, *tensor.shape[1:]) for tensor in inputs)
    inputs = tuple(None if tensor is None else tensor.contiguous() for tensor in inputs)
    described = tuple(None if t is None else (t.shape[1:], t.dtype, t.device) for t in inputs)
    fixed = tuple(None if t is None else (t.shape, t.dtype, t.device) for t in constants)
    return kernel(spec, described, fixed)(*inputs, *constants), pages


def _program(fn: Callable, spec: CodecSpec, described: tuple, fixed: tuple) -> Program:
    """The program ``fn(*inputs, *constants, spec)``. ``described`` and ``fixed`` hold shape, dtype and device of
    inputs, without the dim M of pages, and of constants."""
    pages = [(d and torch.empty((_PAGES, *d[0]), dtype=d[1], device=d[2]), [0]) for d in described]
    constants: list[Any] = [(f and torch.empty(f[0], dtype=f[1], device=f[2]), []) for f in fixed]
    inputs = [Input(f"input_{i}", *each) for i, each in enumerate((*pages, *constants))]
    return Program(lambda *tensors: fn(*tensors, spec), inputs)


@Kernel
def quantizing(spec: CodecSpec, described: tuple, fixed: tuple) -> Program:
    """`_quantize` for pages and fitted tensors that are ``described`` without the dim of pages."""
    return _program(_quantize, spec, described, fixed)


@Kernel
def dequantizing(spec: CodecSpec, described: tuple, fixed: tuple) -> Program:
    """`_dequantize` for pages that are ``described`` without the dim of pages, and for constants ``fixed`` that all
    pages share."""
    return _program(_dequantize, spec, described, fixed)


def _quantize(pages: Tensor, *fitted_and_spec) -> tuple[Tensor, ...]:
    *fitted, spec = fitted_and_spec
    return quantize_pages(pages, spec, fitted)


def _dequantize(codes, scale, zero_point, rows, points, basis, *rest) -> tuple[Tensor]:
    """Dequantize pages ``[M, H, ...]`` to ``[H, M, P, D]`` float32, and add the prediction from ``rows``
    ``[M, P, in]``, if given."""
    *predictor, spec = rest
    kind, codes = spec.transform.predictor, unpack(codes, spec.bits)
    if spec.quantizer.grid:
        values = look_up(codes, points).unflatten(-1, (-1, spec.quantizer.group_size)) * scale.float().unsqueeze(-1)
        values = values.flatten(-2)
    else:
        values = dequantize_groups(codes, scale, zero_point, spec.quantizer)
    if basis is not None:
        values = values @ basis.mT
    if rows is not None:
        prediction = run(parse_predictor(kind)[0], rows, *weights(kind, predictor))
        values = values + prediction.unflatten(-1, (values.shape[1], -1)).transpose(1, 2)
    return (values.transpose(0, 1).contiguous(),)


def one_level(kept: Sequence[Tensor], spec: CodecSpec) -> list[Tensor]:
    """Page tensors of ``kept`` with 8-bit scales and zero points (`codec.second_level`) dequantized."""
    return [kept[0], *expand(*kept[1:])] if isinstance(spec.codec, SecondLevel) else list(kept)


def _refuses_quantize(dispatch: DispatchKey) -> str | None:
    if torch.__version__ < "2.13":
        return "before torch 2.13, Inductor does not round scales to 16 bits."
    return None


@implements("quantize", "inductor", has=(_QUANTIZED | APPENDED,), refuses=_refuses_quantize)
def quantize(x: Tensor, fitted: Sequence[Tensor], spec: CodecSpec) -> tuple[Tensor, ...]:
    batch, heads, tokens, head_dim = x.shape
    pages = tokens // spec.page_size
    by_page = [one[:, :, None].expand(-1, -1, pages, -1, -1).flatten(0, 2) for one in fitted]
    new, count = _run(quantizing, spec, (x.reshape(-1, spec.page_size, head_dim), *by_page))
    return tuple(tensor[:count].view(batch, heads, pages, *tensor.shape[2:]) for tensor in new)


@implements("append_", "inductor", has=(_QUANTIZED | APPENDED,), refuses=_refuses_quantize)
def append_(call: AppendCall) -> None:
    append(quantize, call)


@implements("append_layers_", "inductor", has=(_QUANTIZED | PLACES,), refuses=_refuses_quantize)
def append_layers_(call: AppendLayersCall) -> None:
    append_layers(quantize, call)


CPU_KERNELS: dict[str, Callable[[Sequence[Tensor], CodecSpec], Tensor]] = {}
"""Other kernels that dequantize pages on CPUs, by the name of the codec. They take the stored tensors and the spec."""


@implements("dequantize", "inductor", has=(_DEQUANTIZED,))
def dequantize(call: DequantizeCall) -> Tensor:
    return reference.read(dequantize_all, call)


def dequantize_all(kept: Sequence[Tensor], spec: CodecSpec, references, predictor) -> Tensor:
    """`kvpass.lowering.reference.dequantize_predicted`, with a kernel if the codec has one."""
    codes = kept[0]
    batch, heads, pages = codes.shape[:3]
    if pages and codes.device.type == "cpu" and spec.codec.name in CPU_KERNELS:
        return CPU_KERNELS[spec.codec.name](kept, spec)
    if not pages or spec.codec.name not in (Affine.name, SecondLevel.name):
        return dequantize_pages(*kept, spec)
    kept, spec = one_level(kept, spec), spec.plain
    spec, rows, device = spec.stored_as, None, codes.device
    grid_name, rotation = spec.quantizer.grid, spec.transform.rotation
    pools = [pool.flatten(0, 2).unsqueeze(1) for pool in kept]
    if spec.transform.predictor:  # heads are predicted together
        pools = [pool.transpose(1, 2).flatten(0, 1) for pool in kept]
        rows = page_rows(references, spec.page_size)
    constants = (
        grid(grid_name, device) if grid_name else None,
        None if rotation is None else basis(codes.shape[-1] * spec.quantizer.dim, rotation, device),
        *(predictor if rows is not None else ()),
    )
    (out,), count = _run(dequantizing, spec, (*pools, rows), constants)
    out = out[:, :count].reshape(len(out), batch, -1, out.shape[-1])  # jointly dequantized heads come first
    return out.transpose(0, 1) if rows is not None else out.view(batch, heads, pages * spec.page_size, -1)

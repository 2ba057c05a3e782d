"""Quantizes tokens to points of E8 (`kvpass.codec.lattice`) on CPUs."""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from kvpass.codec.hadamard import signs
from kvpass.codec.lattice import E8
from kvpass.codec.lattice_points import DIM, SHIFT, UNIT, magnitudes
from kvpass.codec.spec import CodecSpec, parse

from ..append import APPENDED, PLACES, append, append_layers
from ..call_types import AppendCall, AppendLayersCall
from ..table import DispatchKey, implements
from .attend_codes import LANES
from .build import BYTES, FLOATS, INT32S, NUMBER, WRITTEN_BYTES, build, source
from .quantize_grid import quantize_tokens

_TYPES = [BYTES, *2 * [FLOATS], INT32S, FLOATS, *2 * [WRITTEN_BYTES], *2 * [NUMBER]]
_FEATURES = frozenset({"bits=2", "rotation", "per=token", "codec=e8"})


@cache
def _kernel(spec: CodecSpec, head_dim: int, dtype: torch.dtype) -> Callable[..., None]:
    defines = dict(
        HEAD=head_dim, PAGE=spec.page_size, QUERIES=1, SINKS=0, GROUP=spec.quantizer.group_size, UNIT=UNIT, SHIFT=SHIFT,
        ROTATED=int(spec.transform.rotation is not None), BFLOAT16=int(dtype == torch.bfloat16),
    )  # fmt: skip
    return build(source(defines, "tokens.h", "to_units.h", "quantize_lattice.cpp"), _TYPES, fused=False)


@cache
def _fixed(spec: CodecSpec, head_dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Magnitudes, half of their squared norms, whether their sums are odd, and the signs of the rotation."""
    table = magnitudes()
    return table, table.square().sum(-1) / 2, (table.sum(-1) % 2).int(), signs(head_dim, spec.transform.rotation or 0)


def _refuses(dispatch: DispatchKey) -> str | None:
    if dispatch.device != "cpu":
        return "it runs on CPUs."
    (spec,) = map(parse, dispatch.specs)
    if not isinstance(spec.codec, E8):
        return "it quantizes to the E8 lattice alone."
    if dispatch.head_dim // DIM * spec.page_size % LANES:
        return f"it needs a multiple of {LANES} codes per page."
    return None


@implements("quantize", "cpp-lattice", has=(_FEATURES | APPENDED,), refuses=_refuses, lowering="inductor")
def quantize(x: Tensor, fitted: Sequence[Tensor], spec: CodecSpec) -> tuple[Tensor, ...]:
    return quantize_tokens(_kernel, _fixed(spec.stored_as, x.shape[3]), x, spec)


@implements("append_", "cpp-lattice", has=(_FEATURES | APPENDED,), refuses=_refuses, lowering="inductor")
def append_(call: AppendCall) -> None:
    append(quantize, call)


@implements(
    "append_layers_", "cpp-lattice", has=(_FEATURES | PLACES | {"center"},), refuses=_refuses, lowering="inductor"
)
def append_layers_(call: AppendLayersCall) -> None:
    append_layers(quantize, call)

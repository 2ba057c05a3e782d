"""The tensors of a state: which there are for a spec, and in which order ops take them.

Of each page there is what its codec names, or the planes of tokens with bit widths of their own; besides, the ring of
full-precision tokens, and what was fitted to the sequence or calibrated for the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..errors import KVPassError
from .affine import params_dtype
from .codec import Kept
from .page_rope import PageTables

if TYPE_CHECKING:
    from .spec import CodecSpec

PLANES = "codes", "scale", "zero_point", "levels", "outliers", "where"
"""What is kept of tokens with bit widths of their own, besides the planes that all layers share."""

_Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


@cache
def of_pages(spec: CodecSpec) -> tuple[str, ...]:
    """Names of the tensors that are kept of each page, or of each token in one."""
    return PLANES if spec.quantizer.adaptive is not None else tuple(spec.codec.tensors)


@cache
def of_sequence(spec: CodecSpec) -> Mapping[str, Kept]:
    """What is fitted to a sequence: by the quantizer, by the transform and by the codec, in that order."""
    found, quantizer, transform, model = {}, spec.quantizer, spec.transform, of_model(spec)
    if (subspace := quantizer.subspace) is not None:
        found["compensation"] = Kept(lambda spec, head_dim: 2 * (head_dim - subspace.block_size,))
    if quantizer.adaptive is not None and quantizer.adaptive.fits_energy:
        found["energy"] = Kept(lambda spec, head_dim: (1, 1), torch.float32)
    if transform.center and "center" not in model:
        found["center"] = Kept(lambda spec, head_dim: (1, head_dim))
    if transform.page_rope and not transform.numbered:
        found["pairs"] = Kept(lambda spec, head_dim: (1, 2), torch.int16)
    return {**found, **spec.codec.sequence(spec)}


@cache
def of_model(spec: CodecSpec) -> tuple[str, ...]:
    """Names of the tensors that a calibration gave the model, and that no cache has for itself."""
    return spec.codec.model(spec)


@cache
def of_state(spec: CodecSpec) -> tuple[str, ...]:
    """Names of all tensors of a state, in the order in which ops take them."""
    return (*of_pages(spec), "ring", *of_sequence(spec), *of_model(spec))


def page_shapes(spec: CodecSpec, head_dim: int, dtype: torch.dtype) -> _Shapes:
    """Shape and dtype of what is kept of one page of one head of tokens in ``dtype``, by name and in order."""
    return _shapes(spec.codec.tensors, spec, head_dim, dtype)


def fitted_shapes(spec: CodecSpec, head_dim: int, dtype: torch.dtype) -> _Shapes:
    """The same of what a head of a sequence keeps beside its pages and its ring."""
    return _shapes(of_sequence(spec), spec, head_dim, dtype)


def _shapes(kept: Mapping[str, Kept], spec: CodecSpec, head_dim: int, dtype: torch.dtype) -> _Shapes:
    params = params_dtype(dtype)
    return {name: (one.shape(spec, head_dim), one.dtype or params) for name, one in kept.items()}


def calibrated_shapes(spec: CodecSpec, head_dim: int) -> dict[str, tuple[int, ...]]:
    """Shapes of those of the tensors of a sequence that a calibration fills, by name and in order; 16-bit."""
    return {name: one.shape(spec, head_dim) for name, one in of_sequence(spec).items() if one.calibrated}


class Pack(NamedTuple):
    """The tensors of one state, as an op was given them.

    pools: what is kept of its pages, in order: pools or handles (`kvpass.layout.pool`).
    ring: ``[B, H_kv, sinks + ring_size, D]``, the full-precision tokens.
    fitted: what `of_sequence` and `of_model` name.
    planes: those of tokens with bit widths of their own which all layers share, and where the state's are.
    frames: the rotary tables of keys with page-relative RoPE.
    key_pages: the first tensor of the pages of the layer's keys, for values that follow them.
    """

    pools: tuple[Tensor, ...]
    ring: Tensor
    fitted: Mapping[str, Tensor]
    planes: Sequence[Tensor] = ()
    page_tables: PageTables | None = None
    key_pages: Tensor | None = None

    @classmethod
    def of(cls, tensors: Sequence[Tensor], spec: CodecSpec) -> Pack:
        """Those of ``tensors``, which are in the order of `of_state`."""
        pages, names = _places(spec)
        if len(tensors) != pages + 1 + len(names):
            raise KVPassError(f"This codec stores {', '.join(of_state(spec))}; got {len(tensors)} tensors.")
        return cls(tuple(tensors[:pages]), tensors[pages], dict(zip(names, tensors[pages + 1 :], strict=True)))

    def quantizes_with(self, spec: CodecSpec) -> list[Tensor]:
        """What `Codec.quantize` takes as ``fitted``."""
        return self._those(_quantizes_with(spec))

    def dequantizes_with(self, spec: CodecSpec) -> list[Tensor]:
        """What `Codec.dequantize` takes besides pages."""
        return self._those(spec.codec.dequantizes_with)

    def _those(self, names: Sequence[str]) -> list[Tensor]:
        return [self.fitted[name] for name in names if name in self.fitted]


@cache
def _places(spec: CodecSpec) -> tuple[int, tuple[str, ...]]:
    """How many tensors of a state are of pages, and the names of those behind the ring."""
    pages = len(of_pages(spec))
    return pages, of_state(spec)[pages + 1 :]


@cache
def _quantizes_with(spec: CodecSpec) -> tuple[str, ...]:
    compensation = ("compensation",) if spec.quantizer.subspace is not None else ()
    return (*compensation, *spec.codec.quantizes_with)

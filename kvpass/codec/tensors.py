"""Lists the tensors of a state: which tensors a spec has, and in which order ops take them.

A state consists of the page tensors that its codec declares (or of bit planes, if bit widths are per token), the ring
of full-precision tokens, and the tensors fitted to the sequence or calibrated for the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType
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
"""Tensors kept for tokens with per-token bit widths, in addition to the planes, which all layers share."""

_Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


@cache
def of_pages(spec: CodecSpec) -> tuple[str, ...]:
    """Names of the tensors kept for each page, or for each token of a page."""
    return PLANES if spec.quantizer.adaptive is not None else tuple(spec.codec.tensors)


@cache
def of_sequence(spec: CodecSpec) -> Mapping[str, Kept]:
    """Tensors fitted to a sequence by the quantizer, by the transform and by the codec, in this order."""
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
    """Names of the model's calibrated tensors. Caches share them instead of keeping copies."""
    return spec.codec.model(spec)


@cache
def of_state(spec: CodecSpec) -> tuple[str, ...]:
    """Names of all tensors of a state, in the order that ops take them."""
    return (*of_pages(spec), "ring", *of_sequence(spec), *of_model(spec))


def page_shapes(spec: CodecSpec, head_dim: int, dtype: torch.dtype) -> _Shapes:
    """Shape and dtype of the tensors kept for one page of one head, by name and in order. ``dtype``: the tokens'."""
    return _shapes(spec.codec.tensors, spec, head_dim, dtype)


def fitted_shapes(spec: CodecSpec, head_dim: int, dtype: torch.dtype) -> _Shapes:
    """Shape and dtype of the tensors fitted for one head of a sequence, by name and in order."""
    return _shapes(of_sequence(spec), spec, head_dim, dtype)


def _shapes(kept: Mapping[str, Kept], spec: CodecSpec, head_dim: int, dtype: torch.dtype) -> _Shapes:
    params = params_dtype(dtype)
    return {name: (one.shape(spec, head_dim), one.dtype or params) for name, one in kept.items()}


def read_shapes(spec: CodecSpec, head_dim: int, dtype: torch.dtype) -> _Shapes:
    """Shape and dtype of the tensors of one head of a sequence that `Codec.dequantize` takes, by name and in order."""
    fitted = fitted_shapes(spec, head_dim, dtype)
    return {name: fitted[name] for name in spec.codec.dequantizes_with if name in fitted}


def calibrated_shapes(spec: CodecSpec, head_dim: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the 16-bit sequence tensors that a calibration fills, by name and in order."""
    return {name: one.shape(spec, head_dim) for name, one in of_sequence(spec).items() if one.calibrated}


class Pack(NamedTuple):
    """The tensors of one state, as passed to an op.

    pools: the page tensors, in order: pools or handles of pools (`kvpass.layout.pool`).
    ring: ``[B, H_kv, sinks + ring_size, D]``, the full-precision tokens.
    fitted: the tensors named by `of_sequence` and `of_model`.
    planes: for per-token bit widths: the bit planes that all layers share, and the places of this state's planes.
    page_tables: the rotary tables of keys with page-relative RoPE.
    key_pages: the first page tensor of the layer's keys, for values that reuse their token selection.
    from_keys: tensors fitted to the layer's keys that its values are fitted to, too (`Codec.from_keys`).
    """

    pools: tuple[Tensor, ...]
    ring: Tensor
    fitted: Mapping[str, Tensor]
    planes: Sequence[Tensor] = ()
    page_tables: PageTables | None = None
    key_pages: Tensor | None = None
    from_keys: Mapping[str, Tensor] = MappingProxyType({})

    @classmethod
    def of(cls, tensors: Sequence[Tensor], spec: CodecSpec) -> Pack:
        """The pack of ``tensors``, given in the order of `of_state`. Raises `KVPassError` for a wrong number."""
        pages, names = _places(spec)
        if len(tensors) != pages + 1 + len(names):
            raise KVPassError(f"This codec stores {', '.join(of_state(spec))}; got {len(tensors)} tensors.")
        return cls(tuple(tensors[:pages]), tensors[pages], dict(zip(names, tensors[pages + 1 :], strict=True)))

    def beside(self, keys: Sequence[Tensor], spec: CodecSpec) -> Pack:
        """This pack of values, with the tensors of their layer's keys in the order of `KVState.keys`."""
        if not keys:
            return self
        return self._replace(key_pages=keys[0], from_keys=dict(zip(spec.codec.from_keys, keys[1:], strict=True)))

    def quantizes_with(self, spec: CodecSpec) -> list[Tensor]:
        """The tensors that `Codec.quantize` takes as ``fitted``."""
        return self._those(_quantizes_with(spec))

    def dequantizes_with(self, spec: CodecSpec) -> list[Tensor]:
        """The tensors that `Codec.dequantize` takes after the page tensors."""
        return self._those(spec.codec.dequantizes_with)

    def _those(self, names: Sequence[str]) -> list[Tensor]:
        return [self.fitted[name] for name in names if name in self.fitted]


@cache
def _places(spec: CodecSpec) -> tuple[int, tuple[str, ...]]:
    """The number of page tensors of a state, and the names of the tensors after the ring."""
    pages = len(of_pages(spec))
    return pages, of_state(spec)[pages + 1 :]


@cache
def _quantizes_with(spec: CodecSpec) -> tuple[str, ...]:
    compensation = ("compensation",) if spec.quantizer.subspace is not None else ()
    return (*compensation, *spec.codec.quantizes_with)

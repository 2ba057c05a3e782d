"""What a cache keeps of one tensor: the only place that says which tensors there are, and in which order ops take them.

A codec is named by `Quantizer.codec`. Of each page it keeps what it was registered with; besides, there is the ring of
exact tokens, and what the codec was fitted to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..errors import KVPassError
from .affine import params_dtype
from .frame import Frames
from .quantizer import QUERIES

if TYPE_CHECKING:
    from .spec import CodecSpec


class Kept(NamedTuple):
    """One tensor of a codec: its shape in a page, of a spec and the channels of a head, or a `KVPassError` if these do
    not fit; and its dtype, of which None is that of scales, 16 bits wide."""

    shape: Callable[[CodecSpec, int], tuple[int, ...]]
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Codec:
    """How pages are stored.

    tensors: what is kept of each page, in order, ``[B, H, N, *shape]`` each.
    encode: ``(x, spec, fitted, stored)``, see `encode_pages`, to those tensors.
    decode: ``(*tensors, *fitted, spec)`` to tokens ``[B, H, N * P, D]`` float32.
    fitted: names of what it was fitted to, and decodes with.
    check: raises `KVPassError` for a spec that it cannot store, when the spec is made.
    decodes_any_bytes: whether ``decode``, and every kernel that reads these pages, takes any bytes at all in place of
        what is kept and fitted, without an exception or an access out of bounds; values are then arbitrary. Servers
        whose memory is read where nothing is stored yet need it (`kvpass.vllm`). A codec that stores indices does not.
    """

    tensors: Mapping[str, Kept]
    encode: Callable[..., tuple[Tensor, ...]]
    decode: Callable[..., Tensor]
    fitted: tuple[str, ...] = ()
    check: Callable[[CodecSpec], None] = lambda spec: None
    decodes_any_bytes: bool = False


CODECS: dict[str, Codec] = {}
"""Codecs by name; "" is the one of affine codes, grids and floats as they are."""

PLANES = "codes", "scale", "zero_point", "levels", "outliers", "where"
"""What is kept of tokens with widths of their own, which their cache codes, besides the planes of all layers."""


def codec_of(spec: CodecSpec) -> Codec:
    """The codec of ``spec``. Raises `KVPassError` if there is none of its name."""
    name = spec.quantizer.codec
    if name not in CODECS:
        raise KVPassError(f"There is no codec {name!r}; choose one of {sorted(CODECS)}.")
    return CODECS[name]


@cache
def built_in(spec: CodecSpec) -> CodecSpec:
    """``spec`` with affine codes, or those of its grid, in place of its codec: what other codecs are made of."""
    return replace(spec, quantizer=replace(spec.quantizer, codec="", share=0.0, rank=0, chosen_by=""))


@cache
def of_pages(spec: CodecSpec) -> tuple[str, ...]:
    """Names of the tensors that are kept of each page, or of each token in one."""
    return PLANES if spec.quantizer.adaptive is not None else tuple(codec_of(spec).tensors)


@cache
def of_state(spec: CodecSpec) -> tuple[str, ...]:
    """Names of all tensors of a state, in the order in which ops take them."""
    adaptive = spec.quantizer.adaptive
    shares = spec.quantizer.shares
    widths = spec.quantizer.allocation or shares
    fitted = {
        "compensation": spec.quantizer.subspace is not None,
        "energy": adaptive is not None and adaptive.fits_energy,
        "center": spec.transform.center,
        "pairs": spec.transform.page_frame and not spec.transform.numbered,
        "share": shares is not None,
        "metric": shares is not None and shares.adapts,
        "basis": widths is not None,
        "fields": spec.quantizer.allocation is not None,
        "widths": shares is not None,
        "queries": spec.quantizer.chooses,
        "datatype": spec.quantizer.calibrated,
        "ranges": spec.quantizer.calibrated and spec.quantizer.per == "channel",
    }
    return (*of_pages(spec), "ring", *(name for name, there in fitted.items() if there))


@cache
def of_model(spec: CodecSpec) -> tuple[str, ...]:
    """Names of those of them that a calibration gave the model, and that no cache has for itself; in order."""
    shares = spec.quantizer.shares
    if shares is None:
        return ()
    names = {"share", "metric", "queries"} if shares.adapts else {"share", "center", "basis", "widths", "queries"}
    return tuple(name for name in of_state(spec) if name in names)


def page_shapes(spec: CodecSpec, head_dim: int, dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of what is kept of one page of tokens in ``dtype``, in order."""
    kept, params = codec_of(spec).tensors, params_dtype(dtype)
    return {name: (one.shape(spec, head_dim), one.dtype or params) for name, one in kept.items()}


def fitted_shapes(spec: CodecSpec, head_dim: int, dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of what a head of a state keeps beside its pages and its ring, by name and in order: what its
    codec was fitted to, for tokens in ``dtype``."""
    subspace, allocation, params = spec.quantizer.subspace, spec.quantizer.allocation, params_dtype(dtype)
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    if subspace is not None:
        rest = head_dim - subspace.block_size
        shapes["compensation"] = (rest, rest), params
    shares = spec.quantizer.shares
    if spec.transform.center and (shares is None or shares.adapts):
        shapes["center"] = (1, head_dim), params
    if spec.transform.page_frame and not spec.transform.numbered:
        shapes["pairs"] = (1, 2), torch.int16
    if allocation is not None:
        shapes["basis"] = (head_dim, allocation.block_size), params
        shapes["fields"] = (1, sum(allocation.fields(head_dim))), torch.int32
    if shares is not None and shares.adapts:
        shapes["basis"] = (head_dim, shares.block_size), params
        shapes["widths"] = (shares.ranks, head_dim), torch.uint8
    if spec.quantizer.chooses and shares is None:
        shapes["queries"] = (QUERIES, head_dim), params
    return shapes | {name: (shape, params) for name, shape in calibrated_shapes(spec, head_dim).items()}


def calibrated_shapes(spec: CodecSpec, head_dim: int) -> dict[str, tuple[int, ...]]:
    """Of what a head of a state keeps that a calibration gave it, by name and in order; 16-bit."""
    shapes = {"datatype": (2, 2**spec.bits), "ranges": (2, head_dim)}
    return {name: shape for name, shape in shapes.items() if name in of_state(spec)}


_FITTED = "compensation", "share", "basis", "fields", "widths", "queries", "datatype", "ranges"


class Pack(NamedTuple):
    """The tensors of one state, as an op was given them.

    pools: what is kept of its pages, in order: pools or handles (`kvpass.layout.pool`).
    planes: those of tokens with widths of their own which all layers share, and where the state's are.
    frames: of its pages, if they have any.
    key_pages: what is kept of the pages of the keys, for values that go by it.
    """

    pools: tuple[Tensor, ...]
    ring: Tensor
    compensation: Tensor | None = None
    energy: Tensor | None = None
    center: Tensor | None = None
    basis: Tensor | None = None
    fields: Tensor | None = None
    queries: Tensor | None = None
    datatype: Tensor | None = None
    ranges: Tensor | None = None
    share: Tensor | None = None
    widths: Tensor | None = None
    metric: Tensor | None = None
    pairs: Tensor | None = None
    planes: Sequence[Tensor] = ()
    frames: Frames | None = None
    key_pages: Tensor | None = None

    def fitted(self, names: Sequence[str] = _FITTED) -> list[Tensor]:
        """What pages are encoded with besides, or those of ``names``, if there are any."""
        return [tensor for name in names if (tensor := getattr(self, name)) is not None]


@cache
def _places(spec: CodecSpec) -> tuple[int, int, Callable[[Sequence[Tensor | None]], tuple[Any, ...]]]:
    """How many tensors a state is, how many of them are kept of its pages, and what picks the rest of a `Pack` from all
    of them and a None."""
    names = of_state(spec)
    rest = (names.index(name) if name in names else -1 for name in Pack._fields[1 : Pack._fields.index("planes")])
    return len(names), len(of_pages(spec)), itemgetter(*rest)


def opened(tensors: Sequence[Tensor], spec: CodecSpec) -> Pack:
    """The `Pack` of ``tensors``, which are in the order of `of_state`."""
    count, pages, rest = _places(spec)
    if len(tensors) != count:
        raise KVPassError(f"This codec stores {', '.join(of_state(spec))}; got {len(tensors)} tensors.")
    return Pack(tuple(tensors[:pages]), *rest((*tensors, None)))

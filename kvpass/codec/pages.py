"""Quantizes tokens to pages and back: composes ``fit``, ``assign`` (with compensation) and ``pack`` for a spec."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import KVPassError
from .affine import assign, calibrate, dequantize, fit_codes, fit_hqq, fit_lsq, fit_minmax, params_dtype
from .bitpack import pack, unpack
from .codebook import assign_points, fit_rms, fit_size, grid, look_up
from .codec import Codec, Kept
from .hadamard import hadamard, inverse_hadamard
from .quantizer import Quantizer
from .spec import CodecSpec

_Stored = tuple[Tensor, Tensor, Tensor]
"""Existing scales and zero points of groups, and a bool mask of the groups that have them."""


def grouped(x: Tensor, quantizer: Quantizer) -> tuple[Tensor, int]:
    """View ``[..., P, D]`` with each quantization group along one dim. Returns the view and that dim."""
    dim = -2 if quantizer.per == "channel" else -1
    return x.unflatten(dim, (-1, quantizer.group_size)), dim


def _quantize(
    x: Tensor, quantizer: Quantizer, dtype: torch.dtype, stored: _Stored | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    groups, dim = grouped(x, quantizer)
    fit = {"minmax": fit_minmax, "lsq": fit_lsq, "hqq": fit_hqq}[quantizer.fit]
    scale, zero_point = fitted = fit(groups, dim, quantizer.bits, dtype)
    if stored is not None:  # groups with existing parameters keep them
        *parameters, taken = (tensor.unsqueeze(dim) for tensor in stored)
        scale, zero_point = (torch.where(taken, *both) for both in zip(parameters, fitted, strict=True))
    codes = assign(groups, scale, zero_point, quantizer.bits)
    if quantizer.eta:
        scale, zero_point = calibrated = calibrate(scale, zero_point, quantizer.bits, quantizer.eta)
        if stored is not None:
            scale, zero_point = (torch.where(taken, *both) for both in zip(parameters, calibrated, strict=True))
    return codes.reshape(x.shape), scale.squeeze(dim), zero_point.squeeze(dim)


def dequantize_groups(codes: Tensor, scale: Tensor, zero_point: Tensor, quantizer: Quantizer) -> Tensor:
    """Dequantize uniform values ``[..., P, D]`` with the parameters of their pages: ``[..., P, D]`` float32, still
    rotated."""
    groups, dim = grouped(codes, quantizer)
    return dequantize(groups, scale.unsqueeze(dim), zero_point.unsqueeze(dim)).reshape(codes.shape)


def _quantize_compensated(
    x: Tensor, compensation: Tensor, quantizer: Quantizer, dtype: torch.dtype, stored: _Stored | None = None
) -> tuple[Tensor, ...]:
    """Quantize ``block_size`` channels at a time; each block's error adjusts the remaining channels."""
    size, parts = quantizer.subspace.block_size, []
    for start in range(0, x.shape[-1], size):
        block, rest = x[..., :size], x[..., size:]
        columns = slice(start, start + size)
        kept = None if stored is None else (stored[0][..., columns], stored[1][..., columns], stored[2])
        part = _quantize(block, quantizer, dtype, kept)
        parts.append(part)
        if rest.shape[-1]:
            error = dequantize_groups(*part, quantizer) - block
            answer = compensation[..., start:, start : start + size].float()
            x = rest + (error.flatten(-3, -2) @ answer.mT).view_as(rest)
    return tuple(torch.cat(columns, -1) for columns in zip(*parts, strict=True))


def quantize_pages(x: Tensor, spec: CodecSpec, fitted: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
    """Quantize and pack whole pages.

    x: ``[B, H, T, D]`` float, T a multiple of ``spec.page_size``.
    fitted: the tensors named in `Codec.quantizes_with`. For specs with a subspace: a matrix ``[B, H, D - b, D - b]``
        from `compensation_matrix`. For per-channel bit widths: a basis and the places of its fields
        (`codec.allocation`).
    Returns the codec's page tensors (`Codec.tensors`). For the default codec: codes ``[B, H, T/P, rows, D]`` uint8, and
    scale and zero point ``[B, H, T/P, *spec.params_shape(D)]``.
    """
    return spec.codec.quantize(x, spec, fitted)


def dequantize_pages(*kept_and_spec: Any) -> Tensor:
    """Inverse of `quantize_pages` up to rounding: ``[B, H, N * P, D]`` float32.

    Takes the tensors that `quantize_pages` returned, then the tensors named in `Codec.dequantizes_with`, then the spec.
    """
    spec: CodecSpec = kept_and_spec[-1]
    return spec.codec.dequantize(*kept_and_spec)


@dataclass(frozen=True)
class Affine(Codec, name=""):
    """The default codec, which most other codecs build on. It stores what the fields of the `Quantizer` select: uniform
    values with a scale and zero_point per group, grid points with a scale per group, or unquantized floats."""

    tensors = {
        "codes": Kept(lambda spec, head_dim: (spec.rows, spec.quantizer.columns(head_dim)), torch.uint8),
        "scale": Kept(CodecSpec.params_shape),
        "zero_point": Kept(CodecSpec.zero_shape),
    }
    dequantizes_any_bytes = True

    def quantize(
        self, x: Tensor, spec: CodecSpec, fitted: Sequence[Tensor] = (), stored: _Stored | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `quantize_pages`. stored: for uniform quantization: existing scales and zero points, and a mask
        ``[B, H, T/P, *, 1]`` bool of the groups that have them; None fits all groups."""
        dtype, quantizer = params_dtype(x.dtype), spec.quantizer
        if quantizer.raw:
            return _store_raw(x.unflatten(-2, (-1, spec.page_size)), spec, dtype)
        pages = hadamard(x.float().unflatten(-2, (-1, spec.page_size)), spec.transform.rotation)
        if quantizer.grid:
            codes, scale, zero_point = _quantize_on_grid(pages, quantizer, dtype)
        elif quantizer.subspace is None:
            codes, scale, zero_point = _quantize(pages, quantizer, dtype, stored)
        else:
            codes, scale, zero_point = _quantize_compensated(pages, fitted[0], quantizer, dtype, stored)
        return pack(codes, spec.bits), scale, zero_point

    def dequantize(self, codes: Tensor, scale: Tensor, zero_point: Tensor, spec: CodecSpec) -> Tensor:
        quantizer = spec.quantizer
        if quantizer.raw:
            return _load_raw(codes, scale, spec).flatten(-3, -2)
        codes = unpack(codes, quantizer.bits)
        if quantizer.grid:
            values = look_up(codes, grid(quantizer.grid, codes.device)).unflatten(-1, (-1, quantizer.group_size))
            pages = (values * scale.float().unsqueeze(-1)).flatten(-2)
        else:
            pages = dequantize_groups(codes, scale, zero_point, quantizer)
        return inverse_hadamard(pages, spec.transform.rotation).flatten(-3, -2)


AFFINE = Affine()


def _quantize_on_grid(x: Tensor, quantizer: Quantizer, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    points, (groups, _) = grid(quantizer.grid, x.device), grouped(x, quantizer)
    scale = fit_rms(groups, dtype)
    units = (groups / torch.where(scale > 0, scale, 1).float()).flatten(-2)
    codes = assign_points(units, points)
    if quantizer.fit == "lsq":
        scale = fit_size(groups, look_up(codes, points).view(groups.shape), dtype)
    return codes, scale.squeeze(-1), x.new_empty((*x.shape[:-2], 0, x.shape[-1]), dtype=dtype)


def _store_raw(pages: Tensor, spec: CodecSpec, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    if pages.dtype.itemsize * 8 != spec.bits:
        raise KVPassError(f"bits={spec.bits} stores {spec.bits}-bit floats unchanged; got {pages.dtype}.")
    codes = pages.contiguous().view(torch.uint8).view(*pages.shape[:-2], spec.rows, pages.shape[-1])
    none = pages.new_empty((*pages.shape[:-2], 0, pages.shape[-1]), dtype=dtype)
    return codes, none, none.clone()


def _load_raw(codes: Tensor, scale: Tensor, spec: CodecSpec) -> Tensor:
    dtype = torch.float32 if spec.bits == 32 else scale.dtype
    return codes.contiguous().view(*codes.shape[:-2], spec.page_size, codes.shape[-1] * dtype.itemsize).view(dtype)


def replace_tokens(
    pools: tuple[Tensor, Tensor, Tensor], x: Tensor, new: Tensor, spec: CodecSpec, fitted: Sequence[Tensor] = ()
) -> tuple[Tensor, Tensor, Tensor]:
    """Replace some tokens of existing pages. The other tokens keep their quantized values.

    pools: codes, scale and zero point of the pages.
    x: ``[B, H, N * P, D]``, the new tokens in their slots.
    new: ``[B, H, N * P]`` bool, the slots to replace with ``x``.

    If scales are per channel, a new token is quantized with the existing scale of its group. Only a group whose tokens
    are all new gets a new scale.
    """
    new = new.unflatten(-1, (-1, spec.page_size)).unsqueeze(-1)
    if spec.quantizer.raw:
        old = dequantize_pages(*pools, spec).to(x.dtype)
        return AFFINE.quantize(torch.where(new.flatten(2, 3), x, old), spec)
    stored = None
    if spec.quantizer.per == "channel":
        stored = (*pools[1:], ~new.squeeze(-1).unflatten(-1, (-1, spec.quantizer.group_size)).all(-1, keepdim=True))
    codes, scale, zero_point = AFFINE.quantize(x, spec, fitted, stored)
    codes = pack(torch.where(new, unpack(codes, spec.bits), unpack(pools[0], spec.bits)), spec.bits)
    if spec.quantizer.per == "token":
        both = zip((scale, zero_point), pools[1:], strict=True)
        scale, zero_point = (torch.where(new, mine, old) if mine.numel() else old for mine, old in both)
    return codes, scale, zero_point


_NEARLY = 1e-4  # of a whole number: a float32 average of equal codes is one
_ROUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "nearest": torch.round,
    "floor": lambda x: (x + _NEARLY).floor(),
    "ceil": lambda x: (x - _NEARLY).ceil(),
}


def share_codes(
    existing: Tensor, x: Tensor, own: tuple[Tensor, Tensor, Tensor], spec: CodecSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scale and zero point of a layer that shares codes with earlier layers (XQuant, section 3.3).

    existing: packed codes of the earlier layers, ``[B, H, N, rows, D]``.
    x: ``[B, H, N * P, D]``, this layer's tokens.
    own: the result of `quantize_pages` for ``x``.

    Existing and own codes are averaged with weight ``spec.own_codes`` and rounded as ``spec.rounding`` says. With
    weight 0 and fit "lsq", the scale and zero point are fitted to the existing codes.
    """
    if spec.own_codes:
        theirs, mine = unpack(existing, spec.bits).float(), unpack(own[0], spec.bits).float()
        average = theirs + spec.own_codes * (mine - theirs)
        whole = _ROUNDED[spec.rounding](average).to(torch.uint8)
        return pack(whole, spec.bits), *own[1:]
    if spec.quantizer.fit == "minmax":
        return existing, *own[1:]
    groups, dim = grouped(x.unflatten(-2, (-1, spec.page_size)), spec.quantizer)
    codes, _ = grouped(unpack(existing, spec.bits), spec.quantizer)
    scale, zero_point = fit_codes(groups, codes, dim, own[1].dtype)
    return existing, scale.squeeze(dim), zero_point.squeeze(dim)

"""Tokens <-> pages: ``fit``, ``assign`` (with compensation) and ``pack``, composed as a `CodecSpec` says."""

import torch
from torch import Tensor

from .affine import assign, dequantize, fit_minmax, params_dtype
from .pack import pack, unpack
from .spec import CodecSpec


def _grouped(x: Tensor, spec: CodecSpec) -> tuple[Tensor, int]:
    """View ``[..., P, D]`` so that a quantization group lies along one dim; returns the view and that dim."""
    dim = -2 if spec.per == "channel" else -1
    return x.unflatten(dim, (-1, spec.group_size)), dim


def _quantize(x: Tensor, spec: CodecSpec, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    groups, dim = _grouped(x, spec)
    scale, zero_point = fit_minmax(groups, dim, spec.bits, dtype)
    codes = assign(groups, scale, zero_point, spec.bits)
    return codes.reshape(x.shape), scale.squeeze(dim), zero_point.squeeze(dim)


def _dequantize(codes: Tensor, scale: Tensor, zero_point: Tensor, spec: CodecSpec) -> Tensor:
    groups, dim = _grouped(codes, spec)
    return dequantize(groups, scale.unsqueeze(dim), zero_point.unsqueeze(dim)).reshape(codes.shape)


def _quantize_compensated(x: Tensor, compensation: Tensor, spec: CodecSpec, dtype: torch.dtype):
    """Quantize ``block_size`` channels at a time; each block's error moves the channels still to come."""
    size, parts = spec.subspace.block_size, []
    for start in range(0, x.shape[-1], size):
        block, rest = x[..., :size], x[..., size:]
        part = _quantize(block, spec, dtype)
        parts.append(part)
        if rest.shape[-1]:
            error = _dequantize(*part, spec) - block
            answer = compensation[..., start:, start : start + size].float()
            x = rest + (error.flatten(-3, -2) @ answer.mT).view_as(rest)
    return tuple(torch.cat(columns, -1) for columns in zip(*parts, strict=True))


def encode_pages(x: Tensor, spec: CodecSpec, compensation: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize and pack whole pages.

    x: ``[B, H, T, D]`` float, T a multiple of ``spec.page_size``.
    compensation: ``[B, H, D - b, D - b]`` from `compensation_matrix`, for specs with a subspace.
    Returns codes ``[B, H, T/P, rows, D]`` uint8, and scale and zero point ``[B, H, T/P, *spec.params_shape(D)]``.
    """
    dtype = params_dtype(x.dtype)
    pages = x.float().unflatten(-2, (-1, spec.page_size))
    if spec.subspace is None:
        codes, scale, zero_point = _quantize(pages, spec, dtype)
    else:
        codes, scale, zero_point = _quantize_compensated(pages, compensation, spec, dtype)
    return pack(codes, spec.bits), scale, zero_point


def decode_pages(codes: Tensor, scale: Tensor, zero_point: Tensor, spec: CodecSpec) -> Tensor:
    """Inverse of `encode_pages` up to rounding: ``[B, H, N, rows, D]`` bytes -> ``[B, H, N * P, D]`` float32."""
    return _dequantize(unpack(codes, spec.bits), scale, zero_point, spec).flatten(-3, -2)

"""The affine group quantizer: ``fit`` a scale and a zero point to a group, ``assign`` codes under them.

Scales and zero points are stored in 16 bits, and codes are assigned under the *stored* parameters. The zero point is
rounded down and the scale up, so that every value of the group lies inside ``[zero_point, zero_point + (2**bits-1) *
scale]``: the round-trip error is at most ``scale / 2`` for every element, and a constant the storage dtype can hold
decodes to itself.
"""

import torch
from torch import Tensor

from ..errors import NonFiniteError


def params_dtype(dtype: torch.dtype) -> torch.dtype:
    """Storage dtype of scales and zero points for a cache of ``dtype``: bfloat16 keeps its range, others use half."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float16


def _round_toward(x: Tensor, dtype: torch.dtype, up: bool) -> Tensor:
    info = torch.finfo(dtype)
    nearest = x.to(dtype)
    margin = x.abs() * info.eps + info.smallest_normal * info.eps
    stepped = (x + margin if up else x - margin).to(dtype)
    wrong_side = nearest.float() < x if up else nearest.float() > x
    return torch.where(wrong_side, stepped, nearest)


def fit_minmax(groups: Tensor, dim: int, bits: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scale and zero point of each group along ``dim`` (kept with size 1), in ``dtype``.

    ``zero_point = min``, ``scale = (max - min) / (2**bits - 1)``, rounded outwards as the module says.
    """
    zero_point = _round_toward(groups.amin(dim, keepdim=True), dtype, up=False)
    span = groups.amax(dim, keepdim=True) - zero_point.float()
    return _round_toward(span / (2**bits - 1), dtype, up=True), zero_point


def assign(groups: Tensor, scale: Tensor, zero_point: Tensor, bits: int) -> Tensor:
    """Nearest codes of float32 ``groups`` under the stored parameters (broadcast against them), uint8."""
    scale, zero_point = scale.float(), zero_point.float()
    steps = (groups - zero_point) / torch.where(scale > 0, scale, torch.ones_like(scale))
    return steps.round().clamp(0, 2**bits - 1).to(torch.uint8)


def dequantize(codes: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """``codes * scale + zero_point`` in float32, with broadcasting."""
    return codes.float() * scale.float() + zero_point.float()


def check_finite(scale: Tensor, zero_point: Tensor) -> None:
    """Raise `NonFiniteError` if a group held NaN or infinity, or left the range of the 16-bit parameters.

    The parameters of a group are finite exactly when all of its values are, so the small tensors are enough.
    """
    if not (torch.isfinite(scale).all() and torch.isfinite(zero_point).all()):
        raise NonFiniteError(
            "NaN, infinity or a value beyond the 16-bit range of scales reached the KV quantizer. Check the model's "
            "outputs with the full-precision cache; for values beyond 65504 load the model in bfloat16."
        )

"""The affine group quantizer: fits a scale and a zero point to each group, and quantizes values with them.

Scales and zero points are stored in 16 bits, and values are quantized with the *stored* parameters. The zero point is
rounded down and the scale up, so that every value of the group lies inside ``[zero_point, zero_point + (2**bits-1) *
scale]``: the round-trip error is at most ``scale / 2`` for every element, and a constant that the storage dtype can
hold dequantizes to itself. `calibrate` and the least-squares fits trade that bound for a smaller squared error.
"""

import torch
from torch import Tensor

from ..errors import NonFiniteError


def params_dtype(dtype: torch.dtype) -> torch.dtype:
    """Storage dtype of scales and zero points for a cache of ``dtype``: bfloat16 for bfloat16, float16 otherwise."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float16


def round_toward(x: Tensor, dtype: torch.dtype, up: bool) -> Tensor:
    """Convert ``x`` to ``dtype``, rounding up (``up=True``) or down."""
    info = torch.finfo(dtype)
    nearest = x.to(dtype)
    margin = x.abs() * info.eps + info.smallest_normal * info.eps
    stepped = (x + margin if up else x - margin).to(dtype)
    wrong_side = nearest.float() < x if up else nearest.float() > x
    return torch.where(wrong_side, stepped, nearest)


def fit_minmax(groups: Tensor, dim: int, bits: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scale and zero point of each group along ``dim`` (kept with size 1), in ``dtype``.

    ``zero_point = min``, ``scale = (max - min) / (2**bits - 1)``, rounded outwards as described above.
    """
    zero_point = round_toward(groups.amin(dim, keepdim=True), dtype, up=False)
    span = groups.amax(dim, keepdim=True) - zero_point.float()
    steps = span.new_full((), 2**bits - 1)  # a tensor: on CUDA, PyTorch multiplies by the reciprocal of a number
    return round_toward(span / steps, dtype, up=True), zero_point


def calibrate(scale: Tensor, zero_point: Tensor, bits: int, eta: float) -> tuple[Tensor, Tensor]:
    """Scale and zero point of a range that is narrower by ``eta`` of its length at each end (XQuant, eq. 9).

    Codes that were assigned with the given scale and zero point are dequantized with the returned ones.
    """
    dtype, scale = scale.dtype, scale.float()
    zero_point = zero_point.float() + eta * (2**bits - 1) * scale
    return ((1 - 2 * eta) * scale).to(dtype), zero_point.to(dtype)


def fit_codes(groups: Tensor, codes: Tensor, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Least-squares scale and zero point along ``dim`` (kept with size 1) for given ``codes``.

    The scale is negative if codes and values are anticorrelated, which happens with codes of another layer.
    """
    groups, codes = groups.double(), codes.double()
    mean, code = groups.mean(dim, keepdim=True), codes.mean(dim, keepdim=True)
    spread = (codes - code).square().sum(dim, keepdim=True)
    slope = ((codes - code) * (groups - mean)).sum(dim, keepdim=True) / spread
    scale = torch.where(spread > 0, slope, 0.0).to(dtype)
    return scale, (mean - scale.double() * code).to(dtype)


_HALF_QUADRATIC = dict(power=0.7, weight=10.0, growth=1.01, rounds=20)
"""HQQ's settings: the norm's power, the weight of the quadratic term and its growth, and the number of rounds."""


def fit_hqq(groups: Tensor, dim: int, bits: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scale and zero point of each group along ``dim`` (kept with size 1), as half-quadratic quantization (HQQ) finds
    them: the scale spans the group, and the zero point makes the l_p norm of the error small, with p = 0.7, which
    forgives few large errors. The best zero point of all rounds is returned, so no group is worse than by `fit_minmax`.
    """
    scale, zero_point = best = fit_minmax(groups, dim, bits, dtype)
    power, weight, x, step = _HALF_QUADRATIC["power"], _HALF_QUADRATIC["weight"], groups.float(), scale.float()
    least = torch.full_like(step, torch.inf)
    for _ in range(int(_HALF_QUADRATIC["rounds"]) + 1):
        codes = assign(x, scale, zero_point, bits)
        error = x - dequantize(codes, scale, zero_point)
        norm = error.abs().pow(power).sum(dim, keepdim=True)
        best = scale, torch.where(norm < least, zero_point, best[1])
        least = torch.minimum(norm, least)
        shrunk = (error.abs() - error.abs().clamp_min(1e-12).pow(power - 1) / weight).clamp_min(0)
        zero_point = (x - error.sign() * shrunk - codes.float() * step).mean(dim, keepdim=True).to(dtype)
        weight *= _HALF_QUADRATIC["growth"]
    return best


_REFITS = 4


def fit_lsq(groups: Tensor, dim: int, bits: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scale and zero point of each group along ``dim`` (kept with size 1) with small squared error, in ``dtype``.

    Shrinking the range symmetrically produces finitely many code vectors, because each threshold crosses each value
    once. One sorted sweep evaluates all of them with their least-squares fit, so no ``eta`` gives a smaller error. The
    best one is then refined by alternating assignment and fit.
    """
    x = groups.movedim(dim, -1).double()
    low, high = x.aminmax(dim=-1, keepdim=True)
    middle, levels = (low + high) / 2, 2**bits - 1
    x = x - middle
    sign = torch.where(x > 0, 1.0, -1.0).double()
    # c, the code minus its middle, starts as sign / 2; |c| grows to k + 1/2 where the scale falls below |x| / k
    size, steps = x.shape[-1], torch.arange(1.0, 2 ** (bits - 1), dtype=x.dtype, device=x.device)
    scales = (x.abs().unsqueeze(-2) / steps[:, None]).flatten(-2)
    order = scales.argsort(-1, descending=True)
    step, which = steps.repeat_interleave(size)[order], order % size

    def sweep(start: Tensor, changes: Tensor) -> Tensor:
        return torch.cat([start.sum(-1, keepdim=True), changes], -1).cumsum(-1)

    c = sweep(sign / 2, sign.gather(-1, which))
    cc = sweep(torch.full_like(x, 0.25), 2 * step)
    cx = sweep(sign * x / 2, (sign * x).gather(-1, which))
    spread = cc - c * c / size
    slope = torch.where(spread > 1e-9, cx - c * x.mean(-1, keepdim=True), 0.0) / spread.clamp_min(1e-9)
    best = (slope * slope * spread).argmax(-1, keepdim=True)
    scale = slope.gather(-1, best)
    zero_point = middle + x.mean(-1, keepdim=True) - scale * (c.gather(-1, best) / size + levels / 2)
    x = x + middle
    for _ in range(_REFITS):
        codes = ((x - zero_point) / torch.where(scale > 0, scale, 1.0)).round().clamp(0, levels)
        scale, zero_point = fit_codes(x, codes, -1, x.dtype)
    fitted = scale.to(dtype).movedim(-1, dim), zero_point.to(dtype).movedim(-1, dim)
    stored = torch.isfinite(fitted[0]) & torch.isfinite(fitted[1])  # a fit may exceed the range of the 16-bit dtype
    both = zip(fitted, fit_minmax(groups, dim, bits, dtype), strict=True)
    scale, zero_point = (torch.where(stored, *pair) for pair in both)
    return scale, zero_point


def assign(groups: Tensor, scale: Tensor, zero_point: Tensor, bits: int) -> Tensor:
    """Quantize float32 ``groups`` to the nearest codes, uint8. The stored parameters are broadcast against them."""
    scale, zero_point = scale.float(), zero_point.float()
    steps = (groups - zero_point) / torch.where(scale > 0, scale, torch.ones_like(scale))
    return steps.round().clamp(0, 2**bits - 1).to(torch.uint8)


def dequantize(codes: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """``codes * scale + zero_point`` in float32, with broadcasting."""
    return codes.float() * scale.float() + zero_point.float()


def check_finite(*parameters: Tensor) -> None:
    """Raise `NonFiniteError` if a group held NaN or infinity, or left the range of the 16-bit parameters.

    The parameters of a group are finite if and only if all of its values are, so only these small tensors are checked.
    """
    if not all(torch.isfinite(one).all() for one in parameters):
        raise NonFiniteError(
            "NaN, infinity or a value beyond the 16-bit range of scales reached the KV quantizer. Check the model's "
            "outputs with a full-precision cache. If values exceed 65504, load the model in bfloat16."
        )

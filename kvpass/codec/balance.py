"""Balances pages before quantization: divides them by 16-bit factors along the axis that scales do not cover.

With per-channel scales there is one factor per token; with per-token scales there is one factor per channel. Factors
come from Sinkhorn's alternation (KVarN) or from the largest value of a channel (ZipCache).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from ..errors import KVPassError
from .affine import params_dtype
from .codec import Codec, Kept
from .hadamard import hadamard, inverse_hadamard
from .pages import Affine, dequantize_pages, quantize_pages
from .quantizer import Quantizer
from .spec import CodecSpec

_ITERATIONS = 16
_STD = 1e-3, 1e3
_LOG = -9.0, 9.0
_LEAST = 8  # values: the standard deviation of fewer large values may be close to 0


def _factor_dim(quantizer: Quantizer) -> int:
    """The dim along which all values share a factor."""
    return -1 if quantizer.per == "channel" else -2


def sinkhorn(x: Tensor, dim: int) -> Tensor:
    """Factors of pages ``[..., P, D]``, constant along ``dim`` (kept with size 1), float64 (KVarN, arXiv 2606.03458).

    The standard deviations along both axes are divided out in turn, and their logarithms are summed. The result is the
    factors of the iteration with the most equal standard deviations.

    The number of iterations is that of KVarN's code. That code also keeps logarithms above -0.3, so it does not balance
    pages of values below 1, and near the bound the result depends on rounding. Here the scale of a page does not
    matter.
    """
    x = x.double()
    x = x / x.square().mean((-2, -1), keepdim=True).sqrt().clamp_min(torch.finfo(torch.float32).tiny)

    def std(dim: int, y: Tensor) -> Tensor:
        return y.std(dim, keepdim=True, correction=min(1, y.shape[dim] - 1))

    def imbalance(y: Tensor) -> Tensor:
        deviations = (std(each, y).flatten(-2) for each in (-2, -1))
        ratios = [one.amax(-1) / one.amin(-1).clamp_min(1e-8) for one in deviations]
        return (ratios[0] + ratios[1])[..., None, None]

    axes = (dim, -3 - dim)  # the axis of the factor, and the other axis
    logs = [torch.zeros_like(std(each, x)) for each in axes]
    best, least, balanced = logs[0], imbalance(x), x
    for _ in range(_ITERATIONS):
        for i, each in enumerate(axes):
            logs[i] = (logs[i] + std(each, balanced).clamp(*_STD).log()).clamp(*_LOG)
            balanced = x / (logs[0] + logs[1]).exp()
        found = imbalance(balanced)
        best, least = torch.where(found <= least, logs[0], best), torch.minimum(found, least)
    return (best - best.mean((-2, -1), keepdim=True)).exp()  # the scales hold the common factor


def root_of_largest(x: Tensor, dim: int) -> Tensor:
    """Square root of the largest magnitude along ``dim`` (kept with size 1), or 1 if that is 0 (ZipCache, arXiv
    2405.14256, section 4.1)."""
    largest = x.abs().amax(dim, keepdim=True)
    return torch.where(largest > 0, largest, 1.0).sqrt()


@cache
def _inside(spec: CodecSpec) -> CodecSpec:
    """The spec for quantizing divided pages, which are already rotated."""
    return replace(spec.plain, transform=replace(spec.transform, rotation=None))


def _shape(spec: CodecSpec, head_dim: int) -> tuple[int, int]:
    return (spec.page_size, 1) if spec.quantizer.per == "channel" else (1, head_dim)


def _shape_of_deviations(spec: CodecSpec, head_dim: int) -> tuple[int, int]:
    if min(spec.page_size, head_dim) < _LEAST:
        raise KVPassError(
            f"Balancing by deviations needs at least {_LEAST} values per page; page_size={spec.page_size} x "
            f"head_dim={head_dim} are too few. Use a scheme without it, such as 'zipcache' or 'kivi'."
        )
    return _shape(spec, head_dim)


@dataclass(frozen=True)
class _Balanced(Codec):
    """Divides pages by factors before quantization. A subclass fits the factors."""

    dequantizes_any_bytes = True

    @staticmethod
    def fit(x: Tensor, dim: int) -> Tensor:
        """Factors of pages ``x``, constant along ``dim``."""
        raise NotImplementedError

    def check(self, spec: CodecSpec) -> None:
        if spec.quantizer.raw or spec.quantizer.grid or spec.quantizer.subspace is not None:
            raise KVPassError("Balancing needs uniform quantization: no grid, raw floats or subspace.")

    def quantize(self, x: Tensor, spec: CodecSpec, fitted: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        pages = hadamard(x.float().unflatten(2, (-1, spec.page_size)), spec.transform.rotation)
        factor = self.fit(pages, _factor_dim(spec.quantizer)).to(params_dtype(x.dtype))
        divided = (pages / factor.float()).flatten(2, 3).to(x.dtype)
        return *quantize_pages(divided, _inside(spec), fitted), factor

    def dequantize(self, codes: Tensor, scale: Tensor, zero_point: Tensor, factor: Tensor, spec: CodecSpec) -> Tensor:
        divided = dequantize_pages(codes, scale, zero_point, _inside(spec))
        tokens = (divided.unflatten(2, (-1, spec.page_size)) * factor.float()).flatten(2, 3)
        return inverse_hadamard(tokens, spec.transform.rotation)


class Sinkhorn(_Balanced, name="sinkhorn"):
    """Factors from Sinkhorn's alternation (KVarN, arXiv 2606.03458)."""

    tensors = {**Affine.tensors, "factor": Kept(_shape_of_deviations)}
    fit = staticmethod(sinkhorn)


class ChannelSeparable(_Balanced, name="channel-separable"):
    """Factors from the largest value: its square root (ZipCache, arXiv 2405.14256, section 4.1)."""

    tensors = {**Affine.tensors, "factor": Kept(_shape)}
    fit = staticmethod(root_of_largest)

"""Streaming least squares: predictors are fitted from sums over tokens, however many there are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..codec import CodecSpec, Quantizer, Subspace, quantize_pages
from ..codec.predictor import GROUP, matrix, parse_predictor, run
from ..codec.subspace import compensation_matrix
from ..layout.retention import Recent

Batches = Callable[[], Iterator[tuple[Tensor, Tensor]]]
"""Makes a pass over the data: rows ``[T, in]`` to predict from and rows ``[T, out]`` to predict, float32."""

_BLOCK = 32  # inputs whose 4-bit weights are quantized at a time
_MLP_EPOCHS, _MLP_STEPS, _MLP_BATCH, _MLP_RATE = 8, 1000, 256, 1e-3  # at least this many epochs and steps


@dataclass
class Moments:
    """Sums over the rows seen, in float64.

    count: number of rows.
    x ``[in]``, y ``[out]``: sums of inputs and outputs.
    xx ``[in, in]``, xy ``[in, out]``: sums of products.
    yy ``[out]``: sums of squares.
    """

    count: int
    x: Tensor
    y: Tensor
    xx: Tensor
    xy: Tensor
    yy: Tensor

    @classmethod
    def of(cls, batches: Batches) -> Moments:
        """One pass over the data."""
        total: tuple[Any, ...] = (0,) * 6
        for x, y in batches():
            x, y = x.double(), y.double()
            new = (len(x), x.sum(0), y.sum(0), x.mT @ x, x.mT @ y, y.square().sum(0))
            total = tuple(a + b for a, b in zip(total, new, strict=True))
        return cls(*total)

    def centred(self) -> tuple[Tensor, Tensor]:
        """Covariances times ``count``: ``[in, in]`` and ``[in, out]``."""
        return self.xx - torch.outer(self.x, self.x) / self.count, self.xy - torch.outer(self.x, self.y) / self.count

    def bias(self, weight: Tensor) -> Tensor:
        """The least-squares bias for ``weight`` ``[out, in]``."""
        return (self.y - weight.double() @ self.x) / self.count

    def energy(self) -> float:
        """Total squared distance of the rows ``y`` from their mean."""
        return (self.yy - self.y.square() / self.count).sum().item()


def _regularised(covariance: Tensor, ridge: float) -> Tensor:
    mean = covariance.diagonal().mean()
    return covariance + max(ridge, 1e-12) * mean.clamp_min(1e-30) * torch.eye(len(covariance), dtype=covariance.dtype)


def linear(moments: Moments, ridge: float) -> Tensor:
    """The least-squares weight ``[out, in]``, with ``ridge`` times the mean of the diagonal added to the diagonal."""
    xx, xy = moments.centred()
    return torch.linalg.solve(_regularised(xx, ridge), xy).mT


def low_rank(moments: Moments, ridge: float, rank: int) -> tuple[Tensor, Tensor]:
    """Reduced-rank regression (Reinsel and Velu, 1998): the best factors ``[rank, in]`` and ``[out, rank]``."""
    weight = linear(moments, ridge)
    xx, _ = moments.centred()
    _, directions = torch.linalg.eigh(weight @ xx @ weight.mT)
    up = directions[:, -rank:]
    return up.mT @ weight, up


def quantize(weight: Tensor, covariance: Tensor, ridge: float, dtype: torch.dtype) -> list[Tensor]:
    """``weight`` ``[out, in]`` quantized to 4 bits: quantized values ``[out / 2, in]``, scales and zero points.

    Inputs are quantized in blocks. Later blocks compensate for the error of earlier ones, using ``covariance`` ``[in,
    in]`` of the inputs (GPTQ, arXiv 2210.17323).
    """
    outputs, inputs = weight.shape
    block = math.gcd(inputs, _BLOCK)
    group = math.gcd(outputs, GROUP)
    subspace = Subspace(1, 0.0, True, block) if inputs > block else None
    spec = CodecSpec(Quantizer(4, "channel", group, subspace=subspace), Recent(outputs))
    fitted = []
    if subspace is not None:
        fitted = [compensation_matrix(_regularised(covariance, max(ridge, 1e-2)), block)[None, None]]
    packed = quantize_pages(weight.to(dtype)[None, None], spec, fitted)
    return [part[0, 0, 0] for part in packed]


def fit(
    predictor: str, batches: Batches, moments: Moments, *, ridge: float, rank: int | None, dtype: torch.dtype
) -> list[Tensor]:
    """The tensors of a predictor (`kvpass.codec.predictor`), in ``dtype`` or quantized to 4 bits.

    batches: makes a pass over the data that ``moments`` was computed from; only "mlp" makes further passes.
    """
    kind, bits = parse_predictor(predictor)
    if kind == "mlp":
        return [tensor.to(dtype) for tensor in _fit_mlp(batches, moments)]
    outputs = len(moments.y)
    if kind == "bias":
        return [(moments.y / moments.count).to(dtype)]
    weights = [linear(moments, ridge)]
    if kind == "low-rank":
        weights = list(low_rank(moments, ridge, min(rank or outputs // 2, outputs)))
    parts, covariance = [], moments.centred()[0]
    whole = torch.eye(len(moments.x), dtype=torch.float64)
    for weight in weights:
        part = quantize(weight, covariance, ridge, dtype) if bits == 4 else [weight.to(dtype)]
        stored = matrix(part).double()
        whole, covariance = stored @ whole, stored @ covariance @ stored.mT
        parts.extend(part)
    return [*parts, moments.bias(whole).to(dtype)]


def _fit_mlp(batches: Batches, moments: Moments) -> list[Tensor]:
    """Two layers with a hidden width of twice the input width, trained by Adam from a fixed seed."""
    inputs, outputs = len(moments.x), len(moments.y)
    generator = torch.Generator().manual_seed(0)
    mean = (moments.y / moments.count).float()
    size = math.sqrt(moments.energy() / moments.count / outputs) or 1.0  # outputs are learned in this unit
    weights = [
        torch.randn(2 * inputs, inputs, generator=generator) / math.sqrt(inputs),
        torch.zeros(outputs, 2 * inputs),
    ]  # which is the mean
    weights += [torch.zeros(2 * inputs), torch.zeros(outputs)]
    with torch.enable_grad():
        for weight in weights:
            weight.requires_grad_()
        optimiser = torch.optim.Adam(weights, _MLP_RATE)
        epochs = max(_MLP_EPOCHS, math.ceil(_MLP_STEPS * _MLP_BATCH / moments.count))
        for epoch in range(epochs):
            optimiser.param_groups[0]["lr"] = _MLP_RATE * (1 - epoch / epochs)
            for x, y in batches():
                order = torch.randperm(len(x), generator=generator)
                for rows in order.split(_MLP_BATCH):
                    error = run("mlp", x[rows], weights[:2], weights[2:]) - (y[rows] - mean) / size
                    optimiser.zero_grad()
                    error.square().mean().backward()
                    optimiser.step()
    first, second, a, b = (weight.detach() for weight in weights)
    return [first, second * size, a, b * size + mean]

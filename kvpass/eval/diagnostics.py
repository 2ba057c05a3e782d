"""Why a scheme loses what it loses: figures by layer that papers argue with, from one simulated pass over a text.

Each layer is compared with exact keys and values on the inputs that it gets, so errors of lower layers do not add up.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..cache.state import KVState
from ..codec.bitpack import unpack
from ..runtime.simulated import Observer, Simulator, observed
from ..schemes import SchemeConfig, get
from ..schemes.calibrated import Calibration

RANK, _RIDGE, _FITTED = 5, 1e-3, 0.75  # directions of the query subspace (SQuat); AQUA-KV's ridge; share of the tokens


@dataclass
class LayerFigures:
    """Figures of one layer. Means are over heads and the queries after the prompt.

    attention: L1 distance between attention weights over stored and over exact keys, from 0 to 2 (LogQuant, table 2).
    output: squared error of the attention output, relative to its energy.
    coverage: share of the exact attention weights that falls on keys in full precision.
    deviation: share of the energy of queries outside of the first 5 principal directions of the prompt's queries, of
        the query heads of a KV head together (SQuat).
    same_keys, same_values: share of the codes that equal those of the layer below (XQuant); None where layers are not
        stored alike in uniform codes.
    chance_keys, chance_values: the same if codes were independent, given how often each occurs in both layers.
    explained_keys, explained_values: share of the variance, in the last quarter of the tokens, that a linear probe
        explains from the keys below, or from the values below and this layer's keys (AQUA-KV); None for the first
        layer. Keys are taken as attention reads them, after rotary embedding.
    """

    attention: float = 0.0
    output: float = 0.0
    coverage: float = 0.0
    deviation: float = 0.0
    same_keys: float | None = None
    chance_keys: float | None = None
    same_values: float | None = None
    chance_values: float | None = None
    explained_keys: float | None = None
    explained_values: float | None = None


@torch.no_grad()
def diagnose(
    simulator: Simulator, ids: Tensor, prompt: int, scheme: str | dict[str, Any] | SchemeConfig | Calibration
) -> list[LayerFigures]:
    """Figures of every layer, in order, over ``ids`` ``[1, S]``, of which the first ``prompt`` tokens are prefilled.

    Raises `NotSimulatedError` for schemes that cannot be scored in one pass: those that share codes, evict tokens or
    predict.
    """
    seen = _Figures()
    with observed(seen):
        simulator.logits(ids, prompt, scheme if isinstance(scheme, Calibration) else get(scheme))
    return seen.finished()


class _Figures(Observer):
    def __init__(self) -> None:
        self.layers: list[LayerFigures] = []
        self.sums: list[dict[str, float]] = []
        self.below: tuple[Tensor, Tensor, KVState, KVState] | None = None
        self.prompt = 0

    def layer(self, q: Tensor, k: Tensor, v: Tensor, keys: KVState, values: KVState, prompt: int) -> None:
        found, self.prompt = LayerFigures(deviation=deviation(q, k.shape[1], prompt)), prompt
        if self.below is not None:
            k_below, v_below, keys_below, values_below = self.below
            found.explained_keys = explained([k_below], k)
            found.explained_values = explained([v_below, k], v)
            found.same_keys, found.chance_keys = alike(keys_below, keys, k.shape[2])
            found.same_values, found.chance_values = alike(values_below, values, v.shape[2])
        self.below = k, v, keys, values
        self.layers.append(found)
        self.sums.append(defaultdict(float))

    def queries(self, first: int, exact: Tensor, weights: Tensor, out: Tensor, wanted: Tensor, packed: Tensor) -> None:
        after = slice(max(0, self.prompt - first), None)
        exact, weights, out, wanted = (x[:, :, after].double() for x in (exact, weights, out, wanted))
        sums = self.sums[-1]
        sums["rows"] += exact[..., 0].numel()
        sums["attention"] += (exact - weights).abs().sum().item()
        sums["coverage"] += (exact * ~packed[after]).sum().item()
        sums["error"] += (out - wanted).square().sum().item()
        sums["energy"] += wanted.square().sum().item()

    def finished(self) -> list[LayerFigures]:
        for found, sums in zip(self.layers, self.sums, strict=True):
            found.attention, found.coverage = sums["attention"] / sums["rows"], sums["coverage"] / sums["rows"]
            found.output = sums["error"] / sums["energy"]
        return self.layers


def deviation(q: Tensor, heads: int, prompt: int) -> float:
    """Share of the energy of queries ``[B, H_q, S, D]`` after the prompt that is outside of the subspace of the
    prompt's queries."""
    before, after = (x.double().unflatten(1, (heads, -1)).flatten(2, 3) for x in (q[:, :, :prompt], q[:, :, prompt:]))
    directions = torch.linalg.eigh(before.mT @ before).eigenvectors[..., -RANK:]
    inside = (after @ directions).square().sum()
    return 1 - float(inside / after.square().sum())


def alike(below: KVState, above: KVState, tokens: int) -> tuple[float | None, float | None]:
    """The share of equal codes of two layers, and that of independent ones; None unless both are stored alike in
    uniform codes."""
    spec, pages = above.spec, above.spec.retention.pages(tokens)
    uniform = spec.quantizer.codec is None and not (
        spec.quantizer.grid or spec.quantizer.raw or spec.quantizer.adaptive
    )
    if not uniform or below.spec.stored_as != spec.stored_as or not pages:
        return None, None
    one, other = (unpack(state.codes[:, :, :pages], spec.bits) for state in (below, above))
    if one.shape != other.shape:
        return None, None
    often = [torch.bincount(codes.flatten().long(), minlength=2**spec.bits) / codes.numel() for codes in (one, other)]
    return (one == other).double().mean().item(), (often[0] * often[1]).sum().item()


def explained(inputs: list[Tensor], target: Tensor) -> float:
    """Share of the variance of ``target`` ``[B, H, T, D]`` that a linear probe explains from ``inputs``, on tokens that
    it was not fitted to."""
    x, y = (torch.cat([one.transpose(1, 2).flatten(2) for one in part], -1).double() for part in (inputs, [target]))
    x, y = x.flatten(0, 1), y.flatten(0, 1)
    fitted = int(_FITTED * len(y))
    x, of_mean = x - x[:fitted].mean(0), y - y[:fitted].mean(0)
    covariance = x[:fitted].mT @ x[:fitted]
    covariance.diagonal().add_(_RIDGE * covariance.diagonal().mean())
    weight = torch.linalg.solve(covariance, x[:fitted].mT @ of_mean[:fitted])
    left, held_out = of_mean[fitted:] - x[fitted:] @ weight, y[fitted:]
    return 1 - float(left.square().sum() / (held_out - held_out.mean(0)).square().sum())

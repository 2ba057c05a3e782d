"""Measure how large a model's queries are, which QAQ (arXiv 2403.04643, section 4.1) needs ahead of time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ..cache.layer import PackedLayer
from ..eval.quality import packed
from ..models.arguments import filling
from ..models.probe import fresh_cache
from ..schemes import QAQConfig


def measure_energy(model: nn.Module, data: Sequence[Tensor], config: QAQConfig, bar: tqdm) -> QAQConfig:
    """``config`` with the query energy of each layer, measured on ``data``, ``[1, T]`` each. In a sequence, the energy
    of a layer is the 90 % quantile of its queries' squared norms, scaled as in attention, for the KV head where that is
    largest. The result is the mean over sequences. Layers that are not packed get 1."""
    energies = []
    with packed(model, dataclasses.replace(config, query_energy=None), lowering="eager"):
        for ids in data:
            cache = fresh_cache(model)
            model(input_ids=ids, **filling(model, cache, 1))
            energies.append([_energy(layer) for layer in cache.layers])
            bar.update()
    return dataclasses.replace(config, query_energy=tuple(torch.tensor(energies).mean(0).tolist()))


def _energy(layer: object) -> float:
    return layer.key_state.energy.amax().item() if isinstance(layer, PackedLayer) else 1.0

"""How large a model's queries are: what QAQ (arXiv 2403.04643, section 4.1) measures ahead of time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import DynamicCache

from ..cache.layer import PackedLayer
from ..eval.quality import packed
from ..schemes import QAQConfig


def measure_energy(model: nn.Module, data: Sequence[Tensor], config: QAQConfig, bar: tqdm) -> QAQConfig:
    """``config`` with the energy of the queries of each layer: the 90 % quantile of their squared norms, scaled as in
    attention, over each of ``data`` ``[1, T]``; the mean over sequences, of the KV head where it is largest. Layers
    that are not packed get 1."""
    energies = []
    with packed(model, dataclasses.replace(config, query_energy=None), lowering="eager"):
        for ids in data:
            cache = DynamicCache(config=model.config)
            model(input_ids=ids, past_key_values=cache, use_cache=True)
            packed_ones = (isinstance(layer, PackedLayer) for layer in cache.layers)
            both = zip(cache.layers, packed_ones, strict=True)
            energies.append([layer.key_state.energy.amax().item() if ours else 1.0 for layer, ours in both])
            bar.update()
    return dataclasses.replace(config, query_energy=tuple(torch.tensor(energies).mean(0).tolist()))

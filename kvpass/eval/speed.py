"""Time decode steps of several variants in turn within one process, so that machine drift affects all of them alike."""

import copy
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..cache.swap import nbytes
from ..models.arguments import handing
from ..models.probe import fresh_cache

_COMPILING_STEPS = 3


@dataclass(frozen=True)
class Speed:
    """seconds: median wall time of a one-token decode step, batch 1; nbytes: bytes of everything its cache keeps."""

    seconds: float
    nbytes: int


def sharing_weights(model: nn.Module) -> nn.Module:
    """A copy of ``model`` for another scheme: parameters and buffers are the same tensors."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


@torch.no_grad()
def measure(variants: Mapping[str, nn.Module], ids: Tensor, length: int, rounds: int) -> dict[str, Speed]:
    """The `Speed` of each variant after ``length`` tokens of ``ids`` ``[1, S]``, S > length. Variants are models with
    the same weights, applied or not. A step is repeated by cropping its token again."""
    caches: dict[str, Cache] = {}
    times: dict[str, list[float]] = {name: [] for name in variants}
    for name, model in variants.items():
        caches[name] = fresh_cache(model)
        model(input_ids=ids[:, :length], **handing(model, caches[name]), logits_to_keep=1)
        for _ in range(_COMPILING_STEPS):
            _step(model, ids[:, length : length + 1], caches[name])
    for _ in range(rounds):
        for name, model in variants.items():
            times[name].append(_step(model, ids[:, length : length + 1], caches[name]))
    return {name: Speed(statistics.median(times[name]), nbytes(caches[name])) for name in variants}


def _step(model: nn.Module, token: Tensor, cache: Cache) -> float:
    handed, start = handing(model, cache), time.perf_counter()
    model(input_ids=token, **handed)
    if token.device.type != "cpu":
        torch.accelerator.synchronize(token.device)
    seconds = time.perf_counter() - start
    cache.crop(-1)
    return seconds

"""The calibration of KVQuant (arXiv 2401.18079): a range for every key channel, and one datatype for the keys and one
for the values of each layer. A datatype is the k-means of the values within range, weighted by squared gradients of the
loss (section 3.3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from ..codec.affine import params_dtype
from ..codec.datatype import in_units
from ..codec.nuq import fit_points, nearest
from ..codec.outliers import places
from ..codec.rope import rotate
from ..codec.spec import CodecSpec
from ..errors import KVPassError
from ..layout.window import layout
from ..models.arguments import filling
from ..models.probe import fresh_cache
from ..progress import bar
from ..schemes import CalibratedKVQuantConfig, LayerGeometry
from .backward import backward
from .collect import Collected, digest

_BINS = 4096  # of the range; points are fitted to the means of the bins
_ITERATIONS = 100

Fitted = tuple[list[Tensor], list[Tensor]]


def collect_gradients(
    model: nn.Module, data: Sequence[Tensor], layers: Sequence[int], folder: Path, seen: tqdm
) -> list[Path]:
    """Compute gradients of the loss with respect to keys and values, and return one file for each of ``data`` ``[1,
    T]``.

    The loss is the negative log-likelihood of the next tokens. Keys and values of ``layers`` are those that the cache
    takes, ``[1, H_kv, T, D]`` bfloat16. Each file also holds the keys themselves, to find out their rotation. Files
    that ``folder`` already has are not computed again.
    """
    files = [folder / f"gradients-{digest(ids)}.safetensors" for ids in data]
    for ids, file in zip(data, files, strict=True):
        if not file.exists():
            _save(_gradients(model, ids, layers), file)
        seen.update()
    return files


def _gradients(model: nn.Module, ids: Tensor, layers: Sequence[int]) -> dict[str, Tensor]:
    cache: Any = fresh_cache(model)
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]  # every transformers model has it
    with backward(model):
        embedding.requires_grad_()  # so that keys and values are part of the graph
        try:
            logits = model(input_ids=ids, **filling(model, cache)).logits
            loss = F.cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="sum")
            tensors = [getattr(cache.layers[layer], which) for layer in layers for which in ("keys", "values")]
            found = torch.autograd.grad(loss, tensors)
        finally:
            embedding.requires_grad_(False)
    names = (f"{layer}.{role}" for layer in layers for role in (0, 1))
    gradients = {name: each.to(torch.bfloat16) for name, each in zip(names, found, strict=True)}
    return {**gradients, "keys": tensors[0].detach()}


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    partial = file.with_suffix(".partial")
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, partial)
    partial.replace(file)  # whole or not at all


def _read(file: Path, name: str) -> Tensor:
    with safe_open(file, "pt") as tensors:
        return tensors.get_tensor(name).float()


def rope_between(before: Tensor, after: Tensor, cos: Tensor, sin: Tensor) -> str:
    """The rotation by tables ``[1, T, >= p]`` that turns keys before rotary embedding into ``after``, both ``[1, H, T,
    D]``.

    Raises `KVPassError` if there is none.
    """
    pairs = int((cos.square() + sin.square()).amax((0, 1)).count_nonzero())
    for rope in (f"half-{pairs}", f"interleaved-{pairs}"):
        turned = rotate(before, cos, sin, rope)
        if (turned - after).norm() < 0.05 * after.norm():
            return rope
    raise KVPassError("kvpass did not recognize the rotary embedding of this model's keys: calibrate with rope='post'.")


def fit_datatypes(
    model: nn.Module,
    config: CalibratedKVQuantConfig,
    layers: dict[int, LayerGeometry | str],
    data: Sequence[Tensor],
    collected: Collected,
    folder: Path,
    progress: bool,
) -> dict[int, Fitted]:
    """For each layer, the tensors that its keys and values are quantized with (`kvpass.codec.datatype`).

    They are a datatype ``[2, 2**bits]`` each, and ranges ``[H_kv, 2, D]`` of keys. Gradients of ``data`` are stored in
    ``folder``.
    """
    packed = [layer for layer in layers.values() if isinstance(layer, LayerGeometry)]
    gradients: list[Path] = []
    rope = ""
    if config.weighted:
        with bar("gradients", len(data), "sequence", progress) as seen:
            gradients = collect_gradients(model, data, [layer.index for layer in packed], folder, seen)
        if config.rope == "pre":
            before, after = collected.read(0, packed[0].index, 0), _read(gradients[0], "keys")
            rope = rope_between(before, after, *collected.tables(0, packed[0].index))
    fitted = {}
    with bar("datatypes", len(packed), "layer", progress) as done:
        for layer in packed:
            fitted[layer.index] = _fit_layer(config, layer, collected, gradients, rope)
            done.update()
    return fitted


def _fit_layer(
    config: CalibratedKVQuantConfig, layer: LayerGeometry, collected: Collected, gradients: list[Path], rope: str
) -> Fitted:
    """The tensors that keys and values of ``layer`` are quantized with (`kvpass.codec.datatype`)."""
    plan = config.plan(layer)

    def pages(x: Tensor, spec: CodecSpec) -> Tensor:
        tokens = layout(spec.retention).page_tokens(0, spec.retention.pages(x.shape[2]))
        return x.index_select(2, tokens).unflatten(2, (-1, spec.page_size))

    def weights(sequence: int, role: int, shape: torch.Size) -> Tensor:
        if not gradients:
            return torch.ones(shape)
        found = _read(gradients[sequence], f"{layer.index}.{role}")
        if role == 0 and rope:  # the chain rule: gradients rotate back
            cos, sin = collected.tables(sequence, layer.index)
            found = rotate(found, cos, -sin, rope)
        return found.square()

    out: list[list[Tensor]] = []
    for role, spec in enumerate((plan.key, plan.value)):
        read = [collected.read(i, layer.index, role) for i in range(len(collected))]
        dtype, ranges = params_dtype(layer.dtype), None
        if role == 0:
            ranges = _ranges(torch.cat([x[0, :, config.sinks :] for x in read], 1), config.share).to(dtype)

        def each(read=read, role=role, spec=spec, ranges=ranges) -> Iterator[tuple[Tensor, Tensor]]:
            for i, x in enumerate(read):
                own = pages(x, spec)
                units, _, _, _, positions = in_units(
                    own, spec, layer.dtype, None if ranges is None else ranges[:, None].float()
                )
                weight = pages(weights(i, role, x.shape), spec).flatten(-2)
                yield units.flatten(-2), weight.scatter(-1, places(positions), 0)

        datatype = fit_datatype(each, spec.bits, config.normalized)
        out.append([datatype.to(dtype), *(() if ranges is None else (ranges,))])
    return out[0], out[1]


def _ranges(keys: Tensor, share: float) -> Tensor:
    """Minimum and span of each channel of ``keys`` ``[H, T, D]``, ``[H, 2, D]``, ignoring the share ``share`` of its
    values, half at each end."""
    most = max(1, round((1 - share / 2) * keys.shape[1]))
    high, low = keys.kthvalue(most, 1).values, -(-keys).kthvalue(most, 1).values
    return torch.stack([low, high - low], 1)


def fit_datatype(each: Callable[[], Iterator[tuple[Tensor, Tensor]]], bits: int, normalized: bool) -> Tensor:
    """Points ``[2, 2**bits]`` float32 with the least weighted squared error: the points in units of the range, and the
    values they stand for. Those are the same, or ``normalized`` to the mean and deviation of the data (Q-Norm).

    each: makes a pass over values in [0, 1] and weights of the same shape; outliers have weight 0.
    """
    mass, total, count = torch.zeros(3, _BINS, dtype=torch.float64)
    for units, weight in each():
        of_bin, weight = (units * _BINS).long().clamp(max=_BINS - 1).flatten(), weight.double().flatten()
        mass += torch.bincount(of_bin, weight, _BINS)
        total += torch.bincount(of_bin, weight * units.flatten(), _BINS)
        count += torch.bincount(of_bin, (weight > 0).double(), _BINS)
    middle = (torch.arange(_BINS, dtype=torch.float64) + 0.5) / _BINS
    mean = torch.where(mass > 0, total / torch.where(mass > 0, mass, 1), middle)
    points = fit_points(mean, bits, mass / mass.sum(), _ITERATIONS)
    stand_for = points
    if normalized:
        coded = points[nearest(mean, points)]
        own, theirs = (_mean_and_deviation(x, count) for x in (mean, coded))
        stand_for = (points - theirs[0]) * (own[1] / theirs[1]) + own[0]
    return torch.stack([points, stand_for]).float()


def _mean_and_deviation(x: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    mean = (x * count).sum() / count.sum()
    return mean, ((x - mean).square() * count).sum().div(count.sum()).sqrt()

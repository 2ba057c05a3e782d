"""What a `Calibration` must be like, checked when it is made or loaded: its scheme, its model and its tensors fit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..codec.kept import calibrated_shapes
from ..codec.predictor import stored_shapes
from ..errors import KVPassError
from ..fields import check_integer, shown
from . import AquaKVConfig, CalibratedKVQuantConfig, LayerGeometry, QAQConfig, SchemeConfig

_DEPTH = 8  # of lists and dicts in `Calibration.facts`
_WEIGHTS = (torch.float16, torch.bfloat16)
_Shapes = list[tuple[bool, tuple[int, ...]]]


def check_calibration(
    scheme: SchemeConfig,
    predictors: dict[int, tuple[list[Tensor], list[Tensor]]],
    model: dict[str, Any],
    explained: dict[int, tuple[float, float]],
    facts: dict[str, Any],
) -> None:
    """Raise `KVPassError` unless these fields of a `Calibration` belong together: each layer of ``model`` has tensors
    of the shapes and dtypes that ``scheme`` stores, finite, and if it is predicted, shares of at most 1."""
    if not isinstance(scheme, SchemeConfig) or not scheme.takes_calibration:
        raise KVPassError(f"{shown(scheme)} is no scheme that is calibrated.")
    if isinstance(scheme, QAQConfig) and not isinstance(scheme.query_energy, tuple):
        raise KVPassError(f"query_energy={scheme.query_energy}: measured is a number for each layer.")
    if not isinstance(facts, dict) or not _is_plain(facts, _DEPTH):
        raise KVPassError(f"facts are plain data, not {shown(facts)}.")
    wanted = dict(_calibrated(scheme, _geometry(model)))
    predicted = set(wanted) if isinstance(scheme, AquaKVConfig) else set()
    for what, found, of in (("predictors", predictors, set(wanted)), ("explained", explained, predicted)):
        if not isinstance(found, dict) or set(found) != of:
            raise KVPassError(f"{what} are those of layers {sorted(of)}, not {shown(found)}.")
    for layer, shares in explained.items():
        if len(shares) != 2 or not all(type(share) is float and -math.inf < share <= 1 for share in shares):
            raise KVPassError(f"explained of layer {layer} are two shares of the variance, not {shown(shares)}.")
    for layer, both in predictors.items():
        for role, tensors, shapes in zip(("key", "value"), both, wanted[layer], strict=True):
            _check_tensors(f"What belongs to the {role}s of layer {layer}", tensors, shapes)


def _is_plain(value: Any, depth: int) -> bool:
    """Whether JSON holds ``value``, nested no deeper than ``depth``."""
    if isinstance(value, (dict, list, tuple)):
        inner = value.values() if isinstance(value, dict) else value
        return depth > 0 and all(_is_plain(one, depth - 1) for one in inner)
    return value is None or isinstance(value, (str, int, float))


def _geometry(model: dict[str, Any]) -> dict[int, tuple[int, int]]:
    """Layer -> heads and head_dim, of what `describe` says about a model."""
    if not isinstance(model, dict) or set(model) != {"class", "layers", "settings", "weights"}:
        raise KVPassError(f"model has class, layers, settings and weights, and not {shown(model)}.")
    if not isinstance(model["settings"], dict):
        raise KVPassError(f"Settings of the model are a dict, and not {shown(model['settings'])}.")
    layers = model["layers"]
    if not isinstance(layers, dict) or not all(isinstance(model[name], str) for name in ("class", "weights")):
        raise KVPassError(f"model has names and a dict of layers, and not {shown(model)}.")
    found = {}
    for name, size in layers.items():
        if not isinstance(size, (list, tuple)) or len(size) != 2 or not str(name).isdecimal():
            raise KVPassError(f"Layers of the model are a number with heads and head_dim, not {shown({name: size})}.")
        for what, number in zip(("heads", "head_dim"), size, strict=True):
            check_integer(what, number, 1)
        found[int(name)] = tuple(size)
    if not found or [str(index) for index in sorted(found)] != list(layers):
        raise KVPassError(f"Layers of the model are numbered from the first up, not {shown(list(layers))}.")
    return found


def _calibrated(
    scheme: SchemeConfig, geometry: dict[int, tuple[int, int]]
) -> Iterator[tuple[int, tuple[_Shapes, _Shapes]]]:
    """The layers that ``scheme`` has tensors for, and the shapes of those of their keys and of their values."""
    if not isinstance(scheme, (AquaKVConfig, CalibratedKVQuantConfig)):
        return
    previous_layer = None
    for index, (heads, head_dim) in geometry.items():
        layer = LayerGeometry(index, len(geometry), heads, head_dim, torch.float32, torch.device("cpu"), previous_layer)
        plan, width = scheme.plan(layer), heads * head_dim
        if plan.calibrated:
            of_keys, of_values = calibrated_shapes(plan.key, head_dim), calibrated_shapes(plan.value, head_dim)
            ranges = (heads, *of_keys["ranges"])
            yield index, ([(False, of_keys["datatype"]), (False, ranges)], [(False, of_values["datatype"])])
        elif isinstance(scheme, AquaKVConfig) and plan.looks_at_previous and previous_layer is not None:
            under = math.prod(geometry[previous_layer])
            key, value = (
                stored_shapes(transform.predictor, inputs, width, scheme.rank) if transform.predictor else []
                for transform, inputs in ((plan.key.transform, under), (plan.value.transform, under + width))
            )
            yield index, (key, value)
        previous_layer = index


def _check_tensors(what: str, tensors: list[Tensor], shapes: _Shapes) -> None:
    found = [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
    fits = len(found) == len(shapes) and all(
        shape == wanted and (dtype == torch.uint8 if codes else dtype in _WEIGHTS)
        for (dtype, shape), (codes, wanted) in zip(found, shapes, strict=True)
    )
    if not fits:
        wanted = [f"{'codes' if codes else 'weights'} {list(shape)}" for codes, shape in shapes]
        raise KVPassError(f"{what} is made of 16-bit weights and 8-bit codes: {wanted}, not {shown(found)}.")
    if not all(torch.isfinite(tensor).all() for tensor in tensors):
        raise KVPassError(f"{what} holds NaN or infinity.")

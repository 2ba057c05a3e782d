"""Check a `Calibration` when it is made or loaded: its scheme, its model and its tensors must fit together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..codec.layer_pages import share_of
from ..codec.predictor import stored_shapes
from ..codec.probes import QUERIES
from ..codec.rope import parse_rope
from ..codec.shares import Shares
from ..codec.spec import CodecSpec
from ..codec.tensors import calibrated_shapes, of_model
from ..codec.transform_coding import PAIRS, WIDEST
from ..errors import KVPassError
from ..fields import check_integer, shown
from . import (
    AquaKVConfig,
    CalibratedKVQuantConfig,
    CalibratedWaterfillConfig,
    LayerGeometry,
    QAQConfig,
    SchemeConfig,
)

_DEPTH = 8  # maximum nesting of lists and dicts in `Calibration.facts`
_WEIGHTS = "16-bit weights", (torch.float16, torch.bfloat16)
_CODES = "8-bit codes", (torch.uint8,)
_COUNTS = "32-bit counts", (torch.int32,)
_ANGLES = "32-bit angles", (torch.float32,)
_Kind = tuple[str, tuple[torch.dtype, ...]]
_Shapes = list[tuple[_Kind, tuple[int, ...]]]


def check_calibration(
    scheme: SchemeConfig,
    predictors: dict[int, tuple[list[Tensor], list[Tensor]]],
    model: dict[str, Any],
    explained: dict[int, tuple[float, float]],
    facts: dict[str, Any],
) -> None:
    """Raise `KVPassError` unless these fields of a `Calibration` belong together. Each layer of ``model`` needs finite
    tensors of the shapes and dtypes that ``scheme`` stores, and a predicted layer needs explained shares of at most
    1."""
    if not isinstance(scheme, SchemeConfig) or not scheme.takes_calibration:
        raise KVPassError(f"{shown(scheme)} is not a calibrated scheme.")
    if isinstance(scheme, QAQConfig) and not isinstance(scheme.query_energy, tuple):
        raise KVPassError(f"query_energy={scheme.query_energy}: expected one measured number per layer.")
    if not isinstance(facts, dict) or not _is_plain(facts, _DEPTH):
        raise KVPassError(f"facts must be plain data, not {shown(facts)}.")
    geometry = _geometry(model)
    if isinstance(scheme, CalibratedWaterfillConfig):
        _check_ropes(scheme.ropes, geometry)
    wanted = dict(_calibrated(scheme, geometry))
    predicted = set(wanted) if isinstance(scheme, AquaKVConfig) else set()
    for what, found, of in (("predictors", predictors, set(wanted)), ("explained", explained, predicted)):
        if not isinstance(found, dict) or set(found) != of:
            raise KVPassError(f"{what} must cover layers {sorted(of)}, not {shown(found)}.")
    for layer, shares in explained.items():
        if len(shares) != 2 or not all(type(share) is float and -math.inf < share <= 1 for share in shares):
            raise KVPassError(f"explained[{layer}] must be two fractions of the variance, not {shown(shares)}.")
    for layer, both in predictors.items():
        for role, tensors, shapes in zip(("key", "value"), both, wanted[layer], strict=True):
            _check_tensors(f"The {role} tensors of layer {layer}", tensors, shapes)
        if isinstance(scheme, CalibratedWaterfillConfig):
            _check_shares(layer, both, scheme, geometry[layer][1])


def _is_plain(value: Any, depth: int) -> bool:
    """Whether JSON can hold ``value``, nested no deeper than ``depth``."""
    if isinstance(value, (dict, list, tuple)):
        inner = value.values() if isinstance(value, dict) else value
        return depth > 0 and all(_is_plain(one, depth - 1) for one in inner)
    return value is None or isinstance(value, (str, int, float))


def _geometry(model: dict[str, Any]) -> dict[int, tuple[int, int]]:
    """Layer -> heads and head_dim, from the output of `describe`."""
    if not isinstance(model, dict) or set(model) != {"class", "layers", "settings", "weights"}:
        raise KVPassError(f"model must have class, layers, settings and weights, not {shown(model)}.")
    if not isinstance(model["settings"], dict):
        raise KVPassError(f"model['settings'] must be a dict, not {shown(model['settings'])}.")
    layers = model["layers"]
    if not isinstance(layers, dict) or not all(isinstance(model[name], str) for name in ("class", "weights")):
        raise KVPassError(f"model must have names and a dict of layers, not {shown(model)}.")
    found = {}
    for name, size in layers.items():
        if not isinstance(size, (list, tuple)) or len(size) != 2 or not str(name).isdecimal():
            raise KVPassError(f"model['layers'] must map each index to [heads, head_dim], not {shown({name: size})}.")
        for what, number in zip(("heads", "head_dim"), size, strict=True):
            check_integer(what, number, 1)
        found[int(name)] = tuple(size)
    if not found or [str(index) for index in sorted(found)] != list(layers):
        raise KVPassError(f"model['layers'] must list the layer indices in ascending order, not {shown(list(layers))}.")
    return found


def _calibrated(
    scheme: SchemeConfig, geometry: dict[int, tuple[int, int]]
) -> Iterator[tuple[int, tuple[_Shapes, _Shapes]]]:
    """The layers that ``scheme`` has tensors for, with the shapes for their keys and for their values."""
    if not isinstance(scheme, (AquaKVConfig, CalibratedKVQuantConfig, CalibratedWaterfillConfig)):
        return
    previous_layer = None
    for index, (heads, head_dim) in geometry.items():
        layer = LayerGeometry(index, len(geometry), heads, head_dim, torch.float32, torch.device("cpu"), previous_layer)
        plan, width = scheme.plan(layer), heads * head_dim
        if plan.calibrated:
            of_keys, of_values = calibrated_shapes(plan.key, head_dim), calibrated_shapes(plan.value, head_dim)
            ranges = (heads, *of_keys["ranges"])
            keys: _Shapes = [(_WEIGHTS, of_keys["datatype"]), (_WEIGHTS, ranges)]
            yield index, (keys, [(_WEIGHTS, of_values["datatype"])])
        elif plan.shares_out:
            yield index, (_shared(plan.key, heads, head_dim), _shared(plan.value, heads, head_dim))
        elif isinstance(scheme, AquaKVConfig) and plan.looks_at_previous and previous_layer is not None:
            under = plan.layers_below * math.prod(geometry[previous_layer])
            key, value = (
                _stored(transform.predictor, inputs, width, scheme.rank) if transform.predictor else []
                for transform, inputs in ((plan.key.transform, under), (plan.value.transform, under + width))
            )
            yield index, (key, value)
        previous_layer = index


def _stored(predictor: str, inputs: int, width: int, rank: int | None) -> _Shapes:
    shapes = stored_shapes(predictor, inputs, width, rank)
    return [(_CODES if codes else _WEIGHTS, shape) for codes, shape in shapes]


def _shared(spec: CodecSpec, heads: int, head_dim: int) -> _Shapes:
    """Shapes of the tensors that all caches of a model share for keys, or values, stored by ``spec``."""
    shares = Shares.of(spec)
    shapes: dict[str, tuple[_Kind, tuple[int, ...]]] = {
        "share": (_COUNTS, (shares.ranks, 3, heads + 1)),
        "center": (_WEIGHTS, (1, heads, 1, head_dim)),
        "metric": (_WEIGHTS, (1, heads, head_dim, shares.block_size)),
        "basis": (_WEIGHTS, (1, heads, head_dim, shares.block_size)),
        "widths": (_CODES, (1, heads, shares.ranks, head_dim)),
        "steps": (_WEIGHTS, (1, heads, shares.ranks, head_dim)),
        "queries": (_WEIGHTS, (1, heads, QUERIES, head_dim)),
    }
    rope = spec.transform.numbered
    angles = [(_ANGLES, (parse_rope(rope)[0],))] if rope else []
    return angles + [shapes[name] for name in of_model(spec)]


def _check_ropes(ropes: tuple[str, ...], geometry: dict[int, tuple[int, int]]) -> None:
    """Raise `KVPassError` unless ``ropes`` has a valid rotation of keys, or none, for each layer."""
    if len(ropes) != max(geometry) + 1:
        raise KVPassError(
            f"ropes must describe the rotary embedding of {max(geometry) + 1} layers, not {shown(ropes)}."
        )
    for index, (_, head_dim) in geometry.items():
        try:
            fits = not ropes[index] or 0 < 2 * parse_rope(ropes[index])[0] <= head_dim
        except (ValueError, KeyError):
            fits = False
        if not fits:
            raise KVPassError(f"ropes[{index}] must be like 'half-32', not {shown(ropes[index])}.")


def _check_shares(
    layer: int, both: tuple[list[Tensor], list[Tensor]], scheme: CalibratedWaterfillConfig, head_dim: int
) -> None:
    """Raise `KVPassError` unless each head of ``layer`` has as many bits as its bit widths add up to, a number of bits
    that can be packed, and step sizes above 0."""
    angles, plan = bool(scheme.ropes[layer]), scheme._plan(head_dim, head_dim, scheme.ropes[layer])
    for spec, tensors in zip((plan.key, plan.value), (both[0][angles:], both[1]), strict=True):
        named = dict(zip(of_model(spec), tensors, strict=True))
        if "steps" in named and not (named["steps"] > 0).all():
            raise KVPassError(f"Step sizes of layer {layer} are not above 0.")
        share, widths = named["share"], named.get("widths")
        counts, most = share.diff(dim=-1), torch.tensor([PAIRS * head_dim, head_dim, 1]).view(1, 3, 1)
        fits = not share[..., 0].any() and bool(((counts >= 0) & (counts <= most)).all())
        if widths is not None:
            fits = fits and int(widths.max()) <= WIDEST and torch.equal(share_of(widths[0]), share)
        else:
            fits = fits and torch.equal(counts[:, 2], counts[:, :2].sum(1).clamp(max=1).to(counts.dtype))
        if not fits:
            raise KVPassError(f"The bit shares of the heads of layer {layer} do not match their bit widths.")


def _check_tensors(what: str, tensors: list[Tensor], shapes: _Shapes) -> None:
    found = [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
    fits = len(found) == len(shapes) and all(
        shape == wanted and dtype in dtypes for (dtype, shape), ((_, dtypes), wanted) in zip(found, shapes, strict=True)
    )
    if not fits:
        wanted = [f"{kind} {list(shape)}" for (kind, _), shape in shapes]
        raise KVPassError(f"{what} must be {', '.join(wanted)}, not {shown(found)}.")
    if not all(torch.isfinite(tensor).all() for tensor in tensors):
        raise KVPassError(f"{what} hold NaN or infinity.")

"""Identify the model that a file belongs to: by its weights, and by settings that `state_dict` lacks."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from ..accelerate_hooks import weights_of
from ..errors import KVPassError
from ..fields import shown

_SAMPLES = 64  # values per weight that enter the fingerprint
_VARIES = {
    "cache", "caches", "cached", "call", "calls", "checkpoint", "checkpointing", "count", "counter", "device",
    "devices", "implementation", "initialized", "kernel", "loss", "name", "offload", "path", "seen", "step", "steps",
    "tied", "version",
}  # fmt: skip
"""Words in the names of attributes that may differ between runs without changing what the model computes."""
_SHOWN = 3  # differences listed in a message


def fingerprint(model: nn.Module) -> str:
    """A digest of the names, shapes and some values of the weights. It is the same for any dtype that represents the
    values, and in each of the processes that shard them."""
    return fingerprint_of(weights_of(model))


def fingerprint_of(weights: Iterable[tuple[str, Tensor]]) -> str:
    """`fingerprint` of a model's ``weights`` by name."""
    digest = hashlib.sha256()
    for name, weight in sorted(weights, key=itemgetter(0)):
        digest.update(f"{name}{tuple(weight.shape)}".encode())
        if weight.is_floating_point() and weight.numel():
            flat = _whole(weight.detach()).reshape(-1)
            sample = flat[:: max(1, len(flat) // _SAMPLES)][:_SAMPLES].to("cpu", torch.bfloat16).contiguous()
            digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _whole(weight: Tensor) -> Tensor:
    """The full ``weight``, gathered from all processes that shard it; all of them must call this."""
    return weight.full_tensor() if hasattr(weight, "full_tensor") else weight


def settings(model: nn.Module) -> dict[str, Any]:
    """What besides its weights decides what a transformers ``model`` computes, as JSON.

    Numbers, names, switches, and lists and dicts of them, of its config and of all its modules: active adapters and
    their scaling, RoPE scaling, windows. A name with a ``*`` stands for all layers: its value is their common value, or
    a list. Left out are `training`, what all configs and models have (versions, labels, generation, dtype), attributes
    whose names say that they vary between runs (`_VARIES`), tensors, hooks and other objects. Decoders from outside
    transformers have no settings, because their attributes may be anything.
    """
    if not isinstance(model, PreTrainedModel):
        return {}
    found: dict[str, list[Any]] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if _matters(name) and (plain := _plain(value)) is not _OTHER:
                found.setdefault(re.sub(r"\b\d+\b", "*", f"{path}.{name}".lstrip(".")), []).append(plain)
    common = {key: all(value == values[0] for value in values) for key, values in found.items()}
    of_modules = {key: values[0] if common[key] else values for key, values in found.items()}
    as_read: dict[str, Any] = json.loads(json.dumps(of_modules))
    return settings_of_config(model.config) | as_read


def settings_of_config(config: PreTrainedConfig) -> dict[str, Any]:
    """The part of `settings` that a model's ``config`` has."""
    found: dict[str, Any] = json.loads(
        json.dumps({f"config.{name}": value for name, value in _fields(config.to_dict())})
    )
    return found


def check_settings(theirs: Mapping[str, Any], ours: Mapping[str, Any], what: str) -> None:
    """Raise `KVPassError` that lists the differences between two `settings`; ``what`` names the thing made under
    ``theirs``."""
    missing = "not there"
    differ = [name for name in sorted({*theirs, *ours}) if theirs.get(name, missing) != ours.get(name, missing)]
    if not differ:
        return
    each = [
        f"{name} was {shown(theirs.get(name, missing))}, but is {shown(ours.get(name, missing))} here"
        for name in differ[:_SHOWN]
    ]
    more = f"; and {len(differ) - _SHOWN} others" if len(differ) > _SHOWN else ""
    raise KVPassError(
        f"{what} another configuration of this model: {'; '.join(each)}{more}. Restore that adapter or setting."
    )


_OTHER = object()
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_OF_EVERY_CONFIG = frozenset(PreTrainedConfig().to_dict()) | frozenset(GenerationConfig().to_dict())  # type: ignore[no-untyped-call]


def _matters(name: str) -> bool:
    if name in _OF_EVERY_MODULE or hasattr(PreTrainedModel, name):
        return False
    return not _VARIES & set(name.lower().split("_"))


def _plain(value: Any) -> Any:
    """``value`` as JSON, or `_OTHER`."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return repr(value)  # JSON has no NaN or infinity
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [_plain(item) for item in value]
        items = sorted(items, key=repr) if isinstance(value, (set, frozenset)) else items
        return _OTHER if any(item is _OTHER for item in items) else items
    if type(value) is dict:
        fields = {str(name): _plain(item) for name, item in value.items()}
        return _OTHER if any(field is _OTHER for field in fields.values()) else fields
    return _OTHER


def _fields(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Fields of a config and of nested configs, without those that every config has."""
    for name, value in ((str(name), value) for name, value in config.items()):
        if name in _OF_EVERY_CONFIG or name == "quantization_config" or not _matters(name):
            continue
        if isinstance(value, dict):
            yield from _fields(value, f"{prefix}{name}.")
        elif (plain := _plain(value)) is not _OTHER:
            yield f"{prefix}{name}", plain

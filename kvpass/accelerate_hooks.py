"""Models that accelerate spreads over devices, the host and disk: its hooks run around modules, and load weights.

Only this file reads accelerate's hooks; see ``tests/test_private_apis.py``.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .errors import KVPassError


def device_of(model: nn.Module) -> torch.device:
    """The device of the inputs of ``model``: that of its first weight, or the one that accelerate loads it to."""
    weight = next(model.parameters())
    if not weight.is_meta:
        return weight.device
    return next(torch.device(hook.execution_device) for _, hook in _hooks(model))


def weights_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The state dict of ``model``, by name. Weights that are offloaded are loaded one at a time."""
    loaders = _loaders(model)
    for name, weight in model.state_dict().items():
        yield name, loaders[name]() if weight.is_meta else weight


def is_offloaded(model: nn.Module) -> bool:
    """Whether accelerate loads some weights of ``model`` whenever their module runs."""
    return any(weight.is_meta for weight in model.parameters())


def reloading(model: nn.Module) -> Callable[[Tensor], Callable[[], Tensor] | None]:
    """A function that finds out whether a tensor is an offloaded weight of ``model`` that is loaded now, or a view of
    it, and then returns what loads that tensor again."""
    hooked = [(model.get_submodule(path), hook.weights_map) for path, hook in _hooks(model)]

    def find(x: Tensor) -> Callable[[], Tensor] | None:
        for module, weights in hooked:
            for name, weight in module.named_parameters():
                if weight.is_meta:
                    break
                if weight.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
                    layout = x.shape, x.stride(), x.storage_offset()
                    return partial(_load_view, partial(weights.__getitem__, name), x.device, x.dtype, *layout)
        return None

    return find


def refuse_missing_weights(model: nn.Module) -> None:
    """Raise `KVPassError` if there are weights without values that accelerate will not load."""
    absent = {name for name, weight in model.named_parameters() if weight.is_meta}
    if missing := sorted(absent - _loaders(model).keys()):
        raise KVPassError(
            f"{len(missing)} weights of {type(model).__name__} have no values ({missing[0]}, ... are on the meta "
            "device): load them first."
        )


def refuse_hooked(model: nn.Module, what: str, instead: str) -> None:
    """Raise `KVPassError` if accelerate runs Python hooks around the layers of ``model``, with the reason ``what`` and
    the advice ``instead``."""
    hooked = [name for name, module in model.named_modules() if name and hasattr(module, "_hf_hook")]
    if hooked:
        raise KVPassError(
            f"accelerate put hooks on {len(hooked)} modules ({hooked[0]}, ...), and {what}: {instead}, or load the "
            "model on one device. If it already is there, call accelerate.hooks.remove_hook_from_module(model, "
            "recurse=True)."
        )


def _load_view(load: Callable[[], Tensor], device: torch.device, dtype: torch.dtype, *layout: Any) -> Tensor:
    return load().to(device, dtype).as_strided(*layout)


def _loaders(model: nn.Module) -> dict[str, Callable[[], Tensor]]:
    """For each offloaded weight, by name, what loads it."""
    found: dict[str, Callable[[], Tensor]] = {}
    for path, hook in _hooks(model):
        module = model.get_submodule(path)
        for name in (*dict(module.named_parameters()), *dict(module.named_buffers())):
            found[f"{path}.{name}".lstrip(".")] = partial(hook.weights_map.__getitem__, name)
    return found


def _hooks(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The hooks that load weights, each with the path of its module."""
    for path, module in model.named_modules():
        outer = getattr(module, "_hf_hook", None)
        for hook in getattr(outer, "hooks", [outer]):
            if getattr(hook, "weights_map", None) is not None:
                yield path, hook

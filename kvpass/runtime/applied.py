"""Look up the runtime that `kvpass.apply` installed in a model."""

from typing import Any

from torch import nn

from ..errors import KVPassError
from .runtime import Runtime

ATTRIBUTE = "_kvpass"
"""The attribute in which a model stores its runtime."""


def decoder(model: nn.Module) -> nn.Module:
    """The model inside a wrapper of peft or ``torch.compile``. Its forward is the one that receives the cache."""
    inner: Any = model
    while True:
        if hasattr(inner, "_orig_mod"):
            inner = inner._orig_mod
        elif hasattr(inner, "get_base_model"):
            inner = inner.get_base_model()
        else:
            return inner


def is_applied(model: nn.Module) -> bool:
    """Whether kvpass is currently applied to ``model``: `kvpass.apply` was called, and `kvpass.remove` not since."""
    return isinstance(model, nn.Module) and hasattr(decoder(model), ATTRIBUTE)


def runtime_of(model: nn.Module) -> Runtime:
    """The runtime that `kvpass.apply` installed in ``model``. Raises `KVPassError` if there is none."""
    runtime = getattr(decoder(model), ATTRIBUTE, None)
    if runtime is None:
        raise KVPassError("kvpass is not applied to this model: call kvpass.apply(model, scheme=...) first.")
    return runtime

"""What users call."""

import functools
from typing import Any

import torch
from torch import nn

from kvpass.lowering import table

from . import schemes
from .calibration.artifact import Calibration
from .errors import KVPassError
from .graph.report import Report
from .runtime import Runtime, probe
from .schemes import SchemeConfig

_ATTRIBUTE = "_kvpass"


def apply(
    model: nn.Module,
    scheme: str | dict[str, Any] | SchemeConfig | Calibration = "squat",
    *,
    strict: bool = False,
    lowering: str = "auto",
    max_cache_len: int | None = None,
) -> nn.Module:
    """Pack the KV cache of ``model`` with ``scheme``, in place; returns the model. User code stays as it is.

    From then on every fresh ``DynamicCache`` or ``StaticCache`` that reaches ``model.forward`` (from ``generate`` or
    from you) holds packed codes in its full-attention layers. Other layers stay in full precision and are reported by
    `explain`. Inference only: gradients are not tracked, and a model in training mode is left alone.

    Args:
        scheme: a name (`kvpass.schemes.available`), a dict ``{"scheme": "kivi", "bits": 4}``, a config, or what
            `kvpass.calibrate` or `kvpass.load` returned.
        strict: raise `NotFusedError` at the first decode step if a layer's attention was not fused.
        lowering: "auto", the name of one implementation ("reference", "inductor", "triton"), or "eager" for no
            compilation at all: correct, slower, the oracle of the compiled path.
        max_cache_len: allocate this many tokens at once instead of growing. A longer sequence raises.

    Raises:
        KVPassError: unknown scheme, a group that does not divide the head, a model with no attention to pack, a model
            that has been applied to already, a scheme that needs calibration and has none, a calibration of another
            model. The model is untouched then.
    """
    if is_applied(model):
        raise KVPassError("kvpass is already applied to this model: call kvpass.remove(model) first.")
    if not isinstance(model, nn.Module):
        raise KVPassError(f"model must be a torch.nn.Module, not {type(model).__name__}.")
    known = ["auto", "eager", *table.names()]
    if lowering not in known:
        raise KVPassError(f"lowering={lowering!r}; use one of {', '.join(known)}.")
    if max_cache_len is not None and max_cache_len < 1:
        raise KVPassError(f"max_cache_len={max_cache_len} must be positive.")
    calibrated = isinstance(scheme, Calibration)
    config, layers = scheme.scheme if calibrated else schemes.get(scheme), probe(model)
    if calibrated:
        scheme.check(model, layers)
    elif config.needs_calibration:
        raise KVPassError(
            f"{config.name!r} predicts layers from each other, and has to be calibrated on the model first: "
            f"calibration = kvpass.calibrate(model, ids, {config.name!r}), then kvpass.apply(model, calibration)."
        )
    runtime = Runtime(
        model,
        config,
        layers,
        strict=strict,
        lowering=lowering,
        max_cache_len=max_cache_len,
        predictors=scheme.predictors if calibrated else {},
    )
    if calibrated:
        runtime.report.calibration, runtime.report.calibration_nbytes = str(scheme), scheme.nbytes

    @torch.compiler.disable  # inside a user's torch.compile: a graph break, and kvpass's own graph behind it
    @functools.wraps(runtime.original)
    def forward(*args, **kwargs):
        return runtime.forward(*args, **kwargs)

    model.forward = forward
    setattr(model, _ATTRIBUTE, runtime)
    return model


def is_applied(model: nn.Module) -> bool:
    """Whether `apply` has been called on ``model`` and `remove` not since."""
    return hasattr(model, _ATTRIBUTE)


def _runtime(model: nn.Module) -> Runtime:
    runtime = getattr(model, _ATTRIBUTE, None)
    if runtime is None:
        raise KVPassError("kvpass is not applied to this model: call kvpass.apply(model, scheme=...) first.")
    return runtime


def remove(model: nn.Module) -> nn.Module:
    """Undo `apply` exactly; returns the model. Caches packed meanwhile cannot be used any more."""
    runtime = _runtime(model)
    if runtime.had_own_forward:
        model.forward = runtime.original
    else:
        del model.forward
    delattr(model, _ATTRIBUTE)
    return model


def explain(model: nn.Module) -> Report:
    """What became of each layer: packed, fused, or why not; bytes now and in full precision. Print it."""
    return _runtime(model).report

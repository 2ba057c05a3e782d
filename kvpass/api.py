"""The public functions: `apply`, `remove`, `explain`."""

import functools
import logging
from collections.abc import Callable
from threading import Lock
from typing import Any

import torch
from torch import nn

from kvpass.lowering import table
from kvpass.lowering.session import uncompiled, uncounted

from . import schemes
from .accelerate_hooks import refuse_hooked
from .compile.backend import check_mode
from .compile.report import Report
from .errors import KVPassError, NeedsGraphError
from .fields import check_integer, shown
from .models.attention import PortableAttention
from .models.discover import BufferedCache, bind, discover
from .models.parallel import refuse_sharded
from .models.probe import AttentionSeen, calibrated_layers, probe
from .runtime.applied import ATTRIBUTE, decoder, is_applied, runtime_of
from .runtime.custom import BufferRuntime, HandedRuntime
from .runtime.long_prompts import check_chunk_size
from .runtime.runtime import Runtime
from .runtime.simulated import SimulatedRuntime, scout
from .runtime.transformers import TransformersRuntime
from .schemes import LayerGeometry, SchemeConfig
from .schemes.calibrated import Calibration

logger = logging.getLogger("kvpass")

DEFAULT = "waterfill"
_one_at_a_time = Lock()
_COMPILES = "kvpass compiles the decode steps of this model itself: call it without fullgraph=True"


def apply(
    model: nn.Module,
    scheme: str | dict[str, Any] | SchemeConfig | Calibration | None = None,
    *,
    strict: bool = False,
    lowering: str = "auto",
    max_cache_len: int | None = None,
    mode: str | None = None,
    prefill_chunk_size: int | str | None = None,
    example_inputs: tuple[Any, ...] | dict[str, Any] | None = None,
) -> nn.Module:
    """Quantize the KV cache of ``model`` with ``scheme``, in place; returns the model. User code does not change.

    Afterwards every fresh ``DynamicCache`` or ``StaticCache`` that reaches ``model.forward`` (from ``generate`` or from
    you) stores quantized keys and values in its full-attention layers. Other layers stay in full precision; `explain`
    reports them. Inference only: gradients are not tracked, and a model in training mode runs unchanged. While modules
    of the model have forward hooks, steps are not compiled; `explain` reports that, too.

    For a decoder from outside transformers pass ``example_inputs``: the arguments of a first call with at least 2
    tokens. Its modules may hold keys and values in tensors ``[B, H_kv, T, D]`` or ``[B, T, H_kv, D]`` and write them at
    a position that is an argument, or the model may take a cache and return the next one. Its code does not change:
    position 0 starts a new text, and an earlier position rolls back. `remove` restores the tensors. For a model without
    any cache, kvpass simulates one: attention is computed as over a packed cache, as if each token had its own decode
    step.

    Args:
        model: a transformers decoder or encoder-decoder, or a wrapper of peft or ``torch.compile`` around one.
        scheme: a name (`kvpass.schemes.available`), a dict ``{"scheme": "kivi", "bits": 4}``, a config, or what
            `kvpass.calibrate` or `kvpass.load` returned. The default, "waterfill", captures prompts as graphs. If the
            first prompt of a model cannot be captured, kvpass switches to a scheme that works and logs a warning;
            `explain` reports the switch.
        strict: raise `NotFusedError` at the first decode step if a layer's attention was not fused.
        lowering: "auto", the name of one implementation ("reference", "inductor", "triton"), or "eager" for no
            compilation at all: correct, but slower; compiled paths are tested against it.
        max_cache_len: allocate this many tokens up front instead of growing. A longer sequence raises.
        mode: "reduce-overhead" skips Dynamo's per-step guard checks in repeated decode steps. On CUDA a step is
            captured as one CUDA graph and replayed (for decoders with their own cache, the parts between cache ops);
            this has not been verified on a device yet. On a CPU the compiled step is called directly. kvpass detects
            changes of the model: weights, modules, adapters, attributes and config fields. Other state, such as
            globals that functions read, is only checked at the next prompt or turn. `explain` says whether steps are
            replayed, or why not.
        prefill_chunk_size: read a prompt that comes in one call in chunks of at most this many tokens (64 or more), so
            that less of it is in full precision at once. Within a chunk, attention reads exact keys and values; it
            reads earlier chunks as they are stored. "auto" reads prompts of more than 4,096 tokens in chunks of 512
            on CPUs, unless the scheme is fitted to the whole prompt. None reads prompts whole. A prompt is also read
            whole if a short one, read both ways, does not show that the model allows chunks; `explain` says why.
        example_inputs: arguments of ``model.forward``, by position or by name, for decoders with their own cache.

    Raises:
        KVPassError: the scheme is unknown, needs a calibration, or comes with the calibration of another model; a
            group_size does not divide head_dim; the model has no attention to pack or is already packed; its weights
            have no values; it has hooks of accelerate or weights sharded across processes, which cannot be captured;
            the ``KVPASS_TRACE`` folder (see `explain`) is not writable. The model is then unchanged.
    """
    options: dict[str, Any] = dict(
        strict=strict, lowering=lowering, max_cache_len=max_cache_len, mode=mode,
        prefill_chunk_size=prefill_chunk_size, example_inputs=example_inputs,
    )  # fmt: skip
    if scheme is not None:
        return _apply(model, scheme, **options)

    def give_way(model: nn.Module, error: NeedsGraphError) -> None:
        _apply(model, error.instead, **options)
        runtime_of(model).report.instead_of = str(error)
        logger.warning("%s: the default scheme does not work: %s", type(model).__name__, error)

    try:
        return _apply(model, DEFAULT, **options, give_way=give_way)
    except NeedsGraphError as error:
        give_way(decoder(model), error)
    return model


def _apply(
    model: nn.Module,
    scheme: Any,
    *,
    strict: bool,
    lowering: str,
    max_cache_len: int | None,
    mode: str | None,
    prefill_chunk_size: int | str | None,
    example_inputs: tuple[Any, ...] | dict[str, Any] | None,
    give_way: Callable[[nn.Module, NeedsGraphError], None] | None = None,
) -> nn.Module:
    """`apply` with one ``scheme``. give_way: applies another scheme if the model's first prompt shows that this one
    does not work."""
    if is_applied(model):
        raise KVPassError("kvpass is already applied to this model: call kvpass.remove(model) first.")
    if not isinstance(model, nn.Module):
        raise KVPassError(f"model must be a torch.nn.Module, not {type(model).__name__}.")
    whole, model = model, decoder(model)
    known = ["auto", "eager", *table.names()]
    if lowering not in known:
        raise KVPassError(f"lowering={lowering!r}; use one of {', '.join(known)}.")
    check_mode(mode)
    check_chunk_size(prefill_chunk_size)
    if max_cache_len is not None:
        check_integer("max_cache_len", max_cache_len, 1)
    if lowering != "eager":
        eager = "use lowering='eager' and a scheme that needs no graph, such as 'kivi'"
        refuse_hooked(model, "hooks cause graph breaks in the decode step", eager)
        refuse_sharded(model, "kvpass does not compile their collectives", "use lowering='eager'")
    calibration = scheme if isinstance(scheme, Calibration) else None
    config = scheme.scheme if isinstance(scheme, Calibration) else schemes.get(scheme)
    attention = AttentionSeen()
    with PortableAttention(model):
        kind, layers = _look_into(model, example_inputs, attention)
    if config.needs_calibration or calibration is not None:
        layers = calibrated_layers(config, layers)
    if calibration is not None:
        calibration.check(model, layers)
    elif config.needs_calibration:
        raise KVPassError(
            f"{config.name!r} must be calibrated on the model first: calibration = kvpass.calibrate(model, tokenizer, "
            f"{config.name!r}), then kvpass.apply(model, calibration)."
        )
    predictors = {} if calibration is None else calibration.predictors
    options: dict[str, Any] = dict(
        strict=strict, lowering=lowering, max_cache_len=max_cache_len, mode=mode, predictors=predictors
    )
    if kind is TransformersRuntime:
        options["prefill_chunk_size"] = prefill_chunk_size
    elif prefill_chunk_size is not None:
        raise KVPassError("prefill_chunk_size is for transformers models: call this decoder with chunks of the prompt.")
    runtime = kind(model, config, layers, **options)
    runtime.attended = attention.seen
    looks = f"{config.name!r} needs the whole forward captured as one graph", "use 'kivi'"
    if runtime.captures:
        refuse_sharded(model, *looks)
    if runtime.needs_rotation or runtime.needs_importance:  # queries are also found in partial graphs
        refuse_hooked(model, *looks)
    runtime.install()
    if calibration is not None:
        runtime.report.calibration, runtime.report.calibration_nbytes = str(calibration), calibration.nbytes

    @torch.compiler.disable(reason=_COMPILES)  # in a user's own compiled function: a graph break, then our graph
    def run(*args: Any, **kwargs: Any) -> Any:
        with uncounted():
            try:
                return runtime.forward(*args, **kwargs)
            except NeedsGraphError as error:
                if give_way is None or runtime.report.tokens:
                    raise
                model = runtime.model()
                with _one_at_a_time:
                    if runtime_of(model) is runtime:  # otherwise another thread has already switched
                        _removed(model, error)
                        give_way(model, error)
            return model.forward(*args, **kwargs)

    @functools.wraps(runtime.original, updated=())
    def forward(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    uncompiled(forward)  # also if the user calls torch.compile on it
    setattr(model, ATTRIBUTE, runtime)
    model.forward = runtime.installed = forward
    return whole


def _removed(model: nn.Module, refusal: KVPassError) -> None:
    """`remove`, before applying another scheme. Raises ``refusal`` if ``model.forward`` has been replaced since."""
    try:
        remove(model)
    except KVPassError:
        raise refusal from None


def _look_into(
    model: nn.Module, example_inputs: tuple[Any, ...] | dict[str, Any] | None, attention: AttentionSeen
) -> tuple[Callable[..., Runtime], dict[int, LayerGeometry | str]]:
    """The runtime for the way ``model`` keeps its cache, and the geometry of its layers. ``attention`` records the
    attention calls of a transformers model meanwhile."""
    if example_inputs is None:
        with attention:
            return TransformersRuntime, probe(model)
    arguments = bind(model, example_inputs)
    found = discover(model, arguments)
    if found is None:
        return SimulatedRuntime, scout(model, arguments)
    kind = BufferRuntime if isinstance(found, BufferedCache) else HandedRuntime
    return functools.partial(kind, found=found), found.geometry()


def remove(model: nn.Module) -> nn.Module:
    """Undo `apply` exactly; returns the model. Caches that were packed in between become unusable.

    Raises `KVPassError` if ``model.forward`` was replaced after `apply`: that replacement would be lost.
    """
    runtime, whole, model = runtime_of(model), model, decoder(model)
    before = runtime.original if runtime.had_own_forward else None
    if vars(model).get("forward") not in (runtime.installed, before):
        raise KVPassError(
            f"{type(model).__name__}.forward was replaced after kvpass.apply, by {shown(model.forward)}. Restore the "
            "forward that kvpass.apply set, then call kvpass.remove(model)."
        )
    runtime.uninstall()
    if runtime.had_own_forward:
        model.forward = runtime.original
    else:
        vars(model).pop("forward", None)
    delattr(model, ATTRIBUTE)
    return whole


def explain(model: nn.Module, *, graphs: bool = False) -> Report:
    """A printable report on each layer: packed and fused, or why not, with its bytes now and in full precision.

    graphs: record every compilation stage of graphs captured from now on. The report prints their sizes and times;
        ``report.graphs[i].stages`` has the name, text, diff, node count by op and time in seconds of each. Ask right
        after `apply`: each graph is captured once, by the first call of its form, and stages are not recorded
        otherwise. For 30 layers, texts and diffs take 3.5 MB of memory for as long as the report exists.

    If ``KVPASS_TRACE=folder`` is set in the environment at `apply`, the stages are written there instead, including
    those of graphs that the pass gave up on: one folder per graph, with ``1-captured.txt`` to ``5-lowered.txt``, diffs
    and ``summary.txt``.
    """
    runtime = runtime_of(model)
    if graphs:
        runtime.keep_stages()
    return runtime.report

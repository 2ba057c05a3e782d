"""`Runtime`: the common part of every forward over a packed cache, however the model keeps its cache."""

import itertools
import logging
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..cache.cache_state import CacheState
from ..cache.cross import cross_plan
from ..cache.layer import PackedLayer
from ..cache.sliding import plans_of
from ..cache.state import ModelTensors, SharedTensors
from ..cache.swap import Plans, state_of
from ..codec.affine import params_dtype
from ..compile.backend import Backend
from ..compile.capture import why_uncaptured
from ..compile.recorded_calls import counted
from ..compile.report import GraphReport, LayerReport, Report
from ..compile.subclasses import guards_of
from ..errors import KVPassError, NeedsGraphError, NotCapturedError, NotFusedError
from ..lowering.inductor.first_kernel import AttentionShape, compile_ahead
from ..lowering.table import AUTO, EAGER, FEW
from ..models.attention import PortableAttention
from ..models.encoded import has_encoder
from ..models.unpacked import StoresNoText
from ..schemes import LayerGeometry, SchemeConfig, check_edges, check_sources, get, named
from .forms import Forms
from .forward import check_all_updated, finish_forward
from .steps.model_changes import Hooks
from .steps.recall import Recalls
from .steps.replay import Replays

logger = logging.getLogger("kvpass")

_MIN_COMPILED_LENGTH = 2  # the tracer would specialize on lengths 0 and 1

_WITHOUT_STRICT = "Without strict=True kvpass dequantizes them before attention: correct, but slower."
_WEIGHTS = torch.float16, torch.bfloat16

_BY_OWNER: weakref.WeakValueDictionary[str, "Runtime"] = weakref.WeakValueDictionary()


class Runtime:
    """Everything that `apply` adds to one model; `remove` drops it."""

    model: Callable[[], nn.Module]
    installed: Callable[..., Any] | None
    forward: Callable[..., Any]  # replaces the model's forward; defined by subclasses

    def __init__(
        self,
        model: nn.Module,
        scheme: SchemeConfig,
        layers: dict[int, LayerGeometry | str],
        *,
        strict: bool,
        lowering: str,
        max_cache_len: int | None,
        predictors: dict[int, tuple[Sequence[Tensor], Sequence[Tensor]]],
        mode: str | None = None,
    ):
        self.strict, self.mode = strict, mode
        self.model, self.scheme, self.max_cache_len = weakref.ref(model), scheme, max_cache_len
        self.owner = uuid.uuid4().hex
        self.eager = lowering == EAGER
        self.lowering = lowering
        self.has_encoder = has_encoder(model)
        self.plans, layers = plans_of(scheme, layers)
        self.cross, layers = self._plan_cross(layers)
        self.needs_queries = any(plan.needs_queries for plan, _ in self.plans.values())
        self.takes_queries = any(plan.takes_queries for plan, _ in self.plans.values())
        self.needs_rotation = any(plan.key.transform.turns for plan, _ in self.plans.values())
        self.looks_at_previous = any(plan.looks_at_previous for plan, _ in self.plans.values())
        self.needs_importance = any(plan.needs_importance for plan, _ in self.plans.values())
        self.slides = any(layer.window is not None for _, layer in self.plans.values())
        self.captures = self.needs_queries or self.needs_rotation or self.needs_importance  # even with "eager"
        self.one_graph = self.needs_rotation or self.looks_at_previous or self.needs_importance
        check_sources({index: plan for index, (plan, _) in self.plans.items()})
        check_edges(self.plans)
        self.predictors = self._place(predictors)
        self.report = Report(
            str(scheme),
            [
                LayerReport(index, False, "", layer)
                if isinstance(layer, str)
                else LayerReport(index, True, self._describe(index, layer))
                for index, layer in layers.items()
            ],
        )
        self.attention = PortableAttention(model)
        self.report.attention, self.report.eager = str(self.attention), self.eager
        self.had_own_forward = "forward" in vars(model)
        self.original, self.installed = model.forward, None
        self.attended: dict[int, tuple[int, float]] = {}  # see `kvpass.models.probe.AttentionSeen`
        self.expected: set[bool] = set()  # values of ``batch > 1`` whose decode kernels were requested
        self.replays: Replays | Recalls | None = None  # replays whole steps, if requested and possible
        self.hooks = Hooks(model)
        self.running: dict[int, int] = {}  # id of a cache in a forward -> the thread that runs it

    def _plan_cross(self, layers: dict[int, LayerGeometry | str]) -> tuple[Plans, dict[int, LayerGeometry | str]]:
        """Plans of cross-attention layers, by their own indices, and ``layers`` with the reasons for layers that have
        no plan."""
        plans, layers = {}, dict(layers)
        for index, layer in layers.items():
            if isinstance(layer, LayerGeometry) and layer.cross:
                plan = cross_plan(self.scheme.plan_of(layer))
                if isinstance(plan, str):
                    layers[index] = StoresNoText(plan)
                else:
                    plans[layer.index] = plan, layer
        return plans, layers

    def _describe(self, index: int, layer: LayerGeometry) -> str:
        if layer.cross:
            return f"cross-attention: {self.cross[layer.index][0]}"
        beside = f"; exact: keys of the indexer, {layer.indexer_dim} channels per token" if layer.indexer_dim else ""
        return f"{self.plans[index][0]}{beside}"

    def _place(self, predictors) -> dict[int, tuple[SharedTensors, SharedTensors]]:
        """``predictors`` on the devices of their layers."""
        placed = {}
        for index, (plan, layer) in self.plans.items():
            if plan.looks_at_previous or plan.calibrated:
                key, value = (SharedTensors(t.to(layer.device) for t in tensors) for tensors in predictors[index])
                placed[index] = key, value
            elif plan.shares_out:
                key, value = (ModelTensors(_beside(t, layer) for t in tensors) for tensors in predictors[index])
                placed[index] = key, value
        return placed

    def prepare(self) -> None:
        """Create the compiled functions. Nothing is compiled before their first call."""
        self.decode_step, self.captured = self._forms(interpret=False), self._forms(interpret=True)

    def install(self) -> None:
        """Call `prepare`, and replace the parts of the model that would interfere."""
        self.prepare()
        self.attention.install()
        _BY_OWNER[self.owner] = self

    def uninstall(self) -> None:
        """Undo `install`."""
        self.attention.uninstall()
        _BY_OWNER.pop(self.owner, None)
        for forms in (self.decode_step, self.captured):
            forms.clear()
        if self.replays is not None:
            self.replays.clear()

    def keep_stages(self) -> None:
        """From now on, keep the stages of the pass in the report of each graph."""
        self.report.keeps_stages = True
        for forms in (self.decode_step, self.captured):
            forms.backend.keep_stages = True

    def _forms(self, interpret: bool) -> Forms:
        replayed = isinstance(self.replays, Replays) and not interpret
        options = dict(strict=self.strict, lowering=self.lowering, graphs=self.report.graphs)
        if self.replays is None or interpret:
            options["mode"] = self.mode
        else:
            options |= dict(device_lengths=True) if replayed else dict(noted=True)
        model, backend = self.model(), self._backend(interpret=interpret, **options)
        what, whole = f"a step of {type(model).__name__}", self.one_graph or self.slides or replayed
        hooks = self.hooks if interpret else tuple  # steps with hooks are not compiled
        must = interpret or self.one_graph
        return Forms(self._body(), backend, what, guards_of(model), must=must, unguarded=hooks, fullgraph=whole)

    def _backend(self, **options) -> Backend:
        return Backend(**options)

    def _body(self) -> Callable:
        """The function to compile."""
        original = self.original

        def call(*args, **kwargs):
            return original(*args, **kwargs)

        return call

    @staticmethod
    def of(cache: Cache) -> "Runtime":
        """The runtime that packed ``cache``. Raises `KVPassError` if the cache is not packed, or if its model is
        gone."""
        state = state_of(cache) if isinstance(cache, Cache) else None
        if state is None:
            raise KVPassError("This cache is not packed: run a model that kvpass is applied to over it first.")
        if state.owner not in _BY_OWNER:
            raise KVPassError(
                "The model that packed this cache is gone, or kvpass was removed from it. Only that model can read "
                "the cache."
            )
        return _BY_OWNER[state.owner]

    @contextmanager
    def _alone(self, cache):
        """Raise `KVPassError` if another thread runs a forward over ``cache``: each thread needs its own cache."""
        me = get_ident()
        try:
            if self.running.setdefault(id(cache), me) != me:
                raise KVPassError(
                    "Another thread is using this cache. Threads may share a model but not a cache: give each thread "
                    "its own."
                )
            yield
        finally:
            if self.running.get(id(cache)) == me:
                del self.running[id(cache)]

    @contextmanager
    def _one_forward(self, state: CacheState, new_tokens: int, undo: Callable[[], bool] = lambda: True):
        """A context for one forward. On success it commits the tokens that the layers stored; otherwise it rolls them
        back and calls ``undo`` (see `finish_forward`)."""
        state.drafts = state.drafts + 1 if state.tokens and 1 < new_tokens <= FEW else 0
        succeeded, ran = False, True
        try:
            with torch.no_grad():
                yield
            check_all_updated(state.layers)
            succeeded = True
        except NotCapturedError as error:
            ran = error.ran
            raise
        finally:
            finish_forward(state, state.context.new_tokens, succeeded, undo, ran)

    def _fall_back(self, error: NotCapturedError, state: CacheState, new_tokens: int) -> Callable:
        """The function that runs a call without a graph after capture failed with ``error``. Raises `KVPassError` if
        the call needs a graph, and `NotFusedError` for a decode step with ``strict``."""
        is_step = self._is_compiled(state, new_tokens)
        what = f"{'a step' if is_step else 'a prompt'} of {type(self.model()).__name__}"
        run = self._uncaptured(state)
        if run is None:
            raise self._refusal(error, what) from (error.__cause__ or error)
        if not state.whole:
            raise KVPassError(
                f"Capturing {what} as a graph failed: {error}. Parts of it may have run and overwritten what the cache "
                "held, such as a recurrent state. Use lowering='eager', and pass a fresh cache or call cache.reset()."
            ) from (error.__cause__ or error)
        if is_step and self.strict:
            raise NotFusedError(f"strict=True: {what} cannot be captured: {error}. {_WITHOUT_STRICT}") from error
        if is_step:
            self.decode_step.breaks.failed(str(error))
        state.drafts = max(0, state.drafts - 1)  # the call is repeated, but counts once
        return run

    def _fell_back(self, error: NotCapturedError, state: CacheState, new_tokens: int) -> None:
        """Record that the call succeeded without a graph, and stop trying to capture calls of that form."""
        for forms in (self.decode_step, self.captured):
            forms.give_up(error)
        if not self.report.uncaptured_prompt and not self._is_compiled(state, new_tokens):
            self.report.uncaptured_prompt = str(error)
            logger.warning("%s: a prompt runs without a captured graph: %s", type(self.model()).__name__, error)

    def _uncaptured(self, state: CacheState) -> Callable | None:
        """The function that runs a call over a cache without a graph; None if the call needs a graph."""
        captured = self.needs_rotation or self.needs_importance or (self.needs_queries and not state.tokens)
        return None if captured or isinstance(self.replays, Replays) else self.original

    def _refusal(self, error: NotCapturedError, what: str) -> KVPassError:
        """An error saying that ``what`` has to be captured, why capture failed, and what to do instead."""
        why = "mode='reduce-overhead' replays whole steps"
        if self.needs_queries:
            why = f"{self.scheme.name!r} is fitted to the prompt's queries"
        if self.needs_rotation:
            why = "Keys are stored before rotary embedding"
        if self.looks_at_previous:
            why = "Each layer is predicted from the layer below"
        if self.needs_importance:
            why = "What is stored depends on attention scores"
        text = f"{why}, so {what} must be captured as a graph, but capture failed: {error}. Use "
        if not (self.captures or self.looks_at_previous):
            return KVPassError(f"{text}no mode.")
        scheme = self._works()
        return NeedsGraphError(f"{text}scheme={named(scheme)!r}.", scheme)

    def _works(self) -> SchemeConfig:
        """A scheme that works for this model without a graph."""
        return get("kivi")

    def _is_compiled(self, state: CacheState, new_tokens: int) -> bool:
        """Whether a call of ``new_tokens`` tokens over a cache is a decode step to be compiled."""
        return (new_tokens == 1 or state.drafts > 1) and not self.eager and state.tokens >= _MIN_COMPILED_LENGTH

    @contextmanager
    def _step(self, state: CacheState, new_tokens: int) -> Iterator[None]:
        """A context for one call over a cache. For a decode step to be compiled, it records which parts ran as graphs.
        With ``strict`` it raises `NotFusedError` at the first layer that is read outside a graph."""
        if not self._is_compiled(state, new_tokens) or state.context.hooked:
            yield
            return
        uncaptured: list[int] = []

        def why() -> str:
            return why_uncaptured(self.decode_step.breaks.reasons())

        def read(layer: PackedLayer) -> None:
            if self.strict:
                raise NotFusedError(f"strict=True: layers ran outside any captured graph: {why()}. {_WITHOUT_STRICT}")
            uncaptured.append(layer.geometry.index)

        state.context.uncaptured = read
        with counted() as ran:
            yield
        graphs = [report for report in ran if isinstance(report, GraphReport)]
        if self.report.stepped(graphs, uncaptured, why):
            logger.warning("%s: %s", type(self.model()).__name__, self.report.pieces)

    def _choose(self, state: CacheState, new_tokens: int):
        """The function that runs a call of ``new_tokens`` tokens over a cache. The first of several short calls is not
        compiled, because it may be a short chat turn; calls that verify drafts come in series."""
        if self._is_compiled(state, new_tokens):
            hooked = self._hooked()
            if state.context is not None:
                state.context.hooked = hooked
            if not hooked:
                return self.decode_step
        if self.needs_rotation or self.needs_importance:
            return self.captured
        if self.needs_queries and not state.tokens:
            return self._capture_queries()
        if self.takes_queries and not state.tokens:
            return self._offer_queries()
        return self.original

    def _hooked(self) -> bool:
        """Whether a hook inside the model prevents compiling a step. A hook may do anything, and a graph would have to
        be captured again whenever the hook reads something different."""
        if not (names := self.hooks()):
            return False
        hooked = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        if self.strict and not self.one_graph:
            raise NotFusedError(
                f"strict=True: steps are not compiled while there are hooks on {hooked}. Remove them, or apply without "
                "strict=True: keys and values are then dequantized before attention."
            )
        self.report.hooked_steps, self.report.hooked = self.report.hooked_steps + 1, hooked
        return True

    def _expect_steps(self, batch: int) -> None:
        """Let other processes compile the kernels of the decode steps that will follow a prompt."""
        if self.lowering != AUTO or self.mode or (batch > 1) in self.expected:
            return
        self.expected.add(batch > 1)
        steps = set()
        for plan, layer in self.plans.values():
            alike = layer.heads[0] == layer.heads[1]  # other layers have no kernel that takes long to compile
            known = layer.head_dim in self.attended and alike and layer.window is None
            if known and not plan.looks_at_previous:
                heads, scale = self.attended[layer.head_dim]
                shape = AttentionShape(
                    heads, layer.num_key_value_heads, layer.head_dim, scale, layer.dtype, layer.device
                )
                steps.add((shape, plan.key, plan.value, plan.needs_importance))
        for shape, key, value, mass in steps:
            compile_ahead(shape, key, value, batch, mass)

    def _capture_queries(self) -> Callable:
        """The function that runs a prompt whose queries are needed."""
        return self.captured

    def _offer_queries(self) -> Callable:
        """The function that runs a prompt whose queries improve what is stored."""
        return self.original

    def _measure(self, state: CacheState, layers: Sequence) -> None:
        """Record the bytes of the cache last used, which may be gone when `explain` asks. ``layers``: all its layers,
        packed or not."""
        there = itertools.chain(layers, itertools.repeat(None))
        rows = [
            LayerReport(row.index, row.packed, row.plan, row.reason, *(_bytes(layer) or _bytes_of(row)))
            for row, layer in zip(self.report.layers, there, strict=False)
        ]
        self.report.used(rows, state.seen, state.batch)

    def __reduce_ex__(self, protocol):
        raise KVPassError(
            "A model that kvpass is applied to cannot be copied or pickled: the copy would run the original's "
            "forward. Call kvpass.remove(model) first, then apply to each copy. save_pretrained and state_dict work "
            "as they are."
        )


def _beside(tensor: Tensor, layer: LayerGeometry) -> Tensor:
    """A calibrated tensor of ``layer``, in the dtype of its scales and on its device. A share (`codec.shares`) stays on
    the host, which reads it."""
    tensor = tensor.clone(memory_format=torch.contiguous_format)  # storage offset 0 makes layers alike
    if tensor.dtype == torch.int32:
        return tensor.cpu()
    return tensor.to(layer.device, params_dtype(layer.dtype) if tensor.dtype in _WEIGHTS else tensor.dtype)


def _bytes(layer) -> tuple[int, ...]:
    """The byte counts of one layer of a cache, in the order of the fields of `LayerReport`; empty if the layer holds
    none."""
    if isinstance(layer, PackedLayer):
        own = layer.nbytes, layer.full_nbytes
        return (*own, layer.host_nbytes, layer.moved_nbytes) if layer.plan.adaptive else own
    if isinstance(getattr(layer, "keys", None), Tensor):
        return (layer.keys.nbytes + layer.values.nbytes,) * 2
    return ()


def _bytes_of(row: LayerReport) -> tuple[int, ...]:
    return row.nbytes, row.full_nbytes, row.host_nbytes, row.moved_nbytes

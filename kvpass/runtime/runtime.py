"""What every forward over a packed cache has in common, however the model keeps its cache."""

import itertools
import uuid
import weakref
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed, Unsupported
from transformers.cache_utils import Cache

from ..cache.cross import cross_plan
from ..cache.layer import PackedLayer
from ..cache.state import ModelTensors, SharedTensors
from ..cache.swap import Plans, packed_layers
from ..codec.affine import params_dtype
from ..compile.backend import Backend
from ..compile.report import LayerReport, Report
from ..compile.subclasses import guards_of
from ..errors import KVPassError
from ..lowering.inductor.expect import Attended, expect
from ..lowering.table import AUTO, FEW
from ..models.attention import PortableAttention
from ..models.probe import has_encoder
from ..schemes import LayerGeometry, SchemeConfig, check_edges, check_sources
from .forms import Forms
from .forward import finish_forward
from .recall import Recalls
from .replay import Replays

_MIN_COMPILED_LENGTH = 2  # lengths 0 and 1 would be specialised by the tracer

_WEIGHTS = torch.float16, torch.bfloat16

_BY_OWNER: weakref.WeakValueDictionary[str, "Runtime"] = weakref.WeakValueDictionary()


class Runtime:
    """Everything `apply` adds to one model; `remove` drops it."""

    model: Callable[[], nn.Module]
    forward: Callable[..., Any]  # of each kind: what takes the place of the model's

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
        self.eager = lowering == "eager"
        self.lowering = "reference" if self.eager else lowering
        self.has_encoder = has_encoder(model)
        self.plans: Plans = {
            index: (scheme.plan_of(layer), layer)
            for index, layer in layers.items()
            if isinstance(layer, LayerGeometry) and not layer.cross
        }
        self.cross, layers = self._plan_cross(layers)
        self.needs_queries = any(plan.needs_queries for plan, _ in self.plans.values())
        self.needs_rotation = any(plan.key.transform.turns for plan, _ in self.plans.values())
        self.looks_at_previous = any(plan.looks_at_previous for plan, _ in self.plans.values())
        self.needs_importance = any(plan.needs_importance for plan, _ in self.plans.values())
        self.captures = self.needs_queries or self.needs_rotation or self.needs_importance  # also with "eager"
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
        self.report.attention = str(self.attention)
        self.had_own_forward = "forward" in vars(model)
        self.original, self.installed = model.forward, None
        self.attended: dict[int, tuple[int, float]] = {}  # see `kvpass.models.probe.AttentionSeen`
        self.expected: set[bool] = set()  # whether of several sequences: decode steps whose kernels were asked for
        self.replays: Replays | Recalls | None = None  # of whole steps, where that was asked for and is possible
        self.running: dict[int, int] = {}  # caches in a forward, by id, and the threads that run it

    def _plan_cross(self, layers: dict[int, LayerGeometry | str]) -> tuple[Plans, dict[int, LayerGeometry | str]]:
        """Plans of cross-attention by its own layer indices, and ``layers`` with the reasons where there is none."""
        plans, layers = {}, dict(layers)
        for index, layer in layers.items():
            if isinstance(layer, LayerGeometry) and layer.cross:
                plan = cross_plan(self.scheme.plan_of(layer))
                if isinstance(plan, str):
                    layers[index] = plan
                else:
                    plans[layer.index] = plan, layer
        return plans, layers

    def _describe(self, index: int, layer: LayerGeometry) -> str:
        return f"cross-attention: {self.cross[layer.index][0]}" if layer.cross else str(self.plans[index][0])

    def _place(self, predictors) -> dict[int, tuple[SharedTensors, SharedTensors]]:
        """``predictors`` where their layers are."""
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
        """Make what compiles."""
        self.decode_step, self.captured = self._forms(interpret=False), self._forms(interpret=True)

    def install(self) -> None:
        """`prepare`, and take out of the way what the model has of its own."""
        self.prepare()
        self.attention.install()
        _BY_OWNER[self.owner] = self

    def uninstall(self) -> None:
        """Give it back."""
        self.attention.uninstall()
        _BY_OWNER.pop(self.owner, None)
        for forms in (self.decode_step, self.captured):
            forms.clear()
        if self.replays is not None:
            self.replays.clear()

    def keep_stages(self) -> None:
        """From now on, keep what the pass does to each graph in its report."""
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
        what, whole = f"a step of {type(model).__name__}", self.one_graph or replayed
        return Forms(self._body(), backend, what, guards_of(model), fullgraph=whole)

    def _backend(self, **options) -> Backend:
        return Backend(**options)

    def _body(self) -> Callable:
        """What is compiled."""
        original = self.original

        def call(*args, **kwargs):
            return original(*args, **kwargs)

        return call

    @staticmethod
    def of(cache: Cache) -> "Runtime":
        """Who packed ``cache``. Raises `KVPassError` for one that is not packed, or whose model is gone."""
        layers = packed_layers(cache) if isinstance(cache, Cache) else []
        if not layers:
            raise KVPassError("This is no packed cache: run a model that kvpass is applied to over it first.")
        if layers[0].owner not in _BY_OWNER:
            raise KVPassError(
                "The model that packed this cache is gone, or kvpass was removed from it: its codes mean nothing "
                "without it."
            )
        return _BY_OWNER[layers[0].owner]

    @contextmanager
    def _alone(self, cache):
        """Raise `KVPassError` if another thread runs a forward over ``cache``: threads need caches of their own."""
        me = get_ident()
        try:
            if self.running.setdefault(id(cache), me) != me:
                raise KVPassError(
                    "A forward over this cache is running already, in another thread. Threads may share a model, not a "
                    "cache: give each of them its own."
                )
            yield
        finally:
            if self.running.get(id(cache)) == me:
                del self.running[id(cache)]

    @contextmanager
    def _one_forward(self, layers: list[PackedLayer], new_tokens: int, undo: Callable[[], bool] = lambda: True):
        """Commit what ``layers`` stored when it went well; otherwise take it back, with what ``undo`` does (see
        `finish_forward`), and say in kvpass's words why."""
        layers[0].drafts = layers[0].drafts + 1 if layers[0].tokens and 1 < new_tokens <= FEW else 0
        succeeded = False
        try:
            with torch.no_grad():
                yield
            succeeded = True
        except BackendCompilerFailed as error:
            if isinstance(error.inner_exception, KVPassError):
                raise error.inner_exception from None
            raise
        except Unsupported as error:
            if not self.one_graph and not isinstance(self.replays, Replays):
                raise
            why, instead = "Keys are stored before rotary embedding", "the scheme with rope='post'"
            if not self.one_graph:
                why, instead = "mode='reduce-overhead' replays whole steps", "no mode"
            if self.looks_at_previous:
                why, instead = "Layers are predicted from the layer below", "the scheme's backbone alone"
            if self.needs_importance:
                why, instead = "What is stored depends on attention", "a scheme without that edge, such as 'kivi'"
            raise KVPassError(
                f"{why}, which needs the whole forward in one graph, and it broke: {str(error).splitlines()[0]} "
                f"Use {instead}."
            ) from error
        finally:
            finish_forward(layers, new_tokens, succeeded, undo)

    def _choose(self, first: PackedLayer, new_tokens: int):
        """Who runs the call over the cache whose first layer is ``first``. Drafts are verified one after another: the
        first of several calls of a few tokens is not worth compiling for, it may be a short turn of a chat."""
        stored, compiled = first.tokens, new_tokens == 1 or first.drafts > 1
        if compiled and not self.eager and stored >= _MIN_COMPILED_LENGTH:
            return self.decode_step
        if self.needs_rotation or self.needs_importance:
            return self.captured
        if self.needs_queries and not stored:
            return self._capture_queries()
        return self.original

    def _expect_steps(self, batch: int) -> None:
        """Have other processes compile kernels of the decode steps that are going to follow a prompt."""
        if self.lowering != AUTO or self.mode or (batch > 1) in self.expected:
            return
        self.expected.add(batch > 1)
        steps = set()
        for plan, layer in self.plans.values():
            if layer.head_dim in self.attended and not plan.looks_at_previous:
                heads, scale = self.attended[layer.head_dim]
                attended = Attended(heads, layer.num_key_value_heads, layer.head_dim, scale, layer.dtype, layer.device)
                steps.add((attended, plan.key, plan.value, plan.needs_importance))
        for attended, key, value, mass in steps:
            expect(attended, key, value, batch, mass)

    def _capture_queries(self) -> Callable:
        """Who runs a prompt whose queries are asked for."""
        return self.captured

    def _measure(self, layers: Sequence) -> None:
        """Note the bytes of the cache just used; it may be gone when `explain` asks."""
        first = next(layer for layer in layers if isinstance(layer, PackedLayer))
        there = itertools.chain(layers, itertools.repeat(None))
        rows = [
            LayerReport(row.index, row.packed, row.plan, row.reason, *(_bytes(layer) or _bytes_of(row)))
            for row, layer in zip(self.report.layers, there, strict=False)
        ]
        self.report.used(rows, first.seen, first.batch_size)

    def __reduce_ex__(self, protocol):
        raise KVPassError(
            "A model that kvpass is applied to cannot be copied or pickled, its forward would still be the original's: "
            "kvpass.remove(model) first, then apply to each copy. save_pretrained and state_dict work as they are."
        )


def _beside(tensor: Tensor, layer: LayerGeometry) -> Tensor:
    """What a calibration gave ``layer``, in the dtype of its scales and on its device. A share (`codec.shares`) stays
    on the host, which reads it."""
    tensor = tensor.clone(memory_format=torch.contiguous_format)  # what is alike in layers begins its storage in each
    if tensor.dtype == torch.int32:
        return tensor.cpu()
    return tensor.to(layer.device, params_dtype(layer.dtype) if tensor.dtype in _WEIGHTS else tensor.dtype)


def _bytes(layer) -> tuple[int, ...]:
    """What a `LayerReport` says of the bytes of one layer of a cache, in its order; nothing if it holds none."""
    if isinstance(layer, PackedLayer):
        own = layer.nbytes, layer.full_nbytes
        return (*own, layer.host_nbytes, layer.moved_nbytes) if layer.plan.adaptive else own
    if isinstance(getattr(layer, "keys", None), Tensor):
        return (layer.keys.nbytes + layer.values.nbytes,) * 2
    return ()


def _bytes_of(row: LayerReport) -> tuple[int, ...]:
    return row.nbytes, row.full_nbytes, row.host_nbytes, row.moved_nbytes

"""The forward that `kvpass.apply` puts in front of a model: swap, prepare, run, commit."""

import functools
import inspect
import itertools
import uuid
import weakref
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import get_ident

import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed, Unsupported
from transformers.cache_utils import Cache, EncoderDecoderCache

from ..cache.cross import cross_plan, running
from ..cache.layer import PackedLayer
from ..cache.query_capture import QueryCapture
from ..cache.state import SharedTensors
from ..cache.swap import Plans, cache_layers, cross_layers, packed_layers, swap_cross_layers, swap_layers
from ..compile.backend import Backend
from ..compile.report import LayerReport, Report
from ..errors import KVPassError
from ..lowering.table import FEW
from ..models.attention import PortableAttention
from ..models.probe import fresh_cache, has_encoder, two_tokens
from ..models.recording import put_up_hooks, refuse_what_is_not_recorded
from ..schemes import LayerGeometry, SchemeConfig, check_edges, check_sources
from .forms import Forms
from .forward import finish_forward, remember, start_forward

_MIN_COMPILED_LENGTH = 2  # lengths 0 and 1 would be specialised by the tracer


_BY_OWNER: weakref.WeakValueDictionary[str, "Runtime"] = weakref.WeakValueDictionary()


class Runtime:
    """Everything `apply` adds to one model; `remove` drops it."""

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
        self.model, self.scheme, self.max_cache_len = weakref.ref(model), scheme, max_cache_len
        self.owner = uuid.uuid4().hex
        self.eager = lowering == "eager"
        self.lowering = "reference" if self.eager else lowering
        self.has_encoder = has_encoder(model)
        self.prefix = "decoder_" if self.has_encoder else ""  # of the decoder's arguments
        self.plans: Plans = {
            index: (scheme.plan(layer), layer)
            for index, layer in layers.items()
            if isinstance(layer, LayerGeometry) and not layer.cross
        }
        self.cross, layers = self._plan_cross(layers)
        self.needs_queries = any(plan.needs_queries for plan, _ in self.plans.values())
        self.needs_rotation = any(plan.key.pre_rope for plan, _ in self.plans.values())
        self.looks_below = any(plan.looks_below for plan, _ in self.plans.values())
        self.needs_importance = any(plan.needs_importance for plan, _ in self.plans.values())
        self.one_graph = self.needs_rotation or self.looks_below or self.needs_importance
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
        self.parameters = list(inspect.signature(self.original).parameters)
        body = self._body()

        def compiled(interpret: bool):
            backend = self._backend(
                strict=strict, lowering=self.lowering, interpret=interpret, mode=mode, graphs=self.report.graphs
            )
            return Forms(body, backend=backend, fullgraph=self.one_graph)

        self.running: dict[int, int] = {}  # caches in a forward, by id, and the threads that run it
        self.decode_step, self.captured = compiled(interpret=False), compiled(interpret=True)

    def _backend(self, **options) -> Backend:
        return Backend(**options)

    def _body(self):
        """What is compiled."""
        original = self.original

        def call(*args, **kwargs):
            return original(*args, **kwargs)

        return call

    def _plan_cross(self, layers: dict[int, LayerGeometry | str]) -> tuple[Plans, dict[int, LayerGeometry | str]]:
        """Plans of cross-attention by its own layer indices, and ``layers`` with the reasons where there is none."""
        plans, layers = {}, dict(layers)
        for index, layer in layers.items():
            if isinstance(layer, LayerGeometry) and layer.cross:
                plan = cross_plan(self.scheme.plan(layer))
                if isinstance(plan, str):
                    layers[index] = plan
                else:
                    plans[layer.index] = plan, layer
        return plans, layers

    def _describe(self, index: int, layer: LayerGeometry) -> str:
        return f"cross-attention: {self.cross[layer.index][0]}" if layer.cross else str(self.plans[index][0])

    def _place(self, predictors) -> dict[int, tuple[SharedTensors, SharedTensors]]:
        """``predictors`` where their layers are."""
        return {
            index: tuple(SharedTensors(t.to(layer.device) for t in tensors) for tensors in predictors[index])
            for index, (plan, layer) in self.plans.items()
            if plan.looks_below
        }

    def install(self) -> None:
        """Take out of the way what the model has of its own."""
        self.attention.install()
        _BY_OWNER[self.owner] = self

    def uninstall(self) -> None:
        """Give it back."""
        self.attention.uninstall()
        _BY_OWNER.pop(self.owner, None)
        for forms in (self.decode_step, self.captured):
            forms.clear()

    def keep_stages(self) -> None:
        """From now on, keep what the pass does to each graph in its report."""
        self.report.keeps_stages = True
        for forms in (self.decode_step, self.captured):
            forms.backend.keep_stages = True

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

    def forward(self, *args, **kwargs):
        """The model's forward over a packed cache."""
        kwargs.update(zip(self.parameters, args, strict=False))
        inputs = kwargs.get(f"{self.prefix}input_ids")
        inputs = kwargs.get(f"{self.prefix}inputs_embeds") if inputs is None else inputs
        if kwargs.get("cache") is not None:
            raise KVPassError(
                "Continuous batching (generate_batch, cache_implementation='paged') keeps a paged cache of its own, "
                "which is not packed: use generate with a batch, or kvpass.remove(model)."
            )
        if inputs is None or not self._uses_cache(kwargs):
            return self.original(**kwargs)
        batch, new_tokens = inputs.shape[:2]
        cache = kwargs.get("past_key_values")
        if cache is None:
            cache = kwargs["past_key_values"] = fresh_cache(self.model())
        with self._alone(cache):
            return self._forward_over(cache, batch, new_tokens, kwargs)

    def _forward_over(self, cache: Cache, batch: int, new_tokens: int, kwargs):
        layers, undo = self.adopt(cache), remember(cache)
        if self.one_graph:
            refuse_what_is_not_recorded(self.model(), kwargs)
        put_up_hooks(self.model(), kwargs)
        stored, seen = start_forward(layers, batch, new_tokens), layers[0].seen
        with self._one_forward(layers, new_tokens, undo), running(cross_layers(cache)):
            self._set_masks(kwargs, stored + new_tokens, seen + new_tokens)
            self._drop_defaults(kwargs, seen, new_tokens)
            run = self._choose(layers[0], new_tokens)
            if run is not self.original:
                self._canonicalise(kwargs)
            output = run(**kwargs)
        self._measure(cache_layers(cache))
        return output

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
            if not self.one_graph:
                raise
            why, instead = "Keys are stored before rotary embedding", "the scheme with rope='post'"
            if self.looks_below:
                why, instead = "Layers are predicted from the layer below", "the scheme's backbone alone"
            if self.needs_importance:
                why, instead = "What is stored depends on attention", "a scheme without that edge, such as 'kivi'"
            raise KVPassError(
                f"{why}, which needs the whole forward in one graph, and it broke: {str(error).splitlines()[0]} "
                f"Use {instead}."
            ) from error
        finally:
            finish_forward(layers, new_tokens, succeeded, undo)

    def _uses_cache(self, kwargs) -> bool:
        if self.model().training:
            return False
        if kwargs.get("past_key_values") is not None:
            return True
        use_cache = kwargs.get("use_cache")
        return bool(getattr(self.model().config, "use_cache", True) if use_cache is None else use_cache)

    def adopt(self, cache: Cache) -> list[PackedLayer]:
        """The packed layers of ``cache``, swapped in if it is fresh. Raises `KVPassError` for what cannot be packed."""
        if not isinstance(cache, Cache):
            raise KVPassError(f"past_key_values is {type(cache).__name__}; pass a transformers DynamicCache, or none.")
        if isinstance(cache, EncoderDecoderCache) != self.has_encoder:
            wanted = "an EncoderDecoderCache" if self.has_encoder else "a DynamicCache"
            raise KVPassError(f"past_key_values is {type(cache).__name__}; this model needs {wanted}, or none.")
        layers = packed_layers(cache)
        if not layers:
            self._swap(cache)
            layers = packed_layers(cache)
        if any(layer.owner != self.owner for layer in layers):
            raise KVPassError(
                "This cache was packed by another model or by an earlier kvpass.apply: its codes mean nothing here. "
                "Pass a fresh cache."
            )
        return layers

    def _swap(self, cache: Cache) -> None:
        own = cache.self_attention_cache if self.has_encoder else cache
        before = list(own.layers), own.layer_class_to_replicate
        try:
            swap_layers(own, self.plans, self.owner, self.lowering, self.max_cache_len, self.predictors)
            if self.cross:
                swap_cross_layers(cache, self.cross, self.owner, self.lowering)
        except BaseException:
            own.layers[:], own.layer_class_to_replicate = before
            raise

    def _choose(self, first: PackedLayer, new_tokens: int):
        """Who runs the call over the cache whose first layer is ``first``. Drafts are verified one after another: the
        first of several calls of a few tokens is not worth compiling for, it may be a short turn of a chat."""
        stored, compiled = first.tokens, new_tokens == 1 or first.drafts > 1
        if compiled and not self.eager and stored >= _MIN_COMPILED_LENGTH:
            return self.decode_step
        if self.needs_rotation or self.needs_importance:
            return self.captured
        if self.needs_queries and not stored:
            return self._with_query_capture if self.captures_queries else self.captured
        return self.original

    def _with_query_capture(self, **kwargs):
        """The model's own forward over an empty cache, which is handed the prompt's queries."""
        capture = QueryCapture(packed_layers(kwargs["past_key_values"]))
        with capture:
            output = self.original(**kwargs)
        capture.check()
        return output

    @functools.cached_property
    def captures_queries(self) -> bool:
        """Whether `_with_query_capture` works for this model. Tries it on two tokens."""
        cache = fresh_cache(self.model())
        layers = self.adopt(cache)
        start_forward(layers, 1, 2)
        try:
            with torch.no_grad(), running(cross_layers(cache)):
                self._with_query_capture(**two_tokens(self.model()), past_key_values=cache, use_cache=True)
        except KVPassError:
            return False
        finally:
            finish_forward(layers, 2, succeeded=False)
        return True

    def _set_masks(self, kwargs, total: int, seen: int) -> None:
        """Cut masks made for a static cache to the tokens there are, and drop a 2-D one that hides nothing.

        Decided at every call; on an accelerator reading the mask would wait for the device, so there it stays. One that
        is too short stays everywhere: to transformers it hides the newest tokens.
        """
        name = f"{self.prefix}attention_mask"
        mask = kwargs.get(name)
        if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] > seen:
            kwargs[name] = mask[:, :seen]
        for own in {"attention_mask", name}:
            padding = kwargs.get(own)
            if not isinstance(padding, Tensor) or padding.ndim != 2 or (own == name and padding.shape[1] < seen):
                continue
            if padding.device.type == "cpu" and padding.all():
                kwargs[own] = None
        if isinstance(mask, dict):  # one for each kind of layer; only full attention is packed
            full = mask.get("full_attention")
            if isinstance(full, Tensor) and full.shape[-1] > total:
                kwargs[name] = {**mask, "full_attention": full[..., :total]}
        if not isinstance(mask, Tensor) or mask.ndim != 4:
            return
        if seen > total:
            raise KVPassError(
                f"A 4-D mask says for {mask.shape[-1]} keys who sees them, and {seen - total} tokens were evicted, "
                "others in each head. Pass a 2-D padding mask."
            )
        if mask.shape[-1] > total:
            kwargs[name] = mask[..., :total]

    def _drop_defaults(self, kwargs, seen: int, new_tokens: int) -> None:
        """Drop what says no more than leaving it out, so that every caller shares one graph. Positions are compared
        where that does not wait for the device."""
        config = self.model().config
        defaults = {name: True for name in ("use_cache", "return_dict") if getattr(config, name, True)}
        if new_tokens == 1:
            defaults["logits_to_keep"] = 1
        for name, value in list(kwargs.items()):
            if value is None or (isinstance(value, int) and defaults.get(name) == value):
                del kwargs[name]
        for name in ("position_ids", "cache_position"):
            positions = kwargs.get(name)
            if not isinstance(positions, Tensor) or positions.device.type != "cpu":
                continue
            if positions.shape[-1:] == (new_tokens,) and (positions == torch.arange(seen, seen + new_tokens)).all():
                del kwargs[name]

    def _canonicalise(self, kwargs) -> None:
        """Token dims of the inputs vary from call to call, and strides of dims of size 1 mean nothing."""
        for name, tensor in kwargs.items():
            if isinstance(tensor, Tensor):
                kwargs[name] = tensor.contiguous().view(-1).view(tensor.shape)
        for name in ("attention_mask", "decoder_attention_mask"):
            mask = kwargs.get(name)
            if isinstance(mask, Tensor):
                torch._dynamo.maybe_mark_dynamic(mask, mask.ndim - 1)
                if mask.ndim == 4 and mask.shape[2] > 1:
                    torch._dynamo.maybe_mark_dynamic(mask, 2)
        inputs = ("input_ids", "inputs_embeds", "position_ids", "decoder_input_ids", "decoder_inputs_embeds")
        encoded = getattr(kwargs.get("encoder_outputs"), "last_hidden_state", None)
        for tensor in (*map(kwargs.get, inputs), encoded):
            if isinstance(tensor, Tensor) and tensor.ndim >= 2 and tensor.shape[1] > 1:
                torch._dynamo.maybe_mark_dynamic(tensor, 1)

    def __reduce_ex__(self, protocol):
        raise KVPassError(
            "A model that kvpass is applied to cannot be copied or pickled, its forward would still be the original's: "
            "kvpass.remove(model) first, then apply to each copy. save_pretrained and state_dict work as they are."
        )

    def _measure(self, layers: Sequence) -> None:
        """Note the bytes of the cache just used; it may be gone when `explain` asks."""
        first = next(layer for layer in layers if isinstance(layer, PackedLayer))
        there = itertools.chain(layers, itertools.repeat(None))
        rows = [replace(row, **_bytes(layer)) for row, layer in zip(self.report.layers, there, strict=False)]
        self.report.used(rows, first.seen, first.batch_size)


def _bytes(layer) -> dict[str, int]:
    """What a `LayerReport` says of one layer of a cache."""
    if isinstance(layer, PackedLayer):
        names = "nbytes", "full_nbytes", "host_nbytes", "moved_nbytes"
        return {name: getattr(layer, name) for name in names}
    if isinstance(getattr(layer, "keys", None), Tensor):
        return dict.fromkeys(("nbytes", "full_nbytes"), layer.keys.nbytes + layer.values.nbytes)
    return {}

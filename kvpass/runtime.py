"""The forward that `kvpass.apply` puts in front of a model: swap, prepare, run, commit."""

import functools
import inspect
import itertools
import types
import uuid
import weakref
from collections.abc import Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed, Unsupported
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

from .backend import Backend
from .cache import finish_forward, packed_layers, start_forward, swap_layers
from .errors import KVPassError
from .graph.report import LayerReport, Report
from .layer import PackedLayer
from .schemes import LayerGeometry, LayerPlan, SchemeConfig, check_edges, check_sources
from .state import SharedTensors

_MIN_COMPILED_LENGTH = 2  # lengths 0 and 1 would be specialised by the tracer


def probe(model: nn.Module) -> dict[int, LayerGeometry | str]:
    """What each cache layer of ``model`` holds: its geometry, or the reason it is not packed. Runs two tokens.

    Raises `KVPassError` if the model has no attention over a transformers cache.
    """
    config = getattr(model, "config", None)
    wanted = "a transformers decoder whose forward takes past_key_values"
    if config is None or "past_key_values" not in inspect.signature(model.forward).parameters:
        raise KVPassError(f"No attention over a KV cache found in {type(model).__name__}: kvpass needs {wanted}.")
    if getattr(config, "is_encoder_decoder", False):
        raise KVPassError(f"{type(model).__name__} is an encoder-decoder, not supported: kvpass needs {wanted}.")
    try:
        cache = DynamicCache(config=config)
        ids = torch.zeros(1, 2, dtype=torch.long, device=next(model.parameters()).device)
        with torch.no_grad():
            model(input_ids=ids, past_key_values=cache, use_cache=True)
    except Exception as error:
        raise KVPassError(f"Two tokens through {type(model).__name__} with a DynamicCache failed: {error}") from error
    layers, below = {}, None
    for index, layer in enumerate(cache.layers):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if type(layer) is not DynamicLayer:
            layers[index] = f"{type(layer).__name__}: not full attention over a growing cache"
        elif not isinstance(keys, Tensor) or keys.ndim != 4 or not keys.numel():
            layers[index] = "the layer stored no keys"
        elif keys.shape != values.shape:
            layers[index] = f"keys {tuple(keys.shape)} and values {tuple(values.shape)} differ in shape (MLA?)"
        else:
            layers[index] = LayerGeometry(
                index, len(cache.layers), keys.shape[1], keys.shape[3], keys.dtype, keys.device, below
            )
            below = index
    if not any(isinstance(layer, LayerGeometry) for layer in layers.values()):
        reasons = "; ".join(sorted(set(layers.values()))) or "its cache stayed empty"
        raise KVPassError(f"No attention that can be packed found in {type(model).__name__}: {reasons}.")
    return layers


_numbers = itertools.count()


def _with_own_code(fn):
    """A copy of ``fn`` with a code object and a name of its own. Dynamo keeps compiled graphs, and its limit of them,
    per code; by name it remembers what varied from call to call, and other models must not make ours vary."""
    code = fn.__code__.replace(co_name=f"{fn.__name__}_{next(_numbers)}")
    copy = types.FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    return functools.wraps(fn)(copy)


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
    ):
        self.model, self.scheme, self.max_cache_len = weakref.ref(model), scheme, max_cache_len
        self.owner = uuid.uuid4().hex
        self.eager = lowering == "eager"
        self.lowering = "reference" if self.eager else lowering
        self.plans: dict[int, tuple[LayerPlan, LayerGeometry]] = {
            index: (scheme.plan(layer), layer) for index, layer in layers.items() if isinstance(layer, LayerGeometry)
        }
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
                else LayerReport(index, True, str(self.plans[index][0]))
                for index, layer in layers.items()
            ],
        )

        self.had_own_forward = "forward" in vars(model)
        self.original = model.forward
        self.parameters = list(inspect.signature(self.original).parameters)
        body = self._body()

        def compiled(interpret: bool):
            backend = self._backend(
                strict=strict, lowering=self.lowering, interpret=interpret, graphs=self.report.graphs
            )
            return torch.compile(_with_own_code(body), backend=backend, fullgraph=self.one_graph)

        self.decode_step, self.captured = compiled(interpret=False), compiled(interpret=True)

    def _backend(self, **options) -> Backend:
        return Backend(**options)

    def _body(self):
        """What is compiled."""
        original = self.original

        def call(*args, **kwargs):
            return original(*args, **kwargs)

        return call

    def _place(self, predictors) -> dict[int, tuple[SharedTensors, SharedTensors]]:
        """``predictors`` where their layers are."""
        return {
            index: tuple(SharedTensors(t.to(layer.device) for t in tensors) for tensors in predictors[index])
            for index, (plan, layer) in self.plans.items()
            if plan.looks_below
        }

    def install(self) -> None:
        """Nothing of the model's own is in the way."""

    def uninstall(self) -> None:
        """Nothing of the model's own was taken away."""

    def forward(self, *args, **kwargs):
        """The model's forward over a packed cache."""
        kwargs.update(zip(self.parameters, args, strict=False))
        inputs = kwargs.get("input_ids")
        inputs = kwargs.get("inputs_embeds") if inputs is None else inputs
        if inputs is None or not self._uses_cache(kwargs):
            return self.original(**kwargs)
        batch, new_tokens = inputs.shape[:2]
        cache = kwargs.get("past_key_values")
        if cache is None:
            cache = kwargs["past_key_values"] = DynamicCache(config=self.model().config)
        layers = self.adopt(cache)
        stored, seen = start_forward(layers, batch, new_tokens), layers[0].seen
        with self._one_forward(layers, new_tokens):
            self._set_mask(kwargs, stored + new_tokens, seen + new_tokens)
            self._drop_defaults(kwargs, seen, new_tokens)
            run = self._choose(stored, new_tokens)
            if run is not self.original:
                self._canonicalise(kwargs)
            output = run(**kwargs)
        self._measure(cache.layers)
        return output

    @contextmanager
    def _one_forward(self, layers: list[PackedLayer], new_tokens: int):
        """Commit what ``layers`` stored when it went well, and say in kvpass's words why it did not."""
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
            finish_forward(layers, new_tokens, succeeded)

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
        layers = packed_layers(cache)
        if not layers:
            swap_layers(cache, self.plans, self.owner, self.lowering, self.max_cache_len, self.predictors)
            layers = packed_layers(cache)
        if any(layer.owner != self.owner for layer in layers):
            raise KVPassError(
                "This cache was packed by another model or by an earlier kvpass.apply: its codes mean nothing here. "
                "Pass a fresh cache."
            )
        return layers

    def _choose(self, stored: int, new_tokens: int):
        if not (self.eager or new_tokens > 1 or stored < _MIN_COMPILED_LENGTH):
            return self.decode_step
        needs_edges = self.needs_rotation or self.needs_importance or (self.needs_queries and not stored)
        return self.captured if needs_edges else self.original

    def _set_mask(self, kwargs, total: int, seen: int) -> None:
        """Drop a 2-D mask that hides nothing, and cut a 4-D one made for a static cache to the tokens there are.

        Decided at every call; on an accelerator reading the mask would wait for the device, so there it stays.
        """
        mask = kwargs.get("attention_mask")
        if isinstance(mask, dict):  # one for each kind of layer; only full attention is packed
            full = mask.get("full_attention")
            if isinstance(full, Tensor) and full.shape[-1] > total:
                kwargs["attention_mask"] = {**mask, "full_attention": full[..., :total]}
        if not isinstance(mask, Tensor):
            return
        if mask.ndim == 4 and seen > total:
            raise KVPassError(
                f"A 4-D mask says for {mask.shape[-1]} keys who sees them, and {seen - total} tokens were evicted, "
                "others in each head. Pass a 2-D padding mask."
            )
        if mask.ndim == 4 and mask.shape[-1] > total:
            kwargs["attention_mask"] = mask[..., :total]
        elif mask.ndim == 2 and mask.device.type == "cpu" and bool(mask.all()):
            kwargs["attention_mask"] = None

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
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor):
            torch._dynamo.maybe_mark_dynamic(mask, mask.ndim - 1)
            if mask.ndim == 4 and mask.shape[2] > 1:
                torch._dynamo.maybe_mark_dynamic(mask, 2)
        for name in ("input_ids", "inputs_embeds", "position_ids"):
            tensor = kwargs.get(name)
            if isinstance(tensor, Tensor) and tensor.ndim >= 2 and tensor.shape[1] > 1:
                torch._dynamo.maybe_mark_dynamic(tensor, 1)

    def _measure(self, layers: Sequence) -> None:
        """Note the bytes of the cache just used; it may be gone when `explain` asks."""
        for row, layer in zip(self.report.layers, layers, strict=False):
            if isinstance(layer, PackedLayer):
                self.report.tokens, self.report.batch = layer.seen, layer.batch_size
                row.nbytes, row.full_nbytes = layer.nbytes, layer.full_nbytes
                row.host_nbytes, row.moved_nbytes = layer.host_nbytes, layer.moved_nbytes
            elif isinstance(getattr(layer, "keys", None), Tensor):
                row.nbytes = row.full_nbytes = layer.keys.nbytes + layer.values.nbytes

"""The forward that `kvpass.apply` installs in a transformers model: swap the cache's layers, prepare, run, commit."""

import functools
import inspect
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, EncoderDecoderCache

from kvpass.lowering.table import FEW

from ..cache.cache_state import CacheState
from ..cache.cross import running
from ..cache.layer import PackedLayer
from ..cache.query_capture import QueryCapture
from ..cache.swap import cache_layers, cross_layers, layers_of, parts_of, state_of, swap_cross_layers, swap_layers
from ..compile.report import listed
from ..errors import KVPassError, NotCapturedError
from ..models.arguments import CACHE_NAMES, cache_argument
from ..models.probe import as_generate_passes, fresh_cache, some_tokens
from ..models.recording import put_up_hooks, refuse_what_is_not_recorded
from ..models.redundant import MASKS, RedundantArguments
from ..models.unpacked import StoresNoText
from ..schemes import LayerGeometry, SchemeConfig, get
from .forward import finish_forward, remember, start_forward
from .long_prompts import LongPrompts
from .padding import PaddingMasks
from .runtime import Runtime
from .steps.recall import Recalls
from .steps.replay import CAPTURES, Replays


class TransformersRuntime(Runtime):
    """For a model that receives a transformers cache."""

    model: Callable[[], PreTrainedModel]

    def __init__(
        self, model: nn.Module, scheme: SchemeConfig, layers: dict[int, LayerGeometry | str],
        prefill_chunk_size: int | str | None = None, **options,
    ):  # fmt: skip
        super().__init__(model, scheme, layers, **options)
        self.long_prompts = LongPrompts(self, prefill_chunk_size)
        self.made_of = {"layers": layers, **options}
        self.prefix = "decoder_" if self.has_encoder else ""  # prefix of the decoder's arguments
        parameters = inspect.signature(self.original).parameters
        self.parameters = list(parameters)
        self.defaults = {name: parameter.default for name, parameter in parameters.items()}
        self.cache_argument = cache_argument(model)
        self.masks = PaddingMasks(model)
        self.storing_no_text = [row.index for row in self.report.layers if isinstance(row.reason, StoresNoText)]

    def prepare(self) -> None:
        if self.mode == "reduce-overhead" and not self.eager:
            devices = {layer.device for _, layer in self.plans.values()}
            self.report.not_replayed = why = self._not_replayed(devices)
            if not why:
                model, capture = self.model(), CAPTURES.get(devices.pop().type)
                self.replays = Replays(model, self.report.graphs, capture) if capture else Recalls(model, self.report)
        super().prepare()

    def _not_replayed(self, devices: set[torch.device]) -> str:
        """Why whole steps cannot be replayed; empty if they can."""
        if len(devices) > 1 or not {device.type for device in devices} <= {"cpu", *CAPTURES}:
            return f"replay needs the model on a single CPU or CUDA device, and it is on {listed(map(str, devices))}"
        if not all(row.packed for row in self.report.layers):
            return "layers that are not packed reallocate their tensors"
        if self.slides:
            return "layers with a sliding window store another number of tokens than the others"
        if any(layer.states for _, layer in self.plans.values()):
            return "a layer keeps a state besides its keys and values"
        if any(layer.indexer_dim is not None for _, layer in self.plans.values()):
            return "a layer keeps the keys of an indexer, which grow with the cache"
        if self.has_encoder or self.cross:
            return "cross-attention reads a cache of another length"
        if self.looks_at_previous or self.needs_importance:
            return "what a layer stores depends on other layers, or on attention scores"
        return ""

    def install(self) -> None:
        with self.attention:
            self.redundant = RedundantArguments(self.model())
        super().install()
        self.masks.install(self.model())
        try:
            self._try_prompt()
        except BaseException:
            self.uninstall()
            raise

    def _try_prompt(self) -> None:
        """Run a short prompt, if prompts have to be captured and the probe of the model saw layers without SDPA, which
        the pass may not understand. A scheme that does not work is refused here. The graph is that of a prompt of
        ``generate``, and is reused. Raises `KVPassError`."""
        captured = self.one_graph or (self.needs_queries and not self.captures_queries)
        if not captured or all(layer.head_dim in self.attended for _, layer in self.plans.values()):
            return
        model, report = self.model(), self.report
        before, cache = (report.layers, report.tokens, report.batch), fresh_cache(model)
        with torch.no_grad():
            self.forward(**as_generate_passes(model, 1, 2, 2), **{self.cache_argument: cache}, use_cache=True)
        report.used(*before)

    def uninstall(self) -> None:
        self.masks.uninstall(self.model())
        super().uninstall()

    def forward(self, *args, **kwargs):
        """The model's forward over a packed cache."""
        kwargs.update(zip(self.parameters, args, strict=False))
        self._name_cache(kwargs)
        inputs = kwargs.get(f"{self.prefix}input_ids")
        inputs = kwargs.get(f"{self.prefix}inputs_embeds") if inputs is None else inputs
        if inputs is None or not self._uses_cache(kwargs):
            return self.original(**kwargs)
        batch, new_tokens = inputs.shape[:2]
        cache = kwargs.get(self.cache_argument)
        if cache is None:
            cache = kwargs[self.cache_argument] = fresh_cache(self.model())
        with self._alone(cache):
            return self.long_prompts.read(self, cache, batch, new_tokens, kwargs)

    def forward_over(self, cache: Cache, batch: int, new_tokens: int, kwargs):
        """One forward of ``new_tokens`` tokens over ``cache``, whose arguments include the cache."""
        put_back = layers_of(cache)
        state = self.adopt(cache)
        undo = remember(cache, state, self.storing_no_text)
        if self.one_graph:
            refuse_what_is_not_recorded(self.model(), kwargs)
        put_up_hooks(self.model(), kwargs)
        call = cache, state, undo, batch, new_tokens
        try:
            output = self._run(*call, dict(kwargs))
        except NotCapturedError as error:
            try:
                run = self._fall_back(error, state, new_tokens)
            except KVPassError:
                if not state.tokens:
                    put_back()  # so that another scheme can use the cache
                raise
            output = self._run(*call, dict(kwargs), run)
            self._fell_back(error, state, new_tokens)
        self._measure(state, cache_layers(cache))
        return output

    def _run(
        self, cache: Cache, state: CacheState, undo: Callable[[], bool], batch: int, new_tokens: int, kwargs,
        run: Callable | None = None,
    ):  # fmt: skip
        """Run one complete forward over ``cache``, with ``run`` if it is given."""
        stored, seen = start_forward(state, batch, new_tokens), state.seen
        if not stored:
            self._number_tokens(state.layers, kwargs)
        with self._one_forward(state, new_tokens, undo), running(cross_layers(cache), state):
            of_prompt = not stored or new_tokens > FEW
            removable = self._removable(state, kwargs)
            masks = removable.intersection(MASKS)
            state.context.starts = self._set_masks(kwargs, masks, stored + new_tokens, seen + new_tokens, of_prompt)
            self._leave_out(kwargs, removable.difference(MASKS), new_tokens)
            run = run or self._choose(state, new_tokens)
            if not stored and kwargs.get(f"{self.prefix}attention_mask") is None:
                self._expect_steps(batch)
            given = kwargs if run is self.original else self._canonical(kwargs)
            state.context.reads = [] if run is self.original else None
            with self._step(state, new_tokens):
                if self.replays is not None and run is self.decode_step:
                    output = self.replays.run(state, new_tokens, given, lambda given: run(**given))
                else:
                    if isinstance(self.replays, Recalls):
                        self.replays.forget(state)
                    output = run(**given)
            _hand_back(given, kwargs)
        return output

    def _number_tokens(self, layers: list[PackedLayer], kwargs) -> None:
        """For page-relative RoPE by token numbers, count only tokens that are not padding."""
        mask = kwargs.get(f"{self.prefix}attention_mask")
        rows = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
        for layer in layers:
            if layer.rotary is not None:
                layer.rotary.begin(rows)

    def _name_cache(self, kwargs) -> None:
        """Pass the cache under the name that the model uses. Names from other versions of transformers are accepted.
        Raises `KVPassError` if they name different caches."""
        caches = [kwargs.pop(name) for name in CACHE_NAMES if name in kwargs]
        caches = list({id(cache): cache for cache in caches if cache is not None}.values())
        if len(caches) > 1:
            raise KVPassError(
                f"{' and '.join(CACHE_NAMES)} name the same argument but were given different caches: pass "
                f"{self.cache_argument} alone. Prefix tuning, which passes its own cache, is not supported."
            )
        kwargs.update((self.cache_argument, cache) for cache in caches)

    def _uses_cache(self, kwargs) -> bool:
        if self.model().training:
            return False
        if kwargs.get(self.cache_argument) is not None:
            return True
        use_cache = kwargs.get("use_cache")
        config = self.model().config
        for own in (config, config.get_text_config(decoder=True)):
            use_cache = getattr(own, "use_cache", None) if use_cache is None else use_cache
        return use_cache is None or bool(use_cache)

    def adopt(self, cache: Cache) -> CacheState:
        """The state of ``cache``; a fresh cache gets packed layers first. Raises `KVPassError` for a cache that cannot
        be packed, or that another model or call of `kvpass.apply` packed."""
        if not isinstance(cache, Cache):
            raise KVPassError(
                f"{self.cache_argument} is {type(cache).__name__}; pass a transformers DynamicCache, or None. The "
                "paged cache of continuous batching (generate_batch, cache_implementation='paged') is not packed: "
                "call generate with a batch, or kvpass.remove(model)."
            )
        if isinstance(cache, EncoderDecoderCache) != self.has_encoder:
            wanted = "an EncoderDecoderCache" if self.has_encoder else "a DynamicCache"
            raise KVPassError(f"{self.cache_argument} is {type(cache).__name__}; this model needs {wanted}, or None.")
        state = state_of(cache)
        if state is None:
            state = self._swap(cache)
        if state.owner != self.owner:
            raise KVPassError(
                "This cache was packed by another model or by an earlier kvpass.apply, and cannot be read here. Pass "
                "a fresh cache."
            )
        return state

    def _swap(self, cache: Cache) -> CacheState:
        own, put_back = parts_of(cache)[0], layers_of(cache)
        try:
            state = swap_layers(own, self.plans, self.owner, self.lowering, self.max_cache_len, self.predictors)
            if self.cross:
                swap_cross_layers(cache, self.cross, self.owner, self.lowering)
        except BaseException:
            put_back()
            raise
        return state

    def _uncaptured(self, state: CacheState) -> Callable | None:
        alone = self.needs_queries and not (self.needs_rotation or self.needs_importance or state.tokens)
        return self._with_query_capture if alone and self.captures_queries else super()._uncaptured(state)

    def _works(self) -> SchemeConfig:
        return next(filter(self._works_uncaptured, self._simpler()), super()._works())

    def _simpler(self) -> Iterator[SchemeConfig]:
        """Schemes that may work without a graph where this one does not, the most similar first."""
        if getattr(self.scheme, "rope", None) == "pre" and not self.predictors:
            yield get(self.scheme, rope="post")
        yield get("kivi")
        for size in (16, 8, 4, 2):
            yield get("kivi", group_size=size)

    def _works_uncaptured(self, scheme: SchemeConfig) -> bool:
        try:
            other = type(self)(self.model(), scheme, **self.made_of)
        except KVPassError:  # the scheme does not fit the heads
            return False
        other.original = self.original
        return not (other.one_graph or (other.needs_queries and not other.captures_queries))

    def _capture_queries(self) -> Callable:
        return self._with_query_capture if self.captures_queries else self.captured

    def _offer_queries(self) -> Callable:
        return self._with_query_capture

    def _with_query_capture(self, **kwargs):
        """Run the model's own forward over an empty cache, and capture the prompt's queries."""
        capture = QueryCapture(state_of(kwargs[self.cache_argument]), required=self.needs_queries)
        with capture:
            output = self.original(**kwargs)
        capture.check()
        return output

    @functools.cached_property
    def captures_queries(self) -> bool:
        """Whether `_with_query_capture` works for this model. Tries it on two tokens."""
        model = self.model()
        cache = fresh_cache(model)
        state = self.adopt(cache)
        start_forward(state, 1, 2)
        try:
            with torch.no_grad(), running(cross_layers(cache), state):
                self._with_query_capture(**some_tokens(model), **{self.cache_argument: cache}, use_cache=True)
        except KVPassError:
            return False
        finally:
            finish_forward(state, 2, succeeded=False)
        return True

    def _removable(self, state: CacheState, kwargs) -> frozenset[str]:
        """Arguments of a call that are redundant if they have their usual values. There are none once other arguments,
        such as an image, contributed to the cache: no such call was compared with and without them."""
        given = {name: value for name, value in kwargs.items() if value is not None}
        inputs = [name for name, value in given.items() if not isinstance(value, (bool, int, float, str))]
        state.only_tokens = (state.only_tokens or not state.tokens) and self.redundant.compared(inputs)
        return self.redundant.among(given) if state.only_tokens else frozenset()

    def _set_masks(self, kwargs, removable: Collection[str], total: int, seen: int, of_prompt: bool) -> Tensor | None:
        """Cut masks made for a static cache to the tokens there are, and drop a ``removable`` 2-D mask that is known to
        hide nothing (`PaddingMasks`).

        A mask that is too short stays: to transformers it hides the newest tokens. Returns the first token of each row,
        ``[B]`` int64, if left padding is all that the mask of a step expresses.
        """
        name, starts = f"{self.prefix}attention_mask", None
        mask = kwargs.get(name)
        if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] > seen:
            kwargs[name] = mask[:, :seen]
        for own in {"attention_mask", name}:
            padding = kwargs.get(own)
            if not isinstance(padding, Tensor) or padding.ndim != 2 or (own == name and padding.shape[1] < seen):
                continue
            known = self.masks.find(padding, of_prompt)
            if known is not None and known.starts is None:
                if own in removable:
                    del kwargs[own]
            elif known is not None and own == name and not of_prompt and padding.shape[1] == seen == total:
                starts = known.starts
        if isinstance(mask, dict):  # one mask per kind of layer
            packed = [kind for kind in mask if kind in _WHOLE or self.slides]
            long = {kind: mask[kind] for kind in packed if isinstance(mask[kind], Tensor)}
            kwargs[name] = {**mask, **{kind: each[..., :total] for kind, each in long.items()}}
        if not isinstance(mask, Tensor) or mask.ndim != 4:
            return starts
        if seen > total:
            raise KVPassError(
                f"A 4-D mask describes {mask.shape[-1]} keys, but {seen - total} tokens were evicted, different ones "
                "in each head. Pass a 2-D padding mask."
            )
        if mask.shape[-1] > total:
            kwargs[name] = mask[..., :total]
        return None

    def _leave_out(self, kwargs, removable: Collection[str], new_tokens: int) -> None:
        """Drop arguments that change nothing, such as those equal to a default of ``forward``, and put the rest in a
        fixed order. Callers then share graphs."""
        usual = {"logits_to_keep": new_tokens}
        for name, value in list(kwargs.items()):
            default = self.defaults.get(name, _NOT_A_DEFAULT)
            plain = value is None or isinstance(value, (bool, int))
            redundant = name in removable and value == usual.get(name, True)
            if plain and (redundant or (type(value) is type(default) and value == default)):
                del kwargs[name]
        for name in [name for name in self.defaults if name in kwargs]:
            kwargs[name] = kwargs.pop(name)

    def _canonical(self, kwargs) -> dict[str, Any]:
        """``kwargs`` for a graph: contiguous clones of tensors, so that views and strides do not matter, with token
        dimensions marked as dynamic."""
        with torch.inference_mode(False):  # so that writes to the clones are counted
            given = {
                name: value.clone(memory_format=torch.contiguous_format) if isinstance(value, Tensor) else value
                for name, value in kwargs.items()
            }
        for name in MASKS:
            mask = given.get(name)
            if isinstance(mask, Tensor):
                torch._dynamo.maybe_mark_dynamic(mask, mask.ndim - 1)
                if mask.ndim == 4 and mask.shape[2] > 1:
                    torch._dynamo.maybe_mark_dynamic(mask, 2)
        inputs = ("input_ids", "inputs_embeds", "position_ids", "decoder_input_ids", "decoder_inputs_embeds")
        encoded = getattr(given.get("encoder_outputs"), "last_hidden_state", None)
        for tensor in (*map(given.get, inputs), encoded):
            if isinstance(tensor, Tensor) and tensor.ndim >= 2 and tensor.shape[1] > 1:
                torch._dynamo.maybe_mark_dynamic(tensor, 1)
        return given


_NOT_A_DEFAULT = object()
_WHOLE = "full_attention", "indexed_attention"
"""Kinds of layers that keep all tokens, as transformers names them in a dict of masks."""


def _hand_back(given: dict[str, Any], kwargs: dict[str, Any]) -> None:
    """Copy what the model wrote to its arguments ``given``, which are clones, to the caller's arguments."""
    for name, value in given.items():
        own = kwargs[name]
        if value is not own and value._version:
            own.copy_(value)

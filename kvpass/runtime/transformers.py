"""The forward that `kvpass.apply` puts in front of a model: swap, prepare, run, commit."""

import functools
import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, EncoderDecoderCache

from kvpass.lowering.table import FEW

from ..cache.cross import running
from ..cache.layer import PackedLayer
from ..cache.query_capture import QueryCapture
from ..cache.swap import cache_layers, cross_layers, packed_layers, swap_cross_layers, swap_layers
from ..compile.report import listed
from ..errors import KVPassError
from ..models.arguments import CACHE_NAMES, cache_argument
from ..models.probe import fresh_cache, some_tokens
from ..models.recording import put_up_hooks, refuse_what_is_not_recorded
from .forward import finish_forward, remember, start_forward
from .padding import PaddingMasks
from .recall import Recalls
from .replay import CAPTURES, Replays
from .runtime import Runtime


class TransformersRuntime(Runtime):
    """For a model that is handed a cache of transformers: it is swapped, prepared, run over and committed."""

    model: Callable[[], PreTrainedModel]

    def __init__(self, model: nn.Module, *args, **options):
        super().__init__(model, *args, **options)
        self.prefix = "decoder_" if self.has_encoder else ""  # of the decoder's arguments
        self.parameters = list(inspect.signature(self.original).parameters)
        self.cache_argument = cache_argument(model)
        self.masks = PaddingMasks(model)

    def prepare(self) -> None:
        if self.mode == "reduce-overhead" and not self.eager:
            devices = {layer.device for _, layer in self.plans.values()}
            self.report.not_replayed = why = self._not_replayed(devices)
            if not why:
                model, capture = self.model(), CAPTURES.get(devices.pop().type)
                self.replays = Replays(model, self.report.graphs, capture) if capture else Recalls(model, self.report)
        super().prepare()

    def _not_replayed(self, devices: set[torch.device]) -> str:
        """Why whole steps cannot be captured, or ""."""
        if len(devices) > 1 or not {device.type for device in devices} <= {"cpu", *CAPTURES}:
            return f"they are of one CPU or CUDA device, and this model is on {listed(map(str, devices))}"
        if not all(row.packed for row in self.report.layers):
            return "layers that are not packed replace their tensors"
        if self.has_encoder or self.looks_at_previous or self.needs_importance:
            return "what a layer stores depends on more than its own tokens"
        return ""

    def install(self) -> None:
        super().install()
        self.masks.install(self.model())

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
            return self._forward_over(cache, batch, new_tokens, kwargs)

    def _forward_over(self, cache: Cache, batch: int, new_tokens: int, kwargs):
        layers, undo = self.adopt(cache), remember(cache)
        if self.one_graph:
            refuse_what_is_not_recorded(self.model(), kwargs)
        put_up_hooks(self.model(), kwargs)
        stored, seen = start_forward(layers, batch, new_tokens), layers[0].seen
        if not stored:
            self._number_tokens(layers, kwargs)
        with self._one_forward(layers, new_tokens, undo), running(cross_layers(cache), layers[0]):
            of_prompt = not stored or new_tokens > FEW
            layers[0].context.starts = self._set_masks(kwargs, stored + new_tokens, seen + new_tokens, of_prompt)
            self._drop_defaults(kwargs, seen, new_tokens)
            run = self._choose(layers[0], new_tokens)
            if not stored and kwargs.get(f"{self.prefix}attention_mask") is None:
                self._expect_steps(batch)
            if run is not self.original:
                self._canonicalise(kwargs)
            if self.replays is not None and run is self.decode_step:
                output = self.replays.run(layers, new_tokens, kwargs, lambda given: run(**given))
            else:
                if isinstance(self.replays, Recalls):
                    self.replays.forget(layers[0])
                output = run(**kwargs)
        self._measure(cache_layers(cache))
        return output

    def _number_tokens(self, layers: list[PackedLayer], kwargs) -> None:
        """Where frames of keys go by the numbers of tokens, count those that are no padding."""
        mask = kwargs.get(f"{self.prefix}attention_mask")
        rows = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
        for layer in layers:
            if layer.rotary is not None:
                layer.rotary.begin(rows)

    def _name_cache(self, kwargs) -> None:
        """Call the cache what the model calls it: the names it has in other versions of transformers are as good."""
        caches = [kwargs.pop(name) for name in CACHE_NAMES if name in kwargs]
        caches = list({id(cache): cache for cache in caches if cache is not None}.values())
        if len(caches) > 1:
            raise KVPassError(
                f"{' and '.join(CACHE_NAMES)} are names of one argument, and were given different caches: pass "
                f"{self.cache_argument} alone."
            )
        kwargs.update((self.cache_argument, cache) for cache in caches)

    def _uses_cache(self, kwargs) -> bool:
        if self.model().training:
            return False
        if kwargs.get(self.cache_argument) is not None:
            return True
        use_cache = kwargs.get("use_cache")
        return bool(getattr(self.model().config, "use_cache", True) if use_cache is None else use_cache)

    def adopt(self, cache: Cache) -> list[PackedLayer]:
        """The packed layers of ``cache``, swapped in if it is fresh. Raises `KVPassError` for what cannot be packed."""
        if not isinstance(cache, Cache):
            raise KVPassError(
                f"{self.cache_argument} is {type(cache).__name__}; pass a transformers DynamicCache, or none. The "
                "paged cache of continuous batching (generate_batch, cache_implementation='paged') is not packed: use "
                "generate with a batch, or kvpass.remove(model)."
            )
        if isinstance(cache, EncoderDecoderCache) != self.has_encoder:
            wanted = "an EncoderDecoderCache" if self.has_encoder else "a DynamicCache"
            raise KVPassError(f"{self.cache_argument} is {type(cache).__name__}; this model needs {wanted}, or none.")
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
        own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
        parts = [own, cache.cross_attention_cache] if isinstance(cache, EncoderDecoderCache) else [own]
        before = [(part, list(part.layers), part.layer_class_to_replicate) for part in parts]
        try:
            swap_layers(own, self.plans, self.owner, self.lowering, self.max_cache_len, self.predictors)
            if self.cross and isinstance(cache, EncoderDecoderCache):
                swap_cross_layers(cache, self.cross, self.owner, self.lowering)
        except BaseException:
            for part, layers, replicated in before:
                part.layers[:], part.layer_class_to_replicate = layers, replicated
            raise

    def _capture_queries(self) -> Callable:
        return self._with_query_capture if self.captures_queries else self.captured

    def _with_query_capture(self, **kwargs):
        """The model's own forward over an empty cache, which is handed the prompt's queries."""
        capture = QueryCapture(packed_layers(kwargs[self.cache_argument]))
        with capture:
            output = self.original(**kwargs)
        capture.check()
        return output

    @functools.cached_property
    def captures_queries(self) -> bool:
        """Whether `_with_query_capture` works for this model. Tries it on two tokens."""
        model = self.model()
        cache = fresh_cache(model)
        layers = self.adopt(cache)
        start_forward(layers, 1, 2)
        try:
            with torch.no_grad(), running(cross_layers(cache), layers[0]):
                self._with_query_capture(**some_tokens(model), **{self.cache_argument: cache}, use_cache=True)
        except KVPassError:
            return False
        finally:
            finish_forward(layers, 2, succeeded=False)
        return True

    def _set_masks(self, kwargs, total: int, seen: int, of_prompt: bool) -> Tensor | None:
        """Cut masks made for a static cache to the tokens there are, and drop a 2-D one that is known to hide nothing
        (`PaddingMasks`). One that is too short stays: to transformers it hides the newest tokens. Returns where rows
        begin, if that is all that the mask of a step says.
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
                kwargs[own] = None
            elif known is not None and own == name and not of_prompt and padding.shape[1] == seen == total:
                starts = known.starts
        if isinstance(mask, dict):  # one for each kind of layer; only full attention is packed
            full = mask.get("full_attention")
            if isinstance(full, Tensor) and full.shape[-1] > total:
                kwargs[name] = {**mask, "full_attention": full[..., :total]}
        if not isinstance(mask, Tensor) or mask.ndim != 4:
            return starts
        if seen > total:
            raise KVPassError(
                f"A 4-D mask says for {mask.shape[-1]} keys who sees them, and {seen - total} tokens were evicted, "
                "others in each head. Pass a 2-D padding mask."
            )
        if mask.shape[-1] > total:
            kwargs[name] = mask[..., :total]
        return None

    def _drop_defaults(self, kwargs, seen: int, new_tokens: int) -> None:
        """Drop what says no more than leaving it out, so that every caller shares one graph, whatever the order of what
        is left. Positions are compared where that does not wait for the device."""
        config = self.model().config
        defaults: dict[str, int] = {name: True for name in ("use_cache", "return_dict") if getattr(config, name, True)}
        defaults["logits_to_keep"] = new_tokens
        for name, value in list(kwargs.items()):
            if value is None or (isinstance(value, int) and defaults.get(name) == value):
                del kwargs[name]
        for name in ("position_ids", "cache_position"):
            positions = kwargs.get(name)
            if not isinstance(positions, Tensor) or positions.device.type != "cpu":
                continue
            if positions.shape[-1:] == (new_tokens,) and (positions == torch.arange(seen, seen + new_tokens)).all():
                del kwargs[name]
        for name in sorted(kwargs):
            kwargs[name] = kwargs.pop(name)

    def _canonicalise(self, kwargs) -> None:
        """Token dims of the inputs vary from call to call; what they are views of, and strides of dims of size 1, mean
        nothing."""
        for name, tensor in kwargs.items():
            if isinstance(tensor, Tensor):
                kwargs[name] = tensor.clone(memory_format=torch.contiguous_format)
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

"""`PackedLayer`: one layer of a transformers cache, stored in two packed states."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..codec.predictor import with_below
from ..errors import KVPassError, NotCapturedError
from ..layout.window import SEEN_OFFSET, length_of
from ..schemes import LayerGeometry, LayerPlan
from .adaptive_state import AdaptiveState
from .cache_state import CacheState
from .deferred import LayerRead
from .layer_storage import LayerStorage
from .refusals import READ_BACK, TWICE, refuse_number_of_tokens, refuse_place, removed_tokens, selected_rows, stored
from .state import KVState
from .tensor import PackedKV

_UNCAPTURED = "its layers ran outside any captured graph"


class PackedLayer(LayerStorage, CacheLayerMixin):
    """A transformers cache layer that stores keys and values in a `KVState` each.

    ``update`` reads the stored past, appends the present, and returns the past followed by the present. The length
    advances once per forward, for all layers together, so a graph sees the same length throughout. To the model the
    layer behaves like a `DynamicLayer`.
    """

    is_croppable = True
    is_sliding = False
    is_cross = False

    def __init__(self, plan: LayerPlan, geometry: LayerGeometry, cache: CacheState):
        # not CacheLayerMixin.__init__: it assigns keys and values, which are views of the state here
        LayerStorage.__init__(self, plan, geometry, cache)
        cache.layers.append(self)

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        """False for ``generate``, which must not compile steps itself. While kvpass captures a step over sliding
        windows, True makes transformers build masks of any length instead of leaving them out of short ones, which
        would need a second graph."""
        return self.cache.slides and torch.compiler.is_dynamo_compiling()

    @stored
    def is_initialized(self) -> bool:
        """Whether the layer has received tokens, in an earlier forward or in this one. Memory may be allocated
        before."""
        return self.cache.filled or self.updated

    @stored
    def keys(self) -> Tensor | None:
        """The stored keys as a ``[B, H_k, n, D_k]`` tensor that dequantizes when read."""
        return self._view(self.key_state) if self.is_initialized else None

    @stored
    def values(self) -> Tensor | None:
        """The stored values as a ``[B, H_v, n, D_v]`` tensor that dequantizes when read."""
        return self._view(self.value_state) if self.is_initialized else None

    def refuse_reading(self) -> None:
        """Raise `KVPassError` if keys and values cannot be read now."""
        if self.updated:
            raise KVPassError(READ_BACK)
        if self.cache.context is None:
            self.cache.refuse_unless_whole()

    def _view(self, state: KVState) -> Tensor:
        self.refuse_reading()
        if self.plan.looks_at_previous or self.plan.adaptive:
            return state.dequantize(self.tokens, self.cache.lowering)
        if self.cache.context is not None and torch.compiler.is_dynamo_compiling():
            return self._dequantize(state, None)  # a subclass would share storage with other inputs of the graph
        if state.spec.transform.page_rope:  # another layer may hold the rotary tables
            return state.dequantize(self.tokens, self.cache.lowering)
        return PackedKV.view(state, self.tokens)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise KVPassError(
            "A packed cache layer is initialized by its first forward: call model(...) or model.generate(...)."
        )

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        context = self.cache.context
        if context is None:
            raise KVPassError(
                "A packed cache was updated outside the model that kvpass was applied to. Call model(...) or "
                "model.generate(...) instead of a submodule, or pass the submodule a cache of its own."
            )
        self._refuse_other_tokens(key_states)
        past = deferred = None
        as_stored = key_states.dtype == value_states.dtype == self.geometry.dtype  # not under autocast
        if context.reads is not None and self.can_defer and as_stored and length_of(context.length):
            self._read_uncaptured()
            read = LayerRead(self, key_states, value_states)
            context.reads.append(weakref.ref(read))
            deferred = read.tensors()
        elif torch.compiler.is_dynamo_compiling() or length_of(context.length):
            past = self.read()
        if context.query_capture is None:
            self.append(key_states, value_states)
        else:
            context.query_capture.wait(self, key_states, value_states)
        self.updated = True
        if deferred is not None:
            return deferred
        if past is None:
            return key_states, value_states
        return torch.cat((past[0], key_states), 2), torch.cat((past[1], value_states), 2)

    @property
    def can_defer(self) -> bool:
        """Whether attention may read the past as it is stored after the present has been stored, without a graph: see
        `LayerRead`."""
        plan, device = self.plan, self.geometry.device.type
        needs_dense = self.predicts_next or plan.looks_at_previous or plan.adaptive or plan.evicts
        return device == "cpu" and not (needs_dense or torch.is_autocast_enabled(device))

    def _refuse_other_tokens(self, key_states: Tensor) -> None:
        """Raise `KVPassError` for a second update in one forward, or if the cache has no room for this many tokens.
        They may differ from the tokens of ``input_ids``, except in a graph, which is made for their number: there this
        raises `NotCapturedError`."""
        if self.updated:
            raise KVPassError(TWICE)
        batch, _, tokens, _ = key_states.shape
        same = tokens == self.cache.context.new_tokens
        if torch.compiler.is_dynamo_compiling():
            if same:
                return
            refuse_number_of_tokens()
        if not same or batch != self.cache.batch:
            self.cache.context.expect(batch, tokens)

    def read(self) -> tuple[Tensor, Tensor]:
        """The past as attention sees it, with rotated keys. The dequantized past is passed on to the layer above if
        that layer is predicted from it."""
        if not torch.compiler.is_dynamo_compiling():
            self._read_uncaptured()
        context = self.cache.context
        k_below, v_below = context.past if self.plan.looks_at_previous else (None, None)
        keys = self._dequantize(self.key_state, k_below)
        values = self._dequantize(self.value_state, v_below, keys)
        context.past = None
        if self.predicts_next:
            layers = self.plan.layers_below
            context.past = with_below(keys, k_below, layers), with_below(values, v_below, layers)
        if self.plan.key.transform.pre_rope:
            rotary = self.rotary_owner.rotary
            keys = torch.ops.kvpass.rotate(keys, rotary.cos, rotary.sin, "")
        return keys, values

    def _read_uncaptured(self) -> None:
        """Record that the model's own Python reads the layer outside a graph. Raises `NotCapturedError` if the keys
        need a graph."""
        if self.plan.key.transform.turns:
            raise NotCapturedError(_UNCAPTURED)
        if self.cache.context.uncaptured is not None:
            self.cache.context.uncaptured(self)

    def _refuse_unless_captured(self, queries: bool) -> None:
        """Raise `NotCapturedError` if storing the present needs a graph, because this runs outside one. ``queries``:
        whether the queries of the call are available."""
        missing = self.plan.needs_queries and not queries and not length_of(self.cache.context.length)
        if self.plan.key.transform.turns or self.plan.needs_importance or missing:
            raise NotCapturedError(_UNCAPTURED)

    def append(self, keys: Tensor, values: Tensor, q: Tensor | None = None, mask: Tensor | None = None) -> None:
        """Store the present, ``[B, H_k, S, D_k]`` and ``[B, H_v, S, D_v]``.

        q, mask: queries ``[B, H_q, S, D]`` and mask of the attention that reads the present, when there is no graph to
            find them in.
        """
        if not torch.compiler.is_dynamo_compiling():
            self._refuse_unless_captured(queries=q is not None)
        keys, values = map(self._placed, (keys, values))
        same_layer_keys = self._append(self.key_state, keys, 0, q=q, mask=mask)
        self._append(self.value_state, values, 1, same_layer_keys)

    def _dequantize(
        self, state: KVState, previous_layer: Tensor | None, same_layer_keys: Tensor | None = None
    ) -> Tensor:
        if not state.spec.transform.predictor:
            previous_layer = same_layer_keys = None
        return torch.ops.kvpass.dequantize(
            state.handles, self.length, state.text, self.cache.lowering, previous_layer, same_layer_keys,
            list(state.predictor), list(state.pooled_planes), **state.tables(""), starts=self.starts,
        )  # fmt: skip

    def _append(
        self, state: KVState, x: Tensor, which: int, same_layer_keys: Tensor | None = None, q: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor | None:  # fmt: skip
        context = self.cache.context
        edge = None if context.edges is None else context.edges[which]
        torch.ops.kvpass.append_(
            state.handles, self.length, x, q, mask, state.text, self.cache.lowering, edge, same_layer_keys,
            list(state.predictor), self.importance.weights if which == 0 and self.importance else None, None,
            context.slots[self.deciding_heads] if self.plan.evicts else None,
            state.host.tokens if isinstance(state, AdaptiveState) else None, **state.tables(""),
            keys=state.keys,
        )  # fmt: skip
        return edge

    def _placed(self, x: Tensor) -> Tensor:
        """Keys or values in the dtype of the layer. Under autocast they may be narrower, and the wider dtype holds them
        exactly. Raises `KVPassError` for any other dtype, or another device."""
        dtype, device = self.geometry.dtype, self.geometry.device
        if (x.dtype, x.device) == (dtype, device):
            return x
        narrower = x.device == device and torch.promote_types(x.dtype, dtype) == dtype
        if narrower and torch.is_autocast_enabled(device.type):
            return x.to(dtype)
        return refuse_place(x.dtype, x.device, dtype, device)

    def _stored(self) -> int:
        """Number of tokens stored before the running forward, if there is one; symbolic while a graph is captured."""
        context = self.cache.context
        return self.tokens if context is None else length_of(context.length)

    def get_seq_length(self) -> int:
        context = self.cache.context
        if context is None:
            return self.seen
        seen = length_of(context.seen_length, SEEN_OFFSET) if self.plan.evicts else self._stored()
        return seen + context.new_tokens if self.updated else seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        # the stored tokens count as the newest tokens seen, so they are in the past of every query
        stored = self._stored()
        if self.updated:
            stored += self.cache.context.new_tokens
        return stored + query_length, self.get_seq_length() - stored

    def get_max_length(self) -> int:
        return self.max_cache_len or -1

    def reset(self) -> None:
        """Forget all tokens, and make an inconsistent cache usable again."""
        with self.cache.resetting(self):
            for state in self.states():
                state.reset()
            self.updated = False

    def crop(self, tokens_to_remove: int) -> None:
        cache, old, removed = self.cache, self.tokens, -removed_tokens(tokens_to_remove)
        new, total = max(0, old - removed), max(0, cache.tokens - removed)
        whole, seen = cache.whole, cache.seen - (cache.tokens - total)
        changing = cache.changing(self, "crop", tokens=total, seen=seen, crops=cache.crops + 1)
        for layer in cache.layers if whole else ():  # before any of them changes
            layer.refuse_crop(removed)
        if not all(state.lossless_crop(new) for state in self.states()):
            warnings.warn(
                f"crop from {old} to {new} tokens goes back beyond the residual window, which now holds some "
                "dequantized values instead of exact ones. Crop fewer tokens to avoid this.",
                stacklevel=3,
            )
        with changing:
            for state in self.states():
                state.crop(old, new, self.cache.lowering)
            self.cropped(new, total)

    def _select_batch(self, choose: Callable[[Tensor], Tensor]) -> None:
        cache = self.cache
        rows = None if cache.batch < 0 else selected_rows(choose, cache.batch, self.geometry.device)
        batch = -1 if rows is None else len(rows)
        with cache.changing(self, "select rows", batch=batch, edits=cache.edits + 1):
            for storage in self.storages():
                storage.map_(lambda tensor: tensor.index_select(0, rows.to(tensor.device)))
            if rows is not None:
                self.selected(rows)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select_batch(lambda rows: rows[torch.as_tensor(beam_idx, device=rows.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select_batch(lambda rows: rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select_batch(lambda rows: rows[indices.to(rows.device) if isinstance(indices, Tensor) else indices])

    def offload(self) -> None:
        raise KVPassError(
            "A packed cache stays on its device and cannot be offloaded. To free the memory, call "
            "kvpass.save_cache(cache, path), and later kvpass.load_cache(path, model)."
        )

    prefetch = offload

"""`LayerStorage`: what one layer of a cache stores, and its part in a forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..codec.spec import CodecSpec
from ..errors import KVPassError
from ..schemes import Heads, LayerGeometry, LayerPlan
from .adaptive_state import AdaptiveState
from .cache_state import CacheState
from .per_cache import Importance, RecentAttention, RotaryState
from .state import KVState, ModelTensors, SharedTensors, Storage


class LayerStorage:
    """Keys and values in a `KVState` each, and what their schemes keep beside them. It belongs to the cache with the
    state ``cache``, whose forwards `start` it and then `commit` or `abandon` what it has written."""

    def __init__(self, plan: LayerPlan, geometry: LayerGeometry, cache: CacheState):
        self.plan, self.geometry, self.cache = plan, geometry, cache
        self.key_state: KVState | None = None
        self.value_state: KVState | None = None
        self.key_source: LayerStorage | None = None  # layers whose quantized values this one dequantizes with
        self.value_source: LayerStorage | None = None
        self.rotary_owner = self  # the layer that keeps the rotary tables of this one
        self.rotary: RotaryState | None = None
        self.previous_layer: LayerStorage | None = None  # the layer this one is predicted from
        self.predictors: tuple[SharedTensors, SharedTensors] | None = None
        self.predicts_next = False  # another layer is predicted from this one
        self.importance_owner = self  # the layer that decides what is evicted here
        self.importance: Importance | None = None
        self.updated = False  # in the running forward

    @property
    def tokens(self) -> int:
        """Number of tokens stored; the same in every layer of the cache."""
        return self.cache.tokens

    @property
    def seen(self) -> int:
        """Number of tokens ever stored, including evicted ones."""
        return self.cache.seen

    @property
    def starts(self) -> Tensor | None:
        """During a forward, the first token of each row after its padding, if attention gets that instead of a
        mask."""
        return self.cache.context.starts

    @property
    def max_cache_len(self) -> int | None:
        """The maximum number of tokens that the cache may store; None if there is no limit."""
        return self.cache.max_cache_len

    @property
    def _capacity(self) -> int | None:
        """The number of tokens to allocate memory for at once; None if it grows."""
        return self.max_cache_len

    @property
    def length(self) -> Tensor:
        """During a forward, the length tensor of the tokens stored before it."""
        return self.cache.context.length

    @property
    def is_allocated(self) -> bool:
        """Whether the layer has memory for tokens."""
        return self.key_state is not None

    def states(self) -> list[KVState]:
        """The key state and the value state; empty before the first forward."""
        return [self.key_state, self.value_state] if self.is_allocated else []

    @property
    def nbytes(self) -> int:
        """Bytes of this layer, slack included. Quantized values of another layer and shared rotary tables count in the
        layer that owns them."""
        return sum(one.nbytes for one in self.storages()) + sum(held.nbytes for held in self.beside().values())

    def beside(self) -> dict[str, Tensor]:
        """What the layer keeps exact besides keys and values, by name."""
        return {}

    def fill_beside(self, saved: Mapping[str, Tensor]) -> None:
        """Set what an empty layer keeps besides keys and values to ``saved``, by the names of `beside`."""

    def storages(self) -> list[Storage]:
        """Every `Storage` that this layer owns."""
        return [item for item in (*self.states(), self.rotary, self.importance) if item is not None]

    def _adaptive_states(self) -> list[AdaptiveState]:
        return [state for state in self.states() if isinstance(state, AdaptiveState)]

    @property
    def host_nbytes(self) -> int:
        """Bytes of original tokens kept in host memory."""
        states = self._adaptive_states()
        return sum(state.host.nbytes for state in states if state.spec.quantizer.adaptive.keep_originals)

    @property
    def moved_nbytes(self) -> int:
        """Bytes of original tokens fetched from host memory so far."""
        return sum(state.host.moved_nbytes for state in self._adaptive_states())

    @property
    def full_nbytes(self) -> int:
        """Bytes that the tokens seen would take in full precision, in the cache's dtype."""
        per_token = self.geometry.values_per_token * self.geometry.dtype.itemsize
        return max(self.cache.batch, 0) * self.seen * per_token

    @property
    def deciding_heads(self) -> int:
        """Number of heads that choose independently which tokens are evicted."""
        return 1 if self.plan.key.retention.shared else self.geometry.num_key_value_heads

    def start(self, new_tokens: int) -> None:
        """Start a forward of ``new_tokens`` tokens. There must be room for them."""
        if self.importance is not None:
            self.importance.end(succeeded=False)  # the forward may have been prepared for other sizes
            self.importance.start(self.tokens, new_tokens)

    def allocate(self, batch: int, tokens: int) -> None:
        """Make room for ``tokens`` tokens, except for evicted ones. Stored tokens are preserved."""
        retention = self.plan.key.retention
        stored = max(self.tokens, retention.stored(tokens))
        self._allocate(batch, self._capacity or stored)
        for state in self.states():
            state.reserve(stored)
        if self.importance is not None:
            self.importance.reserve(stored)
        if self.rotary is not None:  # `attend` reads whole pages of the tables, two at least
            self.rotary.reserve(max(tokens, retention.sinks + 2 * retention.page_size))

    def _shared(self, name: str) -> SharedTensors | None:
        """The tensors of the model's calibration for the state called ``name``; None if the plan uses none."""
        if not self.plan.shares_out:
            return None
        keys, values = self.predictors
        if name == "value_state":
            return values
        return keys if self.angles is None else ModelTensors(keys[1:])

    @property
    def angles(self) -> Tensor | None:
        """The angle by which each pair of key channels rotates from one token to the next, if page-relative RoPE uses
        token numbers. It is the first calibrated tensor for keys."""
        return self.predictors[0][0] if self.plan.key.transform.numbered else None

    def _allocate(self, batch: int, tokens: int) -> None:
        if self.is_allocated:
            return
        geometry = self.geometry
        place = (geometry.dtype, geometry.device)

        def state(spec: CodecSpec, heads: Heads, source: LayerStorage | None, name: str) -> KVState:
            room = (*heads, *place)
            if spec.quantizer.adaptive is not None:
                return AdaptiveState.allocate_in(self.cache.pool, spec, batch, *room, tokens)
            if source is not None:
                source._allocate(batch, tokens)
            source_state = None if source is None else getattr(source, name)
            return KVState.allocate(spec, batch, *room, tokens, source_state, self._shared(name))

        new: dict[str, Any] = {
            "key_state": state(self.plan.key, geometry.heads[0], self.key_source, "key_state"),
            "value_state": state(self.plan.value, geometry.heads[1], self.value_source, "value_state"),
        }
        if self.plan.key.transform.keeps_tables and self.rotary_owner is self:
            new["rotary"] = RotaryState(self.plan.key, batch, geometry.head_dim, *place, tokens, self.angles)
        if self.plan.key.transform.page_rope:
            if self.rotary_owner is not self:
                self.rotary_owner._allocate(batch, tokens)
            new["key_state"].rotary = new.get("rotary", self.rotary_owner.rotary)
        if self.plan.value.quantizer.follows_keys:
            new["value_state"].same_layer_keys = new["key_state"]
        if self.plan.calibrated:
            for name, tensors in zip(("key_state", "value_state"), self.predictors, strict=True):
                new[name].calibrate(tensors)
        if self.plan.needs_importance and self.importance_owner is self:
            own = batch, self.deciding_heads, geometry.device, tokens
            new["importance"] = RecentAttention(self.plan.key, *own) if self.plan.adaptive else Importance(*own)
        if self.plan.looks_at_previous:
            self.previous_layer._allocate(batch, tokens)
            both = new["key_state"], new["value_state"]
            both[1].same_layer_keys = both[0]
            for mine, previous, predictor in zip(both, self.previous_layer.states(), self.predictors, strict=True):
                if mine.spec.transform.predictor:
                    mine.previous_layer, mine.predictor = previous, predictor
                    mine.layers_below = self.plan.layers_below
        vars(self).update(new)  # all or nothing

    def forget(self) -> None:
        """Drop all storage."""
        self.key_state = self.value_state = self.rotary = self.importance = None
        self.updated = False

    def commit(self, stored: int, total: int, gone: int) -> None:
        """End a forward that stored tokens ``[stored, total)``. ``gone`` tokens, old or new, are evicted."""
        self._wrote(stored, total)
        for state in self.states():
            state.evicted(gone)
        now = total - gone
        for adaptive in self._adaptive_states() if self.plan.adaptive else ():
            if adaptive.due(now):
                importance: Any = self.importance  # a `RecentAttention`
                adaptive.requantize(now, importance.largest(now))
        if self.importance is not None:
            self.importance.end()

    def abandon(self, stored: int, total: int) -> bool:
        """Take back tokens ``[stored, total)`` of a failed forward. Returns whether the layer is restored. It is not if
        they may have overwritten slots of the window."""
        self._wrote(stored, total)
        if self.importance is not None:
            self.importance.end(succeeded=False)
        return all(state.lossless_crop(stored) for state in self.states())

    def _wrote(self, stored: int, total: int) -> None:
        for state in self.states():
            state.wrote(stored, total)
        self.updated = False

    def refuse_crop(self, removed: int) -> None:
        """Raise `KVPassError` if the layer cannot remove the last ``removed`` tokens."""
        least = self.plan.key.retention.sinks + (self.plan.key.retention.budget or 0)
        if self.seen > self.tokens and self.tokens - removed < least:
            raise KVPassError(
                f"crop({-removed}): tokens were evicted, and only the last {self.tokens - least} remaining tokens are "
                "still in order. Crop fewer tokens."
            )

    def cropped(self, n: int, total: int) -> None:
        """Complete `crop`, after which this layer stores ``n`` of the ``total`` tokens of the cache."""
        if self.importance is not None:
            self.importance.crop(n)

    def selected(self, rows: Tensor) -> None:
        """Complete a selection of the ``rows`` of the batch."""

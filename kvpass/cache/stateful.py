"""Layers with a recurrent or convolution state besides keys and values: the state stays as the model keeps it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor
from transformers.cache_utils import LinearAttentionCacheLayerMixin as _Mixin
from transformers.cache_utils import LinearAttentionLayer

from ..errors import KVPassError
from ..schemes import LayerGeometry, LayerPlan
from .cache_state import CacheState
from .layer import PackedLayer
from .sliding import SlidingLayer


class StatefulLayer(LinearAttentionLayer, PackedLayer):  # type: ignore[override]
    """A packed layer of full attention with a state, like `LinearAttentionAndFullAttentionLayer`.
    `LinearAttentionLayer` keeps the state; what concerns the whole layer happens to keys and values too."""

    is_compileable = PackedLayer.is_compileable
    running = False

    def __init__(self, plan: LayerPlan, geometry: LayerGeometry, cache: CacheState):
        LinearAttentionLayer.__init__(self, number_of_states=geometry.states)
        super(_Mixin, self).__init__(plan, geometry, cache)

    def beside(self) -> dict[str, Tensor]:
        found = {f"{name}.{i}": state for name, states in states_of(self) for i, state in states.items()}
        return {name: state for name, state in found.items() if state is not None}

    def fill_beside(self, saved: Mapping[str, Tensor]) -> None:
        for name, states in states_of(self):
            for number in states:
                if (state := saved.get(f"{name}.{number}")) is None:
                    continue
                if name == "conv_states":
                    self.lazy_initialization(conv_states=state.to(self.geometry.device), state_idx=number)
                    self.has_previous_state[number] = True
                else:
                    self.lazy_initialization(recurrent_states=state.to(self.geometry.device), state_idx=number)
                states[number].copy_(state)

    def start(self, new_tokens: int) -> None:
        super(_Mixin, self).start(new_tokens)
        self.running = True

    def commit(self, stored: int, total: int, gone: int) -> None:
        super(_Mixin, self).commit(stored, total, gone)
        self.running = False

    def abandon(self, stored: int, total: int) -> bool:
        running, self.running = self.running, False  # the model writes its state in place
        return super(_Mixin, self).abandon(stored, total) and not running

    def forget(self) -> None:
        super(_Mixin, self).forget()
        recorded = self.record_past
        LinearAttentionLayer.__init__(self, number_of_states=self.number_of_states)
        self.record_past, self.running = recorded, False

    def reset(self) -> None:
        super(_Mixin, self).reset()
        recorded = self.record_past
        LinearAttentionLayer.__init__(self, number_of_states=self.number_of_states)
        self.record_past = recorded

    def selected(self, rows: Tensor) -> None:
        super(_Mixin, self).selected(rows)
        for states in (self.conv_states, self.recurrent_states):
            for index, state in states.items():
                if state is not None:
                    states[index] = state.index_select(0, rows.to(state.device))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super(_Mixin, self).reorder_cache(beam_idx)

    def refuse_crop(self, removed: int) -> None:
        super(_Mixin, self).refuse_crop(removed)
        what = f"crop({-removed}): layer {self.geometry.index} keeps a"
        if removed and any(self.is_recurrent_states_initialized.values()):
            raise KVPassError(
                f"{what} recurrent state besides its keys and values, and no earlier state. Run the prompt again, or "
                "keep a copy of the cache (copy.deepcopy) to go back to."
            )
        if removed and not self.record_past:
            raise KVPassError(
                f"{what} convolution state besides its keys and values, and earlier states only if "
                "cache.activate_past_recording() is called before the first forward."
            )

    def cropped(self, n: int, total: int) -> None:
        super(_Mixin, self).cropped(n, total)
        if self.record_past and not any(self.is_recurrent_states_initialized.values()):
            LinearAttentionLayer.crop(self, total - self.cache.tokens)

    def crop(self, tokens_to_remove: int) -> None:
        super(_Mixin, self).crop(tokens_to_remove)

    def get_max_length(self) -> int:
        return super(_Mixin, self).get_max_length()

    def offload(self) -> None:
        super(_Mixin, self).offload()

    prefetch = offload


class StatefulSlidingLayer(StatefulLayer, SlidingLayer):  # type: ignore[override]
    """A packed layer with a sliding window and a state, like `LinearAttentionAndSlidingWindowAttentionLayer`."""


def states_of(layer: object) -> Iterator[tuple[str, dict[int, Tensor | None]]]:
    """The states of a cache layer by name, each by its number; nothing if it keeps none."""
    if isinstance(layer, LinearAttentionLayer):
        yield from (("conv_states", layer.conv_states), ("recurrent_states", layer.recurrent_states))

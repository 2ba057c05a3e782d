"""Layers with a sliding window: tokens behind the window are freed a page at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..codec.layer_pages import share_of
from ..codec.shares import Shares
from ..codec.spec import CodecSpec
from ..codec.tensors import of_model
from ..errors import KVPassError
from ..layout.window import length_of, offset_of
from ..schemes import CalibratedWaterfillConfig, LayerGeometry, LayerPlan, SchemeConfig
from ..schemes.geometry import Heads
from .layer import PackedLayer
from .state import KVState, SharedTensors

_EXACT = 32  # at most one in this many tokens of a window stays exact, besides those that wait for a page to fill
_PAYS = 0.9  # of the bytes of the exact window; less does not make up for quantizing it

_NOT_EVICTED = (
    "sparse attention: its indexer selects tokens by their numbers, which eviction changes. It stays in full "
    "precision; to pack it, use the scheme without a budget"
)


class SlidingLayer(PackedLayer):
    """A packed layer with a sliding window.

    To the model's own code it behaves like a `DynamicSlidingWindowLayer`: it returns the last ``window - 1`` stored
    tokens and the new ones. A captured graph sees all stored tokens, which reach up to a page and `rollback` tokens
    further back, and ``kvpass::attend`` hides those behind the window.

    behind: number of tokens that were freed. The layer stores the others.
    """

    is_sliding = True
    can_defer = False  # the model sees only the tokens in the window
    record_past = False  # whether the layer keeps all tokens until the next `crop`
    behind = 0

    @property
    def tokens(self) -> int:
        """Number of tokens stored, those behind the window that are not freed yet included."""
        return self.cache.tokens - self.behind

    @property
    def window(self) -> int:
        """How many tokens a query sees, itself included."""
        span = self.plan.key.retention.span
        assert span is not None
        return span

    @property
    def _capacity(self) -> None:
        return None

    @property
    def length(self) -> Tensor:
        return self.cache.context.window_lengths[self.plan.key.retention]

    @property
    def starts(self) -> None:
        return None

    @property
    def full_nbytes(self) -> int:
        """Bytes that the tokens in the window would take in full precision."""
        seen = self.seen
        return super().full_nbytes // seen * min(seen, self.window - 1) if seen else 0

    def activate_past_recording(self) -> None:
        """Free nothing before the next `crop`."""
        self.record_past = True

    def _view(self, state: KVState) -> Tensor:
        """The tokens in the window, ``[B, H, min(n, window - 1), D]``."""
        self.refuse_reading()
        stored = state.dequantize(self.tokens, self.cache.lowering)
        return stored[:, :, self.plan.key.retention.hidden(self.tokens) :]

    def _stored(self) -> int:
        context = self.cache.context
        return self.tokens if context is None else length_of(self.length, offset_of(self.plan.key.retention))

    def read(self) -> tuple[Tensor, Tensor]:
        keys, values = super().read()
        if torch.compiler.is_dynamo_compiling():
            return keys, values
        hidden = self.plan.key.retention.hidden(keys.shape[2])
        return keys[:, :, hidden:], values[:, :, hidden:]

    def get_seq_length(self) -> int:
        context = self.cache.context
        if context is None:
            return self.seen
        seen = length_of(context.length)
        return seen + context.new_tokens if self.updated else seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        seen = self.get_seq_length()
        if not torch.compiler.is_dynamo_compiling():
            visible = min(seen, self.window - 1)
        else:
            visible = self._stored() + (self.cache.context.new_tokens if self.updated else 0)
        return visible + query_length, seen - visible

    def get_max_length(self) -> int:
        return self.window

    def allocate(self, batch: int, tokens: int) -> None:
        super().allocate(batch, tokens - self.behind)

    def commit(self, stored: int, total: int, gone: int) -> None:
        super().commit(stored - self.behind, total - self.behind, gone)
        if not self.record_past:
            self.free(total - self.behind)

    def abandon(self, stored: int, total: int) -> bool:
        return super().abandon(stored - self.behind, total - self.behind)

    def free(self, n: int) -> None:
        """Free what is behind the window if ``n`` tokens are stored."""
        if gone := self.plan.key.retention.freed(n):
            for state in self.states():
                state.free(n, gone)
            if self.rotary is not None:
                self.rotary.free(n, gone)
            self.behind += gone

    def forget(self) -> None:
        super().forget()
        self.behind = 0

    def reset(self) -> None:
        super().reset()
        self.behind = 0

    def refuse_crop(self, removed: int) -> None:
        most = self.tokens - self.plan.key.retention.sinks - (self.window - 1)
        if self.behind and most < removed < self.cache.tokens:
            raise KVPassError(
                f"crop({-removed}): tokens that would be in the window of {self.window} tokens again were freed, so "
                f"only the last {most} tokens can be removed. Crop fewer tokens, or call "
                "cache.activate_past_recording() before the forward that adds them."
            )

    def cropped(self, n: int, total: int) -> None:
        super().cropped(n, total)
        if not total:
            self.behind = 0
        elif self.record_past:
            self.free(n)


def plans_of(
    scheme: SchemeConfig, layers: Mapping[int, LayerGeometry | str]
) -> tuple[dict[int, tuple[LayerPlan, LayerGeometry]], dict[int, LayerGeometry | str]]:
    """The plans of self-attention layers under ``scheme``, and ``layers`` with the reasons for those with a sliding
    window that have no plan. Raises `KVPassError` if none has a plan."""
    plans, found = {}, dict(layers)
    for index, layer in layers.items():
        if isinstance(layer, str) or layer.cross:
            continue
        plan = plan_for(scheme, layer)
        if layer.indexer_dim is not None and isinstance(plan, LayerPlan) and plan.evicts:
            plan = _NOT_EVICTED
        if isinstance(plan, str):
            found[index] = plan
        else:
            plans[index] = plan, layer
    if not plans:
        reasons = sorted({layer for layer in found.values() if isinstance(layer, str)})
        raise KVPassError(f"{scheme.name!r} packs no layer of this model: {'; '.join(reasons)}.")
    return plans, found


def plan_for(scheme: SchemeConfig, layer: LayerGeometry) -> LayerPlan | str:
    """The plan of ``layer``, of full attention or with a sliding window, or the reason why it is not packed."""
    return scheme.plan_of(layer) if layer.window is None else sliding_plan(scheme, layer)


def sliding_plan(scheme: SchemeConfig, layer: LayerGeometry) -> LayerPlan | str:
    """The plan of ``layer``, which has a sliding window, or the reason why it is not packed."""
    assert layer.window is not None
    what = f"sliding-window attention: the layer keeps at most {layer.window} tokens"
    try:
        plan = scheme.plan_of(layer)
    except KVPassError as error:
        return f"{what}, and {error} It stays in full precision"
    if why := _unsuited(plan):
        return f"{what}, and {why}. It stays in full precision"
    try:
        key, value = (_sliding(spec, layer.window) for spec in (plan.key, plan.value))
    except KVPassError:
        return f"{what}, hardly more than this scheme keeps exact. It stays in full precision"
    exact = (layer.window - 1) * layer.values_per_token * layer.dtype.itemsize
    packed = sum(_most_bytes(*each, layer, scheme) for each in zip((key, value), layer.heads, strict=True))
    if packed > _PAYS * exact and not key.quantizer.raw:  # unquantized pages are for tests
        return (
            f"{what}. Packed, it would take {packed:,} bytes instead of {exact:,}, because some tokens stay exact, so "
            "it stays in full precision"
        )
    return replace(plan, key=key, value=value)


def _unsuited(plan: LayerPlan) -> str:
    """Why a plan cannot serve a sliding window; empty if it can."""
    key, value = plan.key.retention, plan.value.retention
    if plan.evicts or plan.adaptive or key.keep != "recent":
        return "this scheme selects which tokens it keeps"
    if plan.looks_at_previous or plan.key_source is not None or plan.value_source is not None:
        return "this scheme reads other layers"
    if plan.calibrated:
        return "this scheme is calibrated for layers of full attention"
    if (key.page_size, key.sinks, key.rollback) != (value.page_size, value.sinks, value.rollback):
        return "this scheme packs keys and values in pages of different sizes"
    return ""


def _sliding(spec: CodecSpec, span: int) -> CodecSpec:
    """``spec`` for a window of ``span`` tokens. Of a short window, fewer of the newest tokens always stay exact."""
    retention = spec.retention
    window = retention.page_size + min(retention.residual, span // _EXACT)
    return replace(spec, retention=replace(retention, window=window, span=span))


def _most_bytes(spec: CodecSpec, heads: Heads, layer: LayerGeometry, scheme: SchemeConfig) -> int:
    """The most bytes that a state takes between two calls. With calibrated bit widths: if all coordinates had the
    expected bit width, rounded up."""
    shared: SharedTensors | None = None
    if isinstance(scheme, CalibratedWaterfillConfig):
        widths = torch.full((heads.number, Shares.of(spec).ranks, heads.dim), math.ceil(scheme.expected_bits(layer)))
        shared = SharedTensors(share_of(widths) if name == "share" else None for name in of_model(spec))
    meta, most = torch.device("meta"), spec.retention.most
    return KVState.allocate(spec, 1, *heads, layer.dtype, meta, most, shared=shared).nbytes

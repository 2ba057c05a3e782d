"""`ForwardContext`: the state of one forward over a cache."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from ..layout.retention import Retention

if TYPE_CHECKING:
    from .deferred import LayerRead
    from .layer import PackedLayer
    from .query_capture import QueryCapture


@dataclass
class ForwardContext:
    """What the layers of a cache share during one forward.

    length, seen_length, window_lengths: length tensors of the stored tokens; of all tokens seen (None unless the scheme
        evicts); and of the tokens that layers with a sliding window store, by their retention policy.
    arriving: ``[tokens, 0]``, where ``tokens`` is the number of tokens that every layer is about to store. As a shape,
        the number is symbolic in a graph.
    expect: called with the batch size and the number of tokens that the first layer receives, before anything is
        stored, if they differ from those announced. It replaces ``arriving`` and makes room. Raises `KVPassError` if
        the tokens do not fit the cache.
    starts: ``[B]`` int64, the number of left-padding tokens of each row; None unless padding is all that the mask
        expresses.
    edges: scratch space for the keys and values that leave the window, as dequantized in one layer and those below it.
    slots: number of deciding heads -> ``[B, heads, budget]`` int64, which passes an eviction decision on to other
        layers.
    past: the dequantized past of one layer and those below it, kept until the layer above has used it.
    query_capture: the `QueryCapture` that delivers queries when there is no graph; otherwise None.
    reads: the reads of layers that attention runs without a graph; None if a graph runs.
    hooked: whether hooks inside the model prevent this step from being compiled.
    uncaptured: called with each layer that the model's own Python reads during a step that should be compiled.
    """

    length: Tensor
    arriving: Tensor | None = None
    expect: Callable[[int, int], None] | None = None
    seen_length: Tensor | None = None
    window_lengths: dict[Retention, Tensor] = field(default_factory=dict)
    starts: Tensor | None = None
    edges: tuple[Tensor, Tensor] | None = None
    slots: dict[int, Tensor] = field(default_factory=dict)
    past: tuple[Tensor, Tensor] | None = None
    query_capture: QueryCapture | None = None
    uncaptured: Callable[[PackedLayer], None] | None = None
    reads: list[weakref.ref[LayerRead]] | None = None
    hooked: bool = False

    @property
    def new_tokens(self) -> int:
        """Tokens that every layer stores in this forward."""
        return self.arriving.shape[0]

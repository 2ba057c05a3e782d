"""What lives for one forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from .layer import PackedLayer
    from .query_capture import QueryCapture


@dataclass
class ForwardContext:
    """What the layers of a cache have in common while a forward is running over them.

    length, seen_length: length tensors of what is stored, and of what was seen where that is more.
    arriving: ``[tokens, 0]``, as long as the tokens that every layer is about to store. Its shape makes the number
        symbolic in a graph.
    expect: changes ``arriving``, and makes room, before the first layer has stored anything: the batch size and the
        number of tokens that this layer is handed. Raises `KVPassError` if they do not fit the cache.
    starts: ``[B]`` int64, tokens of left padding before those of each row, if a mask says no more than that.
    edges: room for one layer's reconstruction of the keys and values that leave the window.
    slots: heads that decide -> ``[B, heads, budget]`` int64, where a decision to evict is handed on.
    past: what one layer dequantized, until the layer above has its turn.
    query_capture: who hands over the queries, where no graph does.
    hooked: whether hooks within the model keep this step from being compiled.
    uncaptured: called by each layer that is read by the model's own Python in a step that is to be compiled.
    """

    length: Tensor
    arriving: Tensor | None = None
    expect: Callable[[int, int], None] | None = None
    seen_length: Tensor | None = None
    starts: Tensor | None = None
    edges: tuple[Tensor, Tensor] | None = None
    slots: dict[int, Tensor] = field(default_factory=dict)
    past: tuple[Tensor, Tensor] | None = None
    query_capture: QueryCapture | None = None
    uncaptured: Callable[[PackedLayer], None] | None = None
    hooked: bool = False

    @property
    def new_tokens(self) -> int:
        """Tokens that every layer stores in this forward."""
        return self.arriving.shape[0]

"""`CacheState`: the state that the packed layers of one cache share, such as its length."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ..errors import KVPassError
from ..layout.retention import Retention
from .adaptive_state import PlanePool
from .context import ForwardContext

if TYPE_CHECKING:
    from .layer import PackedLayer

_RESET = "reset"
_EMPTY: dict[str, Any] = dict(tokens=0, seen=0, edits=0, crops=0, filled=False, context=None)


@dataclass(frozen=True)
class _Change:
    """A change of a whole cache that some of its layers have made and others have not.

    name: the kind of change.
    result: attributes of the `CacheState` after the change.
    left: the layers that have not made the change yet.
    """

    name: str
    result: dict[str, Any]
    left: tuple[PackedLayer, ...]


class CacheState:
    """The state of one cache, shared by all its packed layers.

    Each layer has its own tensors. Everything that is true of the whole cache is stored here once, so layers cannot
    disagree. A cache with an encoder has two states, one for self-attention and one for cross-attention.

    layers: the packed layers, in model order.
    owner: id of the `kvpass.apply` call that made the cache.
    lowering: the implementation that runs the ops of its layers.
    max_cache_len: the maximum number of tokens; None if there is no limit.
    pool: bit planes of the layers whose tokens have individual bit widths; None if there are no such layers.
    tokens, seen: the number of tokens that are stored, and that were ever stored. They differ after an eviction.
    batch: rows that memory is allocated for; -1 if there is none.
    filled: whether a forward has succeeded since the cache was created or reset.
    edits, crops: how often rows were selected, and tokens cropped, since then.
    whole: False during a change, and permanently if the change failed and could not be rolled back.
    context: the `ForwardContext` of the running forward; None between forwards.
    drafts: the number of consecutive calls of a few tokens, up to the last call.
    slides: whether some of the layers have a sliding window.
    only_tokens: whether everything stored was computed from token ids alone, and not, for instance, from an image.
    """

    def __init__(self, owner: str, lowering: str, max_cache_len: int | None):
        self.owner, self.lowering, self.max_cache_len = owner, lowering, max_cache_len
        self.layers: list[PackedLayer] = []
        self.pool: PlanePool | None = None
        self.tokens = self.seen = self.edits = self.crops = self.drafts = 0
        self.batch = -1
        self.filled = self.only_tokens = self.slides = False
        self.whole = True
        self.context: ForwardContext | None = None
        self._change: _Change | None = None

    @property
    def device(self) -> torch.device:
        """The device of the first layer, where length tensors are."""
        return self.layers[0].geometry.device

    @property
    def retention(self) -> Retention:
        """The retention policy of the first layer's keys. All layers evict the same number of tokens
        (`schemes.check_edges`)."""
        return self.layers[0].plan.key.retention

    def refuse_unless_whole(self) -> None:
        """Raise `KVPassError` during a change of the cache, and after a change or a forward that failed halfway."""
        if self._change is not None:
            raise KVPassError(
                "The layers of this cache are inconsistent: reordering, selecting, cropping or resetting it failed or "
                "was interrupted. Pass a fresh cache, or call cache.reset()."
            )
        if not self.whole:
            raise KVPassError(
                "This cache is inconsistent: a forward failed or was interrupted and could not be rolled back. Pass a "
                "fresh cache, or call cache.reset()."
            )

    def changing(self, layer: PackedLayer, name: str, **result: Any) -> AbstractContextManager[None]:
        """A context in which ``layer`` makes its part of the change ``name`` of the whole cache.

        Transformers calls the layers one by one. After the last layer the attributes ``result`` of the cache take
        effect, all at once. Until then, and if a layer fails, the cache is inconsistent.

        Raises `KVPassError`, before the context is entered, if the cache is already inconsistent or if other layers
        have started a different change.
        """
        change = self._change
        if change is None or layer not in change.left:
            self.refuse_unless_whole()
            change = _Change(name, result, tuple(self.layers))
        elif (change.name, change.result) != (name, result):
            self.refuse_unless_whole()
        return self._part(layer, change)

    def resetting(self, layer: PackedLayer) -> AbstractContextManager[None]:
        """Like `changing`, for ``reset``. This is always possible: an inconsistent cache drops its storage first."""
        change = self._change
        if change is None or layer not in change.left or change.name != _RESET:
            if not self.whole:
                self.forget()
            change = _Change(_RESET, _EMPTY, tuple(self.layers))
        return self._part(layer, change)

    @contextmanager
    def _part(self, layer: PackedLayer, change: _Change) -> Iterator[None]:
        self.whole, self._change = False, None  # after a failed layer, the others cannot continue the change
        yield
        if left := tuple(other for other in change.left if other is not layer):
            self._change = replace(change, left=left)
        else:
            vars(self).update(change.result, whole=True)  # one call: no interrupt comes between

    def allocate(self, batch: int, tokens: int) -> None:
        """Make room for ``tokens`` tokens in ``batch`` rows, except for evicted tokens. Stored tokens are lost if the
        number of rows changes."""
        if self.batch != batch:
            self.forget()
        self.batch = batch
        for layer in self.layers:
            layer.allocate(batch, tokens)

    def prepare(self, batch: int, new_tokens: int, context: ForwardContext) -> None:
        """Make room for ``new_tokens`` more tokens and start a forward in ``context``."""
        self.allocate(batch, self.tokens + new_tokens)
        for layer in self.layers:
            layer.start(new_tokens)
        self.context = context
        if self.pool is not None:
            self.pool.refresh()

    def commit(self, new_tokens: int) -> None:
        """End a forward that stored ``new_tokens`` tokens in every layer."""
        self.context, total = None, self.tokens + new_tokens
        gone = self.retention.evicted(total)
        for layer in self.layers:
            layer.commit(self.tokens, total, gone)
        if self.pool is not None:
            self.pool.refresh()
        vars(self).update(tokens=total - gone, seen=self.seen + new_tokens, filled=True)

    def abandon(self, new_tokens: int) -> bool:
        """Roll back a failed forward of ``new_tokens`` tokens. Returns whether the cache is restored. It is not if new
        tokens may have overwritten slots of the window, or if tokens were evicted."""
        self.context, total = None, self.tokens + new_tokens
        restored = [layer.abandon(self.tokens, total) for layer in self.layers]
        return all(restored) and not self.retention.evicted(total)

    def forget(self) -> None:
        """Drop all storage."""
        self.batch, self.filled = -1, False
        for layer in self.layers:
            layer.forget()
        if self.pool is not None:
            self.pool.states.clear()

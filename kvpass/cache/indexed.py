"""Layers of sparse attention: keys and values are packed, the keys of the indexer stay exact."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .layer import PackedLayer

_BATCH_DIM = {"indexer_keys": 0, "indexer_position_ids": 1}
"""What an indexer keeps -> its dim of rows."""


class IndexedLayer(PackedLayer):
    """A packed layer of full attention with an indexer, like `DynamicIndexedLayer`.

    The indexer scores all tokens by keys of its own, and attention reads those with the highest scores. Its keys stay
    as the model computes them, because rounded ones would select other tokens.

    indexer_keys: ``[B, n, C]``; None before the first token, and in a layer that uses another layer's selection.
    indexer_position_ids: ``[P, B, n]``, which some models keep in their first indexed layer.
    """

    indexer_keys: Tensor | None = None
    indexer_position_ids: Tensor | None = None
    _before: dict[str, Tensor | None] | None = None  # at the start of the running forward

    @property
    def is_indexer_initialized(self) -> bool:
        """Whether the indexer has received tokens."""
        return self.indexer_keys is not None

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Store the indexer's keys of the call, ``[B, S, C]``. Returns those of all tokens, ``[B, n + S, C]``."""
        stored = self.indexer_keys
        keys = indexer_key_states if stored is None else torch.cat((stored, indexer_key_states), 1)
        self.indexer_keys = keys
        return keys

    def beside(self) -> dict[str, Tensor]:
        return {name: held for name in _BATCH_DIM if (held := getattr(self, name)) is not None}

    def fill_beside(self, saved: Mapping[str, Tensor]) -> None:
        for name in _BATCH_DIM:
            held = saved.get(name)
            setattr(self, name, None if held is None else held.to(self.geometry.device))

    def start(self, new_tokens: int) -> None:
        super().start(new_tokens)
        if self._before is None:  # a forward may be prepared twice
            self._before = {name: getattr(self, name) for name in _BATCH_DIM}
            if self.indexer_keys is not None and self.tokens > 1:
                torch._dynamo.maybe_mark_dynamic(self.indexer_keys, 1)

    def commit(self, stored: int, total: int, gone: int) -> None:
        super().commit(stored, total, gone)
        self._before = None

    def abandon(self, stored: int, total: int) -> bool:
        if self._before is not None:
            vars(self).update(self._before)
        self._before = None
        return super().abandon(stored, total)

    def forget(self) -> None:
        super().forget()
        self.fill_beside({})

    def reset(self) -> None:
        super().reset()
        self.fill_beside({})

    def selected(self, rows: Tensor) -> None:
        super().selected(rows)
        for name, held in self.beside().items():
            setattr(self, name, held.index_select(_BATCH_DIM[name], rows.to(held.device)))

    def cropped(self, n: int, total: int) -> None:
        removed = self.cache.tokens - total
        super().cropped(n, total)
        if removed and self.indexer_keys is not None:
            self.indexer_keys = self.indexer_keys[:, :-removed]
        if removed and self.indexer_position_ids is not None:
            self.indexer_position_ids = self.indexer_position_ids[..., :-removed]

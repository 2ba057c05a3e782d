"""The class of packed layer for each kind of cache layer of transformers."""

from typing import NamedTuple

from transformers import cache_utils

from ..schemes import LayerGeometry
from .indexed import IndexedLayer
from .layer import PackedLayer
from .sliding import SlidingLayer
from .stateful import StatefulLayer, StatefulSlidingLayer


class _Kind(NamedTuple):
    """A class of packed layers, and the names of the classes of `transformers.cache_utils` that it replaces, of which
    older versions lack some."""

    packed: type[PackedLayer]
    replaced: tuple[str, str]


_FULL = _Kind(PackedLayer, ("DynamicLayer", "StaticLayer"))
_SLIDING = _Kind(SlidingLayer, ("DynamicSlidingWindowLayer", "StaticSlidingWindowLayer"))
_INDEXED = _Kind(IndexedLayer, ("DynamicIndexedLayer", "StaticIndexedLayer"))
_STATEFUL = _Kind(StatefulLayer, ("LinearAttentionAndFullAttentionLayer", "LinearAttentionAndStaticFullAttentionLayer"))
_STATEFUL_SLIDING = _Kind(
    StatefulSlidingLayer,
    ("LinearAttentionAndSlidingWindowAttentionLayer", "LinearAttentionAndStaticSlidingWindowAttentionLayer"),
)


def _kind(geometry: LayerGeometry) -> _Kind:
    if geometry.indexer_dim is not None:
        return _INDEXED
    if geometry.states:
        return _STATEFUL if geometry.window is None else _STATEFUL_SLIDING
    return _FULL if geometry.window is None else _SLIDING


def layer_class(geometry: LayerGeometry) -> type[PackedLayer]:
    """The class of a packed layer with ``geometry``."""
    return _kind(geometry).packed


def replaced_by(geometry: LayerGeometry) -> tuple[type, ...]:
    """The classes of transformers' cache layers that a packed layer with ``geometry`` replaces."""
    names = _kind(geometry).replaced
    return tuple(found for name in names if (found := getattr(cache_utils, name, None)) is not None)

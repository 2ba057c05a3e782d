"""Masks that are pure structure: computed from lengths alone, and equivalent to no mask or to causality.

transformers builds a mask whenever it is traced, even if eager code would use none. What such a mask hides is *proven*
for every length, from how its elements are computed (`kvpass.compile.elements`). A mask that depends on data, or about
which nothing can be proven, stays.
"""

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .elements import Elements, Unproven, whole
from .evaluate import constant, leaves, upstream
from .linear import Linear
from .nodes import Size, is_tensor, shape, value_of

PADDING = "kvpass_padding"
"""``meta`` key of inputs that may be padding masks, if the cache knows where its rows begin."""


def structure(mask: Node, queries: Size, unpadded: bool = False, span: int | None = None) -> str | None:
    """What ``mask`` amounts to for ``queries`` queries (possibly symbolic), at every length the graph serves.

    "full": every query sees every key. "causal": causality aligned to the last key. None: it depends on data, is
    anything else, or cannot be proven to be one of them.

    unpadded: assume that padding masks among its inputs, ``[B, T]`` integers or booleans, hide nothing.
    span: consider only keys within the sliding window of the first query, which sees ``span`` keys; others are hidden
        anyway.
    """
    nodes = upstream(mask)
    data = [node for node in leaves(nodes) if constant(node) is None]
    if data and not (unpadded and all(_may_be_padding(node, shape(mask)[0]) for node in data)):
        return None
    try:
        return _proven(Elements(nodes), mask, queries, span)
    except Unproven:
        return None


def mark_padding(graph: Graph, query: Tensor) -> None:
    """Mark the inputs of ``graph`` that may be padding masks, for calls with the queries ``[B, H, S, D]``."""
    for node in graph.find_nodes(op="placeholder"):
        if not _may_be_padding(node, query.shape[0]):
            continue
        if Linear.size(shape(node)[1]) != Linear.size(query.shape[2]):  # unlike inputs that come with each token
            node.meta[PADDING] = True


def beside_padding(mask: Node, queries: Size) -> str | None:
    """What ``mask`` amounts to (see `structure`) apart from a padding mask ``[B, T]`` of ones and zeros, one for each
    key, whose zeros hide a key from all queries of its row. None if that cannot be proven."""
    nodes = upstream(mask)
    data = [node for node in leaves(nodes) if constant(node) is None]
    batch = shape(mask)[0]
    if len(data) != 1 or not _may_be_padding(data[0], batch):
        return None
    try:
        rows, columns = map(whole, shape(data[0]))
        if rows != whole(batch):  # one row for the whole batch
            return None
        more = columns - whole(shape(mask)[-1])
        kind = _proven(Elements(nodes, facts=(more, -more)), mask, queries)
        return kind if kind and _hidden_by(Elements(nodes, 0, (more, -more)), mask, data[0]) else None
    except Unproven:
        return None


def _hidden_by(elements: Elements, mask: Node, padding: Node) -> bool:
    """Whether zeros in ``padding`` make every element of ``mask`` hide its key, and each element reads only its own row
    and key."""
    index = tuple(map(elements.anywhere, shape(mask)))
    if any(_allowed(value) for _, value in elements.cases(mask, index)):
        return False
    return elements.read <= {(padding, (index[0], index[-1]))}


def _may_be_padding(node: Node, batch: Size) -> bool:
    if not is_tensor(node) or value_of(node).ndim != 2 or value_of(node).dtype.is_floating_point:
        return False
    rows = Linear.size(shape(node)[0])
    return rows is None or bool(rows.terms) or rows == Linear.size(batch)  # a lookup table has another, fixed size


def _proven(elements: Elements, mask: Node, queries: Size, span: int | None = None) -> str | None:
    sizes = shape(mask)
    index = tuple(map(elements.anywhere, sizes))
    if span is not None:
        elements.facts.add(index[-1] - (whole(sizes[-1]) - whole(queries)) + (span - 1))
    verdicts = [(given, _allowed(value)) for given, value in elements.cases(mask, index)]
    if all(allowed for _, allowed in verdicts):
        return "full"
    if len(sizes) < 2 or whole(sizes[-2]) != whole(queries):
        return None
    row, column = index[-2:]
    ahead = column - row - (whole(sizes[-1]) - whole(queries))
    same = all(not elements.possible({*given, ahead - 1 if allowed else -ahead}) for given, allowed in verdicts)
    return "causal" if same else None


def _allowed(value: Tensor | Linear) -> bool:
    """Whether an element of a mask lets a query see a key. Raises `Unproven` for a bias that neither allows nor hides
    it."""
    if isinstance(value, Linear):
        raise Unproven
    if value.dtype == torch.bool or value == 0:
        return value.dtype != torch.bool or bool(value)
    if value.dtype.is_floating_point and value <= torch.finfo(value.dtype).min / 2:
        return False
    raise Unproven

"""Sinks: logits that take part in the softmax of attention without a value, one for each head or for each query.

They are concatenated after the scores and sliced off after the softmax, or the output is multiplied by
``sigmoid(logsumexp(scores) - sink)``, which is the same.
"""

from typing import NamedTuple

import torch
from torch.fx import Node

from .calls import compute
from .nodes import operand, operands, shape
from .softmax import CASTS, SAME_VALUES, NotUnderstood

aten = torch.ops.aten


def concatenated(node: Node) -> tuple[Node, Node | None]:
    """The scores in ``cat([scores, sinks])``, and the sinks ``[1, H, 1, 1]`` or ``[B, H, S, 1]``, or None if there are
    none."""
    whole = node
    while whole.target in CASTS:
        whole = operand(whole)
    if whole.target is not aten.cat.default or len(operands(whole)) != 2:
        return node, None
    scores, sinks = operands(whole)
    while sinks.target in (aten.expand.default, *CASTS):
        sinks = operand(sinks)
    if len(shape(sinks)) != 4 or shape(sinks)[1::2] != (shape(scores)[1], 1) or whole.args[1] not in (3, -1):
        raise NotUnderstood("something other than one logit per head or query is concatenated after the scores")
    return scores, sinks


def of_heads(sinks: Node) -> bool:
    """Whether all queries of a head have the same sink."""
    batch, _, queries, _ = shape(sinks)
    return (batch, queries) == (1, 1)


class Rescaling(NamedTuple):
    """``output = attended * sigmoid(logsumexp(scores) - sinks)``.

    logsumexp: the node that reads the scores.
    sinks: ``[1, H, 1]`` or ``[1, H, 1, 1]``.
    """

    logsumexp: Node
    sinks: Node
    output: Node

    def by_head(self) -> Node:
        """The sinks ``[1, H, 1, 1]``."""
        if len(shape(self.sinks)) == 4:
            return self.sinks
        with self.sinks.graph.inserting_after(self.sinks):
            return compute(self.sinks.graph, aten.unsqueeze.default, self.sinks, -1)


def rescaling(scores: Node, attended: Node) -> Rescaling | None:
    """How sinks rescale ``attended`` ``[B, H, S, D]``, the product of values and the softmax of ``scores``
    ``[B, H, S, T]``; None if they do not, or in another way."""
    found = [user for user in scores.users if user.target is aten.logsumexp.default]
    if len(found) != 1 or len(shape(scores)) != 4 or len(attended.users) != 1:
        return None
    (logsumexp,), (output,) = found, attended.users
    if list(logsumexp.args[1]) not in ([-1], [3]):  # type: ignore[arg-type]
        return None
    node, sinks = _after(logsumexp), None
    if node is not None and node.target is aten.sub.Tensor and not node.kwargs:
        less, sinks = node.args
        node = _after(node) if isinstance(less, Node) and _is_cast_of(less, logsumexp) else None
    if node is None or not isinstance(sinks, Node) or node.target is not aten.sigmoid.default:
        return None
    one_per_head = (1, shape(scores)[1], *[1] * (len(shape(logsumexp)) - 2))
    scale = _after(node)
    if scale is not None and scale.target is aten.unsqueeze.default and scale.args[1] in (-1, 3):
        scale = _after(scale)
    if scale is not output or output.target is not aten.mul.Tensor or shape(output) != shape(attended):
        return None
    return Rescaling(logsumexp, sinks, output) if shape(sinks) == one_per_head else None


def _after(node: Node) -> Node | None:
    """The only node that reads ``node``, or its casts; None if there are several."""
    while len(node.users) == 1:
        (node,) = node.users
        if node.target not in CASTS | SAME_VALUES:
            return node
    return None


def _is_cast_of(node: Node, original: Node) -> bool:
    while node is not original and node.target in CASTS | SAME_VALUES:
        node = operand(node)
    return node is original

"""From the product of queries and keys to the softmax: scaling, softcap, and any additions or fills.

Additions are not matched by how they are written. The nodes in between are affine in the scores, so running them on
zeros gives the bias: masks before or after scaling, filled in or added, ALiBi.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, Node

from .calls import argument, compute
from .nodes import function_of, number, operand, shape, value_of

aten = torch.ops.aten

SAME_VALUES = {
    aten.clone.default,
    aten.contiguous.default,
    aten.alias.default,
    aten.detach.default,
    aten.dropout.default,
}
CASTS = {aten.to.dtype, aten._to_copy.default, aten.type_as.default, aten.to.other}
PRODUCTS = {aten.matmul.default, aten.bmm.default}
_FILLS: dict[Any, int] = {
    aten.masked_fill.Scalar: 0,
    aten.masked_fill.Tensor: 0,
    aten.where.self: 1,
    aten.where.ScalarOther: 1,
}
"""Ops that replace some scores by other values -> index of the argument with the scores."""


class NotUnderstood(Exception):
    """Why an attention was not matched."""


def only_user(node: Node, what: str, besides: Node | None = None) -> Node:
    """The only node that reads ``node``, which is called ``what`` in the error, not counting ``besides``. Raises
    `NotUnderstood` if there are others."""
    users = [user for user in node.users if user is not besides]
    if len(users) == 1:
        return users[0]
    if any(_is_returned(user) for user in users):
        raise NotUnderstood(f"{what} are returned: leave out output_attentions")
    listed = ", ".join(dict.fromkeys(str(user.target) for user in users))
    raise NotUnderstood(f"{what} are also used outside the path to the output: by {listed or 'nothing'}")


def _is_returned(node: Node) -> bool:
    """Whether ``node`` is an output of its graph, or only converts or reshapes for one."""
    while node.op == "call_function" and node.target in SAME_VALUES | CASTS and len(node.users) == 1:
        node = next(iter(node.users))
    return node.op == "output"


@dataclass
class Scores:
    """``softcap * tanh(scale * q.k / softcap) + bias``, or without the softcap if it is 0.

    product: the node that multiplies ``query`` and ``keys`` (transposed), ``[B, H, S, T]`` or ``[B * H, S, T]``.
    chain: the nodes after it (after the softcap) up to the softmax, in order, if they add or fill in anything.
    """

    product: Node
    query: Node
    keys: Node
    scale: float
    softcap: float
    chain: list[Node] = field(default_factory=list)


def read_scores(node: Node, besides: Node | None = None) -> Scores:
    """Walk from the softmax's input back to the product. ``besides`` may also read that input. Raises
    `NotUnderstood`."""
    chain: list[Node] = []
    biased, factor, cap = False, 1.0, 0.0
    while node.target not in PRODUCTS and node.target is not aten.baddbmm.default:
        if node.op != "call_function":
            raise NotUnderstood(f"scores come from {node.op} {node.name} instead of a product with the keys")
        only_user(node, "the attention scores", besides)
        scalar = number(node, 1)
        if node.target is aten.mul.Tensor and scalar is not None:
            factor *= scalar
        elif node.target is aten.div.Tensor and scalar is not None:
            factor /= scalar
        elif node.target is aten.tanh.default and not cap:
            cap, factor, kept, biased_after = factor, 1.0, chain, biased
            chain, biased = [], False
        elif (node.target is aten.add.Tensor and scalar is None and not node.kwargs) or node.target in _FILLS:
            biased = True
        elif not (node.target in CASTS | SAME_VALUES or node.target is aten.reshape.default or _only_bounds(node)):
            raise NotUnderstood(f"{node.target} is applied where scores are multiplied, scaled or masked")
        chain.append(node)
        node = _input(node)
    alibi = node.target is aten.baddbmm.default
    query, keys = (operand(node, 1), operand(node, 2)) if alibi else (operand(node, 0), operand(node, 1))
    biased, scale = biased or alibi, factor * argument(node, "alpha") if alibi else factor
    if cap:
        if biased:
            raise NotUnderstood("a bias is added before the softcap")
        chain, biased = kept, biased_after
    # scores = cap * tanh(factor * q.k): as an op, scale is what multiplies q.k before the division by softcap
    return Scores(node, query, keys, scale * cap if cap else scale, cap, chain[::-1] if biased else [])


def _only_bounds(node: Node) -> bool:
    """Whether ``node`` replaces only scores that hide a token anyway: those below the least number of its dtype."""
    if node.target is not aten.maximum.default and node.target is not aten.max.other:
        return False
    bound = operand(node, 1)
    value = number(bound, 1) if bound.target is aten.full.default else None
    return value is not None and value <= torch.finfo(value_of(node).dtype).min / 2


def _input(node: Node) -> Node:
    """The argument of a chain node that holds the scores."""
    return operand(node, _FILLS.get(node.target, 0))


def insert_bias(graph: Graph, scores: Scores, like: Node) -> Node | None:
    """Nodes at the insertion point that compute the bias of the scores, ``[B or 1, H or 1, S or 1, T]`` in the dtype of
    ``like``. A mask that is only added is used directly. None if there is no bias."""
    if not scores.chain:
        return None
    call = partial(compute, graph)
    value = None  # scores for zero queries and keys: nothing yet
    if scores.product.target is aten.baddbmm.default:
        value = call(aten.mul.Tensor, operand(scores.product), argument(scores.product, "beta"))
    for node in scores.chain:
        if node.target is aten.reshape.default:
            value = value and _with_heads(call, value, node)
        elif value is not None and len(shape(value)) > len(shape(node)) and _reads_another(node):
            raise NotUnderstood("a bias is added to scores with heads and batch merged, after another with both")
        elif value is None and node.target is aten.add.Tensor:
            value = operand(node, 1)
            for _ in range(len(shape(node)) - len(shape(value))):
                value = call(aten.unsqueeze.default, value, 0)
        elif value is not None or node.target in _FILLS:
            if value is None:
                first = value_of(scores.product)
                value = call(aten.zeros.default, [1, 1, 1, 1], dtype=first.dtype, device=first.device)
            args = list(node.args)
            args[_FILLS.get(node.target, 0)] = value
            value = call(function_of(node), *args, **node.kwargs)
    if len(shape(value)) == 3:
        raise NotUnderstood("a bias is added to scores of 3 dims instead of [B, H, S, T]")
    if len(shape(value)) == 5:
        value = call(aten.flatten.using_ints, value, 1, 2)
    elif len(shape(scores.product)) == 5 and shape(value)[:2] != (1, 1):
        raise NotUnderstood(f"a bias of shape {shape(value)} is added to scores of shape {shape(scores.product)}")
    dtype = value_of(like).dtype
    if value_of(value).dtype in (torch.bool, dtype):
        return value
    return call(aten.to.dtype, value, dtype)


def _reads_another(node: Node) -> bool:
    return len(node.all_input_nodes) > 1 and not _only_bounds(node)


def _with_heads(call: Callable[..., Node], value: Node, reshape: Node) -> Node:
    """``value``, added to scores before ``reshape``, as ``[B, H, s, T]``, with the batch and heads that ``reshape``
    splits. A bias that has them keeps them where ``reshape`` merges them."""
    wanted = shape(reshape)
    if len(shape(value)) == len(wanted):
        return value
    if len(shape(value)) == 4 and len(wanted) == 3 and wanted[1:] == shape(operand(reshape))[2:]:
        return value
    if len(shape(value)) == 3 and shape(value)[0] == 1:
        return call(aten.unsqueeze.default, value, 0)
    (batch, heads), queries = wanted[:2], shape(value)[1]
    if not all(isinstance(size, int) for size in (batch, heads, queries)):
        raise NotUnderstood("a bias without a head dim of its own, at varying sizes")
    return call(aten.reshape.default, value, [batch, heads, queries, -1])

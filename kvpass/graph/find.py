"""Stage 2: attention over a packed cache.

An attention is ``scaled_dot_product_attention``, or a softmax between two matrix products. Its keys and values are
followed back through views and head repetition to ``cat([kvpass.decode(state), present])``. Whatever is not understood
is refused with a reason, and keeps the decode: correct, slower, reported.
"""

import math
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from ..codec.predict import looks_below
from ..codec.spec import parse

aten = torch.ops.aten
DECODE = torch.ops.kvpass.decode.default
ROTATE = torch.ops.kvpass.rotate.default
_SPEC = 5  # which argument of DECODE

_SAME_VALUES = {
    aten.clone.default,
    aten.contiguous.default,
    aten.alias.default,
    aten.detach.default,
    aten.dropout.default,
}
_PRODUCTS = {aten.matmul.default, aten.bmm.default}


class NotUnderstood(Exception):
    """Why an attention was not matched."""


@dataclass
class Source:
    """Where attention's keys or values come from: ``cat([past, present])``, heads repeated in order.

    past: what decodes the cache; rotation: what turns it before it is read, if keys are stored before rotary embedding.
    """

    past: Node
    present: Node
    rotation: Node | None = None

    @property
    def needed_elsewhere(self) -> bool:
        """Whether the decoded past is there anyway: another layer is predicted from it, or it from another layer."""
        return len(self.past.users) > 1 or looks_below(parse(self.past.args[_SPEC]).predictor)


@dataclass
class Attention:
    """One matched attention; ``output`` is the node to replace, ``[B, H_q, S, D]``."""

    output: Node
    query: Node
    key: Source
    value: Source
    mask: Node | None
    causal: bool
    scale: float
    softcap: float = 0.0


def find(graph: Graph) -> tuple[list[Attention], list[str]]:
    """Every attention over packed state, in graph order, and the reasons for those that read it and were refused."""
    found, refused = [], []
    for node in graph.nodes:
        try:
            if node.target is aten.scaled_dot_product_attention.default:
                found.append(_from_sdpa(node))
            elif node.target is aten.softmax.int and _reads_packed(node):
                found.append(_from_softmax(node))
        except NotUnderstood as reason:
            if _reads_packed(node):
                refused.append(str(reason))
    return found, refused


def _reads_packed(node: Node, depth: int = 24) -> bool:
    """Whether a decode is near upstream of ``node``, and not behind another attention: the softmax of a router is none.
    Bounded, because everything is upstream of the last layer."""
    frontier = [node]
    for _ in range(depth):
        frontier = [source for n in frontier for source in n.all_input_nodes]
        if any(n.target is DECODE for n in frontier):
            return True
        frontier = [n for n in frontier if n.op == "call_function" and not _is_attention_output(n)]
    return False


def _is_attention_output(node: Node) -> bool:
    if node.target not in _PRODUCTS:
        return node.target is aten.scaled_dot_product_attention.default
    weights = node.args[0]
    while weights.target in _SAME_VALUES or weights.target in (aten.to.dtype, aten._to_copy.default):
        weights = weights.args[0]
    return weights.target is aten.softmax.int


def _shape(node: Node):
    return tuple(node.meta["val"].shape)


def _keeps_values(node: Node) -> bool:
    """Whether ``node`` is its first argument, dtype and layout included."""
    if node.target in (aten.to.dtype, aten._to_copy.default):
        return node.meta["val"].dtype == node.args[0].meta["val"].dtype
    if node.target in (aten.slice.Tensor, aten.reshape.default):
        return _shape(node) == _shape(node.args[0])
    return node.target in _SAME_VALUES


def _source(node: Node) -> Source:
    """Peel value-preserving ops and head repetition off keys or values laid out ``[B, H, T, D]``."""
    while True:
        if node.op != "call_function":
            raise NotUnderstood(f"keys or values come from {node.op} {node.name}, not from a packed cache")
        target = node.target
        if target is aten.cat.default:
            parts, dim = node.args[0], node.args[1] if len(node.args) > 1 else 0
            past, present = parts if len(parts) == 2 and dim in (2, -2) else (None, None)
            if past is not None and past.target is DECODE:
                return Source(past, present)
            if past is not None and past.target is ROTATE and past.args[0].target is DECODE:
                return Source(past.args[0], present, past)
            raise NotUnderstood("keys or values are concatenated with something else than the present tokens")
        if _keeps_values(node):
            node = node.args[0]
        elif target is aten.reshape.default:
            node = _unrepeated(node)
        elif target is aten.repeat_interleave.self_int and node.args[2] in (1, -3):
            node = node.args[0]
        else:
            raise NotUnderstood(f"{target} stands between the cache and the attention")


def _unrepeated(node: Node) -> Node:
    """``[B, H, T, D] -> unsqueeze(2) -> expand -> reshape [B, H r, T, D]``, the usual ``repeat_kv``."""
    expand = node.args[0]
    while expand.op == "call_function" and _keeps_values(expand):
        expand = expand.args[0]
    if expand.target is aten.expand.default:
        unsqueeze = expand.args[0]
        while unsqueeze.op == "call_function" and _keeps_values(unsqueeze):
            unsqueeze = unsqueeze.args[0]
        if unsqueeze.target is aten.unsqueeze.default and unsqueeze.args[1] in (2, -3):
            inner = unsqueeze.args[0]
            batch, heads, tokens, dim = _shape(inner)
            if _shape(node) == (batch, heads * _shape(expand)[2], tokens, dim):
                return inner
    raise NotUnderstood("keys or values are reshaped in a way that is not head repetition")


def _from_sdpa(node: Node) -> Attention:
    def argument(position: int, name: str, default=None):
        return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)

    query, key, value = node.args[:3]
    if argument(4, "dropout_p", 0.0):
        raise NotUnderstood("attention with dropout")
    scale = node.kwargs.get("scale")
    return Attention(
        output=node,
        query=query,
        key=_source(key),
        value=_source(value),
        mask=argument(3, "attn_mask"),
        causal=bool(argument(5, "is_causal", False)),
        scale=float(scale) if scale is not None else 1 / math.sqrt(_shape(query)[-1]),
    )


def _only_user(node: Node) -> Node:
    if len(node.users) != 1:
        raise NotUnderstood("the attention weights are used elsewhere (output_attentions?)")
    return next(iter(node.users))


def _from_softmax(node: Node) -> Attention:
    if node.args[1] not in (-1, len(_shape(node)) - 1):
        raise NotUnderstood("softmax over another dim than the keys")
    output = _only_user(node)
    while output.target in _SAME_VALUES or output.target in (aten.to.dtype, aten._to_copy.default):
        output = _only_user(output)
    if output.target not in _PRODUCTS:
        raise NotUnderstood(f"softmax is followed by {output.target}, not by a product with the values")
    query, transposed, mask, scale, softcap = _scores(node.args[0])
    if transposed.target is not aten.transpose.int or {d % 4 for d in transposed.args[1:]} != {2, 3}:
        raise NotUnderstood("keys are not transposed on their last two dims")
    key, value = _source(transposed.args[0]), _source(output.args[1])
    if len(_shape(query)) != 4:
        raise NotUnderstood(f"queries of shape {_shape(query)}; [B, H, S, D] is understood")
    return Attention(output, query, key, value, mask, False, scale, softcap)


def _scores(node: Node) -> tuple[Node, Node, Node | None, float, float]:
    """Walk from softmax's input back to ``q @ k^T``: -> q, k^T, mask, scale, softcap."""
    mask, factor, cap = None, 1.0, 0.0
    while node.target not in _PRODUCTS:
        if node.op != "call_function":
            raise NotUnderstood(f"scores come from {node.name}, not from a product with the keys")
        if len(node.users) != 1:
            raise NotUnderstood("the attention scores are used elsewhere")
        scalar = len(node.args) > 1 and isinstance(node.args[1], (int, float))
        if node.target in (aten.to.dtype, aten._to_copy.default) or node.target in _SAME_VALUES:
            pass
        elif node.target is aten.add.Tensor and not scalar and not node.kwargs:
            if mask is not None or factor != 1.0 or cap:
                raise NotUnderstood("a bias is added before the scores are scaled, or more than one is")
            mask = node.args[1]
        elif node.target is aten.mul.Tensor and scalar:
            factor *= node.args[1]
        elif node.target is aten.div.Tensor and scalar:
            factor /= node.args[1]
        elif node.target is aten.tanh.default and not cap:
            cap, factor = factor, 1.0
        else:
            raise NotUnderstood(f"{node.target} between the scores and the softmax")
        node = node.args[0]
    # scores = cap * tanh(factor * q.k): as an op, scale is what multiplies q.k before the division by softcap
    return *node.args[:2], mask, factor * cap if cap else factor, cap

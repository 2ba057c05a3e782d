"""With replayed steps (mode="reduce-overhead"), compute everything that depends on a cache length on the device.

A replay repeats the numbers that the host had at capture, so none of them may be a length. A length tensor also holds
the length as data, which changes with each replay; values are computed from that.
"""

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ..layout.window import LENGTH_OFFSET
from .calls import (
    APPEND,
    APPEND_LAYERS,
    APPEND_ROTARY,
    ATTEND,
    DEQUANTIZE,
    ROTATE,
    argument,
    arguments,
    tensor_argument,
)
from .evaluate import is_size, symbols
from .masks import PADDING
from .nodes import op_of, shape, value_of

aten = torch.ops.aten
_OPS = APPEND, APPEND_LAYERS, APPEND_ROTARY, ATTEND, DEQUANTIZE, ROTATE
_RANGES = aten.arange.start, aten.arange.start_step
_POINTWISE = aten.fill, aten.rsub  # which lack the tag
_READS_IT = "triton"  # the implementation whose kernels read lengths on the device
_NAMED = 3  # nodes listed in a reason
_LINKED = "edge", "importance", "slots", "originals"  # arguments of ``append_`` that depend on decisions of the host


def read_on_device(graph: Graph) -> list[str]:
    """Make ``graph`` compute values that depend on lengths from the contents of length tensors. Returns the reasons why
    some cannot be."""
    nodes = {tensor_argument(node, "length") for node in graph.nodes if node.target in _OPS}
    lengths = _Lengths(graph, nodes)
    found = [(reason, node.name) for node in list(graph.nodes) if (reason := lengths.read_by(node))]
    found += [("padding is read outside attention", node.name) for node in graph.nodes if _reads_padding(node)]
    names = {reason: [name for other, name in found if other == reason] for reason, _ in found}
    return [f"{reason}: {', '.join(some[:_NAMED])}{' ...' * (len(some) > _NAMED)}" for reason, some in names.items()]


def _reads_padding(node: Node) -> bool:
    return any(PADDING in source.meta for source in node.all_input_nodes)


class _Lengths:
    """The lengths of ``graph``, and the tensors that hold them, which are inserted on demand."""

    def __init__(self, graph: Graph, lengths: set[Node]):
        self.graph = graph
        self._nodes = {symbol: node for node in lengths for symbol in symbols(shape(node)[0])}
        self._held: dict[tuple[Node, int], Node] = {}

    def _follows(self, value) -> bool:
        return not self._nodes.keys().isdisjoint(symbols(value))

    def read_by(self, node: Node) -> str:
        """Let ``node`` read the lengths that it depends on from the device. Returns why it cannot; empty if it can."""
        value = node.meta.get("val")
        if node.op != "call_function" or node.target in _OPS or is_size(node):
            return ""
        if isinstance(value, Tensor) and any(map(self._follows, value.shape)):
            return "tensors grow with the cache"
        sizes = [leaf for leaf in node.all_input_nodes if is_size(leaf) and self._follows(leaf.meta["val"])]
        if not sizes:
            return ""
        done = self._range(node) if node.target in _RANGES else self._sum(node)
        return "" if done else "the length is read on the host"

    def _held_by(self, size: Node, device: torch.device) -> Node | None:
        """A tensor on ``device`` that holds ``size``, if that is a length plus a constant."""
        (symbol, *others), value = symbols(size.meta["val"]), size.meta["val"].node.expr
        length, more = self._nodes[symbol], value - symbol
        if others or not more.is_Integer or value_of(length).device != device:
            return None
        if (found := self._held.get((length, int(more)))) is None:
            found = self._held[length, int(more)] = self._hold(length, int(more) + LENGTH_OFFSET)
        return found

    def _hold(self, length: Node, more: int) -> Node:
        held = self.graph.call_function(aten.select.int, (length, 0, 0))
        value = held.meta["val"] = value_of(length).select(0, 0)
        if more:
            held = self.graph.call_function(aten.add.Tensor, (held, more))
            held.meta["val"] = value + more
        return held

    def _sum(self, node: Node) -> bool:
        """``x op length``, with a tensor in place of the length."""
        packet = getattr(node.target, "overloadpacket", None)
        tensors = getattr(packet, "Tensor", None)
        if tensors is None or len(node.args) != 2:
            return False
        if packet not in _POINTWISE and torch.Tag.pointwise not in tensors.tags:
            return False
        x, length = node.args
        if not isinstance(x, Node) or is_size(x) or not value_of(x).ndim or not isinstance(length, Node):
            return False
        with self.graph.inserting_before(node):
            held = self._held_by(length, value_of(x).device)
        if held is not None:
            node.target, node.args = tensors, (x, held)
        return held is not None

    def _range(self, node: Node) -> bool:
        """``arange(length, length + count)`` as ``arange(count) + length``."""
        start, count, value = node.args[0], shape(node)[0], value_of(node)
        if len(node.args) > 2 or value.dtype != torch.int64 or not isinstance(start, Node):
            return False
        with self.graph.inserting_before(node):
            held = self._held_by(start, value.device)
            if held is None:
                return False
            run = self.graph.call_function(aten.arange.start, (0, count), dict(node.kwargs))
            run.meta["val"] = value
        node.target, node.args, node.kwargs = aten.add.Tensor, (run, held), {}
        return True


def counted_on_host(gm: GraphModule) -> list[str]:
    """Why ops of a lowered graph cannot be replayed at other lengths."""
    return [reason for node in gm.graph.nodes if node.target in _OPS and (reason := _counts(node))]


def _counts(node: Node) -> str:
    if node.target in (DEQUANTIZE, ROTATE):
        return "a cache is dequantized first"
    if node.target is APPEND_ROTARY:
        return "tokens are evicted" if argument(node, "slots") is not None else ""
    given = arguments(node)
    if given["lowering"] != _READS_IT:
        return f"{op_of(node)._schema.name} runs as {given['lowering']!r}, which reads the length on the host"
    if node.target is ATTEND:
        return "what is stored depends on attention scores" if given["statistic"] else ""
    linked = any(given.get(name) is not None for name in _LINKED)
    return "what layers store depends on each other or on attention scores" if linked else ""

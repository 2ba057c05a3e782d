"""Counts how a rewritten graph reads its caches, for the report."""

from collections.abc import Callable, Iterable
from typing import TypedDict

from torch.fx import GraphModule, Node

from ..codec.spec import parse
from .appends import tensor_of
from .calls import ATTEND, DEQUANTIZE, ROTATE, argument, tensors_argument


class Reads(TypedDict):
    """How often a graph reads caches in each way: fields of `GraphReport`."""

    fused: int
    reconstructed: int
    decoded: int
    rotated: int


def count(gm: GraphModule, times: Callable[[Node], int]) -> Reads:
    """How a rewritten graph reads its caches; each of its nodes counts ``times`` times."""

    def total(nodes: Iterable[Node]) -> int:
        return sum(map(times, nodes))

    nodes = list(gm.graph.nodes)
    attends = [node for node in nodes if node.target is ATTEND]
    layers = {_keys_read(node): node for node in attends}.values()  # several may read one
    dense = [node for node in attends if len(tensors_argument(node, "key")) == 1]
    read = {_dequantized(tensors_argument(node, name)[0]) for node in dense for name in ("key", "value")}
    decodes = [node for node in nodes if node.target is DEQUANTIZE]
    turning = [*attends, *(node for node in nodes if node.target is ROTATE)]
    rotated = total(node for node in turning if argument(node, "rope") != "")
    return Reads(
        fused=total(layers),
        reconstructed=total(node for node in layers if node in dense),
        decoded=total(node for node in decodes if node not in read),
        rotated=rotated,
    )


def _keys_read(attend: Node) -> Node:
    """A tensor that tells apart the keys that calls of attention read: the ring, because layers may share pages."""
    keys = tensors_argument(attend, "key")
    return keys[0] if len(keys) == 1 else tensor_of(keys, parse(argument(attend, "k_spec")), "ring")


def _dequantized(node: Node) -> Node:
    """The call that dequantizes the past ``node``, before heads are selected."""
    while node.target is not DEQUANTIZE:
        node = node.all_input_nodes[0]
    return node

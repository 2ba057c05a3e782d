"""Typed reads of FX nodes return what they promise, or raise an error that names the node."""

import pytest
import torch
from torch.fx import Graph, Node

from kvpass.compile import calls, nodes

aten = torch.ops.aten


def called(op, *args, **kwargs) -> Node:
    """A call of ``op``; each string among its arguments becomes a placeholder with that name."""
    graph = Graph()
    mapped = torch.fx.node.map_aggregate((args, kwargs), lambda a: graph.placeholder(a) if isinstance(a, str) else a)
    return graph.call_function(op, *mapped)


def test_arguments_are_read_by_position_and_by_name():
    cat = called(aten.cat.default, ["a", "b"], -1)
    assert [node.name for node in nodes.operands(cat)] == ["a", "b"]
    assert (nodes.integer(cat, 1), nodes.number(cat, 1), nodes.number(cat, 2)) == (-1, -1, None)
    index = called(aten.index.Tensor, "x", [None, "i"])
    assert [each and each.name for each in nodes.indices(index)] == [None, "i"]
    assert nodes.number(called(aten.mul.Tensor, "x", "y"), 1) is None
    assert nodes.integers(called(aten.permute.default, "x", [1, 0]), 1) == [1, 0]
    assert calls.tensor_argument(called(aten.sub.Tensor, "x", other="y"), "other").name == "y"


@pytest.mark.parametrize(
    ("read", "node"),
    [
        (lambda node: nodes.operand(node, 1), called(aten.add.Tensor, "x", 2)),
        (lambda node: nodes.operands(node), called(aten.cat.default, ["x", 2])),
        (lambda node: nodes.operands(node), called(aten.add.Tensor, "x", 2)),
        (lambda node: nodes.integers(node, 1), called(aten.permute.default, "x", [1, "i"])),
        (lambda node: nodes.integer(node, "alpha"), called(aten.add.Tensor, "x", "y", alpha="z")),
        (lambda node: calls.tensor_argument(node, "other"), called(aten.add.Tensor, "x", 2)),
        (nodes.value_of, called(aten.add.Tensor, "x", 2)),
        (nodes.op_of, called(torch.add, "x", 2)),
    ],
)  # fmt: skip
def test_an_argument_of_another_kind_is_an_error_that_names_the_node(read, node):
    with pytest.raises(TypeError, match=f"%{node.name} .* is expected"):
        read(node)

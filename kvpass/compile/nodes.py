"""Typed reads of FX nodes.

An argument of a node can be anything that a graph can hold. These accessors check that it is what the caller expects,
and otherwise raise `TypeError` with the node. They change nothing.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, Node

Size = int | torch.SymInt
_T = TypeVar("_T")


def value_of(node: Node) -> Tensor:
    """The fake tensor that ``node`` stands for."""
    return checked(Tensor, node.meta.get("val"), node, "meta['val']")


def is_tensor(node: Node) -> bool:
    """Whether ``node`` stands for a tensor, and not for a size or several values."""
    return isinstance(node.meta.get("val"), Tensor)


def shape(node: Node) -> tuple[Size, ...]:
    """The sizes of the tensor that ``node`` stands for."""
    return tuple(value_of(node).shape)


def operand(node: Node, which: int | str = 0) -> Node:
    """The node in argument ``which`` of ``node``, a position or a keyword."""
    return checked(Node, _given(node, which), node, which)


def operands(node: Node, which: int | str = 0) -> list[Node]:
    """The list of nodes in argument ``which`` of ``node``, a position or a keyword."""
    return checked_list(Node, _given(node, which), node, which)


def indices(node: Node) -> list[Node | None]:
    """The index for each dim in a call of ``aten.index``; None for dims that are taken whole."""
    return [one if one is None else checked(Node, one, node, 1) for one in _sequence(node.args[1], node, 1)]


def integer(node: Node, which: int | str) -> int:
    """The constant int in argument ``which`` of ``node``, a position or a keyword."""
    return checked(int, _given(node, which), node, which)


def integers(node: Node, which: int | str) -> list[int]:
    """The list of constant ints in argument ``which`` of ``node``, a position or a keyword."""
    return checked_list(int, _given(node, which), node, which)


def number(node: Node, position: int) -> int | float | None:
    """The constant at ``position`` among the arguments of ``node``; None for a tensor, a varying size, or a missing
    argument."""
    value = node.args[position] if len(node.args) > position else None
    return value if isinstance(value, (int, float)) else None


def op_of(node: Node) -> OpOverload:
    """The op that ``node`` calls."""
    return checked(OpOverload, node.target, node, "target")


def function_of(node: Node) -> Callable[..., Any]:
    """The op or the Python function that ``node`` calls."""
    if not callable(node.target):
        raise TypeError(f"{node.format_node()} calls no function.")
    return node.target


def attribute_of(node: Node) -> Any:
    """The value that ``node``, a ``get_attr``, reads from the module of its graph."""
    return attrgetter(checked(str, node.target, node, "target"))(node.graph.owning_module)


def outputs_of(graph: Graph) -> tuple[Any, ...]:
    """The outputs of ``graph``: nodes and constants."""
    output = graph.output_node()
    return tuple(_sequence(output.args[0], output, 0))


def checked(kind: type[_T], value: object, node: Node, which: int | str) -> _T:
    """``value``, which is argument ``which`` of ``node``. Raises `TypeError` if it is not a ``kind``."""
    if not isinstance(value, kind):
        raise TypeError(f"{which!r} of {node.format_node()} is {value!r}, where a {kind.__name__} is expected.")
    return value


def checked_list(kind: type[_T], values: object, node: Node, which: int | str) -> list[_T]:
    """Like `checked`, for a list."""
    return [checked(kind, value, node, which) for value in _sequence(values, node, which)]


def _sequence(values: object, node: Node, which: int | str) -> Sequence[Any]:
    return checked(tuple, values, node, which) if isinstance(values, tuple) else checked(list, values, node, which)


def _given(node: Node, which: int | str) -> object:
    return node.args[which] if isinstance(which, int) else node.kwargs[which]

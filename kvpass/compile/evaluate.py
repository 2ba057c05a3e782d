"""Run a part of a graph on concrete values, to find out what nodes compute regardless of how they are written."""

from collections.abc import Iterable

import sympy
import torch
from torch.fx import Node

from .nodes import attribute_of, function_of


def is_size(node: Node) -> bool:
    """Whether ``node`` is an int. Its value follows from the symbols, whichever tensor it is a size of."""
    return isinstance(node.meta.get("val"), (torch.SymInt, int))


def upstream(target: Node, stops: Iterable[Node] = ()) -> list[Node]:
    """``target`` and everything it is computed from, in graph order. The search does not go beyond sizes and
    ``stops``."""
    needed, stack, stops = set(), [target], set(stops)
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            if node not in stops and not is_size(node):
                stack.extend(node.all_input_nodes)
    return [node for node in target.graph.nodes if node in needed]


def leaves(nodes: Iterable[Node]) -> list[Node]:
    """The ``nodes`` that are inputs or constants, and neither sizes nor computed."""
    return [node for node in nodes if node.op != "call_function" and not is_size(node)]


def constant(node: Node) -> torch.Tensor | None:
    """The tensor value of ``node``, if it is part of the graph."""
    value = attribute_of(node) if node.op == "get_attr" else None
    return value.cpu() if type(value) is torch.Tensor else None


def symbols(value) -> set[sympy.Symbol]:
    """The free symbols of an int."""
    return set(value.node.expr.free_symbols) if isinstance(value, torch.SymInt) else set()


def hints(values) -> dict[sympy.Symbol, int]:
    """The values at capture of the symbols in ``values`` (symbolic ints, and shapes of tensors)."""
    known = {}
    for value in values:
        for size in value.shape if isinstance(value, torch.Tensor) else (value,):
            if isinstance(size, torch.SymInt):
                shape_env = size.node.shape_env
                table = shape_env.backed_var_to_val if hasattr(shape_env, "backed_var_to_val") else shape_env.var_to_val
                known.update({symbol: int(table[symbol]) for symbol in symbols(size) if symbol in table})
    return known


def at(value, assignment: dict[sympy.Symbol, int]):
    """An int with its symbols replaced by their values."""
    return int(value.node.expr.xreplace(assignment)) if isinstance(value, torch.SymInt) else value


def run(nodes: list[Node], values: dict[Node, torch.Tensor], assignment: dict[sympy.Symbol, int]) -> None:
    """Compute ``nodes``, in order and on the CPU, into ``values``; existing values are kept."""

    def concrete(argument):
        return values[argument] if isinstance(argument, Node) else at(argument, assignment)

    for node in nodes:
        if node in values:
            continue
        if is_size(node):
            values[node] = at(node.meta["val"], assignment)
        else:
            args, kwargs = torch.fx.node.map_aggregate((node.args, node.kwargs), concrete)
            kwargs = {k: ("cpu" if k == "device" else v) for k, v in kwargs.items()}
            values[node] = function_of(node)(*args, **kwargs)

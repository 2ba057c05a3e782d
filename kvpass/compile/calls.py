"""Calls of ops in a graph, with arguments by the names in the op schemas."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch.fx import Graph, Node

from .nodes import checked, checked_list, is_tensor, op_of, value_of

APPEND = torch.ops.kvpass.append_.default
APPEND_LAYERS = torch.ops.kvpass.append_layers_.default
APPEND_ROTARY = torch.ops.kvpass.append_rotary_.default
ATTEND = torch.ops.kvpass.attend.default
DEQUANTIZE = torch.ops.kvpass.dequantize.default
ROTATE = torch.ops.kvpass.rotate.default


def arguments(node: Node) -> dict[str, Any]:
    """All arguments of the call ``node``, including defaults."""
    schema = op_of(node)._schema.arguments
    given = dict(zip((argument.name for argument in schema), node.args, strict=False)) | node.kwargs
    return {argument.name: given.get(argument.name, argument.default_value) for argument in schema}


def argument(node: Node, name: str) -> Any:
    """One of the `arguments` of ``node``."""
    return arguments(node)[name]


def tensor_argument(node: Node, name: str) -> Node:
    """The node that computes a tensor argument of ``node``. Raises `TypeError` if the argument is not a tensor."""
    return checked(Node, argument(node, name), node, name)


def tensors_argument(node: Node, name: str) -> list[Node]:
    """The nodes of a tensor list argument of ``node``. Raises `TypeError` if the argument is anything else."""
    return checked_list(Node, argument(node, name), node, name)


def change(node: Node, **changed: Any) -> None:
    """Change some arguments of the call ``node``."""
    node.args, node.kwargs = _placed(op_of(node), arguments(node) | changed)


def call(graph: Graph, op: OpOverload, **given: Any) -> Node:
    """A node that calls ``op``, at the insertion point of ``graph``."""
    return graph.call_function(op, *_placed(op, given))


def compute(graph: Graph, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
    """A node that calls ``target``, at the insertion point of ``graph``, with the fake value that it stands for."""
    node = graph.call_function(target, args, kwargs)
    values = torch.fx.node.map_arg(args, lambda argument: argument.meta["val"])
    with detect_fake_mode([value_of(next(filter(is_tensor, graph.nodes)))]) or nullcontext():
        node.meta["val"] = target(*values, **kwargs)
    return node


def _placed(op: OpOverload, given: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Positional arguments, which are parsed faster, and keyword-only arguments."""
    schema = op._schema.arguments
    required = {argument.name for argument in schema if not argument.has_default_value()}
    if not required <= given.keys() <= {argument.name for argument in schema}:
        raise TypeError(f"{op} takes {[argument.name for argument in schema]}, and not just {list(given)}.")
    values = {argument.name: given.get(argument.name, argument.default_value) for argument in schema}
    by_name = {argument.name for argument in schema if argument.kwarg_only}
    args = tuple(value for name, value in values.items() if name not in by_name)
    return args, {name: value for name, value in values.items() if name in by_name & given.keys()}

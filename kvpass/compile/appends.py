"""Writes to packed caches: read off a functional graph, and put back in place."""

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch.fx import Graph, Node

from ..codec.spec import CodecSpec, parse
from ..errors import KVPassError
from .calls import APPEND, APPEND_LAYERS, call

_FUNCTIONALIZED = torch.ops.higher_order.auto_functionalized_v2
_SCHEMA = APPEND._schema.arguments
_WRITTEN = [argument.name for argument in _SCHEMA if argument.alias_info and argument.alias_info.is_write]
_STATE = "codes", "scale", "zero_point", "ring"


@dataclass
class Append:
    """One call of ``kvpass::append_``, with the inputs of the graph that it writes. ``node`` is the functionalized
    call; the rest are the arguments of the op."""

    node: Node
    codes: Node
    scale: Node
    zero_point: Node
    ring: Node
    compensation: Node | None
    length: Node
    x: Node
    q: Node | None
    mask: Node | None
    spec: str
    lowering: str
    edge: Node | None
    beside: Node | None
    predictor: list[Node] | None
    center: Node | None
    importance: Node | None
    scores: list[Node] | None
    slots: Node | None

    @cached_property
    def codec(self) -> CodecSpec:
        return parse(self.spec)

    @property
    def arguments(self) -> dict[str, Any]:
        """What the op takes, by the names of its schema."""
        return {field.name: getattr(self, field.name) for field in fields(self)[1:]}

    @property
    def written(self) -> list[Node]:
        """The inputs of the graph that it writes."""
        return [tensor for name in _WRITTEN if (tensor := getattr(self, name)) is not None]

    @property
    def looks_at_nothing_else(self) -> bool:
        """Whether what is stored depends on its tokens alone."""
        return not any(
            value for name, value in self.arguments.items() if name not in (*_STATE, "length", "x", "spec", "lowering")
        )


def appends(graph: Graph) -> list[Append]:
    """Every write of a functional graph, in its order."""
    return [_read(node) for node in graph.nodes if _is_append(node)]


def _is_append(node: Node) -> bool:
    return node.target is _FUNCTIONALIZED and node.args[0] is APPEND


def _read(node: Node) -> Append:
    bases = node.kwargs["_all_bases"]

    def value(argument) -> Any:
        if argument.name in _WRITTEN:
            index = node.kwargs[f"_{argument.name}_base_index"]
            return None if index is None else placeholder(bases[index])
        given = node.kwargs.get(argument.name, argument.default_value)
        return placeholder(given) if isinstance(given, Node) else given

    return Append(node, **{argument.name: value(argument) for argument in _SCHEMA})


def placeholder(base: Node) -> Node:
    """The input of the graph behind ``base``: codes that layers share are written by one append after another."""
    while base.target is operator.getitem and _is_append(base.args[0]):
        base = base.args[0].kwargs["_all_bases"][base.args[1] - 1]
    return base


def hoist(graph: Graph, writes: Sequence[Append]) -> set[Node]:
    """Put every ``append_`` back in place, at the end of the graph and in layer order, those that depend on nothing but
    their tokens as one call for all layers.

    Reads then never follow a write, so nothing has to be cloned. Returns the placeholders written.
    """
    output = graph.output_node()
    codes = Counter(append.codes for append in writes)
    alike: dict[tuple, list[Append]] = {}
    for append in writes:
        for item in append.node.users:
            if any(user is not output and not _is_append(user) for user in item.users):
                raise KVPassError("A packed cache is read again after it was written in the same call; not supported.")
        if codes[append.codes] == 1 and append.looks_at_nothing_else:
            place = append.length, append.x.meta["val"].device
            alike.setdefault((*place, append.spec, append.lowering), []).append(append)
            continue
        with graph.inserting_before(output):
            call(graph, APPEND, **append.arguments)
    for (length, _, spec, lowering), layers in alike.items():
        each = {name: [getattr(append, name) for append in layers] for name in (*_STATE, "x")}
        with graph.inserting_before(output):
            call(graph, APPEND_LAYERS, **each, length=length, spec=spec, lowering=lowering)
    return {tensor for append in writes for tensor in append.written}

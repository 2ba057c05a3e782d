"""Writes to packed caches: read from a functional graph, and put back in place."""

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch.fx import Graph, Node

from kvpass.lowering.append import stands_alone

from ..codec.spec import CodecSpec, parse
from ..codec.tensors import of_state
from ..errors import KVPassError
from .calls import APPEND, APPEND_LAYERS, call
from .nodes import integer, operand, operands, value_of

FUNCTIONALIZED = torch.ops.higher_order.auto_functionalized_v2
_SCHEMA = APPEND._schema.arguments
_ALWAYS = "state", "length", "x", "spec", "lowering"
_OF_EACH, _COMMON = ("q", "keys"), ("mask", "cos", "sin", "rope")
_WRITTEN = [argument.name for argument in _SCHEMA if argument.alias_info and argument.alias_info.is_write]


@dataclass
class Append:
    """One call of ``kvpass::append_``, and the graph inputs that it writes. ``node`` is the functionalized call; the
    other fields are the arguments of the op."""

    node: Node
    state: list[Node]
    length: Node
    x: Node
    q: Node | None
    mask: Node | None
    spec: str
    lowering: str
    edge: Node | None
    same_layer_keys: Node | None
    predictor: list[Node] | None
    importance: Node | None
    scores: list[Node] | None
    slots: Node | None
    originals: Node | None
    cos: Node | None
    sin: Node | None
    rope: str
    keys: list[Node] | None

    @cached_property
    def codec(self) -> CodecSpec:
        return parse(self.spec)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the op, by the names of its schema."""
        return {field.name: getattr(self, field.name) for field in fields(self)[1:]}

    @property
    def written(self) -> list[Node]:
        """The graph inputs that it writes."""
        given = [*self.state, *(getattr(self, name) for name in _WRITTEN if name != "state")]
        return [tensor for tensor in given if tensor is not None]

    @property
    def ring(self) -> Node:
        """The ring of exact tokens, which is always the state's own; its quantized values may be another layer's."""
        return tensor_of(self.state, self.codec, "ring")

    @property
    def stands_alone(self) -> bool:
        """Whether it can be merged with the appends of other layers."""
        has_codec = self.codec.quantizer.codec is not None
        known = (*_ALWAYS, *_OF_EACH, *_COMMON) if has_codec else _ALWAYS
        given = (value for name, value in self.arguments.items() if name not in known)
        return not any(given) and stands_alone(self.codec)


def tensor_of(state: list[Node], codec: CodecSpec, name: str) -> Node:
    """The tensor called ``name`` (`kvpass.codec.tensors`) among those of ``state``."""
    return state[of_state(codec).index(name)]


def appends(graph: Graph) -> list[Append]:
    """Every write of a functional graph, in graph order."""
    return [_read(node) for node in graph.nodes if _is_append(node)]


def _is_append(node: Node) -> bool:
    return node.target is FUNCTIONALIZED and node.args[0] is APPEND


def _read(node: Node) -> Append:
    bases = operands(node, "_all_bases")

    def written(place: str) -> Node | None:
        index = f"{place}_base_index"
        return None if node.kwargs[index] is None else placeholder(bases[integer(node, index)])

    def value(argument) -> Any:
        name = argument.name
        if (length := f"_{name}_length") in node.kwargs:
            return [written(f"_{name}_{i}") for i in range(integer(node, length))]
        if name in _WRITTEN:
            return written(f"_{name}")
        given = node.kwargs.get(name, argument.default_value)
        if isinstance(given, (list, tuple)):
            return [placeholder(one) for one in given]
        return placeholder(given) if isinstance(given, Node) else given

    return Append(node, **{argument.name: value(argument) for argument in _SCHEMA})


def placeholder(base: Node) -> Node:
    """The graph input that ``base`` is a version of. Quantized values that layers share are written by several appends
    in turn."""
    while base.target is operator.getitem and _is_append(operand(base)):
        base = operands(operand(base), "_all_bases")[integer(base, 1) - 1]
    return base


def hoist(graph: Graph, writes: Sequence[Append]) -> set[Node]:
    """Put every ``append_`` back in place, at the end of the graph and in layer order.

    Appends that depend only on their own tokens become one call for all layers. Values that follow the bit widths of
    their keys come after those keys, whatever order the model writes them in. As reads never follow a write, nothing
    has to be cloned. Returns the placeholders written.
    """
    output = graph.output_node()
    writers = Counter(tensor for append in writes for tensor in append.state)
    calls: dict[Any, list[Append]] = {}
    for append in sorted(writes, key=lambda one: one.keys is not None):
        for item in append.node.users:
            if any(user is not output and not _is_append(user) for user in item.users):
                raise KVPassError(
                    "The model reads a packed cache again after writing it in the same call, which cannot be "
                    "compiled: use lowering='eager'."
                )
        together: Any = append.node
        if append.stands_alone and all(writers[tensor] == 1 for tensor in append.state):
            given = (append.arguments[name] for name in ("length", "spec", "lowering", *_COMMON))
            there = (append.arguments[name] is not None for name in _OF_EACH)
            together = value_of(append.x).device, *there, *given
        calls.setdefault(together, []).append(append)
    with graph.inserting_before(output):
        for together, layers in calls.items():
            if together is layers[0].node:
                call(graph, APPEND, **layers[0].arguments)
            else:
                _call_of_layers(graph, layers)
    return {tensor for append in writes for tensor in append.written}


def _call_of_layers(graph: Graph, layers: Sequence[Append]) -> None:
    given = {name: layers[0].arguments[name] for name in ("length", "spec", "lowering", *_COMMON)}
    for name in ("x", "q"):
        given[name] = None if layers[0].arguments[name] is None else [append.arguments[name] for append in layers]
    given["keys"] = None if layers[0].keys is None else [tensor for append in layers for tensor in append.keys or ()]
    call(graph, APPEND_LAYERS, states=[tensor for append in layers for tensor in append.state], **given)

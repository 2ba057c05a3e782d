"""The last stage of a graph with repeats: one piece for what comes before its layers, one for each layer or for a few
at a time, one for what comes after, and the cache writes, which need no compilation.

A recurrent or convolution state is written within the piece that reads it, in place.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType

import torch
from torch._guards import detect_fake_mode
from torch.fx import Graph, GraphModule, Node

from kvpass.lowering.session import undisabled

from .calls import APPEND, APPEND_LAYERS, APPEND_ROTARY, arguments, call
from .evaluate import symbols
from .nodes import function_of, is_tensor, outputs_of, value_of
from .repeats import Repeats

_WRITES = APPEND, APPEND_LAYERS, APPEND_ROTARY
_COPY = torch.ops.aten.copy_.default
_MANY, _TOGETHER = 12, (4, 5, 6)  # with many layers, a piece covers several, because each call takes microseconds


class Stamp:
    """A graph with the first of many repeats, to be cut into pieces after the other stages.

    gm: the result of the other stages for ``repeats.module``, with the same inputs and outputs.
    """

    def __init__(self, gm: GraphModule, repeats: Repeats):
        self.gm, self.repeats = gm, repeats
        _propagate(gm.graph)
        inputs, given = list(gm.graph.find_nodes(op="placeholder")), len(repeats.kept)
        self._carried, self._last = inputs[given : given + repeats.carried], inputs[given + repeats.carried :]
        self._at = dict(zip(inputs, repeats.kept, strict=False))
        self._own = {inputs[i]: each for i, each in repeats.own.items()}
        outputs = list(outputs_of(gm.graph))
        self._left = [outputs.pop() for _ in range(repeats.carried + repeats.last)][::-1]
        self._given = [outputs.pop() for _ in range(repeats.carried)][::-1]
        self._outputs = outputs
        self._writes = [node for node in gm.graph.nodes if node.target in _WRITES]
        self._repeated = self._behind((*self._own, *self._carried))
        self._ending = self._behind(self._last)

    def _behind(self, sources: Iterable[Node]) -> set[Node]:
        """Everything that is computed from ``sources``."""
        found = set(sources)
        for node in self.gm.graph.nodes:
            if node.op == "call_function" and node.target not in _WRITES and not found.isdisjoint(node.all_input_nodes):
                found.add(node)
        return found - set(sources)

    def is_repeated(self, node: Node) -> bool:
        """Whether each repeat computes, receives or writes a ``node`` of its own."""
        if node in self._repeated or node in self._own:
            return True
        return node.target in _WRITES and any(map(self.is_repeated, node.all_input_nodes))

    def times(self, node: Node) -> int:
        """How many nodes of the whole graph ``node`` stands for."""
        return self.repeats.count if self.is_repeated(node) else 1

    @property
    def possible(self) -> bool:
        """Whether it can be cut as the captured graph was, and writes nothing but caches and states."""
        effects = (node for node in self.gm.graph.nodes if node.op == "call_function" and node.is_impure())
        shared = (node for node in (*self._outputs, *self._given) if isinstance(node, Node))
        return (
            all(node in self._writes or self._writes_state(node) for node in effects)
            and self._repeated.isdisjoint((*self._ending, *shared))
            and self._repeated.issuperset(self._left)
        )

    def _writes_state(self, node: Node) -> bool:
        """Whether ``node`` overwrites an input, such as a recurrent state, that nothing outside its own piece reads.
        Then the piece may write it before others run."""
        state = node.args[0] if node.target is _COPY else None
        if not isinstance(state, Node) or state.op != "placeholder" or value_of(state).storage_offset() != 0:
            return False
        if node in self._repeated and state not in self._own:
            return False
        storage = value_of(state).untyped_storage()
        views = (
            each for each in self.gm.graph.nodes if is_tensor(each) and value_of(each).untyped_storage() is storage
        )
        return {self._piece_of(user) for view in views for user in view.users} == {self._piece_of(node)}

    def _piece_of(self, node: Node) -> str:
        """The piece that ``node`` becomes a part of; empty for what the graph around the pieces does."""
        if node.op == "output" or node in self._writes:
            return ""
        if node in self._repeated:
            return "layers"
        return "ending" if node in self._ending else "beginning"

    def compiled(self, compile_piece: Callable[[GraphModule, list], Callable]) -> Callable:
        """A function of the inputs of the whole graph. ``compile_piece`` receives modules and their fake inputs."""
        done = {*self._repeated, *self._ending, *self._writes}
        before = {node for node in self.gm.graph.nodes if node.op in ("call_function", "get_attr")} - done
        stored = [leaf for node in self._writes for leaf in node.all_input_nodes]
        ending = _Piece(self.gm, self._ending, [*self._outputs, *stored])
        layers = {
            times: _Piece(self.gm, self._repeated, stored, self._left, times, self._own, self._links)
            for times in dict.fromkeys(self._sizes)
        }
        read = [node for piece in (*layers.values(), ending) for node, _ in piece.inputs]
        beginning = _Piece(self.gm, before, [*self._given, *read, *self._outputs, *stored])
        pieces = {
            "beginning": beginning,
            **{f"layers_{times}": piece for times, piece in layers.items()},
            "ending": ending,
        }
        for name, piece in pieces.items():
            works = piece.outputs or piece.written
            piece.run = _named(name, compile_piece(piece.module, piece.examples)) if works else None
        return GraphModule({}, self._whole(beginning, layers, ending)).forward

    @property
    def _links(self) -> dict[Node, Node]:
        """An input of a repeat -> what the previous repeat leaves for it."""
        return dict(zip(self._carried, self._left, strict=False))

    @property
    def _sizes(self) -> list[int]:
        """The number of repeats in each call."""
        count = self.repeats.count
        size = min(_TOGETHER, key=lambda size: size + count % size) if count >= _MANY else 1
        return [size] * (count // size) + [count % size] * (count % size > 0)

    def _whole(self, beginning: _Piece, each: dict[int, _Piece], ending: _Piece) -> Graph:
        """The whole graph, as calls of its pieces."""
        whole = Graph()
        inputs = [whole.placeholder(f"input_{i}") for i in range(self.repeats.inputs)]
        common = {node: inputs[at] for node, at in self._at.items()}
        beginning.call(whole, [common])
        count = range(self.repeats.count)
        layers = [common | {node: inputs[at[i]] for node, at in self._own.items()} for i in count]
        handed, done = [common[node] for node in self._given], 0
        for size in self._sizes:
            some = layers[done : done + size]
            some[0].update(zip(self._carried, handed, strict=True))
            each[size].call(whole, some)
            handed = [some[-1][node] for node in self._links.values()]
            done += size
        common.update(zip(self._last, (layers[-1][node] for node in self._left[len(handed) :]), strict=True))
        ending.call(whole, [common])
        self._write(whole, common, layers)
        whole.output(tuple(common[node] if isinstance(node, Node) else node for node in self._outputs))
        return whole

    def _write(self, whole: Graph, common: dict[Node, Node], layers: Sequence[dict[Node, Node]]) -> None:
        """Add every write of the whole graph: layer by layer, or as one call for all layers if the op takes them
        together."""

        def together(node: Node) -> bool:
            return node.target is APPEND_LAYERS or not self.is_repeated(node)

        for merged, nodes in itertools.groupby(self._writes, together):
            for values, node in itertools.product([common] if merged else layers, list(nodes)):
                if node.target is not APPEND_LAYERS:
                    whole.node_copy(node, values.__getitem__)
                    continue
                given = arguments(node)
                count = len(given["x"])
                of = [(values, i) for i in range(count) for values in self._values(given["x"][i], common, layers)]
                for name, value in given.items():
                    if isinstance(value, Node):
                        given[name] = common[value]
                    elif isinstance(value, (list, tuple)):  # equally many per layer
                        each = len(value) // count
                        given[name] = [values[own] for values, i in of for own in value[each * i : each * (i + 1)]]
                call(whole, APPEND_LAYERS, **given)

    def _values(self, x: Node, common: dict[Node, Node], layers: Sequence[dict[Node, Node]]):
        return layers if self.is_repeated(x) else [common]


class _Piece:
    """Some ``nodes`` of a graph as a module of their own, repeated ``times`` times.

    wanted: values that it returns for every repetition; left: values that it returns for the last one only.
    own: nodes that differ in each repetition.
    links: input of a repetition -> what the previous one has in its place.
    inputs, outputs: nodes, and the index of the repetition.
    written: inputs that it overwrites.
    examples: fake values of inputs.
    run: the compiled function, once there is one.
    """

    run: Callable | None = None

    def __init__(
        self, gm: GraphModule, nodes: set[Node], wanted: Iterable, left: Iterable = (), times: int = 1,
        own: Container[Node] = (), links: Mapping[Node, Node] = MappingProxyType({}),
    ):  # fmt: skip
        ordered = [node for node in gm.graph.nodes if node in nodes]
        read = dict.fromkeys(leaf for node in ordered for leaf in node.all_input_nodes if leaf not in nodes)
        known = set().union(*(_symbols(node) for node in (*read, *ordered)))
        sizes = (node for node in gm.graph.find_nodes(op="placeholder") if symbols(node.meta["val"]) & known)
        given = list(dict.fromkeys((*sizes, *read)))
        self.inputs = [(node, i) for i in range(times) for node in given if not i or node in own]
        each = [(node, i) for i in range(times) for node in wanted if node in nodes]
        self.outputs = list(dict.fromkeys((*each, *((node, times - 1) for node in left))))
        self.written = {node.args[0] for node in ordered if node.target is _COPY}
        self.examples = [_another(node, node in self.written) if i else node.meta["val"] for node, i in self.inputs]
        graph, new = Graph(), {}
        for (node, i), example in zip(self.inputs, self.examples, strict=True):
            new[node, i] = graph.placeholder(f"{node.name}_{i}")
            new[node, i].meta = node.meta | {"val": example}
        for i in range(times):
            for node in (node for node in given if i and node not in own):
                new[node, i] = new[links[node], i - 1] if node in links else new[node, 0]

            def of_time(leaf: Node, i: int = i) -> Node:
                return new[leaf, i]

            for node in ordered:
                new[node, i] = graph.node_copy(node, of_time)
        graph.output(tuple(new[output] for output in self.outputs))
        self.module = GraphModule(gm, graph)

    def call(self, whole: Graph, values: Sequence[dict[Node, Node]]) -> None:
        """Call it in ``whole`` on the ``values`` of each repetition, and add its outputs to them."""
        if self.run is not None:
            result = whole.call_function(self.run, tuple(values[i][node] for node, i in self.inputs))
            for at, (node, i) in enumerate(self.outputs):
                values[i][node] = whole.call_function(operator.getitem, (result, at))


def _another(node: Node, written: bool):
    """An equal fake value for a further input like ``node``; one object for two inputs would be traced as one input.
    Inputs that are ``written`` share no memory."""
    example = node.meta["val"]
    if written:
        return example.new_empty_strided(example.shape, example.stride())
    return example.detach() if isinstance(example, torch.Tensor) else example


def _named(name: str, run: Callable) -> Callable:
    """``run`` as a function that generated code can call and that Dynamo may trace."""
    run = undisabled(run)

    def call(*inputs):
        return run(*inputs)

    call.__name__ = name
    return call


def _propagate(graph: Graph) -> None:
    """Compute the fake values of nodes that the pass inserted without them."""
    missing = [node for node in graph.nodes if node.op == "call_function" and "val" not in node.meta]
    for node in missing:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
        with detect_fake_mode(args) or nullcontext():
            node.meta["val"] = function_of(node)(*args, **kwargs)


def _symbols(node: Node) -> set:
    sizes = (*value_of(node).shape, *value_of(node).stride()) if is_tensor(node) else (node.meta.get("val"),)
    return set().union(*map(symbols, sizes))

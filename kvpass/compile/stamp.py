"""The last stage of a graph that repeats itself: one piece for what comes before its layers, one for each of them, one
for what comes behind, and the writes to caches, which need no compiling.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext

import torch
from torch._guards import detect_fake_mode
from torch.fx import Graph, GraphModule, Node

from kvpass.lowering.session import undisabled

from .calls import APPEND, APPEND_LAYERS, APPEND_ROTARY, arguments, call
from .concrete import symbols
from .repeats import Repeats

_WRITES = APPEND, APPEND_LAYERS, APPEND_ROTARY


class Stamp:
    """A graph with the first of many repeats, normalised and maybe more, to be cut into pieces.

    gm: what has become of ``repeats.module``; its inputs and outputs are those.
    """

    def __init__(self, gm: GraphModule, repeats: Repeats):
        self.gm, self.repeats = gm, repeats
        _propagate(gm.graph)
        inputs, given = list(gm.graph.find_nodes(op="placeholder")), len(repeats.kept)
        self._carried, self._last = inputs[given : given + repeats.carried], inputs[given + repeats.carried :]
        self._at = dict(zip(inputs, repeats.kept, strict=False))
        self._own = {inputs[i]: each for i, each in repeats.own.items()}
        outputs = list(gm.graph.output_node().args[0])
        self._left = [outputs.pop() for _ in range(repeats.carried + repeats.last)][::-1]
        self._given = [outputs.pop() for _ in range(repeats.carried)][::-1]
        self._outputs = outputs
        self._writes = [node for node in gm.graph.nodes if node.target in _WRITES]
        self._repeated = self._behind((*self._own, *self._carried))
        self._ending = self._behind(self._last)

    def _behind(self, sources: Iterable[Node]) -> set[Node]:
        """What is computed from ``sources``."""
        found = set(sources)
        for node in self.gm.graph.nodes:
            if node.op == "call_function" and node.target not in _WRITES and not found.isdisjoint(node.all_input_nodes):
                found.add(node)
        return found - set(sources)

    def is_repeated(self, node: Node) -> bool:
        """Whether each repeat computes, is given or writes a ``node`` of its own."""
        if node in self._repeated or node in self._own:
            return True
        return node.target in _WRITES and any(map(self.is_repeated, node.all_input_nodes))

    def times(self, node: Node) -> int:
        """How many nodes of the whole graph ``node`` stands for."""
        return self.repeats.count if self.is_repeated(node) else 1

    @property
    def possible(self) -> bool:
        """Whether it comes apart as the captured graph did, and writes nothing but caches."""
        effects = (node for node in self.gm.graph.nodes if node.op == "call_function" and node.is_impure())
        shared = (node for node in (*self._outputs, *self._given) if isinstance(node, Node))
        return (
            all(node in self._writes for node in effects)
            and self._repeated.isdisjoint((*self._ending, *shared))
            and self._repeated.issuperset(self._left)
        )

    def compiled(self, compile_piece: Callable[[GraphModule, list], Callable]) -> Callable:
        """A function of the inputs of the whole graph. ``compile_piece`` is handed modules and their fake inputs."""
        done = {*self._repeated, *self._ending, *self._writes}
        before = {node for node in self.gm.graph.nodes if node.op in ("call_function", "get_attr")} - done
        stored = [leaf for node in self._writes for leaf in node.all_input_nodes]
        ending = _Piece(self.gm, self._ending, [*self._outputs, *stored])
        layer = _Piece(self.gm, self._repeated, [*self._left, *stored])
        needed = [*self._given, *layer.inputs, *ending.inputs, *self._outputs, *stored]
        pieces = {"beginning": _Piece(self.gm, before, needed), "layer": layer, "ending": ending}
        for name, piece in pieces.items():
            piece.run = _named(name, compile_piece(piece.module, piece.examples)) if piece.outputs else None
        return GraphModule({}, self._whole(*pieces.values())).forward

    def _whole(self, beginning: _Piece, each: _Piece, ending: _Piece) -> Graph:
        """The whole graph again, in calls of its pieces."""
        whole = Graph()
        inputs = [whole.placeholder(f"input_{i}") for i in range(self.repeats.inputs)]
        common = {node: inputs[at] for node, at in self._at.items()}
        beginning.call(whole, common)
        handed, layers = [common[node] for node in self._given], []
        for i in range(self.repeats.count):
            layer = common | {node: inputs[at[i]] for node, at in self._own.items()}
            layer.update(zip(self._carried, handed, strict=True))
            each.call(whole, layer)
            handed = [layer[node] for node in self._left[: len(handed)]]
            layers.append(layer)
        common.update(zip(self._last, (layers[-1][node] for node in self._left[len(handed) :]), strict=True))
        ending.call(whole, common)
        self._write(whole, common, layers)
        whole.output(tuple(common[node] if isinstance(node, Node) else node for node in self._outputs))
        return whole

    def _write(self, whole: Graph, common: dict[Node, Node], layers: Sequence[dict[Node, Node]]) -> None:
        """Every write of the whole graph: of each layer in turn, or of all as one where one of them is."""

        def together(node: Node) -> bool:
            return node.target is APPEND_LAYERS or not self.is_repeated(node)

        for merged, nodes in itertools.groupby(self._writes, together):
            for values, node in itertools.product([common] if merged else layers, list(nodes)):
                if node.target is not APPEND_LAYERS:
                    whole.node_copy(node, values.__getitem__)
                    continue
                given = arguments(node)
                each = len(given["states"]) // len(given["x"])
                entries = [(x, given["states"][each * i : each * (i + 1)]) for i, x in enumerate(given["x"])]
                of = [(values, *entry) for entry in entries for values in self._values(entry[0], common, layers)]
                given["x"] = [values[x] for values, x, _ in of]
                given["states"] = [values[tensor] for values, _, state in of for tensor in state]
                call(whole, APPEND_LAYERS, **given | {"length": common[given["length"]]})

    def _values(self, x: Node, common: dict[Node, Node], layers: Sequence[dict[Node, Node]]):
        return layers if self.is_repeated(x) else [common]


class _Piece:
    """Some ``nodes`` of a graph as a module of their own; of ``wanted``, it returns those it has.

    inputs: the nodes that it takes the values of; examples: their fake values; run: what calls it, once there is that.
    """

    run: Callable | None = None

    def __init__(self, gm: GraphModule, nodes: set[Node], wanted: Iterable):
        ordered = [node for node in gm.graph.nodes if node in nodes]
        self.outputs = list(dict.fromkeys(node for node in wanted if node in nodes))
        read = dict.fromkeys(leaf for node in ordered for leaf in node.all_input_nodes if leaf not in nodes)
        known = set().union(*(_symbols(node) for node in (*read, *ordered)))
        sizes = (node for node in gm.graph.find_nodes(op="placeholder") if symbols(node.meta["val"]) & known)
        self.inputs = list(dict.fromkeys((*sizes, *read)))
        self.examples = [node.meta["val"] for node in self.inputs]
        graph, new = Graph(), {}
        for node in self.inputs:
            new[node] = graph.placeholder(node.name)
            new[node].meta = dict(node.meta)
        for node in ordered:
            new[node] = graph.node_copy(node, new.__getitem__)
        graph.output(tuple(new[node] for node in self.outputs))
        self.module = GraphModule(gm, graph)

    def call(self, whole: Graph, values: dict[Node, Node]) -> None:
        """Call it in ``whole`` on ``values``, which its outputs are added to."""
        if self.run is not None:
            result = whole.call_function(self.run, tuple(values[node] for node in self.inputs))
            values.update(
                (node, whole.call_function(operator.getitem, (result, i))) for i, node in enumerate(self.outputs)
            )


def _named(name: str, run: Callable) -> Callable:
    """``run`` as a function that code can be generated for, and that Dynamo need not be kept from."""
    run = undisabled(run)

    def call(*inputs):
        return run(*inputs)

    call.__name__ = name
    return call


def _propagate(graph: Graph) -> None:
    """Find out the fake values of nodes that the pass has put in without."""
    missing = [node for node in graph.nodes if node.op == "call_function" and "val" not in node.meta]
    for node in missing:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
        with detect_fake_mode(args) or nullcontext():
            node.meta["val"] = node.target(*args, **kwargs)


def _symbols(node: Node) -> set:
    value = node.meta.get("val")
    sizes = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
    return set().union(*map(symbols, sizes))

"""Find the repeated layers of a decoder in a captured graph, and cut the graph down to one of them.

The next stages then see a model of one layer, however many there are; `kvpass.compile.stamp` restores the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.fx import Graph, GraphModule, Node

from .nodes import outputs_of

APPEND = torch.ops.kvpass.append_
FEWEST = 3
"""The number of repeats from which one compiled piece pays off."""
_LINKS = slice([argument.name for argument in APPEND.default._schema.arguments].index("edge"), None)
"""Arguments of ``append_`` that pass cache contents from layer to layer."""


@dataclass(frozen=True)
class Repeats:
    """A captured graph that does the same thing ``count`` times, cut down to the first repeat.

    module: the reduced graph. Its inputs are, in order: the inputs of the whole graph, except the inputs of later
        repeats; one input for each value that a repeat takes from the previous repeat (``carried``); one for each value
        of the last repeat that later nodes need (``last``). Its outputs are, in order: the outputs of the whole graph;
        the values that the first repeat takes for ``carried``; the values that it leaves for the next repeat; the
        values that it leaves for ``last``.
    inputs: number of inputs of the whole graph.
    kept: positions of the module's inputs among the inputs of the whole graph.
    own: position among the module's inputs -> the corresponding input of the whole graph for each repeat, by position.
    """

    module: GraphModule
    count: int
    inputs: int
    kept: list[int]
    own: dict[int, list[int]]
    carried: int
    last: int

    @property
    def examples(self) -> list:
        """Fake values for the inputs ``carried`` and ``last``."""
        inputs = list(self.module.graph.find_nodes(op="placeholder"))[len(self.kept) :]
        return [node.meta["example_value"] for node in inputs]


@dataclass(frozen=True)
class _Run:
    """Nodes ``[start, start + count * period)``, which do the same thing ``count`` times."""

    start: int
    period: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.count * self.period

    @property
    def spared(self) -> int:
        """The number of nodes that later stages do not have to process."""
        return (self.count - 1) * self.period


class _Captured:
    """The nodes of a captured graph, numbered, with everything known about each node in isolation."""

    def __init__(self, graph: Graph):
        self.inputs = list(graph.find_nodes(op="placeholder"))
        self.output = graph.output_node()
        self.nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        self.place = {node: i for i, node in enumerate(self.nodes)}
        self.value = {node: _described(node) for node in (*self.inputs, *self.nodes)}
        self.read = [_leaves((node.args, node.kwargs)) for node in self.nodes]
        self.text = [f"{_text(node)} {self.value[node]}" for node in self.nodes]

    def alike(self, i: int, period: int, start: int = 0) -> bool:
        """Whether nodes ``i`` and ``i + period`` do the same thing to the same inputs or to inputs ``period`` apart. In
        the first repeat, one input may come from before ``start`` and the other from within the repeat."""
        if self.text[i] != self.text[i + period]:
            return False
        return all(
            a is b or (self.value[a] == self.value[b] and a.op == b.op and self._corresponds(a, b, period, start))
            for a, b in zip(self.read[i], self.read[i + period], strict=True)
        )

    def _corresponds(self, a: Node, b: Node, period: int, start: int) -> bool:
        if a.op == "placeholder":
            return True
        first, next_ = self.place[a], self.place[b]
        return next_ == first + period or first < start <= next_ < start + period

    @cached_property
    def writes(self) -> list[int]:
        """The nodes that write a cache."""
        return [i for i, node in enumerate(self.nodes) if node.target is APPEND]

    def runs(self) -> Iterator[_Run]:
        """All repeated stretches, the most profitable first. Candidate periods are the distances between cache
        writes."""
        middle = self.writes[len(self.writes) // 2]
        found: list[_Run] = []
        for period in (write - middle for write in self.writes if write > middle):
            while found and (best := max(found, key=lambda run: run.spared)).spared >= len(self.nodes) - period:
                found.remove(best)  # longer periods cannot spare as much
                yield best
            if (run := self._run(period, middle)) is not None:
                found.append(run)
        yield from sorted(found, key=lambda run: run.spared, reverse=True)

    def _run(self, period: int, middle: int) -> _Run | None:
        """Repeats of ``period`` nodes around ``middle``."""
        begin, end = self._stretch(period, middle)
        starts = [s for s in range(max(0, begin - period), end) if self._may_start(s, begin, period)]
        count = (end - starts[0]) // period + 1 if starts else 0
        if count < FEWEST:
            return None
        as_many = [s for s in starts if (end - s) // period + 1 == count]
        return _Run(min(as_many, key=lambda s: self._carried(s, period)), period, count)

    def _may_start(self, start: int, begin: int, period: int) -> bool:
        """Whether the nodes from ``start`` to ``begin``, where `alike` nodes begin, fit a first repeat."""
        return all(self.alike(i, period, start) for i in range(start, begin))

    def _carried(self, start: int, period: int) -> int:
        """How many values a repeat that begins at ``start`` would take from the previous one. There are fewest at the
        end of a layer."""
        nodes = range(start, start + period)
        pairs = (pair for i in nodes for pair in zip(self.read[i], self.read[i + period], strict=True))
        return len({b for a, b in pairs if a is not b and self.place.get(a, start) < start})

    def _stretch(self, period: int, middle: int) -> tuple[int, int]:
        """The longest stretch around ``middle`` of nodes that are `alike` those ``period`` further on."""
        begin = end = middle
        while begin > 0 and self.alike(begin - 1, period):
            begin -= 1
        while end + period < len(self.nodes) and self.alike(end, period):
            end += 1
        return begin, end


def _leaves(arguments) -> list[Node]:
    found: list[Node] = []
    torch.fx.node.map_arg(arguments, found.append)
    return found


def _text(node: Node) -> str:
    """What ``node`` does, apart from the nodes it does it to."""
    return f"{node.op} {node.target} {torch.fx.node.map_arg((node.args, node.kwargs), lambda _: '%')!r}"


def _described(node: Node) -> str:
    """The metadata of a value, with symbols by name. Pieces with equal metadata compile to the same code."""
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {value}"
    place = *value.shape, "strides", *value.stride(), "from", value.storage_offset()
    return f"{type(value).__name__} {place} {value.dtype} {value.device} {value.requires_grad}"


def _is_linked(append: Node) -> bool:
    """Whether a layer passes on data that another layer needs to store its tokens."""
    return any(argument not in (None, []) for argument in append.args[_LINKS])


def find_repeats(gm: GraphModule) -> Repeats | str:
    """The repeats of ``gm`` that write caches and pass on nothing but values; or the reason why there are none."""
    captured = _Captured(gm.graph)
    if len(captured.writes) < 2 * FEWEST:  # for keys and for values
        return f"it has fewer than {FEWEST} packed layers"
    if any(_is_linked(captured.nodes[i]) for i in captured.writes):
        return "what its layers store depends on each other, or on attention scores"
    cuts = (_Cut(gm, captured, run).repeats() for run in captured.runs())
    return next((cut for cut in cuts if cut is not None), "its layers differ")


class _Cut:
    """A captured graph cut down to the first of its repeats."""

    def __init__(self, gm: GraphModule, captured: _Captured, run: _Run):
        self.gm, self.captured, self.run = gm, captured, run
        self.own: dict[Node, list[Node]] = {}  # input of the first repeat -> inputs of each repeat in its place
        self.taken: dict[Node, Node] = {}  # value that repeat 2 takes from repeat 1 -> what repeat 1 takes
        self.carried: dict[tuple[int, int], Node] = {}  # (node of the first repeat, argument) -> carried value

    def _repeat(self, node: Node) -> int:
        """The index of the repeat that ``node`` is in; -1 before the first."""
        place = self.captured.place.get(node, -1)
        return -1 if place < self.run.start else (place - self.run.start) // self.run.period

    def _match(self) -> bool:
        """Record how repeats differ. False if they differ in more than inputs and values passed on."""
        start, period, count, stop = self.run.start, self.run.period, self.run.count, self.run.stop
        for i in range(start, start + period):
            for which, read in enumerate(zip(*(self.captured.read[i + r * period] for r in range(count)), strict=True)):
                first, second = read[:2]
                if all(one is first for one in read):
                    shared = first not in self.own and self._repeat(first) == -1
                elif first.op == "placeholder":
                    shared = self.own.setdefault(first, list(read)) == list(read)
                elif self._repeat(first) == -1:
                    shared = self.taken.setdefault(second, first) is first
                    self.carried[i, which] = second
                else:
                    shared = self._repeat(first) == 0 and first is not second
                if not shared:
                    return False
        inputs = [one for each in self.own.values() for one in each]
        if len(set(inputs)) < len(inputs):
            return False
        elsewhere = [
            leaf
            for i, read in enumerate(self.captured.read)
            if not start <= i < stop
            for leaf in read
        ] + _leaves(self.captured.output.args)  # fmt: skip
        inside = range(count - 1)
        return set(inputs).isdisjoint(elsewhere) and not any(self._repeat(leaf) in inside for leaf in elsewhere)

    def repeats(self) -> Repeats | None:
        if not self._match():
            return None
        captured, run, graph = self.captured, self.run, Graph()
        later = {one for each in self.own.values() for one in each[1:]}
        kept = [i for i, node in enumerate(captured.inputs) if node not in later]
        new = {captured.inputs[i]: graph.node_copy(captured.inputs[i]) for i in kept}
        given = {value: _input(graph, f"carried_{i}", value) for i, value in enumerate(self.taken)}
        behind = [*(read for read in captured.read[run.stop :]), _leaves(captured.output.args)]
        needed = dict.fromkeys(leaf for read in behind for leaf in read if self._repeat(leaf) == run.count - 1)
        lasts = {value: _input(graph, f"last_{i}", value) for i, value in enumerate(needed)}

        for i in (*range(run.start + run.period), *range(run.stop, len(captured.nodes))):
            slots = itertools.count()

            def mapped(node: Node, i=i, slots=slots) -> Node:
                slot = i, next(slots)
                return given[self.carried[slot]] if slot in self.carried else lasts.get(node) or new[node]

            new[captured.nodes[i]] = graph.node_copy(captured.nodes[i], mapped)
        back = (run.count - 1) * run.period
        made = [captured.nodes[captured.place[value] - back] for value in needed]
        outputs = torch.fx.node.map_arg(outputs_of(self.gm.graph), lambda node: lasts.get(node) or new[node])
        handed = [*self.taken.values(), *self.taken, *made]
        graph.output((*outputs, *(new[node] for node in handed)))
        position = {node: i for i, node in enumerate(captured.inputs)}
        own = {kept.index(position[one]): [position[other] for other in each] for one, each in self.own.items()}
        sizes = len(captured.inputs), kept, own, len(given), len(lasts)
        return Repeats(GraphModule(self.gm, graph), run.count, *sizes)


def _input(graph: Graph, name: str, like: Node) -> Node:
    node = graph.placeholder(name)
    node.meta["example_value"] = like.meta["example_value"]
    return node

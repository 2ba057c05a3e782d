"""Rotary embedding before a cache write: the keys before it, and the tables that rotate them.

Models write rotary embedding in many ways. The nodes between the projection and the cache are run on random keys and
tables, and compared with a rotation of channel pairs. The tables of a graph are then read off by rotating a unit vector
with a copy of the model's own nodes. So scaled tables, partial rotation and interleaved pairs need no special cases.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node

from ..codec.rope import parse_rope, rotate, split_pairs
from ..errors import NotCapturedError
from .calls import ATTEND
from .evaluate import at, hints, is_size, run, upstream
from .nodes import is_tensor, shape, value_of

aten = torch.ops.aten
_PROJECTIONS = {
    aten.linear.default,
    aten.addmm.default,
    aten.mm.default,
    aten.embedding.default,
    ATTEND,
    aten.scaled_dot_product_attention.default,
}
_POSITIONAL = {aten.cos.default, aten.sin.default, aten.gather.default, aten.index.Tensor, aten.index_select.default}
_COUNTING = {aten.arange.default, aten.arange.start, aten.arange.start_step}
_LARGEST_TABLE = 100  # upper bound on the nodes that compute a table


@dataclass
class Rotation:
    """``output`` is ``source`` with its channel pairs rotated as ``rope`` says (`kvpass.codec.rope`).

    before: ``[B, H, S, D]``, the keys or queries before the rotation.
    tables: cos and sin on trial values, to tell whether two rotations are equal.
    """

    output: Node
    source: Node
    before: Node
    rope: str
    tables: tuple[torch.Tensor, torch.Tensor]


class Rotations:
    """Finds rotations in one graph. Trial values are kept, so that layers can be compared."""

    def __init__(self, graph: Graph, inputs: Sequence):
        self.graph, self.generator = graph, torch.Generator().manual_seed(0)
        self.values: dict[Node, Any] = {}
        placeholders = (node for node in graph.nodes if node.op == "placeholder")
        self.moved: set[Node] = set()
        self.inputs = dict(zip(placeholders, inputs, strict=True))
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        values = (node.meta.get("val") for node in graph.nodes)
        self.assignment = hints([value for value in values if isinstance(value, (torch.Tensor, torch.SymInt))])

    def find(self, output: Node) -> Rotation | None:
        """The rotation that ends in ``output`` ``[B, H, S, D]``; None if there is none.

        Raises `NotCapturedError` if positions enter in a way that is not a rotation of channel pairs.
        """
        positional = False
        for source, tables in self._entries(output):
            positional = positional or any(_is_positional(n) for table in tables for n in upstream(table))
            if positional and (rotation := self._verified(output, source)) is not None:
                return rotation
        if positional:
            raise NotCapturedError(
                "positions enter keys or queries by something other than a rotation of channel pairs"
            )
        return None

    def _entries(self, output: Node):
        """Nodes that every path from the projection to ``output`` passes through, nearest first, with the tables on the
        way."""
        frontier, tables = {output}, []
        while True:
            node = max(frontier, key=self.order.__getitem__)
            frontier.remove(node)
            if node.op != "call_function" or node.target in _PROJECTIONS:
                return
            for entry in node.all_input_nodes:
                if is_size(entry):
                    continue
                if self._is_table(entry):
                    tables.append(entry)
                else:
                    frontier.add(entry)
            if not frontier:
                return
            if len(frontier) == 1:
                yield next(iter(frontier)), tables

    def _is_table(self, node: Node) -> bool:
        nodes = upstream(node)
        return len(nodes) <= _LARGEST_TABLE and not any(n.target in _PROJECTIONS for n in nodes)

    def _sample(self, node: Node) -> torch.Tensor:
        """Trial values for an input of the graph: tables and frequencies, or positions other than 0."""
        given, fake = self.inputs[node], value_of(node)
        if fake.dtype.is_floating_point and not isinstance(given, FakeTensor):
            return given.detach().cpu()
        sizes = self._shape(node)
        if fake.dtype.is_floating_point:
            return torch.rand(sizes, generator=self.generator).to(fake.dtype)
        return (1 + torch.arange(torch.Size(sizes).numel()) % 7).view(sizes).to(fake.dtype)

    def _shape(self, node: Node) -> list:
        return [at(size, self.assignment) for size in shape(node)]

    def _verified(self, output: Node, source: Node) -> Rotation | None:
        swapped = _swapped(output, source)
        if swapped is None:
            return None
        nodes, dtype = upstream(output, [source]), value_of(source).dtype
        turning = _turning(nodes, source)
        tables = [node for node in nodes if node not in turning]
        for node in tables:
            if node.op == "placeholder" and not is_size(node) and node not in self.values:
                self.values[node] = self._sample(node)
            run([node], self.values, self.assignment)
            if node.target in _COUNTING and self._shape(node) == [1] and node not in self.moved:
                self.values[node] = self.values[node] + 5  # position 0 rotates by nothing
                self.moved.add(node)

        def turn(x: torch.Tensor) -> torch.Tensor:
            """``output`` for the source value ``x`` ``[B, H, S, D]``."""
            values = {**self.values, source: x.transpose(1, 2) if swapped else x}
            run(turning, values, self.assignment)
            return values[output].float()

        sizes, tolerance = self._shape(output), 1e-5 if dtype == torch.float32 else 3e-2
        x = torch.randn(sizes, generator=self.generator).to(dtype)
        expected = turn(x)
        widths = {shape(node)[-1] for node in turning if is_tensor(node)}
        for pairs in sorted({width // 2 for width in widths if width <= sizes[-1]} - {0}, reverse=True):
            for rope in (f"half-{pairs}", f"interleaved-{pairs}"):
                unit = torch.zeros(sizes, dtype=dtype)
                split_pairs(unit, rope)[0].fill_(1)
                cos, sin, _ = split_pairs(turn(unit)[:, 0], rope)
                turned = rotate(x.float(), cos, sin, rope)
                if sin.abs().max() > 1e-3 and torch.allclose(turned, expected, atol=tolerance, rtol=tolerance):
                    return Rotation(output, source, self._before(source, swapped), rope, (cos, sin))
        return None

    def _before(self, source: Node, swapped: bool) -> Node:
        if not swapped:
            return source
        with self.graph.inserting_after(source):
            before = self.graph.call_function(aten.transpose.int, (source, 1, 2))
        before.meta["val"] = value_of(source).transpose(1, 2)
        return before


def _is_positional(node: Node) -> bool:
    """Whether ``node`` computes a table of positions, or is one passed in (weights have fewer dims)."""
    given = node.op == "placeholder" and is_tensor(node) and value_of(node).ndim > 2
    return given or node.target in _POSITIONAL


def _swapped(output: Node, source: Node) -> bool | None:
    """Whether ``source`` is ``[B, S, H, D]`` instead of ``[B, H, S, D]`` like ``output``; None if it is neither."""
    if not is_tensor(source):  # for example, halves of a tensor
        return None
    theirs, mine = (tuple(map(str, shape(node))) for node in (source, output))
    if theirs == mine:
        return False
    return True if len(mine) == 4 and theirs == (mine[0], mine[2], mine[1], mine[3]) else None


def _turning(nodes: list[Node], source: Node) -> list[Node]:
    """``source`` and the ``nodes`` that depend on it."""
    turning = {source: None}
    for node in nodes:
        if any(entry in turning for entry in node.all_input_nodes):
            turning[node] = None
    return list(turning)


def turns_alike(a: Rotation, b: Rotation) -> bool:
    """Whether two rotations of one graph use the same tables."""
    return a.rope == b.rope and all(
        x.shape == y.shape and torch.allclose(x, y, atol=1e-6) for x, y in zip(a.tables, b.tables, strict=True)
    )


def insert_tables(graph: Graph, rotation: Rotation) -> tuple[Node, Node]:
    """Nodes at the insertion point of ``graph`` with cos and sin of the call's own tokens, ``[B, S, p]``.

    They are the result of rotating 1 in the first channel of every pair and 0 elsewhere, and depend on no layer.
    """
    source, fake = rotation.source, value_of(rotation.source)
    pairs, interleaved = parse_rope(rotation.rope)
    call = graph.call_function
    channel = call(aten.arange.default, (fake.shape[-1],), {"device": fake.device})
    first = call(aten.lt.Scalar, (channel, 2 * pairs if interleaved else pairs))
    if interleaved:
        first = call(
            aten.logical_and.default, (first, call(aten.eq.Scalar, (call(aten.remainder.Scalar, (channel, 2)), 0)))
        )
    sizes = [_size(graph, source, dim) for dim in range(fake.ndim)]
    ones = call(aten.ones.default, (sizes,), {"dtype": fake.dtype, "device": fake.device})
    unit = call(aten.mul.Tensor, (ones, call(aten.to.dtype, (first, fake.dtype))))
    copies = {source: unit}
    for node in _turning(upstream(rotation.output, [source]), source)[1:]:
        copies[node] = graph.node_copy(node, lambda entry: copies.get(entry, entry))
    head = call(aten.select.int, (copies[rotation.output], 1, 0))
    ranges = ((0, 2 * pairs, 2), (1, 2 * pairs, 2)) if interleaved else ((0, pairs, 1), (pairs, 2 * pairs, 1))
    cos, sin = (call(aten.slice.Tensor, (head, 2, *bounds)) for bounds in ranges)
    return cos, sin


def _size(graph: Graph, tensor: Node, dim: int) -> int | Node:
    """A size of ``tensor``, read from an input of the graph if one has it, so that it does not depend on a layer."""
    size = shape(tensor)[dim]
    if isinstance(size, int):
        return size
    where = (
        (node, i)
        for node in (*graph.find_nodes(op="placeholder"), tensor)
        if is_tensor(node)
        for i, other in enumerate(shape(node))
        if isinstance(other, torch.SymInt) and other.node.expr == size.node.expr
    )
    found = graph.call_function(aten.sym_size.int, next(where))
    found.meta["val"] = size
    return found

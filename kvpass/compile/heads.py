"""Recognize keys or values that are heads of a cache in another order, by running the nodes in between."""

import torch
from torch.fx import Graph, Node

from .calls import DEQUANTIZE, compute
from .evaluate import at, hints, leaves, run, symbols, upstream
from .nodes import operands, shape, value_of

aten = torch.ops.aten

_LENGTHS = 2, 5


def is_whole(node: Node) -> bool:
    """Whether ``node`` is a dequantized past followed by the tokens of the call, ``[B, H, T, D]``."""
    if node.target is not aten.cat.default or len(shape(node)) != 4:
        return False
    return node.args[1:] in ((2,), (-2,)) and len(operands(node)) == 2 and operands(node)[0].target is DEQUANTIZE


def selected(node: Node) -> tuple[Node, tuple[int, ...]] | None:
    """The tokens of a cache ``[B, H, T, D]`` (see `is_whole`), and for each head of ``node`` ``[B, H', T, D]`` the head
    it is a copy of, or nothing if these are all heads in order, each repeated equally often. None if ``node`` is
    anything else."""
    wholes = [one for one in node.graph.nodes if is_whole(one)]
    nodes = upstream(node, wholes)
    found = [one for one in nodes if one in wholes]
    if len(found) != 1 or len(shape(node)) != 4 or leaves(one for one in nodes if one is not found[0]):
        return None
    (whole,), number = found, shape(found[0])[1]
    heads = {_heads(node, whole, nodes, tokens) for tokens in _LENGTHS}
    if len(heads) != 1 or (only := heads.pop()) is None or not isinstance(number, int):
        return None
    in_order = tuple(head for head in range(number) for _ in range(len(only) // number))
    return whole, () if only == in_order else only


def select(graph: Graph, x: Node, heads: tuple[int, ...]) -> Node:
    """The ``heads`` of ``x`` ``[B, H, T, D]``, at the insertion point of ``graph``."""
    starts = [i for i, head in enumerate(heads) if i == 0 or head != heads[i - 1] + 1]
    parts = [
        compute(graph, aten.slice.Tensor, x, 1, heads[start], heads[stop - 1] + 1)
        for start, stop in zip(starts, [*starts[1:], len(heads)], strict=True)
    ]
    return parts[0] if len(parts) == 1 else compute(graph, aten.cat.default, parts, 1)


def _heads(node: Node, whole: Node, nodes: list[Node], tokens: int) -> tuple[int, ...] | None:
    """The head of ``whole`` that each head of ``node`` equals, if there are ``tokens`` of either kind."""
    fakes = [value for one in nodes if isinstance(value := one.meta.get("val"), (torch.Tensor, torch.SymInt))]
    assignment = hints(fakes)
    for part in operands(whole):
        size = shape(part)[2]
        for symbol in symbols(size):
            assignment[symbol] += tokens - at(size, assignment)
    sizes = [at(size, assignment) for size in shape(whole)]
    generator = torch.Generator().manual_seed(tokens)
    values = {whole: torch.rand(sizes, generator=generator).to(value_of(whole).dtype)}
    run(nodes, values, assignment)
    x, out = values[whole], values[node]
    if out.shape[0] != x.shape[0] or out.shape[2:] != x.shape[2:]:
        return None
    same = [[torch.equal(out[:, i], x[:, j]) for j in range(x.shape[1])] for i in range(out.shape[1])]
    return tuple(row.index(True) for row in same) if all(map(any, same)) else None

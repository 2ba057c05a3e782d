"""Recognize what a program writes to a cache of its own, and what it reads back.

Such a program receives the dequantized past, possibly with room after it, writes the present there by any means, and
reads a part of the result. No way of writing is matched. Instead, the nodes in between are run on random values, and
the result is compared with the past followed by the present.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .appends import Append, appends
from .calls import DEQUANTIZE, ROTATE, tensors_argument
from .evaluate import at, hints, leaves, run, symbols, upstream
from .nodes import is_tensor, shape, value_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Present:
    """The part that the program adds to the past: ``source``, ``[B, H_kv, S, D]`` or ``[B, S, H_kv, D]``, and the
    ``node`` that has it as ``[B, H_kv, S, D]``."""

    source: Node
    node: Node

    def value(self, values: dict[Node, Tensor]) -> Tensor:
        """Its value, given the value of its source."""
        return values[self.source] if self.source is self.node else values[self.source].transpose(1, 2)


def presents(graph: Graph) -> dict[Node, Present]:
    """Past -> present, for every cache to which the program itself adds the present.

    Its append stored the end of the whole, as the program left it; from here on it stores the present itself.
    """
    found = {}
    for append in appends(graph):
        past = next((_as_read(node) for node in append.ring.users if _reads(node, append)), None)
        if past is None or past not in upstream(append.x, [past]):
            continue
        if (present := _present(append.x, past)) is not None:
            append.node.update_kwarg("x", present.node)
            found[past] = present
    return found


def _reads(node: Node, append: Append) -> bool:
    """Whether ``node`` dequantizes the tokens before those of ``append``. They are recognized by the ring, because
    quantized values may be another layer's."""
    return node.target is DEQUANTIZE and append.ring in tensors_argument(node, "state")


def _as_read(past: Node) -> Node:
    """``past`` as the program reads it; keys stored before rotary embedding are rotated first."""
    return next((user for user in past.users if user.target is ROTATE), past)


def _present(x: Node, past: Node) -> Present | None:
    """The node that has the values of ``x`` without passing through the cache."""
    nodes = upstream(x, [past])
    derived = {past}
    for node in nodes:
        if not derived.isdisjoint(node.all_input_nodes):
            derived.add(node)
    sources = {source for node in derived - {past} for source in node.all_input_nodes}
    size = torch.Size(value_of(x).shape).numel()
    for source in sources - derived:
        if not is_tensor(source) or len(shape(source)) != 4 or value_of(source).shape.numel() != size:
            continue
        swapped = shape(source) != shape(x)
        if all(
            values is not None and torch.equal(values[x], values[source].transpose(1, 2) if swapped else values[source])
            for values in _trials(x, (past, source))
        ):
            return Present(source, _transposed(source) if swapped else source)
    return None


def _transposed(node: Node) -> Node:
    with node.graph.inserting_after(node):
        swapped = node.graph.call_function(aten.transpose.int, (node, 1, 2))
    swapped.meta["val"] = value_of(node).transpose(1, 2)
    return swapped


def read_back(node: Node, found: dict[Node, Present]) -> tuple[Node, Node, bool] | None:
    """The past and present that make up keys or values ``[B, H, T, D]`` or ``[B, H_kv, r, T, D]``, heads repeated in
    order, and whether there is room after them that attention must ignore. None if keys or values consist of anything
    else."""
    nodes = upstream(node, [*found, *(present.source for present in found.values())])
    pasts = [past for past in found if past in nodes]
    if len(pasts) != 1:
        return None
    (past,), padded = pasts, set()
    present = found[past]
    for values in _trials(node, (past, present.source)):
        if values is None:
            return None
        whole = torch.cat([values[past], present.value(values)], 2)
        if not _is_whole(values[node], whole):
            return None
        padded.add(values[node].shape[-2] > whole.shape[2])
    return (past, present.node, padded.pop()) if len(padded) == 1 else None


def _is_whole(got: Tensor, whole: Tensor) -> bool:
    tokens, heads = whole.shape[2], whole.shape[1]
    if got.ndim == 5:
        if got.shape[1] != heads:
            return False
        got = got.flatten(1, 2) if got.shape[2] > 1 else got[:, :, 0]
    if got.ndim != 4 or got.shape[1] % heads or got.shape[2] < tokens:
        return False
    return torch.equal(got[:, :, :tokens], whole.repeat_interleave(got.shape[1] // heads, 1))


def _trials(target: Node, given: tuple[Node, Node]):
    """Values of all nodes between ``given``, which are random, and ``target``, at two lengths; None if they depend on
    anything else."""
    nodes = upstream(target, given)
    if any(node not in given for node in leaves(nodes)):
        yield None
        return
    fakes = [node.meta["val"] for node in nodes if node.meta.get("val") is not None]
    known = hints([value for value in fakes if isinstance(value, (Tensor, torch.SymInt))])
    growing = set().union(*map(symbols, shape(given[0])))
    change = -1 if at(shape(given[0])[2], known) else 1
    for times in (0, 1):
        assignment = {symbol: value + times * change * (symbol in growing) for symbol, value in known.items()}
        values = {}
        for node in given:
            fake = value_of(node)
            values[node] = torch.randn([at(size, assignment) for size in fake.shape]).to(fake.dtype)
        run(nodes, values, assignment)
        yield values

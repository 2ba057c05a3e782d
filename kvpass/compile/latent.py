"""Recognize keys and values that are expanded from a cached latent (MLA), so that attention can run over the latent.

A key is ``cat([W_k @ latent, rotary])`` and a value ``W_v @ latent``, with weights for each head and a rotary part that
all heads share. So ``q . key`` is ``(W_k.T @ q) . latent + q . rotary``, and the sum over values is ``W_v`` times the
sum over latents. In this *absorbed* form the past is never expanded, and all heads share one key of
``cat([latent, rotary])``.

No way of expanding is matched. The nodes in between are run on numbers that tell which row of the weight each channel
is a product with, and then on random values, which the absorbed form has to reproduce.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from .calls import compute
from .evaluate import at, hints, leaves, run, symbols, upstream
from .heads import is_whole
from .nodes import operands, shape, value_of

aten = torch.ops.aten

_BASE, _DIGITS = 128, 3  # numbers below 128 are exact in all float dtypes
_LENGTHS = 2, 5
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}  # in standard deviations; 16-bit dtypes are coarser


@dataclass(frozen=True)
class Rows:
    """Rows of ``weight`` ``[H * N, R]``: for each head, ``count`` of its N rows, from ``start`` on."""

    weight: Node
    heads: int
    start: int
    count: int

    def of(self, graph: Graph, dtype: torch.dtype) -> Node:
        """The rows as a tensor ``[H, count, R]``, at the insertion point of ``graph``."""
        weight = self.weight
        if value_of(weight).dtype != dtype:
            weight = compute(graph, aten.to.dtype, weight, dtype)
        by_head = compute(graph, aten.unflatten.int, weight, 0, [self.heads, shape(weight)[0] // self.heads])
        return compute(graph, aten.slice.Tensor, by_head, 1, self.start, self.start + self.count)


@dataclass(frozen=True)
class Expansion:
    """How the keys ``[B, H, T, D_k]`` and values ``[B, H, T, D_v]`` of an attention follow from what its layer caches.

    latent, rotary: the nodes ``cat([past, present])``, ``[B, 1, T, R]`` and ``[B, 1, T, P]``.
    keys, values: the rows that are multiplied by the latent.
    key_start, rotary_start: where the products and where the rotary part begin among the channels of a key.
    """

    latent: Node
    rotary: Node
    keys: Rows
    values: Rows
    key_start: int
    rotary_start: int

    def absorb(self, graph: Graph, query: Node) -> Node:
        """The queries ``[B, H, S, R + P]`` for ``cat([latent, rotary])``, from ``query`` ``[B, H, S, D_k]``."""
        parts = (self.key_start, self.keys.count), (self.rotary_start, shape(self.rotary)[3])
        products, beside = (compute(graph, aten.slice.Tensor, query, 3, start, start + n) for start, n in parts)
        absorbed = compute(graph, aten.matmul.default, products, self.keys.of(graph, value_of(query).dtype))
        return compute(graph, aten.cat.default, [absorbed, beside], 3)

    def expand(self, graph: Graph, latents: Node) -> Node:
        """The output ``[B, H, S, D_v]`` for the attended ``latents`` ``[B, H, S, R]``."""
        rows = self.values.of(graph, value_of(latents).dtype)
        return compute(graph, aten.matmul.default, latents, compute(graph, aten.transpose.int, rows, 1, 2))


def expansion(keys: Node, values: Node) -> Expansion | None:
    """How ``keys`` and ``values`` are expanded from a cached latent; None if they are anything else."""
    wholes = [node for node in keys.graph.nodes if is_whole(node)]
    of_keys, of_values = upstream(keys, wholes), upstream(values, wholes)
    weights = [leaves(nodes) for nodes in (of_keys, of_values)]
    latents = [node for node in wholes if node in of_values]
    others = [node for node in wholes if node in of_keys and node not in latents]
    if [len(weights[0]), len(weights[1]), len(latents), len(others)] != [1, 1, 1, 1] or latents[0] not in of_keys:
        return None
    (latent,), (rotary,), ((key_weight,), (value_weight,)) = latents, others, weights
    if not all(_is_weight(weight, latent) for weight in (key_weight, value_weight)):
        return None
    if len(shape(keys)) != 4 or len(shape(values)) != 4 or shape(latent)[1] != 1 or shape(rotary)[1] != 1:
        return None
    trial = _Trial(latent, rotary, key_weight, value_weight, keys, values, list(dict.fromkeys([*of_keys, *of_values])))
    return trial.read()


def _is_weight(weight: Node, latent: Node) -> bool:
    value = weight.meta.get("val")
    if not isinstance(value, Tensor) or value.ndim != 2 or not value.is_floating_point():
        return False
    sizes = [*value.shape, shape(latent)[3]]
    return all(isinstance(size, int) for size in sizes) and sizes[1] == sizes[2] >= _DIGITS


def _digits(numbers: Tensor) -> Tensor:
    """The digits of ``numbers`` ``[N]``: ``[N, 3]``."""
    return torch.stack([numbers // _BASE**place % _BASE for place in range(_DIGITS)], -1)


@dataclass(frozen=True)
class _Trial:
    """Runs ``nodes``, which compute ``keys`` and ``values`` from the other fields."""

    latent: Node
    rotary: Node
    key_weight: Node
    value_weight: Node
    keys: Node
    values: Node
    nodes: list[Node]

    def read(self) -> Expansion | None:
        """The expansion that reproduces keys and values; None if there is none."""
        assignment = self._sizes(_DIGITS)
        numbers = None if assignment is None else self._numbers(assignment)
        if numbers is None:
            return None
        key_numbers, value_numbers = numbers
        is_row = key_numbers[0] >= 0
        key_start, rotary_start = (int(part.int().argmax()) for part in (is_row, ~is_row))
        count, rotated = int(is_row.sum()), int((~is_row).sum())
        keys = _rows(self.key_weight, key_numbers[:, key_start : key_start + count])
        values = _rows(self.value_weight, value_numbers)
        beside = -1 - key_numbers[:, rotary_start : rotary_start + rotated]
        whole = rotated == shape(self.rotary)[3]
        in_order = whole and torch.equal(beside, torch.arange(rotated).expand_as(beside))
        if keys is None or values is None or not in_order:
            return None
        found = Expansion(self.latent, self.rotary, keys, values, key_start, rotary_start)
        return found if all(map(self._reproduces, [found] * len(_LENGTHS), _LENGTHS)) else None

    def _sizes(self, tokens: int) -> dict[Any, int] | None:
        """Sizes of the graph with a past of ``tokens`` tokens and, if it varies, as many new ones; None if there are no
        such sizes."""
        fakes = [value for node in self.nodes if isinstance(value := node.meta.get("val"), (Tensor, torch.SymInt))]
        known = hints(fakes)
        past, present = operands(self.latent)
        for node in (present, past):
            size = shape(node)[2]
            for symbol in symbols(size):
                known[symbol] += tokens - at(size, known)
            if symbols(size) and at(size, known) != tokens:
                return None
        return known

    def _run(self, given: dict[Node, Tensor], assignment: dict[Any, int]) -> tuple[Tensor, Tensor]:
        values = {node: tensor.to(value_of(node).dtype) for node, tensor in given.items()}
        run(self.nodes, values, assignment)
        return values[self.keys], values[self.values]

    def _numbers(self, assignment: dict[Any, int]) -> tuple[Tensor, Tensor] | None:
        """The number of the row that each channel is a product with, ``[H, D]`` int64, for keys and values. Channels of
        the rotary part are numbered -1, -2 and so on. None if any channel is something else."""
        given = {}
        for node in (self.latent, self.rotary):
            given[node] = torch.zeros([at(size, assignment) for size in shape(node)])
        for place in range(_DIGITS):
            given[self.latent][:, :, place, place] = 1.0
        channels = torch.arange(given[self.rotary].shape[3])
        given[self.rotary][:, :, :_DIGITS] = -1.0 - _digits(channels).mT.float()
        for weight in (self.key_weight, self.value_weight):
            given[weight] = torch.zeros(*map(int, shape(weight)))
            given[weight][:, :_DIGITS] = _digits(torch.arange(len(given[weight]))).float()
        found = []
        for x in self._run(given, assignment):
            digits = x[0, :, :_DIGITS].double()
            if not torch.equal(digits, digits.round()) or (digits.min(1).values < 0).ne(digits.max(1).values < 0).any():
                return None
            sign = torch.where(digits < 0, -1.0 - digits, digits)
            number = sum(sign[:, place].long() * _BASE**place for place in range(_DIGITS))
            found.append(torch.where(digits[:, 0] < 0, -1 - number, number))
        return found[0], found[1]

    def _reproduces(self, found: Expansion, tokens: int) -> bool:
        """Whether ``found`` gives the keys and values of random latents."""
        assignment, dtype = self._sizes(tokens), value_of(self.keys).dtype
        if assignment is None:
            return False
        nodes = dict.fromkeys((self.latent, self.rotary, self.key_weight, self.value_weight))
        given = {node: torch.randn([at(size, assignment) for size in shape(node)]).to(dtype) for node in nodes}
        keys, values = self._run(given, assignment)
        latent, rotary = given[self.latent].float(), given[self.rotary].float()
        products = [_products(latent, given[rows.weight].float(), rows) for rows in (found.keys, found.values)]
        expected = torch.zeros(keys.shape)
        expected[..., found.key_start : found.key_start + found.keys.count] = products[0]
        expected[..., found.rotary_start : found.rotary_start + rotary.shape[3]] = rotary
        return _close(keys, expected) and _close(values, products[1])


def _products(latent: Tensor, weight: Tensor, rows: Rows) -> Tensor:
    by_head = F.linear(latent[:, 0], weight).unflatten(-1, (rows.heads, -1))
    return by_head[..., rows.start : rows.start + rows.count].transpose(1, 2)


def _close(got: Tensor, expected: Tensor) -> bool:
    if got.shape != expected.shape:
        return False
    far = (got.float() - expected).abs().max()
    return bool(far <= _TOLERANCES.get(got.dtype, 0.1) * expected.std())


def _rows(weight: Node, numbers: Tensor) -> Rows | None:
    """The rows ``numbers`` ``[H, count]`` of ``weight``; None if they are not the same part of the rows of each
    head."""
    (heads, count), total = numbers.shape, int(shape(weight)[0])
    if not count or total % heads:
        return None
    start = int(numbers[0, 0])
    expected = torch.arange(heads)[:, None] * (total // heads) + start + torch.arange(count)
    return Rows(weight, heads, start, count) if torch.equal(numbers, expected) else None

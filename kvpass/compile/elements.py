"""Express an element of a computed tensor as a function of its index and of the graph's sizes.

Elements are traced back, through all ops that move them, to the constants, `arange` and comparisons they come from.
Results are exact; anything that is not understood raises `Unproven`.
"""

from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from .evaluate import constant, is_size
from .linear import Linear, impossible
from .nodes import Size, function_of, indices, integer, integers, is_tensor, operand, operands, shape, value_of

aten = torch.ops.aten

Case = tuple[frozenset[Linear], Tensor | Linear]
"""The value of an element if some inequalities hold: a tensor of one element, or a varying int64."""

_MOST_CASES = 128
_TOO_LARGE = 1 << 31  # bounds lengths and coefficients, so that sums stay within int64
_ZERO, _ONE = Linear.of({}), Linear.of({}, 1)
_SAME = {aten.alias, aten.clone, aten.contiguous, aten.detach, aten.lift_fresh_copy}
_CASTS = {aten.to, aten._to_copy, aten.type_as}
_RESHAPING = {aten.reshape, aten.view, aten._unsafe_view, aten.unsqueeze, aten.squeeze, aten.flatten, aten.unflatten}
_PICKING = {aten.index, aten._unsafe_index, aten.index_select, aten.gather, aten.flip, aten.roll, aten.repeat}
_SWAPPING = {aten.transpose, aten.t, aten.permute}
_FILLED = {aten.full: 1, aten.full_like: 1, aten.new_full: 2, aten.scalar_tensor: 0}  # op -> index of the fill value
_EQUAL = {
    aten.zeros: 0, aten.zeros_like: 0, aten.new_zeros: 0, aten.ones: 1, aten.ones_like: 1, aten.new_ones: 1,
}  # fmt: skip
_POINTWISE = {aten.__and__, aten.__or__, aten.where, aten.masked_fill} | _CASTS  # pointwise ops that lack the tag
_COMPARED = {  # op -> its result for a difference below, at and above 0
    aten.le: (True, True, False), aten.less_equal: (True, True, False), aten.lt: (True, False, False),
    aten.less: (True, False, False), aten.ge: (False, True, True), aten.greater_equal: (False, True, True),
    aten.gt: (False, False, True), aten.greater: (False, False, True), aten.eq: (False, True, False),
    aten.ne: (True, False, True), aten.not_equal: (True, False, True),
}  # fmt: skip


class Unproven(Exception):
    """Something about an element is not understood."""


def whole(size: Size) -> Linear:
    """A size of the graph as a `Linear`. Raises `Unproven` if it is not linear in the graph's symbols."""
    found = Linear.size(size)
    if found is None:
        raise Unproven
    return found


class Elements:
    """The elements of ``nodes``, which are complete and in graph order.

    data: the value assumed for every element of the inputs.
    facts: quantities known to be 0 or more, besides sizes.
    read: the elements of inputs that were used, and their indices.
    """

    def __init__(self, nodes: list[Node], data: int = 1, facts: Iterable[Linear] = ()):
        self.data, self.read = data, set[tuple[Node, tuple[Linear, ...]]]()
        self.known: dict[tuple[Node, tuple[Linear, ...]], list[Case]] = {}
        self.numbers = count()
        sizes = {Linear.size(size) for node in nodes if is_tensor(node) for size in shape(node)}
        self.facts = {*facts, *sizes} - {None}

    def anywhere(self, size: Size) -> Linear:
        """An unknown index into a dim of ``size``."""
        length = Linear.size(size)
        if length == _ONE:
            return _ZERO
        where = Linear.of({next(self.numbers): 1})
        self.facts |= {where} if length is None else {where, length - where - 1}
        return where

    def possible(self, given: Iterable[Linear]) -> bool:
        """Whether all of ``given`` may be 0 or more at once."""
        return not impossible({*self.facts, *given})

    def always(self, condition: Linear) -> bool:
        """Whether ``condition`` is proven to be 0 or more."""
        return not self.possible({-condition - 1})

    def cases(self, node: Node, index: tuple[Linear, ...]) -> list[Case]:
        """The value of the element of ``node`` at ``index``, as disjoint cases that cover everything."""
        key = node, index
        if key not in self.known:
            self.known[key] = list(self._cases(node, index))
            if len(self.known[key]) > _MOST_CASES:
                raise Unproven
        return self.known[key]

    def _cases(self, node: Node, index: tuple[Linear, ...]) -> Iterable[Case]:
        if node.op != "call_function" or is_size(node):
            return [(frozenset(), self._given(node, index))]
        op = getattr(node.target, "overloadpacket", None)
        if op is aten.arange:
            return [(frozenset(), _arange(node, *index))]
        if op in _FILLED or op in _EQUAL:
            value = node.args[_FILLED[op]] if op in _FILLED else _EQUAL[op]
            if not isinstance(value, bool | int | float):
                raise Unproven
            return [(frozenset(), _one(index, value, value_of(node).dtype))]
        if op in (aten.tril, aten.triu):
            return self._triangle(node, op is aten.tril, index)
        if op is aten.diff:
            return self._difference(node, index)
        if op is aten.cumsum:
            return self._sum_of_nothing(node, index)
        if op in (aten.index, aten._unsafe_index) and (source := self._looked_up(node, index)) is not None:
            return self.cases(operand(node), source)
        if op in (aten.cat, aten.hstack):
            return self._joined(node, 1 if op is aten.hstack else _argument(node, 1, "dim", 0), index)
        source = self._source(node, op, index)
        if source is not None:
            return self.cases(operand(node), source)
        tags = getattr(node.target, "tags", ())
        if op in _POINTWISE or (torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags):
            return self._pointwise(node, op, index)
        raise Unproven

    def _given(self, node: Node, index: tuple[Linear, ...]) -> Tensor | Linear:
        """The value of a node that is not computed: a size, a constant of equal elements, or data."""
        if is_size(node):
            return whole(node.meta["val"])
        tensor = constant(node)
        if tensor is None:
            self.read.add((node, index))
            return _one(index, self.data, value_of(node).dtype)
        if not tensor.numel() or not (tensor == tensor.flatten()[0]).all():
            raise Unproven
        return tensor.flatten()[0].view([1] * len(index))

    def _source(self, node: Node, op, index: tuple[Linear, ...]) -> tuple[Linear, ...] | None:
        """The index of the element in the first argument, if ``node`` only moves elements."""
        if op in _SAME or (op in _CASTS and value_of(operand(node)).dtype == value_of(node).dtype):
            return index
        if op is aten.expand:
            return _behind(operand(node), index)
        if op is aten.slice or op is aten.select:
            return self._part(node, op is aten.select, index)
        if op in _SWAPPING:
            return _swapped(node, op, index)
        if op in _RESHAPING:
            before, after = ([Linear.size(size) for size in shape(of)] for of in (operand(node), node))
            if None not in before and [s for s in before if s != _ONE] == [s for s in after if s != _ONE]:
                left = iter([where for where, size in zip(index, after, strict=True) if size != _ONE])
                return tuple(_ZERO if size == _ONE else next(left) for size in before)
        if op in _RESHAPING | _PICKING:  # any element
            return tuple(map(self.anywhere, shape(operand(node))))
        return None

    def _part(self, node: Node, one: bool, index: tuple[Linear, ...]) -> tuple[Linear, ...]:
        """`_source` for a slice or, if ``one``, for the selection of one index of a dim."""
        before = shape(operand(node))
        dim = _argument(node, 1, "dim", 0) % len(before)
        start, size = _integer(_argument(node, 2, "index" if one else "start", 0) or 0), whole(before[dim])
        if self.always(-start - 1):
            start = start + size
        if not (self.always(start) and self.always(size - start)):  # clamping would select another element
            raise Unproven
        if one:
            return (*index[:dim], start, *index[dim:])
        return (*index[:dim], start + index[dim] * _argument(node, 4, "step", 1), *index[dim + 1 :])

    def _triangle(self, node: Node, lower: bool, index: tuple[Linear, ...]) -> Iterator[Case]:
        above = index[-1] - index[-2] - _integer(_argument(node, 1, "diagonal", 0))  # the diagonal
        kept, other = (-above, above - 1) if lower else (above, -above - 1)
        yield from self._where({kept}, self.cases(operand(node), index))
        yield from self._where({other}, [(frozenset(), _one(index, 0, value_of(node).dtype))])

    def _joined(self, node: Node, dim: int, index: tuple[Linear, ...]) -> Iterator[Case]:
        dim, start = dim % len(index), _ZERO
        for part in operands(node):
            value = value_of(part)
            if value.dtype != value_of(node).dtype or value.ndim != len(index):
                raise Unproven
            stop, inside = start + whole(value.shape[dim]), (*index[:dim], index[dim] - start, *index[dim + 1 :])
            yield from self._where({index[dim] - start, stop - index[dim] - 1}, self.cases(part, inside))
            start = stop

    def _difference(self, node: Node, index: tuple[Linear, ...]) -> Iterator[Case]:
        """Differences of neighbours; a value may be prepended."""
        before, dim = _argument(node, 3, "prepend", None), _argument(node, 2, "dim", -1) % len(index)
        if _argument(node, 1, "n", 1) != 1 or _argument(node, 4, "append", None) is not None:
            raise Unproven
        x, place = operand(node), index[dim]

        def at(where: Linear) -> tuple[Linear, ...]:
            return (*index[:dim], where, *index[dim + 1 :])

        if before is None:
            parts: list[tuple[set[Linear], Any, Any]] = [(set(), self.cases(x, at(place + 1)), self.cases(x, index))]
        elif shape(before)[dim] == 1:
            parts = [
                ({-place}, self.cases(x, index), self.cases(before, at(_ZERO))),
                ({place - 1}, self.cases(x, index), self.cases(x, at(place - 1))),
            ]
        else:
            raise Unproven
        for given, later, earlier in parts:
            for first, a in self._where(given, later):
                for both, b in self._where(first, earlier):
                    yield both, _whole_number(a) - _whole_number(b)

    def _sum_of_nothing(self, node: Node, index: tuple[Linear, ...]) -> list[Case]:
        source = operand(node)
        for _, value in self.cases(source, tuple(map(self.anywhere, shape(source)))):
            if not isinstance(value, Tensor) or value.any():
                raise Unproven
        return [(frozenset(), _one(index, 0, value_of(node).dtype))]

    def _looked_up(self, node: Node, index: tuple[Linear, ...]) -> tuple[Linear, ...] | None:
        """The index into the first argument for an element that is looked up by known numbers; None if they are unknown
        or might be out of bounds."""
        source, picks = operand(node), indices(node)
        if len(picks) != len(shape(source)) or None in picks:
            return None
        found = []
        for pick, size in zip(picks, shape(source), strict=True):
            cases, length = self.cases(pick, _behind(pick, index)), Linear.size(size)
            if len(cases) != 1 or length is None or value_of(pick).dtype != torch.int64:
                return None
            place = _whole_number(cases[0][1])
            if not (self.always(place) and self.always(length - place - 1)):
                return None
            found.append(place)
        return tuple(found)

    def _where(self, given: Iterable[Linear], cases: Iterable[Case]) -> Iterator[Case]:
        """The cases that remain if ``given`` holds."""
        for also, value in cases:
            both = also.union(given)
            if self.possible(both):
                yield both, value

    def _pointwise(self, node: Node, op, index: tuple[Linear, ...]) -> Iterator[Case]:
        together: list[tuple[frozenset[Linear], dict]] = [(frozenset(), {})]
        for entry in node.all_input_nodes:
            cases = self.cases(entry, _behind(entry, index) if is_tensor(entry) else ())
            together = [
                (both, {**values, entry: value})
                for given, values in together
                for both, value in self._where(given, cases)
            ]
            if len(together) > _MOST_CASES:
                raise Unproven
        for given, values in together:
            if not any(isinstance(value, Linear) for value in values.values()):
                yield given, _run(node, values)
            elif op in _COMPARED:
                yield from self._where(given, _compared(node, values, _COMPARED[op], index))
            else:
                yield given, _arithmetic(node, op, values)


def _argument(node: Node, position: int, name: str, default):
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _integer(argument) -> Linear:
    if isinstance(argument, Node):
        argument = argument.meta["val"]
    if type(argument) not in (int, torch.SymInt):
        raise Unproven
    return whole(argument)


def _one(index: tuple, value, dtype: torch.dtype) -> Tensor:
    """``value`` as a tensor of one element with one dim for each of ``index``, because the number of dims affects
    result dtypes."""
    return torch.full([1] * len(index), value, dtype=dtype)


def _behind(node: Node, index: tuple[Linear, ...]) -> tuple[Linear, ...]:
    """The index into ``node`` for element ``index`` of the tensor it is broadcast to."""
    dims = [Linear.size(size) for size in shape(node)]
    return tuple(
        _ZERO if size == _ONE else where for where, size in zip(index[len(index) - len(dims) :], dims, strict=True)
    )


def _swapped(node: Node, op, index: tuple[Linear, ...]) -> tuple[Linear, ...]:
    order = list(range(len(index)))
    if op is aten.permute:
        order = [dim % len(index) for dim in integers(node, 1)]
    elif len(index) > 1:
        a, b = (integer(node, 1), integer(node, 2)) if len(node.args) > 1 else (0, 1)
        order[a], order[b] = order[b], order[a]
    return tuple(index[order.index(dim)] for dim in range(len(index)))


def _arange(node: Node, index: Linear) -> Linear:
    start, _, step = {1: (0, *node.args, 1), 2: (*node.args, 1), 3: node.args}[len(node.args)]
    if value_of(node).dtype != torch.int64 or type(step) is not int:
        raise Unproven
    return _integer(start) + index * step


def _run(node: Node, values: dict[Node, Tensor]) -> Tensor:
    def concrete(argument):
        if isinstance(argument, torch.device):
            return torch.device("cpu")
        return values[argument] if isinstance(argument, Node) else argument

    args, kwargs = torch.fx.node.map_aggregate((node.args, node.kwargs), concrete)
    return function_of(node)(*args, **kwargs)


def _two(node: Node, values: dict[Node, Tensor | Linear]) -> tuple[Linear, Linear]:
    """Both operands, if they are int64."""
    if len(node.args) != 2 or node.kwargs:
        raise Unproven
    a, b = (_whole_number(values[each] if isinstance(each, Node) else each) for each in node.args)
    if max(a.largest(), b.largest()) >= _TOO_LARGE:
        raise Unproven
    return a, b


def _whole_number(value) -> Linear:
    if isinstance(value, Tensor) and value.dtype == torch.int64:
        value = value.item()
    return value if isinstance(value, Linear) else _integer(value)


def _compared(node: Node, values: dict, says: tuple[bool, bool, bool], index: tuple) -> list[Case]:
    a, b = _two(node, values)
    where = {b - a - 1}, {a - b, b - a}, {a - b - 1}
    return [(frozenset(part), _one(index, said, torch.bool)) for part, said in zip(where, says, strict=True)]


def _arithmetic(node: Node, op, values: dict) -> Linear:
    a, b = _two(node, values)
    if op is aten.add:
        result = a + b
    elif op is aten.sub:
        result = a - b
    elif op is aten.mul and not (a.terms and b.terms):
        result = b * a.constant if b.terms else a * b.constant
    else:
        raise Unproven
    if result.largest() >= _TOO_LARGE:
        raise Unproven
    return result

"""Record what a compiled step calls after Dynamo's guard checks.

Graphs are counted, because a step may consist of several, and calls are recorded so that they can be repeated without
guards. Guards make sure that a graph fits its inputs. A `Call` repeats their checks of sizes; whoever repeats a call
has to make sure that nothing else has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

_calls: ContextVar[list[tuple[Call, Sequence]] | None] = ContextVar("calls", default=None)


@contextmanager
def noted() -> Iterator[list[tuple[Call, Sequence]]]:
    """The calls of `Noted` functions that this thread makes within the context, and their results."""
    calls: list[tuple[Call, Sequence]] = []
    before = _calls.set(calls)
    try:
        yield calls
    finally:
        _calls.reset(before)


_ran: ContextVar[list[Any] | None] = ContextVar("ran", default=None)


@contextmanager
def counted() -> Iterator[list[Any]]:
    """The reports of `Counted` graphs that this thread runs within the context."""
    ran: list[Any] = []
    before = _ran.set(ran)
    try:
        yield ran
    finally:
        _ran.reset(before)


class Counted:
    """``run``, a graph, and its ``report``."""

    def __init__(self, run: Callable[..., Sequence], report: Any):
        self._run, self._report = run, report

    def __call__(self, *inputs: Any) -> Sequence:
        if (ran := _ran.get()) is not None:
            ran.append(self._report)
        return self._run(*inputs)


class Noted:
    """``run``, compiled for inputs like the fake ``examples``."""

    def __init__(self, run: Callable[..., Sequence], examples: Sequence):
        self._run, self._sizes = run, _Sizes(examples)

    def __call__(self, *inputs: Any) -> Sequence:
        outputs = self._run(*inputs)
        if (calls := _calls.get()) is not None:
            calls.append((Call(self._run, inputs, self._sizes), outputs))
        return outputs


@dataclass(frozen=True)
class Call:
    """One call of ``run``."""

    run: Callable[..., Sequence]
    inputs: tuple
    sizes: _Sizes

    def without(self, places: Collection[int]) -> Call:
        """The call without the inputs at ``places``, so that it does not keep them alive."""
        return replace(self, inputs=tuple(None if i in places else value for i, value in enumerate(self.inputs)))

    def again(self, others: Mapping[int, Tensor], like_before: Iterable[tuple[int, Tensor]] = ()) -> Sequence | None:
        """The result with ``others`` in place of some of its tensors, or None if they do not fit. The tensors in
        ``like_before`` are known to fit."""
        inputs = list(self.inputs)
        for i, own in like_before:
            inputs[i] = own
        for i, other in others.items():
            inputs[i] = other
        return self.run(*inputs) if self.sizes.fill(inputs, others) else None


class _Sizes:
    """The varying sizes of inputs: where each of them is found, and which conditions they meet."""

    def __init__(self, examples: Sequence):
        self._symbols = {i: value for i, value in enumerate(examples) if isinstance(value, torch.SymInt)}
        self._dims = {
            i: tuple(None if isinstance(size, torch.SymInt) else int(size) for size in value.shape)
            for i, value in enumerate(examples)
            if isinstance(value, Tensor)
        }
        found = {
            _symbol(size): (i, dim)
            for i, value in enumerate(examples)
            if isinstance(value, Tensor)
            for dim, size in enumerate(value.shape)
            if isinstance(size, torch.SymInt)
        }
        self._places = {i: found.get(_symbol(symbol)) for i, symbol in self._symbols.items()}

    @property
    def known(self) -> bool:
        """Whether each size that is an input is also the size of a tensor."""
        return all(self._places.values())

    @cached_property
    def _hold(self) -> Callable[[Sequence[int]], bool]:
        """A function that checks the conditions of the graph on its sizes. Built last, after everything that may add
        conditions is compiled."""
        symbols = list(self._symbols.values())
        env = symbols[0].node.shape_env if symbols else None
        text = env and env.produce_guards_expression(symbols)
        if not text:
            return lambda sizes: True
        code = compile(text, "<guards>", "eval")
        return lambda sizes: env.evaluate_guards_expression(code, sizes)

    def fill(self, inputs: list, others: Mapping[int, Tensor]) -> bool:
        """Set the inputs that are sizes to the sizes of the tensors among ``inputs``. Returns whether the sizes, and
        the shapes of ``others``, are those the graph was compiled for."""
        for i, other in others.items():
            if any(size is not None and size != own for size, own in zip(self._dims[i], other.shape, strict=True)):
                return False
        for i, (tensor, dim) in self._places.items():
            inputs[i] = inputs[tensor].shape[dim]
        return self._hold([inputs[i] for i in self._places])


def _symbol(size: Any) -> Any:
    return size.node.expr

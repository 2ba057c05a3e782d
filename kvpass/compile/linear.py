"""Linear inequalities between integers, to prove what a mask hides at any length."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from math import gcd

import sympy
import torch

_MOST = 200  # with more inequalities at once, nothing is proven


@dataclass(frozen=True)
class Linear:
    """An integer: a ``constant`` plus variables times nonzero coefficients."""

    terms: frozenset[tuple[Hashable, int]]
    constant: int = 0

    @classmethod
    def of(cls, terms: dict[Hashable, int], constant: int = 0) -> Linear:
        """From ``terms`` by variable, which may include zeros."""
        return cls(frozenset((variable, factor) for variable, factor in terms.items() if factor), constant)

    @classmethod
    def variable(cls, name: Hashable) -> Linear:
        """A single variable."""
        return cls.of({name: 1})

    @classmethod
    def size(cls, value: int | torch.SymInt) -> Linear | None:
        """A size of a graph; None if it is not linear in the graph's symbols."""
        if not isinstance(value, torch.SymInt):
            return cls(frozenset(), int(value))
        factors = dict(value.node.expr.as_coefficients_dict())
        constant = factors.pop(sympy.S.One, 0)
        if all(term.is_Symbol and factor.is_Integer for term, factor in factors.items()) and int(constant) == constant:
            return cls.of({term: int(factor) for term, factor in factors.items()}, int(constant))
        return None

    def __add__(self, other: Linear | int) -> Linear:
        if isinstance(other, int):
            return Linear(self.terms, self.constant + other)
        terms = dict(self.terms)
        for variable, factor in other.terms:
            terms[variable] = terms.get(variable, 0) + factor
        return Linear.of(terms, self.constant + other.constant)

    def __mul__(self, factor: int) -> Linear:
        return Linear.of({variable: own * factor for variable, own in self.terms}, self.constant * factor)

    def __neg__(self) -> Linear:
        return self * -1

    def __sub__(self, other: Linear | int) -> Linear:
        return self + -other

    def largest(self) -> int:
        """The largest magnitude among its coefficients and its constant."""
        return max(abs(self.constant), *(abs(factor) for _, factor in self.terms), 0)


def impossible(inequalities: Iterable[Linear]) -> bool:
    """Whether no integers make all of ``inequalities`` 0 or more. True is proven, by Fourier-Motzkin elimination; False
    may mean that no proof was found."""
    left = {_tightened(inequality) for inequality in inequalities}
    while left:
        if any(not inequality.terms and inequality.constant < 0 for inequality in left):
            return True
        uses: dict[Hashable, tuple[list, list]] = {}
        for inequality in left:
            for variable, factor in inequality.terms:
                uses.setdefault(variable, ([], []))[factor < 0].append((abs(factor), inequality))
        if not uses:
            return False
        above, below = min(uses.values(), key=lambda signs: len(signs[0]) * len(signs[1]))
        left -= {inequality for _, inequality in (*above, *below)}
        left |= {_tightened(low * b + high * a) for a, low in above for b, high in below}
        if len(left) > _MOST:
            return False
    return False


def _tightened(inequality: Linear) -> Linear:
    """The same inequality over the integers, with its coefficients divided by their common divisor."""
    divisor = gcd(*(factor for _, factor in inequality.terms))
    if divisor < 2:
        return inequality
    terms = {variable: factor // divisor for variable, factor in inequality.terms}
    return Linear.of(terms, inequality.constant // divisor)

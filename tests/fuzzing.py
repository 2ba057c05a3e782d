"""Try random inputs, valid and invalid, and count the outcomes: an error of kvpass's own, or a correct result."""

import copy
import functools
import math
from collections import Counter
from decimal import Decimal
from fractions import Fraction

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpass import KVPassError, Recent
from kvpass.schemes import KIVIConfig

HUGE = (2**31, 2**63, 2**64, 10**30, 10**400)

_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.sampled_from([*HUGE, *(-n for n in HUGE)]),
    st.floats(),
    st.sampled_from((0.0, -0.0, 1.0, 4.0, 1e-320, 1e300, math.inf, -math.inf, math.nan)),
    st.text(max_size=4),
    st.sampled_from(("4", "auto", "none", "kivi", "kivi+h2o", "mean", "linear-4", "d2n16", "post", "nan")),
)
_others = st.sampled_from(
    (
        np.int64(4), np.int32(32), np.uint8(0), np.float64(0.5), np.float32(0.25), np.bool_(True), np.array([1.0, 2.0]),
        np.array(3), torch.tensor(4), torch.tensor([1.0, 2.0]), b"4", 4j, Decimal("4"), Fraction(1, 3), object(), int,
        KIVIConfig(), KIVIConfig, Recent(32), range(3), {1, 2}, frozenset((4,)), Ellipsis, math.sqrt,
    )
)  # fmt: skip
plain = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)
"""JSON values, and numbers that JSON cannot hold."""
junk = st.one_of(_scalars, _scalars, plain, _others)
"""A value of any type."""


def mostly(plausible):
    """Values from ``plausible``; one time in eight any value."""
    return st.sampled_from([plausible] * 7 + [junk]).flatmap(lambda strategy: strategy)


def nested(depth: int, key: str | None = None):
    """A list, or a dict with ``key``, nested ``depth`` times."""
    value = 0
    for _ in range(depth):
        value = [value] if key is None else {key: value}
    return value


def places(data, path=()):
    """The path to everything in nested dicts and lists, outermost first."""
    yield path
    for key, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        yield from places(value, (*path, key))


@st.composite
def damaged(draw, data):
    """JSON data with a few values replaced, dropped, or duplicated under another name."""
    data = {"": copy.deepcopy(data)}
    for _ in range(draw(st.integers(1, 3))):
        *path, last = draw(st.sampled_from(list(places(data))[1:]))
        holder = functools.reduce(lambda value, key: value[key], path, data)
        how = draw(st.sampled_from(("replaced", "replaced", "dropped", "doubled")))
        if how == "dropped" and path:
            del holder[last]
        elif how == "doubled" and isinstance(holder, dict) and path:
            holder[draw(st.sampled_from((f"0{last}", f"{last}0", "-1", "", "é", "1")))] = holder[last]
        else:
            holder[last] = draw(plain)
    return data[""]


def outcomes(strategy, attempt, examples: int) -> Counter:
    """Count the outcomes of ``examples`` inputs drawn from ``strategy``.

    attempt: called with an input. It checks the result and returns a word for it, or raises. A `KVPassError` counts by
        its class; anything else is a crash, which fails with the smallest input that causes it.
    """
    counts = Counter()

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def one(value):
        try:
            counts[attempt(value)] += 1
        except KVPassError as error:
            assert str(error)
            counts[type(error).__name__] += 1

    one()
    return counts

"""The dispatcher: selects an implementation of an op by device, specs and shape.

Each choice is logged once. ``lowering=`` overrides it. The ops are those of `kvpass.ops`, and attention over a server's
blocks (`kvpass.paged.paged_attention`): "paged_attend", "paged_attend_one" for one token per request, and
"paged_store" before both.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvpass.codec.spec import parse
from kvpass.errors import KVPassError

logger = logging.getLogger("kvpass.lowering")

_Run = TypeVar("_Run", bound=Callable[..., Any])

AUTO = "auto"
EAGER = "eager"
"""The lowering of implementations in plain PyTorch, which compile nothing."""
STORING = ("quantize", "append_", "append_layers_", "paged_store")
FEW = 16
"""A call with at most this many query tokens is a decode step or verifies drafts; a larger one is a prompt."""


UNEQUAL, LATENT = "values of another shape than keys", "latent attention"
LSE = "log-sum-exp"


def few(queries: int) -> int:
    """``queries`` for `DispatchKey.queries`: 0 if there are more than `FEW`."""
    return queries if queries <= FEW else 0


def extras(
    mask: Any, starts: Any, rotary: Any, sinks: Any, softcap: float, statistic: str, k_new: Tensor, v_new: Tensor,
    latent: bool = False, with_lse: bool = False,
) -> tuple[str, ...]:  # fmt: skip
    """The features that an attention call uses beyond softmax over all tokens, in words. Arguments are those of
    ``kvpass::attend``."""
    plain = mask is None and starts is None and not rotary and sinks is None and not softcap and not statistic
    unequal = k_new.shape[1::2] != v_new.shape[1::2]  # heads and channels
    if plain and not unequal and not latent and not with_lse:
        return ()
    used = {"mask": mask is not None, "padding": starts is not None, "RoPE": bool(rotary), "sinks": sinks is not None}
    used |= {"softcap": bool(softcap), "attention mass": bool(statistic), LATENT: latent, LSE: with_lse}
    used[UNEQUAL] = unequal and not latent
    return tuple(name for name, is_used in used.items() if is_used)


def refuses_extras(dispatch: DispatchKey, *unsupported: str) -> str | None:
    """Why an implementation that does not support some of `extras` cannot serve attention, or None if it can."""
    used = [name for name in unsupported if name in dispatch.extras]
    return f"it does not support {used[0]}." if used else None


@dataclass(frozen=True)
class DispatchKey:
    """All that the choice of an implementation may depend on.

    op, device: the op and its device type.
    specs: texts of the codec specs.
    queries: number of query tokens, or 0 if there are more than `FEW`.
    head_dim: channels per head.
    dtype: for attention: the dtype of queries and cache, or None if they differ.
    extras: for attention: the additional features of the call (`extras`).
    """

    op: str
    device: str
    specs: tuple[str, ...] = ()
    queries: int = 0
    head_dim: int = 0
    dtype: torch.dtype | None = None
    extras: tuple[str, ...] = ()

    @cached_property
    def features(self) -> tuple[frozenset[str], ...]:
        """The features that each spec requires (`CodecSpec.features`), for storing or, in ops that only read, for
        reading."""
        specs = [parse(text) for text in self.specs]
        if self.op not in STORING:
            specs = [spec.stored_as for spec in specs]
        return tuple(spec.features for spec in specs)

    def __str__(self) -> str:
        queries = f", {self.queries} {'query' if self.queries == 1 else 'queries'}" if self.queries else ""
        return f"kvpass::{self.op} on {self.device}{queries}"


@dataclass(frozen=True)
class Implementation:
    """A named implementation of one op.

    run: takes the op's call object (`kvpass.lowering.call_types`). For "quantize" and paged attention it takes the
        arguments of the decorated function.
    has: the supported features for each of `DispatchKey.specs`; None means all, for the reference.
    refuses: returns the reason why a dispatch with supported features cannot be served, or None.
    by_name_only: "auto" never selects it.
    lowering: the lowering that it belongs to. ``lowering=`` accepts this name and the implementation's own name.
    """

    op: str
    name: str
    run: Callable[..., Any]
    has: tuple[Set[str], ...] | None
    refuses: Callable[[DispatchKey], str | None]
    by_name_only: bool = False
    lowering: str = ""

    def reason_against(self, dispatch: DispatchKey) -> str | None:
        """The reason why this implementation cannot serve ``dispatch``, or None."""
        for needed, supported in zip(dispatch.features, self.has or (), strict=False):  # a dense past has no specs
            if missing := needed - supported:
                return f"it does not support {', '.join(sorted(missing))}."
        return self.refuses(dispatch)


_TABLE: dict[str, dict[str, Implementation]] = {}


def implements(
    op: str,
    name: str,
    has: tuple[Set[str], ...] | None = None,
    refuses: Callable[[DispatchKey], str | None] = lambda dispatch: None,
    by_name_only: bool = False,
    lowering: str = "",
) -> Callable[[_Run], _Run]:
    """Register the decorated function as `Implementation` ``name`` of ``op``. ``lowering`` defaults to ``name``. Later
    registrations are preferred."""

    def register(run: _Run) -> _Run:
        row = Implementation(op, name, run, has, refuses, by_name_only, lowering or name)
        _TABLE.setdefault(op, {})[name] = row
        select.cache_clear()
        return run

    return register


def names() -> list[str]:
    """Names that ``lowering=`` accepts besides "auto" and "eager": lowerings that implement quantize and attend."""
    return sorted(_TABLE["quantize"].keys() & _TABLE["attend"].keys())


def lowerings(op: str) -> list[str]:
    """Names of lowerings that implement ``op``, besides the reference."""
    return sorted({row.lowering for row in _TABLE.get(op, {}).values()} - {"reference"})


def attention_key(q: Tensor, ring: Tensor, specs: Sequence[str], queries: int, used: tuple[str, ...]) -> DispatchKey:
    """The dispatch key of ``kvpass::attend`` with ``queries`` query tokens. ring: a tensor of the cache; used: the
    `extras` of the call."""
    dtype = q.dtype if q.dtype == ring.dtype else None
    return DispatchKey("attend", q.device.type, tuple(specs), few(queries), q.shape[3], dtype, used)


@cache
def select(dispatch: DispatchKey, lowering: str = AUTO) -> Implementation:
    """The implementation that serves ``dispatch``.

    lowering: "auto" selects the most recently registered implementation that does not refuse. The name of an
        implementation selects that one. The name of a lowering, which an implementation may have too, selects the most
        recently registered implementation of the lowering that does not refuse.

    Raises `KVPassError` if there is no implementation of that name, or if all refuse.
    """
    rows = _TABLE[dispatch.op]
    if lowering != AUTO:
        return _named(dispatch, lowering)
    passed_over: list[str] = []
    for implementation in reversed([row for row in rows.values() if not row.by_name_only]):
        reason = implementation.reason_against(dispatch)
        if reason is None:
            why = f" ({'; '.join(passed_over)})" if passed_over else ""
            logger.info("%s: %s%s", dispatch, implementation.name, why)
            return implementation
        passed_over.append(f"not {implementation.name}: {reason}")
    raise KVPassError(f"No implementation supports {dispatch}: {'; '.join(passed_over)}")


def _named(dispatch: DispatchKey, lowering: str) -> Implementation:
    """`select` by name."""
    rows = _TABLE[dispatch.op]
    known = sorted({row.lowering for row in rows.values()})
    if lowering not in rows and lowering not in known:
        raise KVPassError(
            f"There is no lowering {lowering!r} for kvpass::{dispatch.op}; use one of {known}, or 'auto'."
        )
    named = [rows[lowering]] if lowering in rows else []
    others = [row for row in reversed(rows.values()) if row.lowering == lowering != row.name]
    reasons = []
    for row in (*named, *others):
        reason = row.reason_against(dispatch)
        if reason is None:
            return row
        reasons.append(reason)
    raise KVPassError(f"lowering={lowering!r} cannot run kvpass::{dispatch.op} here: {reasons[0]} Use 'auto'.")

"""Call decode steps on CPUs again below Dynamo.

A step with hundreds of inputs spends milliseconds on guards, and most of them check modules that do not change. `Watch`
detects such changes faster.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ...cache.cache_state import CacheState
from ...cache.context import ForwardContext
from ...cache.layer import PackedLayer
from ...compile.recorded_calls import Call, noted
from ...compile.report import Report
from ...compile.subclasses import flatten
from .model_changes import Watch
from .replay import Argument, Step, mapped, moves

_LENGTHS = "length", "starts"
"""Fields of a `ForwardContext` that a step reads. They are new tensors in every step."""


class Recalls:
    """Recorded steps of all caches of ``model``. If a step cannot be called again, ``report`` receives the reason."""

    def __init__(self, model: nn.Module, report: Report):
        self._model, self._report = weakref.ref(model), report
        self._watch = Watch(model)
        self._caches: weakref.WeakKeyDictionary[CacheState, _OfCache] = weakref.WeakKeyDictionary()

    def clear(self) -> None:
        """Drop all recorded calls."""
        self._caches.clear()

    def forget(self, state: CacheState) -> None:
        """Drop the recorded calls of one cache. Before a new turn the model may have been changed in ways that `Watch`
        does not detect."""
        self._caches.pop(state, None)

    def run(self, state: CacheState, new_tokens: int, given: dict[str, Any], step: Step) -> Any:
        """The result of ``step`` for the arguments ``given``, which hold ``new_tokens`` tokens, over the cache with the
        state ``state``."""
        if self._watch.changed():
            self.clear()
        moved, context = moves(state.layers), state.context
        cache = self._caches.get(state)
        if cache is None or cache.moved != moved:
            cache = self._caches[state] = _OfCache(moved)
        key = new_tokens, state.batch, context.starts is None, *_of_process(), *_described(given)
        call = cache.calls.get(key)
        if call is not None and (output := call.again(context, given)) is not None:
            return output
        if key not in cache.seen or key in cache.refused:
            cache.seen.add(key)
            return step(given)
        with noted() as calls:
            output = step(given)
        found = self._recalled(calls, state, given, output)
        if isinstance(found, _Recalled):
            cache.calls[key], self._report.recalled = found, True
        else:
            cache.refused.add(key)
            self._report.not_replayed = found
        return output

    def _recalled(
        self, calls: list[tuple[Call, Sequence]], state: CacheState, given: dict[str, Any], output: Any
    ) -> _Recalled | str:
        """The current call, prepared for calling it again, or the reason why that is impossible."""
        if len(calls) != 1:
            return f"a step runs {len(calls)} graphs"
        if other := [name for name, value in given.items() if not isinstance(value, (*_PLAIN, Tensor, Cache))]:
            return f"it takes {', '.join(other)}"
        ((call, outputs),), model = calls, self._model()
        if not call.sizes.known:
            return "it depends on a number that is not a size"
        constant = set(map(id, flatten([*model.parameters(), *model.buffers()])))
        of_cache = set(map(id, _tensors_of(state.layers)))
        varying = {id(getattr(state.context, name)): name for name in _LENGTHS}
        varying |= {id(value): name for name, value in given.items()}
        read = {i: x for i, x in enumerate(call.inputs) if isinstance(x, Tensor) and id(x) not in constant}
        stored = {i: weakref.ref(read.pop(i)) for i, x in list(read.items()) if id(x) in of_cache}
        if unknown := [x for x in read.values() if id(x) not in varying]:
            return (
                f"it reads a tensor of shape {tuple(unknown[0].shape)} that is neither a weight, an argument nor part "
                "of the cache"
            )
        places: dict[int, _Output | Argument] = {id(value): _Output(i) for i, value in enumerate(outputs)}
        places |= {id(value): Argument(name) for name, value in given.items() if isinstance(value, Cache)}
        kept: list[Tensor] = []

        def place(leaf: Any) -> Any:
            if isinstance(leaf, Tensor) and id(leaf) not in places:
                kept.append(leaf)
            return places.get(id(leaf), leaf)

        template = mapped(output, place)
        if kept:
            return "it returns a tensor that the graph did not compute"
        names = {i: varying[id(x)] for i, x in read.items()}
        return _Recalled(call.without(read.keys() | stored.keys()), names, stored, template)


_PLAIN = type(None), bool, int, float, str


@dataclass
class _Output:
    """A placeholder for output number ``place`` of a call."""

    place: int


@dataclass
class _Recalled:
    """A step, recorded as a ``call``.

    reads: position among its inputs -> name of the argument, or of the field of the context, that belongs there.
    stored: position among its inputs -> the cache's tensor there; a weak reference, because the cache may replace it.
    output: what the step returns, with placeholders for values that each call computes or receives.
    """

    call: Call
    reads: dict[int, str]
    stored: dict[int, weakref.ref[Tensor]]
    output: Any

    def again(self, context: ForwardContext, given: dict[str, Any]) -> Any:
        """Run the step over the cache of ``context`` with the arguments ``given``. Returns None if they do not fit."""
        others = {i: getattr(context, name) if name in _LENGTHS else given[name] for i, name in self.reads.items()}
        stored = [(i, own()) for i, own in self.stored.items()]
        outputs = self.call.again(others, stored)
        return None if outputs is None else mapped(self.output, lambda leaf: _filled(leaf, outputs, given))


def _filled(leaf: Any, outputs: Sequence, given: dict[str, Any]) -> Any:
    if isinstance(leaf, _Output):
        return outputs[leaf.place]
    return given[leaf.name] if isinstance(leaf, Argument) else leaf


@dataclass
class _OfCache:
    """Recorded steps of one cache.

    moved: how often the cache's tensors had been replaced when these were recorded.
    seen: forms of steps that ran once; they are recorded when they run again.
    refused: forms of steps that cannot be called again.
    """

    moved: int
    seen: set[tuple] = field(default_factory=set)
    refused: set[tuple] = field(default_factory=set)
    calls: dict[tuple, _Recalled] = field(default_factory=dict)


def _tensors_of(layers: list[PackedLayer]) -> list[Tensor]:
    """The tensors of ``layers`` that graphs take."""
    states = [state for layer in layers for state in layer.states()]
    own = [tensor for layer in layers for storage in layer.storages() for _, tensor in storage.tensors()]
    return own + [handle for state in states for handle in state.handles]


def _of_process() -> tuple:
    """The process-wide settings that Dynamo guards."""
    return (
        torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"), torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(), torch.get_num_threads(),
    )  # fmt: skip


def _described(given: dict[str, Any]) -> tuple:
    """Everything that arguments must have in common, apart from sizes."""

    def described(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.dtype, value.ndim
        return value if type(value) in _PLAIN else None

    return tuple((name, described(value)) for name, value in given.items())

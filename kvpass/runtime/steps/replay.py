"""Run each decode step as one CUDA graph, captured when the step runs a second time and replayed from then on.

The first time, the step already runs on the tensors that the capture will read, so that nothing is compiled during the
capture, where CUDA forbids copies between host and device.

A replay runs no Python of the model and checks no guards. The host writes the number of stored tokens and the arguments
of the call, and starts the graph. Kernels read lengths on the device (`kvpass.compile.device_lengths`), so a capture
serves every length until the cache's tensors move. After the replay the host packs the pages that are due.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from ...cache.cache_state import CacheState
from ...cache.context import ForwardContext
from ...cache.layer import PackedLayer
from ...compile.report import GraphReport
from ...layout.pool import bucket
from ..forward import length_tensor_of
from .due_pages import is_due, pack_again
from .model_changes import Watch

_SEEN = 8  # forms of steps that are remembered until they run a second time
_FEW_PAGES = 16  # a first capture serves up to this many pages
_MASKS = frozenset({"attention_mask"})  # not read by a step that knows the start of each row
Step = Callable[[dict[str, Any]], Any]
"""A function that runs a call with these arguments, by name."""


class Capture(Protocol):
    """Runs ``step`` once. Returns its outputs, and a function that repeats it on the same tensors."""

    def __call__(self, state: CacheState, step: Callable[[], Any]) -> tuple[Any, Callable[[], None]]: ...


class CudaGraphs:
    """Captures into CUDA graphs that share a memory pool."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()  # those that keep the pool alive

    def __call__(self, state: CacheState, step: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        if not self._graphs:  # PyTorch cannot use a pool again after its last graph is gone
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # "thread_local": other threads may allocate meanwhile
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = step()
        self._graphs.add(graph)
        graph.replay()  # capturing does not execute kernels
        return output, graph.replay


CAPTURES: dict[str, Callable[[], Capture]] = {"cuda": CudaGraphs}
"""Device type -> the class that captures steps there."""


class _Inputs:
    """The tensors that a captured step reads: copies of the arguments ``given`` of a call that ``read`` names, the
    number of stored tokens, and the first token of each row (None unless rows are padded)."""

    def __init__(self, given: dict[str, Any], read: Iterable[str], context: ForwardContext, n: int):
        self._copies = {name: _cloned(given[name]) for name in read if isinstance(given[name], Tensor)}
        self._starts = None if context.starts is None else _cloned(context.starts)
        with torch.inference_mode(context.length.is_inference()):
            self._length = torch.full((1,), n, device=context.length.device)

    def fill(self, given: dict[str, Any], starts: Tensor | None, n: int) -> None:
        """Take the values of another call."""
        with torch.inference_mode():  # there, all tensors may be written
            self._length.fill_(n)
            if self._starts is not None and starts is not None:
                self._starts.copy_(starts)
            for name, own in self._copies.items():
                own.copy_(given[name])

    def passed(self, given: dict[str, Any], context: ForwardContext, n: int) -> dict[str, Any]:
        """The arguments of the call with these tensors in place of its own, also in ``context``."""
        context.length, context.starts = length_tensor_of(self._length, n), self._starts
        return {name: self._copies.get(name, value) for name, value in given.items()}


def _cloned(value: Tensor) -> Tensor:
    """A copy for which Dynamo does not compile again: an inference tensor if ``value`` is one, with the same marks of
    dynamic sizes."""
    with torch.inference_mode(value.is_inference()):
        copy = value.clone()
    copy.__dict__.update(vars(value))
    return copy


@dataclass
class _Captured:
    """A captured step.

    inputs: the tensors that it reads.
    output: its output. Arguments that are not tensors and are returned appear as `Argument`, because a captured step
        must not keep its cache alive.
    replay: repeats the step.
    """

    inputs: _Inputs
    output: Any
    replay: Callable[[], None]


@dataclass
class Argument:
    """A placeholder for the argument of a call with this name."""

    name: str


def moves(layers: Iterable[PackedLayer]) -> int:
    """How often tensors of ``layers`` were replaced."""
    return sum(storage.moved for layer in layers for storage in layer.storages())


class _OfCache:
    """The captured steps of one cache, and the inputs of steps that ran once."""

    def __init__(self) -> None:
        self.seen: dict[tuple, _Inputs] = {}
        self.captured: dict[tuple, _Captured] = {}
        self._moved = -1

    def remember(self, key: tuple, inputs: _Inputs) -> _Inputs:
        """Keep the ``inputs`` of a step that ran once. Only `_SEEN` are kept, because a step whose mask has grown does
        not run again."""
        self.seen[key] = inputs
        if len(self.seen) > _SEEN:
            del self.seen[next(iter(self.seen))]
        return inputs

    def forget_if_moved(self, layers: Iterable[PackedLayer]) -> None:
        """Start over if a tensor of ``layers`` was replaced."""
        moved = moves(layers)
        if moved != self._moved:
            self._moved, self.seen, self.captured = moved, {}, {}


class Replays:
    """Captured steps of all caches of ``model``. ``graphs``: their reports, which say whether a graph depends on
    lengths on the host."""

    def __init__(self, model: nn.Module, graphs: list[GraphReport], capture: Callable[[], Capture]):
        self._watch, self._graphs, self._new_capture = Watch(model), graphs, capture
        self._capture: Capture | None = None
        self._caches: weakref.WeakKeyDictionary[CacheState, _OfCache] = weakref.WeakKeyDictionary()

    def clear(self) -> None:
        """Drop all captured steps."""
        self._caches.clear()

    def run(self, state: CacheState, new_tokens: int, given: dict[str, Any], step: Step) -> Any:
        """The result of ``step`` for the arguments ``given``, which hold ``new_tokens`` tokens, over the cache with the
        state ``state``."""
        if self._watch.changed():  # captured steps read weights at their old addresses
            self.clear()
        cache = self._caches.setdefault(state, _OfCache())
        n, due = state.tokens, is_due(state, new_tokens)
        if due and new_tokens > 1:  # new tokens may overwrite the slots of tokens that are due
            return step(given)
        cache.forget_if_moved(state.layers)
        pages = bucket(max(_FEW_PAGES, state.retention.pages(n)))
        starts = state.context.starts
        read = {name: value for name, value in given.items() if starts is None or name not in _MASKS}
        key = pages, starts is None, torch.is_inference_mode_enabled(), *_described(read)
        captured = cache.captured.get(key)
        if captured is not None:
            captured.inputs.fill(given, starts, n)
            captured.replay()
            if due:
                pack_again(state, n)
        elif self._counted_on_host() or (due and key in cache.seen):
            return step(given)
        elif key not in cache.seen:
            inputs = cache.remember(key, _Inputs(given, read, state.context, n))
            passed = inputs.passed(given, state.context, n)
            originals = {id(value): given[name] for name, value in passed.items()}
            return mapped(step(dict(passed)), lambda leaf: originals.get(id(leaf), leaf))
        else:
            captured = cache.captured[key] = self._captured(state, given, cache.seen.pop(key), step)
        return mapped(captured.output, lambda leaf: _returned(leaf, given))

    def _counted_on_host(self) -> bool:
        return any(graph.on_host for graph in self._graphs if graph.compiled)

    def _captured(self, state: CacheState, given: dict[str, Any], inputs: _Inputs, step: Step) -> _Captured:
        """Capture the current step, which is called with ``given`` and reads ``inputs``."""
        if self._capture is None:
            self._capture = self._new_capture()
        inputs.fill(given, state.context.starts, state.tokens)
        passed = inputs.passed(given, state.context, state.tokens)
        output, replay = self._capture(state, lambda: step(dict(passed)))
        names = {id(value): name for name, value in given.items() if not isinstance(value, Tensor)}
        output = mapped(output, lambda leaf: Argument(names[id(leaf)]) if id(leaf) in names else leaf)
        return _Captured(inputs, output, replay)


def _described(given: dict[str, Any]) -> tuple:
    """Everything that a captured step is specialized on."""
    return tuple(
        (name, value.shape, value.dtype) if isinstance(value, Tensor) else (name, _identity(value))
        for name, value in given.items()
    )


def _identity(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else id(value)


def mapped(output: Any, fn: Callable[[Any], Any]) -> Any:
    """A model's output with ``fn`` applied to each of its values."""
    if isinstance(output, ModelOutput):
        return type(output)(**{name: mapped(value, fn) for name, value in output.items()})
    if type(output) in (tuple, list):
        return type(output)(mapped(value, fn) for value in output)
    return fn(output)


def _returned(leaf: Any, given: dict[str, Any]) -> Any:
    """The value that a call with the arguments ``given`` returns for a value of a captured step. Tensors are cloned,
    because the next replay overwrites the captured ones."""
    if isinstance(leaf, Tensor):
        return leaf.clone()
    return given[leaf.name] if isinstance(leaf, Argument) else leaf

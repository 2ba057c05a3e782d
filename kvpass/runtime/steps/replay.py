"""Run each decode step as one CUDA graph, captured when the step runs a second time and replayed from then on.

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
from ...cache.layer import PackedLayer
from ...compile.report import GraphReport
from ...layout.pool import bucket
from ..forward import length_tensor_of
from .due_pages import is_due, pack_again
from .model_changes import Watch

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
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, state: CacheState, step: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        # "thread_local": other threads may allocate meanwhile
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = step()
        graph.replay()  # capturing does not execute kernels
        return output, graph.replay


CAPTURES: dict[str, Callable[[], Capture]] = {"cuda": CudaGraphs}
"""Device type -> the class that captures steps there."""


@dataclass
class _Captured:
    """A captured step.

    given: its own copies of the tensor arguments, which it reads.
    length: the length that it reads.
    starts: the first token of each row; None unless rows are padded.
    output: its output. Arguments that are not tensors and are returned appear as `Argument`, because a captured step
        must not keep its cache alive.
    replay: repeats the step.
    """

    given: dict[str, Tensor]
    length: Tensor
    starts: Tensor | None
    output: Any
    replay: Callable[[], None]

    def again(self, n: int, starts: Tensor | None, given: dict[str, Any]) -> None:
        """Replay the step with the arguments ``given``, over ``n`` stored tokens in rows that begin at ``starts``."""
        self.length.fill_(n)
        if self.starts is not None and starts is not None:
            self.starts.copy_(starts)
        for name, own in self.given.items():
            own.copy_(given[name])
        self.replay()


@dataclass
class Argument:
    """A placeholder for the argument of a call with this name."""

    name: str


def moves(layers: Iterable[PackedLayer]) -> int:
    """How often tensors of ``layers`` were replaced."""
    return sum(storage.moved for layer in layers for storage in layer.storages())


class _OfCache:
    """The captured steps of one cache, and the forms of steps that ran once."""

    def __init__(self) -> None:
        self.seen: set[tuple] = set()
        self.captured: dict[tuple, _Captured] = {}
        self._moved = -1

    def forget_if_moved(self, layers: Iterable[PackedLayer]) -> None:
        """Start over if a tensor of ``layers`` was replaced."""
        moved = moves(layers)
        if moved != self._moved:
            self._moved, self.seen, self.captured = moved, set(), {}


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
        if captured is None:
            if due or key not in cache.seen or self._counted_on_host():
                cache.seen.add(key)
                return step(given)
            captured = cache.captured[key] = self._captured(state, given, read, step)
        else:
            captured.again(n, starts, given)
            if due:
                pack_again(state, n)
        return mapped(captured.output, lambda leaf: _returned(leaf, given))

    def _counted_on_host(self) -> bool:
        return any(graph.on_host for graph in self._graphs if graph.compiled)

    def _captured(self, state: CacheState, given: dict[str, Any], read: Iterable[str], step: Step) -> _Captured:
        """Capture the current step. ``read`` names the arguments that it reads."""
        if self._capture is None:
            self._capture = self._new_capture()
        own = {name: value.clone() if isinstance(value, Tensor) else value for name, value in given.items()}
        context = state.context
        with torch.inference_mode(False):
            length = torch.full((1,), state.tokens, device=context.length.device)
        context.length = length_tensor_of(length, state.tokens)
        context.starts = starts = None if context.starts is None else context.starts.clone()
        output, replay = self._capture(state, lambda: step(own))
        names = {id(value): name for name, value in given.items() if not isinstance(value, Tensor)}
        output = mapped(output, lambda leaf: Argument(names[id(leaf)]) if id(leaf) in names else leaf)
        tensors = {name: own[name] for name in read if isinstance(own[name], Tensor)}
        return _Captured(tensors, length, starts, output, replay)


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

"""Decode steps as one CUDA graph each: captured when they come a second time, and replayed from then on.

A replayed step runs no Python of the model and checks no guards; the host says how many tokens are stored, hands over
what the call was given, and goes on. Kernels read lengths on the device (`kvpass.compile.device_lengths`), so a capture
serves every length until the cache's tensors move. Pages that are due are packed behind the replay, by the host.
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

_FEW_PAGES = 16  # a capture serves up to so many
_MASKS = frozenset({"attention_mask"})  # which a step does not read where it knows where rows begin
Step = Callable[[dict[str, Any]], Any]
"""What runs a call on its arguments, by name."""


class Capture(Protocol):
    """Runs ``step`` so that it can be done again: its outputs, and what does it again over the same tensors."""

    def __call__(self, state: CacheState, step: Callable[[], Any]) -> tuple[Any, Callable[[], None]]: ...


class CudaGraphs:
    """Captures into CUDA graphs that share a pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, state: CacheState, step: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        # other threads may allocate meanwhile
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = step()
        graph.replay()  # a capture runs nothing
        return output, graph.replay


CAPTURES: dict[str, Callable[[], Capture]] = {"cuda": CudaGraphs}
"""Who captures steps, by the type of their device."""


@dataclass
class _Captured:
    """A step that was captured: the arguments and the length that it reads, where rows begin if they do not all begin
    at once, and what it leaves. It must not keep its cache alive: arguments that are no tensors, and are returned, are
    told by `Argument`."""

    given: dict[str, Tensor]
    length: Tensor
    starts: Tensor | None
    output: Any
    replay: Callable[[], None]

    def again(self, n: int, starts: Tensor | None, given: dict[str, Any]) -> None:
        """Do it over ``n`` stored tokens of rows that begin at ``starts``, with the arguments ``given``."""
        self.length.fill_(n)
        if self.starts is not None and starts is not None:
            self.starts.copy_(starts)
        for name, own in self.given.items():
            own.copy_(given[name])
        self.replay()


@dataclass
class Argument:
    """The argument of a call that is called so."""

    name: str


def moves(layers: Iterable[PackedLayer]) -> int:
    """How often tensors of ``layers`` were replaced."""
    return sum(storage.moved for layer in layers for storage in layer.storages())


class _OfCache:
    """What has been captured, or seen once, of one cache."""

    def __init__(self) -> None:
        self.seen: set[tuple] = set()
        self.captured: dict[tuple, _Captured] = {}
        self._moved = -1

    def forget_if_moved(self, layers: Iterable[PackedLayer]) -> None:
        """Start again if a tensor of ``layers`` is not where it was."""
        moved = moves(layers)
        if moved != self._moved:
            self._moved, self.seen, self.captured = moved, set(), {}


class Replays:
    """Steps of all caches of ``model``. ``graphs`` say whether there is one that counts on the host."""

    def __init__(self, model: nn.Module, graphs: list[GraphReport], capture: Callable[[], Capture]):
        self._watch, self._graphs, self._new_capture = Watch(model), graphs, capture
        self._capture: Capture | None = None
        self._caches: weakref.WeakKeyDictionary[CacheState, _OfCache] = weakref.WeakKeyDictionary()

    def clear(self) -> None:
        """Let go of everything that was captured."""
        self._caches.clear()

    def run(self, state: CacheState, new_tokens: int, given: dict[str, Any], step: Step) -> Any:
        """What ``step`` returns for the arguments ``given``, which hold ``new_tokens`` tokens, over the cache with
        ``state``."""
        if self._watch.changed():  # captured steps read weights where they were
            self.clear()
        cache = self._caches.setdefault(state, _OfCache())
        n, due = state.tokens, is_due(state, new_tokens)
        if due and new_tokens > 1:  # they may take slots of those that are due
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
        """The step of now, of whose arguments it reads those that ``read`` names."""
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
    """What a captured step is specialised on."""
    return tuple(
        (name, value.shape, value.dtype) if isinstance(value, Tensor) else (name, _identity(value))
        for name, value in given.items()
    )


def _identity(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else id(value)


def mapped(output: Any, fn: Callable[[Any], Any]) -> Any:
    """What a model returns with ``fn`` of each of its values."""
    if isinstance(output, ModelOutput):
        return type(output)(**{name: mapped(value, fn) for name, value in output.items()})
    if type(output) in (tuple, list):
        return type(output)(mapped(value, fn) for value in output)
    return fn(output)


def _returned(leaf: Any, given: dict[str, Any]) -> Any:
    """What a call with the arguments ``given`` returns for a value of a captured step: a tensor of its own, as the next
    replay writes to the captured one."""
    if isinstance(leaf, Tensor):
        return leaf.clone()
    return given[leaf.name] if isinstance(leaf, Argument) else leaf

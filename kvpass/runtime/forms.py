"""A compiled function that is called in many ways, by many threads."""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from threading import RLock

import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit
from transformers.cache_utils import Cache

from kvpass.lowering.session import forget, specialized, uncollected, uncounted

from ..cache.layer import PackedLayer
from ..cache.swap import packed_layers
from ..compile.backend import Backend
from ..progress import announced

_numbers = itertools.count()


def _with_own_code(fn: Callable, name: str) -> Callable:
    """A copy of ``fn`` with a code object of its own, called ``name``. Dynamo keeps compiled graphs, and its limit of
    them, per code; by name it remembers what varied from call to call, and other models must not make ours vary."""
    copy = types.FunctionType(
        fn.__code__.replace(co_name=name), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__
    )
    return functools.wraps(fn)(copy)


class Forms:
    """``torch.compile(fn, ...)`` with a code object for each form of call, so that none reaches Dynamo's limit.

    Sizes, and lengths of a cache, tell forms apart as 0, 1 and more. So there are as many as users have ways to call,
    and each has a graph for the first batch size or two and one for all others.

    what: what is compiled, for those who wait for it. guards: options of torch.compile about them. unguarded: what
        else tells forms apart, where guards do not.
    """

    def __init__(
        self,
        fn: Callable,
        backend: Backend,
        what: str,
        guards: dict | None = None,
        unguarded: Callable[[], Hashable] = lambda: None,
        **options,
    ):
        self.backend, options["backend"] = backend, backend
        self._unguarded = unguarded
        self._waiting = nullcontext if backend.interpret else functools.partial(announced, what)
        name = f"{fn.__name__}_{next(_numbers)}"
        self._code: list[types.CodeType] = []

        def start() -> Callable:
            own = _with_own_code(fn, name)
            self._code.append(own.__code__)
            return torch.compile(own, options=dict(guards or {}), **options)  # it takes out what is its own

        self._start = start
        self._forms: dict[tuple, _Form] = {}

    def clear(self) -> None:
        """Let go of every graph."""
        self._forms.clear()
        forget(self.backend, self._code)

    def __call__(self, *args, **kwargs):
        layer = _first_layer((*args, *kwargs.values()))
        stored, batch = (min(layer.tokens, 2), layer.batch_size) if layer else (None, None)
        described = tuple(map(_described, args)), _described(kwargs)
        key = torch.is_inference_mode_enabled(), stored, *described, self._unguarded()
        form = self._forms.get(key) or self._forms.setdefault(key, _Form(self._start, self._waiting))
        return form(batch, args, kwargs)


class _Form:
    """Calls that share graphs. At a new batch size one thread compiles and others wait; afterwards none does."""

    def __init__(self, start: Callable[[], Callable], waiting: Callable[[], AbstractContextManager]):
        self._start, self._run, self._waiting = start, start(), waiting
        self._lock = RLock()
        self._batches: set[int | None] = set()

    def __call__(self, batch: int | None, args: tuple, kwargs: dict):
        if batch not in self._batches:
            with self._lock:
                if batch not in self._batches:
                    with self._waiting(), uncollected():
                        output = self._called(args, kwargs)
                    self._batches.add(batch)
                    return output
        return self._called(args, kwargs)

    def _called(self, args: tuple, kwargs: dict):
        run = self._run
        with uncounted(), specialized():
            try:
                return run(*args, **kwargs)
            except FailOnRecompileLimitHit:  # before anything ran: what a form cannot tell apart varied too often
                with self._lock:
                    if self._run is run:
                        self._run = self._start()
                return self._run(*args, **kwargs)


def _first_layer(values) -> PackedLayer | None:
    """The first packed layer of the cache among ``values``, if there is one."""
    for value in values:
        layers = packed_layers(value) if isinstance(value, Cache) else value
        if isinstance(layers, list) and layers and isinstance(layers[0], PackedLayer):
            return layers[0]
    return None


def _described(item):
    """What a graph may be specialised on, sizes aside that are more than 1."""
    if isinstance(item, Tensor):
        return item.dtype, tuple(min(size, 2) for size in item.shape)
    if isinstance(item, dict):
        return tuple((name, _described(value)) for name, value in item.items())
    return item if item is None or isinstance(item, (bool, str)) else type(item)

"""A compiled function that many threads call with many forms of arguments."""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Hashable, Iterable
from contextlib import AbstractContextManager, nullcontext
from threading import RLock

import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit
from transformers.cache_utils import Cache

from kvpass.lowering.session import forget, specialized, uncollected, uncounted

from ..cache.cache_state import CacheState
from ..cache.swap import state_of
from ..compile.backend import Backend
from ..compile.capture import FAILURES, Breaks, switched_off, translated
from ..errors import NotCapturedError
from ..progress import announced

_numbers = itertools.count()


def _with_own_code(fn: Callable, name: str) -> Callable:
    """A copy of ``fn`` with its own code object, called ``name``. Dynamo stores compiled graphs, and counts them
    against its limit, per code object. Per name, it remembers which sizes varied between calls, so a unique name keeps
    other models from influencing this one."""
    copy = types.FunctionType(
        fn.__code__.replace(co_name=name), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__
    )
    return functools.wraps(fn)(copy)


class Forms:
    """``torch.compile(fn, ...)`` with a code object for each form of call, so that no code object reaches Dynamo's
    limit.

    Forms distinguish sizes, and cache lengths, only as 0, 1 and more. So there is one form per way in which users call
    the model. Each form has one graph for the first batch size or two, and one for all others.

    what: the name of what is compiled, for progress messages.
    guards: options of torch.compile about guards.
    must: raise `NotCapturedError` if ``torch.compile`` is switched off.
    unguarded: returns a further key that distinguishes forms, for state that no guard checks.
    breaks: the reasons for graph breaks so far.

    Calls raise `NotCapturedError` if torch cannot capture or compile them, and the `KVPassError` of anything that
    kvpass refused during capture.
    """

    def __init__(
        self,
        fn: Callable,
        backend: Backend,
        what: str,
        guards: dict | None = None,
        must: bool = False,
        unguarded: Callable[[], Hashable] = lambda: None,
        **options,
    ):
        self.backend, options["backend"] = backend, backend
        self.must, self.breaks, self._unguarded = must, Breaks(), unguarded
        self._whole = bool(options.get("fullgraph"))
        self._waiting = nullcontext if backend.interpret else functools.partial(announced, what)
        name = f"{fn.__name__}_{next(_numbers)}"
        self._code: list[types.CodeType] = []

        def start() -> Callable:
            own = _with_own_code(fn, name)
            self._code.append(own.__code__)
            return torch.compile(own, options=dict(guards or {}), **options)  # a copy: it is modified

        self._start = start
        self._forms: dict[tuple, _Form] = {}

    def clear(self) -> None:
        """Release all graphs."""
        self._forms.clear()
        forget(self.backend, self._code)

    def give_up(self, error: NotCapturedError) -> None:
        """From now on, raise immediately for calls of the form that failed with ``error``."""
        for form in list(self._forms.values()):
            form.give_up(error)

    def __call__(self, *args, **kwargs):
        if self.must and (why := switched_off()):
            raise NotCapturedError(why)
        state = _state_among((*args, *kwargs.values()))
        stored, batch = (min(state.tokens, 2), state.batch) if state else (None, None)
        described = tuple(map(_described, args)), _described(kwargs)
        key = torch.is_inference_mode_enabled(), stored, *described, self._unguarded()
        form = self._forms.get(key) or self._forms.setdefault(key, _Form(self._start, self._waiting, self.breaks))
        try:
            return form(batch, args, kwargs)
        except NotCapturedError as error:
            error.ran = not self._whole  # one graph is captured before any of it runs
            raise


class _Form:
    """Calls that share graphs. At a new batch size one thread compiles while others wait; afterwards no thread
    waits."""

    def __init__(self, start: Callable[[], Callable], waiting: Callable[[], AbstractContextManager], breaks: Breaks):
        self._start, self._run, self._waiting, self._breaks = start, start(), waiting, breaks
        self._lock = RLock()
        self._batches: set[int | None] = set()
        self._failed: NotCapturedError | None = None
        self._given_up, self._failures = "", 0

    def __call__(self, batch: int | None, args: tuple, kwargs: dict):
        if self._given_up:
            raise NotCapturedError(self._given_up)
        if batch not in self._batches:
            with self._lock:
                if batch not in self._batches:
                    with self._waiting(), uncollected(), self._breaks.watching():
                        output = self._translated(args, kwargs)
                    self._batches.add(batch)
                    return output
        return self._translated(args, kwargs)

    def give_up(self, error: NotCapturedError) -> None:
        """Stop trying this form if it failed with ``error`` and has failed before. A first failure is forgiven, because
        a model may do something only once, such as unmerging an adapter from its weights."""
        if self._failed is error:
            self._given_up, self._failed = str(error) if self._failures else "", None
            self._failures += 1

    def _translated(self, args: tuple, kwargs: dict):
        try:
            return self._called(args, kwargs)
        except FAILURES as error:
            reason = translated(error)
            if type(reason) is not NotCapturedError:
                raise reason from None
            self._failed = reason
            raise reason from error

    def _called(self, args: tuple, kwargs: dict):
        run = self._run
        with uncounted(), specialized():
            try:
                return run(*args, **kwargs)
            except FailOnRecompileLimitHit:  # nothing has run; something else varied too often
                with self._lock:
                    if self._run is run:
                        self._run = self._start()
                return self._run(*args, **kwargs)


def _state_among(values: Iterable) -> CacheState | None:
    """The state of the packed cache among ``values``; None if there is no packed cache."""
    for value in values:
        state = state_of(value) if isinstance(value, Cache) else value
        if isinstance(state, CacheState):
            return state
    return None


def _described(item):
    """Everything about an argument that a graph may be specialized on. Sizes above 1 count as equal."""
    if isinstance(item, Tensor):
        return item.dtype, tuple(min(size, 2) for size in item.shape)
    if isinstance(item, dict):
        return tuple((name, _described(value)) for name, value in item.items())
    return item if item is None or isinstance(item, (bool, str)) else type(item)

"""A compiled function that is called in many ways, by many threads."""

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

    what: what is compiled, for those who wait for it. guards: options of torch.compile about them. must: raise
    `NotCapturedError` where ``torch.compile`` is switched off. unguarded: what else tells forms apart, where guards do
    not. breaks: why graphs broke so far.

    Calls raise `NotCapturedError` where torch cannot capture or compile them, and the `KVPassError` of whatever kvpass
    refused while a graph was captured.
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

    def give_up(self, error: NotCapturedError) -> None:
        """Raise at once, from now on, for calls of the form that ended in ``error``."""
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
        return form(batch, args, kwargs)


class _Form:
    """Calls that share graphs. At a new batch size one thread compiles and others wait; afterwards none does."""

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
        """Do not try again what ended in ``error``, if it is not the first: a model may do once what it does not do
        again, such as taking a merged adapter out of its weights."""
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
            except FailOnRecompileLimitHit:  # before anything ran: what a form cannot tell apart varied too often
                with self._lock:
                    if self._run is run:
                        self._run = self._start()
                return self._run(*args, **kwargs)


def _state_among(values: Iterable) -> CacheState | None:
    """The state of the packed cache among ``values``, if there is one."""
    for value in values:
        state = state_of(value) if isinstance(value, Cache) else value
        if isinstance(state, CacheState):
            return state
    return None


def _described(item):
    """What a graph may be specialised on, sizes aside that are more than 1."""
    if isinstance(item, Tensor):
        return item.dtype, tuple(min(size, 2) for size in item.shape)
    if isinstance(item, dict):
        return tuple((name, _described(value)) for name, value in item.items())
    return item if item is None or isinstance(item, (bool, str)) else type(item)

"""Guards process-wide state during tracing, compiling and running.

The state is torch's compile lock, a flag and a counter, and Python's garbage collector. Only this file touches it; see
``tests/test_private_apis.py``.
"""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Lock
from types import CodeType

import torch
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.eval_frame import cached_backends, innermost_fn, reset_code, skip_code
from torch.fx.experimental.symbolic_shapes import ShapeEnv

_count_frames: Callable[[int], int] | None
try:
    from torch._C._dynamo.eval_frame import set_fullgraph_compiled_frame_count as _count_frames
except ImportError:  # older torch does not count
    _count_frames = None


@contextmanager
def compiling() -> Iterator[None]:
    """Context manager: only this thread traces and compiles. Other threads may still run compiled functions.

    Tracing patches modules and sets a process-wide flag, so two traces at the same time break each other. Compiled
    functions refuse to run in any thread during a trace, unless a second flag says that something is being compiled.
    Dynamo holds the lock while it compiles and, from torch 2.13 on, sets the second flag.
    """
    with compile_lock:
        before = torch.compiler._is_compiling_flag
        torch.compiler._is_compiling_flag = True
        try:
            yield
        finally:
            torch.compiler._is_compiling_flag = before


_lock = Lock()
_tracing, _collects = 0, True


@contextmanager
def uncollected() -> Iterator[None]:
    """Context manager: disables Python's garbage collector during a trace. A trace creates a million objects that stay
    alive; collecting over them takes a fifth of its time."""
    global _tracing, _collects
    with _lock:
        if not _tracing:
            _collects = gc.isenabled()
            gc.disable()
        _tracing += 1
    try:
        yield
    finally:
        with _lock:
            _tracing -= 1
            if not _tracing and _collects:
                gc.enable()


_calls = 0


@contextmanager
def uncounted() -> Iterator[None]:
    """Context manager: functions compiled with ``fullgraph=True`` may run in several threads at the same time.

    A call of such a function counts compiled frames, and raises at its end if there were none. All threads share one
    counter: the first call that ends disables the counter for those still running, and the next call that starts resets
    it to 0 for them. A nested call leaves the check to the outer call, so this context acts as an outer call that does
    not check. If it is entered within a user's call, that call is not checked either once this context has ended.
    """
    global _calls
    if _count_frames is None:
        yield
        return
    with _lock:
        _calls += 1
        _count_frames(0)
    try:
        yield
    finally:
        with _lock:
            _calls -= 1
            if not _calls:
                _count_frames(-1)


_specialize = torch._dynamo.config._make_closure_patcher(specialize_float=True)


@contextmanager
def specialized() -> Iterator[None]:
    """Context manager: in this thread, traces treat floats as constants.

    Otherwise Dynamo turns a float that has changed, such as a scale that a module holds, into an input of the graph and
    reads it at run time, which cannot be captured.
    """
    reset = _specialize()
    try:
        yield
    finally:
        reset()


def forget(backend: Callable, code: Iterable[CodeType]) -> None:
    """Release the graphs that ``torch.compile`` created with ``backend`` for functions with these ``code`` objects.

    Dynamo keeps every graph. In addition, cached methods of `ShapeEnv` keep their instance alive, with all that a graph
    was traced with. Clearing these caches only means that other graphs recompute the results when needed.
    """
    with compile_lock:
        for method in vars(ShapeEnv).values():
            if hasattr(method, "cache_clear"):
                method.cache_clear()
        for own in code:
            reset_code(own)
        for key, wrapper in list(cached_backends.items()):
            if getattr(wrapper, "compiler_fn", wrapper) is backend:
                del cached_backends[key]


def uncompiled(fn: Callable) -> None:
    """Make ``torch.compile(fn)`` call ``fn`` uncompiled. Functions that ``fn`` calls are still compiled, unless they
    are disabled. ``torch.compiler.disable`` alone is not enough, because ``torch.compile`` removes it."""
    skip_code(fn.__code__)


def undisabled(compiled: Callable) -> Callable:
    """The function that Inductor's ``compiled`` wraps to disable Dynamo. If Dynamo is already disabled, calling it
    directly saves microseconds per call."""
    return innermost_fn(compiled)

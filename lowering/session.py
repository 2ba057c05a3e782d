"""What belongs to the whole process while something is traced, compiled or run: of torch one lock, one flag and one
counter, of Python its collector. The only file that touches them; see ``tests/test_private_apis.py``.
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
    """Within it this thread traces and compiles alone. What is compiled already runs on in other threads.

    Tracing patches modules and sets a flag for the whole process: a second one at the same time ruins both, and
    compiled functions refuse to run anywhere unless a second flag says that something is being compiled. Dynamo holds
    the lock as it compiles, and from torch 2.13 on sets the second flag.
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
    """Within it Python does not look for cycles among what a trace makes: a million objects that stay, looked through
    again and again, are a fifth of its time."""
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
    """Within it a function compiled with ``fullgraph=True`` may return while another thread calls one.

    Such a call counts compiled frames, and raises behind its end if there were none. There is one counter for all
    threads: whoever ends switches it off for those that still run, and whoever starts then sets it to 0 for them. A
    call within another leaves the check to that one, so ours run within one that does not check. Nor does a call of the
    user's that this is within, once it has ended.
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
    """Within it floats are constants of what is traced, for this thread. Dynamo would make an input of one that has
    changed, such as a scale that a module holds, and read it as the graph runs, which cannot be captured."""
    reset = _specialize()
    try:
        yield
    finally:
        reset()


def forget(backend: Callable, code: Iterable[CodeType]) -> None:
    """Let go of the graphs that ``torch.compile`` made of functions with these ``code`` objects by ``backend``.

    Dynamo keeps all there ever were, and methods of `ShapeEnv` memorise their instance, with all that a graph was
    traced with; those of other graphs are computed again when needed.
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
    """Have ``torch.compile(fn)`` call ``fn`` as it is. What ``fn`` calls is compiled, unless it is disabled;
    ``torch.compiler.disable`` alone does not help, as ``torch.compile`` takes it off."""
    skip_code(fn.__code__)


def undisabled(compiled: Callable) -> Callable:
    """What ``compiled``, of Inductor, calls with Dynamo off: microseconds of each call, where Dynamo is off already."""
    return innermost_fn(compiled)

"""What of torch belongs to the whole process while something is traced, compiled or run: one lock, one flag and one
counter. The only file that touches them; see ``tests/test_private_apis.py``.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import Lock
from types import CodeType
from typing import Any

import torch
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.eval_frame import cached_backends, innermost_fn, reset_code
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


_calls = 0
_calls_lock = Lock()


@contextmanager
def uncounted() -> Iterator[None]:
    """Within it a function compiled with ``fullgraph=True`` may return while another thread calls one.

    Such a call counts compiled frames, and raises behind its end if there were none. There is one counter for all
    threads: whoever ends switches it off for those that still run, and whoever starts then sets it to 0 for them. A
    call within another leaves the check to that one, so ours run within one that does not check.
    """
    global _calls
    if _count_frames is None:
        yield
        return
    with _calls_lock:
        _calls += 1
        _count_frames(0)
    try:
        yield
    finally:
        with _calls_lock:
            _calls -= 1
            if not _calls:
                _count_frames(-1)


def compiled_once(make: Callable) -> Callable:
    """`functools.cache` for what compiles: threads that ask for the same wait for the first of them."""
    made: dict[tuple, Any] = {}

    @wraps(make)
    def get(*key):
        try:
            return made[key]
        except KeyError:
            with compiling():
                if key not in made:
                    made[key] = make(*key)
            return made[key]

    vars(get)["cache_clear"] = made.clear
    return get


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


def undisabled(compiled: Callable) -> Callable:
    """What ``compiled``, of Inductor, calls with Dynamo off: microseconds of each call, where Dynamo is off already."""
    return innermost_fn(compiled)

"""What of torch belongs to the whole process while something is traced or compiled: one lock and one flag. The only
file that touches them; see ``tests/test_private_apis.py``.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import CodeType
from typing import Any

import torch
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.eval_frame import cached_backends, innermost_fn, reset_code
from torch.fx.experimental.symbolic_shapes import ShapeEnv


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

"""Compiles Inductor kernels ahead of time, so that calls check no guards.

``torch.compile`` spends tens of microseconds per call on guard checks, too much for an op that is called once per layer
and step. Only this file of the lowering uses Inductor's private entry point; see ``tests/test_private_apis.py``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from kvpass.progress import announced

from ..session import compiling
from . import background_compile, kernel_store


def unprobed() -> dict[str, bool]:
    """Options of ``torch._inductor.config`` that skip probing the C++ compiler for vector instructions.

    Probing takes seconds in every process. A compiler that is new enough for torch's headers supports the processor's
    vector instructions.
    """
    return {"cpp.vec_isa_ok": True} if inductor_config.cpp.vec_isa_ok is None else {}


@dataclass(frozen=True)
class Input:
    """An input tensor of a kernel. Only the *metadata* of ``example`` is traced; None stays None.

    dynamic: dims of any size. Dynamic dims with equal sizes in the examples are taken to be always equal, so unrelated
        dims must have different sizes. No size may be 0 or 1.
    """

    name: str
    example: Tensor | None
    dynamic: Sequence[int] = ()


class Program(NamedTuple):
    """A function to compile: ``fn(*tensors)`` takes ``inputs`` and returns a tuple of tensors.

    options: options of ``torch._inductor.config``, by name.
    by_name: the compiled function takes one dict of tensors by name.
    """

    fn: Callable
    inputs: Sequence[Input]
    options: dict[str, Any] | None = None
    by_name: bool = False


@announced("kernels of a cache")
@compiling()
def compile_ahead(program: Program, place: Path | None = None) -> Callable:
    """Compile ``program`` once, for all sizes of the dynamic dims of its inputs.

    place: file on disk (`kernel_store`) from which the kernel is loaded, or to which it is written for other processes.
    """
    options = {"emulate_precision_casts": True, "size_asserts": False, **unprobed(), **(program.options or {})}
    with torch.no_grad(), inductor_config.patch(options):
        compiled: Any = (place and kernel_store.load(place)) or _compiled(program, place)
    if program.by_name:
        taken = itemgetter(*(one.name for one in program.inputs if one.example is not None))
        return lambda given: compiled(*taken(given))
    present = [one.example is not None for one in program.inputs]
    return lambda *tensors: compiled(*compress(tensors, present))


def _compiled(program: Program, place: Path | None) -> Callable:
    """Compile ``program``. The compiled function takes the inputs that are not None."""
    fake_mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = []
    for one in program.inputs:
        if one.example is None:
            continue
        sizes = [DimDynamic.DYNAMIC if d in one.dynamic else DimDynamic.STATIC for d in range(one.example.ndim)]
        context: StatelessSymbolicContext = StatelessSymbolicContext(dynamic_sizes=sizes)
        shape, stride, dtype, device = one.example.shape, one.example.stride(), one.example.dtype, one.example.device
        # a copy, because a tensor that is the example of two inputs would be traced as one input
        example = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        fakes.append(fake_mode.from_tensor(example, source=ConstantSource(one.name), symbolic_context=context))

    def call(*tensors):
        remaining = iter(tensors)
        return program.fn(*(None if one.example is None else next(remaining) for one in program.inputs))

    with fake_mode, enable_python_dispatcher():  # matmul in C++ would fix sizes before torch 2.13
        graph = make_fx(call)(*fakes)
    fixed = {symbol: size for symbol, size in fake_mode.shape_env.replacements.items() if size.is_number}
    if fixed:  # calls do not check sizes
        raise AssertionError(f"Tracing {program.fn} specialized sizes that must stay dynamic: {fixed}")
    with tracing(TracingContext(fake_mode)):
        if place is not None:
            return kernel_store.compile_and_keep(graph, fakes, place)
        compiled: Any = compile_fx(graph, fakes)
        return compiled


class Kernel:
    """Compiles the programs ``make(*key)`` and caches them by key.

    Each key is compiled once per process, and once for all processes that share a compile cache. Threads that need the
    same kernel wait for the first one. The ``repr`` of a key must identify it completely.
    """

    def __init__(self, make: Callable[..., Program]):
        self.make, self.name = make, f"{make.__module__}.{make.__name__}"
        self._compiled: dict[tuple, Callable] = {}

    def __call__(self, *key) -> Callable:
        try:
            return self._compiled[key]
        except KeyError:
            with compiling():
                if key not in self._compiled:
                    self._compiled[key] = self._made(key)
            return self._compiled[key]

    def _made(self, key: tuple) -> Callable:
        program = self.make(*key)
        device = next(one.example.device for one in program.inputs if one.example is not None)
        place = kernel_store.place_of(device, self.name, *key)
        if place is not None:
            background_compile.wait(place)
        return compile_ahead(program, place)

    def cache_clear(self) -> None:
        """Drop all kernels that were compiled in this process."""
        self._compiled.clear()

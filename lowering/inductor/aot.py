"""One Inductor kernel, compiled ahead of its calls, with no guards to check at each of them.

``torch.compile`` would do, at tens of microseconds of guards a call: too much for an op called once a layer and step.
The only file of the lowering that touches Inductor's private entry point; see ``tests/test_private_apis.py``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

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


def unprobed() -> dict[str, bool]:
    """Options of ``torch._inductor.config`` that take it for granted that the C++ compiler, which is new enough for
    torch's headers, knows the vector instructions of the processor: finding out takes seconds of every process."""
    return {"cpp.vec_isa_ok": True} if inductor_config.cpp.vec_isa_ok is None else {}


@dataclass(frozen=True)
class Input:
    """A tensor that a kernel takes. Only the *metadata* of ``example`` is traced; None stays None. Its ``dynamic`` dims
    are any size, the same one where they are equal here, so unrelated dims must differ; none may be 0 or 1."""

    name: str
    example: Tensor | None
    dynamic: Sequence[int] = ()


@announced("kernels of a cache")
@compiling()
def compile_ahead(fn: Callable, inputs: Sequence[Input], options: dict | None = None) -> Callable:
    """Compile ``fn(*tensors)``, which returns a tuple of tensors, once for all sizes of the dynamic dims of ``inputs``.

    options: of ``torch._inductor.config``, by name.
    """
    options = {"emulate_precision_casts": True, **unprobed(), **(options or {})}
    fake_mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = []
    for one in inputs:
        if one.example is None:
            continue
        sizes = [DimDynamic.DYNAMIC if d in one.dynamic else DimDynamic.STATIC for d in range(one.example.ndim)]
        context: StatelessSymbolicContext = StatelessSymbolicContext(dynamic_sizes=sizes)
        shape, stride, dtype, device = one.example.shape, one.example.stride(), one.example.dtype, one.example.device
        example = torch.empty_strided(shape, stride, dtype=dtype, device=device)  # one for two would be traced as one
        fakes.append(fake_mode.from_tensor(example, source=ConstantSource(one.name), symbolic_context=context))
    present = [one.example is not None for one in inputs]

    def call(*tensors):
        remaining = iter(tensors)
        return fn(*(next(remaining) if there else None for there in present))

    with torch.no_grad(), fake_mode, enable_python_dispatcher():  # matmul in C++ would fix sizes before torch 2.13
        graph = make_fx(call)(*fakes)
    fixed = {symbol: size for symbol, size in fake_mode.shape_env.replacements.items() if size.is_number}
    if fixed:  # nothing would check it at a call
        raise AssertionError(f"Tracing {fn} fixed sizes that vary: {fixed}")
    with torch.no_grad(), tracing(TracingContext(fake_mode)), inductor_config.patch(options):
        compiled: Any = compile_fx(graph, fakes)

    def run(*tensors):
        return compiled(*compress(tensors, present))

    return run

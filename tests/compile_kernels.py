"""Compile the Triton kernels, as their host code would launch them, for GPUs that are not here; run by
`test_triton_compiles` in a process of its own, because a process interprets kernels or compiles them.

    python tests/compile_kernels.py '{"op": "attend", "bits": 2}'   # prints JSON: what each kernel takes of each target
"""

import json
import re
import sys
from contextlib import redirect_stdout
from io import StringIO
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvpass.codec import CodecSpec, Subspace
from kvpass.lowering.table import Site, select
from kvpass.lowering.triton import append, configs, encode, lattice, launch
from kvpass.state import KVState

triton.knobs.compilation.always_compile = True
triton.knobs.nvidia.dump_ptxas_log = True

_TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.uint8: "u8", torch.int64: "i64"}


class Launches:
    """Stands in for a kernel, and keeps what it would have been launched with."""

    def __init__(self, kernel):
        self.kernel, self.calls = kernel, []

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.calls.append((self.kernel, args, kwargs))


def compiled(kernel, args, kwargs, target: GPUTarget):
    names, options = [p.name for p in kernel.params], dict(kwargs)
    values = dict(zip(names, args, strict=False))
    values.update({name: options.pop(name) for name in list(options) if name in names})
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value, name = values[parameter.name], parameter.name
        if parameter.is_constexpr or value is None:
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], attributes[i,] = f"*{_TYPES[value.dtype]}", [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[i,] = [["tt.divisibility", 16]]
    return triton.compile(ASTSource(kernel, signature, constants, attributes), target=target, options=options)


_known = {}


def resources(kernel, args, kwargs, target: GPUTarget) -> dict:
    """`_resources`, once for launches that compile to the same."""
    shown = [(a.dtype, None) if isinstance(a, torch.Tensor) else (type(a), a) for a in args]
    key = kernel.__name__, str(shown), str(kwargs), target
    if key not in _known:
        _known[key] = _resources(kernel, args, kwargs, target)
    return _known[key]


def _resources(kernel, args, kwargs, target: GPUTarget) -> dict:
    """Bytes of shared memory, registers a thread, and bytes spilled to local memory."""
    with redirect_stdout(StringIO()) as log:
        made = compiled(kernel, args, kwargs, target)
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", log.getvalue())))
    registers = int(re.search(r"Used (\d+) registers", log.getvalue())[1])
    return dict(shared=made.metadata.shared, registers=registers, spilled=spilled)


def attend_launches(
    bits, v_bits=None, per="channel", page=32, group=32, dim=128, heads=32, groups=8, queries=1, mask=False,
    softcap=0.0, dtype="bfloat16", grid="", rope="", paid="",
) -> list:  # fmt: skip
    """What attention over a cache of 512 tokens launches, with ``paid`` the statistic of what each was paid."""
    if grid:
        specs = [CodecSpec(bits, "token", group, page, rotation=0, grid=grid, predictor=p) for p in ("mean", "")]
    else:
        keys = CodecSpec(bits, per, min(group, page), page, pre_rope=bool(rope))
        specs = keys, CodecSpec(v_bits or bits, "token", group, page, residual=page)
    dtype = getattr(torch, dtype)
    states = [KVState.allocate(spec, 1, groups, dim, dtype, "cpu", 640) for spec in specs]
    past = [(s.codes, s.scale, s.zero_point, s.ring) for s in states]
    q, new = torch.zeros(1, heads, queries, dim, dtype=dtype), torch.zeros(1, groups, queries, dim, dtype=dtype)
    mask = torch.ones(1, 1, queries, 512 + queries, dtype=torch.bool) if mask else None
    kernels = {name: Launches(getattr(launch, name)) for name in ("attend_split", "merge_splits", "pay_tokens")}
    center = None if states[0].center is None else states[0].center.to(dtype)
    rotary = (*torch.zeros(2, 1, 640, dim // 2, dtype=dtype), rope) if rope else None
    with (
        mock.patch.multiple(launch, **kernels),
        mock.patch.object(configs, "_multiprocessors", lambda device: 108),
    ):
        launch.attend_scored(
            q, *past, 512, new, new, mask, queries > 1 and mask is None, 0.1, softcap, *specs, rotary, None, center,
            paid, None,
        )  # fmt: skip
    return [call for kernel in kernels.values() for call in kernel.calls]


def encode_launches(
    bits, per="channel", page=32, group=32, dim=128, dtype="bfloat16", eta=0.0, block=0, **others
) -> list:  # fmt: skip
    """What encoding four pages launches; with ``block``, of keys whose errors are compensated."""
    names = "encode_pages", "encode_compensated", "encode_on_grid"
    kernels, rotate = {name: Launches(getattr(encode, name)) for name in names}, Launches(lattice.spread_runs)
    answers = torch.zeros(1, 8, dim - block, dim - block, dtype=getattr(torch, dtype)) if block else None
    with mock.patch.multiple(encode, **kernels), mock.patch.object(lattice, "spread_runs", rotate):
        subspace = Subspace(5, 0.5, True, block) if block else None
        spec = CodecSpec(bits, per, group, page, eta=eta, subspace=subspace, **others)
        encode.encode(torch.zeros(1, 8, 4 * page, dim, dtype=getattr(torch, dtype)), answers, spec)
    return [call for kernel in (rotate, *kernels.values()) for call in kernel.calls]


def append_launches(tokens=1, groups=8, dim=128, dtype="bfloat16") -> list:
    """What storing tokens in the windows of two layers launches, beside what encodes pages."""
    spec, dtype, kernel = CodecSpec(2, "channel", 32, 32), getattr(torch, dtype), Launches(append.write_windows)
    states = [KVState.allocate(spec, 1, groups, dim, dtype, "cpu", 640) for _ in range(2)]
    fields = ([getattr(state, name) for state in states] for name in ("codes", "scale", "zero_point", "ring"))
    with mock.patch.object(append, "write_windows", kernel):
        append.append_layers_(*fields, 5, [torch.zeros(1, groups, tokens, dim, dtype=dtype)] * 2, spec)
    return kernel.calls


def chosen_on_cuda() -> dict[str, str]:
    """What "auto" would take there, for KIVI, QuaRot and HIGGS."""
    layers = {
        "kivi": (CodecSpec(2, "channel", 32, 32), CodecSpec(2, "token", 32, 32, residual=32)),
        "quarot": [CodecSpec(4, "token", 32, 32, rotation=0, predictor=p) for p in ("mean", "")],
        "higgs": [CodecSpec(4, "token", 128, 32, rotation=0, grid="d2n16", predictor=p) for p in ("mean", "")],
    }
    return {
        f"{op}, {name}": select(Site(op, "cuda", tuple(map(str, specs)), 1, 128)).name
        for op in ("attend", "attend_scored", "encode", "append_", "append_layers_")
        for name, specs in layers.items()
    }


def main(cases: list[str]) -> None:
    print(json.dumps(chosen_on_cuda()))
    for case in cases:
        arguments = json.loads(case)
        of_op = {"attend": attend_launches, "encode": encode_launches, "append": append_launches}
        launches = of_op[arguments.pop("op")](**arguments)
        for arch in (80, 90):
            for kernel, args, kwargs in launches:
                target = GPUTarget("cuda", arch, 32)
                used = resources(kernel, args, kwargs, target)
                print(json.dumps(dict(case=case, arch=arch, kernel=kernel.__name__, **used)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

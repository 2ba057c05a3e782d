"""Compile the Triton kernels, as their host code would launch them, for GPUs that are not here; run by
`test_triton_compiles` in a process of its own, because a process interprets kernels or compiles them.

    python tests/compile_kernels.py CASE...   # prints JSON: what each takes of each target
"""

import json
import re
import subprocess
import sys
import tempfile
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvpass.codec import CodecSpec
from kvpass.lowering.triton import attend, configs
from kvpass.state import KVState

_TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.uint8: "u8"}


class Launches:
    """Stands in for a kernel, and keeps what it would have been launched with."""

    def __init__(self, kernel):
        self.kernel, self.calls = kernel, []

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.calls.append((args, kwargs))


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


def resources(kernel, target: GPUTarget) -> dict:
    """Bytes of shared memory, registers a thread, and bytes spilled to local memory."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(kernel.asm["ptx"])
        file.flush()
        arch = f"sm_{target.arch}{'a' if target.arch >= 90 else ''}"
        command = [triton.knobs.nvidia.ptxas.path, "-v", "-arch", arch, file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill", said))
    return dict(shared=kernel.metadata.shared, registers=int(re.search(r"Used (\d+) registers", said)[1]), spilled=spilled)


def launches(case: dict) -> list:
    """What attention over a cache of 512 tokens launches."""
    dim, dtype = case.get("head_dim", 128), getattr(torch, case.get("dtype", "bfloat16"))
    batch, heads, groups, queries = 1, case.get("heads", 32), case.get("groups", 8), case.get("queries", 1)
    page = case.get("page", 32)
    keys = CodecSpec(case["bits"], case.get("per", "channel"), min(32, page), page)
    specs = keys, CodecSpec(case.get("v_bits", case["bits"]), "token", case.get("v_group", 32), page, residual=page)
    states = [KVState.allocate(spec, batch, groups, dim, dtype, "cpu", 640) for spec in specs]
    q, new = torch.zeros(batch, heads, queries, dim, dtype=dtype), torch.zeros(batch, groups, queries, dim, dtype=dtype)
    mask = torch.ones(batch, 1, queries, 512 + queries, dtype=torch.bool) if case.get("mask") else None
    past = [(s.codes, s.scale, s.zero_point, s.ring) for s in states]
    split, merge = Launches(attend.attend_split), Launches(attend.merge_splits)
    with (
        mock.patch.multiple(attend, attend_split=split, merge_splits=merge),
        mock.patch.object(configs, "_multiprocessors", lambda device: 108),
    ):
        attend.attend(q, *past, 512, new, new, mask, queries > 1, 0.1, case.get("softcap", 0.0), *specs)
    return [(kernel.kernel, *call) for kernel in (split, merge) for call in kernel.calls]


def main(cases: list[dict]) -> None:
    for case in cases:
        for arch in (80, 90):
            target = GPUTarget("cuda", arch, 32)
            for kernel, args, kwargs in launches(case):
                used = resources(compiled(kernel, args, kwargs, target), target)
                print(json.dumps(dict(case=case, arch=arch, kernel=kernel.__name__, **used)), flush=True)


if __name__ == "__main__":
    main([json.loads(argument) for argument in sys.argv[1:]])

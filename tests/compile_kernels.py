"""Compile the Triton kernels, as their host code would launch them, for GPUs that this machine does not have.

`test_triton_compiles` runs this in a separate process, because one process either interprets kernels or compiles them.

    python tests/compile_kernels.py 80,90 '{"op": "attend", "bits": 2}'   # prints each kernel's resources as JSON
"""

import json
import re
import sys
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from io import StringIO
from typing import NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from kvpass.cache.state import KVState, ModelTensors
from kvpass.codec import Subspace
from kvpass.codec.codec import codec_from
from kvpass.codec.page_rope import PageTables
from kvpass.codec.second_level import SecondLevel
from kvpass.codec.tensors import Pack, of_model
from kvpass.lowering.call_types import AppendLayersCall, AttendCall
from kvpass.lowering.table import DispatchKey, select
from kvpass.lowering.triton import (
    append,
    configs,
    dequantize_fields,
    launch,
    launch_latent,
    quantize,
    quantize_shares,
)
from kvpass.paged import attend_triton, paged_attention, store_triton
from kvpass.paged.batch import Batch, BlockTable, Tiles
from kvpass.paged.block_layout import BlockLayout
from kvpass.schemes import LayerGeometry, get

from common import coded
from shared_bits import shared_tensors

triton.knobs.compilation.always_compile = True
triton.knobs.nvidia.dump_ptxas_log = True


class Launch(NamedTuple):
    """A launch that was compiled and not run. given: the kernel's arguments, by name. log: the assembler's log."""

    name: str
    given: dict
    options: dict
    kernel: triton.compiler.CompiledKernel
    log: str

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        return self.kernel.metadata.shared

    @property
    def registers(self) -> int:
        """Registers per thread."""
        return int(re.search(r"Used (\d+) registers", self.log)[1])

    @property
    def narrow(self) -> list[str]:
        """The operands of products along whose sum a group of 4 threads holds more elements than there are."""
        text = self.kernel.asm["ttgir"]
        found = re.finditer(r"tt\.dot .*?: (tensor<\d+x(\d+)x\w+, #ttg\.dot_op<\{.*?kWidth = (\d+))", text)
        return [product[1] for product in found if int(product[2]) < 4 * int(product[3])]

    @property
    def spilled(self) -> int:
        """Bytes spilled to local memory."""
        return sum(map(int, re.findall(r"(\d+) bytes spill", self.log)))


_logs = {}


@contextmanager
def compiling(arch: int):
    """A context in which kernel launches are compiled for a GPU ``sm_arch`` but not run. Yields a list that receives a
    `Launch` for each."""
    launches, run = [], JITFunction.run

    def compile_only(kernel, *args, grid, warmup, **kwargs):
        with redirect_stdout(StringIO()) as log:
            made = run(kernel, *args, grid=grid, warmup=True, **kwargs)
        given = dict(zip((parameter.name for parameter in kernel.params), args, strict=False))
        log = _logs.setdefault(id(made), log.getvalue())  # a kernel that was launched before is not compiled again
        launches.append(Launch(kernel.__name__, given, kwargs, made, log))

    absent = mock.Mock()
    absent.get_current_device.return_value = arch  # Triton caches kernels per device
    absent.get_current_target.return_value = GPUTarget("cuda", arch, 32)
    with (
        mock.patch.object(driver, "_active", absent),
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(configs, "_multiprocessors", lambda device: 108),
    ):
        yield launches


def attend(
    bits, v_bits=None, per="channel", page=32, group=32, dim=128, heads=32, groups=8, queries=1, mask=False,
    softcap=0.0, dtype="bfloat16", grid="", rope="", statistic="", padded=False, codec=None,
) -> None:  # fmt: skip
    """Attend over a cache of 512 tokens. ``statistic``: the kind of attention mass that is returned; ``padded``: on the
    left."""
    codec = codec_from(codec)
    if grid:
        specs = [coded(bits, "token", group, page, rotation=0, grid=grid, center=c) for c in (True, False)]
    else:
        keys = coded(bits, per, min(group, page), page, pre_rope=bool(rope), codec=codec)
        of_values = codec if isinstance(codec, SecondLevel) else None
        specs = keys, coded(v_bits or bits, "token", min(group, dim), page, residual=page, codec=of_values)
    dtype = getattr(torch, dtype)
    states = [KVState.allocate(spec, 1, groups, dim, dtype, "cpu", 640) for spec in specs]
    past = [Pack.of(state.pack, state.spec) for state in states]
    q, new = torch.zeros(1, heads, queries, dim, dtype=dtype), torch.zeros(1, groups, queries, dim, dtype=dtype)
    mask = torch.ones(1, 1, queries, 512 + queries, dtype=torch.bool) if mask else None
    rotary = (*torch.zeros(2, 1, 640, dim // 2, dtype=dtype), rope) if rope else None
    call = AttendCall(
        q, *past, 512, new, new, mask, queries > 1 and mask is None, 0.1, softcap, *specs, rotary, None, statistic,
        starts=torch.zeros(1, dtype=torch.int64) if padded else None,
    )  # fmt: skip
    launch.attend(call)


def past_of_fields(scheme, dim, groups, dtype, **fields):
    """The plan, and the keys and values, of a cache for 640 tokens with per-channel bit widths."""
    plan = get(scheme, **fields).plan(LayerGeometry(0, 1, groups, dim, dtype, torch.device("cpu")))
    states = []
    for spec in (plan.key, plan.value):
        shared = shared_tensors(spec, groups, dim)[bool(spec.transform.numbered) :] if of_model(spec) else ()
        states.append(KVState.allocate(spec, 1, groups, dim, dtype, "cpu", 640, shared=ModelTensors(shared)))
    return plan, [Pack.of(state.pack, state.spec) for state in states]


def attend_fields(
    scheme="waterfill", dim=128, heads=32, groups=8, queries=1, mask=False, softcap=0.0, dtype="bfloat16", **fields
) -> None:  # fmt: skip
    """Attend over a cache of 512 tokens with per-channel bit widths."""
    dtype = getattr(torch, dtype)
    plan, past = past_of_fields(scheme, dim, groups, dtype, **fields)
    q, new = torch.zeros(1, heads, queries, dim, dtype=dtype), torch.zeros(1, groups, queries, dim, dtype=dtype)
    mask = torch.ones(1, 1, queries, 512 + queries, dtype=torch.bool) if mask else None
    if plan.key.transform.page_rope:
        page_tables = PageTables(*torch.zeros(2, 1, 64, dim // 2, dtype=dtype), f"half-{dim // 2}")
        past[0] = past[0]._replace(page_tables=page_tables)
    causal = queries > 1 and mask is None
    launch.attend(AttendCall(q, *past, 512, new, new, mask, causal, 0.1, softcap, plan.key, plan.value))


def dequantize_pages(scheme="waterfill", dim=128, groups=8, **fields) -> None:
    """Dequantize keys with per-channel bit widths."""
    plan, (past, _) = past_of_fields(scheme, dim, groups, torch.bfloat16, **fields)
    dequantize_fields.dequantize_pages([*past.pools, *past.dequantizes_with(plan.key)], plan.key)


def attend_latent(
    bits=4, per="channel", ranks=(512, 64), heads=128, queries=1, mask=False, dtype="bfloat16", padded=False
) -> None:
    """Attend over a latent of 512 tokens and its rotary part, of ``ranks`` channels."""
    specs = coded(bits, per, 32, 32), coded(bits, "token", 32, 32, residual=32)
    dtype = getattr(torch, dtype)
    states = [KVState.allocate(spec, 1, 1, dim, dtype, "cpu", 640) for spec, dim in zip(specs, ranks, strict=True)]
    past = [Pack.of(state.pack, state.spec) for state in states]
    q, *new = (
        torch.zeros(1, n, queries, dim, dtype=dtype) for n, dim in ((heads, sum(ranks)), *((1, r) for r in ranks))
    )
    mask = torch.ones(1, 1, queries, 512 + queries, dtype=torch.bool) if mask else None
    call = AttendCall(
        q, *past, 512, *new, mask, queries > 1 and mask is None, 0.1, 0.0, *specs, latent=True,
        starts=torch.zeros(1, dtype=torch.int64) if padded else None,
    )  # fmt: skip
    launch_latent.attend(call)


def blocks_layer(scheme, dim, groups, dtype, **fields):
    """A layer of 16 blocks of 128 tokens, and a batch of two requests that bring a token each."""
    dtype = getattr(torch, dtype)
    plan = get(scheme, **fields).plan_of(LayerGeometry(0, 1, groups, dim, dtype, torch.device("cpu"), None))
    layout = BlockLayout(plan.key, plan.value, dim, dtype, 128)
    views = layout.views(torch.zeros(16, groups, 128, layout.bytes_per_token, dtype=torch.uint8))
    window, codecs = torch.zeros(16, groups, 16, 2 * dim, dtype=dtype), (None, None)
    layer = paged_attention.Layer(views, window, plan.key, plan.value, codecs, 0.1)
    blocks, start = torch.zeros(2, 32, dtype=torch.int64), torch.arange(3)
    pages, exact = BlockTable(blocks, layout.slots), BlockTable(blocks, 16)
    return layer, Batch(start, start[:2] + 300, start[:2] + 301, pages, exact, layout.lead, most=1)


def attend_blocks(
    scheme="kivi", dim=128, heads=32, groups=8, softcap=0.0, dtype="bfloat16", queries=1, **fields
) -> None:  # fmt: skip
    """Attend to tiles of ``queries`` tokens of two requests over a server's blocks."""
    layer, batch = blocks_layer(scheme, dim, groups, dtype, **fields)
    tiles = Tiles(torch.arange(2), torch.zeros(2, queries, dtype=torch.int64), torch.full((2, queries), 300))
    attention = attend_triton.TiledAttention(layer._replace(softcap=softcap))
    attention(torch.zeros(2, heads, dim, dtype=layer.window.dtype), batch, tiles)


def store_blocks(scheme="kivi", dim=128, groups=8, dtype="bfloat16", tokens=1, **fields) -> None:
    """Store ``tokens`` tokens of each of two requests in a server's blocks."""
    layer, batch = blocks_layer(scheme, dim, groups, dtype, **fields)
    new = torch.zeros(2 * tokens, groups, dim, dtype=layer.window.dtype)
    store_triton.Storing(layer)(replace(batch, most=tokens), new, new)


def quantize_pages(
    bits, per="channel", page=32, group=32, dim=128, dtype="bfloat16", eta=0.0, block=0, **others
) -> None:  # fmt: skip
    """Quantize four pages; with ``block``, of keys whose errors are compensated."""
    fitted = [torch.zeros(1, 8, dim - block, dim - block, dtype=getattr(torch, dtype))] if block else []
    subspace = Subspace(5, 0.5, True, block) if block else None
    spec = coded(bits, per, group, page, eta=eta, subspace=subspace, **others)
    quantize.quantize(torch.zeros(1, 8, 4 * page, dim, dtype=getattr(torch, dtype)), fitted, spec)


def quantize_calibrated(dim=128, groups=8, dtype="bfloat16", **fields) -> None:
    """Quantize a page of keys with calibrated bit widths."""
    dtype = getattr(torch, dtype)
    plan = get("waterfill-static", ropes=("",), **fields).plan(
        LayerGeometry(0, 1, groups, dim, dtype, torch.device("cpu"))
    )
    given = dict(zip(of_model(plan.key), shared_tensors(plan.key, groups, dim, dtype=dtype), strict=True))
    fitted = [given[name] for name in plan.key.codec.quantizes_with if name in given]
    quantize_shares.quantize(torch.zeros(1, groups, plan.key.page_size, dim, dtype=dtype), fitted, plan.key)


def append_tokens(tokens=1, groups=8, dim=128, dtype="bfloat16") -> None:
    """Store tokens in the windows of two layers."""
    spec, dtype = coded(2, "channel", 32, 32), getattr(torch, dtype)
    states = [KVState.allocate(spec, 1, groups, dim, dtype, "cpu", 640) for _ in range(2)]
    packs = [Pack.of(state.pack, spec) for state in states]
    append.append_layers_(AppendLayersCall(packs, 5, [torch.zeros(1, groups, tokens, dim, dtype=dtype)] * 2, spec))


def chosen_on_cuda() -> dict[str, str]:
    """The implementations that "auto" would choose on CUDA, for KIVI, QuaRot and HIGGS."""
    layers = {
        "kivi": (coded(2, "channel", 32, 32), coded(2, "token", 32, 32, residual=32)),
        "quarot": [coded(4, "token", 32, 32, rotation=0, center=c) for c in (True, False)],
        "higgs": [coded(4, "token", 128, 32, rotation=0, grid="d2n16", center=c) for c in (True, False)],
    }
    used = {
        "attend": slice(2),
        "paged_attend": slice(2),
        "paged_attend_one": slice(2),
        "append_layers_": slice(1, 2),
    }  # layers whose keys have a mean are not stored together
    plan = get("waterfill").plan(LayerGeometry(0, 1, 8, 128, torch.bfloat16, torch.device("cpu")))
    fields = DispatchKey("attend", "cuda", (str(plan.key), str(plan.value)), 1, 128)
    captured = paged_attention.never_waits(*layers["kivi"], 128, torch.bfloat16, "cuda")
    return {"attend, waterfill": select(fields).name, "a step over blocks": "triton" if captured else "waits"} | {
        f"{op}, {name}": select(DispatchKey(op, "cuda", tuple(map(str, specs[used.get(op, slice(1))])), 1, 128)).name
        for op in ("attend", "paged_attend", "paged_attend_one", "quantize", "append_", "append_layers_")
        for name, specs in layers.items()
    }


RUN = {
    "attend": attend,
    "fields": attend_fields,
    "dequantize": dequantize_pages,
    "latent": attend_latent,
    "blocks": attend_blocks,
    "store": store_blocks,
    "quantize": quantize_pages,
    "quantize, calibrated": quantize_calibrated,
    "append": append_tokens,
}


def main(archs: str, *cases: str) -> None:
    print(json.dumps(chosen_on_cuda()))
    for case in cases:
        arguments = json.loads(case)
        run = RUN[arguments.pop("op")]
        for arch in map(int, archs.split(",")):
            with compiling(arch) as launches:
                run(**arguments)
            for one in launches:
                used = dict(shared=one.shared, registers=one.registers, spilled=one.spilled, narrow=one.narrow)
                print(json.dumps(dict(case=case, arch=arch, kernel=one.name, **used)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

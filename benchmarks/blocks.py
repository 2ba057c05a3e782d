"""Attention of one layer over a server's blocks, compared with vLLM's own kernel. CPU time of one thread is measured,
so that a shared machine does not distort it.

    build/vllm-venv/bin/python benchmarks/blocks.py --schemes kivi kivi-sinks --dtypes float32 bfloat16

Measured are a chunk of a prompt after its stored part, and one token each of several requests, over random contents.
All layers of a model take turns, so that they read from memory and not from the processor's caches. Planning, which
happens once per step, is not counted.
"""

import argparse
import time
from functools import partial

import torch
from vllm import _custom_ops as vllm_ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from kvpass import schemes
from kvpass.lowering.page_codecs import codecs_for
from kvpass.paged import paged_attention
from kvpass.paged.batch import Batch, BlockTable
from kvpass.paged.block_layout import BlockLayout
from kvpass.schemes import LayerGeometry

Q_HEADS, HEADS, DIM = 9, 3, 64
WINDOW, BLOCK, OWN_BLOCK = 16, 256, 128
SCALE = DIM**-0.5


def of_each(total: int, size: int, requests: int) -> torch.Tensor:
    """Separate blocks of ``size`` tokens for requests of ``total`` tokens: ``[requests, n]``."""
    return torch.randperm(requests * (total // size + 1)).view(requests, -1)


def packed(scheme: str, dtype: torch.dtype, past: int, new: int, requests: int):
    """A call that stores the new tokens of all requests and attends over their blocks."""
    plan = schemes.get(scheme).plan_of(LayerGeometry(0, 1, HEADS, DIM, dtype, torch.device("cpu"), None))
    layout = BlockLayout(plan.key, plan.value, DIM, dtype, BLOCK)
    tables = [of_each(past + new, size, requests) for size in (BLOCK, WINDOW)]
    cache = torch.zeros(tables[0].numel(), HEADS, BLOCK, layout.bytes_per_token, dtype=torch.uint8)
    window = torch.randn(tables[1].numel(), HEADS, WINDOW, 2 * DIM).to(dtype)
    codecs = tuple(codecs_for(spec, cache.device, DIM) for spec in (plan.key, plan.value))
    layer = paged_attention.with_kernel(
        paged_attention.Layer(layout.views(cache), window, plan.key, plan.value, codecs, SCALE)  # type: ignore[arg-type]
    )
    start, length = torch.arange(requests + 1) * new, torch.full((requests,), past)
    pages = BlockTable(tables[0], layout.slots)
    batch = Batch(start, length, length + new, pages, BlockTable(tables[1], WINDOW), layout.lead)
    q, k, v = (torch.randn(requests * new, heads, DIM).to(dtype) for heads in (Q_HEADS, HEADS, HEADS))
    out = torch.empty_like(q)

    def call() -> None:
        paged_attention.store(batch, layer, k, v)
        paged_attention.attend(batch, layer, q, out)

    return call


def own(dtype: torch.dtype, past: int, new: int, requests: int):
    """The same call for vLLM's own cache."""
    isa, total = _get_attn_isa(dtype, OWN_BLOCK, DIM, "auto"), past + new
    table = of_each(total, OWN_BLOCK, requests).int()
    cache = torch.randn(table.numel(), HEADS, 2 * OWN_BLOCK, DIM).to(dtype)
    keys, values = cache.chunk(2, dim=2)
    starts, lengths = (torch.arange(requests + 1) * new).int(), torch.full((requests,), total, dtype=torch.int32)
    plan = vllm_ops.cpu_attn_get_scheduler_metadata(
        requests, Q_HEADS, HEADS, DIM, lengths, dtype, starts, True, -1, isa, True
    )
    place = past + torch.arange(new)
    slots = (table[:, place // OWN_BLOCK].long() * OWN_BLOCK + place % OWN_BLOCK).flatten()
    q, k, v = (torch.randn(requests * new, heads, DIM).to(dtype) for heads in (Q_HEADS, HEADS, HEADS))
    out = torch.empty_like(q)

    def call() -> None:
        vllm_ops.cpu_attn_reshape_and_cache(k, v, keys, values, slots, isa)
        vllm_ops.cpu_attention_with_kv_cache(
            q, keys, values, out, starts, lengths, SCALE, True, None, -1, table, 0.0, plan, None
        )

    return call


def milliseconds(calls, rounds: int) -> float:
    """Mean time of a call, the minimum over rounds."""
    found = []
    for _ in range(rounds + 1):  # the first round compiles and plans
        start = time.process_time()
        for call in calls:
            call()
        found.append(time.process_time() - start)
    return 1e3 * min(found[1:]) / len(calls)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", nargs="+", default=["kivi"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--past", type=int, nargs="+", default=[2000, 4000], help="tokens that are stored")
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("| ms of one thread | | " + " | ".join(("vLLM's own", *given.schemes)) + " |")
    print("|---|---|" + "--:|" * (1 + len(given.schemes)))
    with torch.inference_mode():
        for name in given.dtypes:
            dtype = getattr(torch, name)
            for past in given.past:
                for new, requests in ((given.chunk, 1), (1, given.requests)):
                    print(f"| {name} | {requests} x {new} behind {past:,}", end=" | ", flush=True)
                    makers = [own, *(partial(packed, scheme) for scheme in given.schemes)]
                    for make in makers:
                        calls = [make(dtype, past, new, requests) for _ in range(given.layers)]
                        print(f"{milliseconds(calls, given.rounds):.2f}", end=" | ", flush=True)
                    print()

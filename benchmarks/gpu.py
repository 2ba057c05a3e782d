"""What has to be seen on a GPU, in stages; each writes its JSON before the next begins.

    python benchmarks/gpu.py --out results                     # all stages
    python benchmarks/gpu.py --out results --stages correct    # the first alone

correct  the op that attends, against the reference: schemes, dtypes, masks, 1, 4 and 16 queries, batches of 1, 17, 32
replays  whole steps of a small model as CUDA graphs (mode="reduce-overhead"), against the reference step by step
attend   its time and that of attention over bfloat16 (SDPA's flash backend), as the replay of a CUDA graph over states
         that take turns and are larger than the L2 cache together; and the share of a copy's bandwidth

Events around one call would measure Python. A stage goes on where a case fails, and says so in its JSON.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from attend import nbytes, packed_states
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import kvpass
from kvpass.eval.speed import sharing_weights
from kvpass.schemes import LayerGeometry, get

from decode_e2e import fill
from timing import copy_bandwidth

SCHEMES = ("kivi", "kivi-3", "kivi-4", "quarot-2", "higgs", "higgs-3")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
_ROTATED = 256 << 20  # bytes of states that take turns
_REPLAYS = 20


def cases(schemes=SCHEMES, dtypes=(torch.bfloat16, torch.float16)) -> Iterator[dict]:
    """What the first stage tries; lengths that end within a page, and within a tile of pages."""
    for scheme, dtype, (batch, queries), mask in itertools.product(
        schemes, dtypes, ((1, 1), (1, 4), (1, 16), (17, 1), (32, 1), (17, 4)), (None, "bool", "float")
    ):
        yield dict(scheme=scheme, dtype=dtype, batch=batch, queries=queries, mask=mask, length=1000)


def attention(
    scheme: str, dtype: torch.dtype, batch: int, queries: int, length: int, device: torch.device,
    mask: str | None = None, heads: int = 32, kv_heads: int = 8, head_dim: int = 128,
) -> Callable[[str], torch.Tensor]:  # fmt: skip
    """One layer's attention behind ``length`` tokens of noise, by the name of a lowering: ``[B, H_q, S, D]``. A mask
    hides the first tokens of every sample but the last."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    plan = get(scheme).plan(LayerGeometry(0, 1, kv_heads, head_dim, dtype, device))
    states = packed_states(plan, *(noise(batch, kv_heads, length, head_dim) for _ in range(2)))
    q, k, v = noise(batch, heads, queries, head_dim), *(noise(batch, kv_heads, queries, head_dim) for _ in range(2))
    hidden = None
    if mask is not None:
        total = length + queries
        hidden = torch.ones(batch, 1, queries, total, dtype=torch.bool, device=device).tril(length)
        hidden[: max(1, batch - 1), ..., : length // 3] = False
        if mask == "float":
            hidden = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(~hidden, torch.finfo(dtype).min)
    arguments = (
        q, *(state.pack for state in states), states[0].carrier(length), k, v, hidden, mask is None and queries > 1,
        head_dim**-0.5, 0.0, *(state.text for state in states),
    )  # fmt: skip
    return lambda lowering: torch.ops.kvpass.attend(*arguments, lowering)[0]


def correct(device: torch.device, lowering: str = "triton", tried: Iterator[dict] | None = None, **shape) -> dict:
    """Each case's largest difference from the reference, and whether all are within what its dtype rounds."""
    results, good = [], True
    for case in cases() if tried is None else tried:
        attend = attention(**case, device=device, **shape)
        result = dict(case, dtype=str(case["dtype"]).removeprefix("torch."))
        try:
            difference = (attend(lowering).float() - attend("reference").float()).abs().max().item()
            result |= dict(difference=difference, good=difference <= TOLERANCE[case["dtype"]])  # NaN is not
        except Exception as error:  # the cases behind it are worth as much
            result |= dict(error=f"{type(error).__name__}: {error}"[:500], good=False)
        good &= result["good"]
        results.append(result)
    return dict(good=good, cases=results)


def replayed(calls: list[Callable]) -> float:
    """Seconds of one of ``calls``, all of which are one CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(_REPLAYS):
        graph.replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3 / _REPLAYS / len(calls)


def _flash(q, k, v) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def _packed(q, new, states: list, carrier) -> torch.Tensor:
    packs, texts = [state.pack for state in states], [state.text for state in states]
    options = (new, new, None, False, q.shape[-1] ** -0.5, 0.0)
    return torch.ops.kvpass.attend(q, *packs, carrier, *options, *texts, "triton")[0]


def attend(device: torch.device, schemes=("kivi",), lengths=(8192, 32768, 131072), batches=(1, 17, 32)) -> dict:
    """Seconds of one attention, and bytes a second as a share of a copy's."""
    bandwidth, results, dtype = copy_bandwidth(device), [], torch.bfloat16
    for length, batch in itertools.product(lengths, batches):
        dense = 2 * batch * 8 * length * 128 * dtype.itemsize
        if 3 * dense > torch.cuda.get_device_properties(device).total_memory:
            results.append(dict(length=length, batch=batch, left_out="does not fit the memory"))
            continue
        k, v = (torch.randn(batch, 8, length, 128, device=device, dtype=dtype) for _ in range(2))
        q = torch.randn(batch, 32, 1, 128, device=device, dtype=dtype)
        copies = [(k.clone(), v.clone()) for _ in range(min(8, _ROTATED // dense))] or [(k, v)]
        row = dict(length=length, batch=batch, flash=replayed([partial(_flash, q, *kv) for kv in copies]))
        del copies
        for scheme in schemes:
            plan = get(scheme).plan(LayerGeometry(0, 1, 8, 128, dtype, device))
            states = packed_states(plan, k, v)
            read, new = nbytes(states, length), k[:, :, :1].contiguous()
            turns = [states, *(packed_states(plan, k, v) for _ in range(min(15, _ROTATED // read)))]
            calls = [partial(_packed, q, new, states, states[0].carrier(length)) for states in turns]
            seconds = replayed(calls)
            row[scheme] = dict(seconds=seconds, of_flash=row["flash"] / seconds, of_copy=read / seconds / bandwidth)
        results.append(row)
        print(json.dumps(row), flush=True)
    return dict(copy_bandwidth=bandwidth, results=results)


def llama(device: torch.device, dtype: torch.dtype, layers: int, hidden: int, heads: int, kv_heads: int, **config):
    """A Llama of random weights, made on the device."""
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=7 * hidden // 2, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, max_position_embeddings=1 << 18, **config,
    )  # fmt: skip
    torch.manual_seed(0)
    with device:
        return LlamaForCausalLM._from_config(config, dtype=dtype).eval()


def replays(
    device: torch.device, schemes=("kivi", "squat", "higgs"), prompt: int = 700, steps: int = 200,
    shape: tuple[int, ...] = (4, 512, 8, 2), lowering: str = "triton",
) -> dict:  # fmt: skip
    """Of each scheme, how far a step's logits in float32 are from the reference's at most, and what was replayed."""
    model, rows = llama(device, torch.float32, *shape, vocab_size=256), {}
    ids = torch.randint(256, (1, prompt + steps), device=device)
    for scheme in schemes:
        logits = []
        for options in (dict(lowering="reference"), dict(lowering=lowering, mode="reduce-overhead")):
            variant, cache = kvpass.apply(sharing_weights(model), scheme, **options), DynamicCache(config=model.config)
            fill(variant, cache, ids, 0, prompt)
            calls = range(prompt, prompt + steps)
            logits.append([variant(input_ids=ids[:, i : i + 1], past_key_values=cache).logits for i in calls])
        differences = [(one - other).abs().max().item() for one, other in zip(*logits, strict=True)]
        rows[scheme] = dict(difference=max(differences), steps=str(kvpass.explain(variant)).splitlines()[-1].strip())
    return dict(good=all(row["difference"] <= 1e-2 for row in rows.values()), schemes=rows)


def _per_step(call: Callable, steps: int, device: torch.device) -> dict:
    """Milliseconds of a step until the host is free again, and in all."""
    for _ in range(5):  # compiles, and captures
        call()
    _wait(device)
    begin = time.perf_counter()
    for _ in range(steps):
        call()
    free = time.perf_counter()
    _wait(device)
    return dict(host=1e3 * (free - begin) / steps, whole=1e3 * (time.perf_counter() - begin) / steps)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def step(
    device: torch.device, lengths=(4096, 32768), steps: int = 32, shape: tuple[int, ...] = (32, 4096, 32, 8),
    dtype: torch.dtype = torch.bfloat16,
) -> dict:  # fmt: skip
    """Milliseconds of a step by length and variant."""
    model, results = llama(device, dtype, *shape), []
    for length in lengths:
        ids = torch.randint(1000, (1, length), device=device)
        row: dict = dict(length=length)
        variants = {"static": None, "compiled": None, "replayed": "reduce-overhead"}
        for name, mode in variants.items():
            variant = sharing_weights(model)
            if name == "static":
                cache = StaticCache(config=model.config, max_cache_len=length + steps + 16)
            else:
                cache = DynamicCache(config=model.config)
                kvpass.apply(variant, "kivi", mode=mode, max_cache_len=length + steps + 16)
            fill(variant, cache, ids, 0, length)
            run = torch.compile(variant.forward, mode="reduce-overhead") if name == "static" else variant
            row[name] = _per_step(partial(run, input_ids=ids[:, :1], past_key_values=cache), steps, device)
            del cache, variant, run
        results.append(row)
        print(json.dumps(row), flush=True)
    return dict(results=results)


STAGES = {"correct": correct, "replays": replays, "attend": attend, "step": step}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--stages", default=",".join(STAGES))
    args = parser.parse_args()
    stages = args.stages.split(",")
    if unknown := sorted(set(stages) - set(STAGES)):
        sys.exit(f"There is no stage {unknown[0]!r}; there are {', '.join(STAGES)}.")
    if not torch.cuda.is_available():
        sys.exit("No CUDA device is here. What can be counted without one is: python benchmarks/instructions.py")
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda")
    for stage in stages:
        begin = time.perf_counter()
        with torch.inference_mode():
            result = STAGES[stage](device)
        about = dict(device=torch.cuda.get_device_name(device), torch=torch.__version__)
        result = dict(about, seconds=time.perf_counter() - begin, **result)
        (args.out / f"{stage}.json").write_text(json.dumps(result, indent=1))
        print(f"{stage}: {result['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()

"""Checks and measurements on a GPU, in stages; each writes its JSON, row by row, before the next begins.

    python benchmarks/gpu.py --out results                     # all stages but vllm
    python benchmarks/gpu.py --out results --stages correct    # only the first

correct     the op that attends, against the reference: schemes, dtypes, masks, left padding, 1, 4 and 16 queries,
            batches of 1, 17 and 32; cross-attention
generates   a small model through ``generate``: padded batches, drafts, beams; replayed and not, against the reference
replays     steps of a small model as CUDA graphs (mode="reduce-overhead"), against the reference step by step
tune        launch configurations of attention, shipped ones and others; the fastest is kept for this device
attend      time of attention, compared with attention over bfloat16 (SDPA's flash backend, FlexAttention), as replays
            of a CUDA graph over alternating states that together exceed the L2 cache; and the share of a copy's
            bandwidth
latent      the kernel over a latent (MLA), which "auto" does not choose, against the reference; and its time beside
            dequantizing the latent first and beside attention over a bfloat16 latent
prompts     512 queries behind stored tokens: the kernels, which "auto" does not choose for them, beside dequantizing
            the stored tokens first; time, and peak memory
step        a step of 8B parameters: time of the host, time of the GPU and the slowest kernels, compared with
            transformers' static cache compiled with CUDA graphs
due         every step of a model of 8 such layers: median, mean, and the long ones, of which one in 32 quantizes pages
throughput  tokens per second of the same model at equal batches, and at the largest that fits each cache, compared with
            the static cache and QuantizedCache
encode      quantizing keys and values of a prompt, compared with copying them and with the prompt's attention
capacity    sequences that fit in memory by length, from the sizes of what is allocated; this stage needs no GPU
vllm        attention over blocks in vLLM, which has to be installed for CUDA: KL to its own cache, and tokens per
            second beside it and its fp8 and TurboQuant caches

Events around a single call would measure Python. If a case fails, its stage continues and records that in its JSON.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import quantize as encoding
import serving
import serving_kl
import torch
import torch.nn.functional as F
from attend import nbytes, packed_states
from gpu_models import capacity, due, generates, replays, step, throughput
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from kvpass.codec.rope import rope_of
from kvpass.lowering.triton import tuned
from kvpass.lowering.triton.launch import case_of
from kvpass.lowering.triton.tuned import trying
from kvpass.schemes import LayerGeometry, get

from timing import copy_bandwidth

SCHEMES = ("kivi", "kivi-3", "kivi-4", "quarot-2", "higgs", "higgs-3", "kivi-pre")  # schemes whose launches are tuned
TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
_ROTATED = 256 << 20  # bytes of alternating states
_REPLAYS = 20
_CLOSE = 0.01  # KL of 8 bits


def cases(schemes=(*SCHEMES, "waterfill", "waterfill-3"), dtypes=(torch.bfloat16, torch.float16)) -> Iterator[dict]:
    """The cases of the first stage; lengths end within a page, and within a tile of pages."""
    for scheme, dtype, batch, queries in itertools.product(schemes, dtypes, (1, 17, 32), (1, 4, 16)):
        masks = (None, "bool", "float", "left") if batch == 17 or queries == 1 else (None,)
        for mask in masks:
            yield dict(scheme=scheme, dtype=dtype, batch=batch, queries=queries, mask=mask, length=1000)
    for scheme, queries in itertools.product(schemes, (1, 4)):
        if scheme != "kivi-pre":  # cross-attention has no rotary embedding
            yield dict(scheme=scheme, dtype=torch.bfloat16, batch=1, queries=queries, cross=True, length=1000)


def attention(
    scheme: str, dtype: torch.dtype, batch: int, queries: int, length: int, device: torch.device,
    mask: str | None = None, cross: bool = False, heads: int = 32, kv_heads: int = 8, head_dim: int = 128,
) -> Callable[[str], torch.Tensor]:  # fmt: skip
    """One layer's attention after ``length`` tokens of noise, by the name of a lowering: ``[B, H_q, S, D]``. A mask
    hides the first tokens of every sample but the last; "left" is the same padding, given as row starts. ``cross``:
    there are no new keys."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    plan = get(scheme).plan(LayerGeometry(0, 1, kv_heads, head_dim, dtype, device))
    states = packed_states(plan, *(noise(batch, kv_heads, length, head_dim) for _ in range(2)))
    q, k, v = noise(batch, heads, queries, head_dim), *(noise(batch, kv_heads, queries, head_dim) for _ in range(2))
    hidden, others = None, _tables(states)
    if cross:
        k, v = k[:, :, :0], v[:, :, :0]
    if mask == "left":
        others["starts"] = torch.full((batch,), length // 3, device=device)
        others["starts"][max(1, batch - 1) :] = 0
    elif mask is not None:
        total = length + queries
        hidden = torch.ones(batch, 1, queries, total, dtype=torch.bool, device=device).tril(length)
        hidden[: max(1, batch - 1), ..., : length // 3] = False
        if mask == "float":
            hidden = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(~hidden, torch.finfo(dtype).min)
    arguments = (
        q, *(state.pack for state in states), states[0].length_tensor(length), k, v, hidden,
        hidden is None and queries > 1 and not cross, head_dim**-0.5, 0.0, *(state.text for state in states),
    )  # fmt: skip
    return lambda lowering: torch.ops.kvpass.attend(*arguments, lowering, **others)[0]


def _tables(states: list) -> dict:
    """The rotary tables of keys that are stored before rotary embedding."""
    rotary = states[0].rotary
    return {} if rotary is None else dict(cos=rotary.cos, sin=rotary.sin, rope=rope_of(rotary.cos.shape[2], False))


def correct(
    device: torch.device, lowering: str = "triton", tried: Iterator[dict] | None = None, **shape
) -> Iterator[dict]:
    """For each case, the largest difference from the reference, and whether it is within the rounding of its dtype."""
    for case in cases() if tried is None else tried:
        result = dict(case, dtype=str(case["dtype"]).removeprefix("torch."))
        try:
            attend = attention(**case, device=device, **shape)
            difference = (attend(lowering).float() - attend("reference").float()).abs().max().item()
            result |= dict(difference=difference, good=difference <= TOLERANCE[case["dtype"]])  # NaN is not
        except Exception as error:  # later cases still run
            result |= dict(error=f"{type(error).__name__}: {error}"[:500], good=False)
        yield result


def replayed(calls: list[Callable]) -> float:
    """Seconds per call of ``calls``, all of them in one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # what the calls read may still be computed
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


def in_turn(calls: list[Callable]) -> float:
    """The same without CUDA graphs: one call after another, by the clock."""
    for call in calls:
        call()
    begin = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - begin) / len(calls)


def tune(
    device: torch.device, schemes=SCHEMES, length: int = 32768, batches=(1, 32), shape=(32, 8, 128),
    lowering: str = "triton", most: int = 1000,
) -> Iterator[dict]:  # fmt: skip
    """The configuration found for each scheme, for one query in bfloat16, which is stored. Tries ``most``
    configurations; one whose error exceeds the rounding of the dtype is not taken."""
    heads, kv_heads, head_dim = shape
    seconds = replayed if device.type == "cuda" else in_turn
    for scheme in schemes:
        calls, specs, rope = [], (), ""
        for batch in batches:
            k, v = (torch.randn(batch, kv_heads, length, head_dim, device=device).bfloat16() for _ in range(2))
            q = torch.randn(batch, heads, 1, head_dim, device=device).bfloat16()
            states = packed_states(get(scheme).plan(LayerGeometry(0, 1, kv_heads, head_dim, q.dtype, device)), k, v)
            specs, rope = tuple(state.spec for state in states), _tables(states).get("rope", "")
            calls.append(
                partial(_packed, lowering, q, k[:, :, :1].contiguous(), states, states[0].length_tensor(length))
            )
        case = case_of(specs, rope, head_dim, heads // kv_heads, torch.bfloat16, False)
        expected, tried = [call().float() for call in calls], itertools.count()

        def took(config, case=case, calls=calls, expected=expected, tried=tried) -> float:
            if next(tried) >= most:
                return float("inf")
            with trying(case, config, device):
                try:
                    right = all(map(partial(_close, torch.bfloat16), (call() for call in calls), expected))
                    return sum(seconds([call] * 4) for call in calls) if right else float("inf")
                except Exception:  # the configuration does not fit the device
                    return float("inf")

        best, all_of_them = tuned.tune(case, took)
        tuned.store(tuned.name_of(device), {case: best})
        ships = next(iter(all_of_them.values()))
        yield dict(scheme=scheme, config=asdict(best), of_shipped=all_of_them[best] / ships, tried=len(all_of_them))


def _close(dtype: torch.dtype, got: torch.Tensor, expected: torch.Tensor) -> bool:
    return (got.float() - expected).abs().max().item() <= TOLERANCE[dtype]


def _flash(q, k, v) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def _packed(lowering: str, q, new, states: list, length) -> torch.Tensor:
    packs, texts = [state.pack for state in states], [state.text for state in states]
    options = (new, new, None, False, q.shape[-1] ** -0.5, 0.0)
    return torch.ops.kvpass.attend(q, *packs, length, *options, *texts, lowering, **_tables(states))[0]


def attend(
    device: torch.device, schemes=("kivi", "kivi-3", "kivi-4", "kivi-8", "quarot-2", "higgs", "kivi-pre", "waterfill"),
    lengths=(8192, 32768, 131072), batches=(1, 32), shape=(32, 8, 128), lowering: str = "triton",
) -> Iterator[dict]:  # fmt: skip
    """Seconds of one attention, its speed relative to flash, and bytes per second as a share of a copy's."""
    cuda, (heads, kv_heads, head_dim), dtype = device.type == "cuda", shape, torch.bfloat16
    seconds, bandwidth = (replayed, copy_bandwidth(device)) if cuda else (in_turn, float("nan"))
    memory = torch.cuda.get_device_properties(device).total_memory if cuda else float("inf")
    floats = {"flash": _flash, "flex": partial(torch.compile(flex_attention, dynamic=False), enable_gqa=True)}
    for length, batch in itertools.product(lengths, batches):
        dense = 2 * batch * kv_heads * length * head_dim * dtype.itemsize
        if 3 * dense > memory:
            yield dict(length=length, batch=batch, left_out="does not fit the memory")
            continue
        k, v = (torch.randn(batch, kv_heads, length, head_dim, device=device, dtype=dtype) for _ in range(2))
        q = torch.randn(batch, heads, 1, head_dim, device=device, dtype=dtype)
        turns = [(k, v), *((k.clone(), v.clone()) for _ in range(min(7, _ROTATED // dense)))]
        row: dict = dict(length=length, batch=batch, copy_bandwidth=bandwidth)
        for name, run in floats.items():
            row[name] = _tried(seconds, [partial(run, q, *kv) for kv in turns])
        del turns
        for scheme in schemes:
            plan = get(scheme).plan(LayerGeometry(0, 1, kv_heads, head_dim, dtype, device))
            states = packed_states(plan, k, v)
            read, new = nbytes(states, length), k[:, :, :1].contiguous()
            states = [states, *(packed_states(plan, k, v) for _ in range(min(15, _ROTATED // read)))]
            row[scheme] = took = _tried(
                seconds, [partial(_packed, lowering, q, new, each, each[0].length_tensor(length)) for each in states]
            )
            if isinstance(took, float) and isinstance(row["flash"], float):
                row[scheme] = dict(seconds=took, of_flash=row["flash"] / took, of_copy=read / took / bandwidth)
        yield row


def latent(
    device: torch.device, schemes=("kivi", "kivi-4"), lengths=(8192, 32768, 131072), batches=(1, 16),
    shape=(128, 512, 64), lowering: str = "triton-latent",
) -> Iterator[dict]:  # fmt: skip
    """Seconds of one attention by 128 query heads over DeepSeek-V3's latent and rotary part, by variant."""
    (heads, rank, rotary), dtype = shape, torch.bfloat16
    seconds = replayed if device.type == "cuda" else in_turn
    for scheme, length, batch in itertools.product(schemes, lengths, batches):
        layer = LayerGeometry(0, 1, 1, rank, dtype, device, num_value_heads=1, value_head_dim=rotary, latent=True)
        past = [torch.randn(batch, 1, length, dim, device=device, dtype=dtype) for dim in (rank, rotary)]
        states = packed_states(get(scheme).plan_of(layer), *past)
        q = torch.randn(batch, heads, 1, rank + rotary, device=device, dtype=dtype) / 4
        given = (
            q, *(state.pack for state in states), states[0].length_tensor(length), *(x[:, :, :1] for x in past), None,
            False, (rank + rotary) ** -0.5, 0.0, *(state.text for state in states),
        )  # fmt: skip

        def packed(name: str, given: tuple = given) -> torch.Tensor:
            return torch.ops.kvpass.attend(*given, name, latent=True)[0]

        def floats(q=q, past=past) -> torch.Tensor:
            k = torch.cat(past, -1)
            return (q.squeeze(2) @ k.squeeze(1).mT).softmax(-1) @ past[0].squeeze(1)

        row = dict(scheme=scheme, length=length, batch=batch, **_compared(dtype, packed, lowering))
        runs = {"kernel": partial(packed, lowering), "dequantized": partial(packed, "auto"), "floats": floats}
        yield row | {name: _tried(seconds, [run]) for name, run in runs.items()}


def prompts(
    device: torch.device, schemes=("kivi", "kivi-4", "higgs", "waterfill"), lengths=(8192, 32768, 131072),
    queries: int = 512, shape=(32, 8, 128), lowering: str = "triton",
) -> Iterator[dict]:  # fmt: skip
    """Seconds and peak bytes of the attention of ``queries`` tokens, by variant."""
    cuda, sizes = device.type == "cuda", dict(zip(("heads", "kv_heads", "head_dim"), shape, strict=True))
    for scheme, length in itertools.product(schemes, lengths):
        run = attention(scheme, torch.bfloat16, 1, queries, length, device, **sizes)
        row: dict = dict(scheme=scheme, length=length, **_compared(torch.bfloat16, run, lowering))
        for name, variant in ("kernel", lowering), ("dequantized", "auto"):
            row[name] = _tried(replayed if cuda else in_turn, [partial(run, variant)])
            if cuda:
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                run(variant)
                row[f"{name}, bytes"] = torch.cuda.max_memory_allocated() - before
        yield row


def _compared(dtype: torch.dtype, run: Callable[[str], torch.Tensor], lowering: str) -> dict:
    """Whether ``run`` gives what it gives with the reference, or the error."""
    try:
        return dict(good=_close(dtype, run(lowering), run("reference")))
    except Exception as error:
        return dict(good=False, error=f"{type(error).__name__}: {error}"[:500])


def _tried(seconds: Callable, calls: list[Callable]) -> float | str:
    """The ``seconds`` of ``calls``, or the reason why there are none."""
    try:
        return seconds(calls)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:500]


def quantize(
    device: torch.device, schemes=("kivi", "squat", "higgs"), lengths=(8192, 32768), shape=(32, 8, 128),
    lowering: str = "triton,reference", rounds: int = 10,
) -> Iterator[dict]:  # fmt: skip
    """Seconds for the prompt of one layer, by variant."""
    for scheme, length in itertools.product(schemes, lengths):
        heads = dict(zip(("heads", "kv_heads", "head_dim"), shape, strict=True))
        args = argparse.Namespace(device=device, scheme=scheme, lowering=lowering, batch=1, rounds=rounds, **heads)
        yield dict(scheme=scheme, length=length, seconds=encoding.compare(length, args, torch.bfloat16))


def in_vllm(
    device: torch.device, schemes=("kivi-8", "kivi-sinks"), rivals=("vllm:fp8", "vllm:turboquant_4bit_nc"),
    quality: Sequence[str] = (), speed: Sequence[str] = ("--requests", "16", "--new", "128"),
) -> Iterator[dict]:  # fmt: skip
    """KL of attention over blocks in vLLM to its own cache, which must be small with 8 bits, and then tokens per second
    beside it and its smaller caches. quality, speed: arguments of `serving_kl` and of `serving`."""
    packed = [json.dumps(dict(scheme=scheme, untested_platform=True)) for scheme in schemes]
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    for row in serving_kl.rows(serving_kl.parsed(["--dtype", dtype, "--schemes", *packed, *quality])):
        yield dict(row, good=row["kl"] < _CLOSE or "-8" not in row["name"])
    yield from serving.rates(serving.parsed(["--schemes", *packed, *rivals, *speed]), dtype)


STAGES: dict[str, Callable[..., Iterator[dict]]] = {
    "correct": correct, "generates": generates, "replays": replays, "tune": tune, "attend": attend, "latent": latent,
    "prompts": prompts, "step": step, "due": due, "throughput": throughput, "quantize": quantize, "capacity": capacity,
    "vllm": in_vllm,
}  # fmt: skip


def run(stage: str, rows: Iterator[dict], out: Path, about: dict) -> None:
    """Write the ``rows`` of a stage to its file as they come, and the total time."""
    begin, found = time.perf_counter(), []
    while True:
        result = dict(about, seconds=time.perf_counter() - begin, rows=found)
        result |= dict(good=all(row.get("good", True) for row in found))
        (out / f"{stage}.json").write_text(json.dumps(result, indent=1, default=str))
        if (row := next(rows, None)) is None:
            break
        found.append(row)
        print(f"{stage}: {json.dumps(row, default=str)}", flush=True)
    print(f"{stage}: {result['seconds']:.0f} s, {'good' if result['good'] else 'NOT good'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--stages", default=",".join(stage for stage in STAGES if stage != "vllm"))
    args = parser.parse_args()
    stages = args.stages.split(",")
    if unknown := sorted(set(stages) - set(STAGES)):
        sys.exit(f"There is no stage {unknown[0]!r}; there are {', '.join(STAGES)}.")
    cuda = torch.cuda.is_available()
    if not cuda and stages != ["capacity"]:
        sys.exit("No CUDA device is here. What can be counted without one is: python benchmarks/instructions.py")
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if cuda else "cpu")
    for stage in stages:
        with torch.inference_mode():
            about = dict(device=torch.cuda.get_device_name(device) if cuda else "none", torch=torch.__version__)
            run(stage, STAGES[stage](device), args.out, about)


if __name__ == "__main__":
    main()

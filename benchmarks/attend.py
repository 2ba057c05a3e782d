"""Attention of one call over a packed cache, the kernel alone, against attention over floats.

    python benchmarks/attend.py                                  # this machine: one layer, 32 query and 8 KV heads
    python benchmarks/attend.py --scheme kivi,waterfill          # two schemes
    python benchmarks/attend.py --scheme kivi,FOLDER --heads 9 --kv-heads 3 --head-dim 64    # a calibration of SmolLM2
    python benchmarks/attend.py --queries 512 --lowering auto,reference     # a chunk; the reference dequantizes first
    python benchmarks/attend.py --batch 8 --padding 0.25         # a quarter of the tokens of a batch are left padding
    python benchmarks/attend.py --batch 16 --lengths 8192,32768,131072 --json h100.json

Baselines: "packed heads" is scaled_dot_product_attention over the KV heads, with the query heads of each as rows of one
product; "repeat_kv" is what transformers calls, with every KV head copied for its query heads; "flash" is PyTorch's
flash kernel with grouped heads, on CUDA. Variants alternate within one process; medians and ratios to the first variant
are printed, and the peak of memory during one call. Of a calibration, the layer with the median number of bytes is
taken. On CUDA, the bandwidth of the bytes read, packed or not, is given as a share of a measured device copy's.
"""

from functools import partial

import torch
import torch.nn.functional as F
from memory import Peak
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvpass.cache.per_cache import RotaryState
from kvpass.cache.state import KVState, SharedTensors
from kvpass.cli.shared import scheme as read_scheme
from kvpass.codec.rope import rope_of
from kvpass.codec.tensors import of_pages
from kvpass.schemes import LayerGeometry
from kvpass.schemes.calibrated import Calibration

from timing import arguments, copy_bandwidth, measure, show, write


def mask_of(q, tokens: int, padding: float) -> Tensor | None:
    """A causal mask of the queries ``q`` over all ``tokens``, which hides left padding: none in the first sample, twice
    ``padding`` of the tokens in the last. None if there is no padding, and one query."""
    queries, device = q.shape[2], q.device
    if queries == 1 and not padding:
        return None
    mask = torch.ones(1, 1, queries, tokens, dtype=torch.bool, device=device).tril(tokens - queries)
    starts = torch.linspace(0, 2 * padding * tokens, len(q), device=device).long()
    return mask & (torch.arange(tokens, device=device) >= starts[:, None, None, None]) if padding else mask


def baselines(q, k, v, padding: float) -> dict:
    """Attention over dense ``k``, ``v`` ``[B, H_kv, T, D]``, by name."""
    repeats, mask = q.shape[1] // k.shape[1], mask_of(q, k.shape[2], padding)
    if mask is not None:  # what transformers calls for a chunk or padding
        repeated = lambda x: x.repeat_interleave(repeats, 1)  # noqa: E731
        return {
            "SDPA, repeat_kv, mask": lambda: F.scaled_dot_product_attention(q, repeated(k), repeated(v), attn_mask=mask)
        }
    rows = q.view(*k.shape[:2], repeats, q.shape[3])
    variants = {
        "SDPA, packed heads": lambda: F.scaled_dot_product_attention(rows, k, v),
        "SDPA, repeat_kv": lambda: F.scaled_dot_product_attention(
            q, k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        ),
    }
    if q.device.type == "cuda" and q.dtype != torch.float32:

        def flash():
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

        variants["SDPA, flash"] = flash
    return variants


def states_of(scheme, k, v) -> list[KVState]:
    """Keys and values as ``scheme`` stores them."""
    calibrated = isinstance(scheme, Calibration)
    config, geometry = scheme.scheme if calibrated else scheme, (1, k.shape[1], k.shape[3], k.dtype, k.device)
    if not calibrated:
        return packed_states(config.plan(LayerGeometry(0, *geometry)), k, v)
    layers = [
        packed_states(config.plan(LayerGeometry(layer, *geometry)), k, v, tensors)
        for layer, tensors in scheme.predictors.items()
    ]
    return sorted(layers, key=lambda states: nbytes(states, k.shape[2]))[len(layers) // 2]


def packed_states(plan, k, v, shared=((), ())) -> list[KVState]:
    """Keys and values as ``plan`` stores them; keys stored before rotary embedding come with tables.

    shared: the calibrated tensors of keys and of values.
    """
    shared = [[t if t.dtype == torch.int32 else t.to(k.device) for t in tensors] for tensors in shared]  # not shares
    angles = shared[0].pop(0) if plan.key.transform.numbered else None
    key, value = (
        KVState.allocate(spec, *x.shape[:2], x.shape[3], x.dtype, x.device, x.shape[2], shared=SharedTensors(tensors))
        for spec, x, tensors in zip((plan.key, plan.value), (k, v), shared, strict=True)
    )
    pairs, rope = k.shape[3] // 2, ""
    if angles is not None:
        key.rotary = RotaryState(plan.key, len(k), k.shape[3], k.dtype, k.device, k.shape[2], angles)
        rope = plan.key.transform.numbered
    elif plan.key.transform.turns:
        speeds = 10000 ** (-torch.arange(pairs, device=k.device) / pairs)
        angles = (torch.arange(k.shape[2] + plan.key.page_size, device=k.device)[:, None] * speeds).expand(
            len(k), -1, -1
        )
        tables = (table.to(k.dtype) for table in (angles.cos(), angles.sin()))
        key.rotary, rope = RotaryState.of(plan.key, *tables), rope_of(pairs, False)
    if plan.value.quantizer.follows_keys:
        value.same_layer_keys = key
    for state, x in ((key, k), (value, v)):
        q = torch.randn_like(x[:, :, :64]) if state.spec.quantizer.needs_queries else None
        state.append(x, 0, q, rope=rope if state is key else "")
    return [key, value]


def nbytes(states: list[KVState], tokens: int) -> int:
    """Bytes that attention reads: pages in use and exact tokens."""
    total = 0
    for state in states:
        used, exact = state.spec.retention.pages(tokens), tokens - state.spec.retention.packed(tokens)
        total += sum(getattr(state, name)[:, :, :used].nbytes for name in of_pages(state.spec))
        total += state.ring[:, :, :exact].nbytes
    return total


def compare(schemes: list[str], length: int, args, dtype: torch.dtype) -> dict:
    """Medians and bytes read at one length, by variant."""
    device, shape = torch.device(args.device), (args.batch, args.kv_heads, length, args.head_dim)
    k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    q = torch.randn(args.batch, args.heads, args.queries, args.head_dim, device=device, dtype=dtype)
    new = k[:, :, : args.queries].contiguous()
    variants = baselines(q, k, v, args.padding)
    mask = mask_of(q, length + args.queries, args.padding) if args.padding else None
    read = dict.fromkeys(variants, k.nbytes + v.nbytes)
    for scheme in schemes:
        states = states_of(read_scheme(scheme), k, v)
        given = [state.pack for state in states], [state.text for state in states], states[0].length_tensor(length)
        rotary = states[0].rotary
        tables = dict(cos=rotary.cos, sin=rotary.sin, rope=rope_of(args.head_dim // 2, False)) if rotary else {}
        for name in args.lowering.split(","):
            variants[f"{scheme}, {name}"] = partial(_attend, q, *given, new, mask, name, tables)
            read[f"{scheme}, {name}"] = nbytes(states, length)
    seconds, peak = measure(variants, device, args.rounds), Peak(device)
    return dict(seconds=seconds, bytes_read=read, peak={name: peak.of(fn) for name, fn in variants.items()})


def _attend(q, packs, texts, length, new, mask, lowering: str, tables: dict) -> None:
    how = mask, mask is None and q.shape[2] > 1, q.shape[3] ** -0.5, 0.0
    torch.ops.kvpass.attend(q, *packs, length, new, new, *how, *texts, lowering, **tables)


def main() -> None:
    lowering = "triton" if torch.cuda.is_available() else "auto"
    args = arguments(__doc__, lowering, "2048,8192,32768", rounds=30, queries=1, padding=0.0)
    device, results = torch.device(args.device), {}
    bandwidth = copy_bandwidth(device) if device.type == "cuda" else None
    with torch.inference_mode():
        for length in map(int, args.lengths.split(",")):
            results[length] = compare(args.scheme.split(","), length, args, getattr(torch, args.dtype))
            medians, read, peaks = results[length].values()
            rates = {name: read[name] / each for name, each in medians.items()}
            notes = {name: f"{peak / 1e6:9.1f} MB of temporary memory" for name, peak in peaks.items()}
            for name, rate in rates.items() if bandwidth else ():
                notes[name] += f", {rate / bandwidth:4.0%} of a copy's bandwidth"
            show(f"{args.batch} x {length} tokens", medians, notes)
    write(args, device, copy_bandwidth=bandwidth, results=results)


if __name__ == "__main__":
    main()

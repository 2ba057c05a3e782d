"""Tokens per second and peak memory of a whole model as the batch grows, until memory is full.

    python benchmarks/throughput.py --json h100.json                    # 8B random parameters, bfloat16, on a GPU
    python benchmarks/throughput.py --layers 2 --hidden 256 --heads 8 --kv-heads 2 --batches 1 --length 512 --device cpu

The weights are random, by default in the shape of Llama-3-8B, and shared by the variants; the default cache is the
baseline. A prompt is read once and its cache repeated for the batch, so that only decoding is measured. A variant ends
at the first batch that does not fit. Peak memory is not measured on a CPU.
"""

import argparse
import statistics

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import kvpass
from kvpass.eval.speed import sharing_weights
from kvpass.models.arguments import handing

from decode_e2e import DEFAULT, fill
from timing import seconds, write

WARM_UP = 3


def random_model(args) -> LlamaForCausalLM:
    """A Llama with random weights, created on the device."""
    config = LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=7 * args.hidden // 2,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        max_position_embeddings=args.length + args.steps + WARM_UP,
    )
    torch.manual_seed(0)
    with torch.device(args.device):
        return LlamaForCausalLM._from_config(config, dtype=getattr(torch, args.dtype)).eval()


def decode(model, ids, batch: int, args) -> dict:
    """Median seconds of a step of ``batch`` sequences after the prompt ``ids`` ``[1, length]``, and peak bytes."""
    cache, device = DynamicCache(config=model.config), ids.device
    fill(model, cache, ids, 0, args.length)
    cache.batch_repeat_interleave(batch)
    call = dict(input_ids=ids[:, :1].expand(batch, 1), **handing(model, cache))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times = [seconds(lambda: model(**call), device) for _ in range(WARM_UP + args.steps)]
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return dict(seconds=statistics.median(times[WARM_UP:]), peak=peak)


def fits(model, ids, batch: int, args) -> dict | None:
    """The result of `dequantize`, or None if there is not enough memory for it."""
    try:
        return decode(model, ids, batch, args)
    except torch.OutOfMemoryError:
        return None
    finally:
        if ids.device.type == "cuda":
            torch.cuda.empty_cache()


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--schemes", default="kivi,higgs")
    parser.add_argument("--batches", default="1,2,4,8,16,32,64,128,256", help="increasing")
    parser.add_argument("--length", type=int, default=8192, help="tokens of the prompt")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if cuda else "float32")
    parser.add_argument("--json", help="also write what was measured to this file")
    args = parser.parse_args()
    model = random_model(args)
    variants = {DEFAULT: model}
    for scheme in args.schemes.split(","):
        variants[scheme] = kvpass.apply(sharing_weights(model), scheme)
    ids = torch.randint(args.vocabulary, (1, args.length), device=args.device)
    results = {name: {} for name in variants}
    print("| batch | | tokens/s | | peak |\n|--:|---|--:|--:|--:|", flush=True)
    for batch in map(int, args.batches.split(",")):
        for name, variant in variants.items():
            if None in results[name].values():
                continue
            results[name][batch] = found = fits(variant, ids, batch, args)
            if found is None:
                print(f"| {batch} | {name} | out of memory | | |", flush=True)
                continue
            base = results[DEFAULT].get(batch)
            ratio = f"{base['seconds'] / found['seconds']:.2f}x" if base else ""
            peak = "" if found["peak"] is None else f"{found['peak'] / 1e9:.1f} GB"
            print(f"| {batch} | {name} | {batch / found['seconds']:.1f} | {ratio} | {peak} |", flush=True)
    write(args, torch.device(args.device), results=results)


if __name__ == "__main__":
    main()

"""A prompt of 131,072 tokens on CPUs: peak memory, the cache, and steps beside the untouched model. Takes hours.

    python benchmarks/long_context.py --schemes waterfill,kivi --json benchmarks/results/long-context-cpu.json

A Llama of 4 layers with 8 query and 8 KV heads of 128 channels, float32, random weights; each variant has a process of
its own. Packed, it reads the prompt by itself in chunks of 512 tokens (`prefill_chunk_size`). Untouched, it is given
chunks of 512 tokens, of which all but the last are stored without attention to save time: that changes neither the
memory nor the time of a step. Peaks are those of the prompt and of the steps, above what is held before it.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from unittest.mock import patch

import torch
from memory import Peak
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import kvpass
from kvpass.models.arguments import handing

from timing import write

UNTOUCHED, CHUNK, HEADS, HEAD_DIM, LAYERS = "untouched", 512, 8, 128, 4


def decoder(tokens: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128, hidden_size=HEADS * HEAD_DIM, intermediate_size=2 * HEADS * HEAD_DIM,
            num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=HEAD_DIM,
            max_position_embeddings=2 * tokens,
        )
    ).eval()  # fmt: skip


def _no_attention(q: Tensor, k: Tensor, v: Tensor, *args, **kwargs) -> Tensor:
    return q.new_zeros(*q.shape[:3], v.shape[3])


@torch.no_grad()
def measure(name: str, tokens: int, steps: int) -> dict[str, float]:
    """Bytes of the cache, peak bytes of the prompt and of the steps, and seconds of both, of one variant."""
    model, ids = decoder(tokens), torch.randint(128, (1, tokens + steps))
    if name != UNTOUCHED:
        kvpass.apply(model, name, prefill_chunk_size=CHUNK)
    peak = Peak(model.device)

    def run(cache: DynamicCache, first: int, last: int) -> None:
        size = CHUNK if name == UNTOUCHED else last - first  # kvpass makes chunks itself
        for start in range(first, last, size):
            model(ids[:, start : min(last, start + size)], **handing(model, cache), logits_to_keep=1)

    def step(at: int) -> float:
        start = time.perf_counter()
        model(ids[:, at : at + 1], **handing(model, cache))
        return time.perf_counter() - start

    cache = DynamicCache(config=model.config)
    run(cache, 0, 3 * CHUNK)  # compiles
    for at in range(3 * CHUNK, 3 * CHUNK + 4):
        step(at)
    cache = DynamicCache(config=model.config)
    peak.reset()
    before, start = peak.read(), time.perf_counter()
    first = 0
    if name == UNTOUCHED:
        first = tokens - CHUNK
        with patch.object(nn.functional, "scaled_dot_product_attention", _no_attention):
            run(cache, 0, first)
    run(cache, first, tokens)
    prompt, highest = time.perf_counter() - start, peak.read() - before
    peak.reset()
    taken = [step(at) for at in range(tokens, tokens + steps)]
    held = kvpass.nbytes(cache) if name != UNTOUCHED else sum(x.keys.nbytes + x.values.nbytes for x in cache.layers)
    found = dict(cache=held, prompt=highest, steps=peak.read() - before)
    return found | dict(prompt_seconds=prompt, step_seconds=statistics.median(taken[3:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", default="waterfill,kivi", help="separated by commas")
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", help="also write the results to this file")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args.tokens, args.steps)))
        return
    results = {}
    print("| | cache | peak of the prompt | peak of steps | a step |\n|---|--:|--:|--:|--:|", flush=True)
    for name in (UNTOUCHED, *args.schemes.split(",")):
        command = [
            sys.executable,
            __file__,
            "--measure",
            name,
            "--tokens",
            str(args.tokens),
            "--steps",
            str(args.steps),
        ]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found = results[name] = json.loads(done.stdout.splitlines()[-1])
        peaks = " | ".join(f"{found[what] / 1e6:,.0f} MB" for what in ("cache", "prompt", "steps"))
        print(f"| {name} | {peaks} | {1e3 * found['step_seconds']:.1f} ms |", flush=True)
        write(args, torch.device("cpu"), rows=results)


if __name__ == "__main__":
    main()

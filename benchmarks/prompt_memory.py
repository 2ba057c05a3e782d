"""Memory for a long prompt, or for a chunk behind one, of one layer of a random Llama.

    python benchmarks/prompt_memory.py [--tokens N] [scheme]                  # the attention scores of a prompt
    python benchmarks/prompt_memory.py --chunk 512 kivi                       # a chunk of 512 tokens behind N tokens
    python benchmarks/prompt_memory.py --chunk 512 --lowering reference kivi  # if it dequantizes the cache first
    python benchmarks/prompt_memory.py --smollm2 --prefill-chunk-size 2048 kivi  # a prompt that kvpass reads in chunks

Peak memory of the process while it reads the prompt, or the chunk, minus its memory before. ``--heads``, ``--kv-heads``
and ``--head-dim`` give the shape of the layer, ``--smollm2`` and ``--layers`` that of SmolLM2-135M. Linux only.
"""

import argparse

import torch
from memory import Peak
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import kvpass
from kvpass import HeavyHitter
from kvpass.models.arguments import handing
from kvpass.schemes import KIVIConfig

SCHEMES = {"kivi+h2o": KIVIConfig(retention=HeavyHitter(1024, recent=512))}


def read(model, cache, ids, peak: Peak) -> int:
    """Bytes by which the peak exceeds what is held before ``ids`` are read."""
    return peak.of(lambda: model(ids, **handing(model, cache), logits_to_keep=1))


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--chunk", type=int, default=0, help="measure a chunk of as many tokens behind the prompt")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--smollm2", action="store_true", help="the shape of SmolLM2-135M, with random weights")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--prefill-chunk-size", type=int, help="by default the prompt is read whole")
    parser.add_argument("--lowering", default="auto")
    parser.add_argument("scheme", nargs="?", default="kivi+h2o", help="or 'none'")
    args = parser.parse_args()
    if args.smollm2:
        args.heads, args.kv_heads, args.head_dim = 9, 3, 64
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128, hidden_size=(64 if args.smollm2 else 16) * args.heads,
            intermediate_size=1536 if args.smollm2 else 96, num_hidden_layers=args.layers,
            num_attention_heads=args.heads, num_key_value_heads=args.kv_heads, head_dim=args.head_dim,
            max_position_embeddings=2 * args.tokens,
        )
    ).eval()  # fmt: skip
    if args.scheme != "none":
        options = dict(lowering=args.lowering, prefill_chunk_size=args.prefill_chunk_size)
        kvpass.apply(model, SCHEMES.get(args.scheme, args.scheme), **options)
    ids, peak = torch.randint(128, (1, args.tokens + 3 * max(1, args.chunk))), Peak(model.device)
    if not args.chunk:
        read(model, DynamicCache(config=model.config), ids[:, :64], peak)
        cache = DynamicCache(config=model.config)
        found = read(model, cache, ids[:, : args.tokens], peak)
        held = f"; cache: {kvpass.nbytes(cache) / 1e6:.0f} MB" if args.scheme != "none" else ""
        print(f"{args.scheme}, {args.tokens} tokens: {found / 1e6:.0f} MB{held}; T x T of one head: "
              f"{args.tokens**2 * 4 / 1e6:.0f} MB")  # fmt: skip
        return
    cache, first = DynamicCache(config=model.config), 0
    for last in (*range(4096, args.tokens, 4096), args.tokens, *(args.tokens + i * args.chunk for i in (1, 2, 3))):
        found = read(model, cache, ids[:, first:last], peak)  # the first chunk may compile
        first = last
    behind = f"{args.chunk} tokens behind {first - args.chunk}"
    print(f"{args.scheme}, {args.lowering}, {behind}: {found / 1e6:.1f} MB")


if __name__ == "__main__":
    main()

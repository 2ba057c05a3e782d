"""Memory for a long prompt, or for a chunk behind one, of one layer of a random Llama.

    python benchmarks/prompt_memory.py [--tokens N] [scheme]                  # the attention scores of a prompt
    python benchmarks/prompt_memory.py --chunk 512 kivi                       # a chunk of 512 tokens behind N tokens
    python benchmarks/prompt_memory.py --chunk 512 --lowering reference kivi  # if it dequantizes the cache first

Peak memory of the process while it reads the prompt, or the chunk, minus its memory before. ``--heads``, ``--kv-heads``
and ``--head-dim`` give the shape of the layer. Linux only.
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
    parser.add_argument("--lowering", default="auto")
    parser.add_argument("scheme", nargs="?", default="kivi+h2o", help="or 'none'")
    args = parser.parse_args()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128, hidden_size=16 * args.heads, intermediate_size=96, num_hidden_layers=1,
            num_attention_heads=args.heads, num_key_value_heads=args.kv_heads, head_dim=args.head_dim,
            max_position_embeddings=2 * args.tokens,
        )
    ).eval()  # fmt: skip
    if args.scheme != "none":
        kvpass.apply(model, SCHEMES.get(args.scheme, args.scheme), lowering=args.lowering)
    ids, peak = torch.randint(128, (1, args.tokens + 3 * max(1, args.chunk))), Peak(model.device)
    if not args.chunk:
        read(model, DynamicCache(config=model.config), ids[:, :64], peak)
        found = read(model, DynamicCache(config=model.config), ids[:, : args.tokens], peak)
        print(f"{args.scheme}, {args.tokens} tokens: {found / 1e6:.0f} MB; T x T of one head: "
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

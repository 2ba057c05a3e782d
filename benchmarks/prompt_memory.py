"""Memory for the attention scores of a long prompt: python benchmarks/prompt_memory.py [--tokens N] [scheme]

One layer of a random Llama, 4 query heads, 2 KV heads, head_dim 32: peak memory of the process minus its memory before
the prompt. Run it once for each scheme, because a peak never falls.
"""

import argparse
import resource

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import kvpass
from kvpass import HeavyHitter
from kvpass.models.arguments import handing
from kvpass.schemes import KIVIConfig

SCHEMES = {"none": None, "kivi": KIVIConfig(), "kivi+h2o": KIVIConfig(retention=HeavyHitter(1024, recent=512))}


def peak() -> int:
    """Peak resident bytes of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("scheme", nargs="?", default="kivi+h2o", choices=SCHEMES)
    args = parser.parse_args()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, max_position_embeddings=2 * args.tokens,
        )
    ).eval()  # fmt: skip
    if SCHEMES[args.scheme] is not None:
        kvpass.apply(model, SCHEMES[args.scheme])
    ids = torch.randint(128, (1, args.tokens))
    model(ids[:, :64], **handing(model, DynamicCache(config=model.config)), logits_to_keep=1)
    before = peak()
    model(ids, **handing(model, DynamicCache(config=model.config)), logits_to_keep=1)
    print(f"{args.scheme}, {args.tokens} tokens: {(peak() - before) / 1e6:.0f} MB; T x T of one head: "
          f"{args.tokens**2 * 4 / 1e6:.0f} MB")  # fmt: skip


if __name__ == "__main__":
    main()

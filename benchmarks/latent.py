"""Latent attention (MLA): bytes of a DeepSeek-V3-shaped cache, and decode steps beside the untouched model.

    python benchmarks/latent.py --bytes                      # 61 layers of 512 + 64 channels, bfloat16
    python benchmarks/latent.py --tokens 4096 --threads 1    # four layers of DeepSeek-V2-Lite's attention, float32
    python benchmarks/latent.py --tokens 16384 --indexed     # of that size, as in DeepSeek-V3.2: 2,048 tokens selected

Bytes are those of a cache laid out on the meta device. Steps of both models alternate, so that drift of the machine
affects both alike. Weights are random, and caches are filled without attention, which is slow over an expanded prompt;
the time of a step does not depend on what is cached, except that an indexer with random weights selects tokens from all
over the text, so that most pages hold one.
"""

import argparse
import copy
import statistics
import time
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    DynamicCache,
    PreTrainedModel,
)
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer

import kvpass
from kvpass import schemes
from kvpass.cache.cache_state import CacheState
from kvpass.cache.swap import new_layers
from kvpass.models.arguments import handing
from kvpass.schemes import LayerGeometry

LAYERS, RANK, ROTARY = 61, 512, 64  # DeepSeek-V3


def nbytes(scheme: str, tokens: int) -> int:
    """Bytes of a DeepSeek-V3-shaped cache after a prompt."""
    plans = {}
    for index in range(LAYERS):
        layer = LayerGeometry(
            index, LAYERS, 1, RANK, torch.bfloat16, torch.device("meta"), index - 1 if index else None,
            num_value_heads=1, value_head_dim=ROTARY, latent=True,
        )  # fmt: skip
        plans[index] = schemes.get(scheme).plan_of(layer), layer
    state = CacheState("", "reference", None)
    layers = new_layers(state, plans, {})
    state.allocate(1, tokens)
    return sum(layer.nbytes for layer in layers.values())


def show_bytes(names: list[str], lengths: list[int]) -> None:
    print("| scheme |", " | ".join(f"{tokens:,} tokens" for tokens in lengths), "|")
    print("| --- |", " | ".join("--:" for _ in lengths), "|")
    values = [LAYERS * (RANK + ROTARY) * tokens for tokens in lengths]
    print("| full precision |", " | ".join(f"{2 * each / 2**20:,.0f} MiB" for each in values), "|")
    for name in names:
        sizes = [nbytes(name, tokens) for tokens in lengths]
        cells = (f"{s / 2**20:,.0f} MiB, {8 * s / each:.2f} bits" for s, each in zip(sizes, values, strict=True))
        print(f"| `{name}` |", " | ".join(cells), "|")


def decoder(indexed: bool) -> PreTrainedModel:
    torch.manual_seed(0)
    size = dict(
        vocab_size=1000, hidden_size=1024, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=16,
        num_key_value_heads=16, kv_lora_rank=RANK, qk_rope_head_dim=ROTARY, qk_nope_head_dim=128, v_head_dim=128,
        first_k_dense_replace=4, max_position_embeddings=1 << 17,
    )  # fmt: skip
    if indexed:
        return DeepseekV32ForCausalLM(DeepseekV32Config(**size, q_lora_rank=512)).eval()
    return DeepseekV2ForCausalLM(DeepseekV2Config(**size, q_lora_rank=None)).eval()


def _unexpanded(attention: nn.Module, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    batch, _, tokens, _ = latent.shape
    zero = latent.new_zeros(1, 1, 1, 1)
    sizes = attention.qk_head_dim, attention.v_head_dim
    keys, values = (zero.expand(batch, attention.num_heads, tokens, size) for size in sizes)
    return keys, values


def _no_attention(q: Tensor, k: Tensor, v: Tensor, *args, **kwargs) -> Tensor:
    return q.new_zeros(*q.shape[:3], v.shape[3])


def _select_nothing(indexer: nn.Module, hidden: Tensor, *args, cache: DynamicCache) -> Tensor:
    cache.update_indexer(indexer.k_norm(indexer.wk(hidden)), indexer.layer_idx)
    return torch.zeros(*hidden.shape[:2], 1, dtype=torch.int32)


@torch.no_grad()
def filled(model: PreTrainedModel, tokens: int) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    ids = torch.randint(0, 1000, (1, tokens), generator=torch.Generator().manual_seed(0))
    with (
        patch.object(nn.functional, "scaled_dot_product_attention", _no_attention),
        patch.object(type(model.model.layers[0].self_attn), "expand_kv", _unexpanded),
        patch.object(DeepseekV32Indexer, "forward", _select_nothing),
    ):
        for part in ids.split(2048, 1):  # an indexed model makes a mask of all pairs of tokens
            model(input_ids=part, **handing(model, cache), logits_to_keep=1)
    return cache


@torch.no_grad()
def seconds(model: PreTrainedModel, cache: DynamicCache) -> float:
    start = time.perf_counter()
    model(input_ids=torch.zeros(1, 1, dtype=torch.long), **handing(model, cache))
    return time.perf_counter() - start


def compare(names: list[str], tokens: int, steps: int, indexed: bool) -> None:
    untouched = decoder(indexed)
    plain = filled(untouched, tokens)
    for name in names:
        model, cache = copy.deepcopy(untouched), copy.deepcopy(plain)
        kvpass.apply(model, name)
        packed = filled(model, tokens)
        pairs = [(seconds(model, packed), seconds(untouched, cache)) for _ in range(steps + 3)][3:]
        mine, theirs = (statistics.median(each) * 1e3 for each in zip(*pairs, strict=True))
        report = kvpass.explain(model)
        print(
            f"{name}: {report.fused} of {report.packed} layers fused; {mine:,.0f} ms a step, untouched {theirs:,.0f} "
            f"ms ({mine / theirs:.2f}x)",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", action="store_true", help="sizes only")
    parser.add_argument("--indexed", action="store_true", help="with an indexer, which selects 2,048 tokens")
    parser.add_argument("--scheme", default="waterfill,kivi,kivi-4,higgs", help="names, separated by commas")
    parser.add_argument("--lengths", default="8192,131072", help="tokens, for --bytes")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    names = args.scheme.split(",")
    if args.bytes:
        show_bytes(names, list(map(int, args.lengths.split(","))))
        return
    torch.set_num_threads(args.threads)
    compare(names, args.tokens, args.steps, args.indexed)


if __name__ == "__main__":
    main()

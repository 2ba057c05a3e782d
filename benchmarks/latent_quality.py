"""KL of schemes over a latent cache (MLA) with the statistics of a real model.

    python benchmarks/latent_quality.py                                # Qwen2.5-Coder-0.5B, prose and code
    python benchmarks/latent_quality.py --schemes kivi,waterfill --prompt 1024

No model with latent attention is small enough to run here, so one is made: Qwen2.5-Coder-0.5B as a DeepSeek-V3 model
that computes the same. A layer's latent has its values and those key channels that the rotary embedding turns by less
than half a radian in 8,192 tokens. They have no biases, which do not change attention or move to its output; each has a
mean square of one over a text, as behind a normalization; and a random rotation mixes them, because a trained latent is
not aligned with heads. The other key channels of both KV heads are the rotary part, which all query heads share. That
makes 160 + 96 channels a layer, where DeepSeek-V3 has 512 + 64.
"""

import argparse
import sys

import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedModel

from kvpass import models
from kvpass.eval import quality, texts

TURNED = 24  # of 32 pairs of key channels: the others turn by less than 0.5 in 8,192 tokens


@torch.no_grad()
def as_latent(model: PreTrainedModel, ids: Tensor) -> PreTrainedModel:
    """A DeepSeek-V3 model with the weights of ``model``, a Qwen2 model. ``ids`` ``[1, S]``: the text over which the
    channels of latents are normalized."""
    of, dim = model.config, model.model.layers[0].self_attn.head_dim
    heads, kept = of.num_key_value_heads, dim - 2 * TURNED
    config = DeepseekV3Config(
        vocab_size=of.vocab_size, hidden_size=of.hidden_size, intermediate_size=of.intermediate_size,
        num_hidden_layers=of.num_hidden_layers, first_k_dense_replace=of.num_hidden_layers,
        num_attention_heads=of.num_attention_heads, num_key_value_heads=of.num_attention_heads,
        q_lora_rank=None, kv_lora_rank=heads * (dim + kept), qk_rope_head_dim=heads * 2 * TURNED,
        qk_nope_head_dim=kept, v_head_dim=dim, attention_bias=True, rms_norm_eps=of.rms_norm_eps,
        max_position_embeddings=of.max_position_embeddings, tie_word_embeddings=True, n_routed_experts=1,
        num_experts_per_tok=1, n_group=1, topk_group=1,
    )  # fmt: skip
    latent = DeepseekV3ForCausalLM(config).eval()
    latent.model.embed_tokens, latent.model.norm = model.model.embed_tokens, model.model.norm
    latent.lm_head = model.lm_head
    latent.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq[:TURNED].repeat(heads)
    read = [_inputs(layer.self_attn) for layer in model.model.layers]
    model(ids)
    for mine, theirs, hidden in zip(latent.model.layers, model.model.layers, read, strict=True):
        mine.mlp, mine.input_layernorm = theirs.mlp, theirs.input_layernorm
        mine.post_attention_layernorm = theirs.post_attention_layernorm
        _fill(mine.self_attn, theirs.self_attn, heads, hidden[0])
    return latent


def _inputs(attention: nn.Module) -> list[Tensor]:
    """A list that receives the input ``[S, C]`` of the next call of ``attention``."""
    found: list[Tensor] = []

    def keep(module: nn.Module, args: tuple, kwargs: dict) -> None:
        found.append(kwargs["hidden_states"][0])
        hook.remove()

    hook = attention.register_forward_pre_hook(keep, with_kwargs=True)
    return found


def _fill(mine: nn.Module, theirs: nn.Module, heads: int, hidden: Tensor) -> None:
    """Set the weights of latent attention to those of grouped-query attention, whose input is like ``hidden``."""
    dim, groups = theirs.head_dim, mine.num_heads // heads
    pairs = torch.arange(dim).view(2, -1)
    turned, still = pairs[:, :TURNED].T.flatten(), pairs[:, TURNED:].flatten()  # pairs are neighbours in DeepSeek-V3

    def split(projection: nn.Linear, number: int) -> Tensor:
        """Weight and bias ``[number, dim, C + 1]`` of a projection."""
        return torch.cat([projection.weight, projection.bias[:, None]], 1).view(number, dim, -1)

    query, key, value = split(theirs.q_proj, mine.num_heads), split(theirs.k_proj, heads), split(theirs.v_proj, heads)
    cached = torch.cat([value.flatten(0, 1), key[:, still].flatten(0, 1)])
    cached[:, -1] = 0  # a bias of keys adds the same to all scores, one of values to the output
    sizes = (hidden @ cached[:, :-1].T).square().mean(0).sqrt()
    mix, _ = torch.linalg.qr(torch.randn(len(cached), len(cached), generator=torch.Generator().manual_seed(0)))
    down = torch.cat([mix @ (cached / sizes[:, None]), key[:, turned].flatten(0, 1)])
    mine.kv_a_proj_with_mqa.weight.data, mine.kv_a_proj_with_mqa.bias.data = down[:, :-1], down[:, -1]
    mine.kv_a_layernorm = nn.Identity()
    of_head = torch.arange(heads).repeat_interleave(groups)
    values, keys = (sizes[:, None] * mix.T).split([heads * dim, heads * len(still)])
    values, keys = values.view(heads, dim, -1), keys.view(heads, len(still), -1)
    mine.kv_b_proj.weight.data = torch.cat([keys, values], 1)[of_head].flatten(0, 1)
    own = nn.functional.one_hot(of_head, heads).to(query.dtype)  # [query heads, KV heads]
    rotary = torch.einsum("qh,qdc->qhdc", own, query[:, turned]).flatten(1, 2)
    up = torch.cat([query[:, still], rotary], 1).flatten(0, 1) * (mine.qk_head_dim / dim) ** 0.5
    mine.q_proj = nn.Linear(up.shape[1] - 1, len(up))
    mine.q_proj.weight.data, mine.q_proj.bias.data = up[:, :-1].clone(), up[:, -1].clone()
    mine.o_proj.weight.data = theirs.o_proj.weight.data
    mine.o_proj.bias.data = theirs.o_proj.weight @ value[of_head, :, -1].flatten()


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", default="kivi,kivi-4,higgs,waterfill,waterfill-3", help="separated by commas")
    parser.add_argument("--texts", default="prose,code", help="separated by commas")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--scored", type=int, default=96)
    args = parser.parse_args()
    model, tokenizer = models.load(
        "package:Qwen2.5-Coder-0.5B-Instruct", dtype=torch.float32, say=lambda text: print(text, file=sys.stderr)
    )
    latent = as_latent(model, texts.tokens(tokenizer, "readme", 1024))
    print("| text | scheme | bits/value | KL | top-1 |\n| --- | --- | --: | --: | --: |", flush=True)
    for text in args.texts.split(","):
        ids = texts.tokens(tokenizer, text, args.prompt + args.scored)
        theirs = quality.reference_logits(model, ids, args.prompt)
        mine = quality.reference_logits(latent, ids, args.prompt)
        same = (mine - theirs).abs().max().item()
        print(f"{text}: logits of both models differ by at most {same:.2g}", file=sys.stderr, flush=True)
        for name in args.schemes.split(","):
            with quality.packed(latent, name, lowering="eager") as packed:
                found = quality.score(packed, ids, args.prompt, mine, name=name)
            print(
                f"| {text} | `{name}` | {found.bits_per_value:.2f} | {found.kl:.4f} ± {found.kl_error:.4f} "
                f"| {found.top1:.1%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()

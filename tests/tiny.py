"""Tiny random decoders: real architectures, seconds to compile."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 128


def llama(
    attention: str = "sdpa",
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    layers: int = 2,
    seed: int = 0,
    **config,
):
    """A small Llama in eval mode that never emits an end token."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=4096,
            attn_implementation=attention,
            **config,
        )
    ).eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """``[batch, length]`` random token ids, none of them padding."""
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))

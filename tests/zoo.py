"""Tiny random models of many architectures, each with its special features, that compile in seconds."""

from dataclasses import dataclass

import torch
import transformers

from tiny import VOCABULARY

_BASE = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=512,
)
_GQA = dict(_BASE, num_key_value_heads=2)
_GPT = dict(vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=512)
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
_LOCAL_EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
_SLIDING = dict(head_dim=16, sliding_window=32)
_SCALED = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=128,
)
_MLA = dict(
    num_key_value_heads=4,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_rope_head_dim=16,
    qk_nope_head_dim=16,
    v_head_dim=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    moe_intermediate_size=32,
    first_k_dense_replace=1,
    n_shared_experts=1,
)
_LINEAR = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16, head_dim=16
)


@dataclass(frozen=True)
class Species:
    """One architecture.

    kind: prefix of its transformers classes.
    packed: number of layers that kvpass packs; None if it refuses the model.
    config_class: name of its config class, if it does not follow from ``kind``.
    fused: number of packed layers whose attention is fused; None for all.
    attention: how it usually runs, "sdpa" or "eager".
    why: a part of the report, or of the error, about layers that are not packed.
    encoder: whether it has an encoder.
    """

    kind: str
    config: dict
    packed: int | None = 2
    why: str = ""
    attention: str = "sdpa"
    fused: int | None = None
    config_class: str = ""
    encoder: bool = False

    def model(self, attention: str):
        """A model in eval mode that never emits an end token; ``attention`` is "sdpa" or "eager"."""
        torch._dynamo.reset()
        torch.manual_seed(0)
        config_class = getattr(transformers, self.config_class or f"{self.kind}Config")
        config = config_class(**self.config, bos_token_id=1, eos_token_id=None, attn_implementation=attention)
        heads = ("ForConditionalGeneration",) if self.encoder else ("ForCausalLM", "LMHeadModel")
        names = [self.kind + head for head in heads]
        model_class = next(getattr(transformers, name) for name in names if hasattr(transformers, name))
        model = model_class(config).eval()
        model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
        for name, weight in model.named_parameters():
            if name.endswith(".sinks"):
                torch.nn.init.normal_(weight)
        return model


ZOO = {
    "Llama": Species("Llama", _GQA),
    "Llama, scaled RoPE": Species("Llama", dict(_GQA, rope_parameters=_SCALED)),
    "Mistral": Species("Mistral", dict(_GQA, sliding_window=None)),
    "Mistral, sliding": Species("Mistral", dict(_GQA, sliding_window=32)),
    "Mixtral": Species("Mixtral", dict(_GQA, **_LOCAL_EXPERTS, sliding_window=None)),
    "Qwen2": Species("Qwen2", _GQA),
    "Qwen3": Species("Qwen3", dict(_GQA, head_dim=16)),
    "Qwen3-MoE": Species("Qwen3Moe", dict(_GQA, head_dim=16, **_EXPERTS)),
    "Qwen3-Next": Species(
        "Qwen3Next", dict(_GQA, **_LINEAR, **_EXPERTS, num_hidden_layers=4), 1, "LinearAttentionLayer"
    ),
    "Gemma": Species("Gemma", dict(_GQA, head_dim=16)),
    "Gemma 2": Species("Gemma2", dict(_GQA, **_SLIDING, query_pre_attn_scalar=16), attention="eager"),
    "Gemma 3": Species(
        "Gemma3", dict(_GQA, **_SLIDING, query_pre_attn_scalar=16, num_hidden_layers=6), 6,
        config_class="Gemma3TextConfig",
    ),
    "Phi": Species("Phi", _GQA),
    "Phi-3": Species("Phi3", dict(_GQA, pad_token_id=0)),
    "GPT-2": Species("GPT2", _GPT),
    "GPT-BigCode": Species("GPTBigCode", _GPT),
    "GPT-Neo": Species(
        "GPTNeo",
        dict(
            vocab_size=VOCABULARY, hidden_size=64, num_layers=2, num_heads=4, attention_types=[[["global"], 2]],
            max_position_embeddings=512,
        ),
        attention="eager",
    ),
    "GPT-NeoX": Species("GPTNeoX", _BASE),
    "GPT-J": Species("GPTJ", dict(_GPT, rotary_dim=8), attention="eager"),
    "CodeGen": Species("CodeGen", dict(_GPT, rotary_dim=8), attention="eager"),
    "OPT": Species(
        "OPT",
        dict(
            vocab_size=VOCABULARY, hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=512, word_embed_proj_dim=64,
        ),
    ),
    "BLOOM": Species(
        "Bloom", dict(vocab_size=VOCABULARY, hidden_size=64, n_layer=2, n_head=4), attention="eager"
    ),
    "MPT": Species(
        "Mpt", dict(vocab_size=VOCABULARY, d_model=64, n_layers=2, n_heads=4, max_seq_len=512, use_cache=True),
        attention="eager",
    ),
    "Falcon, multi-query": Species(
        "Falcon",
        dict(
            vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, multi_query=True,
            new_decoder_architecture=False,
        ),
    ),
    "OLMo 2": Species("Olmo2", _GQA),
    "StarCoder 2": Species("Starcoder2", dict(_GQA, sliding_window=None)),
    "StableLM": Species("StableLm", _GQA),
    "Cohere": Species("Cohere", dict(_GQA, pad_token_id=0)),
    "Cohere 2": Species("Cohere2", dict(_GQA, pad_token_id=0, sliding_window=32, num_hidden_layers=4), 4),
    "Granite": Species("Granite", _GQA),
    "SmolLM 3": Species("SmolLM3", dict(_GQA, pad_token_id=0)),
    "gpt-oss": Species("GptOss", dict(_GQA, **_SLIDING, **_LOCAL_EXPERTS), attention="eager"),
    "GLM": Species("Glm", dict(_GQA, head_dim=16, partial_rotary_factor=0.5, pad_token_id=0)),
    "Nemotron": Species("Nemotron", _GQA),
    "Persimmon": Species("Persimmon", _BASE),
    "XGLM": Species(
        "XGLM",
        dict(
            vocab_size=VOCABULARY, d_model=64, num_layers=2, attention_heads=4, ffn_dim=96, max_position_embeddings=512
        ),
        attention="eager",
    ),
    "BART": Species(
        "Bart",
        dict(
            vocab_size=VOCABULARY, d_model=64, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, max_position_embeddings=512,
            decoder_start_token_id=2, forced_eos_token_id=None,
        ),
        packed=4, encoder=True,
    ),
    "T5": Species(
        "T5",
        dict(
            vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=2,
        ),
        packed=4, encoder=True,
    ),
    "DeepSeek-V3": Species("DeepseekV3", dict(_GQA, **_MLA)),
    "MiMo-V2": Species(
        "MiMoV2Flash",
        dict(
            _GQA, head_dim=24, v_head_dim=16, layer_types=["full_attention"] * 2, mlp_layer_types=["dense"] * 2,
            num_attention_heads=4,
        ),
        attention="eager",
    ),
}  # fmt: skip

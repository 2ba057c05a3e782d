"""Build every architecture of the installed transformers tiny: a config of any class, shrunk by its fields' names.

`OVERRIDES` has what names do not tell, by the model type of a config, wherever that config appears.
"""

import contextlib
import copy
import dataclasses
import inspect
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCABULARY, WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_DIM, WINDOW = 128, 64, 2, 4, 2, 16, 32
LARGEST = 100_000_000  # parameters; a larger model is not tiny

SIZES = {  # pattern for the whole name of a field -> its value
    r"(text_|qformer_)?hidden_size|n_embd|d_model|(model_|hidden_|embed_|embedding_|emb_)?dim|dim_model": WIDTH,
    r"word_embed_proj_dim|out_hidden_size|projection_dim|lru_width": WIDTH,
    r"(dense_|shared_)?intermediate_(size|size_mlp|dim)|(en|de)coder_ffn_dim|ffn_dim|n_inner|d_ff|dim_ff": 2 * WIDTH,
    r"ffn_hidden_size": 2 * WIDTH,
    r"(moe_|expert_|shared_expert_|moe_shared_expert_)intermediate_size|expert_dim|expert_ffn_hidden_size": 32,
    r"moe_latent_size|(q|kv|o)_lora_rank": 32,
    r"(num_)?(hidden_|encoder_|decoder_|local_)?layers|n_layers?|depth": LAYERS,
    r"(num_)?((en|de)coder_)?(num_)?(attention_)?heads|n_heads?": HEADS,
    r"((en|de)coder_)?(num_|n_)?(global_)?(key_value|kv)_heads|((en|de)coder_)num_key_value_heads": KV_HEADS,
    r"(global_|attention_|swa_)?head_dim|d_kv|kv_channels|attention_head_size|qk_nope_head_dim": HEAD_DIM,
    r"v_head_dim|value_head_dim|index_head_dim|linear_(key|value)_head_dim": HEAD_DIM,
    r"qk_rope_head_dim|rotary_dim|mamba_dt_rank": 8,
    r"(decoder_)?vocab_size(_per_layer_input)?": VOCABULARY,
    r"((original_)?max_|n_)((en|de)coder_)?(position_embeddings|positions|sequence_length|seq_len|seq_length)": 512,
    r"n_ctx|max_(source|target)_positions|decoder_max_position_embeddings": 512,
    r"(sliding_|attention_|local_|swa_)window(_size)?|attention_chunk_size": WINDOW,
    r"(num_|n_|moe_num_|num_moe_)(local_|routed_)?experts": 4,
    r"num_experts_per_tok(en)?|moe_k|(moe_)?top_?k(_experts)?|moe_top_?k": 2,
    r"n_group|topk_group|num_expert_group|num_limited_groups|(n|moe_num)_shared_experts": 1,
    r"first_k_dense_replace|num_dense_layers|moe_layer_start_index": 1,
    r"index_topk|mamba_d_state|(ssm_)?state_size|mamba_state_dim|mamba_(chunk_size|2_chunk)": 16,
    r"hidden_size_per_layer_input|router_(hidden_size|dim)": 16,
    r"index_n_heads|linear_num_value_heads|num_(query_tokens|queries|latents)": 4,
    r"linear_num_key_heads": 2,
    r"mm_tokens_per_image": 4,
    r"image_size": 32,
    r"patch_size": 8,
    r"num_channels": 3,
    r"num_mel_(bins|features)|n_mels": 80,
}
_SIZES = [(re.compile(pattern), value) for pattern, value in SIZES.items()]
_TOKEN = re.compile(r".*(_token_id|_token_index|_id)")
_MEDIA_TOKEN = re.compile(r"(image|video|audio|media).*(_token_id|_token_index)")
DERIVED = object()
"""As the value of an override: leave the field to the config class."""


def _sliding(count: int = 4, **fields: Any) -> dict[str, Any]:
    """Alternating layers with a sliding window and with full attention."""
    return dict(num_hidden_layers=count, layer_types=["sliding_attention", "full_attention"] * (count // 2), **fields)


def _linear(**fields: Any) -> dict[str, Any]:
    return dict(num_hidden_layers=4, layer_types=["linear_attention", "full_attention"] * 2, **fields)


def _rope(**fields: Any) -> dict[str, Any]:
    return dict(rope_type="default", rope_theta=10000.0, **fields)


_MROPE = dict(rope_parameters=_rope(mrope_section=[2, 3, 3]))
_INKLING = dict(
    unpadded_vocab_size=120, swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=16,
    sliding_window_size=32, rel_extent=64,
)  # fmt: skip
_ZAMBA = dict(
    num_hidden_layers=4, layers_block_type=["linear_attention", "hybrid"] * 2, use_mamba_kernels=False,
    num_key_value_heads=4,
)  # fmt: skip
_MAMBA = dict(mamba_n_heads=4, mamba_d_head=32, mamba_d_state=16, mamba_chunk_size=16)
_SEAMLESS = dict(speech_encoder_layers=LAYERS, speech_encoder_intermediate_size=2 * WIDTH)

OVERRIDES: dict[str, dict[str, Any]] = {
    "aria": dict(projector_patch_to_query_dict={16: 4}),
    "bamba": dict(num_hidden_layers=4, attn_layer_indices=[1, 3], **_MAMBA),
    "blip-2": dict(image_token_index=120),
    "chameleon": dict(vocabulary_map={"<image>": 120, "IMGIMGAZ": 121}),
    "cohere_compass_text": dict(rope_parameters=dict(full_attention=_rope()), num_key_value_heads=2),
    "dbrx": dict(
        attn_config=dict(kv_n_heads=2, rope_theta=10000.0, clip_qkv=8.0),
        ffn_config=dict(ffn_hidden_size=64, moe_num_experts=4, moe_top_k=2),
    ),
    "deepseek_v2": dict(num_experts_per_tok=2),
    "dory": _sliding(n_input_layers=1, n_output_layers=1, n_recurrent_layers=2, rope_parameters=DERIVED),
    "dots1": dict(n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2),
    "dots3_note_text": dict(
        num_hidden_layers=4, layer_types=["indexed_attention", "sliding_attention"] * 2, head_dim=32,
        mlp_layer_types=["dense", *["sparse"] * 3], swa_num_attention_heads=4, swa_num_key_value_heads=4,
        swa_q_lora_rank=32, swa_kv_lora_rank=32, swa_head_dim=24, swa_qk_nope_head_dim=16, swa_v_head_dim=16,
        shared_experts_intermediate_size=32, rope_parameters=DERIVED,
    ),
    "emu3": dict(vocabulary_map={"<image>": 120, "<|extra_200|>": 121}),
    "ernie4_5_vl_moe_text": dict(moe_intermediate_size=[32, 32], rope_parameters=_rope(mrope_section=[3, 3, 2])),
    "gemma3n_text": _sliding(
        6, num_kv_shared_layers=2, laurel_rank=8, activation_sparsity_pattern=[0.0] * 6, intermediate_size=[128] * 6
    ),
    "gemma4_text": _sliding(6, num_kv_shared_layers=2),
    "gemma4_unified_text": _sliding(6),
    "glm46v_text": _MROPE,
    "glm4v_moe_text": dict(rope_parameters=_rope(mrope_section=[1, 1, 2], partial_rotary_factor=0.5)),
    "glm4v_text": _MROPE,
    "glm_ocr_text": _MROPE,
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]], window_size=16),
    "granitemoehybrid": _linear(
        mamba_n_heads=4, mamba_d_head=32, num_key_value_heads=2, attention_multiplier=0.25
    ),
    "hunyuan_v1_dense": dict(head_dim=16),
    "hunyuan_v1_moe": dict(head_dim=16),
    "hunyuan_vl_text": dict(head_dim=16, rope_parameters=_rope(mrope_section=[2, 2, 2, 2])),
    "inkling2_loop_text": _INKLING,
    "inkling2_text": _INKLING,
    "instructblip": dict(image_token_index=120),
    "instructblipvideo": dict(video_token_index=120),
    "jamba": dict(num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False),
    "lfm2": dict(num_hidden_layers=4, layer_types=["conv", "full_attention"] * 2),
    "lfm2_moe": dict(num_hidden_layers=4, layer_types=["conv", "full_attention"] * 2),
    "llama4_vision_model": dict(
        intermediate_size=256, vision_output_dim=64, projector_input_dim=64, projector_output_dim=64
    ),
    "longcat_flash": dict(head_dim=8, num_key_value_heads=4, zero_expert_num=2, moe_topk=2),
    "mamba2": dict(head_dim=32, num_heads=4, n_groups=1, state_size=16, chunk_size=16),
    "ministral": dict(head_dim=16),
    "mistral4": dict(head_dim=8, qk_head_dim=24, rope_parameters=DERIVED),
    "mllama_text_model": dict(num_hidden_layers=4, cross_attention_layers=[1, 3]),
    "mllama_vision_model": dict(
        image_size=32, patch_size=8, max_num_tiles=4, intermediate_layers_indices=[0, 1], vision_output_dim=3 * WIDTH,
        num_global_layers=2, supported_aspect_ratios=[[1, 1], [1, 2]],
    ),
    "moonshine": dict(encoder_num_key_value_heads=4, decoder_num_key_value_heads=4),
    "nemotron": dict(num_key_value_heads=2),
    "paddleocr_vl_text": _MROPE,
    "qwen2_5_omni_text": _MROPE,
    "qwen2_5_vl_text": _MROPE,
    "qwen2_vl_text": _MROPE,
    "qwen4_exp_text": _linear(
        hc_lowrank=16, ple_layer_ids=[1], eos_token_id=2, ple_embed_dim=64, ngram_vocab_size_base=512,
        make_ngram_vocab_size_divisible_by=8, split_ngram_parts=8, heads_per_ngram=2, indexer_n_heads=4,
        indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=16, indexer_compress_ratio=4,
    ),
    "recurrent_gemma": dict(num_hidden_layers=6, num_key_value_heads=1),
    "reformer": dict(axial_pos_shape=[16, 32], axial_pos_embds_dim=[32, 32]),
    "seamless_m4t": _SEAMLESS,
    "seamless_m4t_v2": _SEAMLESS,
    "step3p7_text": dict(sliding_window=32),
    "xlstm": dict(hidden_size=64, num_heads=4, num_hidden_layers=2, embedding_dim=64),
    "xmod": dict(default_language="en_XX", languages=["en_XX"]),
    "zamba": dict(_ZAMBA, n_mamba_heads=2, attention_head_dim=32),
    "zamba2": dict(
        _ZAMBA, n_mamba_heads=4, mamba_d_state=16, chunk_size=16, intermediate_size=128, adapter_rank=8
    ),
    "zaya": dict(num_experts_per_tok=1),
}  # fmt: skip

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {  # class -> name of a variant -> other overrides
    "FalconForCausalLM": {
        "ALiBi": dict(alibi=True),
        "grouped queries": dict(new_decoder_architecture=True, num_kv_heads=2),
        "one KV head a query head": dict(alibi=False, multi_query=False, num_kv_heads=4),
    },
    "Gemma4ForCausalLM": {
        "keys that are values": _sliding(
            attention_k_eq_v=True, num_kv_shared_layers=0, num_global_key_value_heads=1, global_head_dim=32
        ),
        "no shared layers": _sliding(num_kv_shared_layers=0, global_head_dim=32),
        "experts": _sliding(
            num_kv_shared_layers=0, enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=32
        ),
    },
    "GraniteMoeHybridForCausalLM": {
        "no positions": dict(OVERRIDES["granitemoehybrid"], position_embedding_type="nope")
    },
    "LlamaForCausalLM": {
        "YaRN": dict(rope_parameters=dict(_rope(), rope_type="yarn", factor=4.0, original_max_position_embeddings=128)),
        "dynamic NTK": dict(rope_parameters=dict(_rope(), rope_type="dynamic", factor=4.0), max_position_embeddings=48),
    },
    "Llama4ForCausalLM": {"chunked attention": dict(num_hidden_layers=4, attention_chunk_size=32)},
    "MiMoV2FlashForCausalLM": {"wider keys than values": dict(head_dim=24, v_head_dim=16)},
    "MinistralForCausalLM": {"both": _sliding(head_dim=16, sliding_window=32)},
    "Mistral3ForConditionalGeneration": {
        "full attention": dict(text_config=dict(model_type="mistral", sliding_window=None, head_dim=16))
    },
    "MistralForCausalLM": {"full attention": dict(sliding_window=None)},
    "Phi3ForCausalLM": {
        "window": dict(sliding_window=32),
        "LongRoPE": dict(
            rope_parameters=dict(
                _rope(), rope_type="longrope", short_factor=[1.0 + 0.1 * i for i in range(8)],
                long_factor=[2.0 + 0.3 * i for i in range(8)], original_max_position_embeddings=48, factor=8.0,
            ),
            max_position_embeddings=384,
        ),
    },
    "Qwen2ForCausalLM": {
        "both": dict(num_hidden_layers=4, use_sliding_window=True, sliding_window=32, max_window_layers=2)
    },
    "SmolLM3ForCausalLM": {"some without positions": dict(num_hidden_layers=4, no_rope_layers=[1, 0, 1, 0])},
    "T5ForConditionalGeneration": {"gated": dict(feed_forward_proj="gated-gelu")},
    "Zamba2ForCausalLM": {"rotary memory": dict(OVERRIDES["zamba2"], use_mem_rope=True)},
}  # fmt: skip

GROUPS = {  # a class belongs to the first group that has it
    "image-text": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "speech": modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    "encoder-decoder": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
}


@dataclass(frozen=True)
class Architecture:
    """A transformers class that generates text. ``overrides`` make a ``variant`` of its tiny config."""

    group: str
    class_name: str
    variant: str = ""
    overrides: dict[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return f"{self.class_name}, {self.variant}" if self.variant else self.class_name

    def config(self) -> PretrainedConfig:
        """Its tiny config. Raises the errors of the config class."""
        config_class = getattr(transformers, self.class_name).config_class
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _tiny(config_class, self.overrides, _token_ids(), decoder=self.group == "causal")

    def model(self, attention: str | None = None) -> PreTrainedModel:
        """A model in float32 and eval mode that never emits an end token, with the same weights each time. Raises the
        errors of transformers if it cannot be built, and ValueError if it is not tiny."""
        config, model_class = self.config(), getattr(transformers, self.class_name)
        if attention is not None:
            config._attn_implementation = attention
        with torch.device("meta"):
            parameters = sum(weight.numel() for weight in model_class(copy.deepcopy(config)).parameters())
        if parameters > LARGEST:
            raise ValueError(f"too large: {parameters / 1e6:.0f} million parameters")
        torch.manual_seed(0)
        model = model_class(config).float().eval()
        settings = getattr(model, "generation_config", None)
        if settings is not None:
            settings.pad_token_id, settings.eos_token_id = 0, None
            settings.bos_token_id = settings.bos_token_id if settings.bos_token_id is not None else 1
        return _with_weights_that_matter(model)


@cache
def architectures() -> tuple[Architecture, ...]:
    """All architectures of the installed transformers, each class once, and the variants of some."""
    groups: dict[str, str] = {}
    offered = set(dir(transformers))  # hasattr would import every class
    for group, names in GROUPS.items():
        for name in names.values():
            if isinstance(name, str) and name in offered:
                groups.setdefault(name, group)
    plain = [Architecture(group, name) for name, group in groups.items()]
    variants = [
        Architecture(groups[name], name, variant, overrides)
        for name, others in VARIANTS.items()
        if name in groups
        for variant, overrides in others.items()
    ]
    return tuple(sorted(plain + variants, key=lambda one: (one.group, str(one))))


def _token_ids() -> Iterator[int]:
    """Ids for special tokens, each once. Prompts contain none of them."""
    return iter(range(VOCABULARY - 1, VOCABULARY // 2, -1))


def _declared(config_class: type) -> dict[str, Any]:
    """The fields of a config class with their declared defaults."""
    if dataclasses.is_dataclass(config_class):
        missing = dataclasses.MISSING
        return {f.name: None if f.default is missing else f.default for f in dataclasses.fields(config_class)}
    parameters = list(inspect.signature(config_class.__init__).parameters.values())[1:]
    return {p.name: None if p.default is p.empty else p.default for p in parameters}


def _tiny(config_class: type, overrides: dict[str, Any], ids: Iterator[int], decoder: bool = False) -> PretrainedConfig:
    """A tiny config of a class. ``decoder``: a class that may be an encoder is configured as a decoder."""
    overrides = OVERRIDES.get(config_class.model_type, {}) | overrides
    try:
        default = config_class()
    except Exception:  # some classes have no default config
        default = None
    declared, parts = _declared(config_class), dict(getattr(config_class, "sub_configs", None) or {})
    fields: dict[str, Any] = {}
    for name, given in declared.items():
        if name not in parts:
            fields |= _smaller(name, given, value_of(default, name, given), ids)
    _fit_layers(fields, overrides)
    if "kv_lora_rank" in declared and "num_key_value_heads" in declared:
        fields["num_key_value_heads"] = HEADS  # latent attention has no groups
    if decoder and declared.get("is_decoder") is False:
        fields["is_decoder"] = True
    head_dim = fields.get("qk_rope_head_dim", fields.get("head_dim", HEAD_DIM))
    for name in ("rope_parameters", "rope_scaling"):
        if name in fields:
            fields[name] = _shorter(fields[name], head_dim)
    for name, part in parts.items():
        given = overrides.get(name, {})
        if isinstance(given, dict):
            fields |= _part(name, part, default, given, ids)
    fields |= {name: value for name, value in overrides.items() if name not in parts or not isinstance(value, dict)}
    return config_class(**{name: value for name, value in fields.items() if value is not DERIVED})


def _smaller(name: str, declared: Any, value: Any, ids: Iterator[int]) -> dict[str, Any]:
    """The value of a field in a tiny config; empty if the field is left to its class. ``value``: its value in the
    default config."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    size = next((size for pattern, size in _SIZES if pattern.fullmatch(name)), None)
    if size is not None and number and (declared is not None or name != "head_dim"):
        return {name: size}
    if name in ("image_size", "patch_size") and isinstance(value, list | tuple) and len(set(value)) == 1:
        return {name: [size] * len(value)}
    if name == "image_grid_pinpoints":
        return {name: [[32, 64], [64, 32]]}
    if name == "layer_types" and isinstance(value, list | tuple):
        kinds = list(dict.fromkeys(value))
        return {name: kinds * LAYERS if len(kinds) != 2 else kinds * 2}
    if name in ("mlp_layer_types", "mlp_types", "rope_parameters", "rope_scaling") and value:
        return {name: copy.deepcopy(value)}
    if _TOKEN.fullmatch(name) and (number or isinstance(value, list | tuple)):
        return _token(name, value, ids)
    return {name: 0.0} if "dropout" in name and isinstance(declared, float) else {}


def _token(name: str, value: Any, ids: Iterator[int]) -> dict[str, Any]:
    """The id of a special token. There is no end token if the config can do without."""
    if name.startswith(("eos", "pad", "bos", "decoder_start")):
        return {name: 2 if name.startswith("eos") else int(not name.startswith("pad"))}
    special = isinstance(value, int) and (value >= VOCABULARY // 2 or _MEDIA_TOKEN.fullmatch(name))
    return {name: next(ids)} if special else {}


def value_of(config: PretrainedConfig | None, name: str, otherwise: Any = None) -> Any:
    """The value of a field of a config. Some fields that differ from layer to layer raise errors when read."""
    try:
        return getattr(config, name, otherwise)
    except Exception:
        return otherwise


def _fit_layers(fields: dict[str, Any], overrides: dict[str, Any]) -> None:
    """Set the number of layers so that every kind of layer, and of MLP, occurs."""
    names = ("num_hidden_layers", "n_layer", "num_layers")
    if overrides.keys() & set(names):
        fields.pop("layer_types", None)
    if "layer_types" in fields:
        fields |= {name: len(fields["layer_types"]) for name in names if name in fields}
    count = next((fields[name] for name in names if name in fields), LAYERS)
    for name in ("mlp_layer_types", "mlp_types"):
        if name in fields:
            kinds = list(dict.fromkeys(fields[name]))
            fields[name] = [kinds[min(i, len(kinds) - 1)] for i in range(count)]


def _shorter(rope: Any, head_dim: int) -> Any:
    """Parameters of rotary embedding for heads of ``head_dim``, for each kind of layer or for all."""
    if not isinstance(rope, dict):
        return rope
    half, shorter = head_dim // 2, {}
    for name, value in rope.items():
        if name in ("short_factor", "long_factor"):
            value = list(value)[:half]
        elif name == "mrope_section":
            first, parts = max(1, half // 4), len(value)
            second = (half - first) // 2
            value = [first, second, half - first - second] if parts == 3 else [half // parts] * parts
        elif name == "original_max_position_embeddings" and value:
            value = 256
        shorter[name] = _shorter(value, head_dim)
    return shorter


def _part(
    name: str, declared: Any, default: PretrainedConfig | None, overrides: dict[str, Any], ids: Iterator[int]
) -> dict[str, Any]:
    """A config nested in another, of the class that it has there."""
    value, given = value_of(default, name, None), dict(overrides)
    model_type = given.pop("model_type", None)
    config_class = CONFIG_MAPPING[model_type] if model_type else type(value) if value is not None else declared
    if not (inspect.isclass(config_class) and issubclass(config_class, PretrainedConfig)):
        return {}
    if value is None and default is not None and not overrides:
        return {}  # left out by default
    return {name: _tiny(config_class, given, ids)}


@torch.no_grad()
def _with_weights_that_matter(model: nn.Module) -> nn.Module:
    """Give ``model`` random weights with which attention is neither uniform nor without effect."""
    generator, done = torch.Generator().manual_seed(0), set()

    def draw(weight: Tensor, scale: float) -> None:
        weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
        done.add(id(weight))

    for module in model.modules():
        kind, weight, bias = type(module).__name__, getattr(module, "weight", None), getattr(module, "bias", None)
        if not isinstance(weight, nn.Parameter) or not weight.is_floating_point():
            continue
        if kind.endswith("Linear") or kind == "Conv1D":  # GPT-2's Conv1D is a linear layer, transposed
            draw(weight, 1.2 / weight.shape[-1 if weight.ndim == 3 or kind != "Conv1D" else 0] ** 0.5)
            if isinstance(bias, nn.Parameter):
                draw(bias, 0.1)
        elif kind.endswith("Embedding") and weight.ndim == 2 and id(weight) not in done:
            draw(weight, 0.7)
        elif "norm" in kind.lower() and weight.ndim == 1:
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)
            done.add(id(weight))
    for name, weight in model.named_parameters():
        if id(weight) in done or not weight.is_floating_point():
            continue
        if weight.ndim == 3 and ("expert" in name or "proj" in name):
            draw(weight, 1.2 / max(weight.shape[1:]) ** 0.5)
        elif not weight.isfinite().all():
            draw(weight, 0.1)
        elif name.endswith("sinks") or (weight.ndim <= 2 and not weight.any()):
            draw(weight, 0.3)
    return model


def find(name: str) -> Architecture:
    """The architecture of that name, as returned by `str`. Raises KeyError if transformers does not have it."""
    with contextlib.suppress(StopIteration):
        return next(one for one in architectures() if str(one) == name)
    raise KeyError(name)

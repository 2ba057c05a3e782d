"""Models in which some layers, or all, are not packed: packed layers are correct, and the reasons for the others are
true."""

import re

import pytest
import torch
import transformers
from transformers import (
    BertConfig,
    DeepseekV3Config,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    GPT2Config,
    MistralConfig,
    SpeechEncoderDecoderConfig,
    SpeechEncoderDecoderModel,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
    Wav2Vec2Config,
    cache_utils,
)

import kvpass
from kvpass import KVPassError
from kvpass.models.encoded import encoded
from kvpass.models.unpacked import held_by
from kvpass.schemes import IdentityConfig, geometries

from tiny import VOCABULARY, tokens

_SIZES = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
_TEXT = dict(_SIZES, vocab_size=VOCABULARY, max_position_embeddings=512)
_GQA = dict(_TEXT, num_key_value_heads=2)
_NARROW = dict(_SIZES, hidden_size=48)  # narrower than the decoder after it
_EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)


def made(kind: str, **config):
    """A tiny model of the transformers class ``kind``; skips the test if the installed version does not have it."""
    if not hasattr(transformers, kind):
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    model_class = getattr(transformers, kind)
    return ready(model_class(model_class.config_class(**config)))


def ready(model):
    """``model`` in eval mode, with weights for which attention matters; it never emits an end token."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if weight.ndim > 1:
            weight.data = torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5
        elif name.endswith("gate"):
            weight.data.fill_(0.7)
    settings = model.generation_config
    settings.pad_token_id, settings.eos_token_id, settings.forced_eos_token_id = 0, None, None
    settings.bos_token_id = settings.decoder_start_token_id = 1
    return model.eval()


def wrapped(model_class, config_class, encoder, decoder):
    return ready(model_class(config_class.from_encoder_decoder_configs(encoder, decoder)))


def bert_decoder():
    return BertConfig(**_TEXT, is_decoder=True, add_cross_attention=True)


def gpt2_decoder():
    return GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=512, add_cross_attention=True)


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def text():
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :5] = 0
    return dict(input_ids=tokens(2, 20), attention_mask=mask)


def text_to_text():
    encoder = BertConfig(**dict(_TEXT, hidden_size=48))
    return wrapped(EncoderDecoderModel, EncoderDecoderConfig, encoder, bert_decoder()), text()


def image_to_text():
    encoder = ViTConfig(**_NARROW, image_size=32, patch_size=8)
    model = wrapped(VisionEncoderDecoderModel, VisionEncoderDecoderConfig, encoder, gpt2_decoder())
    return model, dict(pixel_values=random(2, 3, 32, 32))


def speech_to_text():
    encoder = Wav2Vec2Config(
        **_NARROW, conv_dim=(32, 32), conv_kernel=(10, 8), conv_stride=(5, 4), num_feat_extract_layers=2,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, add_adapter=True, output_hidden_size=64,
        num_adapter_layers=1,
    )  # fmt: skip
    model = wrapped(SpeechEncoderDecoderModel, SpeechEncoderDecoderConfig, encoder, bert_decoder())
    return model, dict(input_values=random(2, 2000))


def nllb_moe():
    model = made(
        "NllbMoeForConditionalGeneration", vocab_size=VOCABULARY, d_model=64, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, num_experts=4,
        encoder_sparse_step=2, decoder_sparse_step=2, max_position_embeddings=512,
    )  # fmt: skip
    return model, text()


def moonshine():
    model = made(
        "MoonshineForConditionalGeneration", vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96,
        encoder_num_hidden_layers=2, decoder_num_hidden_layers=2, encoder_num_attention_heads=4,
        decoder_num_attention_heads=4, encoder_num_key_value_heads=4, decoder_num_key_value_heads=4,
        max_position_embeddings=512,
    )  # fmt: skip
    return model, dict(input_values=random(2, 16000))


def t5gemma():
    half = dict(_GQA, head_dim=16, sliding_window=32, query_pre_attn_scalar=16)
    return made("T5GemmaForConditionalGeneration", encoder=half, decoder=half, vocab_size=VOCABULARY), text()


def llama_vision():
    vision = dict(
        image_size=32, patch_size=8, max_num_tiles=4, vision_output_dim=3 * 64, intermediate_layers_indices=[0, 1],
        num_hidden_layers=2, num_global_layers=2, supported_aspect_ratios=[[1, 1], [1, 2]], attention_heads=4,
        hidden_size=64, intermediate_size=96,
    )  # fmt: skip
    decoder = dict(_GQA, num_hidden_layers=4, cross_attention_layers=[1, 3], pad_token_id=0)
    model = made("MllamaForConditionalGeneration", vision_config=vision, text_config=decoder, image_token_index=127)
    tiles = torch.tensor([[[1, 1, 0, 0]]] * 2)
    return model, text() | dict(
        pixel_values=random(2, 1, 4, 3, 32, 32), aspect_ratio_ids=torch.full((2, 1), 2), aspect_ratio_mask=tiles,
        cross_attention_mask=tiles[:, None].repeat(1, 20, 1, 1),
    )  # fmt: skip


def generated(model, inputs, **options):
    """Logits ``[B, S, V]`` of greedy decoding."""
    options = dict(max_new_tokens=30, do_sample=False) | options
    out = model.generate(**inputs, **options, return_dict_in_generate=True, output_logits=True)
    return torch.stack(out.logits, 1)


PACKED = [
    (text_to_text, 4, ""),
    (image_to_text, 4, ""),
    (speech_to_text, 4, ""),
    (nllb_moe, 4, ""),
    (moonshine, 4, ""),
    (t5gemma, 4, ""),
    (llama_vision, 4, ""),
]


@pytest.mark.slow_cases("text_to_text-*", "speech_to_text-*", "moonshine-*", "t5gemma-*")
@pytest.mark.parametrize(("make", "packed", "why"), PACKED, ids=lambda value: getattr(value, "__name__", ""))
def test_logits_equal_the_untouched_models_and_the_report_says_what_is_not_packed(make, packed, why):
    model, inputs = make()
    prompted = inputs if "cross_attention_mask" in inputs else inputs | dict(decoder_input_ids=tokens(2, 6, seed=3))
    calls = [(inputs, {}), (prompted, {}), (inputs, dict(num_beams=3, max_new_tokens=6))]
    expected = [generated(model, given, **options) for given, options in calls]
    kvpass.apply(model, IdentityConfig(residual=16), lowering="eager")
    for logits, (given, options) in zip(expected, calls, strict=True):
        torch.testing.assert_close(generated(model, given, **options), logits, atol=1e-5, rtol=0)
    report = kvpass.explain(model)
    assert report.packed == packed
    assert all(why in row.reason for row in report.layers if not row.packed)


def minimax():
    return made(
        "MiniMaxForCausalLM", **_GQA, **_EXPERTS, head_dim=16, layer_types=["linear_attention", "full_attention"]
    )


def dory():
    return made(
        "DoryForCausalLM", **dict(_GQA, num_hidden_layers=3), head_dim=16, sliding_window=32, n_input_layers=1,
        n_output_layers=1, n_recurrent_layers=1, layer_types=["full_attention"] * 3,
    )  # fmt: skip


def blip2():
    opt = dict(vocab_size=VOCABULARY, hidden_size=64, ffn_dim=96, num_hidden_layers=1, num_attention_heads=4,
               word_embed_proj_dim=64, max_position_embeddings=64, model_type="opt")  # fmt: skip
    former = dict(_SIZES, vocab_size=VOCABULARY, num_hidden_layers=1, encoder_hidden_size=64)
    vision = dict(_SIZES, num_hidden_layers=1, image_size=32, patch_size=8)
    return made("Blip2ForConditionalGeneration", vision_config=vision, qformer_config=former, text_config=opt)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (
            minimax,
            "creates its own cache class, MiniMaxCache, which keeps linear_cache beside.*use this model without kvpass",
        ),
        (dory, "adds 1 layers to its cache during a forward.*use this model without kvpass"),
        (blip2, r"kvpass.apply\(model.language_model\), a OPTForCausalLM"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_packed_is_refused_at_apply_with_what_to_do(make, why):
    model = make()
    with pytest.raises(KVPassError, match=why):
        kvpass.apply(model, "kivi", lowering="eager")
    assert "forward" not in vars(model)


def filled(name, *args, keys=(2, 16), values=(2, 16)):
    """A layer of the cache class ``name`` with two tokens; ``keys`` and ``values`` are heads and channels."""
    layer = getattr(cache_utils, name)(*args)
    layer.update(*(torch.ones(1, heads, 2, width) for heads, width in (keys, values)))
    return layer


DECODER = MistralConfig(sliding_window=32)
LATENT = DeepseekV3Config(kv_lora_rank=32)


@pytest.mark.parametrize(
    ("layer", "config", "says", "not_that"),
    [
        (cache_utils.DynamicLayer(), DECODER, "stored nothing", "bounded"),
        (cache_utils.LinearAttentionLayer(), DECODER, "no KV cache", "bounded"),
        (cache_utils.DummyLayer(), DECODER, "keeps nothing", "bounded"),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "reset") else "",
)
def test_the_reason_is_true_of_the_layer(layer, config, says, not_that):
    why = held_by(layer, config)
    assert isinstance(why, str) and re.search(says, why) and not_that not in why


@pytest.mark.parametrize(
    ("keys", "values", "config", "latent"),
    [
        ((2, 16), (2, 16), DECODER, False),
        ((2, 24), (4, 16), DECODER, False),
        ((1, 32), (1, 8), LATENT, True),
        ((1, 32), (1, 8), DECODER, False),
        ((2, 32), (2, 8), LATENT, False),  # heads of their own
    ],
)
def test_a_layer_of_full_attention_is_packed_whatever_the_shapes_of_its_keys_and_values(keys, values, config, latent):
    layer = held_by(filled("DynamicLayer", keys=keys, values=values), config)
    (geometry,) = geometries([layer]).values()
    assert geometry.heads == (keys, values) and geometry.latent is latent
    assert geometry.values_per_token == keys[0] * keys[1] + values[0] * values[1]


def test_keys_and_values_of_different_tokens_are_not_packed():
    layer = cache_utils.DynamicLayer()
    layer.update(torch.ones(1, 2, 2, 16), torch.ones(1, 2, 3, 16))
    assert "do not hold the same tokens" in held_by(layer, DECODER)


def test_a_latent_without_a_rotary_part_is_not_packed():
    layer = filled("DynamicLayer", keys=(1, 32), values=(1, 0))
    assert re.search(r"values \[1, 1, 2, 0\] are empty", held_by(layer, LATENT))


def test_a_layer_of_the_models_own_class_is_named_with_what_it_keeps():
    class CompressedLayer(cache_utils.DynamicSlidingWindowLayer):
        def __init__(self):
            super().__init__(sliding_window=8)
            self.compressed: dict[str, torch.Tensor | None] = {"kv": None}

    layer = CompressedLayer()
    layer.update(torch.ones(1, 2, 2, 16), torch.ones(1, 2, 2, 16))
    why = held_by(layer, DECODER)
    assert "CompressedLayer" in why and "keys, values, compressed" in why and "bounded" not in why


def test_encoder_states_may_have_another_width():
    model, _ = image_to_text()
    given = encoded(model, 2, 3)
    assert given.last_hidden_state.shape == (2, 3, 48) and type(given).__name__ == "BaseModelOutputWithPooling"
    assert given.attention_mask is None and given.router_logits is None

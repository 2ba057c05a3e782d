"""A cache stores the tokens that layers pass to it, whatever the caller passes, and the caller's arguments reach the
model."""

import functools

import pytest
import torch
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    DynamicCache,
    GitConfig,
    GitForCausalLM,
    RobertaConfig,
    RobertaForCausalLM,
)

import kvpass
from kvpass import KVPassError
from kvpass.models.redundant import RedundantArguments
from kvpass.schemes import IdentityConfig, KIVIConfig

from tiny import VOCABULARY, llama, tokens

LOSSLESS = IdentityConfig(residual=16)


def generated(model, **inputs):
    """Logits of 12 greedy steps, ``[B, 12, V]``."""
    out = model.generate(**inputs, max_new_tokens=12, do_sample=False, return_dict_in_generate=True, output_logits=True)
    return torch.stack(out.logits, 1)


def bamba():
    torch.manual_seed(0)
    sizes = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, attn_layer_indices=[1])
    mamba = dict(mamba_n_heads=4, mamba_d_head=32, mamba_d_state=16, mamba_chunk_size=16)
    config = BambaConfig(**sizes, **heads, **mamba, initializer_range=0.2, eos_token_id=None, pad_token_id=0)
    return BambaForCausalLM(config).eval()


def roberta():
    torch.manual_seed(0)
    sizes = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2)
    config = RobertaConfig(
        **sizes, num_attention_heads=4, is_decoder=True, max_position_embeddings=128, initializer_range=0.2,
        pad_token_id=1, eos_token_id=None,
    )  # fmt: skip
    return RobertaForCausalLM(config).eval()


@pytest.mark.parametrize("make", [bamba, roberta, llama], ids=lambda make: make.__name__)
@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "a mask of ones"])
def test_an_unpadded_prompt_generates_what_the_untouched_model_does(make, masked):
    """Bamba counts positions from 0 at every call that passes none; RoBERTa's count from ``padding_idx + 1``."""
    model, ids = make(), tokens(2, 40).clamp(min=2)
    inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids)) if masked else dict(input_ids=ids)
    expected = generated(model, **inputs)
    kvpass.apply(model, LOSSLESS, lowering="eager")
    torch.testing.assert_close(generated(model, **inputs), expected, atol=1e-5, rtol=1e-5)


def counting(model):
    """``model`` with a forward that computes something from the mask."""
    inner = model.forward

    @functools.wraps(inner)
    def forward(input_ids=None, attention_mask=None, **kwargs):
        if attention_mask is not None:
            input_ids = (input_ids + attention_mask.sum()) % VOCABULARY
        return inner(input_ids=input_ids, **kwargs)

    model.forward = forward
    return model


def test_only_arguments_proven_equal_to_defaults_are_dropped():
    usual = {"attention_mask", "logits_to_keep", "use_cache", "return_dict"}
    found = RedundantArguments(llama())
    assert found.among({"input_ids", *usual}) == found.among({"input_ids", "position_ids", *usual}) == usual
    assert not found.among({"input_ids", "pixel_values", *usual})
    others = usual - {"attention_mask"}
    found = RedundantArguments(counting(llama()))
    assert found.among({"input_ids", *others}) == others
    assert not found.among({"input_ids", *usual})


@torch.no_grad()
def test_a_mask_of_ones_reaches_a_model_that_uses_it():
    model = counting(llama())
    ids = tokens(1, 40)
    expected = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    kvpass.apply(model, LOSSLESS, lowering="eager")
    torch.testing.assert_close(model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits, expected)


@torch.no_grad()
def test_writes_to_arguments_reach_the_caller():
    """Graphs receive clones of the arguments."""

    model, marks = llama(), torch.zeros(3)
    inner = model.forward

    @functools.wraps(inner)
    def marking(marks=None, **kwargs):
        if marks is not None:
            marks.add_(1)
        return inner(**kwargs)

    model.forward = marking
    kvpass.apply(model, LOSSLESS, lowering="reference")
    cache = DynamicCache(config=model.config)
    for count in (40, 1, 1, 1):
        model(input_ids=tokens(1, count), past_key_values=cache, marks=marks)
    assert marks.tolist() == [4, 4, 4]


def git():
    torch.manual_seed(0)
    vision = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2, image_size=32)
    config = GitConfig(
        vision_config=dict(vision, patch_size=8), vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96,
        num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=128, pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    model = GitForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("padding", [0, 6])
def test_image_tokens_inserted_by_the_forward_are_stored(padding):
    model, ids = git(), tokens(2, 20).clamp(min=3)
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    ids[0, :padding], mask[0, :padding] = 0, 0

    def run():
        cache = DynamicCache(config=model.config)
        return generated(model, input_ids=ids, attention_mask=mask, pixel_values=pixels, past_key_values=cache), cache

    expected, plain = run()
    kvpass.apply(model, LOSSLESS, lowering="eager")
    got, cache = run()
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert cache.get_seq_length() == plain.get_seq_length() == 20 + 17 + 11
    for mine, theirs in zip(cache.layers, plain.layers, strict=True):
        torch.testing.assert_close(mine.keys[1] + 0, theirs.keys[1], atol=1e-5, rtol=1e-5)
    assert kvpass.explain(model).tokens == 48


def in_front(model, count):
    """``model`` with ``count`` embeddings inserted before each call, or that many dropped if ``count`` is negative."""
    inner = model.model.forward

    def forward(input_ids=None, inputs_embeds=None, **kwargs):
        x = model.model.embed_tokens(input_ids)
        x = x[:, -count:] if count < 0 else torch.cat([x[:, :1] * 0 + i / 9 for i in range(count)] + [x], 1)
        return inner(inputs_embeds=x, **{**kwargs, "position_ids": None})

    model.model.forward = forward
    return model


@torch.no_grad()
@pytest.mark.parametrize("count", [3, -1])
def test_forwards_may_add_or_drop_tokens_at_every_call(count):
    def run(model):
        cache = DynamicCache(config=model.config)
        return torch.cat(
            [model(input_ids=tokens(2, n), past_key_values=cache).logits[:, -1] for n in (40, 5, 7)]
        ), cache

    expected, plain = run(in_front(llama(), count))
    got, cache = run(kvpass.apply(in_front(llama(), count), LOSSLESS, lowering="eager"))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert cache.get_seq_length() == plain.get_seq_length()


LOSSY = KIVIConfig(group_size=16, residual=16)


def refusal(change, scheme=LOSSY):
    """The error of a call over a cache of 40 tokens after ``change`` was made to the model; the cache is unchanged."""
    model = kvpass.apply(llama(), scheme, lowering="eager")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=tokens(1, 40), past_key_values=cache)
        before = [layer.keys + 0 for layer in cache.layers]
        change(model)
        with pytest.raises(KVPassError) as error:
            model(input_ids=tokens(1, 5), past_key_values=cache)
    assert cache.get_seq_length() == 40
    for layer, keys in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys + 0, keys)
    return str(error.value)


def test_a_decoder_that_runs_twice_in_a_forward_is_refused():
    def twice(model):
        inner = model.model.forward
        model.model.forward = lambda **kwargs: inner(**kwargs) and inner(**kwargs)

    assert "twice in one forward" in refusal(twice)


def test_a_layer_that_is_left_out_is_refused():
    def without(model):
        model.model.layers[1].forward = lambda hidden_states, **_: hidden_states

    assert "stored nothing in cache layers 1" in refusal(without)


def test_layers_that_store_other_numbers_of_tokens_are_refused():
    def shorter(model):
        inner = model.model.layers[1].forward

        def forward(hidden_states, position_embeddings=None, **kwargs):
            cos, sin = position_embeddings
            return inner(hidden_states[:, 1:], position_embeddings=(cos[:, 1:], sin[:, 1:]), **kwargs)

        model.model.layers[1].forward = forward

    assert "5 tokens in some cache layers and 4 in others" in refusal(shorter)


def test_a_captured_forward_that_adds_tokens_is_refused():
    """The number of tokens is fixed before a graph runs."""
    before_rope = KIVIConfig(group_size=16, residual=16, rope="pre")
    said = refusal(lambda model: in_front(model, 3), before_rope)
    assert "the model stores a different number of tokens" in said and "Use scheme={'scheme': 'kivi'" in said


@torch.no_grad()
def test_steps_that_add_tokens_run_uncaptured():
    def run(model):
        cache = DynamicCache(config=model.config)
        return torch.cat([model(input_ids=tokens(1, n), past_key_values=cache).logits[:, -1] for n in (40, 1, 1, 1)])

    expected = run(in_front(llama(), 2))
    got = run(kvpass.apply(in_front(llama(), 2), LOSSLESS, lowering="reference"))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)

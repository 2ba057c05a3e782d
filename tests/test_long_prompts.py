"""Long prompts are read in chunks where that is proven to give the same as reading them whole."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, LlamaModel

import kvpass
from kvpass import KVPassError
from kvpass.runtime.applied import runtime_of
from kvpass.schemes import IdentityConfig

from faults import outcomes
from tiny import left_padded, llama, tokens
from zoo import ZOO

SIZE = 64
PROVEN = ["Llama", "Llama, scaled RoPE", "Mistral, sliding", "Gemma 3", "Qwen3-MoE", "GPT-NeoX", "BLOOM", "OPT"]


def packed(model, size=SIZE, scheme="identity"):
    return kvpass.apply(model, scheme, lowering="eager", prefill_chunk_size=size)


@torch.no_grad()
def read(model, **call):
    """Logits of a prompt and of a token that follows, and the keys of each layer."""
    cache = DynamicCache(config=model.config)
    output, mask = model(**call, past_key_values=cache), call.get("attention_mask")
    rows = output[0].shape[0]
    more = {} if mask is None else dict(attention_mask=torch.cat([mask, mask.new_ones(rows, 1)], 1))
    after = model(tokens(rows, 1, seed=9), past_key_values=cache, **more)
    return output, after[0], [layer.keys + 0 for layer in cache.layers]


def contents(cache):
    """Keys and values of each layer."""
    return [x + 0 for layer in cache.layers for x in (layer.keys, layer.values)]


def counted(model):
    """A list that the number of tokens of each forward is appended to from now on."""
    runtime, counts = runtime_of(model), []
    over = runtime.forward_over

    def forward_over(cache, batch, count, kwargs):
        counts.append(count)
        return over(cache, batch, count, kwargs)

    runtime.forward_over = forward_over
    return counts


def said(model):
    return kvpass.explain(model).long_prompts


def check(model, expected, counts, **call):
    """Assert that ``call`` gives ``expected`` in forwards of ``counts`` tokens."""
    ran = counted(model)
    found = read(model, **call)
    assert ran == [*counts, 1], said(model)
    assert type(found[0]) is type(expected[0]) and list(found[0]) == list(expected[0])
    for one, other in zip((found[0][0], found[1], *found[2]), (expected[0][0], expected[1], *expected[2]), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", PROVEN)
@torch.no_grad()
def test_chunks_equal_the_whole_prompt(name):
    model, call = ZOO[name].model(ZOO[name].attention), dict(input_ids=tokens(2, 150))
    expected = read(model, **call)
    check(packed(model), expected, [50, 50, 50], **call)
    assert said(model) == "prompts of more than 64 tokens are read in chunks of at most 64"


CALLS = {
    "last logits": dict(input_ids=tokens(2, 130), logits_to_keep=1),
    "logits of two chunks": dict(input_ids=tokens(2, 130), logits_to_keep=60),
    "embeddings": dict(inputs_embeds=torch.randn(2, 130, 64, generator=torch.Generator().manual_seed(0))),
    "positions": dict(input_ids=tokens(1, 130), position_ids=torch.arange(7, 137)[None]),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_arguments_of_chunks(call):
    model = llama()
    expected = read(model, **call)
    check(packed(model), expected, [43, 43, 44], **call)


def test_a_base_model_returns_all_its_hidden_states():
    model, call = LlamaModel(llama().config).eval(), dict(input_ids=tokens(1, 100))
    expected = read(model, **call)
    check(packed(model), expected, [50, 50], **call)


@settings(max_examples=15, deadline=None)
@given(length=st.integers(2, 400), size=st.integers(64, 200), padding=st.integers(0, 30), keep=st.integers(0, 400))
def test_any_length_size_and_padding(length, size, padding, keep):
    padding, keep = min(padding, length - 1), min(keep, length)
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, :padding] = 0
    call = dict(input_ids=tokens(2, length), attention_mask=mask, logits_to_keep=keep)
    model = llama(layers=1)
    expected = read(model, **call)
    found = read(packed(model, size), **call)
    assert found[0].logits.shape == expected[0].logits.shape
    torch.testing.assert_close(found[0].logits[1], expected[0].logits[1], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found[0].logits[0, -1], expected[0].logits[0, -1], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found[1], expected[1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("more", [{}, dict(num_beams=2), dict(prefill_chunk_size=90)], ids=str)
def test_generate_reads_a_padded_batch_in_chunks(more):
    model, call = llama(), left_padded()
    ids = torch.cat([call["input_ids"], tokens(2, 110)], 1)
    mask = torch.cat([call["attention_mask"], torch.ones(2, 110, dtype=torch.long)], 1)
    call = dict(input_ids=ids, attention_mask=mask, max_new_tokens=8, do_sample=False, **more)
    expected = model.generate(**call)
    counts = counted(packed(model))
    assert torch.equal(model.generate(**call), expected)
    assert max(counts) <= 64 and counts.count(1) == 7


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (dict(output_hidden_states=True), "the call has output_hidden_states"),
        (dict(labels=tokens(1, 100)), "the call has labels"),
        (dict(attention_mask=torch.ones(1, 1, 100, 100).tril().log()), "not a 2-D mask"),
        (dict(attention_mask=torch.arange(100)[None] < 80), "hides tokens behind the first part"),
        (dict(logits_to_keep=torch.tensor([3])), "logits_to_keep is not a number"),
        (dict(return_dict=False), "asks for a tuple"),
    ],
)
def test_other_calls_are_read_whole(change, why):
    model = packed(llama())
    counts = counted(model)
    with torch.no_grad():
        model(input_ids=tokens(1, 100), **change)
    assert counts == [100] and why in said(model)


def bidirectional():
    """A model whose prompts see their later tokens, too."""
    model = llama()
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    return model


def mistral(**config):
    species = ZOO["Mistral"]
    return replace(species, config=species.config | config).model("sdpa")


REFUSED = {
    "a model that is not causal": (bidirectional, "gave another result than read whole"),
    "RoPE that depends on the length": (
        lambda: llama(rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=1e4)), "rope_type='dynamic'",
    ),
    "a window that a short prompt does not reach": (
        lambda: mistral(sliding_window=600), "a block of 600 tokens",
    ),
    "states": (lambda: ZOO["Qwen3-Next"].model("sdpa"), "LinearAttentionLayer"),
    "code from elsewhere": (lambda: type("Own", (type(llama()),), {})(llama().config).eval(), "not from transformers"),
}  # fmt: skip


@pytest.mark.parametrize(("model", "why"), REFUSED.values(), ids=REFUSED)
@torch.no_grad()
def test_models_that_are_not_proven_read_prompts_whole(model, why, caplog):
    model, ids = model(), tokens(1, 100)
    expected = model(ids).logits
    counts = counted(packed(model))
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=1e-4)
    assert counts == [100] and why in said(model) and why in caplog.text


@torch.no_grad()
def test_hooks_inside_see_the_whole_prompt():
    model, seen = packed(llama()), []
    handle = model.model.layers[0].register_forward_hook(lambda module, given, output: seen.append(given[0].shape[1]))
    model(tokens(1, 100))
    handle.remove()
    assert seen == [100] and "hooks on model.layers.0" in said(model)


@pytest.mark.parametrize(
    ("scheme", "why"),
    [
        ("waterfill", "queries"),
        ("kivi+h2o", "attention scores"),
        ("higgs-sinks", "fits center"),
        ("kivi-pre", "graphs"),
    ],
)
def test_schemes_that_are_fitted_to_prompts_read_them_whole(scheme, why):
    text = said(kvpass.apply(llama(), scheme, prefill_chunk_size="auto"))
    assert why in text and "prefill_chunk_size=512" in text


def test_only_prompts_of_some_thousand_tokens_are_read_in_chunks_if_that_is_automatic():
    model = llama(layers=1, heads=1, kv_heads=1)
    expected = read(model, input_ids=tokens(1, 4097), logits_to_keep=1)
    model = packed(model, "auto")
    nearly_equal = [455, 455, 455, 455, 456, 455, 455, 455, 456]
    check(model, expected, nearly_equal, input_ids=tokens(1, 4097), logits_to_keep=1)
    model = packed(kvpass.remove(model), None)
    check(model, expected, [4097], input_ids=tokens(1, 4097), logits_to_keep=1)


@pytest.mark.parametrize("size", [0, 63, -1, True, 100.0, "all"])
def test_bad_chunk_sizes_are_refused(size):
    with pytest.raises(KVPassError, match="prefill_chunk_size="):
        kvpass.apply(llama(), prefill_chunk_size=size)


@pytest.mark.parametrize("stored", [0, 20])
@torch.no_grad()
def test_a_failure_leaves_no_half_read_prompt(stored):
    """At any line, and over a cache that is empty or not: the cache is as before, has the whole prompt (if the last
    chunk had been stored), or refuses the next call."""
    model, ids = packed(llama(), scheme=IdentityConfig(residual=16)), tokens(1, 150)
    model(ids)  # proves that chunks are equal
    cache = DynamicCache(config=model.config)
    if stored:
        model(tokens(1, stored), past_key_values=cache)
    expected = model(ids, past_key_values=cache).logits
    whole = contents(cache)

    def fresh():
        cache = DynamicCache(config=model.config)
        if stored:
            model(tokens(1, stored), past_key_values=cache)
        return cache

    def verdict(cache):
        try:
            if cache.get_seq_length() == stored + 150:
                torch.testing.assert_close(contents(cache), whole)
                return "as after"
            torch.testing.assert_close(model(ids, past_key_values=cache).logits, expected)
        except KVPassError as error:
            assert "inconsistent" in str(error)
            return "refused"
        return "as before"

    found = outcomes(fresh, lambda cache: model(ids, past_key_values=cache), verdict, KeyboardInterrupt, most=60)
    assert found["as before"] and set(found) <= {"as before", "as after"} | ({"refused"} if stored else set()), found


def test_a_prompt_that_does_not_fit_is_refused_before_its_first_chunk():
    model = kvpass.apply(llama(), "identity", lowering="eager", prefill_chunk_size=64, max_cache_len=128)
    counts, cache = counted(model), DynamicCache(config=model.config)
    with pytest.raises(KVPassError, match="cache is full"), torch.no_grad():
        model(tokens(1, 150), past_key_values=cache)
    assert counts == [] and cache.get_seq_length() == 0

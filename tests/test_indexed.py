"""Sparse attention: keys and values are packed, the keys of the indexer stay exact."""

import pytest
import torch
from transformers import DynamicCache

import kvpass
from kvpass import KVPassError, schemes
from kvpass.cache.indexed import IndexedLayer
from kvpass.eval import bits_at
from kvpass.schemes import IdentityConfig

from tiny import VOCABULARY, called, check_rows_are_selected, check_saved_loaded_and_reset, left_padded, llama, tokens

transformers = pytest.importorskip("transformers", "5.24", reason="earlier versions have other indexers")

LOSSLESS = IdentityConfig(residual=8)
TOPK, CHANNELS = 16, 16


def deepseek(layers=2):
    """A DeepSeek-V3.2 without experts, whose attention reads 16 tokens."""
    torch.manual_seed(0)
    config = transformers.DeepseekV32Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16,
        v_head_dim=16, head_dim=16, index_topk=TOPK, index_head_dim=32, index_n_heads=2, first_k_dense_replace=layers,
        max_position_embeddings=512, bos_token_id=1, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return transformers.DeepseekV32ForCausalLM(config).eval()


MODES = {
    "greedy": dict(input_ids=tokens(2, 60)),
    "left padding": left_padded(),
    "beams": dict(input_ids=tokens(1, 30), num_beams=3),
    "prompt lookup": dict(input_ids=tokens(1, 8).repeat(1, 5), prompt_lookup_num_tokens=4),
    "an assistant": dict(input_ids=tokens(1, 40), assistant_model=llama()),
    "chunks": dict(input_ids=tokens(1, 60), prefill_chunk_size=25),
    "a static cache": dict(input_ids=tokens(2, 40), cache_implementation="static", disable_compile=True),
}
STATIC = "cache_implementation", "disable_compile"


@pytest.fixture(scope="module")
def model():
    return deepseek()


@pytest.fixture
def applied(model):
    yield kvpass.apply(model, LOSSLESS, lowering="eager")
    kvpass.remove(model)


@pytest.mark.parametrize("mode", MODES)
def test_generate_gives_the_tokens_of_the_untouched_model(model, mode, request):
    given = dict(MODES[mode], max_new_tokens=20, do_sample=False, return_dict_in_generate=True)
    growing = {name: value for name, value in given.items() if name not in STATIC}  # unused slots change how ties break
    expected = model.generate(**growing).sequences
    found = request.getfixturevalue("applied").generate(**given)
    assert torch.equal(found.sequences, expected)
    assert all(type(layer) is IndexedLayer for layer in found.past_key_values.layers)
    assert kvpass.explain(model).packed == 2


CALLS = [(30, 0), *[(1, 0)] * 4, (6, 4), *[(1, 0)] * 3, (5, 3), (1, 0)]


def test_logits_are_those_of_the_untouched_model_whatever_is_rejected(model, request):
    expected, untouched = called(model, CALLS)
    found, cache = called(request.getfixturevalue("applied"), CALLS)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    for ours, theirs in zip(cache.layers, untouched.layers, strict=True):
        torch.testing.assert_close(ours.indexer_keys, theirs.indexer_keys, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_one_graph_attends_to_the_latent_with_the_selection_as_a_mask(reference_lowering):
    model, calls = deepseek(layers=3), [(30, 0), *[(1, 0)] * 12]
    expected, _ = called(model, calls)
    kvpass.apply(model, LOSSLESS)
    found, _ = called(model, calls)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    report = kvpass.explain(model)
    assert report.fused == 3 and len(report.graphs) == 1
    assert "exact: keys of the indexer, 32 channels per token" in report.layers[0].plan


@pytest.mark.slow
@pytest.mark.compiles
def test_one_compiled_step_selects_all_tokens_and_another_selects_some(model):
    torch._dynamo.reset()
    calls = [(TOPK - 4, 0), *[(1, 0)] * 12]  # torch guards on min(TOPK, tokens)
    expected, _ = called(model, calls)
    kvpass.apply(model, LOSSLESS)
    try:
        found, _ = called(model, calls)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
        report = kvpass.explain(model)
        assert report.fused == 2 and sum(graph.compiled for graph in report.graphs) == 2
    finally:
        kvpass.remove(model)


def test_the_default_scheme_packs_the_latent(model):
    kvpass.apply(model, lowering="eager")
    try:
        _, cache = called(model, [(480, 0), (1, 0)])
        assert kvpass.nbytes(cache) == sum(layer.nbytes for layer in cache.layers)
        layer, exact = cache.layers[0], cache.layers[0].indexer_keys.nbytes
        assert type(layer) is IndexedLayer and layer.nbytes - exact < (layer.full_nbytes - exact) / 2
    finally:
        kvpass.remove(model)


def test_everything_is_saved_loaded_and_reset_together(applied, tmp_path):
    check_saved_loaded_and_reset(applied, tmp_path)


def test_rows_are_selected_together(applied):
    check_rows_are_selected(applied, atol=1e-5)


def test_a_failed_call_leaves_the_indexer_as_it_was(applied):
    expected, _ = called(applied, [(20, 0), (1, 0)])
    cache, ids = DynamicCache(config=applied.config), tokens(2, 21, seed=3)
    with torch.no_grad():
        applied(input_ids=ids[:, :20], past_key_values=cache)
        weight, applied.lm_head.weight = applied.lm_head.weight, None
        with pytest.raises(TypeError):
            applied(input_ids=ids[:, 20:], past_key_values=cache)
        applied.lm_head.weight = weight
        assert cache.layers[1].indexer_keys.shape[1] == 20
        assert torch.equal(applied(input_ids=ids[:, 20:], past_key_values=cache).logits, expected[1])


def test_eviction_is_refused_because_it_renumbers_tokens(model):
    budget = schemes.compose(schemes.get("kivi", group_size=8), kvpass.HeavyHitter(16, recent=16, page_size=8))
    with pytest.raises(KVPassError, match=r"indexer selects tokens by their numbers.*without a budget"):
        kvpass.apply(model, budget, lowering="eager")


@pytest.mark.parametrize("scheme", [None, "kivi-4"])
def test_bytes_at_a_length_include_the_keys_of_the_indexer(model, scheme):
    config = None if scheme is None else schemes.get(scheme, group_size=8)
    if config is not None:
        kvpass.apply(model, config, lowering="eager")
    _, cache = called(model, [(96, 0)], batch=1)
    if config is not None:
        kvpass.remove(model)
    per_token = 2 * (model.config.kv_lora_rank + model.config.qk_rope_head_dim + model.config.index_head_dim)
    expected = 8 * kvpass.nbytes(cache) / (96 * per_token)
    assert kvpass.bits_per_value(cache) == pytest.approx(expected)
    assert bits_at(model, config, [96])[96] == pytest.approx(expected)


def test_a_layer_may_use_the_selection_of_another(request):
    torch.manual_seed(0)
    config = transformers.GlmMoeDsaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16,
        v_head_dim=16, head_dim=16, index_topk=TOPK, index_head_dim=32, index_n_heads=2,
        mlp_layer_types=["dense"] * 2, indexer_types=["full", "shared"], max_position_embeddings=512, bos_token_id=1,
        pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    model = transformers.GlmMoeDsaForCausalLM(config).eval()
    expected, _ = called(model, CALLS)
    kvpass.apply(model, LOSSLESS, lowering="eager")
    found, cache = called(model, CALLS)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    assert [layer.indexer_keys is None for layer in cache.layers] == [False, True]
    assert "indexer" not in kvpass.explain(model).layers[1].plan

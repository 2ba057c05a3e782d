"""Keys stored before rotary embedding: the rotation, how the pass finds it in a graph, and what the cache holds."""

import copy

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

import kvpass
from kvpass import KVPassError
from kvpass.codec.rope import rotate
from kvpass.codec.tensors import Pack
from kvpass.lowering import reference
from kvpass.lowering.call_types import AttendCall
from kvpass.lowering.fit_sequence import fit_compensation
from kvpass.lowering.inductor import attend as inductor_attend

from common import DIM, coded, only_reference, randn, seeds, state_of
from tiny import VOCABULARY, llama, tokens

pytestmark = pytest.mark.usefixtures("nothing_compiled")

IDENTITY = dict(scheme="identity", rope="pre")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


# ---------------------------------------------------------------- the rotation


def tables(seed, batch, length, pairs):
    angle = randn(seed, batch, length, pairs)
    return angle.cos() * 1.3, angle.sin() * 1.3  # scaled, as YaRN does


@given(st.sampled_from(("half", "interleaved")), st.sampled_from((2, 5, 8)), seeds)
def test_rotation_is_multiplication_by_a_complex_number(kind, pairs, seed):
    x, (cos, sin) = randn(seed, 2, 3, 7, DIM), tables(seed, 2, 9, pairs)
    out = rotate(x, cos, sin, f"{kind}-{pairs}")
    index = torch.arange(2 * pairs).view(-1, 2) if kind == "interleaved" else torch.arange(2 * pairs).view(2, -1).T
    turned = torch.complex(x[..., index[:, 0]], x[..., index[:, 1]]) * torch.complex(cos, sin)[:, None, :7]
    torch.testing.assert_close(out[..., index[:, 0]], turned.real)
    torch.testing.assert_close(out[..., index[:, 1]], turned.imag)
    assert torch.equal(out[..., 2 * pairs :], x[..., 2 * pairs :])


@pytest.mark.slow
@pytest.mark.nightly_cases("interleaved-8-*")
@pytest.mark.compiles
@pytest.mark.parametrize("n", [0, 5, 40, 130])
@pytest.mark.parametrize("rope, keep", [("half-3", "recent"), ("interleaved-8", "log")])
def test_attention_rotates_keys_that_it_reads(n, rope, keep):
    """Against attention over keys that were dequantized and then rotated, in every implementation."""
    k_spec = coded(2, "channel", 16, 16, residual=32, sinks=2, keep=keep, pre_rope=True)
    v_spec = coded(2, "token", 8, 16, residual=32, sinks=2, keep=keep)
    x = [randn(i, 2, 2, n + 1, DIM) for i in range(2)]
    states = [state_of(s, t[:, :, :n], room=n) for s, t in zip((k_spec, v_spec), x, strict=True)]
    packs = [Pack.of(s.pack, s.spec) for s in states]
    cos, sin = tables(3, 2, n + 40, DIM // 2)
    q, new = randn(7, 2, 6, 1, DIM), [t[:, :, n:] for t in x]
    mask = torch.rand(2, 1, 1, n + 1, generator=torch.Generator().manual_seed(0)) > 0.4
    mask[..., -1] = True
    call = AttendCall(q, *packs, n, *new, mask, False, 0.3, 0.0, k_spec, v_spec, (cos, sin, rope))
    with only_reference():
        past = [s.dequantize(n) for s in states]
    dense = torch.cat([rotate(past[0], cos, sin, rope), new[0]], 2), torch.cat([past[1], new[1]], 2)
    expected = reference.attention(call, *dense)
    torch.testing.assert_close(reference.attend(call)[0], expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(inductor_attend.attend(call)[0], expected, atol=2e-6, rtol=1e-5)


# ---------------------------------------------------------------- in a model


COMMON = dict(
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=512,
)  # fmt: skip
GPT_OSS = dict(
    num_key_value_heads=2, head_dim=16, layer_types=["full_attention"] * 2, num_local_experts=2, num_experts_per_tok=1,
    attn_implementation="eager", pad_token_id=0,
)  # fmt: skip
GPTJ = dict(vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, rotary_dim=8, n_positions=512)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=128)


def make(name, **config):
    torch.manual_seed(0)
    kind = getattr(transformers, f"{name}Config")
    model = {"GPT2": "GPT2LMHeadModel"}.get(name, f"{name}ForCausalLM")
    return getattr(transformers, model)(kind(**config, bos_token_id=1, eos_token_id=None)).eval()


MODELS = {
    "half": lambda: make("Llama", **COMMON, num_key_value_heads=2),
    "scaled by YaRN": lambda: make("Llama", **COMMON, num_key_value_heads=2, rope_parameters=YARN),
    "eager attention": lambda: make("Llama", **COMMON, num_key_value_heads=2, attn_implementation="eager"),
    "bfloat16": lambda: make("Llama", **COMMON, num_key_value_heads=2).to(torch.bfloat16),
    "after a norm": lambda: make("Qwen3", **COMMON, num_key_value_heads=2, head_dim=16),
    "partial, half": lambda: make("GPTNeoX", **COMMON, rotary_pct=0.5),
    "interleaved": lambda: make("Cohere", **COMMON, num_key_value_heads=2, pad_token_id=0),
    "partial, interleaved": lambda: make(
        "Glm", **COMMON, num_key_value_heads=2, head_dim=16, partial_rotary_factor=0.5, pad_token_id=0
    ),
    "tables looked up, before the transpose": lambda: make("GPTJ", **GPTJ),
    "cut in halves": lambda: make("GptOss", **COMMON, **GPT_OSS),
}


def padded(batch=2, length=60, padding=7):
    ids, mask = tokens(batch, length), torch.ones(batch, length, dtype=torch.long)
    ids[0, :padding], mask[0, :padding] = 0, 0
    return dict(input_ids=ids, attention_mask=mask)


def generate(model, **inputs):
    model.generation_config.pad_token_id = 0
    out = model.generate(**inputs, do_sample=False, max_new_tokens=40, return_dict_in_generate=True, output_logits=True)
    return out.sequences, torch.stack(out.logits), out.past_key_values


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_with_an_identity_codec_outputs_equal_the_untouched_model(name):
    """Left padding gives every sample its own positions."""
    plain, applied = MODELS[name](), kvpass.apply(MODELS[name](), scheme=IDENTITY, lowering="eager")
    expected, logits, _ = generate(plain, **padded())
    got, packed_logits, cache = generate(applied, **padded())
    exact = plain.dtype == torch.float32  # in 16 bits the first tokens are equal, until rounding decides a tie
    steps, tolerance = (slice(None), 1e-5) if exact else (slice(0, 2), 5e-2)
    assert not exact or torch.equal(got, expected)
    torch.testing.assert_close(packed_logits[steps], logits[steps], atol=tolerance, rtol=tolerance)
    report = kvpass.explain(applied)
    assert report.packed == 2 and all(graph.rotated == 2 for graph in report.graphs)
    assert cache.layers[0].rotary is not None and cache.layers[1].rotary is None


@torch.no_grad()
def keys_before_rotation(model, ids):
    """The outputs of the key projections, ``[B, H_kv, S, D]`` per layer."""
    seen, hooks = [], []
    for layer in model.model.layers:
        hooks.append(layer.self_attn.k_proj.register_forward_hook(lambda *call: seen.append(call[2])))
    model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return [k.unflatten(-1, (-1, 32)).transpose(1, 2) for k in seen]


@pytest.mark.parametrize("lowering", ["auto", "eager"])
def test_the_cache_holds_the_keys_before_rotation(lowering):
    ids, plain = tokens(1, 45), llama()
    expected = keys_before_rotation(plain, ids)
    model = kvpass.apply(llama(), scheme=IDENTITY, lowering=lowering)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids[:, :40], past_key_values=cache)
        for i in range(40, 45):
            model(input_ids=ids[:, i : i + 1], past_key_values=cache)
    for layer, keys in zip(cache.layers, expected, strict=True):
        torch.testing.assert_close(layer.keys.dequantize(), keys, atol=1e-5, rtol=1e-5)


def test_tables_are_kept_once_and_counted():
    ids = tokens(2, 100)
    sizes = {}
    for rope in ("pre", "post"):
        model = kvpass.apply(llama(), scheme=dict(scheme="kivi", rope=rope), lowering="eager", max_cache_len=128)
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids=ids, past_key_values=cache)
        sizes[rope] = kvpass.nbytes(cache)
        assert kvpass.explain(model).nbytes == sizes[rope]
    assert sizes["pre"] - sizes["post"] == 2 * 2 * 128 * 16 * 4  # cos and sin, batch, tokens, pairs, float32


@pytest.mark.nightly
def test_beams_and_crops_take_the_tables_along():
    compiled, eager = (kvpass.apply(llama(), scheme="kivi-pre", lowering=low) for low in ("auto", "eager"))
    for mode in (dict(num_beams=3), dict(prompt_lookup_num_tokens=4)):
        ids = tokens(1, 8).repeat(1, 6)
        a, b = (m.generate(ids, do_sample=False, max_new_tokens=25, **mode) for m in (compiled, eager))
        assert torch.equal(a, b), mode


def test_a_second_turn_with_several_tokens_reads_the_tables_of_the_first():
    plain, model = llama(), kvpass.apply(llama(), scheme=IDENTITY, lowering="eager")
    ids = tokens(1, 70)
    with torch.no_grad():
        expected = plain(input_ids=ids).logits[:, -20:]
        cache = DynamicCache(config=model.config)
        model(input_ids=ids[:, :50], past_key_values=cache)
        got = model(input_ids=ids[:, 50:], past_key_values=copy.deepcopy(cache)).logits
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_squat_before_rope_is_fitted_to_the_queries_before_rope():
    ids, plain = tokens(1, 50), llama()
    seen = []
    hook = plain.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *call: seen.append(call[2]))
    with torch.no_grad():
        plain(input_ids=ids, use_cache=False)
    hook.remove()
    model = kvpass.apply(llama(), scheme="squat-pre", lowering="eager")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
    layer = cache.layers[0]
    q = seen[0].unflatten(-1, (-1, 32)).transpose(1, 2)
    expected = fit_compensation(q, None, 2, layer.plan.key.quantizer.subspace).to(torch.float16)
    torch.testing.assert_close(layer.key_state.compensation, expected, atol=2e-3, rtol=2e-3)


def test_a_model_without_rotary_embedding_is_stored_as_it_is():
    model = make("GPT2", vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=512)
    expected = generate(copy.deepcopy(model), **padded())[0]
    kvpass.apply(model, scheme=IDENTITY, lowering="eager")
    assert torch.equal(generate(model, **padded())[0], expected)
    assert all(graph.rotated == 0 for graph in kvpass.explain(model).graphs)


def test_positions_that_are_not_a_rotation_are_refused_with_a_way_out(monkeypatch):
    def shift(q, k, cos, sin):
        return q + cos[:, None], k + sin[:, None]

    monkeypatch.setattr(transformers.models.llama.modeling_llama, "apply_rotary_pos_emb", shift)
    model = kvpass.apply(llama(), scheme="kivi-pre", lowering="eager")
    cache = DynamicCache(config=model.config)
    with (
        pytest.raises(KVPassError, match=r"a rotation of channel pairs. Use scheme='kivi'"),
        torch.no_grad(),
    ):
        model(input_ids=tokens(1, 40), past_key_values=cache)
    assert cache.get_seq_length() == 0


def test_a_forward_that_breaks_is_refused_and_nothing_is_stored():
    """Half a graph does not show how its keys are rotated."""
    model = kvpass.apply(llama(), scheme="kivi-pre", lowering="eager")
    cache = DynamicCache(config=model.config)
    model.model.layers[0].register_forward_hook(lambda *_: torch._dynamo.graph_break())
    with pytest.raises(KVPassError, match=r"must be captured as a graph.*Use scheme='kivi'"), torch.no_grad():
        model(input_ids=tokens(1, 40), past_key_values=cache)
    assert cache.get_seq_length() == 0


@pytest.mark.slow
def test_a_prompt_of_one_token_is_rotated_from_the_second_on():
    plain, model = llama(), kvpass.apply(llama(), scheme=IDENTITY, lowering="eager")
    inputs = dict(input_ids=tokens(1, 1), do_sample=False, max_new_tokens=40)
    assert torch.equal(model.generate(**inputs), plain.generate(**inputs))
    assert all(graph.rotated == 2 for graph in kvpass.explain(model).graphs)

"""Latent attention (MLA): what is expanded from a cached latent is recognized however it is written, nothing else is,
and models with it run packed as untouched."""

import copy
import dataclasses
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

import kvpass
from kvpass import KVPassError, schemes
from kvpass.cache.layer import PackedLayer
from kvpass.cache.state import KVState
from kvpass.compile.calls import compute
from kvpass.compile.find import find
from kvpass.compile.normalise import in_place, normalise
from kvpass.eval.size import bits_at
from kvpass.layout.window import length_tensor
from kvpass.lowering import tiles
from kvpass.runtime.transformers import TransformersRuntime
from kvpass.schemes import IdentityConfig, LayerGeometry

from common import coded, randn, seeds
from tiny import llama, tokens
from zoo import ZOO

pytestmark = pytest.mark.usefixtures("nothing_compiled")

BATCH, HEADS, RANK, ROTARY, NOPE, VALUE, PAST = 2, 4, 16, 8, 12, 10, 7
EACH = NOPE + VALUE
LOSSLESS = IdentityConfig(residual=16)

# ---------------------------------------------------------------- recognized by what is computed


def by_head(latent, weight):
    return F.linear(latent, weight).unflatten(-1, (HEADS, -1)).squeeze(1).transpose(1, 2)


def joined(latent, rotary, weight):
    keys, values = by_head(latent, weight).split([NOPE, VALUE], -1)
    return torch.cat([keys, rotary.expand(-1, HEADS, -1, -1)], -1), values


def rotary_first(latent, rotary, weight):
    keys, values = joined(latent, rotary, weight)
    return keys.roll(ROTARY, -1), values


def one_head_at_a_time(latent, rotary, weight):
    rows = weight.unflatten(0, (HEADS, EACH))
    keys = [torch.cat([latent[:, 0] @ rows[h, :NOPE].mT, rotary[:, 0]], -1) for h in range(HEADS)]
    return torch.stack(keys, 1), torch.stack([latent[:, 0] @ rows[h, NOPE:].mT for h in range(HEADS)], 1)


def summed_over_channels(latent, rotary, weight):
    rows = weight.unflatten(0, (HEADS, EACH))
    keys = torch.einsum("bgtr,hdr->bhtd", latent, rows[:, :NOPE])
    values = torch.einsum("bgtr,hdr->bhtd", latent, rows[:, NOPE:])
    return torch.cat([keys, rotary.repeat(1, HEADS, 1, 1)], -1), values


def padded(latent, rotary, weight):
    keys, values = by_head(latent, weight).split([NOPE, VALUE], -1)
    return F.pad(keys, (0, ROTARY)) + F.pad(rotary, (NOPE, 0)), values


def scattered(latent, rotary, weight):
    """As transformers does."""
    keys, values = by_head(latent, weight).split([NOPE, VALUE], -1)
    whole = keys.new_empty(*keys.shape[:-1], NOPE + ROTARY)
    whole[..., :NOPE].copy_(keys)
    whole[..., NOPE:].copy_(rotary)
    return whole, values


WAYS = dict(
    scattered=scattered,
    joined=joined,
    first=rotary_first,
    heads=one_head_at_a_time,
    einsum=summed_over_channels,
    padded=padded,
)

OTHERS = {
    "scaled keys": lambda latent, rotary, weight: (joined(latent, rotary, weight)[0] * 2, by_head(latent, weight)),
    "normalized": lambda latent, rotary, weight: joined(F.rms_norm(latent, (RANK,)), rotary, weight),
    "not linear": lambda latent, rotary, weight: joined(latent.relu(), rotary, weight),
    "a rotary part that is negated": lambda latent, rotary, weight: joined(latent, -rotary, weight),
    "a rotary part in another order": lambda latent, rotary, weight: joined(latent, rotary.flip(-1), weight),
    "tokens in another order": lambda latent, rotary, weight: joined(latent.roll(1, 2), rotary, weight),
    "heads in another order": lambda latent, rotary, weight: joined(
        latent, rotary, weight.unflatten(0, (HEADS, EACH)).flip(0).flatten(0, 1)
    ),
    "rows interleaved by head": lambda latent, rotary, weight: joined(
        latent, rotary, weight.unflatten(0, (EACH, HEADS)).transpose(0, 1).flatten(0, 1)
    ),
    "a low-rank change of the weight": lambda latent, rotary, weight: joined(
        latent, rotary, weight + weight[:, :2] @ weight[:2, :]
    ),
    "values of the rotary part": lambda latent, rotary, weight: (
        joined(latent, rotary, weight)[0], rotary.expand(-1, HEADS, -1, -1)
    ),
}  # fmt: skip


def states(seed):
    """A latent and a rotary part with ``PAST`` tokens stored losslessly."""
    spec, found = coded(32, "token", 1, 8), []
    for dim in (RANK, ROTARY):
        state = KVState.allocate(spec, BATCH, 1, dim, torch.float32, torch.device("cpu"), PAST)
        state.append(randn(seed + dim, BATCH, 1, PAST, dim), 0)
        found.append(state)
    return found


def found_in(way, queries=1, change=lambda site: None):
    """What the pass finds in attention over keys and values that are expanded in a ``way``: the attentions, the reasons
    for others, the output, and the output after ``change`` of the attention."""
    both, length, seen = states(seed := 0), length_tensor(PAST, torch.device("cpu")), []
    torch._dynamo.reset()
    torch._dynamo.mark_dynamic(length, 0)

    def attention(query, new_latent, new_rotary, weight, length, *tensors):
        half, past = len(tensors) // 2, []
        for i, state in enumerate(both):
            part = list(tensors[i * half : (i + 1) * half])
            past.append(torch.ops.kvpass.dequantize(part, length, state.text))
        whole = (torch.cat(pair, 2) for pair in zip(past, (new_latent, new_rotary), strict=True))
        keys, values = way(*whole, weight)
        return F.scaled_dot_product_attention(query, keys, values, scale=0.3)

    inputs = [
        randn(seed, BATCH, HEADS, queries, NOPE + ROTARY), randn(seed + 1, BATCH, 1, queries, RANK),
        randn(seed + 2, BATCH, 1, queries, ROTARY), randn(seed + 3, HEADS * EACH, RANK), length,
        *(tensor for state in both for tensor in state.pack),
    ]  # fmt: skip

    def backend(gm, _):
        normal = normalise(gm)
        sites, refused = find(normal.graph, {})
        seen.extend((sites, refused))
        for site in sites:
            change(site)
        return in_place(normal, skip=set()).forward

    got = torch.compile(attention, backend=backend, fullgraph=True)(*inputs)
    return *seen, attention(*inputs), got


def absorbed(site):
    """Compute attention in the absorbed form."""
    graph, found, aten = site.output.graph, site.expansion, torch.ops.aten
    with graph.inserting_before(site.output):
        keys = compute(graph, aten.cat.default, [found.latent, found.rotary], 3)
        scores = compute(graph, aten.matmul.default, site.query, compute(graph, aten.transpose.int, keys, 2, 3))
        weights = compute(graph, aten.softmax.int, compute(graph, aten.mul.Tensor, scores, site.scale), -1)
        output = found.expand(graph, compute(graph, aten.matmul.default, weights, found.latent))
    site.output.replace_all_uses_with(output)


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("way", WAYS)
def test_the_absorbed_form_computes_the_same_however_the_expansion_is_written(way, queries):
    (site,), refused, expected, got = found_in(WAYS[way], queries, absorbed)
    found = site.expansion
    assert not refused and (found.keys.count, found.values.count, found.values.start) == (NOPE, VALUE, NOPE)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("other", OTHERS)
def test_nothing_else_passes_for_an_expansion(other):
    sites, refused, expected, got = found_in(OTHERS[other])
    assert not sites and len(refused) == 1
    torch.testing.assert_close(got, expected)


# ---------------------------------------------------------------- the op


@given(seeds, st.sampled_from((1, 3)), st.sampled_from((0, 3, 40)), st.booleans(), st.booleans())
@settings(max_examples=24)
def test_attention_over_a_latent_is_attention_over_both_parts_with_the_latent_as_values(
    seed, queries, past, masked, in_tiles
):
    spec, dims, parts = coded(32, "token", 1, 8), (RANK, ROTARY), []
    for which, dim in enumerate(dims):
        x = randn(seed + which, BATCH, 1, past + queries, dim)
        state = KVState.allocate(spec, BATCH, 1, dim, x.dtype, x.device, past)
        if past:
            state.append(x[:, :, :past], 0)
        parts.append((x, state))
    (latent, key), (rotary, value) = parts
    q, total = randn(seed + 2, BATCH, HEADS, queries, RANK + ROTARY), past + queries
    mask = torch.ones(queries, total, dtype=torch.bool).tril(past) if masked else None
    with patch.object(tiles, "_VALUES", 1 if in_tiles else tiles._VALUES):
        (got,) = torch.ops.kvpass.attend(
            q, key.pack, value.pack, length_tensor(past, q.device), latent[:, :, past:], rotary[:, :, past:],
            None if mask is None else mask[None, None], False, 0.3, 0.0, key.text, value.text, latent=True,
        )  # fmt: skip
    whole = torch.cat([latent, rotary], -1).expand(-1, HEADS, -1, -1)
    expected = F.scaled_dot_product_attention(q, whole, latent.expand(-1, HEADS, -1, -1), mask, scale=0.3)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@given(seeds, st.sampled_from([(2, 1), (1, 2), (4, 2), (2, 2)]), st.sampled_from((1, 4)), st.sampled_from((0, 20)))
@settings(max_examples=12)
def test_values_may_have_other_heads_and_channels_than_keys(seed, heads, queries, past):
    spec, parts = coded(32, "token", 1, 8), []
    for which, (count, dim) in enumerate(zip(heads, (24, 16), strict=True)):
        x = randn(seed + which, BATCH, count, past + queries, dim)
        state = KVState.allocate(spec, BATCH, count, dim, x.dtype, x.device, past)
        if past:
            state.append(x[:, :, :past], 0)
        parts.append((x, state))
    (k, key), (v, value) = parts
    q = randn(seed + 2, BATCH, HEADS, queries, 24)
    (got,) = torch.ops.kvpass.attend(
        q, key.pack, value.pack, length_tensor(past, q.device), k[:, :, past:], v[:, :, past:], None, True, 0.3, 0.0,
        key.text, value.text,
    )  # fmt: skip
    mask = torch.ones(queries, past + queries, dtype=torch.bool).tril(past)
    every = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in (k, v))
    torch.testing.assert_close(got, F.scaled_dot_product_attention(q, *every, mask, scale=0.3), atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------- models


@pytest.fixture(scope="module")
def deepseek():
    """A model without experts, which are captured slowly; `test_zoo` has one with them."""
    dense = dataclasses.replace(ZOO["DeepSeek-V3"], config={**ZOO["DeepSeek-V3"].config, "first_k_dense_replace": 2})
    return dense.model("sdpa")


def left_padded():
    ids = tokens(3, 40)
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 9, 20)):
        ids[row, :padding], mask[row, :padding] = 0, 0
    return dict(input_ids=ids, attention_mask=mask)


MODES = {
    "greedy": dict(input_ids=tokens(2, 40), max_new_tokens=24),
    "left-padded": dict(**left_padded(), max_new_tokens=20),
    "beams": dict(input_ids=tokens(2, 30), num_beams=3, max_new_tokens=20),
    "prompt lookup": dict(input_ids=tokens(1, 8).repeat(1, 5), prompt_lookup_num_tokens=4, max_new_tokens=24),
    "an assistant": dict(input_ids=tokens(1, 40), assistant_model=llama(), max_new_tokens=12),
    "chunks": dict(input_ids=tokens(1, 60), prefill_chunk_size=25, max_new_tokens=10),
}


def generated(model, **inputs):
    return model.generate(**inputs, do_sample=False, return_dict_in_generate=True)


@pytest.mark.slow_cases("auto-[!l]*")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lowering", ["eager", "auto"])
def test_generation_is_that_of_the_untouched_model(deepseek, lowering, mode):
    expected = generated(deepseek, **MODES[mode])
    kvpass.apply(deepseek, LOSSLESS, lowering=lowering)
    try:
        got, report = generated(deepseek, **MODES[mode]), kvpass.explain(deepseek)
    finally:
        kvpass.remove(deepseek)
    assert torch.equal(got.sequences, expected.sequences)
    assert all(isinstance(layer, PackedLayer) for layer in got.past_key_values.layers)
    assert (report.packed, report.fused) == (2, 2 * (lowering == "auto")), str(report)


def test_a_saved_cache_continues_as_the_one_in_memory(deepseek, tmp_path):
    kvpass.apply(deepseek, schemes.get("kivi-4", group_size=8, residual=16), lowering="eager")
    try:
        cache, ids = DynamicCache(config=deepseek.config), tokens(1, 50)
        with torch.no_grad():
            deepseek(input_ids=ids, past_key_values=cache)
            loaded = kvpass.load_cache(kvpass.save_cache(cache, tmp_path / "cache"), deepseek)
            for _ in range(3):
                mine, other = (deepseek(input_ids=ids[:, :1], past_key_values=c).logits for c in (cache, loaded))
                assert torch.equal(mine, other)
    finally:
        kvpass.remove(deepseek)
    kvpass.apply(deepseek, schemes.get("kivi", group_size=8, residual=16), lowering="eager")
    try:
        with pytest.raises(KVPassError, match="scheme"):
            kvpass.load_cache(tmp_path / "cache", deepseek)
    finally:
        kvpass.remove(deepseek)


SCHEMES = {
    "kivi": dict(group_size=8), "kivi-pre": dict(group_size=8), "rtn": dict(group_size=8), "higgs": {},
    "turboquant": {}, "e8": {}, "waterfill": dict(recent=16), "kvquant": {},
}  # fmt: skip


def steps(model, scheme, count=8, prompt=90, **options):
    kvpass.apply(model, scheme, **options)
    try:
        cache, ids, rows = DynamicCache(config=model.config), tokens(2, prompt + count), []
        with torch.no_grad():
            model(input_ids=ids[:, :prompt], past_key_values=cache)
            for i in range(prompt, prompt + count):
                rows.append(model(input_ids=ids[:, i : i + 1], past_key_values=cache).logits[:, -1])
        return torch.stack(rows, 1), cache, kvpass.explain(model)
    finally:
        kvpass.remove(model)


@pytest.mark.slow_cases("kivi-pre", "turboquant", "e8", "kvquant", "rtn", "kivi")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_fused_steps_equal_steps_over_the_expanded_past(deepseek, scheme):
    config = schemes.get(scheme, **SCHEMES[scheme])
    expanded, cache, _ = steps(deepseek, config, lowering="eager")
    fused, other, report = steps(deepseek, config)
    assert report.fused == 2, str(report)
    torch.testing.assert_close(fused, expanded, atol=2e-4, rtol=2e-4)
    for mine, theirs in zip(cache.layers, other.layers, strict=True):
        torch.testing.assert_close(mine.keys + 0, theirs.keys + 0, atol=1e-4, rtol=1e-4)
    assert kvpass.nbytes(cache) == kvpass.nbytes(other)


def test_the_default_scheme_needs_no_graph_for_a_latent(deepseek, recwarn):
    kvpass.apply(deepseek)
    try:
        generated(deepseek, **MODES["greedy"])
        report = kvpass.explain(deepseek)
    finally:
        kvpass.remove(deepseek)
    assert "K less its mean 2.25 bits on average" in report.layers[0].plan
    assert "V 2 bits on average" in report.layers[0].plan and report.fused == 2
    assert not [w for w in recwarn if "kvpass" in str(w.message)]


def uneven(model):
    """A copy whose keys and values depend on some channels of the latent far more than on others."""
    model = copy.deepcopy(model)
    for layer in model.model.layers:
        weight = layer.self_attn.kv_b_proj.weight
        weight.data *= 8 * torch.logspace(0, -2, weight.shape[1])[torch.randperm(weight.shape[1])]
    return model


def test_a_latent_is_stored_by_what_its_errors_do_to_attention(deepseek, monkeypatch):
    """Compared with errors that all count alike. So a prompt whose attention does not call SDPA is stored."""
    torch.manual_seed(0)
    model, scheme = uneven(deepseek), schemes.get("waterfill-2", recent=16)
    exact, *_ = steps(model, LOSSLESS, lowering="eager")
    weighted, cache, _ = steps(model, scheme, lowering="eager")
    monkeypatch.setattr(TransformersRuntime, "_offer_queries", lambda runtime: runtime.original)
    alike, other, _ = steps(model, scheme, lowering="eager")
    assert (weighted - exact).square().mean() < 0.75 * (alike - exact).square().mean()
    assert kvpass.nbytes(cache) == kvpass.nbytes(other)
    monkeypatch.undo()
    model.set_attn_implementation("eager")
    _, without, _ = steps(model, scheme, lowering="eager")
    for mine, theirs in zip(without.layers, other.layers, strict=True):
        torch.testing.assert_close(mine.keys + 0, theirs.keys + 0, atol=1e-3, rtol=1e-3)


def test_a_rotary_part_is_quantized_as_keys_are():
    layer = LayerGeometry(0, 1, 1, 64, torch.float32, torch.device("cpu"), None, 1, 32, latent=True)
    for name in ("kivi", "kivi-4", "kvquant", "asymkv", "squat"):
        plan = schemes.get(name).plan_of(layer)
        assert plan.value.quantizer == dataclasses.replace(plan.key.quantizer, subspace=None), name
    assert schemes.get("higgs").plan_of(layer).value.quantizer.per == "token"


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["h2o", "streaming-llm"])
def test_tokens_of_a_latent_are_evicted(deepseek, policy):
    budget = schemes.compose(
        schemes.get("kivi", group_size=8),
        kvpass.HeavyHitter(16, recent=16, page_size=8) if policy == "h2o" else kvpass.StreamingLLM(2, 32, 16, 8),
    )
    _, cache, report = steps(deepseek, budget)
    assert report.fused == 2 and cache.layers[0].tokens < 98 and cache.get_seq_length() == 98


def test_a_scheme_that_predicts_layers_or_is_calibrated_refuses_what_differs_in_shape(deepseek):
    with pytest.raises(KVPassError, match=r"equal shape.*1 heads of 32 channels and 1 heads of 16"):
        kvpass.calibrate(deepseek, tokens(2, 40), progress=False)
    layer = LayerGeometry(1, 2, 1, 32, torch.float32, torch.device("cpu"), 0, num_value_heads=2, value_head_dim=16)
    with pytest.raises(KVPassError, match="equal shape"):
        schemes.get("aqua").plan(layer)
    with pytest.raises(KVPassError, match="head by head"):
        schemes.get("waterfill").plan(layer)


@pytest.mark.parametrize("scheme", [None, "kivi", "waterfill", "higgs"])
def test_bytes_at_a_length_are_those_of_a_cache_of_that_length(deepseek, scheme):
    config = None if scheme is None else schemes.get(scheme, **SCHEMES[scheme])
    cache, ids = DynamicCache(config=deepseek.config), tokens(1, 96)
    if config is not None:
        kvpass.apply(deepseek, config, lowering="eager")
    with torch.no_grad():
        deepseek(input_ids=ids, past_key_values=cache)
    if config is not None:
        kvpass.remove(deepseek)
    per_token = 2 * (deepseek.config.kv_lora_rank + deepseek.config.qk_rope_head_dim)
    assert bits_at(deepseek, config, [96])[96] == pytest.approx(8 * kvpass.nbytes(cache) / (96 * per_token))


@pytest.mark.slow
@pytest.mark.compiles
def test_one_compiled_step_serves_every_length(deepseek):
    torch._dynamo.reset()
    config = schemes.get("kivi-4", group_size=8, residual=16)
    expanded, _, _ = steps(deepseek, config, lowering="eager")
    fused, _, report = steps(deepseek, config)
    torch.testing.assert_close(fused, expanded, atol=2e-4, rtol=2e-4)
    assert report.fused == 2 and sum(graph.compiled for graph in report.graphs) == 1

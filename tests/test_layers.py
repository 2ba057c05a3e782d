"""Schemes that treat layers differently: XQuant's shared quantized values, AsymKV's bit widths, and their cost in
bytes."""

import copy
import math
import re
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

import kvpass
from kvpass import KVPassError, Recent, Sinks, schemes
from kvpass.cache.state import KVState
from kvpass.codec import dequantize_pages, quantize_pages
from kvpass.codec.bitpack import unpack
from kvpass.codec.pages import share_codes
from kvpass.schemes import AsymKVConfig, LayerGeometry, XQuantConfig, check_sources

from common import DIM, coded, only_reference, randn, seeds
from tiny import llama, tokens


def geometry(index, num_layers=32, head_dim=64):
    return LayerGeometry(index, num_layers, 3, head_dim, torch.float32, torch.device("cpu"))


def plans(config, num_layers=32):
    return {index: config.plan(geometry(index, num_layers)) for index in range(num_layers)}


def prefilled(model, length=150, batch=2):
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        logits = model(input_ids=tokens(batch, length), past_key_values=cache).logits
        for seed in range(5):
            logits = model(input_ids=tokens(batch, 1, seed=seed), past_key_values=cache).logits
    return cache, logits


def four_layers():
    return llama(layers=4)


# ---------------------------------------------------------------- plans


def test_the_default_is_the_papers_1_38_bit_setting():
    """Table 9, Mistral: bits of stored quantized keys and values over 32 layers, as the paper counts them."""
    stored = 0
    for plan in plans(XQuantConfig()).values():
        stored += plan.key.bits * (plan.key_source is None) + plan.value.bits * (plan.value_source is None)
    assert stored / 64 == pytest.approx(1.375)


@pytest.mark.parametrize(
    "preset, bits",
    [
        ("xquant-mistral-hqa", 1.375),
        ("xquant-mistral-k2-msq", 1.375),
        ("xquant-llama2-truthfulqa", 1.40625),
        ("xquant-llama2-chat-trec", 1.40625),
    ],
)
def test_a_removed_preset_of_table_9_names_the_config_that_counts_as_in_the_paper(preset, bits):
    assert preset not in schemes.available()
    with pytest.raises(KVPassError, match="was removed") as refusal:
        schemes.get(preset)
    config = re.search(r"Use scheme=(XQuantConfig\(.+\)) instead", str(refusal.value))[1]
    stored = sum(
        spec.bits * (source is None)
        for plan in plans(eval(config)).values()
        for spec, source in ((plan.key, plan.key_source), (plan.value, plan.value_source))
    )
    assert stored / 64 == pytest.approx(bits)


@pytest.mark.parametrize("num_layers", [2, 16, 24, 30, 32, 36, 80])
@pytest.mark.parametrize("name", [n for n in schemes.available() if n.startswith(("xquant", "asymkv"))])
def test_presets_scale_to_the_depth_of_the_model(name, num_layers):
    config = schemes.get(name)
    check_sources(made := plans(config, num_layers))
    two = sum(plan.key.bits == 2 for plan in made.values())
    paper = config.kq if isinstance(config, XQuantConfig) else config.l_k
    assert abs(two - paper * num_layers / 32) <= 0.5


def test_pairs_share_from_the_even_layer_and_keep_their_own_scales():
    made = plans(XQuantConfig(kq=4, vq=0, km=4, vm=2, depth=None), 8)
    assert [plan.key_source for plan in made.values()] == [None] * 5 + [4, None, 6]
    assert [plan.value_source for plan in made.values()] == [None, None, None, 2, None, 4, None, 6]
    assert [plan.key.bits for plan in made.values()] == [2] * 4 + [1] * 4
    assert [plan.key.own_codes for plan in made.values()] == [1] * 5 + [0, 1, 0]


def test_groups_may_be_larger_and_another_layer_dominant():
    made = plans(XQuantConfig(kq=0, vq=0, km=0, vm=8, group_layers=3, dominant=1, depth=None), 8)
    assert [plan.key_source for plan in made.values()] == [1, None, 1, 4, None, 4, 7, None]


@pytest.mark.parametrize(
    "overrides, says",
    [
        (dict(dominant=2), "dominant=2 is out of range for group_layers=2"),
        (dict(fit="lsq", eta_1=0.0, eta_2=0.0, dominant=1), "dominant=0"),
        (dict(weights=(0.5, 0.6)), "sum to 1"),
        (dict(weights=(0.5, 0.5), group_layers=3), "must be group_layers=3 numbers"),
        (dict(weights=(0.0, 1.0)), "the first above 0"),
        (dict(rounding="floor"), "give the weights"),
        (dict(eta_1=0.5), r"eta=0.5.*\[0, 0.5\)"),
        (dict(fit="lsq"), "use eta=0 with it"),
        (dict(eta=0.1), "eta_1 and eta_2"),
        (dict(kq=-1), "kq=-1"),
        (dict(depth=0), "depth=0"),
    ],
)
def test_impossible_settings_are_refused_with_the_reason(overrides, says):
    with pytest.raises(KVPassError, match=says):
        XQuantConfig(**overrides)


def test_pairs_with_different_widths_are_refused_and_the_model_is_untouched():
    model = four_layers()
    with pytest.raises(KVPassError, match="Layers 2 and 3 share key codes but are stored differently"):
        kvpass.apply(model, scheme=XQuantConfig(kq=3, vq=0, km=0, vm=4, depth=None))
    assert "forward" not in vars(model)


# ---------------------------------------------------------------- identities


def contents(cache):
    for layer in cache.layers:
        for state in layer.states():
            used = state.spec.retention.pages(layer.tokens)
            yield from (getattr(state, name)[:, :, :used] for name in ("codes", "scale", "zero_point"))
            yield state.ring


@pytest.mark.parametrize(
    "config, same_as",
    [
        (XQuantConfig(kq=2, vq=1, km=4, vm=4, eta_1=0, eta_2=0, depth=None), AsymKVConfig(l_k=2, l_v=1, depth=None)),
        (XQuantConfig(kq=4, vq=4, km=4, vm=4, eta_1=0, eta_2=0, depth=None), schemes.get("kivi")),
        (AsymKVConfig(l_k=0, l_v=0, depth=None), schemes.get("kivi-1")),
    ],
    ids=["AsymKV", "KIVI", "KIVI, 1 bit"],
)
def test_without_eta_and_sharing_xquant_is(config, same_as):
    a, b = (prefilled(kvpass.apply(four_layers(), scheme=s, lowering="eager"))[0] for s in (config, same_as))
    for mine, theirs in zip(contents(a), contents(b), strict=True):
        assert torch.equal(mine, theirs)


SPEC = dict(bits=2, per="channel", group_size=16, page_size=16)


@given(seeds, st.sampled_from(("channel", "token")), st.sampled_from((1, 2, 4)), st.floats(0.5, 3), st.floats(-2, 2))
def test_sharing_is_exact_between_increasing_affine_maps(seed, per, bits, factor, shift):
    """As far as 16-bit scales and zero points allow: quantized values are equal except for ties."""
    own = coded(bits, per, 16, 16)
    shared = coded(bits, per, 16, 16, own_codes=0.0)
    x = randn(seed, 1, 2, 48, DIM)
    y = x * 2.0 ** round(factor) + shift
    codes, _, _ = quantize_pages(x, own)
    alone = quantize_pages(y, own)
    stored = share_codes(codes, y, quantize_pages(y, shared), shared)
    assert torch.equal(stored[0], codes) and torch.equal(stored[1], alone[1]) and torch.equal(stored[2], alone[2])
    differ = unpack(alone[0], bits) != unpack(codes, bits)
    assert differ.float().mean() < 0.01  # ties, decided by rounding of scales
    error = (dequantize_pages(*stored, shared) - y).abs()
    span = alone[1].float().max() * 0.5
    assert error.max() <= span * 1.02 + 0.01


@given(seeds, st.sampled_from(("channel", "token")))
def test_least_squares_on_shared_codes_beats_the_layers_own_scales(seed, per):
    x, y = randn(seed, 1, 2, 48, DIM), randn(seed + 1, 1, 2, 48, DIM)
    codes, _, _ = quantize_pages(x, coded(2, per, 16, 16))
    errors = []
    for fit in ("minmax", "lsq"):
        spec = coded(2, per, 16, 16, fit=fit, own_codes=0.0)
        stored = share_codes(codes, y, quantize_pages(y, spec), spec)
        assert torch.equal(stored[0], codes)
        errors.append((dequantize_pages(*stored, spec) - y).square().mean())
    assert errors[1] < errors[0] and errors[1] <= 1.01 * y.square().mean()


@given(seeds, st.sampled_from((0.25, 0.5, 0.75)))
def test_weights_average_codes_and_round(seed, weight):
    x, y = randn(seed, 1, 1, 32, DIM), randn(seed + 1, 1, 1, 32, DIM)
    spec = coded(**SPEC, own_codes=weight)
    theirs, mine = quantize_pages(x, spec)[0], quantize_pages(y, spec)
    codes = unpack(share_codes(theirs, y, mine, spec)[0], 2).double()
    average = (1 - weight) * unpack(theirs, 2).double() + weight * unpack(mine[0], 2).double()
    assert (codes - average).abs().max() <= 0.5


@given(seeds, st.sampled_from(("floor", "ceil")))
def test_averages_are_rounded_down_or_up(seed, rounding):
    x, y = randn(seed, 1, 1, 32, DIM), randn(seed + 1, 1, 1, 32, DIM)
    for weight, exactly in ((0.5, Fraction(1, 2)), (1 / 3, Fraction(1, 3))):
        spec = coded(**SPEC, own_codes=weight, rounding=rounding)
        theirs, mine = quantize_pages(x, spec)[0], quantize_pages(y, spec)
        codes = unpack(share_codes(theirs, y, mine, spec)[0], 2)
        for got, a, b in zip(
            *(t.flatten().tolist() for t in (codes, unpack(theirs, 2), unpack(mine[0], 2))), strict=True
        ):
            assert got == getattr(math, rounding)(a + exactly * (b - a))


@torch.no_grad()
def test_groups_of_three_average_the_codes_of_all_in_turn():
    weights = (0.5, 0.25, 0.25)
    config = XQuantConfig(kq=3, vq=3, km=0, vm=0, group_layers=3, weights=weights, rounding="floor", depth=None)
    alone = XQuantConfig(kq=3, vq=3, km=3, vm=3, depth=None)
    assert [plan.key.own_codes for plan in plans(config, 3).values()] == pytest.approx([1, 1 / 3, 1 / 4])
    caches = []
    for each in (config, alone):
        model = kvpass.apply(llama(layers=3), scheme=each, lowering="eager")
        cache = model(input_ids=tokens(1, 80), use_cache=True).past_key_values
        caches.append(cache.layers)
    assert caches[0][1].key_state.codes is caches[0][2].key_state.codes is caches[0][0].key_state.codes
    one, two, three = (unpack(layer.key_state.codes[:, :, :2], 2).double() for layer in caches[1])
    expected = ((((one + (two - one) / 3) + 1e-6).floor()) * 3 / 4 + three / 4 + 1e-6).floor()
    assert torch.equal(unpack(caches[0][0].key_state.codes[:, :, :2], 2).double(), expected)


# ---------------------------------------------------------------- in a cache


SHARING = XQuantConfig(kq=2, vq=0, km=2, vm=0, depth=None)


def test_shared_codes_are_stored_once_and_the_report_shows_it():
    model = kvpass.apply(four_layers(), scheme=SHARING, lowering="eager")
    cache, _ = prefilled(model)
    for index, layer in enumerate(cache.layers):
        assert (layer.key_state.source is not None) == (index == 3)
        assert (layer.value_state.source is not None) == (index in (1, 3))
    assert cache.layers[3].key_state.codes is cache.layers[2].key_state.codes
    report = kvpass.explain(model)
    assert report.nbytes == kvpass.nbytes(cache)
    assert report.layers[3].nbytes < report.layers[2].nbytes
    assert "with the quantized values of layer 2" in report.layers[3].plan


def test_shared_codes_follow_growth_copies_beams_and_resets():
    model = kvpass.apply(four_layers(), scheme=SHARING, lowering="eager")
    cache, _ = prefilled(model)
    other = copy.deepcopy(cache)
    assert other.layers[3].key_state.source is other.layers[2].key_state
    order = torch.tensor([1, 0])
    expected = [state.dequantize(155)[order] for layer in cache.layers for state in layer.states()]
    cache.reorder_cache(order)
    got = [state.dequantize(155) for layer in cache.layers for state in layer.states()]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    with torch.no_grad():
        model(input_ids=tokens(2, 300), past_key_values=other)
    assert other.layers[3].key_state.codes.shape[2] >= other.layers[3].key_state.spec.retention.pages(455)
    other.reset()
    with torch.no_grad():
        model(input_ids=tokens(3, 40), past_key_values=other)
    assert other.layers[3].key_state.source is other.layers[2].key_state


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        SHARING,
        XQuantConfig(kq=0, vq=0, km=0, vm=0, dominant=1, depth=None),
        XQuantConfig(kq=0, vq=0, km=0, vm=0, weights=(0.5, 0.5), depth=None),
        schemes.get("xquant-lsq", kq=4, km=0, vq=0, vm=0, depth=None),
    ],
    ids=["pairs", "the second dominates", "averaged", "least squares"],
)
def test_compiled_contents_equal_eager_contents(config):
    torch._dynamo.reset()
    made = [kvpass.apply(four_layers(), scheme=config, lowering=lowering) for lowering in ("auto", "eager")]
    (a, logits), (b, expected) = (prefilled(model) for model in made)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert kvpass.explain(made[0]).fused == 4
    for mine, theirs in zip(a.layers, b.layers, strict=True):
        for one, two in zip(mine.states(), theirs.states(), strict=True):
            assert torch.equal(one.codes, two.codes)  # the page that 5 steps packed holds tokens of the prefill only
            assert torch.equal(one.scale, two.scale)


# ---------------------------------------------------------------- bytes


def closed_form(name: str, tokens: int, batch: int, heads: int, dim: int, index: int, depth: int) -> int:
    """Bytes of one layer of a float32 model with ``tokens`` allocated tokens, from the description of the scheme."""
    if name == "identity":
        raise AssertionError("not a quantizer")
    group, k_page, k_keep, v_page, v_keep, sinks = 32, 32, 0, 32, 32, 0
    k_bits, v_bits, k_own, v_own, k_per = 2, 2, True, True, "channel"
    if name.startswith("kivi-") and name[-1].isdigit():
        k_bits = v_bits = int(name[-1])
    if name == "kivi-sinks":
        sinks = 4
    if name.startswith("rtn"):
        k_bits = v_bits = int(name[-1]) if name[-1].isdigit() else 4
        group, k_per = 64, "token"
    if name in ("logquant", "logquant-twin"):
        k_keep = v_keep = 64
        sinks = int(name == "logquant-twin")
    if name.startswith("asymkv"):
        v_bits = 1
    if name.startswith("xquant"):
        k_bits = 2 if index < round(30 / 32 * depth) else 1
        v_bits = 2 if index < round(2 / 32 * depth) else 1
        v_own = index < round(16 / 32 * depth) or index % 2 == 0
    total = 0
    for bits, own, page, keep, per in (
        (k_bits, k_own, k_page, k_keep, k_per),
        (v_bits, v_own, v_page, v_keep, "token"),
    ):
        pages = max(4, (tokens - sinks - keep) // page)
        codes = pages * page * dim * bits // 8 * own
        groups = pages * (page // group * dim if per == "channel" else page * dim // group)
        exact = (sinks + keep + page + 16) * dim * 4
        total += batch * heads * (codes + groups * 2 * 2 + exact)
    if name.startswith("squat"):
        total += batch * heads * (dim // 2) ** 2 * 2
    return total


@pytest.mark.parametrize(
    "name", ["kivi", "kivi-1", "kivi-3", "kivi-4", "kivi-8", "kivi-lsq", "kivi-sinks", "kivi-pre", "squat", "rtn",
             "rtn-2", "logquant", "logquant-twin", "asymkv", "asymkv-lsq", "xquant"],
)  # fmt: skip
def test_bytes_and_bits_per_value_equal_a_closed_form_count(name):
    config = dict(heads=2, kv_heads=1, head_dim=64, layers=4)
    model = kvpass.apply(llama(**config), scheme=name, lowering="eager", max_cache_len=500)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=tokens(2, 450), past_key_values=cache)
    expected = sum(closed_form(name, 500, 2, 1, 64, index, 4) for index in range(4))
    if name == "kivi-pre":
        expected += 2 * 2 * 500 * 32 * 4  # cos and sin once: batch, tokens, pairs, float32
    assert kvpass.nbytes(cache) == expected
    assert kvpass.bits_per_value(cache) == 8 * expected / (2 * 4 * 2 * 450 * 64)


@pytest.mark.parametrize(
    "config",
    [schemes.get("kivi", retention=Sinks(2) + Recent(64, page_size=32)), schemes.get("squat", sinks=4)],
    ids=str,
)
def test_policies_change_bytes_by_the_tokens_they_keep(config):
    spec = config.plan(geometry(0)).key
    state = KVState.allocate(spec, 1, 1, 64, torch.float32, "cpu", 1000)
    with only_reference():
        assert state.ring.shape[2] == spec.retention.sinks + spec.retention.window + 16

"""Bits allocated by a calibration: page contents against formulas, how bits are allocated, and what caches share."""

import copy
import gc
import itertools
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tqdm import tqdm
from transformers import DynamicCache

import kvpass
from kvpass import KVPassError, NonFiniteError
from kvpass.cache.per_cache import RotaryState
from kvpass.cache.state import KVState, ModelTensors
from kvpass.calibration import sensitivity, water_filling
from kvpass.calibration.water_filling import Statistics, Turn, add_text, find_turns, measure, repeating
from kvpass.codec import CodecSpec, Quantizer, Shares, Transform, dequantize_pages, parse, quantize_pages
from kvpass.codec.layer_pages import fields_of, high_precision_masks, share_of
from kvpass.codec.page_rope import numbered
from kvpass.codec.shares import page_bytes, water_fill
from kvpass.codec.tensors import of_model
from kvpass.codec.transform_coding import DISTORTION, STEPS, WIDEST, divided
from kvpass.layout.retention import HeavyHitter, Retention
from kvpass.lowering.cpp import attend_allocated, dequantize_allocated, few_tokens, quantize_allocated
from kvpass.lowering.table import DispatchKey, select
from kvpass.models.probe import fresh_cache, probe
from kvpass.runtime.simulated import Simulator
from kvpass.schemes import CalibratedWaterfillConfig, LayerGeometry, get

from common import generator, randn, seeds
from shared_bits import shared_tensors
from test_allocation import chosen_by_hand, mixed, whole
from tiny import llama, step_by_step, tokens

HEAD, HEADS, CPU = 32, 3, torch.device("cpu")
SMALL = dict(scheme="waterfill-static", recent=16, residual=16, sinks=2, block_size=8)
FORMS = pytest.mark.parametrize("form", ["static", "hybrid"])


def spec_of(follows=False, ranked=True, adapts=False, size=32):
    shares = Shares(8, ranked, follows, adapts)
    return CodecSpec(Quantizer(8, "token", HEAD, codec=shares), Retention(size + 8, size, 2))


def given_of(spec, seed=0):
    return dict(zip(of_model(spec), shared_tensors(spec, HEADS, HEAD, seed), strict=True))


def fitted(spec, given, rich=None):
    """The arguments of `quantize`."""
    names = ["share", "basis", "widths", *(["queries"] if spec.quantizer.chooses else [])]
    return [given[name] for name in names] + ([] if rich is None else [rich])


# ---------------------------------------------------------------- codec


@pytest.mark.parametrize("ranked", [True, False])
@given(seeds)
def test_pages_dequantize_as_the_formulas_define(ranked, seed):
    """Token by token and coordinate by coordinate in float64, without packing: the best of five gains, quantized values
    of each bit width, and the half of a page with the most attention first."""
    spec = spec_of(ranked=ranked)
    given, x, size = given_of(spec, seed % 1000), mixed(seed % 1000, 2, HEADS, 64, HEAD), 32
    (pages,) = quantize_pages(x, spec, fitted(spec, given))
    found = dequantize_pages(pages, given["basis"], given["widths"], spec)
    table, distortion = torch.tensor([1.0, *STEPS]).double(), torch.tensor(DISTORTION).double()
    for b, h, n in itertools.product(range(2), range(HEADS), range(2)):
        page = x[b, h, n * size : (n + 1) * size]
        basis = given["basis"][0, h]
        rows = whole(basis)
        rich = chosen_by_hand(page, given["queries"][0, h], basis) if ranked else set()
        for t in range(0, size, 5):
            widths = given["widths"][0, h, 0 if not ranked or t in rich else 1].long()
            units, used = page[t].double() @ torch.linalg.inv(rows), widths > 0
            if not used.any():
                assert (found[b, h, n * size + t] == 0).all()
                continue
            level = round(16 * float(units[used].square().mean().sqrt().log2()))
            tried = []
            for more, rounding in itertools.product((0, -6, -3, 3, 6), (0, -1e-5, 1e-5)):  # float32 rounds otherwise
                step, most = table[widths] * 2 ** ((level + more) / 16), 2.0**widths - 1
                codes = (units / step + most / 2 + rounding).round().clamp(min=0).minimum(most)
                coded = (codes - most / 2) * step * used
                tried.append((float(((coded - units).square() / distortion[widths])[used].sum()), coded @ rows))
            best, expected = min(tried, key=lambda one: one[0])
            error = (found[b, h, n * size + t].double() - expected).abs().max()
            if error > 1e-3 * expected.abs().max() + 1e-5:  # rounded differently in float32, or another gain
                errors = [
                    abs(cost - best) for cost, other in tried if (other - found[b, h, n * size + t]).abs().max() < 1e-2
                ]
                assert errors and min(errors) < 1e-3 * best


@given(seeds, st.integers(1, 6))
def test_fields_are_the_bits_of_widths(seed, heads):
    widths = torch.randint(0, WIDEST + 1, (heads, 1, 16), generator=generator(seed))
    share = share_of(widths)[0].tolist()
    bits = torch.zeros(heads * 16, dtype=torch.long)
    for single, (starts, worth) in enumerate(zip(share[:2], (2, 1), strict=True)):
        channels, shifts = fields_of(widths[None, :, 0].to(torch.uint8), starts, bool(single))
        assert len(channels[0]) == starts[-1]
        for channel, shift in zip(channels[0].tolist(), shifts[0].tolist(), strict=True):
            bits[channel] |= (2**worth - 1) << shift  # a bit used twice would break the sum
    assert torch.equal(bits, 2 ** widths.flatten() - 1)
    assert share[2] == torch.cat([torch.zeros(1).long(), (widths.amax((1, 2)) > 0).cumsum(0)]).tolist()


@FORMS
def test_pages_have_the_allocated_size(form):
    spec = spec_of(adapts=form == "hybrid")
    given = given_of(spec)
    counts = given["share"].diff(dim=-1).sum(-1)
    bits = (16 * (2 * counts[:, 0] + counts[:, 1] + 8 * counts[:, 2])).sum() + 32 * HEADS
    assert page_bytes(given["share"], spec) * 8 == int(bits)


@pytest.mark.compiles
@pytest.mark.slow_cases("*-bfloat16", "*-False-float16")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize(("ranked", "adapts"), [(True, False), (False, False), (True, True)])
def test_kernels_make_the_same_pages(ranked, adapts, dtype):
    """Of keys and of values that follow them, with tensors of the model or of each sample."""
    x, key_pages = mixed(1, 2, HEADS, 64, HEAD), None
    for follows in (False, True) if ranked else (False,):
        spec = spec_of(follows, ranked, adapts)
        given = dict(zip(of_model(spec), shared_tensors(spec, HEADS, HEAD, 1, dtype), strict=True))
        if adapts:
            widths = torch.stack([shared_tensors(spec_of(), HEADS, HEAD, 1)[2][0]] * 2)
            basis = torch.linalg.qr(randn(2, 2, HEADS, 4, 8, 8)).Q.flatten(2, 3)
            given |= {"basis": (basis * torch.tensor([1.0, 2.0]).view(2, 1, 1, 1)).to(dtype), "widths": widths}
        chosen = [given["queries"]] if ranked and not follows else []
        if key_pages is not None:
            chosen = [high_precision_masks(key_pages, 32, HEADS)]
        tensors = [given["share"], given["basis"], given["widths"]]
        (key_pages,) = quantize_pages(x, spec, tensors + chosen)
        (pages,) = quantize_allocated.quantize(x, tensors + chosen, spec)
        assert (pages != key_pages).float().mean() < 1e-3  # sums of another order round differently
        values = dequantize_allocated.dequantize_pages([key_pages, *tensors[1:]], spec)
        torch.testing.assert_close(values, dequantize_pages(key_pages, *tensors[1:], spec), atol=1e-4, rtol=1e-4)
        for op in ("quantize", "dequantize", "append_", "append_layers_"):
            assert select(DispatchKey(op, "cpu", (str(spec),), head_dim=HEAD)).name == "cpp"


@pytest.mark.parametrize("ranked", [True, False])
def test_any_bytes_are_dequantized(ranked):
    """A server's blocks are also read where nothing is stored yet."""
    spec = spec_of(ranked=ranked)
    given = given_of(spec)
    (pages,) = quantize_pages(mixed(1, 2, HEADS, 64, HEAD), spec, fitted(spec, given))
    for seed in range(8):
        drawn = torch.randint(0, 256, pages.shape, dtype=torch.uint8, generator=generator(seed))
        found = dequantize_pages(drawn, given["basis"], given["widths"], spec)
        assert found.shape == (2, HEADS, 64, HEAD)


def test_values_follow_their_keys():
    keys, values = spec_of(), spec_of(follows=True)
    given = given_of(keys)
    x, y = mixed(1, 2, HEADS, 64, HEAD), mixed(2, 2, HEADS, 64, HEAD)
    (pages,) = quantize_pages(x, keys, fitted(keys, given))
    rich = high_precision_masks(pages, 32, HEADS)
    own = given_of(values, seed=7)
    (of_values,) = quantize_pages(y, values, fitted(values, own, rich))
    assert torch.equal(high_precision_masks(of_values, 32, HEADS), rich)


def test_non_finite_tokens_are_refused():
    spec = spec_of()
    with pytest.raises(NonFiniteError):
        quantize_pages(mixed(0, 1, HEADS, 32, HEAD) * torch.nan, spec, fitted(spec, given_of(spec)))


@given(seeds, st.integers(0, 40), st.sampled_from([1.0, 0.25]))
def test_no_move_of_a_bit_lowers_the_cost(seed, bits, size):
    """Three heads, of which the last one's bits count as ``size`` of a bit: those of a sliding window."""
    cost, sizes = torch.exp2(6 * randn(seed, 3, 8)).double(), torch.tensor([1, 1, size]).view(3, 1).expand(3, 8)
    widths, saved = water_fill(cost, bits, sizes).long(), torch.tensor(DISTORTION).double()
    assert bits - 1 < (widths * sizes).sum() <= bits and widths.max() <= WIDEST
    cost = cost / sizes
    last = torch.where(widths > 0, cost * (saved[(widths - 1).clamp_min(0)] - saved[widths]), torch.inf)
    more = torch.where(widths < WIDEST, cost * (saved[widths] - saved[(widths + 1).clamp(max=WIDEST)]), 0)
    assert last.min() >= more.max() * (1 - 1e-12)
    if size == 1:
        assert torch.equal(widths, water_fill(cost, bits).long())


def test_too_many_bits_are_refused():
    with pytest.raises(KVPassError, match="coordinates take 0 to"):
        water_fill(torch.ones(4), 4 * WIDEST + 1)


@given(seeds, st.integers(0, 20), st.integers(0, 16))
def test_bits_of_a_head_are_divided_in_order(seed, pairs, singles):
    """Whatever other heads get."""
    cost, more = torch.exp2(3 * randn(seed, 2, 16)).double(), torch.tensor([0, 5])
    widths = divided(cost, pairs + more, singles - more.clamp(max=singles))
    assert ((widths // 2).sum(-1) == pairs + more).all()
    assert ((widths % 2).sum(-1) == singles - more.clamp(max=singles)).all()
    assert torch.equal(widths[0], divided(cost[0], torch.tensor(pairs), torch.tensor(singles)))


def test_specs_round_trip_through_text():
    for spec in (spec_of(), spec_of(follows=True), spec_of(adapts=True), spec_of(ranked=False)):
        assert parse(str(spec)) == spec
    with pytest.raises(KVPassError, match="multiple of 16"):
        spec_of(size=24)
    with pytest.raises(KVPassError, match="need bits=8"):
        CodecSpec(Quantizer(4, "token", HEAD, codec=Shares(8)), Retention(16, 16))
    with pytest.raises(KVPassError, match="ranked=True"):
        Shares(8, ranked=False, follows=True)
    with pytest.raises(KVPassError, match="page_rope=True"):
        Transform(numbered="half-8")


# ---------------------------------------------------------------- page-relative RoPE by token numbers


@pytest.mark.parametrize("rope", ["half-8", "interleaved-16"])
def test_numbered_page_rotations_equal_those_of_tables(rope):
    """Tables computed from angles alone equal those stored from a model's tables, at positions that are token
    numbers."""
    pairs = int(rope.split("-")[1])
    angles = 50.0 ** (-torch.arange(pairs) / pairs)
    plan = get("waterfill-static", ropes=(rope,), residual=16).plan(LayerGeometry(0, 1, 1, 32, torch.float32, CPU))
    ours = RotaryState(plan.key, 1, 32, torch.float32, CPU, 100, angles)
    turned = torch.arange(200)[None, :, None] * angles.double()
    theirs = RotaryState.of(plan.key, turned.cos().float(), turned.sin().float())
    rows = 16 + (100 - plan.key.retention.sinks) // 16
    for mine, other in ((ours.cos, theirs.cos), (ours.sin, theirs.sin)):
        torch.testing.assert_close(mine[:, 16:rows, :pairs], other[:, 16:rows, :pairs])
    before = ours.cos.clone()
    ours.reserve(1000)
    assert torch.equal(ours.cos[:, : before.shape[1]], before)
    starts = torch.zeros(1, 1, dtype=torch.int64)
    whole = numbered(angles, starts, 0, ours.cos.shape[1], plan.key.retention.sinks, 16)[0].float()
    torch.testing.assert_close(ours.cos[..., :pairs], whole)


def test_padding_is_not_counted(models):
    """In a padded row, page-relative RoPE counts only the row's own tokens."""
    model, calibrations = models
    kvpass.apply(model, calibrations["static"], lowering="eager")
    try:
        ids, mask = tokens(2, 90), torch.ones(2, 90, dtype=torch.long)
        mask[1, :13] = 0
        cache = DynamicCache(config=model.config)
        model(ids, attention_mask=mask, past_key_values=cache)
        rotary, angles = cache.layers[0].rotary, calibrations["static"].predictors[0][0][0]
        middles = 2 + 16 * torch.arange(4) + 8
        for row, start in ((0, 0), (1, 13)):
            turned = (middles - start)[:, None] * angles
            torch.testing.assert_close(rotary.cos[row, 16:20, :16], turned.cos(), atol=1e-4, rtol=1e-4)
        cache.reorder_cache(torch.tensor([1, 0]))
        assert rotary.starts.tolist() == [[13], [0]]
        cache.reset()
        model(ids, past_key_values=cache)
        assert not cache.layers[0].rotary.starts.any()
    finally:
        kvpass.remove(model)


# ---------------------------------------------------------------- states and kernels


def states(plan, shape, dtype, n, total=None, seed=0):
    """Key and value states of ``plan`` with synthetic shares and ``n`` tokens, and the tokens after them, up to
    ``total``."""
    total = n + 1 if total is None else total
    batch, heads, queries, dim = shape
    kept = torch.float16 if dtype == torch.float32 else dtype
    found = []
    for i, spec in enumerate((plan.key, plan.value)):
        tensors = shared_tensors(spec, heads, dim, seed + i, kept)
        angles = tensors[0] if spec.transform.numbered else None
        own = ModelTensors(tensors[1:] if angles is not None else tensors)
        state = KVState.allocate(spec, batch, heads, dim, dtype, CPU, n, shared=own)
        if angles is not None:
            state.rotary = RotaryState(spec, batch, dim, dtype, CPU, total, angles)
        found.append(state)
    key, value = found
    value.same_layer_keys = key
    k, v = (randn(seed, batch, heads, total, dim).to(dtype) for seed in (1, 2))
    key.append(k[:, :, :n], 0)
    value.append(v[:, :, :n], 0)
    q = randn(3, batch, heads * queries, 1, dim).to(dtype)
    return key, value, q, k, v


@pytest.mark.slow_cases("dtype[12]-*")
@FORMS
@pytest.mark.parametrize(
    ("dtype", "shape", "fields"),
    [
        (torch.float32, (2, 3, 3, 64), dict(ropes=("half-32",))),
        (torch.bfloat16, (1, 2, 5, 32), dict(ropes=("interleaved-8",), residual=16)),
        (torch.float32, (1, 2, 1, 128), dict(ranked=False)),
    ],
)
def test_attention_of_one_token_equals_the_reference(form, dtype, shape, fields):
    """In C++: tokens that fill no page, that fill some, and enough for several threads."""
    plan = get("waterfill-static", form=form, **fields).plan(LayerGeometry(0, 1, shape[1], shape[3], dtype, CPU))
    assert few_tokens.kernel_of(plan.key, plan.value, shape[3], dtype) is attend_allocated.attend
    for n in (100, 165, 700):
        key, value, q, k, v = states(plan, shape, dtype, n)
        new = [x[:, :, n:] for x in (k, v)]
        arguments = (
            q,
            key.pack,
            value.pack,
            key.length_tensor(n),
            *new,
            None,
            False,
            shape[3] ** -0.5,
            0.0,
            key.text,
            value.text,
        )
        got, expected = (torch.ops.kvpass.attend(*arguments, name, **key.tables())[0] for name in ("cpp", "reference"))
        error = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(got, expected, atol=error, rtol=error)


@FORMS
def test_tokens_are_stored_the_same_however_they_come(form):
    plan = get("waterfill-static", form=form, ropes=("half-8",), residual=16, recent=0).plan(
        LayerGeometry(0, 1, 2, 32, torch.float32, CPU)
    )
    n = 200
    key, value, _, k, v = states(plan, (2, 2, 2, 32), torch.float32, n)
    again, behind, *_ = states(plan, (2, 2, 2, 32), torch.float32, 60, n + 1)
    for start in range(60, n, 7):
        stop = min(start + 7, n)
        again.append(k[:, :, start:stop], start)
        behind.append(v[:, :, start:stop], start)
    if form == "static":  # the hybrid is fitted to the tokens packed first, which are fewer here
        assert torch.equal(key.dequantize(n), again.dequantize(n)) and torch.equal(
            value.dequantize(n), behind.dequantize(n)
        )
    for state, other in ((key, again), (value, behind)):
        assert state.nbytes == sum(tensor.nbytes for _, tensor in state.tensors())
        copied = copy.deepcopy(other)
        assert all(mine is theirs for mine, theirs in zip(copied.shared, other.shared, strict=True))
        assert torch.equal(copied.dequantize(n), other.dequantize(n))
        before = other.dequantize(n)
        other.map_(lambda tensor: tensor[[1, 0]].contiguous())
        assert torch.equal(other.dequantize(n), before[[1, 0]])


def test_a_state_without_its_shares_is_refused():
    plan = get("waterfill-static").plan(LayerGeometry(0, 1, 2, 32, torch.float32, CPU))
    with pytest.raises(KVPassError, match=r"This codec takes . calibrated tensors"):
        KVState.allocate(plan.key, 1, 2, 32, torch.float32, CPU, 100)


# ---------------------------------------------------------------- calibrated models


@pytest.fixture(scope="module")
def models():
    """A model, and its calibrations by form."""
    model = llama(layers=3)
    data = tokens(4, 160, seed=1)
    return model, {
        form: kvpass.calibrate(model, data, {**SMALL, "form": form}, progress=False) for form in ("static", "hybrid")
    }


def test_calibrations_report_the_size_of_a_cache(models):
    model, calibrations = models
    for form, calibration in calibrations.items():
        assert calibration.scheme.form == form and calibration.scheme.ropes == ("half-16",) * 3
        bits = [_bits(tensors) for both in calibration.predictors.values() for tensors in both]
        assert sum(bits) == round(2.06 * 3 * 2 * 2 * 32 * 2)  # layers, roles, heads, channels, ranks
        theta = model.config.rope_parameters["rope_theta"]
        angles = theta ** (-torch.arange(16) / 16)
        torch.testing.assert_close(calibration.predictors[0][0][0], angles, rtol=1e-4, atol=1e-7)


def _bits(tensors):
    share = next(tensor for tensor in tensors if tensor.dtype == torch.int32)
    return int((share[..., -1] * torch.tensor([2, 1, 0])).sum())


@pytest.mark.parametrize("rope", ["half-32", "half-8", "interleaved-32", ""])
def test_the_rotation_of_keys_is_found_although_few_channels_have_most_of_the_energy(rope):
    """Keys as in Gemma 3: the largest channel belongs to a pair that one position hardly turns."""
    size, pairs = 64, int(rope.partition("-")[2] or 1)
    keys = randn(0, 2, 16, size)
    keys[..., {"half-8": 7, "interleaved-32": 62}.get(rope, 31)] += 200
    angles = torch.linspace(0, 1, pairs).neg().mul(14).exp()
    turned = {shift: Turn(rope, angles)(keys, torch.full((16,), shift)) for shift in (0, *water_filling._SHIFTS)}
    found = water_filling._turn(turned)
    assert found.rope == rope
    if rope:
        torch.testing.assert_close(found.angles, angles, rtol=1e-3, atol=1e-6)


@torch.no_grad()
def test_statistics_of_texts_add_up():
    model, data, config = llama(layers=1), [tokens(1, 100, seed=i) for i in range(2)], get(SMALL)
    layers = probe(model)
    turns, draws = find_turns(model, layers, data[0][:, :16]), torch.Generator().manual_seed(0)
    parts = []
    for ids, repeated in [(data[0], False), (data[1], False), (repeating(data[0]), True)]:
        parts.append({0: Statistics(layers[0], turns[0])})
        add_text(parts[-1], model, ids, config, repeated, draws)
    merged, others = parts[0][0], (parts[1][0], parts[2][0])
    for part in others:
        merged.merge(part)
    whole = measure(model, data, layers, turns, config, tqdm(disable=True))[0]
    assert merged.tokens == whole.tokens == 2 * (100 - SMALL["sinks"])
    for name in ("mean", "moments", "fisher", "queries"):
        torch.testing.assert_close(getattr(merged, name), getattr(whole, name))


def test_reading_a_text_leaves_nothing_behind(monkeypatch):
    """Neither the cache, which holds the whole graph, nor a changed weight: a model is calibrated on many texts."""
    model, caches = llama(layers=2), []
    model.lm_head.weight.requires_grad_(False)
    before = [parameter.requires_grad for parameter in model.parameters()]

    def fresh(model):
        cache = fresh_cache(model)
        caches.append(weakref.ref(cache))
        return cache

    monkeypatch.setattr(sensitivity, "fresh_cache", fresh)
    gc.disable()
    try:
        found = sensitivity.look(model, tokens(1, 24), probe(model), {0: 8, 1: 8}, 0, generator(0))
        assert found and caches and not any(cache() for cache in caches)
    finally:
        gc.enable()
    assert [parameter.requires_grad for parameter in model.parameters()] == before


@FORMS
def test_decoding_equals_one_simulated_pass(models, form):
    model, calibrations = models
    ids = tokens(1, 110, seed=5)
    with torch.no_grad():
        full = model(ids).logits[0, 80:]
    eager, cache, report = step_by_step(model, calibrations[form], ids, 80, lowering="eager")
    found = Simulator(model).logits(ids, 80, calibrations[form])
    torch.testing.assert_close(eager[0, 1:], found, atol=5e-4, rtol=1e-3)  # a value may round to its other neighbour
    assert 2e-3 < (eager[0, 1:] - full).abs().max() < 0.2
    own = sum(layer.nbytes for layer in cache.layers)
    assert abs(kvpass.nbytes(cache) - own) < 200  # length tensor
    assert "shared by all caches" in str(report)


def test_prompts_are_not_captured(models):
    model, calibrations = models
    kvpass.apply(model, calibrations["static"])
    try:
        assert not kvpass.explain(model).graphs and not model._kvpass.captures
        model(tokens(1, 50))
        assert not kvpass.explain(model).graphs
    finally:
        kvpass.remove(model)


def test_calibrations_survive_saving_and_loading(models, tmp_path):
    model, calibrations = models
    for form, calibration in calibrations.items():
        loaded = kvpass.load(calibration.save(tmp_path / form))
        assert loaded.scheme == calibration.scheme and loaded.nbytes == calibration.nbytes
        ids = tokens(1, 70, seed=6)
        mine, theirs = (step_by_step(model, one, ids, 60, lowering="eager")[0] for one in (calibration, loaded))
        assert torch.equal(mine, theirs)


def test_a_saved_cache_continues(models, tmp_path):
    model, calibrations = models
    kvpass.apply(model, calibrations["static"], lowering="eager")
    try:
        cache = model(tokens(1, 100), use_cache=True).past_key_values
        path = kvpass.save_cache(cache, tmp_path / "cache.safetensors")
        again = kvpass.load_cache(path, model)
        following = tokens(1, 3, seed=9)
        mine, theirs = (model(following, past_key_values=one).logits for one in (cache, again))
        assert torch.equal(mine, theirs)
    finally:
        kvpass.remove(model)


def test_shares_that_do_not_fit_are_refused(models):
    _, calibrations = models
    calibration = calibrations["static"]
    tensors = {i: ([t.clone() for t in k], [t.clone() for t in v]) for i, (k, v) in calibration.predictors.items()}
    share = next(t for t in tensors[1][1] if t.dtype == torch.int32)
    share[0, 0, -1] += 1
    made = type(calibration)
    with pytest.raises(KVPassError, match="shares of the heads of layer 1"):
        made(calibration.scheme, tensors, calibration.model, {}, {})
    share[0, 0, -1] -= 1
    steps = tensors[1][1][
        of_model(calibration.scheme.plan(LayerGeometry(1, 1, 2, 32, torch.float32, CPU)).value).index("steps")
    ]
    steps[0, 0, 0, 0] = 0
    with pytest.raises(KVPassError, match="Step sizes of layer 1 are not above 0"):
        made(calibration.scheme, tensors, calibration.model, {}, {})
    with pytest.raises(KVPassError, match="ropes must describe"):
        made(get(calibration.scheme, ropes=("half-16",)), calibration.predictors, calibration.model, {}, {})


def test_impossible_settings_are_refused():
    for fields, says in (
        (dict(bits=0.0), "must be above 0"),
        (dict(rope="pre"), "leave rope"),
        (dict(sinks=0, retention=HeavyHitter(32, recent=32)), "neither evicts nor thins out"),
        (dict(sinks=4, residual=24), "multiple of 16"),
    ):
        with pytest.raises(KVPassError, match=says):
            CalibratedWaterfillConfig(**fields)
    with pytest.raises(KVPassError, match="must be calibrated"):
        kvpass.apply(llama(layers=1), "waterfill-static")

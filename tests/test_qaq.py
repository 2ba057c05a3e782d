"""QAQ's per-token bit widths: the formulas of the paper, bit planes, and the cache around them."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

import kvpass
from kvpass import KVPassError, schemes
from kvpass.cache.adaptive_state import AdaptiveState, PlanePool
from kvpass.cache.per_cache import RecentAttention
from kvpass.codec.adaptive import (
    allowed_deviation,
    assign_cells,
    carve,
    fit_range,
    from_planes,
    largest_mass,
    levels_for,
    pack_levels,
    split_outliers,
    to_planes,
    unpack_levels,
)
from kvpass.codec.spec import Adaptive
from kvpass.lowering.fit_sequence import query_energy
from kvpass.lowering.reference import attention_mass
from kvpass.schemes import QAQConfig

from common import DIM, dense_call, naive_attention, only_reference, randn, seeds
from tiny import llama, step_by_step, tokens

pytestmark = pytest.mark.usefixtures("nothing_compiled")

HEADS = 2
WIDTHS = ((2, 3, 4), (2, 4, 8), (1, 2), (4,), (2, 3, 4, 8), (0, 1, 2, 3, 4, 5, 6, 7, 8), (0, 2))
widths = st.sampled_from(WIDTHS)


def value_rule(widths=(2, 3, 4), sigma=0.05):
    return Adaptive(widths, "value", sigma, 0.01, 5)


# ---------------------------------------------------------------- quantized values


@given(widths, st.integers(1, 40), seeds)
def test_planes_hold_the_high_bits_each_token_has(widths, count, seed):
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2 ** widths[-1], (2, HEADS, count, DIM), generator=g, dtype=torch.uint8)
    levels = torch.randint(0, len(widths), (2, HEADS, count), generator=g, dtype=torch.uint8)
    planes = to_planes(codes, levels, widths)
    got = from_planes(planes, levels, widths)
    for place in torch.cartesian_prod(*map(torch.arange, levels.shape)).tolist():
        b, h, t = place
        dropped = widths[-1] - widths[levels[b, h, t]]
        assert got[b, h, t].tolist() == [code >> dropped << dropped for code in codes[b, h, t].tolist()]
    rows = [int((levels >= i).sum(-1).amax()) for i in range(len(widths))]
    assert [plane.shape[2] for plane in planes] == rows
    data, places = torch.cat([plane.reshape(-1) for plane in planes]), []
    for plane in planes:
        start = sum(other.numel() for other in planes[: len(places)])
        places.append([start, *plane.shape[2:]])
    assert all(map(torch.equal, carve(data, torch.tensor(places), (2, HEADS)), planes))


@given(st.integers(1, 5), st.sampled_from([1, 2, 4, 32]), st.integers(1, 9), seeds)
def test_levels_survive_packing(pages, size, classes, seed):
    levels = torch.randint(0, classes, (2, HEADS, size * pages), generator=torch.Generator().manual_seed(seed))
    packed = pack_levels(levels.to(torch.uint8), size, classes)
    assert torch.equal(unpack_levels(packed, size, classes), levels.to(torch.uint8))
    assert packed.shape[-1] * 8 <= size * (8 if size == 1 else 4 if classes > 4 or size == 2 else 2)


@given(st.sampled_from((0.0, 0.02, 0.1, 1.0)), seeds)
def test_outliers_are_the_extremes_over_all_heads(share, seed):
    x = randn(seed, 2, HEADS, 7, DIM)
    values, where, is_outlier = split_outliers(x, share)
    count = round(share * HEADS * DIM)
    for b in range(2):
        for t in range(7):
            flat = x[b, :, t].flatten()
            ordered = flat.sort().values
            expected = [*ordered[: count // 2], *ordered[HEADS * DIM - (count - count // 2) :]]
            assert values[b, t].tolist() == [float(v) for v in expected]
            assert flat[where[b, t].long()].tolist() == values[b, t].tolist()
            assert int(is_outlier[b, :, t].sum()) == count


# ---------------------------------------------------------------- bit widths


def test_widths_follow_the_formulas_of_the_paper():
    """Section 4.1, one token at a time."""
    seen, energy, sigma_s, sigma_x, classes = 700, 20.0, 0.004, 0.02, (2, 3, 4)
    paid = torch.tensor([0.5, 0.1, 0.02, 0.003, 0.0]).view(1, 1, -1)
    span = torch.tensor([1.0, 4.0, 0.3, 8.0, 2.0])
    step = (span / 2 ** classes[-1]).view(1, 1, -1, 1)
    for role in ("value", "key"):
        rule = Adaptive(classes, role, sigma_x if role == "value" else sigma_s, 0.01, 5)
        got = levels_for(step, allowed_deviation(rule, seen, paid, torch.full((1, 1, 1), energy)), classes)
        for t in range(5):
            if role == "value":
                sigma = sigma_x / (math.sqrt(seen) * float(paid[0, 0, t])) if paid[0, 0, t] else math.inf
            else:
                sigma = math.sqrt(math.log(seen**3 / (seen - 1) * sigma_s**2 + 1) / energy)
            need = math.ceil(math.log2(float(span[t]) / (2 * math.sqrt(3) * sigma))) if sigma < math.inf else -99
            width = next((w for w in classes if w >= need), classes[-1])
            assert classes[got[0, 0, t]] == width, (role, t)


@given(widths, seeds)
def test_values_with_more_attention_mass_never_get_fewer_bits(widths, seed):
    paid = torch.rand(1, 1, 60, generator=torch.Generator().manual_seed(seed)).sort().values ** 4
    step = torch.full((1, 1, 60, 1), 0.1)
    levels = levels_for(step, allowed_deviation(value_rule(widths), 500, paid, None), widths)
    assert (levels[0, 0].int().diff() >= 0).all()
    same = levels_for(step, allowed_deviation(value_rule(widths), 500, torch.full_like(paid, 0.01), None), widths)
    assert same.unique().numel() == 1


@given(st.floats(1e-4, 1.0), seeds)
def test_errors_stay_within_the_deviation_that_chose_the_width(deviation, seed):
    """Wherever the widest class suffices: each error lies within its cell, and their deviation is that of a uniform
    distribution."""
    widths = (2, 3, 4, 8)
    x = torch.rand(1, 1, 64, 512, generator=torch.Generator().manual_seed(seed)) * 2
    step, zero_point = fit_range(x, torch.zeros_like(x, dtype=torch.bool), 8, torch.float16)
    levels = levels_for(step, torch.full((1, 1, 64), deviation), widths)
    cells = assign_cells(x, step, zero_point, 8)
    codes = from_planes(to_planes(cells, levels, widths), levels, widths)
    cell = step * torch.tensor([2.0 ** (8 - w) for w in widths])[levels.long()].unsqueeze(-1)
    error = (codes * step.float() + cell / 2 + zero_point - x).abs()
    assert (error <= cell / 2 + 1e-5).all()
    need = torch.log2(step.squeeze(-1).float() * 256 / (2 * math.sqrt(3) * deviation)).ceil()
    enough = need <= 8
    assert (error.square().mean(-1).sqrt()[enough] <= 1.1 * deviation).all()
    assert (cell.squeeze(-1)[enough] / (2 * math.sqrt(3)) <= deviation * (1 + 1e-6)).all()


# ---------------------------------------------------------------- one state


def state_with(x, **fields):
    """A state in which all of ``x`` ``[B, H, T, D]`` is due, before its importance is known."""
    config = QAQConfig(residual=8, **fields)
    geometry = schemes.LayerGeometry(0, 1, HEADS, DIM, x.dtype, torch.device("cpu"))
    spec = config.plan(geometry).key if fields.get("role") == "key" else config.plan(geometry).value
    state = AdaptiveState.allocate_in(PlanePool(), spec, x.shape[0], HEADS, DIM, x.dtype, "cpu", x.shape[2])
    with only_reference():
        torch.ops.kvpass.append_(
            state.pack, state.length_tensor(0), x, None, None, state.text,
            originals=state.host.tokens,
        )  # fmt: skip
    return state


def quantize(state, n, importance):
    state.requantize(n, importance)
    state.pool.refresh()
    with only_reference():
        return state.dequantize(n)


def same_codes(a, b):
    mine, theirs = a._tokens(a.count), b._tokens(b.count)
    widths = a.spec.quantizer.adaptive.widths
    return torch.equal(mine.levels, theirs.levels) and torch.equal(
        from_planes(mine.planes, mine.levels, widths), from_planes(theirs.planes, theirs.levels, widths)
    )


@given(st.sampled_from((torch.float32, torch.bfloat16, torch.float16)), seeds)
def test_quantizing_with_all_outliers_is_the_identity(dtype, seed):
    x = randn(seed, 2, HEADS, 50, DIM, dtype=dtype)
    state = state_with(x, outliers=1.0)
    assert torch.equal(quantize(state, 50, torch.rand(2, HEADS, 50)), x)


@given(widths, seeds)
def test_lowering_and_restoring_widths_equals_quantizing_at_once(widths, seed):
    x, g = randn(seed, 2, HEADS, 60, DIM), torch.Generator().manual_seed(seed)
    paid = torch.rand(3, 2, HEADS, 60, generator=g) ** 8
    state = state_with(x, widths=widths, sigma_x=0.01)
    for importance in paid:
        decoded = quantize(state, 60, importance)
    direct = state_with(x, widths=widths, sigma_x=0.01)
    assert torch.equal(decoded, quantize(direct, 60, paid[-1]))
    assert same_codes(state, direct)


def test_only_tokens_whose_width_was_raised_are_fetched():
    x = randn(0, 1, HEADS, 60, DIM)
    state = state_with(x, sigma_x=0.01)
    quantize(state, 60, torch.full((1, HEADS, 60), 1e-6))
    assert state.host.moved_nbytes == 0 and not state._tokens(state.count).levels.any()
    paid = torch.full((1, HEADS, 60), 1e-6)
    paid[0, 1, 5:8] = 0.9
    quantize(state, 60, paid)
    assert state._tokens(state.count).levels.nonzero().tolist() == [[0, 1, 5], [0, 1, 6], [0, 1, 7]]
    assert state.host.moved_nbytes == 3 * DIM * 4


@given(widths, seeds)
def test_without_originals_widths_only_fall(widths, seed):
    x, g = randn(seed, 1, HEADS, 60, DIM), torch.Generator().manual_seed(seed)
    state = state_with(x, widths=widths, keep_originals=False, sigma_x=0.01)
    before, least = None, None
    for importance in torch.rand(4, 1, HEADS, 60, generator=g) ** 8:
        decoded = quantize(state, 60, importance)
        levels = state._tokens(state.count).levels
        alone = state_with(x, widths=widths, sigma_x=0.01)
        quantize(alone, 60, importance)
        wanted = alone._tokens(alone.count).levels
        least = wanted if least is None else torch.minimum(least, wanted)
        assert torch.equal(levels, least)
        assert before is None or (levels <= before).all()
        before = levels
    assert torch.isfinite(decoded).all() and state.host.tokens.shape[2] < 60


# ---------------------------------------------------------------- edges


def test_importance_is_the_largest_weight_of_the_last_rows():
    q, k = 3 * randn(1, 2, 2 * HEADS, 40, DIM), randn(2, 2, HEADS, 40, DIM)
    mask = torch.ones(40, 40, dtype=torch.bool).tril()[None, None].repeat(2, 1, 1, 1)
    mask[1, :, :, :7] = False
    eye = torch.eye(40).expand(2, HEADS, -1, -1)
    weights = naive_attention(q, k, eye, mask=mask, scale=0.25).nan_to_num(0)
    got = attention_mass(dense_call(q, k, k, mask, scale=0.25, statistic="max-5"), k)
    expected = weights[:, :, -5:].unflatten(1, (HEADS, -1)).amax((2, 3))
    torch.testing.assert_close(got.double(), expected, atol=1e-6, rtol=1e-5)


def test_query_energy_is_the_quantile_of_queries_that_are_not_padding():
    q = randn(3, 2, 2 * HEADS, 50, DIM)
    mask = torch.ones(50, 50, dtype=torch.bool).tril()[None, None].repeat(2, 1, 1, 1)
    mask[1, :, :, :9] = False
    got = query_energy(q, mask, HEADS)
    for b, first in ((0, 0), (1, 9)):
        for h in range(HEADS):
            norms = q[b, 2 * h : 2 * h + 2, first:].square().sum(-1).flatten()
            torch.testing.assert_close(got[b, h].flatten()[0], norms.quantile(0.9))


# ---------------------------------------------------------------- the attention window


def window_spec(residual, window, sinks=0, every="page"):
    config = QAQConfig(residual=residual, window=window, sinks=sinks, every=every)
    return config.plan(schemes.LayerGeometry(0, 1, HEADS, DIM, torch.float32, torch.device("cpu"))).key


def look(importance, attention, n, new):
    """Apply a call of ``new`` tokens after ``n`` tokens to ``importance``."""
    importance.reserve(n + new)
    importance.start(n, new)
    mass = attention[..., max(n, n + new - importance.rows) : n + new, : n + new].amax(2)
    importance.weights[..., : n + new] = largest_mass(importance.weights, n, mass)


def causal_attention(seed, tokens):
    return randn(seed, 1, HEADS, tokens, tokens).tril().abs()


@settings(max_examples=40)
@given(
    st.integers(1, 3).map(lambda pages: 4 * pages), st.integers(1, 40), st.integers(0, 3),
    st.lists(st.integers(1, 9), min_size=20, max_size=40), st.booleans(), seeds,
)  # fmt: skip
def test_widths_are_chosen_by_the_attention_of_the_last_queries(residual, window, sinks, calls, single, seed):
    """Exactly, token by token. If the window begins within a call, all last queries of that call may count."""
    calls = [calls[0], *([1] * len(calls) if single else calls[1:])]
    spec, attention = window_spec(residual, window, sinks), causal_attention(seed, sum(calls))
    window = max(window, residual)  # all queries since the last choice count
    importance, n, starts = RecentAttention(spec, 1, HEADS, "cpu", 1), 0, [0]
    for new in calls:
        look(importance, attention, n, new)
        n += new
        starts.append(n)
        got = importance.largest(n)
        importance.end()
        if spec.retention.packed(n) == spec.retention.packed(n - new):
            continue
        due = spec.retention.packed(n) + sinks + spec.retention.residual
        begins = max(0, due - window)
        call = next(i for i, stop in enumerate(starts[1:]) if stop > begins)
        earliest = max(starts[call], starts[call + 1] - window)
        assert (got >= attention[..., max(0, n - window) : n, :n].amax(2)).all()
        assert (got <= attention[..., min(begins, earliest) : n, :n].amax(2)).all()
        if single and begins >= calls[0]:
            assert torch.equal(got, attention[..., begins:n, :n].amax(2))


@given(st.integers(1, 12), st.integers(1, 7), seeds)
def test_a_choice_after_every_token_looks_at_the_last_queries_alone(prompt, window, seed):
    attention = causal_attention(seed, 40)
    importance, n = RecentAttention(window_spec(1, window, every="token"), 1, HEADS, "cpu", 1), 0
    for new in [prompt] + [1] * (40 - prompt):
        look(importance, attention, n, new)
        n += new
        got = importance.largest(n)
        importance.end()
        if n >= prompt + window:  # the prompt is one call
            assert torch.equal(got, attention[..., n - window : n, :n].amax(2))


def test_a_spike_long_before_a_choice_still_counts():
    """Widths are chosen once a page: a query that came after the last choice, and more than ``window`` ago, counts."""
    attention = torch.full((1, HEADS, 64, 64), 0.01)
    attention[:, :, 40, 3] = 0.9
    importance = RecentAttention(window_spec(32, 5), 1, HEADS, "cpu", 1)
    for n in range(64):
        look(importance, attention, n, 1)
        importance.end()
    assert (importance.largest(64)[0, :, 3] == 0.9).all()


def test_a_window_longer_than_a_page_survives_cache_operations():
    attention = causal_attention(0, 60)
    importance = RecentAttention(window_spec(4, 10), 1, HEADS, "cpu", 1)
    for n in range(40):
        look(importance, attention, n, 1)
        importance.end()
    paid = importance.largest(40).clone()
    assert importance.earlier.shape[:3] == (1, HEADS, 2) and torch.equal(paid, attention[..., 30:40, :40].amax(2))
    failing = copy.deepcopy(importance)
    failing.start(40, 3)
    failing.weights[...] = 9
    failing.end(succeeded=False)
    assert torch.equal(failing.largest(60), importance.largest(60))
    importance.map_(lambda tensor: tensor.repeat_interleave(2, 0))
    assert torch.equal(importance.largest(40), paid.expand(2, -1, -1))
    importance.crop(37)
    assert torch.equal(importance.largest(37), paid[..., :37].expand(2, -1, -1))
    assert not importance.largest(40)[..., 37:].any()
    importance.start(0, 1)  # after a reset
    assert not importance.largest(40).any()


@pytest.mark.slow
@torch.no_grad()
def test_attention_of_steps_reaches_the_classes_through_a_window_longer_than_a_page(monkeypatch):
    model, ids, chosen_by = llama("eager", layers=1), tokens(1, 32), {}
    attentions = model(input_ids=ids, output_attentions=True).attentions[0].unflatten(1, (HEADS, -1)).amax(2)
    requantize = AdaptiveState.requantize

    def noted(state, n, importance):
        chosen_by[n] = importance.clone()
        requantize(state, n, importance)

    monkeypatch.setattr(AdaptiveState, "requantize", noted)
    config = QAQConfig(residual=4, window=5, outliers=1.0)  # lossless, so attention is that of the untouched model
    step_by_step(model, config, ids, 20, lowering="eager")
    assert set(chosen_by) == {20, 24, 28, 32}
    for n, importance in chosen_by.items():
        paid = attentions[:, :, n - (5 if n != 24 else 9) : n, :n].amax(2)  # the prompt's last 5 count as one
        torch.testing.assert_close(importance, paid, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_the_papers_regime_keeps_no_token_exact_and_chooses_after_every_token(monkeypatch):
    """Any width from 0 to 8 bits occurs, and lengths at which widths are chosen are those after every call."""
    lengths, requantize = [], AdaptiveState.requantize

    def noted(state, n, importance):
        lengths.append(n)
        requantize(state, n, importance)

    monkeypatch.setattr(AdaptiveState, "requantize", noted)
    model, ids = llama("eager", layers=1), tokens(1, 40)
    config = schemes.get("qaq-paper", sigma_s=0.01, sigma_x=0.02)
    _, cache, _ = step_by_step(model, config, ids, 30, lowering="eager")
    assert {n for n in lengths if n >= 30} == set(range(30, 41))
    layer = cache.layers[0]
    assert layer.key_state.count == 40 and layer.value_state.count == 39  # values keep one token
    used = {int(level) for state in layer.states() for level in state._tokens(state.count).levels.flatten()}
    assert len(used) > 2 and 0 in used
    paid = layer.importance.largest(40)
    rule, state = layer.value_state.spec.quantizer.adaptive, layer.value_state
    deviation = allowed_deviation(rule, 40, paid[..., :39], None)
    assert torch.equal(state._tokens(39).levels, levels_for(state.scale[:, :, :39], deviation, rule.widths))


# ---------------------------------------------------------------- models


SMALL = QAQConfig(residual=16, sigma_s=1e-4, sigma_x=1e-3)


@pytest.mark.slow
@pytest.mark.nightly_cases("-", "demote*")
@pytest.mark.compiles
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("originals", [True, False], ids=["", "demote only"])
def test_the_compiled_step_is_the_eager_one(padded, originals):
    """Equal logits, classes and contents while planes grow and shrink, in one decode graph."""
    config = schemes.get(SMALL, keep_originals=originals)
    model, ids, mask = llama(), tokens(2, 110), None
    if padded:
        mask = torch.ones_like(ids)
        mask[1, :9] = 0
    compiled, mine, report = step_by_step(model, config, ids, 60, mask)
    eager, theirs, _ = step_by_step(model, config, ids, 60, mask, lowering="eager")
    torch.testing.assert_close(compiled, eager, atol=1e-3, rtol=1e-3)
    assert sum(graph.compiled for graph in report.graphs) == 1 and report.packed == report.fused == 2
    assert (sum(layer.host_nbytes for layer in report.layers) > 0) == originals
    assert len({level for layer in mine.layers for s in layer.states() for level in levels_of(s)}) > 1
    for a, b in zip(mine.layers, theirs.layers, strict=True):
        for one, other in zip(a.states(), b.states(), strict=True):
            differ = one._tokens(one.count).levels != other._tokens(other.count).levels
            assert differ.float().mean() < 0.05  # a bit width at the boundary between two classes
        close = torch.isclose(a.values, b.values, atol=1e-3).float().mean()
        assert close > 0.9


def levels_of(state):
    return state._tokens(state.count).levels.unique().tolist()


@pytest.mark.slow
def test_attention_of_a_prompt_reaches_the_classes():
    """The attention weights of as many of the model's last prompt queries as a page has tokens determine the bit widths
    of values."""
    model, ids = llama("eager"), tokens(1, 80)
    attentions = model(input_ids=ids, output_attentions=True).attentions
    _, cache, _ = step_by_step(model, SMALL, ids, 80, lowering="eager")
    for weights, layer in zip(attentions, cache.layers, strict=True):
        paid = weights[:, :, -16:].unflatten(1, (2, -1)).amax((2, 3))
        torch.testing.assert_close(layer.importance.weights[..., :80], paid, atol=1e-5, rtol=1e-4)
        state = layer.value_state
        rule, packed = state.spec.quantizer.adaptive, state.spec.retention.packed(80)
        deviation = allowed_deviation(rule, 80, paid[..., :packed], None)
        assert torch.equal(state._tokens(packed).levels, levels_for(state.scale[:, :, :packed], deviation, rule.widths))


@pytest.mark.nightly
def test_generate_beams_copies_crops_and_resets():
    model, ids = llama(), tokens(2, 60)
    kvpass.apply(model, SMALL)
    plain = model.generate(ids, max_new_tokens=40, do_sample=False)
    beams = model.generate(ids, max_new_tokens=40, do_sample=False, num_beams=2)
    assert plain.shape == beams.shape == (2, 100)
    cache = DynamicCache(config=model.config)
    model(input_ids=ids, past_key_values=cache)
    copied, step = copy.deepcopy(cache), ids[:, :1]
    first = model(input_ids=step, past_key_values=cache).logits
    assert torch.equal(first, model(input_ids=step, past_key_values=copied).logits)
    cache.crop(-1)
    torch.testing.assert_close(model(input_ids=step, past_key_values=cache).logits, first, atol=1e-4, rtol=1e-4)
    cache.batch_select_indices(torch.tensor([1]))
    alone = model(input_ids=step[1:], past_key_values=cache).logits
    assert torch.isfinite(alone).all()
    cache.reset()
    model(input_ids=ids, past_key_values=cache)
    assert cache.get_seq_length() == 60


@pytest.mark.slow
def test_bytes_on_the_host_are_counted_apart():
    model, ids = llama(), tokens(1, 200)
    sizes = {}
    for originals in (True, False):
        _, cache, report = step_by_step(model, schemes.get(SMALL, keep_originals=originals), ids, 200, lowering="eager")
        sizes[originals] = kvpass.nbytes(cache)
        assert report.nbytes == pytest.approx(sizes[originals], rel=0.02)
    assert "originals in host memory" not in str(report)
    assert sizes[True] == pytest.approx(sizes[False], rel=0.05)
    assert sizes[True] < 0.5 * report.full_nbytes


# ---------------------------------------------------------------- refusals


def test_invalid_settings_are_refused():
    for fields, why in (
        (dict(widths=(4, 2)), "Each must exceed"),
        (dict(widths=()), "one to nine"),
        (dict(widths=(0,)), "the last"),
        (dict(widths=(2, 5)), "the last"),
        (dict(widths=(2, 7)), "Each must exceed"),
        (dict(outliers=1.5), "fraction"),
        (dict(sigma_s=0.0), "above 0"),
        (dict(query_energy=-1.0), "above 0"),
        (dict(window=0), "window=0"),
        (dict(rope="pre"), "rope='post'"),
    ):
        with pytest.raises(KVPassError, match=why):
            QAQConfig(**fields)
    with pytest.raises(KVPassError, match="do not support eviction"):
        schemes.get("qaq+h2o")
    with pytest.raises(KVPassError, match="multiple of 8"):
        kvpass.apply(llama(head_dim=12), "qaq")
    assert schemes.get(schemes.get("qaq").to_dict()) == schemes.get("qaq")


@pytest.mark.slow
def test_query_energies_can_be_measured_ahead(tmp_path):
    model, ids = llama(), tokens(3, 80)
    calibration = kvpass.calibrate(model, ids, SMALL, progress=False)
    measured = calibration.scheme.query_energy
    assert len(measured) == 2 and not calibration.predictors
    _, cache, _ = step_by_step(model, SMALL, ids[:1], 80, lowering="eager")
    assert measured[0] == pytest.approx(cache.layers[0].key_state.energy.amax().item(), rel=0.2)
    kvpass.apply(model, kvpass.load(calibration.save(tmp_path)))
    assert "query energies of 2 layers" in str(kvpass.explain(model))
    cache = DynamicCache(config=model.config)
    model(input_ids=ids, past_key_values=cache)
    state = cache.layers[1].key_state
    assert not hasattr(state, "energy") and state.spec.quantizer.adaptive.energy == measured[1]
    with pytest.raises(KVPassError, match="the model has 3 layers"):
        kvpass.apply(llama(layers=3), calibration.scheme)

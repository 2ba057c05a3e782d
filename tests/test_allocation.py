"""Bit widths per channel: which channels get the bits, what that costs, and whether a state matches its formulas."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._inductor import config as inductor_config

import kvpass
from kvpass import KVPassError, NonFiniteError
from kvpass.cache.per_cache import RotaryState
from kvpass.cache.state import KVState
from kvpass.codec import Allocation, CodecSpec, Quantizer, Transform, dequantize_pages, parse, quantize_pages
from kvpass.codec.allocation import split_pages
from kvpass.codec.codec import marks_of
from kvpass.codec.probes import some_queries
from kvpass.codec.rope import parse_rope
from kvpass.codec.token_ranks import slots
from kvpass.codec.transform_coding import DISTORTION, STEPS, allocate, gains, second_moment, widths_of
from kvpass.layout.pool import handle
from kvpass.layout.retention import Retention
from kvpass.lowering.cpp import allocated, dequantize_allocated, quantize_allocated
from kvpass.schemes import LayerGeometry, WaterfillConfig, get

from common import DTYPES, awkward, chunkings, generator, randn, seeds
from tiny import llama, step_by_step, tokens

HEAD = 32
counts = st.integers(1, 24), st.integers(0, 16)
blocks_and_weights = st.sampled_from((1, 4, 16)), st.booleans()
allocations = st.builds(Allocation, *counts, *blocks_and_weights) | st.builds(
    Allocation, *counts, *blocks_and_weights, *counts
)


def spec_of(allocation, center=False, **retention):
    size = 32 if allocation.ranked else 16
    return CodecSpec(
        Quantizer(8, "token", HEAD, codec=allocation),
        Retention(**{"window": size + 8, "page_size": size, "sinks": 2} | retention),
        Transform(center=center),
    )


ALIKE = spec_of(Allocation(14, 8, 16, True), center=True)
RANKED = spec_of(Allocation(12, 4, 16, True, 22, 8), center=True)
both = pytest.mark.parametrize("spec", [ALIKE, RANKED], ids=["alike", "ranked"])


def mixed(seed, *shape, dtype=torch.float32):
    """Tokens with correlated channels of scales from 1/8 to 8 and nonzero means."""
    sizes = torch.exp2(6 * torch.rand(shape[-1], generator=generator(seed)) - 3)
    mixing = randn(seed, shape[-1], shape[-1]) * sizes
    return (randn(seed + 1, *shape) @ mixing + 2 * randn(seed + 2, shape[-1])).to(dtype)


def fitted(spec, x, q=None, dtype=torch.float16):
    """The fitted arguments of `quantize_pages` and, without the queries, of `dequantize_pages`."""
    allocation = spec.codec
    metric = None if q is None or not allocation.weighted else second_moment(q, allocation.block_size)
    basis, places = allocation.fit_basis(x, metric)
    chosen = [some_queries(randn(3, 1, 1, 50, HEAD).expand(*x.shape[:2], -1, -1) if q is None else q, None, dtype)]
    return [basis.to(dtype), places.int(), *(chosen if allocation.chooses else [])]


def coded(x, spec, given):
    """``x`` quantized to pages, and the dequantized pages."""
    pages = quantize_pages(x, spec, given)
    return *pages, dequantize_pages(*pages, *given[:2], spec)


@given(seeds, allocations, st.sampled_from((16, 32, 64)))
def test_heads_have_equally_many_fields_and_no_coordinate_has_two_of_a_kind(seed, allocation, head_dim):
    cost = torch.exp2(8 * randn(seed, 2, 3, head_dim)).double()
    pairs, singles = allocation.counts(head_dim)[0]
    places = allocate(cost, pairs, singles)
    assert places.shape == (2, 3, pairs + singles)
    assert all(len(set(row)) == pairs + singles for row in places.flatten(0, 1).tolist())
    bits = torch.tensor([2] * pairs + [1] * singles).expand(places.shape)
    widths = torch.zeros_like(cost, dtype=torch.long).scatter_add(-1, places % head_dim, bits)
    assert (widths.sum(-1) == 2 * pairs + singles).all() and ((widths % 2).sum(-1) == singles).all()
    shifts, coordinates = places // head_dim, places % head_dim
    of_field = widths.gather(-1, coordinates)
    assert (shifts[..., :pairs] + 2 <= of_field[..., :pairs]).all()
    assert (shifts[..., pairs:] + 1 == of_field[..., pairs:]).all()  # at an odd bit width the single bit is the highest


@pytest.mark.parametrize("pairs, singles", [(2, 2), (4, 2), (3, 3), (5, 0), (1, 4)])
def test_allocation_of_bits_is_nearly_optimal(pairs, singles):
    """Against all possible allocations for 6 coordinates."""
    ratios, options = [], [w for w in itertools.product(range(8), repeat=6) if sum(x % 2 for x in w) == singles]
    options = torch.tensor([w for w in options if sum(w) == 2 * pairs + singles])
    for seed in range(40):
        cost = torch.exp2(2 * randn(seed, 6)).double()
        each = cost * torch.tensor(DISTORTION, dtype=torch.float64)[options]
        places = allocate(cost[None], pairs, singles)[0]
        width = torch.zeros(6, dtype=torch.long).scatter_add(0, places % 6, torch.tensor([2] * pairs + [1] * singles))
        found = (cost * torch.tensor(DISTORTION, dtype=torch.float64)[width]).sum()
        ratios.append(float(found / each.sum(-1).min()))
    assert min(ratios) >= 1 - 1e-9 and sum(ratios) / len(ratios) < 1.03


def test_steps_minimize_the_squared_error_of_a_normal_variable():
    x = torch.special.ndtri((torch.arange(400000, dtype=torch.float64) + 0.5) / 400000)
    for width, step, expected in zip(range(1, 9), STEPS, DISTORTION[1:], strict=True):

        def error(step, most=2**width - 1):
            codes = (x / step + most / 2).round().clamp(0, most)
            return float(((codes - most / 2) * step - x).square().mean())

        assert error(step) == pytest.approx(expected, rel=0.02)
        assert error(step) <= 1.001 * min(error(0.97 * step), error(1.03 * step))


def whole(basis):
    """A basis ``[D, b]`` as the matrix that turns coordinates into channels, ``[D, D]`` float64."""
    return torch.block_diag(*basis.double().unflatten(0, (-1, basis.shape[-1])))


def chosen_by_hand(page, queries, basis):
    """The tokens of a page ``[P, D]`` with the largest error to expect: squared weights under queries ``[Q, D]`` plus
    four times those of a query that attends to all tokens alike, times the squared size of coordinates."""
    scores = queries.double() @ page.double().T
    paid = (scores.exp() / scores.exp().sum(1, keepdim=True)).square().sum(0)
    expected = (paid / paid.mean() + 4) * (page.double() @ torch.linalg.inv(whole(basis))).square().sum(-1)
    return set(expected.argsort(descending=True)[: len(page) // 2].tolist())


def dequantized_by_hand(x, spec, given):
    """The same in float64, token by token and coordinate by coordinate, without packing."""
    (basis, places, *queries), allocation, size = given, spec.codec, spec.page_size
    out = torch.empty_like(x, dtype=torch.float64)
    for b, h, t in itertools.product(*map(range, x.shape[:3])):
        page, own = t // size * size, places[b, h, 0].tolist()
        if allocation.ranked:
            rich = t - page in chosen_by_hand(x[b, h, page : page + size], queries[0][b, h], basis[b, h])
            first = allocation.fields(HEAD)[0]
            own = own[:first] if rich else own[first:]
        widths = torch.zeros(HEAD, dtype=torch.long)
        for place in own:
            widths[place % HEAD] = place // HEAD // 8
        rows = whole(basis[b, h])
        step = torch.tensor([1.0, *STEPS], dtype=torch.float64)[widths]
        units = x[b, h, t].double() @ torch.linalg.inv(rows)
        rms = (units[widths > 0].square().mean()).sqrt().clamp_min(1e-9)
        worth = 1 / torch.tensor(DISTORTION, dtype=torch.float64)[widths]
        most, tried = 2.0**widths - 1, {}
        for more in (0, -6, -3, 3, 6):
            gain = 2 ** ((16 * rms.log2()).round().add(more).clamp(-128, 127) / 16)
            codes = (units / step / gain + most / 2).round().clamp(min=0).minimum(most) - most / 2
            values = (gain * step * codes) * (widths > 0)
            tried[float(((values - units).square() * worth)[widths > 0].sum())] = values
        out[b, h, t] = tried[min(tried)] @ rows
    return out


@pytest.mark.parametrize("block_size, weighted", [(1, False), (4, True), (16, True), (32, False)])
@pytest.mark.parametrize("rich", [(0, 0), (20, 5)], ids=["alike", "ranked"])
def test_pages_dequantize_as_the_formulas_define(block_size, weighted, rich):
    spec = spec_of(Allocation(11, 7, block_size, weighted, *rich))
    x, q = mixed(block_size, 2, 2, 64, HEAD), randn(9, 2, 2, 40, HEAD)
    given = fitted(spec, mixed(block_size, 2, 2, 200, HEAD), q)
    _, got = coded(x, spec, given)
    expected = dequantized_by_hand(x, spec, given)
    off = (got - expected).abs().amax(-1) > 1e-3 * expected.abs().amax(-1)
    assert off.float().mean() < 0.02  # a value may round to either of two neighbours


@given(seeds, allocations, st.sampled_from(DTYPES))
def test_errors_are_at_most_half_a_step_unless_clipped(seed, allocation, dtype):
    spec = spec_of(allocation)
    x = mixed(seed, 1, 2, 64, HEAD, dtype=dtype)
    given = fitted(spec, x, dtype=dtype)
    (pages, decoded), (basis, places) = coded(x, spec, given), given[:2]
    inverse = torch.linalg.inv(basis.double().unflatten(2, (-1, allocation.block_size)))

    def units(y):
        of_blocks = y.double().unflatten(-1, (-1, allocation.block_size)).transpose(2, 3)
        return (of_blocks @ inverse).transpose(2, 3).flatten(-2).unflatten(2, (-1, spec.page_size))

    rich, ranks = split_pages(pages, spec, HEAD)
    where = torch.arange(spec.page_size).expand(1, 2, 64 // spec.page_size, -1) if rich is None else slots(rich)
    gain = torch.cat([gains(rank.gains) for rank in ranks], 3).double().gather(3, where.unsqueeze(-1))
    by_rank = zip(places.split(allocation.fields(HEAD), -1), allocation.tokens(spec.page_size), strict=True)
    widths = torch.cat([widths_of(own, HEAD).expand(-1, -1, count, -1) for own, count in by_rank], 2)
    widths = widths.unsqueeze(2).expand_as(units(x)).gather(3, where.unsqueeze(-1).expand_as(units(x)))
    step = gain * torch.tensor([1.0, *STEPS], dtype=torch.float64)[widths]
    inside = (units(x) / step).abs() <= (2.0**widths - 1) / 2
    error = ((units(decoded) - units(x)) / step).abs()
    assert (error[inside & (widths > 0)] <= 0.5 + 1e-2).all()


@given(seeds)
def test_pages_store_tokens_by_rank_with_a_mask(seed):
    spec, x, q = RANKED, mixed(seed, 2, 2, 96, HEAD), randn(seed, 2, 2, 60, HEAD)
    given = fitted(spec, x, q)
    (pages,) = quantize_pages(x, spec, given)
    (marks, ranks), where = split_pages(pages, spec, HEAD), slots(marks_of(pages, 32))
    assert torch.equal(marks, marks_of(pages, 32))
    assert torch.equal(where.sort(-1).values, torch.arange(32).expand_as(where))
    assert [rank.gains.shape[-2] for rank in ranks] == [16, 16]
    for b, h, page in itertools.product(range(2), range(2), range(3)):
        rich = chosen_by_hand(x[b, h, 32 * page : 32 * page + 32], given[2][b, h], given[0][b, h])
        assert {t for t in range(32) if where[b, h, page, t] < 16} == rich
        for rank in (sorted(rich), sorted(set(range(32)) - rich)):  # in order of their positions
            slot = where[b, h, page, rank].tolist()
            assert slot == list(range(slot[0], slot[0] + len(slot)))


def test_values_have_high_precision_where_their_keys_do():
    allocation = Allocation(12, 4, 16, False, 22, 8, follows=True)
    value_spec = spec_of(allocation, window=64)
    with pytest.raises(KVPassError, match="follows=True needs per-token bit widths"):
        Allocation(12, 4, 16, False, follows=True)
    key, value = (KVState.allocate(spec, 2, 2, HEAD, torch.float32, "cpu", 300) for spec in (RANKED, value_spec))
    x = mixed(0, 2, 2, 300, HEAD)
    with pytest.raises(KVPassError, match="bit widths of their layer's keys"):
        value.append(x, 0)
    value.same_layer_keys, n = key, 0
    for count in (120, 1, 70, 9, 100):  # values leave their window later
        key.append(x[:, :, n : n + count], n, randn(1, 2, 4, count, HEAD))
        value.append(x[:, :, n : n + count], n)
        n += count
    pages = value_spec.retention.pages(n)
    assert 0 < pages < RANKED.retention.pages(n)
    assert torch.equal(*(marks_of(state.codes[:, :, :pages], 32) for state in (key, value)))


def test_sampled_queries_skip_padding_and_are_evenly_spaced():
    q, valid = torch.arange(100.0).view(1, 1, 100, 1).expand(2, 3, -1, 4), torch.ones(2, 100, dtype=torch.bool)
    valid[1, :60] = False
    found = some_queries(q, valid, torch.float32)[..., 0] * 2
    assert found.shape == (2, 3, 32) and torch.equal(found[:, 0], found[:, 2])
    for row, those in zip(found[:, 0].tolist(), (range(100), range(60, 100)), strict=True):
        assert set(row) <= set(those)
        steps = torch.tensor(row).diff()
        assert steps.min() >= len(those) // 32 and steps.max() <= -(-len(those) // 32)
    assert set(some_queries(q[:, :, :2], None, torch.float32)[0, 0, :, 0].tolist()) == {0.0, 0.5}


def test_more_bits_for_half_of_the_tokens_beat_equal_bits_for_all():
    """Attention output for keys of which only some receive attention: more bits for those beat equal bits for all."""
    x, q = mixed(0, 1, 2, 512, HEAD), randn(1, 1, 2, 300, HEAD)
    x = x / x.std()
    seen = []
    for allocation in (Allocation(13, 8, 16, True, 21, 8), Allocation(17, 8, 16, True)):
        spec = spec_of(allocation)
        _, decoded = coded(x, spec, fitted(spec, x, q))
        exact, got = ((q @ keys.mT * HEAD**-0.5).softmax(-1) for keys in (x, decoded))
        seen.append((exact - got).square().sum())
    assert allocation.bits == 42 / 16 and seen[0] < 0.8 * seen[1]


def test_fitted_widths_beat_equal_widths_where_channels_differ():
    x, later = mixed(0, 1, 2, 400, HEAD).split(200, 2)
    errors = []
    for allocation in (Allocation(14, 8, 16, False), Allocation(14, 8, 1, False)):
        spec = spec_of(allocation)
        pages = later[:, :, :192]
        _, decoded = coded(pages, spec, fitted(spec, x))
        errors.append((decoded - pages).square().mean())
    uniform = CodecSpec(Quantizer(2, "token", 16), ALIKE.retention)
    errors.append((dequantize_pages(*quantize_pages(pages, uniform), uniform) - pages).square().mean())
    assert errors[0] < 0.8 * errors[1] and errors[1] < 0.7 * errors[2]


def test_weighted_errors_are_small_in_the_directions_of_queries():
    x, q = randn(0, 1, 1, 400, HEAD), randn(1, 1, 1, 300, HEAD) * torch.where(torch.arange(HEAD) < 8, 6.0, 0.5)
    seen = []
    for weighted in (True, False):
        spec = spec_of(Allocation(14, 8, 16, weighted))
        error = coded(x, spec, fitted(spec, x, q))[1] - x
        seen.append((q @ error.mT).square().mean())
    assert seen[0] < 0.5 * seen[1]


@both
@given(seed=seeds, chunks=chunkings())
def test_any_chunking_stores_the_same_once_it_is_fitted(spec, seed, chunks):
    first, total = 90, 90 + sum(chunks)
    x, q = mixed(seed, 1, 2, total, HEAD), randn(seed, 1, 4, first, HEAD)
    at_once, in_chunks = (KVState.allocate(spec, 1, 2, HEAD, x.dtype, "cpu", 40) for _ in range(2))
    for state, sizes in ((at_once, [total - first]), (in_chunks, chunks)):
        state.append(x[:, :, :first], 0, q)
        for size in sizes:
            n = first
            state.append(x[:, :, n : n + size], n)
            first += size
        first = 90
    used = spec.retention.pages(total)
    assert torch.equal(at_once.codes[:, :, :used], in_chunks.codes[:, :, :used])
    assert torch.equal(at_once.dequantize(total), in_chunks.dequantize(total))


@both
def test_samples_and_heads_are_fitted_independently_and_without_padding(spec):
    x, q = mixed(0, 2, 2, 150, HEAD), randn(1, 2, 4, 150, HEAD)
    x[1, :, :10], q[1, :, :10] = 300.0, 70.0  # as a model computes for padding
    mask = torch.ones(2, 1, 150, 150, dtype=torch.bool).tril()
    mask[1, :, :, :10] = False

    def stored(tokens):
        state = KVState.allocate(spec, 2, 2, HEAD, x.dtype, "cpu", tokens)
        state.append(x[:, :, :tokens], 0, q[:, :, :tokens], mask[..., :tokens, :tokens])
        return state

    together, looked = stored(150), stored(20)  # 20 tokens fill no page, so error weights remain
    alone = KVState.allocate(spec, 1, 1, HEAD, x.dtype, "cpu", 150)
    alone.append(x[:1, 1:], 0, q[:1, 2:])
    assert torch.equal(together.basis[:1, 1:], alone.basis) and torch.equal(together.codes[:1, 1:], alone.codes)
    x[1, :, :10], q[1, :, :10] = -5.0, 3.0
    other = stored(150)
    assert torch.equal(looked.basis[1], stored(20).basis[1]) and looked.basis[1].any()
    if spec is RANKED:
        assert torch.equal(together.queries[1], other.queries[1]) and not (other.queries[1] == 3.0).any()


@both
@pytest.mark.parametrize("prompt", [1, 5, 23])
def test_only_queries_of_the_prompt_are_sampled_even_of_a_short_one(prompt, spec):
    x, q = mixed(0, 1, 2, 60, HEAD), randn(1, 1, 4, 60, HEAD)
    states = [KVState.allocate(spec, 1, 2, HEAD, x.dtype, "cpu", 60) for _ in range(2)]
    for state, tap in zip(states, (q, None), strict=True):
        state.append(x[:, :, :prompt], 0, q[:, :, :prompt])
        kept = state.basis.double()
        for n in range(prompt, 60):
            state.append(x[:, :, n : n + 1], n, None if tap is None else tap[:, :, n : n + 1])
    state, without = states
    assert torch.equal(state.dequantize(60), without.dequantize(60))
    own = q[:, :, :prompt].unflatten(1, (2, 2)).flatten(2, 3)
    seen = second_moment(own, 16)
    each = seen.diagonal(dim1=-2, dim2=-1).mean((2, 3))[..., None, None, None] / own.shape[2]
    expected = (seen + 16 * each * torch.eye(16)).flatten(2, 3)
    expected /= expected.unflatten(2, (-1, 16)).diagonal(dim1=-2, dim2=-1).mean((2, 3))[..., None, None]
    torch.testing.assert_close(kept, expected, rtol=0.01, atol=0.01)
    error = (state.dequantize(60) - x).square().mean() / x.square().mean()
    assert error < 0.3


@both
@pytest.mark.parametrize("kind", ["tiny", "huge", "two values", "outliers"])
def test_extreme_tokens_stay_finite(kind, spec):
    x = awkward(0, kind, 1, 2, 64, HEAD, limit=1e4)
    state = KVState.allocate(spec, 1, 2, HEAD, x.dtype, "cpu", 64)
    state.append(x, 0, randn(1, 1, 4, 64, HEAD))
    assert torch.isfinite(state.dequantize(64)).all()


@both
def test_constant_tokens_round_trip(spec):
    x = randn(0, 1, 2, 1, HEAD).half().float().expand(-1, -1, 64, -1).contiguous()
    state = KVState.allocate(spec, 1, 2, HEAD, x.dtype, "cpu", 64)
    state.append(x, 0, randn(1, 1, 4, 64, HEAD))
    torch.testing.assert_close(state.dequantize(64), x, atol=1e-2, rtol=1e-2)


def test_unsupported_configs_and_non_finite_tokens_are_refused():
    x = mixed(0, 1, 2, 64, HEAD)
    x[0, 1, 40, 3] = torch.nan
    state = KVState.allocate(ALIKE, 1, 2, HEAD, x.dtype, "cpu", 64)
    with pytest.raises((NonFiniteError, RuntimeError)):
        state.append(x, 0, randn(1, 1, 4, 64, HEAD))
    with pytest.raises(KVPassError, match="fitted to the prompt's queries"):
        state.append(x, 0)
    with pytest.raises(KVPassError, match="head_dim=24 is not a multiple of 16"):
        get("waterfill").plan(LayerGeometry(0, 1, 2, 24, torch.float32, torch.device("cpu")))
    with pytest.raises(KVPassError, match="at most 48 pairs"):
        WaterfillConfig(key_fields=(49, 0))
    with pytest.raises(KVPassError, match="at least one pair"):
        WaterfillConfig(rich_value_fields=(0, 4))
    for fields, reason in (
        (dict(rich_key_fields=(0, 0)), "keys use one bit width"),
        (dict(key_fields=(0, 4)), "pairs=0"),
    ):
        with pytest.raises(KVPassError, match=reason):
            get("waterfill", **fields).plan(LayerGeometry(0, 1, 2, HEAD, torch.float32, torch.device("cpu")))
    with pytest.raises(KVPassError, match="multiple of 16"):
        WaterfillConfig(rich_key_fields=(20, 4), residual=8)
    for spec in (ALIKE, RANKED):
        assert parse(str(spec)) == spec


@pytest.mark.parametrize("window", [128, 500, 512, 1024, 2048, 4096, 20000])
def test_in_a_window_less_is_stored_once_and_more_for_each_token(window):
    layer = LayerGeometry(0, 1, 1, 256, torch.bfloat16, torch.device("cpu"))
    found, full = (get("waterfill").plan(replace(layer, window=size)) for size in (window, None))
    for spec, whole in ((found.key, full.key), (found.value, full.value)):
        codec, most = Allocation.of(spec), Allocation.of(whole)
        assert 16 * codec.block_size <= window / 4  # bits of the basis, for each value of the window
        assert codec.ranked == (window >= 2048)
        assert codec == most if window >= 2048 else codec.bits > most.bits


SCHEMES = {
    "alike": dict(
        residual=16, key_fields=(18, 4), value_fields=(14, 4), rich_key_fields=(0, 0), rich_value_fields=(0, 0)
    ),
    "ranked": dict(key_fields=(14, 4), value_fields=(10, 4), rich_key_fields=(22, 4), rich_value_fields=(18, 0)),
}
PAIRS = {name: (18, 0) if name.endswith("key_fields") else (12, 0) for name in SCHEMES["ranked"]}


@pytest.mark.slow
@pytest.mark.nightly_cases("alike-*", "*-post")
@torch.no_grad()
@pytest.mark.parametrize("rope", ["pre", "post"])
@pytest.mark.parametrize("fields", SCHEMES.values(), ids=SCHEMES)
def test_the_compiled_step_is_the_eager_one(rope, fields):
    ids, prompt = tokens(2, 120), 80
    scheme = WaterfillConfig(**{"residual": 16, "recent": 8, **fields}, rope=rope)
    runs = [step_by_step(llama(), scheme, ids, prompt, lowering=lowering) for lowering in ("auto", "eager")]
    (got, cache, report), (expected, other, _) = runs
    torch.testing.assert_close(got, expected, atol=2e-3, rtol=2e-3)
    assert report.packed == report.fused == 2
    for mine, theirs in zip(cache.layers, other.layers, strict=True):
        for a, b in zip(mine.states(), theirs.states(), strict=True):
            pages = a.spec.retention.pages(prompt)
            assert (a.codes[:, :, :pages] == b.codes[:, :, :pages]).float().mean() > 0.99


def test_it_is_closer_than_kivi_on_fewer_bits():
    ids = tokens(1, 200)
    exact = llama()(ids).logits[:, 150:]
    errors = [
        (step_by_step(llama(), scheme, ids, 150, lowering="eager")[0][:, 1:] - exact).square().mean()
        for scheme in (WaterfillConfig(recent=0), "kivi")
    ]
    assert errors[0] < errors[1]
    assert kvpass  # applied by name


@pytest.mark.slow_cases("1-*")
@pytest.mark.nightly_cases("1-alike", "1-pairs")
@pytest.mark.parametrize("fields", [*SCHEMES.values(), PAIRS], ids=[*SCHEMES, "pairs"])
@pytest.mark.parametrize("queries", [1, 5])
def test_attention_over_fields_equals_attention_over_dequantized_tokens(fields, queries):
    """Batched, with a mask; calls with several queries dequantize first."""
    plan = WaterfillConfig(**{"residual": 16, "recent": 8, **fields}, rope="post").plan(
        LayerGeometry(0, 1, 2, HEAD, torch.float32, torch.device("cpu"))
    )
    past = []
    for seed, spec in enumerate((plan.key, plan.value)):
        state = KVState.allocate(spec, 2, 2, HEAD, torch.float32, "cpu", 150)
        state.same_layer_keys = past[0] if past else None
        state.append(mixed(seed, 2, 2, 150, HEAD), 0, randn(seed, 2, 4, 150, HEAD))
        past.append(state)
    key, value = past
    new, q = randn(5, 2, 2, queries, HEAD), randn(6, 2, 4, queries, HEAD)
    mask = torch.rand(2, 1, queries, 150 + queries, generator=torch.Generator().manual_seed(7)) > 0.2
    common = attention_over(key, value, q, new, mask)
    (got,), (expected,) = (torch.ops.kvpass.attend(*common, name) for name in ("inductor", "reference"))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def attention_over(key, value, q, new, mask):
    """Arguments of `kvpass::attend` over states of 150 tokens."""
    length, scale = key.length_tensor(150), HEAD**-0.5
    return q, key.pack, value.pack, length, new, new, mask, False, scale, 0.0, key.text, value.text


def positions(rope, tokens, *starts, scale=1.0):
    """Rotary tables of samples that start at these positions."""
    pairs, _ = parse_rope(rope)
    angles = (torch.tensor(starts)[:, None] + torch.arange(tokens)).float()[..., None] * 100 ** (
        -torch.arange(pairs) / pairs
    )
    return scale * angles.cos(), scale * angles.sin()


@pytest.mark.slow_cases("*-1-*")
@pytest.mark.nightly_cases("alike-1-*", "*1-half*")
@pytest.mark.parametrize("rope", [f"half-{HEAD // 2}", "interleaved-8"])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("fields", SCHEMES.values(), ids=SCHEMES)
def test_attention_reads_keys_with_page_relative_rope(rope, queries, fields):
    """Page-relative RoPE with a position offset per sample, scaled tables, and channels that are not rotated."""
    plan = WaterfillConfig(**{"residual": 16, "recent": 8, **fields}).plan(
        LayerGeometry(0, 1, 2, HEAD, torch.float32, torch.device("cpu"))
    )
    assert plan.key.transform.page_rope
    cos, sin = positions(rope, 150, 0, 7, scale=1.2)
    x, q = mixed(0, 2, 2, 150, HEAD), randn(0, 2, 4, 150, HEAD)
    key, value = (KVState.allocate(spec, 2, 2, HEAD, torch.float32, "cpu", 150) for spec in (plan.key, plan.value))
    key.rotary, value.same_layer_keys = RotaryState.of(plan.key, cos, sin), key
    for state, tables in ((key, {"rope": rope}), (value, {})):
        state.append(x[:, :, :100], 0, q[:, :, :100], **tables)
        state.append(x[:, :, 100:], 100, **tables)
    new, q = randn(5, 2, 2, queries, HEAD), randn(6, 2, 4, queries, HEAD)
    mask = torch.rand(2, 1, queries, 150 + queries, generator=generator(7)) > 0.2
    dense = [torch.cat([state.dequantize(150), new], 2) for state in (key, value)]
    expected = torch.nn.functional.scaled_dot_product_attention(q, *dense, attn_mask=mask, enable_gqa=True)
    given = attention_over(key, value, q, new, mask)
    for lowering in ("inductor", "reference"):
        (got,) = torch.ops.kvpass.attend(*given, lowering, **key.tables())
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@given(seeds)
def test_keys_are_rotated_relative_to_the_middle_of_their_page(seed):
    """Against complex multiplication, with a lossless state."""
    rope, size = f"half-{HEAD // 2}", 16
    spec = CodecSpec(Quantizer(32, "token", HEAD), Retention(size, size, 2), Transform(page_rope=True))
    cos, sin = positions(rope, 50, 3, seed % 1000, scale=0.5)
    x = randn(seed, 2, 2, 50, HEAD)
    state = KVState.allocate(spec, 2, 2, HEAD, torch.float32, "cpu", 50)
    state.rotary = RotaryState.of(spec, cos, sin)
    state.append(x[:, :, :30], 0, rope=rope)
    state.append(x[:, :, 30:], 30, rope=rope)
    turn, keys = torch.complex(cos, sin)[:, None], torch.complex(*x.chunk(2, -1))
    for page in range(3):
        of = slice(2 + page * size, 2 + (page + 1) * size)
        middle = of.start + size // 2
        kept = state.codes[:, :, page].contiguous().view(torch.float32).view(2, 2, size, HEAD)
        expected = keys[:, :, of] / turn[:, :, middle : middle + 1]
        torch.testing.assert_close(kept, torch.cat([expected.real, expected.imag], -1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state.dequantize(50), x, atol=1e-5, rtol=1e-5)
    assert state.pairs[0, 0, 0].tolist() == [HEAD // 2, 0]


def test_page_relative_rope_needs_consecutive_tokens_and_rotary_embedding():
    for fields in (dict(pre_rope=True), dict(rotation=1)):
        with pytest.raises(KVPassError, match="after rotary embedding"):
            Transform(page_rope=True, **fields)
    page_rope = Transform(page_rope=True)
    with pytest.raises(KVPassError, match="consecutive tokens"):
        CodecSpec(Quantizer(2, "token", HEAD), Retention(48, 16, keep="log"), page_rope)
    state = KVState.allocate(
        CodecSpec(Quantizer(2, "token", HEAD), Retention(16, 16), page_rope), 1, 1, HEAD, torch.float32, "cpu", 40
    )
    with pytest.raises(KVPassError, match="tables"):
        state.append(randn(0, 1, 1, 40, HEAD), 0, rope=f"half-{HEAD // 2}")


@pytest.mark.parametrize("vectors", [None, 256, 1])
@pytest.mark.parametrize(
    "queries, head_dim, residual, fields",
    [(3, 64, 32, {}), (5, 48, 16, SCHEMES["alike"]), (1, 32, 16, dict(block_size=8, rich_value_fields=(12, 0)))],
    ids=["of three queries", "alike", "small blocks"],
)
def test_kernels_read_fields_like_dequantize(queries, head_dim, residual, fields, vectors):
    """With vectors of all sizes that fields do not fill, two threads, and reads up to the last byte."""
    geometry = LayerGeometry(0, 1, 2, head_dim, torch.float32, torch.device("cpu"))
    plan = WaterfillConfig(**{"residual": residual, **fields}, rope="post").plan(geometry)
    states = [KVState.allocate(spec, 2, 2, head_dim, torch.float32, "cpu", 500) for spec in (plan.key, plan.value)]
    key, value = states
    value.same_layer_keys = key
    q, threads = randn(3, 4, queries, head_dim), torch.get_num_threads()
    allocated._kernel.cache_clear()
    try:
        torch.set_num_threads(2)
        with inductor_config.patch({"cpp.simdlen": vectors}):
            for seed, state in enumerate(states):
                state.append(mixed(seed, 2, 2, 500, head_dim), 0, randn(seed, 2, 4, 500, head_dim))
                pages = state.spec.retention.pages(500)
                pool, table = state.codes[:, :, :pages].contiguous(), allocated.look_up_table(torch.device("cpu"))
                read = allocated.Pages(handle(pool), pages, pages, state.basis, state.fields, table, state.spec)
                tokens = dequantize_pages(pool, state.basis, state.fields, state.spec).flatten(0, 1)
                if state is key:
                    got, expected = allocated.page_scores(q, None, None, read), q @ tokens.mT
                else:
                    weights = randn(4, 4, queries, tokens.shape[1]).softmax(-1)
                    got, expected = allocated.page_values(weights, read), weights @ tokens
                torch.testing.assert_close(got, expected, atol=1e-6 * float(expected.abs().max()), rtol=1e-4)
    finally:
        torch.set_num_threads(threads)
        allocated._kernel.cache_clear()


@pytest.mark.slow_cases("*256*")
@pytest.mark.parametrize("vectors", [None, 256, 1])
@pytest.mark.parametrize(
    ("head_dim", "page_size", "allocation"),
    [
        (48, 32, Allocation(14, 8, 16, False)),
        (64, 32, Allocation(12, 4, 32, False, 22, 8)),
        (512, 64, Allocation(14, 4, 32, False)),
        (96, 16, Allocation(2, 1, 4, False, 14, 0)),
        (32, 48, Allocation(3, 2, 1, False)),
    ],
    ids=str,
)
def test_kernels_quantize_and_dequantize_pages_as_pytorch_does(head_dim, page_size, allocation, vectors):
    """For vectors of all sizes, blocks of part of a vector and of several, and the last page of a pool."""
    spec = spec_of(allocation, page_size=page_size, window=page_size + 8)
    x = mixed(3, 2, 3, 5 * page_size, head_dim)
    basis, places = allocation.fit_basis(x, None)
    chosen = [randn(5, 2, 3, 16, head_dim)] if allocation.chooses else []
    (pages,) = quantize_pages(x, spec, [basis.half(), places.int(), *chosen])
    kernels = dequantize_allocated._kernel, quantize_allocated._kernel
    for kernel in kernels:
        kernel.cache_clear()
    try:
        with inductor_config.patch({"cpp.simdlen": vectors}):
            (got,) = quantize_allocated.quantize(x, [basis.half(), places.int(), *chosen], spec)
            assert (got != pages).float().mean() < 1e-3  # sums of another order round differently
            for count in (5, 1):
                kept = [pages[:, :, :count], basis.half(), places.int()]
                got = dequantize_allocated.dequantize_pages(kept, spec)
                torch.testing.assert_close(got, dequantize_pages(*kept, spec), atol=1e-4, rtol=1e-4)
    finally:
        for kernel in kernels:
            kernel.cache_clear()


@both
def test_cropping_before_the_first_page_refits_the_basis_without_queries(spec):
    x, state = mixed(0, 1, 2, 120, HEAD), KVState.allocate(spec, 1, 2, HEAD, torch.float32, "cpu", 120)
    state.append(x[:, :, :80], 0, randn(1, 1, 4, 80, HEAD))
    state.crop(80, 12)
    assert not state.basis.any()
    state.append(x[:, :, 12:], 12)
    error = (state.dequantize(120) - x)[:, :, 12:].square().mean() / x.square().mean()
    assert state.basis.any() and error < 0.3

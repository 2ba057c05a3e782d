"""Widths by channel: who gets the bits, what that costs, and that a state is what its formulas say."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvpass
from kvpass import KVPassError, NonFiniteError
from kvpass.cache.state import KVState, RotaryState
from kvpass.codec import Allocation, CodecSpec, Quantizer, Transform, decode_pages, encode_pages, parse
from kvpass.codec.allocation import DISTORTION, STEPS, allocate, fit_basis, second_moment, widths_of
from kvpass.codec.rope import parse_rope, rotate
from kvpass.layout.retention import Retention
from kvpass.schemes import LayerGeometry, WaterfillConfig, get

from common import DTYPES, awkward, chunkings, generator, randn, seeds
from tiny import llama, step_by_step, tokens

HEAD = 32
allocations = st.builds(Allocation, st.integers(1, 24), st.integers(0, 16), st.sampled_from((1, 4, 16)), st.booleans())


def spec_of(allocation, center=False, **retention):
    return CodecSpec(
        Quantizer(8, "token", HEAD, allocation=allocation, codec="allocated"),
        Retention(**{"window": 24, "page_size": 16, "sinks": 2} | retention),
        Transform(center=center),
    )


DEFAULT = spec_of(Allocation(14, 8, 16, True), center=True)


def mixed(seed, *shape, dtype=torch.float32):
    """Tokens whose channels are correlated, of sizes from 1/8 to 8, and off 0."""
    sizes = torch.exp2(6 * torch.rand(shape[-1], generator=generator(seed)) - 3)
    mixing = randn(seed, shape[-1], shape[-1]) * sizes
    return (randn(seed + 1, *shape) @ mixing + 2 * randn(seed + 2, shape[-1])).to(dtype)


def fitted(spec, x, q=None):
    metric = None if q is None else second_moment(q, spec.quantizer.allocation.block_size)
    basis, places = fit_basis(x, metric, spec.quantizer.allocation)
    return basis.half(), places.short()


@given(seeds, allocations, st.sampled_from((16, 32, 64)))
def test_every_head_has_as_many_fields_and_no_coordinate_two_of_a_kind(seed, allocation, head_dim):
    cost = torch.exp2(8 * randn(seed, 2, 3, head_dim)).double()
    pairs, singles = allocation.counts(head_dim)
    places = allocate(cost, pairs, singles)
    assert places.shape == (2, 3, pairs + singles)
    assert all(len(set(row)) == pairs + singles for row in places.flatten(0, 1).tolist())
    widths = widths_of(places, allocation, head_dim)
    assert (widths.sum(-1) == 2 * pairs + singles).all() and ((widths % 2).sum(-1) == singles).all()
    shifts, coordinates = places // head_dim, places % head_dim
    of_field = widths.gather(-1, coordinates)
    assert (shifts[..., :pairs] + 2 <= of_field[..., :pairs]).all()
    assert (shifts[..., pairs:] + 1 == of_field[..., pairs:]).all()  # the bit of an odd width is its highest


@pytest.mark.parametrize("pairs, singles", [(2, 2), (4, 2), (3, 3), (5, 0), (1, 4)])
def test_hardly_another_division_of_the_bits_costs_less(pairs, singles):
    """Against all there are, for 6 coordinates."""
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


def test_steps_are_those_of_least_squared_error_for_a_normal_variable():
    x = torch.special.ndtri((torch.arange(400000, dtype=torch.float64) + 0.5) / 400000)
    for width, step, expected in zip(range(1, 9), STEPS, DISTORTION[1:], strict=True):

        def error(step, most=2**width - 1):
            codes = (x / step + most / 2).round().clamp(0, most)
            return float(((codes - most / 2) * step - x).square().mean())

        assert error(step) == pytest.approx(expected, rel=0.02)
        assert error(step) <= 1.001 * min(error(0.97 * step), error(1.03 * step))


def decoded_by_hand(x, spec, basis, places):
    """The same in float64, token by token and coordinate by coordinate, with nothing packed."""
    size, out = spec.quantizer.allocation.block_size, torch.empty_like(x, dtype=torch.float64)
    for b, h, t in itertools.product(*map(range, x.shape[:3])):
        rows = basis[b, h].double()
        widths = widths_of(places[b, h], spec.quantizer.allocation, HEAD)[0]
        coordinates = torch.cat(
            [
                x[b, h, t, start : start + size].double() @ torch.linalg.inv(rows[start : start + size])
                for start in range(0, HEAD, size)
            ]
        )
        units = coordinates * torch.tensor([0.0, *STEPS], dtype=torch.float64)[widths]
        gain = units.square().sum().div((widths > 0).sum()).sqrt().clamp_min(1e-9)
        gain = 2 ** ((16 * gain.log2()).round().clamp(-128, 127) / 16)
        most = 2.0**widths - 1
        steps = (coordinates / gain + most / 2).round().clamp(min=0).minimum(most) - most / 2
        for start in range(0, HEAD, size):
            part = slice(start, start + size)
            out[b, h, t, part] = (gain * steps[part]) @ rows[part]
    return out


@pytest.mark.parametrize("block_size, weighted", [(1, False), (4, True), (16, True), (32, False)])
def test_pages_decode_to_what_the_formulas_say(block_size, weighted):
    spec = spec_of(Allocation(11, 7, block_size, weighted))
    x, q = mixed(block_size, 2, 2, 32, HEAD), randn(9, 2, 2, 40, HEAD)
    basis, places = fitted(spec, mixed(block_size, 2, 2, 200, HEAD), q if weighted else None)
    got = decode_pages(*encode_pages(x, spec, [basis, places]), basis, places, spec)
    expected = decoded_by_hand(x, spec, basis, places)
    off = (got - expected).abs().amax(-1) > 1e-3 * expected.abs().amax(-1)
    assert off.float().mean() < 0.02  # a code on the edge of two


@given(seeds, allocations, st.sampled_from(DTYPES))
def test_an_error_is_half_a_step_unless_it_is_cut_off(seed, allocation, dtype):
    spec = spec_of(allocation)
    x = mixed(seed, 1, 2, 32, HEAD, dtype=dtype)
    basis, places = fit_basis(x, None, allocation)
    basis, places = basis.to(dtype), places.short()
    pages = encode_pages(x, spec, [basis, places])
    decoded = decode_pages(*pages, basis, places, spec)
    inverse = torch.linalg.inv(basis.double().unflatten(2, (-1, allocation.block_size)))

    def steps(y):
        of_blocks = y.double().unflatten(-1, (-1, allocation.block_size)).transpose(2, 3)
        return (of_blocks @ inverse).transpose(2, 3).flatten(-2)

    widths = widths_of(places, allocation, HEAD)
    gain = torch.exp2((pages[2].double() - 128) / 16).flatten(2, 3)
    inside = (steps(x) / gain).abs() <= (2.0**widths - 1) / 2
    error = ((steps(decoded) - steps(x)) / gain).abs()
    assert (error[inside & (widths > 0)] <= 0.5 + 1e-2).all()


def test_a_fit_to_the_tokens_beats_equal_widths_where_channels_differ():
    x, later = mixed(0, 1, 2, 400, HEAD).split(200, 2)
    errors = []
    for allocation in (Allocation(14, 8, 16, False), Allocation(14, 8, 1, False)):
        spec = spec_of(allocation)
        basis, places = fitted(spec, x)
        pages = later[:, :, :192]
        decoded = decode_pages(*encode_pages(pages, spec, [basis, places]), basis, places, spec)
        errors.append((decoded - pages).square().mean())
    uniform = CodecSpec(Quantizer(2, "token", 16), DEFAULT.retention)
    errors.append((decode_pages(*encode_pages(pages, uniform), uniform) - pages).square().mean())
    assert errors[0] < 0.8 * errors[1] and errors[1] < 0.7 * errors[2]


def test_weighted_errors_are_small_where_queries_look():
    x, q = randn(0, 1, 1, 400, HEAD), randn(1, 1, 1, 300, HEAD) * torch.where(torch.arange(HEAD) < 8, 6.0, 0.5)
    seen = []
    for weighted in (True, False):
        spec = spec_of(Allocation(14, 8, 16, weighted))
        basis, places = fitted(spec, x, q if weighted else None)
        error = decode_pages(*encode_pages(x, spec, [basis, places]), basis, places, spec) - x
        seen.append((q @ error.mT).square().mean())
    assert seen[0] < 0.5 * seen[1]


@given(seeds, chunkings())
def test_any_chunking_stores_the_same_once_it_is_fitted(seed, chunks):
    first, total = 90, 90 + sum(chunks)
    x, q = mixed(seed, 1, 2, total, HEAD), randn(seed, 1, 4, first, HEAD)
    at_once, in_chunks = (KVState.allocate(DEFAULT, 1, 2, HEAD, x.dtype, "cpu", 40) for _ in range(2))
    for state, sizes in ((at_once, [total - first]), (in_chunks, chunks)):
        state.append(x[:, :, :first], 0, q)
        for size in sizes:
            n = first
            state.append(x[:, :, n : n + size], n)
            first += size
        first = 90
    for name in ("codes", "singles", "gain"):
        used = DEFAULT.retention.pages(total)
        assert torch.equal(getattr(at_once, name)[:, :, :used], getattr(in_chunks, name)[:, :, :used])
    assert torch.equal(at_once.decode(total), in_chunks.decode(total))


def test_samples_and_heads_are_fitted_alone_and_padding_to_nothing():
    x, q = mixed(0, 2, 2, 150, HEAD), randn(1, 2, 4, 150, HEAD)
    x[1, :, :50], q[1, :, :50] = 300.0, 70.0  # what a model makes of padding
    mask = torch.ones(2, 1, 150, 150, dtype=torch.bool).tril()
    mask[1, :, :, :50] = False
    both = KVState.allocate(DEFAULT, 2, 2, HEAD, x.dtype, "cpu", 150)
    both.append(x, 0, q, mask)
    alone = KVState.allocate(DEFAULT, 1, 1, HEAD, x.dtype, "cpu", 150)
    alone.append(x[:1, 1:], 0, q[:1, 2:])
    assert torch.equal(both.basis[:1, 1:], alone.basis) and torch.equal(both.codes[:1, 1:], alone.codes)
    x[1, :, :50], q[1, :, :50] = -5.0, 3.0
    other = KVState.allocate(DEFAULT, 2, 2, HEAD, x.dtype, "cpu", 150)
    other.append(x, 0, q, mask)
    assert torch.equal(both.metric[1], other.metric[1])


@pytest.mark.parametrize("prompt", [1, 5, 23])
def test_a_prompt_shorter_than_the_window_is_looked_at_and_later_queries_are_not(prompt):
    x, q = mixed(0, 1, 2, 60, HEAD), randn(1, 1, 4, 60, HEAD)
    states = [KVState.allocate(DEFAULT, 1, 2, HEAD, x.dtype, "cpu", 60) for _ in range(2)]
    for state, tap in zip(states, (q, None), strict=True):
        state.append(x[:, :, :prompt], 0, q[:, :, :prompt])
        for n in range(prompt, 60):
            state.append(x[:, :, n : n + 1], n, None if tap is None else tap[:, :, n : n + 1])
    state, without = states
    assert torch.equal(state.decode(60), without.decode(60))
    own = q[:, :, :prompt].unflatten(1, (2, 2)).flatten(2, 3)
    seen = second_moment(own, 16)
    each = seen.diagonal(dim1=-2, dim2=-1).mean((2, 3))[..., None, None, None] / own.shape[2]
    expected = (seen + 16 * each * torch.eye(16)).flatten(2, 3)
    torch.testing.assert_close(state.metric.double(), expected, rtol=0.01, atol=0.1)
    error = (state.decode(60) - x).square().mean() / x.square().mean()
    assert error < 0.3


@pytest.mark.parametrize("kind", ["tiny", "huge", "two values", "outliers"])
def test_awkward_tokens_stay_finite(kind):
    x = awkward(0, kind, 1, 2, 64, HEAD, limit=1e4)
    state = KVState.allocate(DEFAULT, 1, 2, HEAD, x.dtype, "cpu", 64)
    state.append(x, 0, randn(1, 1, 4, 64, HEAD))
    assert torch.isfinite(state.decode(64)).all()


def test_constant_tokens_come_back():
    x = randn(0, 1, 2, 1, HEAD).half().float().expand(-1, -1, 64, -1).contiguous()
    state = KVState.allocate(DEFAULT, 1, 2, HEAD, x.dtype, "cpu", 64)
    state.append(x, 0, randn(1, 1, 4, 64, HEAD))
    torch.testing.assert_close(state.decode(64), x, atol=1e-2, rtol=1e-2)


def test_what_has_no_code_and_what_does_not_fit_is_refused():
    x = mixed(0, 1, 2, 64, HEAD)
    x[0, 1, 40, 3] = torch.nan
    state = KVState.allocate(DEFAULT, 1, 2, HEAD, x.dtype, "cpu", 64)
    with pytest.raises((NonFiniteError, RuntimeError)):
        state.append(x, 0, randn(1, 1, 4, 64, HEAD))
    with pytest.raises(KVPassError, match="needs the prompt's queries"):
        state.append(x, 0)
    with pytest.raises(KVPassError, match="16 does not divide head_dim=24"):
        get("waterfill").plan(LayerGeometry(0, 1, 2, 24, torch.float32, torch.device("cpu")))
    with pytest.raises(KVPassError, match="up to 48 pairs"):
        WaterfillConfig(key_fields=(49, 0))
    assert parse(str(DEFAULT)) == DEFAULT


@torch.no_grad()
@pytest.mark.parametrize("rope", ["pre", "post"])
def test_the_compiled_step_is_the_eager_one(rope):
    ids, prompt = tokens(2, 120), 80
    runs = [
        step_by_step(llama(), WaterfillConfig(residual=16, rope=rope), ids, prompt, lowering=lowering)
        for lowering in ("auto", "eager")
    ]
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
        for scheme in ("waterfill", "kivi")
    ]
    assert errors[0] < errors[1]
    assert kvpass  # applied by name


@pytest.mark.parametrize("fields", [(14, 8), (18, 0)], ids=str)
@pytest.mark.parametrize("queries", [1, 5])
def test_attention_over_fields_is_that_over_decoded_tokens(fields, queries):
    """Batched, with a mask; several queries decode first."""
    plan = WaterfillConfig(residual=16, rope="post", key_fields=fields, value_fields=fields).plan(
        LayerGeometry(0, 1, 2, HEAD, torch.float32, torch.device("cpu"))
    )
    past = []
    for seed, spec in enumerate((plan.key, plan.value)):
        state = KVState.allocate(spec, 2, 2, HEAD, torch.float32, "cpu", 150)
        state.append(mixed(seed, 2, 2, 150, HEAD), 0, randn(seed, 2, 4, 150, HEAD))
        past.append(state)
    key, value = past
    new, q = randn(5, 2, 2, queries, HEAD), randn(6, 2, 4, queries, HEAD)
    mask = torch.rand(2, 1, queries, 150 + queries, generator=torch.Generator().manual_seed(7)) > 0.2
    common = (q, key.pack, value.pack, key.carrier(150), new, new, mask, False, HEAD**-0.5, 0.0, key.text, value.text)
    (got,), (expected,) = (torch.ops.kvpass.attend(*common, name) for name in ("inductor", "reference"))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def positions(rope, tokens, *starts, scale=1.0):
    """Rotary tables of samples that start at these positions."""
    pairs, _ = parse_rope(rope)
    angles = (torch.tensor(starts)[:, None] + torch.arange(tokens)).float()[..., None] * 100 ** (
        -torch.arange(pairs) / pairs
    )
    return scale * angles.cos(), scale * angles.sin()


@pytest.mark.parametrize("rope", [f"half-{HEAD // 2}", "interleaved-8"])
@pytest.mark.parametrize("queries", [1, 5])
def test_keys_in_the_frame_of_their_page_are_attended_as_they_are(rope, queries):
    """Samples at positions of their own, tables that are scaled, channels that are not turned."""
    plan = WaterfillConfig(residual=16).plan(LayerGeometry(0, 1, 2, HEAD, torch.float32, torch.device("cpu")))
    assert plan.key.transform.page_frame
    cos, sin = positions(rope, 150, 0, 7, scale=1.2)
    x, q = mixed(0, 2, 2, 150, HEAD), randn(0, 2, 4, 150, HEAD)
    key, value = (KVState.allocate(spec, 2, 2, HEAD, torch.float32, "cpu", 150) for spec in (plan.key, plan.value))
    key.rotary = RotaryState.of(cos, sin)
    for state, tables in ((key, {"rope": rope}), (value, {})):
        state.append(x[:, :, :100], 0, q[:, :, :100], **tables)
        state.append(x[:, :, 100:], 100, **tables)
    new, q = randn(5, 2, 2, queries, HEAD), randn(6, 2, 4, queries, HEAD)
    mask = torch.rand(2, 1, queries, 150 + queries, generator=generator(7)) > 0.2
    dense = [torch.cat([past, new], 2) for past in (rotate(key.decode(150), cos, sin, rope), value.decode(150))]
    expected = torch.nn.functional.scaled_dot_product_attention(q, *dense, attn_mask=mask, enable_gqa=True)
    given = (q, key.pack, value.pack, key.carrier(150), new, new, mask, False, HEAD**-0.5, 0.0, key.text, value.text)
    for lowering in ("inductor", "reference"):
        (got,) = torch.ops.kvpass.attend(*given, lowering, cos=cos, sin=sin, rope=rope)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@given(seeds)
def test_a_page_holds_keys_turned_from_its_middle(seed):
    """By complex numbers, and a state in which nothing is lost."""
    rope, size = f"half-{HEAD // 2}", 16
    spec = CodecSpec(Quantizer(32, "token", HEAD), Retention(size, size, 2), Transform(pre_rope=True, page_frame=True))
    cos, sin = positions(rope, 50, 3, seed % 1000, scale=0.5)
    x = randn(seed, 2, 2, 50, HEAD)
    state = KVState.allocate(spec, 2, 2, HEAD, torch.float32, "cpu", 50)
    state.rotary = RotaryState.of(cos, sin)
    state.append(x[:, :, :30], 0, rope=rope)
    state.append(x[:, :, 30:], 30, rope=rope)
    turn, keys = torch.complex(cos, sin)[:, None], torch.complex(*x.chunk(2, -1))
    for page in range(3):
        of = slice(2 + page * size, 2 + (page + 1) * size)
        middle = of.start + size // 2
        kept = state.codes[:, :, page].contiguous().view(torch.float32).view(2, 2, size, HEAD)
        expected = keys[:, :, of] * turn[:, :, of] / turn[:, :, middle : middle + 1]
        torch.testing.assert_close(kept, torch.cat([expected.real, expected.imag], -1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state.decode(50), x, atol=1e-5, rtol=1e-5)
    assert state.pairs[0, 0, 0].tolist() == [HEAD // 2, 0]


def test_frames_are_for_pages_of_neighbours_before_rotary_embedding():
    for fields in (dict(page_frame=True), dict(pre_rope=True, page_frame=True, rotation=1)):
        with pytest.raises(KVPassError, match="before rotary embedding"):
            Transform(**fields)
    framed = Transform(pre_rope=True, page_frame=True)
    with pytest.raises(KVPassError, match="neighbours"):
        CodecSpec(Quantizer(2, "token", HEAD), Retention(48, 16, keep="log"), framed)
    state = KVState.allocate(
        CodecSpec(Quantizer(2, "token", HEAD), Retention(16, 16), framed), 1, 1, HEAD, torch.float32, "cpu", 40
    )
    with pytest.raises(KVPassError, match="tables"):
        state.append(randn(0, 1, 1, 40, HEAD), 0, rope=f"half-{HEAD // 2}")

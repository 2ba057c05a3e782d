"""Codecs against their papers: closed-form bit counts, error bounds, and independent formulations."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpass
from kvpass import HeavyHitter, KVPassError, Recent, Sinks
from kvpass.cache.state import KVState
from kvpass.codec import CODECS, Quantizer, dequantize_pages, quantize_pages
from kvpass.codec.balance import sinkhorn
from kvpass.codec.bitpack import unpack
from kvpass.codec.codebook import grid
from kvpass.codec.codec import marks_of
from kvpass.codec.hadamard import hadamard, inverse_hadamard
from kvpass.codec.lattice_points import DIM, SHIFT, assign, magnitudes, points, words
from kvpass.codec.nuq import fit_points, nearest
from kvpass.codec.second_level import compress, expand
from kvpass.codec.tensors import of_pages, page_shapes
from kvpass.schemes import LayerGeometry, available, get

from common import WIDTHS, awkward, generator, randn, seeds
from tiny import llama, step_by_step, tokens


def geometry(index=0, num_layers=1, head_dim=64):
    return LayerGeometry(index, num_layers, 2, head_dim, torch.float32, torch.device("cpu"))


def coded(spec, x):
    """The dequantized ``x``, and the bits per value."""
    kept = quantize_pages(x, spec)
    return dequantize_pages(*kept, spec), 8 * sum(tensor.nbytes for tensor in kept) / x.numel()


def keys_of(name, head_dim=64, **fields):
    return get(name, **fields).plan(geometry(head_dim=head_dim)).key


def values_of(name, head_dim=64, **fields):
    return get(name, **fields).plan(geometry(head_dim=head_dim)).value


# ---------------------------------------------------------------- all of them, through a model

DEQUANTIZED = {"turboquant-prod", "turboquant-2.5"}  # by the reference; the others are fused on a CPU
SMALL = {
    "turboquant": dict(),
    "turboquant-prod": dict(),
    "kivi-s8": dict(group_size=16),
    "kvarn-k2v2": dict(),
    "zipcache": dict(group_size=16),
    "kitty-25": dict(group_size=16, sinks=2),
    "e8": dict(),
    "gear": dict(group_size=16, rank=1),
    "kvquant": dict(group_size=16),
    "polarquant": dict(group_size=16),
    "turboquant-2.5": dict(),
    "zipcache-salient": dict(residual=32),
    "minicache": dict(start=0.0, group_size=16),
}


@pytest.mark.slow
@pytest.mark.nightly_cases(
    "kivi-s8",
    "kitty-25",
    "kvquant",
    "turboquant",
    "turboquant-*",
    "kvarn-k2v2",
    "zipcache",
    "e8",
    "gear",
    "polarquant",
    "minicache",
)
@pytest.mark.parametrize("name", SMALL)
def test_padded_batches_generate_compiled_as_eagerly_in_one_graph(name):
    torch._dynamo.reset()
    ids, mask, runs = tokens(3, 70), torch.ones(3, 70, dtype=torch.long), []
    mask[1, :13], mask[2, :59] = 0, 0
    for lowering in ("auto", "eager"):
        model = kvpass.apply(llama(), {"scheme": name, "residual": 16, **SMALL[name]}, lowering=lowering)
        how = dict(do_sample=False, max_new_tokens=40, return_dict_in_generate=True, output_logits=True)
        runs.append((model, model.generate(input_ids=ids, attention_mask=mask, **how)))
    (compiled, got), (_, expected) = runs
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(expected.logits), atol=1e-3, rtol=1e-3)
    for mine, theirs in zip(got.past_key_values.layers, expected.past_key_values.layers, strict=True):
        assert mine.tokens == theirs.tokens == 109 and mine.nbytes == theirs.nbytes
        for a, b in zip(mine.states(), theirs.states(), strict=True):
            torch.testing.assert_close(a.dequantize(109)[0], b.dequantize(109)[0], atol=1e-2, rtol=1e-2)
    report = kvpass.explain(compiled)
    decoding = [graph for graph in report.graphs if graph.compiled]
    assert (report.packed, report.fused, len(decoding)) == (2, 2, 1)
    assert decoding[0].lowerings["attend"] in (("reference",) if name in DEQUANTIZED else ("cpp", "inductor"))
    assert not any(graph.decoded or graph.refused for graph in report.graphs)


# ---------------------------------------------------------------- layers that are skipped


ALONE = [
    name for name in available() if getattr(get(name), "stores_layers_alone", False) and get(name).name != "identity"
]


@pytest.mark.parametrize("name", ALONE)
def test_skipped_layers_are_stored_exactly_and_with_the_same_tokens_exact(name):
    scheme = get(name, skip_layers=[1, 2])
    plans = [scheme.plan_of(geometry(i, 6)) for i in range(6)]
    inside = get(name).plan(geometry(1, 6))
    for i, plan in enumerate(plans):
        assert plan.key.quantizer.raw == plan.value.quantizer.raw == (i not in (1, 2, 3))
        assert (plan.key.retention, plan.value.retention) == (inside.key.retention, inside.value.retention)
        assert plan.key.transform.turns == inside.key.transform.turns
    assert get(scheme.to_dict()) == scheme


def test_skipped_layers_take_any_scheme_that_stores_layers_alone():
    scheme = get("kivi", skip_layers=(1, 0), skipped="kivi-8", sinks=2)
    assert [scheme.plan_of(geometry(i, 2)).key.bits for i in range(2)] == [8, 2]
    evicting = get("kivi", skip_layers=(1, 0), retention=Sinks(2) + HeavyHitter(64, recent=32))
    assert len({evicting.plan_of(geometry(i, 2)).key.retention for i in range(2)}) == 1


@pytest.mark.parametrize(
    "name, fields, says",
    [
        ("xquant", dict(), "depend on each other"),
        ("aqua", dict(), "depend on each other"),
        ("qaq", dict(), "depend on each other"),
        ("kivi", dict(skip_layers=(-1, 0)), "skip_layers=-1"),
        ("kivi", dict(skip_layers=(1,)), "skip_layers"),
        ("kivi", dict(skipped="xquant"), "must store each layer independently"),
        ("kivi", dict(skipped="nope"), "Unknown scheme"),
        ("kivi", dict(skipped="logquant", retention=Sinks(4) + Recent(32)), "is defined by its retention policy"),
    ],
)
def test_layers_that_cannot_be_skipped_say_so(name, fields, says):
    with pytest.raises(KVPassError, match=says):
        get(name, **{"skip_layers": (1, 1), **fields})


@pytest.mark.slow
@torch.no_grad()
def test_skipped_layers_compile_as_eagerly_and_their_bytes_count():
    ids, scheme = tokens(2, 100), get("kivi", skip_layers=(1, 1))
    runs = [step_by_step(llama(layers=4), scheme, ids, 80, lowering=lowering) for lowering in ("auto", "eager")]
    torch.testing.assert_close(runs[0][0], runs[1][0], atol=1e-4, rtol=1e-4)
    assert runs[0][2].packed == runs[0][2].fused == 4
    sizes = [layer.nbytes for layer in runs[0][1].layers]
    assert sizes[0] == sizes[3] > 2 * sizes[1] == 2 * sizes[2]
    everywhere = step_by_step(llama(layers=4), get("kivi", skip_layers=(4, 0)), ids, 80, lowering="eager")
    model = llama(layers=4)
    torch.testing.assert_close(everywhere[0], model(ids).logits[:, 79:], atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------- TurboQuant


def unit(seed, count, head_dim):
    return torch.nn.functional.normalize(randn(seed, 1, 1, count, head_dim), dim=-1)


@pytest.mark.parametrize("bits, error", [(1, 0.36), (2, 0.117), (3, 0.03), (4, 0.009)])
def test_turboquant_has_the_errors_of_the_papers_theorem(bits, error):
    """Theorem 1, for any distribution of tokens: here also with channels of scales from 1/16 to 16."""
    spec = values_of("turboquant", 128, value_bits=bits)
    sizes = torch.exp2(8 * torch.rand(128, generator=generator(3)) - 4)
    for x in (unit(0, 1024, 128), torch.nn.functional.normalize(unit(1, 1024, 128) * sizes, dim=-1)):
        got, cost = coded(spec, x)
        assert (got - x).square().sum(-1).mean() == pytest.approx(error, rel=0.16)
        assert cost == bits + 16 / 128


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_sketch_makes_inner_products_unbiased_at_the_error_the_paper_bounds(bits):
    """Theorem 2: d * D_prod of at most 0.56, 0.18 and 0.047; orthogonal projections are better."""
    x, y = unit(0, 1024, 128), unit(1, 1024, 128)
    spec = keys_of("turboquant", 128, key_bits=bits, keys="prod")
    got, cost = coded(spec, x)
    assert cost == bits + 2 * 16 / 128
    assert (got * x).sum(-1).mean() == pytest.approx(1, abs=2e-3)
    error = ((got - x) * y).sum(-1).square().mean() * 128
    assert error < {2: 0.56, 3: 0.18, 4: 0.047}[bits]
    left = {2: 0.3634, 3: 0.1175, 4: 0.03455}[bits]
    assert error == pytest.approx((math.pi / 2 - 1) * left, rel=0.1)
    shrunk, _ = coded(keys_of("turboquant", 128, key_bits=bits - 1), x)
    assert (shrunk * x).sum(-1).mean() < 1 - 0.9 * left


@given(seeds, st.sampled_from((32, 64)))
def test_sketches_are_the_signs_of_the_residual(seed, head_dim):
    spec = keys_of("turboquant", head_dim, key_bits=3, keys="prod", residual=16, seed=5)
    x = randn(seed, 1, 2, 16, head_dim)
    codes, scale, none, signs, norm = quantize_pages(x, spec)
    base = dequantize_pages(codes, scale, none, values_of("turboquant", head_dim, residual=16, seed=5))
    projected, length = hadamard(x - base, 6), (x - base).norm(dim=-1, keepdim=True)
    rows = hadamard(torch.eye(head_dim), 6).T  # S x = rows @ x
    expected = base + math.sqrt(math.pi / 2 / head_dim) * length * (torch.where(projected > 0, 1.0, -1.0) @ rows)
    torch.testing.assert_close(dequantize_pages(codes, scale, none, signs, norm, spec), expected, atol=3e-3, rtol=3e-3)


@pytest.mark.parametrize(
    "fields, says",
    [
        (dict(key_bits=1, keys="prod"), "key_bits=1"),
        (dict(value_bits=5), "value_bits=5"),
        (dict(key_bits=0), "key_bits=0"),
        (dict(keys="prod", key_bits=3, residual=4), "multiple of 8"),
        (dict(keys="prod", key_bits=3, share=0.25), "share=0.25"),
        (dict(share=1.0), "share=1.0"),
        (dict(share=0.25, key_bits=4), "1 to 3 bits"),
    ],
)
def test_turboquant_refuses_settings_without_a_codebook(fields, says):
    with pytest.raises(KVPassError, match=says):
        get("turboquant", **fields)


@settings(max_examples=10)
@given(seeds, st.sampled_from((1, 2, 3)), st.sampled_from((64, 128)))
def test_two_widths_are_two_instances_of_turboquant_on_two_sets_of_channels(seed, bits, head_dim):
    """Section 4.3 of the paper, by the norm and the codebook of each instance."""
    spec = keys_of("turboquant", head_dim, key_bits=bits, share=0.25, residual=16, seed=3)
    x = randn(seed, 1, 1, 16, head_dim) * torch.exp2(2 * randn(seed + 1, head_dim))
    got, cost = coded(spec, x)
    large = x.abs().mean(2)[0, 0].argsort(descending=True)[: head_dim // 4].sort().values
    rest = torch.tensor([i for i in range(head_dim) if i not in set(large.tolist())])
    for channels, width in ((large, bits + 1), (rest, bits)):
        part = x[..., channels]
        size = (part.double().norm(dim=-1, keepdim=True) / math.sqrt(len(channels))).half().float()
        units = hadamard(part, 3) / size
        book = grid(f"d1n{2**width}")[:, 0]
        expected = inverse_hadamard(size * book[(units.unsqueeze(-1) - book).abs().argmin(-1)], 3)
        torch.testing.assert_close(got[..., channels], expected, atol=2e-3 * float(size.max()), rtol=2e-3)
    assert cost == bits + 0.25 + 2 * 16 / head_dim + 16 * 0.25 / 16


def test_the_papers_widths_of_two_and_a_half_bits_beat_those_of_two_where_channels_differ():
    assert coded(keys_of("turboquant-2.5", 128, residual=128), randn(0, 1, 1, 128, 128))[1] == 2.5 + 16 * 0.25 / 128
    x = randn(0, 1, 2, 512, 128) * torch.exp2(3 * randn(1, 128))
    more, fewer = (coded(keys_of(name, 128), x)[0] for name in ("turboquant-2.5", "turboquant"))
    assert (more - x).norm() < 0.6 * (fewer - x).norm()
    with pytest.raises(KVPassError, match="without channels"):
        values_of("turboquant", 64, share=0.001)


# ---------------------------------------------------------------- second-level scales


@given(
    seeds, st.sampled_from(WIDTHS), st.sampled_from(("key", "value")), st.sampled_from((torch.float32, torch.bfloat16))
)
def test_scales_in_8_bits_cost_half_and_errors_are_bounded_by_their_steps(seed, bits, side, dtype):
    spec = getattr(get("kivi-s8", bits=bits, group_size=16).plan(geometry()), side)
    sizes = torch.exp2(6 * torch.rand(64, generator=generator(seed)) - 3)
    x = (randn(seed, 1, 2, 64, 64) * sizes + randn(seed, 64)).to(dtype)
    got, cost = coded(spec, x)
    assert cost == bits + 16 / 16 + 64 / (32 * 64)
    _, levels, params = quantize_pages(x, spec)
    (scale, _), step = expand(levels, params), params[..., 0].float()[..., None, None]
    ends = step[..., 1, :, :] + (2**bits - 1) * step[..., 0, :, :]  # a range may be shorter than its group's by this
    dim = -2 if side == "key" else -1
    error = (got - x).unflatten(2, (-1, 32)).abs().unflatten(dim, (-1, 16)).amax(dim)
    assert (error <= 0.5 * scale + ends + 1e-4).all()
    plain, _ = coded(spec.plain, x)
    assert (got - x).norm() <= 1.1 * (plain - x).norm() + 1e-3 * x.norm()


@given(seeds, st.integers(1, 4), st.integers(1, 40))
def test_second_level_codes_are_those_of_an_affine_quantizer_over_the_page(seed, groups, columns):
    scale, zero_point = randn(seed, 2, 3, groups, columns).abs().half(), randn(seed + 1, 2, 3, groups, columns).half()
    levels, params = compress(scale, zero_point)
    assert levels.shape == (2, 3, 2 * groups, columns) and params.shape == (2, 3, 2, 2)
    for which, (wanted, got) in enumerate(zip((scale, zero_point), expand(levels, params), strict=True)):
        step = params[..., which, 0].float()[..., None, None]
        assert ((got - wanted.float()).abs() <= 0.5 * step + 1e-6).all()
        spread = wanted.float().flatten(-2).amax(-1) - wanted.float().flatten(-2).amin(-1)
        assert (step.flatten(-3) <= spread / 255 * 1.01 + 1e-3).all()


def test_squat_takes_scales_in_8_bits_too():
    ids = tokens(1, 120)
    exact, errors = llama()(ids).logits[:, 99:], []
    for bits in (8, 16):
        got, cache, _ = step_by_step(llama(), get("squat", scale_bits=bits, block_size=16), ids, 100, lowering="eager")
        errors.append((got - exact).norm())
        assert (cache.layers[0].key_state.spec.codec.name == "second-level") == (bits == 8)
    assert errors[0] < 1.2 * errors[1]


@pytest.mark.slow_cases("1")
@pytest.mark.parametrize("queries", [1, 5])
def test_fused_attention_reads_8_bit_scales(queries):
    plan = get("kivi-s8", group_size=16).plan(geometry(head_dim=32))
    states = []
    for seed, spec in enumerate((plan.key, plan.value)):
        state = KVState.allocate(spec, 2, 2, 32, torch.float32, "cpu", 150)
        state.append(randn(seed, 2, 2, 150, 32), 0)
        states.append(state)
    key, value = states
    new, q = randn(5, 2, 2, queries, 32), randn(6, 2, 4, queries, 32)
    past = (q, key.pack, value.pack, key.length_tensor(150), new, new, None, True, 0.2, 0.0, key.text, value.text)
    (got,), (expected,) = (torch.ops.kvpass.attend(*past, name) for name in ("inductor", "reference"))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(key.dequantize(150, "inductor"), key.dequantize(150, "reference"), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "name, fields, says",
    [
        ("kivi", dict(scale_bits=4), "scale_bits=4"),
        ("kivi", dict(scale_bits=8, eta=0.1), "no grid, raw floats or eta"),
        ("kivi", dict(scale_bits=8, retention=Sinks(2) + HeavyHitter(64, recent=32)), "supports neither eviction"),
    ],
)
def test_scales_in_8_bits_are_refused_where_they_are_not_known(name, fields, says):
    with pytest.raises(KVPassError, match=says):
        get(name, **fields)


# ---------------------------------------------------------------- KVarN and ZipCache


def sizes_of_both_axes(seed, *shape):
    tokens_, channels = torch.exp2(2 * randn(seed, *shape[:-1], 1)), torch.exp2(2 * randn(seed + 1, shape[-1]))
    return randn(seed + 2, *shape) * tokens_ * channels


def by_kvarns_formulas(tile, bits, iterations=16):
    """Quantized values, scale and zero point of the rows of a tile ``[rows, columns]``, and the factors of its columns,
    in float64, row by row."""
    rows, columns = tile.shape
    log_row, log_column = [0.0] * rows, [0.0] * columns
    tile = tile.double()
    size, tile = tile.square().mean().sqrt(), tile / tile.square().mean().sqrt()

    def balanced():
        return tile / torch.tensor(log_row).double().exp()[:, None] / torch.tensor(log_column).double().exp()

    def imbalance(x):
        return x.std(0).max() / x.std(0).min() + x.std(1).max() / x.std(1).min()

    best = imbalance(balanced()), list(log_column)
    for _ in range(iterations):
        now = balanced()
        for j in range(columns):
            step = math.log(min(max(float(now[:, j].std()), 1e-3), 1e3))
            log_column[j] = min(max(log_column[j] + step, -9.0), 9.0)
        now = balanced()
        for i in range(rows):
            step = math.log(min(max(float(now[i].std()), 1e-3), 1e3))
            log_row[i] = min(max(log_row[i] + step, -9.0), 9.0)
        if (found := imbalance(balanced())) <= best[0]:
            best = found, list(log_column)
    factor = (torch.tensor(best[1]).double() - sum(best[1]) / columns).exp()
    divided = tile / factor
    low, high = divided.amin(1), divided.amax(1)
    scale = (high - low) / (2**bits - 1)
    codes = ((divided - low[:, None]) / scale[:, None]).round().clamp(0, 2**bits - 1)
    return codes, size * scale, size * low, factor


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("bits", [2, 4])
def test_kvarn_stores_what_its_formulas_define(side, bits):
    plan = get("kvarn", key_bits=bits, value_bits=bits, residual=32, seed=4).plan(geometry())
    spec, x = getattr(plan, side), 3 * sizes_of_both_axes(bits, 1, 1, 32, 64)
    codes, scale, zero_point, factor = (kept[0, 0, 0] for kept in quantize_pages(x, spec))
    rotated = hadamard(x, 4)[0, 0]
    tile = rotated.T if side == "key" else rotated  # its rows share a scale
    wanted, of_rows, low, of_columns = by_kvarns_formulas(tile, bits)
    found = unpack(codes, bits)
    found = found.T if side == "key" else found
    assert (found.double() == wanted).double().mean() > 0.99  # the rest are ties in 16-bit scales
    assert ((found.double() - wanted).abs() <= 1).all()
    for mine, theirs in ((factor, of_columns), (scale, of_rows), (zero_point, low)):
        torch.testing.assert_close(mine.double().flatten(), theirs, rtol=4e-3, atol=4e-3)


@given(seeds)
def test_sinkhorn_makes_tokens_and_channels_equally_large(seed):
    x = sizes_of_both_axes(seed, 1, 1, 1, 32, 32)
    tokens_, channels = sinkhorn(x, -1), sinkhorn(x.mT, -1).mT
    before, after = (
        max(float(y.std(dim).max() / y.std(dim).min()) for dim in (-1, -2)) for y in (x, x / tokens_ / channels)
    )
    assert tokens_.shape == (1, 1, 1, 32, 1) and after < 1.5 < before
    torch.testing.assert_close(sinkhorn(1e-3 * x, -1), tokens_)


@pytest.mark.parametrize("name, most", [("kvarn-k2v2", 0.9), ("zipcache", 0.75)])
def test_a_factor_for_each_channel_pays_where_values_have_channels_of_their_own_size(name, most):
    x = sizes_of_both_axes(0, 1, 2, 128, 64)
    errors = [(coded(values_of(each, **f), x)[0] - x).norm() for each, f in ((name, {}), ("rtn-2", {}))]
    assert errors[0] < most * errors[1]


@pytest.mark.parametrize("residual, head_dim", [(64, 64), (128, 32)])
def test_kvarn_and_zipcache_bits_equal_a_closed_form(residual, head_dim):
    x = randn(0, 1, 2, 256, head_dim)
    key, value = (of("kvarn", head_dim, residual=residual) for of in (keys_of, values_of))
    assert coded(key, x)[1] == 4 + 32 / residual + 16 / head_dim
    assert coded(value, x)[1] == 2 + 32 / head_dim + 16 / residual
    assert coded(values_of("zipcache", head_dim, residual=residual), x)[1] == 2 + 32 / head_dim + 16 / residual


@given(seeds)
def test_zipcache_is_per_token_codes_of_channels_divided_by_the_root_of_their_largest(seed):
    x = sizes_of_both_axes(seed, 1, 1, 32, 64)
    got, _ = coded(values_of("zipcache"), x)
    root = x.abs().amax(-2, keepdim=True).sqrt()
    y = x / root
    low, step = y.amin(-1, keepdim=True), (y.amax(-1, keepdim=True) - y.amin(-1, keepdim=True)) / 3
    assert ((got - x).abs() <= root * step * 0.51 + 2e-3 * root * (low.abs() + 3 * step)).all()


def test_codecs_that_keep_scales_of_16_bits_say_so():
    with pytest.raises(KVPassError, match="scale_bits=8 is a codec of its own"):
        get("zipcache", scale_bits=8)
    with pytest.raises(KVPassError, match="key_bits=0"):
        get("kvarn", key_bits=0)


# ---------------------------------------------------------------- ZipCache's saliency


def salient_pages(seed, residual=64, head_dim=32, **fields):
    """Specs, keys, values and probes, and the stored tensors of both."""
    plan = get("zipcache-salient", residual=residual, **fields).plan(geometry(head_dim=head_dim))
    k, v = (sizes_of_both_axes(seed + i, 1, 2, 2 * residual, head_dim) for i in (0, 5))
    probes = randn(seed + 9, 1, 2, 32, head_dim) / math.sqrt(head_dim)
    keys = quantize_pages(k, plan.key, [probes])
    return plan, k, v, probes, keys, quantize_pages(v, plan.value, [marks_of(keys[0], residual)])


@settings(max_examples=8)
@given(seeds, st.sampled_from((0.25, 0.5)))
def test_salient_tokens_have_twice_the_bits_and_are_those_of_the_most_normalised_attention(seed, share):
    plan, k, v, probes, keys, values = salient_pages(seed, share=share)
    attention = (probes.double() @ k.double().mT).softmax(-1)  # all probes see all tokens
    normalised = attention.sum(-2) / (attention > 0).sum(-2)
    by_page = normalised.unflatten(-1, (2, 64))
    least = by_page.sort(-1, descending=True).values[..., int(share * 64) - 1 : int(share * 64) + 1]
    salient = (by_page >= least.mean(-1, keepdim=True)).flatten(2)
    marked = unpack(marks_of(keys[0], 64), 1).squeeze(-1).bool().flatten(2)
    clear = (least[..., 0] > 1.001 * least[..., 1]).repeat_interleave(64, -1)
    assert (marked == salient)[clear].all() and (marked.sum(-1) == 2 * int(share * 64)).all()
    for x, kept, spec, of in ((k, keys, plan.key, keys_of), (v, values, plan.value, values_of)):
        got = dequantize_pages(*kept, spec)
        for page in range(2):
            for head in range(2):
                for wide in (True, False):
                    tokens_ = slice(64 * page, 64 * page + 64)
                    mine = x[:1, head : head + 1, tokens_][:, :, marked[0, head, tokens_] == wide]
                    count = mine.shape[2]
                    alone = of("zipcache", 32, bits=4 if wide else 2, residual=count, group_size=count)
                    expected, _ = coded(alone, mine)
                    found = got[:1, head : head + 1, tokens_][:, :, marked[0, head, tokens_] == wide]
                    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("residual, head_dim, share", [(128, 64, 0.5), (64, 32, 0.25)])
def test_bits_of_salient_tokens_equal_a_closed_form(residual, head_dim, share):
    _, k, v, _, keys, values = salient_pages(0, residual, head_dim, share=share)
    bits = [8 * sum(tensor.nbytes for tensor in kept) / x.numel() for kept, x in ((keys, k), (values, v))]
    assert bits[0] == 2 * (1 + share) + 64 / residual + 1 / head_dim
    assert bits[1] == 2 * (1 + share) + 33 / head_dim + 32 / residual


@pytest.mark.parametrize(
    "fields, says",
    [
        (dict(share=0.01), "fill whole bytes"),
        (dict(share=1.0), "fill whole bytes"),
        (dict(bits=8), "at most 4 bits"),
        (dict(rope="pre"), "after rotary embedding"),
        (dict(scale_bits=8), "is a codec of its own"),
    ],
)
def test_saliency_refuses_unsupported_settings(fields, says):
    with pytest.raises(KVPassError, match=says):
        get("zipcache-salient", **fields)


# ---------------------------------------------------------------- PolarQuant and MiniCache


@settings(max_examples=10)
@given(seeds, st.sampled_from((2, 3, 4)))
def test_polarquant_quantizes_radii_and_angles_as_its_formulas_define(seed, bits):
    spec = keys_of("polarquant", 32, bits=bits, group_size=32, residual=32)
    x = sizes_of_both_axes(seed, 1, 1, 32, 32)
    codes, scale, zero_point = (kept[0, 0, 0] for kept in quantize_pages(x, spec))
    got, cost = coded(spec, x)
    assert cost == bits + 32 / 32
    for i in range(16):
        a, b = x[0, 0, :, i].double(), x[0, 0, :, i + 16].double()
        point = []
        for row, of_pair in ((i, (a * a + b * b).sqrt()), (i + 16, torch.atan2(b, a))):
            step = (of_pair.max() - of_pair.min()) / (2**bits - 1)
            wanted = ((of_pair - of_pair.min()) / step).round()
            found = unpack(codes, bits)[:, row].double()
            assert ((found - wanted).abs() <= 1).all() and (found == wanted).double().mean() > 0.9  # 16-bit scales
            least = float(of_pair.abs().max()) * 2**-11  # rounding error of a 16-bit zero point
            assert scale[0, row].item() == pytest.approx(float(step), rel=2e-3, abs=2 * least)
            point.append(found * scale[0, row].double() + zero_point[0, row].double())
        torch.testing.assert_close(got[0, 0, :, i].double(), point[0] * point[1].cos(), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(got[0, 0, :, i + 16].double(), point[0] * point[1].sin(), atol=1e-4, rtol=1e-4)


def test_polarquant_refuses_codecs_without_pairs_of_uniform_codes():
    with pytest.raises(KVPassError, match="channels are quantized in pairs"):
        get("polarquant").plan(geometry(head_dim=33))
    with pytest.raises(KVPassError, match="is a codec of its own"):
        get("polarquant", scale_bits=8)


def test_minicache_merges_pairs_of_the_upper_half():
    plans = [get("minicache").plan_of(dataclasses.replace(geometry(i, 7), previous_layer=i - 1)) for i in range(7)]
    assert [plan.key_source for plan in plans] == [plan.value_source for plan in plans] == [None] * 4 + [3, None, 5]
    assert {plan.key.own_codes for plan in plans[4::2]} == {0.6} and plans[3].key.own_codes == 1
    alone = get("minicache").plan_of(dataclasses.replace(geometry(4, 7), previous_layer=2))  # 3 is not packed
    assert alone.key_source is None and alone.key.own_codes == 1


@torch.no_grad()
def test_merged_layers_have_codes_between_those_of_both():
    ids, scheme = tokens(1, 80), get("minicache", start=0.0, t=0.25, bits=4, sinks=0)
    _, cache, _ = step_by_step(llama(), scheme, ids, 80, lowering="eager")
    _, apart, _ = step_by_step(llama(), get(scheme, start=1.0), ids, 80, lowering="eager")
    for state in ("key_state", "value_state"):
        below, above = (getattr(layer, state) for layer in cache.layers)
        theirs, mine = (unpack(getattr(layer, state).codes, 4).float() for layer in apart.layers)
        pages = below.spec.retention.pages(80)
        assert above.codes is below.codes and above.nbytes < below.nbytes
        merged = (theirs + 0.25 * (mine - theirs)).round()[:, :, :pages]
        assert torch.equal(unpack(below.codes, 4).float()[:, :, :pages], merged)
        assert torch.equal(above.scale, getattr(apart.layers[1], state).scale)
        params = sum(8 * kept[:, :, :pages].numel() * kept.itemsize for kept in (above.scale, above.zero_point))
        assert params == 32 / below.spec.quantizer.group_size * mine[:, :, :pages].numel()


@pytest.mark.parametrize(
    "fields, says", [(dict(t=2.0), "t=2.0"), (dict(start=-1.0), "start"), (dict(fit="lsq"), "fit='lsq'")]
)
def test_minicache_refuses_layers_that_cannot_be_merged(fields, says):
    with pytest.raises(KVPassError, match=says):
        get("minicache", **fields)


# ---------------------------------------------------------------- Kitty


@given(seeds, st.sampled_from((1, 2, 4)), st.sampled_from(("minmax", "lsq")))
def test_boosting_no_channel_is_kivi_and_boosting_all_is_kivi_in_twice_the_bits(seed, bits, fit):
    fields = dict(group_size=16, residual=32, fit=fit if bits < 4 else "minmax")
    x = sizes_of_both_axes(seed, 1, 2, 64, 32)
    for share, same in ((0.0, bits), (1.0, 2 * bits)):
        got, _ = coded(keys_of("kitty", 32, bits=bits, share=share, **fields), x)
        torch.testing.assert_close(got, coded(keys_of("kivi", 32, bits=same, **fields), x)[0], rtol=1e-5, atol=1e-5)


@given(seeds, st.sampled_from((0.1, 0.125, 0.25, 0.5)))
def test_the_largest_channels_of_a_page_are_kivi_4_and_the_others_kivi_2(seed, share):
    spec = keys_of("kitty", 128, share=share)
    x = randn(seed, 1, 2, 256, 128) * torch.exp2(randn(seed + 1, 128))
    got, cost = coded(spec, x)
    two, four = (coded(keys_of("kivi", 128, bits=bits, group_size=128, residual=128), x)[0] for bits in (2, 4))
    count = int(share * 128 + 1e-6)
    assert cost == 2 + 32 / 128 + (2 * 128 + 16) * count / (128 * 128)
    size = x.unflatten(2, (-1, 128)).abs().mean(3, keepdim=True)
    large = (size.argsort(-1, descending=True).argsort(-1) < count).expand(-1, -1, -1, 128, -1).flatten(2, 3)
    torch.testing.assert_close(got, torch.where(large, four, two), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "fields, says",
    [
        (dict(share=1.5), "share=1.5"),
        (dict(bits=3), "bits=3: boosted channels use twice"),
        (dict(bits=8), "bits=8"),
        (dict(scale_bits=8), "is a codec of its own"),
    ],
)
def test_kitty_refuses_unsupported_settings(fields, says):
    with pytest.raises(KVPassError, match=says):
        get("kitty", **fields)


# ---------------------------------------------------------------- the lattice E8


def in_lattice(x):
    """Whether vectors consist of all integers or all half-odd numbers, with an even sum."""
    whole = (x == x.round()).all(-1) | (x - 0.5 == (x - 0.5).round()).all(-1)
    return whole & (x.sum(-1) % 2 == 0)


def all_points():
    codes = torch.arange(4**DIM, dtype=torch.int32)
    return codes, points(codes, words(codes.device))


def test_all_codes_are_points_of_the_lattice_and_their_own_nearest():
    codes, found = all_points()
    assert len(found.unique(dim=0)) == len(codes)
    assert in_lattice(found - SHIFT).all()
    norms, counts = magnitudes().square().sum(-1).unique(return_counts=True)
    assert (norms.tolist(), counts.tolist()) == ([2, 4, 6, 8, 10, 12], [1, 8, 28, 64, 126, 29])
    sample = torch.randperm(len(codes), generator=generator(0))[:2000]
    assert torch.equal(assign(found[sample]), codes[sample].long())


@given(seeds)
def test_codes_are_the_nearest_of_all_points(seed):
    _, found = all_points()
    x = 1.5 * randn(seed, 16, DIM)
    nearest = torch.cdist(x.double(), found.double()).amin(-1)
    got = (found[assign(x)] - x).double().norm(dim=-1)
    torch.testing.assert_close(got, nearest, rtol=1e-5, atol=1e-5)


def test_e8_beats_the_grid_of_pairs_of_as_many_bits():
    x = randn(0, 1, 2, 1024, 64)
    errors, costs = [], []
    for name in ("e8", "higgs"):
        got, cost = coded(values_of(name), x)
        errors.append((got - x).square().mean() / x.square().mean())
        costs.append(cost)
    assert costs == [2.25] * 2
    assert errors[0] < 0.092 < 0.104 < errors[1]  # d4n256, at the same bit width, has 0.0966


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["normal", "outliers", "mixed magnitudes", "two values"])
@pytest.mark.parametrize("head_dim", [32, 64, 96])
def test_the_kernel_of_e8_quantizes_as_the_reference_bit_for_bit(head_dim, kind, dtype):
    spec = keys_of("e8", head_dim)
    for pages in (1, 5):
        x = awkward(pages, kind, 2, 3, pages * spec.page_size, head_dim, limit=100).to(dtype)
        x[0, 0, 3] = 0
        got, expected = (torch.ops.kvpass.quantize(x, [], str(spec), name) for name in ("cpp-lattice", "reference"))
        for mine, theirs in zip(got, expected, strict=True):
            assert mine.dtype == theirs.dtype and mine.shape == theirs.shape and torch.equal(mine, theirs)


@pytest.mark.parametrize("name", ["quarot-2", "rtn-2"])
def test_the_kernel_of_e8_refuses_other_codes(name):
    spec = values_of(name)
    with pytest.raises(KVPassError, match="E8 lattice alone"):
        torch.ops.kvpass.quantize(randn(0, 1, 1, 32, 64), [], str(spec), "cpp-lattice")


def test_e8_refuses_heads_that_its_vectors_do_not_divide():
    with pytest.raises(KVPassError, match="E8 lattice quantizes 8"):
        get("e8").plan(geometry(head_dim=20))


# ---------------------------------------------------------------- GEAR and KVQuant


def with_outliers(seed, *shape):
    x = randn(seed, *shape)
    return torch.where(torch.rand(shape, generator=generator(seed + 1)) < 0.01, 40 * x, x)


@pytest.mark.parametrize("name", ["gear", "kvquant"])
@pytest.mark.parametrize("side", ["key", "value"])
def test_outliers_come_back_exactly_at_their_positions_and_stretch_no_scale(name, side):
    x = with_outliers(0, 1, 2, 128, 64).half().float()
    errors = []
    for share in (0.02, 0.0):
        spec = getattr(get(name, share=share).plan(geometry()), side)
        kept = dict(zip(of_pages(spec), quantize_pages(x, spec), strict=True))
        assert kept["values"].shape == kept["positions"].shape == (1, 2, 2, 1, math.ceil(share * 64 * 64))
        got, _ = coded(spec, x)
        pages, found = (y.unflatten(2, (-1, 64)).flatten(-2) for y in (x, got))
        where = kept["positions"].squeeze(-2).long()
        assert torch.equal(found.gather(-1, where), pages.gather(-1, where))
        assert torch.equal(kept["values"].squeeze(-2).float(), pages.gather(-1, where))
        errors.append((got - x).square().mean())
    assert errors[0] < 0.2 * errors[1]


@given(seeds, st.integers(0, 4))
def test_gears_error_term_is_the_best_of_its_rank(seed, rank):
    x = sizes_of_both_axes(seed, 1, 1, 32, 32)
    fields = dict(group_size=16, residual=32, share=0.0)
    spec, plain = (keys_of("gear", 32, rank=r, **fields) for r in (rank, 0))
    (got, cost), (without, _) = coded(spec, x), coded(plain, x)
    left = torch.linalg.svdvals((x - without)[0, 0].double())
    assert cost == 2 + 32 / 16 + rank * 16 * 2 / 32
    error = (got - x).double().norm()
    assert error == pytest.approx(float(left[rank:].norm()), rel=2e-2, abs=2e-3 * float(left.norm()))
    base, _ = coded(keys_of("kivi", 32, group_size=16, residual=32), x)
    torch.testing.assert_close(without, base)


@given(seeds, st.sampled_from((1, 2, 3, 4)))
def test_a_fitted_datatype_is_a_fixed_point_of_lloyds_iteration_and_beats_even_points(seed, bits):
    x = torch.rand(2, 600, generator=generator(seed)) ** 3
    points = fit_points(x, bits)
    codes = (x.unsqueeze(-1) - points.unsqueeze(-2)).abs().argmin(-1)
    assert (points.diff() >= 0).all()
    assert ((points.gather(-1, codes) - x).abs() <= (points.gather(-1, nearest(x, points)) - x).abs() + 1e-6).all()
    even = torch.linspace(0, 1, 2**bits).expand(2, -1)
    error, of_even = ((p.gather(-1, nearest(x, p)) - x).square().mean() for p in (points, even.contiguous()))
    assert error < 0.9 * of_even


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_kvquant_beats_uniform_codes_and_its_bits_equal_a_closed_form(bits):
    x = randn(0, 1, 2, 256, 64) ** 3
    spec = keys_of("kvquant", bits=bits)
    got, cost = coded(spec, x)
    outliers = math.ceil(0.01 * 64 * 64)
    assert cost == bits + 32 / 64 + (32 * outliers + 16 * 2**bits) / 64**2
    assert spec.transform.pre_rope and spec.retention.sinks == 1
    uniform, _ = coded(keys_of("kivi", bits=bits, group_size=64, residual=64), x)
    assert (got - x).norm() < 0.75 * (uniform - x).norm()


@pytest.mark.parametrize(
    "name, fields, says",
    [
        ("gear", dict(share=-0.1), "share=-0.1"),
        ("gear", dict(rank=-1), "rank=-1"),
        ("gear", dict(scale_bits=8), "is a codec of its own"),
        ("kvquant", dict(bits=8), "1 to 4 bits"),
        ("kvquant", dict(fit="lsq"), "fit='minmax'"),
        ("kvquant", dict(eta=0.1), "fit='minmax'"),
    ],
)
def test_configs_without_outliers_or_matrices_are_refused(name, fields, says):
    with pytest.raises(KVPassError, match=says):
        get(name, **fields)


def test_a_plan_refuses_pages_that_positions_or_matrices_do_not_fit():
    with pytest.raises(KVPassError, match="rank=40 must be at most 32, the rank"):
        get("gear", group_size=32, rank=40).plan(geometry(head_dim=32))
    with pytest.raises(KVPassError, match="too many positions for 16-bit"):
        get("kvquant", residual=2048, group_size=64).plan(geometry())
    with pytest.raises(KVPassError, match="codec must be Codec or None, not 'nuq'"):
        Quantizer(2, "token", 32, codec="nuq")


# ---------------------------------------------------------------- pages that hold nothing yet


def specs_of(codec):
    """The distinct specs with which schemes store keys and values by ``codec``."""
    plans = [get(name).plan_of(geometry()) for name in available() if not get(name).needs_calibration]
    return list(dict.fromkeys(spec for plan in plans for spec in (plan.key, plan.value) if spec.codec.name == codec))


def arbitrary_pages(spec, seed, head_dim=64, dtype=torch.bfloat16):
    """Two pages of random bytes, in the codec's shapes and dtypes."""
    kept = page_shapes(spec, head_dim, dtype).values()
    count = [2 * math.prod(shape) * kind.itemsize for shape, kind in kept]
    drawn = torch.randint(0, 256, (sum(count),), dtype=torch.uint8, generator=generator(seed)).split(count)
    return [one.view(kind).view(1, 1, 2, *shape) for one, (shape, kind) in zip(drawn, kept, strict=True)]


CALIBRATED = {"shares"}  # test_any_bytes_are_dequantized in test_shares


@pytest.mark.parametrize(
    "codec", [name for name, codec in CODECS.items() if codec.dequantizes_any_bytes and name not in CALIBRATED]
)
def test_codecs_declared_safe_dequantize_any_bytes(codec):
    specs = specs_of(codec)
    assert specs, f"no scheme stores by {codec!r}: decode random bytes by it here"
    for spec in specs:
        for seed in range(8):
            tokens = dequantize_pages(*arbitrary_pages(spec, seed), spec)
            assert tokens.shape == (1, 1, 2 * spec.page_size, 64)


@pytest.mark.parametrize("codec", ["boosted", "error-term", "nuq"])
def test_codecs_whose_pages_hold_indices_are_not_declared_safe(codec):
    assert not CODECS[codec].dequantizes_any_bytes
    for spec in filter(lambda spec: spec.codec.share, specs_of(codec)):  # without a share there are no indices
        with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
            dequantize_pages(*arbitrary_pages(spec, 0), spec)

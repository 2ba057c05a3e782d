"""SQuat's compensation against direct solutions in float64, and what it may and may not depend on."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpass import PackedKV, schemes
from kvpass.cache.state import KVState
from kvpass.codec import Subspace, dequantize_pages, quantize_pages
from kvpass.codec.subspace import compensation_matrix, precision_matrix
from kvpass.lowering.fit_sequence import fit_compensation

from common import DIM, coded, queries_for, randn, seeds, spread, state_of

pytestmark = pytest.mark.usefixtures("reference_lowering")


def prompt_queries(seed, batch=1, heads=1, rows=200, dim=128):
    """Queries with a decaying spectrum, float64."""
    basis = torch.linalg.qr(randn(seed, dim, dim).double()).Q
    return randn(seed + 1, batch, heads, rows, dim).double() @ (basis * torch.logspace(1, -2, dim).double()[:, None])


def spec_of(weight, relative=True, rank=5, block=64, group=32, page=32, bits=2, **more):
    return coded(bits, "channel", group, page, subspace=Subspace(rank, weight, relative, block), **more)


# ---------------------------------------------------------------- the matrices


@given(st.integers(1, 20), st.floats(1e-6, 10), seeds)
@settings(max_examples=15)
def test_precision_equals_the_papers_with_scaled_singular_vectors(rank, lam, seed):
    q = prompt_queries(seed, 2, 2, 60, 16)
    rank = min(rank, 16)
    _, singular, directions = torch.linalg.svd(q, full_matrices=False)
    q_hat = singular[..., :rank, None] * directions[..., :rank, :]
    expected = torch.eye(16).double() + lam * q_hat.mT @ q_hat
    got = precision_matrix(q, Subspace(rank, lam, False, 8))
    assert torch.allclose(got, expected, rtol=1e-9, atol=1e-8 * lam * float(singular.max()) ** 2)


@pytest.mark.parametrize("block", [64, 32, 16])
@pytest.mark.parametrize("seed", range(3))
def test_the_update_solves_the_constrained_least_squares_problem(block, seed):
    """min e'Pe subject to e = 0 on earlier blocks and e = d on this one, by its KKT system."""
    q, dim = prompt_queries(seed), 128
    precision = precision_matrix(q, Subspace(5, 1.0, True, block))
    answers, p = compensation_matrix(precision, block)[0, 0], precision[0, 0]
    for start in range(0, dim - block, block):
        stop = start + block
        d = randn(seed + start, block).double()
        fixed = torch.eye(dim).double()[:stop]
        kkt = torch.zeros(dim + stop, dim + stop).double()
        kkt[:dim, :dim], kkt[:dim, dim:], kkt[dim:, :dim] = 2 * p, fixed.T, fixed
        right = torch.cat([torch.zeros(dim + start).double(), d])
        direct = torch.linalg.solve(kkt, right)[:dim]
        assert (answers[start:, start:stop] @ d - direct[stop:]).abs().max() < 1e-8
        assert direct[stop:].abs().max() > 1e-4  # the test is not vacuous


@pytest.mark.parametrize("block", [64, 32, 16])
@pytest.mark.parametrize("lam", [1e-4, 1e-2])
def test_compensation_is_b_t_h_t_of_the_paper(block, lam):
    precision = precision_matrix(prompt_queries(7, 2, 3), Subspace(5, lam, False, block))
    answers, inverse = compensation_matrix(precision, block), torch.linalg.inv(precision)
    for start in range(0, 128 - block, block):
        stop = start + block
        a, b = inverse[..., :stop, :stop], inverse[..., stop:, :stop]
        h = torch.linalg.inv(a)[..., -block:]
        assert (b @ h - answers[..., start:, start:stop]).abs().max() < 1e-8
        assert not answers[..., :start, start:stop].any()  # block lower triangular


def test_half_the_head_as_block_leaves_one_matrix():
    precision = precision_matrix(prompt_queries(0, 2, 3), Subspace(5, 1.0, True, 64))
    assert compensation_matrix(precision, 64).shape == (2, 3, 64, 64)


# ---------------------------------------------------------------- quantized values


@pytest.mark.parametrize("bits, block", [(2, 32), (4, 16), (8, 8)])
def test_every_block_is_quantized_after_the_blocks_before_have_moved_it(bits, block):
    """Repeats the paper's loop in float64 on the stored values: each block must hold the nearest levels of its
    target."""
    spec = spec_of(1.0, block=block, bits=bits, group=16)
    x, q = randn(0, 1, 1, 32, 64), prompt_queries(1, dim=64)
    precision = precision_matrix(q, spec.quantizer.subspace)
    codes, scale, zero_point = quantize_pages(x, spec, [compensation_matrix(precision, block)])
    stored = dequantize_pages(codes, scale, zero_point, spec)[0, 0].double().numpy()
    step, low = (spread(p, spec)[0, 0].numpy() for p in (scale, zero_point))
    inverse, target = np.linalg.inv(precision[0, 0].numpy()), x[0, 0].double().numpy().copy()
    for start in range(0, 64, block):
        stop = start + block
        here = slice(start, stop)
        error = stored[:, here] - target[:, here]
        assert (np.abs(error) <= step[:, here] / 2 + 1e-5).all()
        assert (target[:, here] >= low[:, here] - 1e-5).all()
        ends = target[:, here].reshape(2, 16, block)
        ideal = (ends.max(1) - ends.min(1)) / (2**bits - 1)
        assert np.allclose(step[::16, here], ideal, rtol=0.01, atol=1e-4)
        b_t, h_t = inverse[stop:, :stop], np.linalg.inv(inverse[:stop, :stop])[:, -block:]
        target[:, stop:] += error @ (b_t @ h_t).T
    assert np.abs(target - x[0, 0].numpy()).max() > 1e-3  # later blocks did move


@pytest.mark.parametrize("head_dim, block", [(64, None), (128, None), (128, 32)])
@pytest.mark.parametrize("override", [dict(lam=0.0), dict(strength=0.0)])
def test_weight_zero_gives_kivis_codes_bit_for_bit(head_dim, block, override):
    geometry = schemes.LayerGeometry(0, 1, 2, head_dim, torch.float32, torch.device("cpu"))
    squat = schemes.get("squat", block_size=block, **override).plan(geometry)
    kivi = schemes.get("kivi").plan(geometry)
    assert squat.value == kivi.value
    x, q = randn(0, 2, 2, 300, head_dim), queries_for(squat.key, 1, 2, 2, 300, head_dim)
    a, b = state_of(squat.key, x, q=q), state_of(kivi.key, x)
    for name in ("codes", "scale", "zero_point", "ring"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name


def test_a_positive_weight_does_change_codes():
    x, q = randn(0, 1, 1, 64, 128), prompt_queries(1).float()
    with_, without = (PackedKV.from_float(x, spec_of(w), q) for w in (1.0, 0.0))
    assert not torch.equal(with_.codes, without.codes)
    half = slice(0, 64)  # the first block is quantized before anything moves
    assert torch.equal(with_.codes[..., half], without.codes[..., half])


def errors(weight, relative, samples=4, dim=64):
    """Mean squared error in the query subspace, and overall, over several thousand groups."""
    x = randn(3, samples, 2, 512, dim) * torch.linspace(0.5, 2, dim)
    q = prompt_queries(5, samples, 2, 300, dim)
    spec = spec_of(weight, relative, block=dim // 2)
    c = compensation_matrix(precision_matrix(q, spec.quantizer.subspace), dim // 2).half()
    e = dequantize_pages(*quantize_pages(x, spec, [c]), spec).double() - x.double()
    _, singular, directions = torch.linalg.svd(q, full_matrices=False)
    q_hat = singular[..., :5, None] * directions[..., :5, :]
    return float((e @ q_hat.mT).square().mean()), float(e.square().mean())


@pytest.mark.parametrize("relative, weights", [(True, (0, 1e-3, 1e-2, 0.1, 1)), (False, (0, 1e-6, 1e-5, 1e-4, 1e-2))])
def test_subspace_error_falls_and_plain_error_rises_with_the_weight(relative, weights):
    subspace, plain = zip(*(errors(w, relative) for w in weights), strict=True)
    for i in range(len(weights) - 1):
        assert subspace[i + 1] <= subspace[i] * 1.02, subspace
        assert plain[i + 1] >= plain[i] * 0.99, plain
    assert subspace[-1] < 0.8 * subspace[0] and plain[-1] > plain[0]


# ---------------------------------------------------------------- the relative weight


@given(st.floats(1e-3, 1e3), st.integers(2, 5), seeds)
@settings(max_examples=15)
def test_relative_weight_ignores_the_scale_of_queries_and_repeats_of_the_prompt(factor, repeats, seed):
    q, subspace = prompt_queries(seed, 2, 2, 50, 16), Subspace(5, 0.7, True, 8)
    once = precision_matrix(q, subspace)
    assert torch.allclose(precision_matrix(q * factor, subspace), once, rtol=1e-8, atol=1e-8)
    assert torch.allclose(precision_matrix(q.repeat(1, 1, repeats, 1), subspace), once, rtol=1e-8, atol=1e-8)


def test_the_papers_lambda_grows_with_both():
    q, subspace = prompt_queries(0, dim=16), Subspace(5, 1e-3, False, 8)
    once, eye = precision_matrix(q, subspace), torch.eye(16).double()
    assert torch.allclose(precision_matrix(q * 3, subspace) - eye, 9 * (once - eye))
    assert torch.allclose(precision_matrix(q.repeat(1, 1, 4, 1), subspace) - eye, 4 * (once - eye))


@pytest.mark.parametrize("weight", [0.0, 1.0, 8.0, 1e6])
@pytest.mark.parametrize("relative", [True, False])
def test_queries_that_are_all_zero_protect_nothing(weight, relative):
    precision = precision_matrix(torch.zeros(1, 1, 10, 16), Subspace(5, weight, relative, 8))
    assert torch.equal(precision[0, 0], torch.eye(16).double())


@given(st.integers(17, 200), seeds)
@settings(max_examples=10)
def test_a_rank_beyond_head_dim_is_all_of_it(rank, seed):
    q = prompt_queries(seed, 1, 2, 40, 16)
    full = torch.eye(16).double() + 0.3 * q.mT @ q
    assert torch.allclose(precision_matrix(q, Subspace(rank, 0.3, False, 8)), full, rtol=1e-9, atol=1e-6)
    spec = coded(2, "channel", 8, 8, subspace=Subspace(rank, 1.0, True, 8))
    x = randn(seed, 1, 2, 30, DIM)
    assert torch.isfinite(state_of(spec, x, q=queries_for(spec, seed, 1, 2)).dequantize(30)).all()


# ---------------------------------------------------------------- batches and prompts

SPEC = coded(2, "channel", 8, 16, subspace=Subspace(3, 1.0, True, DIM // 2))


def test_encoding_a_batch_equals_encoding_each_sample_alone():
    x = randn(0, 3, 2, 80, DIM)
    q = queries_for(SPEC, 1, 3, 2) * torch.tensor([1.0, 5.0, 0.1])[:, None, None, None]
    batch = state_of(SPEC, x, q=q)
    for i in range(3):
        alone = state_of(SPEC, x[i : i + 1], q=q[i : i + 1])
        c, whole = alone.compensation.float(), batch.compensation[i : i + 1].float()
        assert torch.allclose(c, whole, rtol=2e-3, atol=1e-6)
        assert ((alone.dequantize(80) - batch.dequantize(80)[i : i + 1]).abs() > 1e-2).float().mean() < 2e-3
        encoded = quantize_pages(x[i : i + 1], SPEC, [batch.compensation[i : i + 1]])
        for one, all_ in zip(encoded, quantize_pages(x, SPEC, [batch.compensation]), strict=True):
            assert torch.equal(one, all_[i : i + 1])
    assert (batch.compensation[0] - batch.compensation[1]).abs().max() > 1e-2  # each sample has its own


def test_query_heads_of_a_kv_head_are_stacked_in_order():
    q = queries_for(SPEC, 1, 2, 3)  # 6 query heads on 3 KV heads
    got = fit_compensation(q, None, 3, SPEC.quantizer.subspace)
    for head in range(3):
        stacked = torch.cat([q[:, 2 * head], q[:, 2 * head + 1]], 1)[:, None]
        expected = compensation_matrix(precision_matrix(stacked, SPEC.quantizer.subspace), DIM // 2)
        assert torch.allclose(got[:, head : head + 1], expected, atol=1e-9)


def padded_mask(padding: list[int], tokens: int, kind: str):
    allowed = torch.ones(tokens, tokens, dtype=torch.bool).tril().repeat(len(padding), 1, 1, 1)
    for i, count in enumerate(padding):
        allowed[i, :, :, :count] = False
    if kind == "bool":
        return allowed
    return torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("relative", [True, False])
def test_left_padding_does_not_affect_the_subspace(kind, relative):
    spec = coded(2, "channel", 8, 16, subspace=Subspace(3, 1.0 if relative else 1e-2, relative, DIM // 2))
    padding, tokens = [0, 3, 11, 19], 20
    q, x = queries_for(spec, 1, 4, 2), randn(0, 4, 2, tokens, DIM)
    for i, count in enumerate(padding):
        q[i, :, :count] = 1000.0
    state = KVState.allocate(spec, 4, 2, DIM, x.dtype, "cpu", tokens)
    state.append(x, 0, q, padded_mask(padding, tokens, kind))
    for i, count in enumerate(padding):
        own = fit_compensation(q[i : i + 1, :, count:], None, 2, spec.quantizer.subspace)
        assert torch.allclose(state.compensation[i : i + 1].double(), own, rtol=2e-3, atol=1e-6), f"padding {count}"


@pytest.mark.parametrize("prompt", [1, 2, 5, 15])
def test_prompts_shorter_than_a_page_fix_the_subspace_for_later_tokens(prompt):
    x, q = randn(0, 2, 2, 100, DIM), queries_for(SPEC, 1, 2, 2, prompt)
    state = state_of(SPEC, x, [prompt] + [1] * (100 - prompt), q)
    fitted = fit_compensation(q, None, 2, SPEC.quantizer.subspace).to(state.compensation.dtype)
    assert torch.equal(state.compensation, fitted)  # frozen after the prompt
    pages = x[:, :, :96]
    for got, expected in zip(
        (state.codes, state.scale, state.zero_point), quantize_pages(pages, SPEC, [fitted]), strict=True
    ):
        assert torch.equal(got[:, :, :6], expected)


def test_starting_over_fits_a_new_subspace():
    x = randn(0, 1, 2, 40, DIM)
    state = state_of(SPEC, x, q=queries_for(SPEC, 1, 1, 2))
    old = state.compensation.clone()
    state.append(x, 0, queries_for(SPEC, 9, 1, 2))
    assert not torch.allclose(state.compensation, old)

"""Fit rules: how the scale and zero point of a group are chosen, and the bound on squared error that each rule
promises."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpass import schemes
from kvpass.codec import dequantize_pages, quantize_pages
from kvpass.codec.affine import assign, calibrate, dequantize, fit_codes, fit_hqq, fit_lsq, fit_minmax
from kvpass.errors import KVPassError

from common import DIM, KINDS, awkward, coded, randn, seeds

GROUP = 32


def squared_error(x, scale, zero_point, codes):
    return (x.double() - dequantize(codes, scale, zero_point).double()).square().sum(-1)


def with_eta(x, bits, eta, dtype=torch.float16):
    scale, zero_point = fit_minmax(x, -1, bits, dtype)
    codes = assign(x, scale, zero_point, bits)
    return squared_error(x, *calibrate(scale, zero_point, bits, eta), codes)


def with_lsq(x, bits, dtype=torch.float16):
    scale, zero_point = fit_lsq(x, -1, bits, dtype)
    return squared_error(x, scale, zero_point, assign(x, scale, zero_point, bits))


def rounding(x, bits, dtype=torch.float16):
    """The error bound for storing scale and zero point in 16 bits: one unit in the last place, in every element."""
    eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    step = 2 * x.abs().amax(-1).double() * eps + tiny * 2**bits
    return x.shape[-1] * step.square()


@given(st.sampled_from((1, 2, 3, 4)), st.floats(0, 0.499), seeds, st.sampled_from(KINDS))
@settings(max_examples=150)
def test_least_squares_is_never_worse_than_min_max_with_any_eta(bits, eta, seed, kind):
    x = awkward(seed, kind, 8, GROUP, limit=3e4)
    error, best = with_eta(x, bits, eta), with_lsq(x, bits)
    slack = rounding(x, bits) + 2 * (rounding(x, bits) * error).sqrt()
    assert (best <= error + slack).all()


@given(st.lists(st.sampled_from((-2.0, -1.0, 0.0, 0.5, 1.0, 3.0)), min_size=8, max_size=8), st.floats(0, 0.499))
@settings(max_examples=200)
def test_least_squares_is_never_worse_on_values_with_ties(values, eta):
    x = torch.tensor(values)[None]
    for bits in (1, 2, 3):
        assert with_lsq(x, bits) <= with_eta(x, bits, eta) + 1e-4


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_a_constant_group_decodes_to_its_value(bits):
    x = torch.tensor([0.0, 1.0, -2.5, 1024.0])[:, None].expand(4, GROUP)
    scale, zero_point = fit_lsq(x, -1, bits, torch.float16)
    assert torch.equal(dequantize(assign(x, scale, zero_point, bits), scale, zero_point), x)


@pytest.mark.parametrize("dim", [-1, -2])
def test_the_group_may_lie_along_any_dim(dim):
    x = randn(3, 4, GROUP, GROUP)
    turned = x if dim == -1 else x.mT
    for got, expected in zip(fit_lsq(x, dim, 2, torch.float16), fit_lsq(turned, -1, 2, torch.float16), strict=True):
        assert torch.equal(got if dim == -1 else got.mT, expected)


@given(st.sampled_from((1, 2, 4)), seeds)
def test_fitting_given_codes_solves_the_least_squares_problem(bits, seed):
    x = randn(seed, 5, GROUP).double()
    codes = torch.randint(0, 2**bits, (5, GROUP), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    codes[:, :2] = torch.tensor([0, 1])
    scale, zero_point = fit_codes(x, codes, -1, torch.float64)
    for row in range(5):
        design = torch.stack([codes[row].double(), torch.ones(GROUP).double()], 1)
        solution = torch.linalg.lstsq(design, x[row][:, None]).solution.flatten()
        assert torch.allclose(torch.cat([scale[row], zero_point[row]]), solution, atol=1e-10)


@pytest.mark.parametrize("bits, eta", [(1, 1 / 6), (1, 1 / 3), (2, 0.045), (2, 0.09)])
def test_eta_moves_both_ends_inwards_by_its_share_of_the_range(bits, eta):
    """Equation 9 of XQuant; quantized values are those of the full range."""
    x = randn(0, 16, GROUP)
    plain, cut = (coded(bits, "token", GROUP, 8, eta=e) for e in (0.0, eta))
    pages = x.view(1, 1, 16, GROUP)
    (codes, scale, zero_point), (cut_codes, cut_scale, cut_zero) = (
        quantize_pages(pages, plain),
        quantize_pages(pages, cut),
    )
    assert torch.equal(codes, cut_codes)
    length = (2**bits - 1) * scale.float()
    torch.testing.assert_close(cut_zero.float(), zero_point.float() + eta * length, atol=2e-3, rtol=1e-3)
    top = cut_zero.float() + (2**bits - 1) * cut_scale.float()
    torch.testing.assert_close(top, zero_point.float() + (1 - eta) * length, atol=4e-3, rtol=2e-3)


@pytest.mark.parametrize(
    "bits, plain, eta, cut", [(1, 1.960, 1 / 3, 0.364), (2, 0.1547, 0.09, 0.1313)], ids=["1 bit", "2 bits"]
)
def test_mean_squared_errors_on_a_gaussian_are_the_known_ones(bits, plain, eta, cut):
    x = randn(0, 20_000, GROUP)
    assert with_eta(x, bits, 0.0).mean() / GROUP == pytest.approx(plain, rel=0.02)
    assert with_eta(x, bits, eta).mean() / GROUP == pytest.approx(cut, rel=0.1)
    assert with_lsq(x, bits).mean() / GROUP < {1: 0.341, 2: 0.1239}[bits]


@pytest.mark.parametrize("per", ["channel", "token"])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_pages_fitted_by_least_squares_decode_with_less_error(per, bits):
    x = randn(bits, 1, 2, 64, DIM)
    errors = []
    for fit in ("minmax", "lsq"):
        spec = coded(bits, per, 16, 32, fit=fit)
        errors.append((dequantize_pages(*quantize_pages(x, spec), spec) - x).square().mean())
    assert errors[1] < 0.95 * errors[0]


@pytest.mark.parametrize("fit", [dict(), dict(eta=0.045), dict(fit="lsq")], ids=str)
@pytest.mark.parametrize("scheme", ["kivi", "squat", "rtn", "logquant", "asymkv", "xquant"])
def test_every_uniform_scheme_takes_every_fit_at_the_same_storage(scheme, fit):
    if scheme in ("asymkv", "xquant"):
        eta = fit.get("eta", 0.0)
        fit = dict(eta_1=eta, eta_2=eta, fit=fit.get("fit", "minmax"))
    layer = schemes.LayerGeometry(0, 2, 3, 64, torch.float32, torch.device("cpu"))
    plan, plain = (schemes.get(scheme, **{"rope": "pre", **f}).plan(layer) for f in (fit, {}))
    for spec, other in ((plan.key, plain.key), (plan.value, plain.value)):
        assert spec.stored_as == other.stored_as
        assert (spec.quantizer.fit, spec.quantizer.eta) == (
            fit.get("fit", "minmax"),
            fit.get("eta", fit.get("eta_1", 0.0)),
        )


def quasi_norm(x, scale, zero_point, bits):
    return (x - dequantize(assign(x, scale, zero_point, bits), scale, zero_point)).abs().pow(0.7).sum(-1)


@given(st.sampled_from((1, 2, 3, 4, 8)), seeds, st.sampled_from(KINDS))
def test_half_quadratic_zero_points_are_never_worse_than_min_max_in_their_norm(bits, seed, kind):
    x = awkward(seed, kind, 8, GROUP, limit=3e4)
    found, plain = (fit(x, -1, bits, torch.float16) for fit in (fit_hqq, fit_minmax))
    assert torch.equal(found[0], plain[0])
    assert (quasi_norm(x, *found, bits) <= quasi_norm(x, *plain, bits)).all()


def test_a_half_quadratic_zero_point_favours_most_values_over_an_outlier():
    """One round of HQQ in float64: shrink the error, then average what is left."""
    x = torch.cat([torch.linspace(0, 1, 31), torch.tensor([9.0])])[None]
    scale, zero_point = fit_minmax(x, -1, 2, torch.float16)
    assert quasi_norm(x, *fit_hqq(x, -1, 2, torch.float16), 2) < 0.9 * quasi_norm(x, scale, zero_point, 2)
    codes = assign(x, scale, zero_point, 2).double()
    error = x.double() - codes * scale.double() - zero_point.double()
    shrunk = (error.abs() - error.abs().clamp_min(1e-12) ** -0.3 / 10).clamp_min(0)
    first = (x.double() - error.sign() * shrunk - codes * scale.double()).mean(-1, keepdim=True)
    assert quasi_norm(x, *fit_hqq(x, -1, 2, torch.float16), 2) <= quasi_norm(x, scale, first.half(), 2)


def test_half_quadratic_groups_may_lie_along_any_dim_and_refuse_what_they_cannot_fit():
    x = randn(3, 4, GROUP, GROUP)
    for got, expected in zip(fit_hqq(x, -2, 2, torch.float16), fit_hqq(x.mT, -1, 2, torch.float16), strict=True):
        torch.testing.assert_close(got.mT, expected, atol=1e-2, rtol=1e-2)
    for fields in (dict(eta=0.1),):
        with pytest.raises(KVPassError, match="hqq"):
            schemes.get("kivi-hqq", **fields)

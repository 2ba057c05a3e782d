"""Predictors: ridge regression from sums, low rank and quantized, against float64."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpass.calibration.regression import Moments, fit, linear, low_rank, quantize
from kvpass.codec.predictor import matrix, parse_predictor, run, weights

from common import randn, seeds


def regression(seed, rows=400, inputs=24, outputs=16):
    """Inputs with directions of very different scale, outputs that depend on them, and a mean."""
    mix = randn(seed, inputs, inputs) * torch.logspace(0, -1, inputs)[:, None]
    x = randn(seed + 1, rows, inputs) @ (mix + torch.eye(inputs)) + 1
    return x, x @ randn(seed + 2, inputs, outputs) + 0.3 * randn(seed + 3, rows, outputs) - 2


def batches(x, y, *sizes):
    return lambda: zip(x.split(*sizes or (len(x),)), y.split(*sizes or (len(x),)), strict=True)


@given(seeds)
def test_the_fit_solves_least_squares(seed):
    x, y = regression(seed)
    moments = Moments.of(batches(x, y, [1, 99, 300]))
    weight = linear(moments, ridge=0.0)
    full = torch.cat([x, torch.ones(len(x), 1)], 1).double()
    expected = torch.linalg.lstsq(full, y.double()).solution
    torch.testing.assert_close(weight, expected[:-1].mT, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(moments.bias(weight), expected[-1], atol=1e-5, rtol=1e-5)


@given(seeds)
def test_ridge_is_least_squares_with_rows_that_pull_to_zero(seed):
    x, y = regression(seed)
    moments = Moments.of(batches(x, y))
    xc, yc = (t.double() - t.double().mean(0) for t in (x, y))
    pull = (1e-3 * xc.square().sum(0).mean()).sqrt() * torch.eye(x.shape[1], dtype=torch.float64)
    full = torch.cat([xc, pull]), torch.cat([yc, torch.zeros(x.shape[1], y.shape[1], dtype=torch.float64)])
    torch.testing.assert_close(linear(moments, 1e-3), torch.linalg.lstsq(*full).solution.mT, atol=1e-6, rtol=1e-6)


@given(seeds, st.integers(1, 15))
def test_reduced_rank_regression_loses_exactly_the_smallest_directions(seed, rank):
    x, y = regression(seed)
    moments = Moments.of(batches(x, y))
    best = linear(moments, 0.0)
    down, up = low_rank(moments, 0.0, rank)
    assert down.shape == (rank, 24) and up.shape == (16, rank)
    xc = x.double() - x.double().mean(0)
    lost = (xc @ best.mT - xc @ (up @ down).mT).square().sum()
    sizes = torch.linalg.svdvals(xc @ best.mT)
    torch.testing.assert_close(lost, sizes[rank:].square().sum(), atol=1e-4, rtol=1e-6)


@given(seeds)
def test_errors_of_four_bit_weights_go_where_the_inputs_are_small(seed):
    """In the metric of the inputs, quantization with compensation has smaller errors than rounding."""
    x, y = regression(seed, inputs=64, outputs=64)
    moments = Moments.of(batches(x, y))
    weight, (xx, _) = linear(moments, 1e-3), moments.centred()
    errors = []
    for covariance in (xx, torch.eye(64, dtype=torch.float64)):
        error = matrix(quantize(weight, covariance, 1e-3, torch.float16)).double() - weight
        errors.append((error @ xx @ error.mT).trace())
    assert errors[0] < errors[1]


@given(st.sampled_from(("linear", "linear-4", "low-rank", "low-rank-4", "mlp")), seeds)
def test_predictors_do_no_worse_than_the_mean(predictor, seed):
    x, y = regression(seed, inputs=32, outputs=32)
    data = batches(x, y, 100)
    moments = Moments.of(data)
    tensors = fit(predictor, data, moments, ridge=1e-3, rank=None, dtype=torch.float16)
    prediction = run(parse_predictor(predictor)[0], x, *weights(predictor, tensors))
    assert (prediction - y).square().sum() <= (y - y.mean(0)).square().sum()
    assert math.isclose(moments.energy(), (y - y.mean(0)).double().square().sum().item(), rel_tol=1e-4)


def test_a_wider_predictor_learns_what_is_not_linear():
    x = torch.nn.functional.layer_norm(randn(0, 2000, 8), (8,))
    y, errors = x.abs(), []
    for predictor in ("linear", "mlp"):
        tensors = fit(
            predictor, batches(x, y, 500), Moments.of(batches(x, y)), ridge=1e-3, rank=None, dtype=torch.float16
        )
        errors.append((run(parse_predictor(predictor)[0], x, *weights(predictor, tensors)) - y).square().mean())
    assert errors[1] < 0.5 * errors[0]

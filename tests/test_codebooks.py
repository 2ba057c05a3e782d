"""The rotations and grids of HIGGS and QuaRot, and attention over their pages."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpass import KVPassError, schemes
from kvpass.codec import dequantize_pages, quantize_pages
from kvpass.codec.across_heads import across_heads
from kvpass.codec.codebook import assign_points, fit_rms, grid, grid_shape, look_up, names
from kvpass.codec.hadamard import hadamard, inverse_hadamard, signs
from kvpass.codec.tensors import Pack
from kvpass.lowering import reference
from kvpass.lowering.call_types import AttendCall
from kvpass.lowering.inductor import attend as inductor_attend
from kvpass.schemes import HIGGSConfig, LayerGeometry

from common import (
    assert_same_contents,
    awkward,
    chunkings,
    coded,
    dtypes,
    only_reference,
    randn,
    recoded,
    seeds,
    state_of,
)

GEOMETRY = LayerGeometry(0, 1, 2, 16, torch.float32, torch.device("cpu"))

# Published errors per dimension of optimal grids for a standard normal vector, and the lower bound at the same rate.
PUBLISHED = {
    "d1n2": 0.36338, "d1n3": 0.19017, "d1n4": 0.11748, "d1n8": 0.03455, "d1n16": 0.00950,
    "d2n16": 0.10764, "d2n64": 0.02960, "d2n256": 0.00775, "d4n64": 0.1842, "d4n256": 0.09658,
}  # fmt: skip


# ---------------------------------------------------------------- the rotation


@given(st.sampled_from((16, 64, 128, 96, 80, 192)), seeds)
def test_rotation_is_orthogonal(channels, seed):
    matrix = hadamard(torch.eye(channels).double(), seed % 100)
    torch.testing.assert_close(matrix @ matrix.mT, torch.eye(channels).double(), atol=1e-12, rtol=0)
    x = randn(seed, 3, channels).double()
    torch.testing.assert_close(inverse_hadamard(hadamard(x, 7), 7), x, atol=1e-12, rtol=0)
    torch.testing.assert_close(hadamard(x, 7).norm(dim=-1), x.norm(dim=-1), atol=1e-12, rtol=1e-12)


def test_signs_are_balanced_and_differ_between_seeds():
    drawn = torch.stack([signs(128, seed) for seed in range(200)])
    assert drawn.abs().eq(1).all() and drawn.mean().abs() < 0.03
    assert (drawn @ drawn.mT / 128 - torch.eye(200)).abs().max() < 0.45


@given(seeds, st.sampled_from((32, 48)))
def test_attention_is_unchanged_by_rotating_both_sides(seed, channels):
    q, k, v = (randn(seed + i, 2, 5, channels).double() for i in range(3))
    plain = (q @ k.mT / math.sqrt(channels)).softmax(-1) @ v
    rotated = (hadamard(q, 1) @ hadamard(k, 1).mT / math.sqrt(channels)).softmax(-1) @ hadamard(v, 2)
    torch.testing.assert_close(inverse_hadamard(rotated, 2), plain, atol=1e-10, rtol=0)


@pytest.mark.parametrize("kind", ["constant", "one channel", "ramp", "alternating"])
def test_structured_vectors_are_no_worse_than_normal_ones(kind):
    x = {
        "constant": torch.ones(64),
        "one channel": torch.eye(64)[5] * 9,
        "ramp": torch.arange(64.0),
        "alternating": torch.ones(64) * (torch.arange(64) % 2 * 2 - 1),
    }[kind].expand(1, 1, 32, 64)
    worst = 0.0
    for seed in range(8):
        spec = coded(4, "token", 64, 32, rotation=seed, grid="d2n16")
        error = (dequantize_pages(*quantize_pages(x, spec), spec) - x).square().sum() / x.square().sum()
        worst += float(error) / 8
    assert worst < 0.16  # a normal vector: 0.108; without signs a constant gives 0.89


# ---------------------------------------------------------------- grids


@pytest.mark.parametrize("name", PUBLISHED)
def test_grids_reach_the_published_error(name):
    points, (dim, bits) = grid(name), grid_shape(name)
    assert points.shape == (int(name.split("n")[1]), dim) and 2**bits >= len(points)
    x = torch.randn(1 << 19, dim, generator=torch.Generator().manual_seed(1))
    error = (x - look_up(assign_points(x, points), points)).square().mean()
    noise = {1: 0.004, 2: 0.004, 4: 0.004}[dim]  # sampling noise
    assert error <= PUBLISHED[name] * (1.005 + noise)
    assert error >= 4.0 ** (-math.log2(len(points)) / dim)


@given(st.sampled_from(names()), seeds)
def test_the_nearest_point_is_taken(name, seed):
    points = grid(name)
    x = randn(seed, 4, 4 * points.shape[1])
    codes = assign_points(x, points)
    vectors = x.unflatten(-1, (-1, points.shape[1]))
    distance = (vectors[..., None, :] - points).square().sum(-1)
    chosen = distance.gather(-1, codes.long()[..., None])[..., 0]
    torch.testing.assert_close(chosen, distance.min(-1).values, atol=1e-5, rtol=1e-5)


def test_an_unknown_grid_lists_the_known_ones():
    with pytest.raises(KVPassError, match=r"no grid 'd3n5'.*d2n16"):
        HIGGSConfig(grid="d3n5")


@pytest.mark.parametrize(
    "arguments, says",
    [
        (dict(bits=2, per="token", group_size=16), "Grid 'd2n16' needs bits=4"),
        (dict(bits=4, per="channel", group_size=16), "per='token'"),
        (dict(bits=4, per="token", group_size=15), "multiple of 2; got"),
        (dict(bits=4, per="token", group_size=16, own_codes=0.0), "cannot share"),
    ],
)
def test_impossible_grid_specs_are_refused(arguments, says):
    with pytest.raises(KVPassError, match=says):
        coded(**arguments, page_size=32, grid="d2n16")


# ---------------------------------------------------------------- pages


def plans():
    for name in ("higgs", "higgs-3", "higgs-4", "higgs-1.5", "quarot"):
        overrides = dict(group_size=16) if name == "quarot" else {}
        yield name, schemes.get(name, **overrides).plan(GEOMETRY)
    yield "higgs, lsq", schemes.get("higgs", fit="lsq").plan(GEOMETRY)


PLANS = dict(plans())


@pytest.mark.parametrize("name, bits", [("higgs", 2), ("higgs-3", 3), ("higgs-4", 4), ("higgs-1.5", 1.5)])
def test_bits_per_value_are_those_of_the_grid_and_one_scale_a_group(name, bits):
    spec = schemes.get(name).plan(LayerGeometry(0, 1, 2, 64, torch.float32, torch.device("cpu"))).key
    codes, scale, zero_point = quantize_pages(randn(0, 1, 2, 64, 64), spec)
    assert 8 * codes.nbytes / (2 * 64 * 64) == bits and zero_point.numel() == 0
    assert 8 * scale.nbytes / (2 * 64 * 64) == 16 / 64


@pytest.mark.slow
@given(st.sampled_from(list(PLANS)), st.sampled_from(("key", "value")), chunkings(), seeds, dtypes)
def test_append_in_any_chunking_equals_append_at_once(name, which, chunks, seed, dtype):
    # the mean is that of the tokens packed first: of more tokens, if they arrive together
    spec = recoded(getattr(PLANS[name], which), center=False)
    x = randn(seed, 2, 2, sum(chunks), 16, dtype=dtype)
    assert_same_contents(state_of(spec, x, chunks), state_of(spec, x), x.shape[2])


@given(st.sampled_from(("d2n16", "d2n64", "d4n64")), seeds)
def test_dequantize_equals_its_definition(name, seed):
    spec = coded(grid_shape(name)[1], "token", 16, 32, rotation=3, grid=name)
    x = randn(seed, 1, 2, 32, 16)
    rotated = hadamard(x, 3)
    scale = fit_rms(rotated, torch.float16).float()
    expected = inverse_hadamard(look_up(assign_points(rotated / scale, grid(name)), grid(name)) * scale, 3)
    torch.testing.assert_close(dequantize_pages(*quantize_pages(x, spec), spec), expected, atol=1e-5, rtol=1e-5)


def test_fitting_the_scale_to_the_codes_lowers_the_error():
    x, errors = randn(0, 1, 2, 640, 16), []
    for fit in ("rms", "lsq"):
        spec = schemes.get("higgs", fit=fit).plan(GEOMETRY).value
        errors.append((dequantize_pages(*quantize_pages(x, spec), spec) - x).square().mean())
    assert errors[1] < 0.99 * errors[0]


def test_a_group_of_zeros_decodes_to_zeros():
    for name in PLANS:
        spec = PLANS[name].key
        x = torch.zeros(1, 1, 32, 16)
        assert torch.equal(dequantize_pages(*quantize_pages(x, spec), spec), x)


# ---------------------------------------------------------------- attention


@pytest.mark.slow
@pytest.mark.nightly_cases("130-quarot", "130-higgs-1.5", "5-*")
@pytest.mark.parametrize("name", sorted({*PLANS} - {"higgs-3"}))  # the same kernel as higgs, with another grid
@pytest.mark.parametrize("n", [5, 130])
def test_compiled_attention_equals_attention_over_dequantized_tokens(name, n):
    plan = PLANS[name]
    x = [randn(i, 2, 2, n + 1, 16) for i in range(2)]
    states = [state_of(s, t[:, :, :n], room=n) for s, t in zip((plan.key, plan.value), x, strict=True)]
    packs = [Pack.of(s.pack, s.spec) for s in states]
    q, new = randn(7, 2, 6, 1, 16), [t[:, :, n:] for t in x]
    call = AttendCall(q, *packs, n, *new, None, False, 0.3, 0.0, plan.key, plan.value)
    with only_reference():
        dense = [torch.cat([s.dequantize(n), t], 2) for s, t in zip(states, new, strict=True)]
    expected = reference.attention(call, *dense)
    torch.testing.assert_close(reference.attend(call)[0], expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(inductor_attend.attend(call)[0], expected, atol=3e-6, rtol=1e-5)


def test_a_group_that_falls_on_the_point_zero_stays_zero():
    x = randn(0, 1, 1, 16, 64)
    x[:, :, 3] = 0
    spec = coded(2, "token", 64, 16, grid="d1n3", fit="lsq")
    codes, scale, zero_point = quantize_pages(x, spec)
    assert torch.isfinite(scale).all()
    assert not dequantize_pages(codes, scale, zero_point, spec)[:, :, 3].any()


# ---------------------------------------------------------------- the C++ kernel that quantizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["normal", "outliers", "mixed magnitudes", "two values"])
@pytest.mark.parametrize(
    ("grid_name", "group_size", "rotation", "channels"),
    [("d2n16", 64, 0, 64), ("d2n64", 48, 3, 96), ("d2n256", 32, None, 64), ("d4n64", 64, 1, 64), ("d1n8", 32, 2, 32)],
)
def test_the_kernel_quantizes_as_the_reference_bit_for_bit(grid_name, group_size, rotation, channels, kind, dtype):
    bits = grid_shape(grid_name)[1]
    spec = coded(bits, "token", group_size, 32, rotation=rotation, grid=grid_name)
    for text in map(str, (spec, across_heads(spec, 3, channels))):
        for pages in (1, 5):
            x = awkward(pages, kind, 2, 3, pages * 32, channels, limit=100).to(dtype)
            x[0, 0, 3] = 0
            got, expected = (torch.ops.kvpass.quantize(x, [], text, name) for name in ("cpp-grid", "reference"))
            for mine, theirs in zip(got, expected, strict=True):
                assert mine.dtype == theirs.dtype and mine.shape == theirs.shape and torch.equal(mine, theirs)

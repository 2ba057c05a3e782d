"""The quantizers of KIVI, SQuat, Kitty and KVQuant against the formulas of their papers, computed value by value in
float64. (`test_codecs` has KVarN, TurboQuant, PolarQuant, ZipCache, GEAR and lattices.)

Caches round other parameters to 16 bits and assign quantized values based on the rounded parameters; the tests do the
same.
"""

import math

import pytest
import torch

from kvpass.calibration.datatypes import fit_datatype
from kvpass.codec import quantize_pages
from kvpass.codec.bitpack import unpack
from kvpass.codec.subspace import compensation_matrix, precision_matrix
from kvpass.codec.tensors import of_pages
from kvpass.schemes import LayerGeometry, get

from common import randn

DIM, PAGE = 16, 32


def spec_of(name, side, **fields):
    geometry = LayerGeometry(0, 1, 1, DIM, torch.float32, torch.device("cpu"))
    return getattr(get(name, residual=PAGE, **fields).plan(geometry), side)


def page(seed):
    """Tokens ``[32, 16]`` whose channels differ in scale and mean."""
    return 3 * randn(seed, PAGE, DIM) * torch.exp2(randn(seed + 1, DIM)) + 2 * randn(seed + 2, DIM)


def stored(x, spec, fitted=()):
    """The stored tensors of one page, by name, with quantized values unpacked to ``[32, 16]``."""
    kept = dict(zip(of_pages(spec), quantize_pages(x[None, None], spec, fitted), strict=True))
    found = {name: tensor[0, 0, 0] for name, tensor in kept.items()}
    return found | {"codes": unpack(found["codes"], spec.bits).double()}


def down(value):
    """The largest 16-bit float that is not above ``value``."""
    nearest = torch.tensor(float(value)).half()
    below = torch.nextafter(nearest, torch.tensor(-math.inf).half())
    return float(below if float(nearest) > float(value) else nearest)


def asymmetric(values, bits):
    """Equations 1 and 2 of KIVI for one group: ``z = min``, ``s = (max - min) / (2**B - 1)``, ``round((x - z) / s)``,
    with z and s rounded to 16 bits such that every value stays in the range."""
    zero_point = down(min(values))
    scale = -down(-(max(values) - zero_point) / (2**bits - 1))
    return [min(max(round((value - zero_point) / scale), 0), 2**bits - 1) for value in values], scale, zero_point


def assert_same(found, wanted, ties=0.01):
    """Assert that quantized values are equal except for ties that float32 and float64 round differently."""
    found, wanted = (torch.as_tensor(codes).double() for codes in (found, wanted))
    assert ((found - wanted).abs() <= 1).all() and (found != wanted).double().mean() <= ties


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("side, group", [("key", 16), ("value", 8)])
def test_kivi_is_asymmetric_by_channel_for_keys_and_by_token_for_values(side, group, bits):
    x, spec = page(bits), spec_of("kivi", side, bits=bits, group_size=group)
    found, rows = stored(x, spec), x.double().T if side == "key" else x.double()
    for i, row in enumerate(rows.tolist()):
        for start in range(0, len(row), group):
            codes, scale, zero_point = asymmetric(row[start : start + group], bits)
            g = start // group
            mine = found["codes"].T if side == "key" else found["codes"]
            assert_same(mine[i, start : start + group], codes, 1 / group)
            at = (g, i) if side == "key" else (i, g)
            assert float(found["scale"][at]) == pytest.approx(scale, rel=2**-9)
            assert float(found["zero_point"][at]) == pytest.approx(zero_point, rel=2**-9)


@pytest.mark.parametrize("block", [4, 8])
@pytest.mark.parametrize("lam", [1e-3, 1e-1])
def test_squat_quantizes_block_by_block_and_moves_what_is_left_by_b_h_d(block, lam):
    """Algorithm 1 of the paper: after block t the later channels are updated by ``B_t H_t d`` (eq. 6), with A and B
    blocks of the inverse of ``P = I + lambda Q^T Q``."""
    x, rank = page(7), 3
    q = randn(3, 64, DIM).double() @ torch.diag(torch.logspace(1, -1, DIM).double())
    spec = spec_of("squat", "key", group_size=16, rank=rank, lam=lam, block_size=block)
    fitted = compensation_matrix(precision_matrix(q[None, None], spec.quantizer.subspace), block)
    found = stored(x, spec, [fitted.float()])
    _, singular, directions = torch.linalg.svd(q, full_matrices=False)
    q_hat = singular[:rank, None] * directions[:rank]
    inverse = torch.linalg.inv(torch.eye(DIM).double() + lam * q_hat.T @ q_hat)
    left, wanted = x.double().clone(), torch.zeros(PAGE, DIM).double()
    for start in range(0, DIM, block):
        stop = start + block
        error = torch.zeros(PAGE, block).double()
        for channel in range(start, stop):
            for first in range(0, PAGE, 16):
                group = slice(first, first + 16)
                codes, scale, zero_point = asymmetric(left[group, channel].tolist(), 2)
                wanted[group, channel] = torch.tensor(codes).double()
                decoded = wanted[group, channel] * scale + zero_point
                error[group, channel - start] = decoded - left[group, channel]
        if stop < DIM:
            a, b = inverse[:stop, :stop], inverse[stop:, :stop]
            left[:, stop:] += error @ (b @ torch.linalg.inv(a)[:, -block:]).T
    assert_same(found["codes"], wanted, 0.02)


@pytest.mark.parametrize("share", [0.125, 0.25])
def test_kitty_keeps_the_largest_channels_in_two_tensors_of_two_bits(share):
    """Per channel of a page: 4 bits for the share of channels with the largest mean magnitude, with upper and lower two
    bits stored separately, and 2 bits for all others."""
    x, spec = page(11), spec_of("kitty", "key", group_size=PAGE, share=share)
    found, count = stored(x, spec), int(share * DIM)
    size = [sum(abs(value) for value in channel) / PAGE for channel in x.double().T.tolist()]
    boosted = sorted(sorted(range(DIM), key=lambda i: -size[i])[:count])
    assert found["channels"].flatten().tolist() == boosted
    lower = unpack(found["lower"], 2).double()
    for i, channel in enumerate(x.double().T.tolist()):
        codes, scale, zero_point = asymmetric(channel, 4 if i in boosted else 2)
        mine = found["codes"][:, i]
        if i in boosted:
            mine, scale = 4 * mine + lower[:, boosted.index(i)], 4 * scale
        assert_same(mine, codes, 1 / PAGE)
        assert float(found["scale"][0, i]) == pytest.approx(scale, rel=2**-9)
        assert float(found["zero_point"][0, i]) == pytest.approx(zero_point, rel=2**-9)


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("bits", [2, 3])
def test_kvquant_codes_what_is_no_outlier_by_the_nearest_point_of_a_datatype_of_its_range(side, bits):
    """nuqX: values are scaled to [0, 1] by the range of their channel (keys) or token (values) without outliers, and
    mapped to the nearest of 2**b signposts, which are the k-means of all values."""
    x, spec = page(13), spec_of("kvquant", side, bits=bits, group_size=16, share=0.02)
    found = stored(x, spec)
    where = [int(position) % 65536 for position in found["positions"].flatten()]
    assert len(where) == math.ceil(0.02 * PAGE * DIM)
    size = PAGE // 2 if side == "key" else DIM
    points, inside, pairs = found["points"].flatten().double(), [[] for _ in range(2**bits)], []
    for i in range(DIM if side == "key" else PAGE):
        for first in range(0, PAGE if side == "key" else DIM, size):
            places = [(first + t, i) if side == "key" else (i, first + t) for t in range(size)]
            kept = [place for place in places if place[0] * DIM + place[1] not in where]
            at = (first // size, i) if side == "key" else (i, first // size)
            low, span = float(found["zero_point"][at]), float(found["scale"][at])
            values = [float(x[place]) for place in kept]
            assert low == pytest.approx(min(values), abs=1e-2 * span)
            assert span == pytest.approx(max(values) - min(values), rel=1e-2)
            for place, value in zip(kept, values, strict=True):
                unit = min(max((value - low) / span, 0), 1)
                pairs.append((float(found["codes"][place]), float((points - unit).abs().argmin())))
                inside[int(found["codes"][place])].append(unit)
    assert_same(*zip(*pairs, strict=True))
    means = torch.tensor([sum(units) / len(units) for units in inside]).double()
    torch.testing.assert_close(points, means, atol=0.04, rtol=0)  # filled places of outliers count a little
    assert all(a < b for a, b in zip(points.tolist(), points.tolist()[1:], strict=False))


@pytest.mark.parametrize("bits", [2, 3])
def test_calibrated_kvquant_takes_offline_ranges_of_key_channels_and_q_normed_signposts(bits):
    """Keys use thresholds of their channel, values the range of their token. Both map to the nearest signpost, which
    stands for ``(point - mean of codes) * deviation / deviation of codes + mean``. Values beyond the range are stored
    exactly."""
    x = page(17)
    units = torch.rand(400, generator=torch.Generator().manual_seed(0)) ** 2
    weights = torch.rand(400, generator=torch.Generator().manual_seed(1)) ** 4
    datatype = fit_datatype(lambda: [(units, weights)], bits, normalized=True)
    points, coded = datatype[0].double(), (units.unsqueeze(1) - datatype[0]).abs().argmin(1)
    for i in range(2**bits):  # weighted means of the nearest values
        mine = coded == i
        assert float(points[i]) == pytest.approx(float((units * weights)[mine].sum() / weights[mine].sum()), abs=2e-3)
    for moment in (torch.Tensor.mean, torch.Tensor.std):
        assert float(moment(datatype[1][coded])) == pytest.approx(float(moment(units)), abs=2e-3)
    low, high = x.quantile(0.04, 0), x.quantile(0.96, 0)
    ranges = torch.stack([low, high - low])
    for side, fitted in (("key", [datatype, ranges]), ("value", [datatype])):
        spec = spec_of("kvquant-calibrated", side, bits=bits, share=0.08)
        kept = quantize_pages(x[None, None], spec, [tensor[None, None] for tensor in fitted])
        scales = 0 if side == "key" else 32 * PAGE
        assert 8 * sum(one.nbytes for one in kept) == bits * x.numel() + scales + 32 * math.ceil(0.08 * x.numel())
        found = stored(x, spec, [tensor[None, None] for tensor in fitted])
        where = [divmod(int(position) % 65536, DIM) for position in found["positions"].flatten()]
        assert len(where) == math.ceil(0.08 * PAGE * DIM)
        if side == "key":
            beyond = ((x < low) | (x > high)).nonzero().tolist()
            assert set(map(tuple, beyond)) <= set(where) or len(beyond) > len(where)
        kept = [(t, c) for t in range(PAGE) for c in range(DIM) if (t, c) not in where]
        pairs = []
        for t, c in kept:
            own = [float(x[t, i]) for i in range(DIM) if (t, i) not in where]
            first, last = (float(low[c]), float(high[c])) if side == "key" else (min(own), max(own))
            unit = (float(x[t, c]) - first) / (last - first)
            pairs.append((float(found["codes"][t, c]), float((points - unit).abs().argmin())))
        assert_same(*zip(*pairs, strict=True))
        assert torch.equal(found["values"].flatten(), torch.stack([x[place] for place in where]).half())

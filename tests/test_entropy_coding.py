"""Entropy-coded codes: exact, close to their entropy, and no larger than that where codes are not as expected."""

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpass import KVPassError
from kvpass.codec import entropy_coding
from kvpass.codec.entropy_coding import OVERHEAD, EntropyCoder, entropy, quantize, rescale

from common import generator, randn


def measured(codes):
    """Bits per value under the best code for these values."""
    share = codes.long().unique(return_counts=True)[1].double() / codes.numel()
    return float(-(share * share.log2()).sum())


def nbytes(kept):
    return sum(x.nbytes for x in kept.values())


@pytest.mark.parametrize("std", [0.07, 0.3, 0.77, 1.9, 13.0, 21.0])
def test_the_expected_entropy_is_that_of_a_normal_variable(std):
    found = measured((std * randn(0, 1 << 20)).round())
    assert abs(float(entropy(torch.tensor(std))) - found) < 0.01


@pytest.mark.parametrize("bits", [0.5, 2.06, 5.0])
def test_steps_are_rescaled_together_to_the_wanted_bits(bits):
    steps, size = torch.rand(200, generator=generator(0)) + 0.01, torch.rand(200, generator=generator(1))
    found = rescale(steps, bits, size)
    assert abs(float((entropy(1 / found) * size).sum() / size.sum()) - bits) < 1e-3
    torch.testing.assert_close(found / found[0], (steps / steps[0]).double())


@settings(max_examples=40)
@given(st.integers(1, 40), st.integers(1, 65), st.floats(-6, 6), st.floats(-3, 3), st.integers(0, 5))
def test_any_codes_come_back(rows, tokens, octave, off, outliers):
    """Also where the expected size is wrong by a factor of 8, and a few codes are as large as any."""
    std = torch.exp2(octave + 2 * randn(1, rows))
    codes = quantize(randn(2, rows, tokens) * (std * 2**off)[:, None])
    codes.view(-1)[:outliers] = torch.tensor([32767, -32767, 128, -128, 3])[: min(outliers, codes.numel())]
    coder = EntropyCoder(std)
    assert torch.equal(coder.decompress(coder.compress(codes), tokens), codes)


def test_no_codes_take_no_space():
    coder = EntropyCoder(torch.full((64,), 1e-6))
    kept = coder.compress(torch.zeros(64, 4096, dtype=torch.int16))
    assert nbytes(kept) < 100
    assert not coder.decompress(kept, 4096).any()


def test_streams_are_close_to_their_entropy():
    std = torch.exp2(torch.linspace(-4, 5, 2048))
    codes = quantize(randn(0, 2048, 128) * std[:, None])
    bits = 8 * nbytes(EntropyCoder(std).compress(codes)) / codes.numel()
    assert bits < 1.02 * OVERHEAD * float(entropy(std).mean())


@pytest.mark.parametrize("off", [0.25, 4.0])
def test_codes_of_another_size_than_expected_stay_close_to_theirs(off):
    """A text unlike those of the calibration: bytes get more room for each code before exceptions pile up."""
    std = torch.exp2(torch.linspace(-3, 3, 1024))
    codes = quantize(randn(0, 1024, 128) * (off * std)[:, None])
    bits = 8 * nbytes(EntropyCoder(std).compress(codes)) / codes.numel()
    assert bits < 1.15 * float(entropy(off * std).mean())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_is_refused(value):
    with pytest.raises(KVPassError, match="NaN or infinite"):
        quantize(torch.tensor([0.0, value]))


def test_without_zstandard_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    entropy_coding._zstandard.cache_clear()
    with pytest.raises(KVPassError, match="pip install zstandard"):
        EntropyCoder(torch.ones(4))

"""The quantizer: error bounds and identities as properties, and equality with obvious formulations."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpass import KVPassError, NonFiniteError
from kvpass.codec import Subspace, Transform, dequantize_pages, parse, quantize_pages
from kvpass.codec.affine import assign, params_dtype
from kvpass.codec.bitpack import (
    byte_rows,
    num_planes,
    pack,
    smallest_page,
    unpack,
    unpack_plane,
    unpack_plane_unshifted,
)
from kvpass.codec.subspace import compensation_matrix, precision_matrix

from common import (
    DIM,
    DTYPES,
    KINDS,
    WIDTHS,
    awkward,
    coded,
    dtypes,
    generator,
    limit,
    naive_codes,
    naive_dequantize,
    naive_pack,
    queries_for,
    randn,
    recoded,
    seeds,
    specs,
    spread,
    widths,
)

pytestmark = pytest.mark.usefixtures("reference_lowering")
EPS = torch.finfo(torch.float32).eps
kinds = st.sampled_from(KINDS)


def float_slack(scale, zero_point, spec):
    """Rounding of float32 arithmetic on values of a group's size (not of the quantizer)."""
    return 4 * EPS * (zero_point.abs() + 2**spec.bits * scale)


def encoded(spec, seed, kind, dtype, pages=2):
    x = awkward(seed, kind, 2, 2, pages * spec.page_size, DIM, dtype=dtype, limit=limit(spec.bits))
    codes, scale, zero_point = quantize_pages(x, spec)
    return x.double(), codes, scale, zero_point


@given(specs(), seeds, kinds, dtypes)
def test_round_trip_error_is_at_most_half_a_scale(spec, seed, kind, dtype):
    x, *stored = encoded(spec, seed, kind, dtype)
    scale, zero_point = spread(stored[1], spec), spread(stored[2], spec)
    error = (dequantize_pages(*stored, spec).double() - x).abs()
    assert (error <= scale / 2 + float_slack(scale, zero_point, spec)).all()


@given(specs(), seeds, kinds, dtypes)
def test_every_value_lies_between_zero_point_and_top_level(spec, seed, kind, dtype):
    x, _, scale, zero_point = encoded(spec, seed, kind, dtype)
    scale, zero_point = spread(scale, spec), spread(zero_point, spec)
    slack = float_slack(scale, zero_point, spec)
    assert (x >= zero_point).all()
    assert (x <= zero_point + (2**spec.bits - 1) * scale + slack).all()


@given(specs(), seeds, kinds, dtypes)
def test_codes_are_the_nearest_levels(spec, seed, kind, dtype):
    x, codes, scale, zero_point = encoded(spec, seed, kind, dtype, pages=1)
    scale, zero_point = spread(scale, spec), spread(zero_point, spec)
    chosen = naive_codes(codes, spec)
    assert chosen.min() >= 0 and chosen.max() <= 2**spec.bits - 1
    levels = torch.arange(2**spec.bits, dtype=torch.float64)
    best = (zero_point[..., None] + levels * scale[..., None] - x[..., None]).abs().amin(-1)
    error = (zero_point + chosen * scale - x).abs()
    assert (error <= best + float_slack(scale, zero_point, spec)).all()


@given(specs(), seeds, st.sampled_from(("normal", "shifted", "outliers", "one-sided", "huge")), dtypes)
def test_scales_are_no_wider_than_rounding_to_16_bits_asks(spec, seed, kind, dtype):
    x, _, scale, zero_point = encoded(spec, seed, kind, dtype)
    groups = x.unflatten(2, (-1, spec.page_size))
    dim = -2 if spec.quantizer.per == "channel" else -1
    groups = groups.unflatten(dim, (-1, spec.quantizer.group_size))
    eps, tiny = torch.finfo(scale.dtype).eps, torch.finfo(scale.dtype).smallest_normal
    least = groups.amin(dim)
    assert (zero_point.double() >= least - 2 * eps * least.abs() - 2 * eps * tiny).all()
    ideal = (groups.amax(dim) - zero_point.double()) / (2**spec.bits - 1)
    assert (scale.double() <= ideal * (1 + 2 * eps) + 2 * eps * tiny).all()


@given(specs(), seeds, dtypes)
def test_constants_that_fit_16_bits_decode_exactly(spec, seed, dtype):
    g = generator(seed)
    value = (torch.randn(1, generator=g) * 10 ** (torch.rand(1, generator=g) * 8 - 4)).to(params_dtype(dtype)).to(dtype)
    x = value.expand(1, 1, spec.page_size, DIM)
    codes, scale, zero_point = quantize_pages(x, spec)
    assert torch.equal(dequantize_pages(codes, scale, zero_point, spec), x.float())
    assert not scale.any()


@given(specs(), seeds, dtypes)
def test_each_group_may_be_its_own_constant(spec, seed, dtype):
    x = randn(
        seed,
        1,
        2,
        *(
            (spec.page_size // spec.quantizer.group_size, DIM)
            if spec.quantizer.per == "channel"
            else (spec.page_size, 1)
        ),
    )
    x = x.to(params_dtype(dtype)).to(dtype)
    x = (
        x.repeat_interleave(spec.quantizer.group_size, 2)
        if spec.quantizer.per == "channel"
        else x.expand(-1, -1, -1, DIM)
    )
    assert torch.equal(dequantize_pages(*quantize_pages(x, spec), spec), x.float())


@given(specs(), seeds, dtypes)
def test_scales_and_zero_points_take_16_bits_and_the_documented_shape(spec, seed, dtype):
    codes, scale, zero_point = quantize_pages(randn(seed, 2, 3, 2 * spec.page_size, DIM, dtype=dtype), spec)
    assert codes.dtype == torch.uint8 and codes.shape == (2, 3, 2, spec.page_size * spec.bits // 8, DIM)
    expected = (
        (spec.page_size // spec.quantizer.group_size, DIM)
        if spec.quantizer.per == "channel"
        else (spec.page_size, DIM // spec.quantizer.group_size)
    )
    for params in (scale, zero_point):
        assert params.dtype == (torch.bfloat16 if dtype == torch.bfloat16 else torch.float16)
        assert params.shape == (2, 3, 2, *expected)


@given(specs(), seeds, kinds)
def test_dequantize_equals_the_naive_implementation(spec, seed, kind):
    _, *stored = encoded(spec, seed, kind, torch.float32)
    expected = naive_dequantize(*stored, spec)
    slack = float_slack(spread(stored[1], spec), spread(stored[2], spec), spec)
    assert ((dequantize_pages(*stored, spec).double() - expected).abs() <= slack).all()


@given(widths, st.integers(1, 6), st.integers(1, 5), seeds)
def test_pack_equals_the_naive_packer_and_unpack_inverts_it(bits, multiple, channels, seed):
    tokens = multiple * smallest_page(bits)
    codes = torch.randint(0, 2**bits, (tokens, channels), generator=generator(seed), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8 and packed.shape == (byte_rows(tokens, bits), channels)
    np.testing.assert_array_equal(packed.numpy(), naive_pack(codes.numpy(), bits))
    assert torch.equal(unpack(packed, bits), codes)


@given(widths, st.integers(1, 5), seeds)
def test_a_plane_is_a_slice_of_what_unpack_gives(bits, multiple, seed):
    tokens = multiple * smallest_page(bits)
    packed = torch.randint(0, 256, (2, 3, byte_rows(tokens, bits), 4), generator=generator(seed), dtype=torch.uint8)
    dense, size = unpack(packed, bits), tokens // num_planes(bits)
    for plane in range(num_planes(bits)):
        assert torch.equal(unpack_plane(packed, bits, plane), dense[..., plane * size : (plane + 1) * size, :])
        unshifted, unit = unpack_plane_unshifted(packed, bits, plane)
        assert torch.equal(unshifted * unit, unpack_plane(packed, bits, plane).float())


def test_byte_row_i_of_a_2_bit_page_holds_tokens_a_quarter_page_apart():
    page = 32
    codes = torch.randint(0, 4, (page, 5), generator=generator(0), dtype=torch.uint8)
    packed = pack(codes, 2).int()
    for i in range(page // 4):
        for field, token in enumerate((i, i + page // 4, i + page // 2, i + 3 * page // 4)):
            assert torch.equal((packed[i] >> (2 * field)) & 3, codes[token].int())


def test_three_bits_are_a_2_bit_field_then_a_1_bit_field():
    codes = torch.randint(0, 8, (16, 3), generator=generator(1), dtype=torch.uint8)
    packed = pack(codes, 3)
    assert torch.equal(packed[:4], pack(codes & 3, 2)) and torch.equal(packed[4:], pack(codes >> 2, 1))


@pytest.mark.parametrize("bits", WIDTHS)
def test_assign_clamps_values_outside_the_levels(bits):
    one = torch.ones(())
    codes = assign(torch.tensor([-5.0, 0.0, 1.0, 1e6]), one, torch.zeros(()), bits)
    assert codes.dtype == torch.uint8 and codes.tolist() == [0, 0, 1, 2**bits - 1]


@given(specs(), seeds, st.permutations(range(3)), st.permutations(range(2)))
def test_permuting_batch_and_heads_commutes_with_quantize(spec, seed, batch_order, head_order):
    x = randn(seed, 3, 2, spec.page_size * 2, DIM)
    for whole, permuted in zip(
        quantize_pages(x, spec), quantize_pages(x[batch_order][:, head_order], spec), strict=True
    ):
        assert torch.equal(whole[batch_order][:, head_order], permuted)


@given(specs(per="channel", subspace=True), seeds, st.permutations(range(3)), st.permutations(range(2)))
def test_permuting_batch_and_heads_commutes_with_compensated_quantize(spec, seed, batch_order, head_order):
    x = randn(seed, 3, 2, spec.page_size * 2, DIM)
    q = queries_for(spec, seed, 3, 2).unflatten(1, (2, 2)).flatten(2, 3)
    c = compensation_matrix(precision_matrix(q, spec.quantizer.subspace), spec.quantizer.subspace.block_size).half()
    whole = quantize_pages(x, spec, [c])
    permuted = quantize_pages(x[batch_order][:, head_order], spec, [c[batch_order][:, head_order]])
    for a, b in zip(whole, permuted, strict=True):
        assert torch.equal(a[batch_order][:, head_order], b)


@given(specs(), seeds, dtypes)
def test_pages_are_quantized_independently(spec, seed, dtype):
    x = randn(seed, 2, 2, 3 * spec.page_size, DIM, dtype=dtype)
    alone = [quantize_pages(page, spec) for page in x.split(spec.page_size, 2)]
    for whole, parts in zip(quantize_pages(x, spec), zip(*alone, strict=True), strict=True):
        assert torch.equal(whole, torch.cat(parts, 2))


@given(specs(), seeds)
def test_the_strides_of_the_input_do_not_matter(spec, seed):
    x = randn(seed, 2, 3, 2 * spec.page_size, DIM)
    as_models_make_it = x.transpose(1, 2).contiguous().transpose(1, 2)
    for a, b in zip(quantize_pages(x, spec), quantize_pages(as_models_make_it, spec), strict=True):
        assert torch.equal(a, b)


POISON = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("per", ["channel", "token"])
def test_quantize_refuses_non_finite_values_anywhere(poison, dtype, per):
    spec = coded(2, per, 8, 16)
    for seed in range(5):
        x = randn(seed, 2, 2, 32, DIM, dtype=dtype)
        torch.ops.kvpass.quantize(x, [], str(spec))
        x.view(-1)[torch.randint(x.numel(), (1,), generator=generator(seed))] = POISON[poison]
        with pytest.raises(NonFiniteError, match="NaN"):
            torch.ops.kvpass.quantize(x, [], str(spec))


@pytest.mark.parametrize("poison", POISON)
def test_compensated_quantize_refuses_non_finite_values_in_any_block(poison):
    spec = coded(2, "channel", 8, 16, subspace=Subspace(2, 1.0, True, DIM // 4))
    compensation = torch.zeros(1, 1, DIM * 3 // 4, DIM * 3 // 4, dtype=torch.float16)
    for channel in (0, DIM // 2, DIM - 1):
        x = randn(0, 1, 1, 16, DIM)
        x[0, 0, 3, channel] = POISON[poison]
        with pytest.raises(NonFiniteError):
            torch.ops.kvpass.quantize(x, [compensation], str(spec))


@pytest.mark.parametrize("value", [3e5, -7e4, 1e30])
def test_groups_beyond_half_precision_are_refused_unless_the_cache_is_bfloat16(value):
    spec = coded(2, "channel", 8, 8)
    x = randn(0, 1, 1, 8, DIM)
    x[0, 0, 2, 3] = value
    with pytest.raises(NonFiniteError, match="bfloat16"):
        torch.ops.kvpass.quantize(x, [], str(spec))
    stored = torch.ops.kvpass.quantize(x.bfloat16(), [], str(spec))
    assert torch.isfinite(dequantize_pages(*stored, spec)).all()


def test_a_1_bit_scale_beyond_half_precision_is_refused_not_stored_as_infinity():
    x = torch.tensor([-6e4, 6e4]).repeat(4)[:, None].expand(1, 1, 8, DIM).contiguous()
    with pytest.raises(NonFiniteError):
        torch.ops.kvpass.quantize(x, [], str(coded(1, "channel", 8, 8)))


def test_quantize_takes_whole_pages_only():
    with pytest.raises(KVPassError, match="whole pages of 16"):
        torch.ops.kvpass.quantize(randn(0, 1, 1, 24, DIM), [], str(coded(2, "channel", 8, 16)))


@pytest.mark.parametrize(
    "arguments, says",
    [
        (dict(bits=5, per="channel", group_size=8, page_size=8), r"bits=5.*\[1, 2, 3, 4, 8\]"),
        (dict(bits=0, per="channel", group_size=8, page_size=8), r"bits=0"),
        (dict(bits=5, per="token", group_size=8, page_size=8), r"bits=5"),
        (dict(bits=2, per="head", group_size=8, page_size=8), r"'channel' or 'token'.*'head'"),
        (dict(bits=2, per="channel", group_size=24, page_size=32), r"group_size=24 does not divide page_size=32"),
        (dict(bits=2, per="channel", group_size=64, page_size=32), r"group_size=64 does not divide page_size=32"),
        (dict(bits=2, per="channel", group_size=7, page_size=7), r"page_size=7.*multiple of 4"),
        (dict(bits=3, per="channel", group_size=4, page_size=12), r"page_size=12.*multiple of 8"),
        (dict(bits=1, per="token", group_size=4, page_size=12), r"page_size=12.*multiple of 8"),
        (dict(bits=4, per="token", group_size=4, page_size=33), r"page_size=33.*multiple of 2"),
        (dict(bits=2, per="channel", group_size=0, page_size=8), r"group_size=0 must be an integer of at least 1"),
        (dict(bits=2, per="channel", group_size=-8, page_size=8), r"group_size=-8 must be an integer of at least 1"),
        (
            dict(bits=2, per="token", group_size=8, page_size=0, residual=8),
            r"page_size=0 must be an integer of at least 1",
        ),
        (
            dict(bits=2, per="token", group_size=8, page_size=8, residual=-1),
            r"page_size=8 tokens do not fit into a window of 7",
        ),
        (dict(bits=2, per="token", group_size=8, page_size=8, sinks=-1), r"sinks=-1"),
        (dict(bits=2, per="token", group_size=8, page_size=8, rollback=-2), r"rollback=-2"),
        (
            dict(bits=2, per="token", group_size=8, page_size=8, subspace=Subspace(2, 1.0, True, 8)),
            r"per-channel keys",
        ),
    ],
)
def test_impossible_specs_are_refused_at_construction_with_the_reason(arguments, says):
    with pytest.raises(KVPassError, match=says):
        coded(**arguments)


@pytest.mark.parametrize("field", ["bits", "group_size", "window", "page_size", "sinks", "rollback"])
@pytest.mark.parametrize("value", [8.0, "8"])
def test_fields_that_are_not_integers_are_refused_at_construction(field, value):
    with pytest.raises(KVPassError, match=field):
        recoded(coded(bits=8, per="channel", group_size=8, page_size=8), **{field: value})


def test_a_spec_that_does_not_fit_the_head_says_which_number_is_wrong():
    with pytest.raises(KVPassError, match="group_size=32 does not divide head_dim=48"):
        coded(2, "token", 32, 32).check(48)
    with pytest.raises(KVPassError, match="block_size=32 does not divide head_dim=48"):
        coded(2, "channel", 32, 32, subspace=Subspace(5, 1.0, True, 32)).check(48)
    coded(2, "channel", 32, 32).check(48)  # groups along tokens do not care


@pytest.mark.parametrize(
    "arguments", [dict(block_size=0), dict(block_size=-8), dict(rank=0), dict(rank=-1), dict(weight=float("nan"))]
)
def test_an_impossible_subspace_is_refused_before_any_tensor_is_made(arguments):
    with pytest.raises(KVPassError):
        subspace = Subspace(**(dict(rank=5, weight=1.0, relative=True, block_size=8) | arguments))
        coded(2, "channel", 8, 8, subspace=subspace).check(DIM)


@given(
    specs(), st.one_of(st.none(), st.builds(Subspace, st.integers(1, 9), st.floats(0, 1e6), st.booleans(), st.just(8)))
)
def test_the_text_of_a_spec_parses_back_to_it(spec, subspace):
    if spec.quantizer.per == "channel":
        spec = recoded(spec, subspace=subspace)
    again = parse(str(spec))
    assert again == spec and hash(again) == hash(spec) and str(again) == str(spec)


def test_tokens_are_centred_or_predicted():
    with pytest.raises(KVPassError, match="use center=False"):
        Transform(center=True, predictor="linear")


@given(specs(), st.integers(0, 400))
def test_packed_tokens_are_whole_pages_and_leave_the_promised_window(spec, length):
    packed = spec.retention.packed(length)
    assert packed % spec.page_size == 0 and packed == spec.retention.pages(length) * spec.page_size
    exact = length - min(length, spec.retention.sinks) - packed
    if packed:
        assert spec.retention.residual <= exact < spec.retention.window
    assert exact < spec.retention.window

"""The Triton kernels against the reference: on a GPU if there is one, otherwise in Triton's interpreter, for which
``conftest.py`` sets TRITON_INTERPRET before anything imports Triton. `test_triton_choice` tests when they are
chosen."""

import importlib
import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpass import KVPassError
from kvpass.codec import Subspace, dequantize_pages
from kvpass.codec.affine import params_dtype
from kvpass.codec.bitpack import num_planes
from kvpass.codec.boost import Boosted
from kvpass.codec.codebook import grid_shape, names
from kvpass.codec.rope import parse_rope
from kvpass.codec.second_level import SecondLevel
from kvpass.layout.window import LENGTH_OFFSET, layout, length_tensor

from common import WIDTHS, awkward, coded, dtypes, randn, recoded, seeds, state_of, widths

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# the interpreter of 3.6 takes named tuples for plain ones; its compiler does not
triton = pytest.importorskip("triton", minversion="3.7" if DEVICE == "cpu" else None)
tl = triton.language

from kvpass.lowering.triton import kernel_arguments, launch, paired_unpacking, tuned, unpacking  # noqa: E402

OPS = torch.ops.kvpass
TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}

few = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])


def on_device(arguments) -> list:
    return [a.to(DEVICE) if isinstance(a, torch.Tensor) else a for a in arguments]


def attend_arguments(
    specs, n, queries=1, heads=2, repeats=2, dim=32, batch=1, mask=None, causal=False, softcap=0.0, dtype=torch.float32
):
    """Arguments of `kvpass::attend` over a cache of ``n`` tokens, with room for more."""
    past = [randn(i, batch, heads, n, dim, dtype=dtype) for i in range(2)]
    states = [state_of(spec, x, room=n + 70) for spec, x in zip(specs, past, strict=True)]
    packs = [[tensor.to(DEVICE) for tensor in state.pack] for state in states]
    q, *new = (randn(5 + i, batch, heads * (i or repeats), queries, dim, dtype=dtype) for i in (0, 1, 1))
    texts = [str(spec) for spec in specs]
    return on_device([q, *packs, states[0].length_tensor(n), *new, mask, causal, dim**-0.5 * 1.5, softcap, *texts])


def assert_close(got, expected, tolerance):
    assert got.shape == expected.shape and got.dtype == expected.dtype and got.is_contiguous()
    assert torch.allclose(got.float(), expected.float(), atol=tolerance), (got - expected).abs().max()


def assert_attends_as_the_reference(arguments, **others):
    (got,), (expected,) = (OPS.attend(*arguments, name, **others) for name in ("triton", "reference"))
    assert_close(got, expected, TOLERANCE[got.dtype])


def assert_scores_as_the_reference(arguments, statistic, importance=None, **others):
    """Compare outputs and attention mass with the reference."""
    others |= dict(statistic=statistic, importance=importance, with_lse=True)
    got, expected = (OPS.attend(*arguments, name, **others) for name in ("triton", "reference"))
    q = arguments[0]
    for mine, theirs in zip(got, expected, strict=True):
        assert_close(mine, theirs, TOLERANCE[q.dtype] * (1 if mine.dtype == q.dtype else q.shape[2]))


def rotary(seed: int, batch: int, tokens: int, rope: str) -> dict:
    """Tables of a rotation, scaled as in YaRN, and larger than needed."""
    angle = randn(seed, batch, tokens + 9, parse_rope(rope)[0] + 3).to(DEVICE)
    return dict(cos=angle.cos() * 1.3, sin=angle.sin() * 1.3, rope=rope)


def random_mask(kind: str, seed: int, batch: int, heads: int, queries: int, tokens: int, padding: int = 0):
    """A mask in which every query sees itself, except ``padding``, which no query sees."""
    if kind == "none":
        return None
    allowed = torch.rand(batch, heads, queries, tokens, generator=torch.Generator().manual_seed(seed)) > 0.4
    allowed |= torch.ones(queries, tokens, dtype=torch.bool).tril(tokens - queries).triu(tokens - queries)
    allowed[..., :padding] = False
    if kind == "bool":
        return allowed
    return randn(seed, batch, heads, queries, tokens).masked_fill(~allowed, torch.finfo(torch.float32).min)


def divisors(number: int) -> list[int]:
    return [g for g in (4, 8, 16, 24, 32, 40, 48, 64, 80, 96) if number % g == 0]


@st.composite
def layouts(draw, dim: int, pre_rope: bool):
    """Specs in which keys and values are packed together or keys first, with any combination of bit widths."""
    page, per = draw(st.sampled_from((16, 32, 64))), draw(st.sampled_from(("channel", "token")))
    shared = dict(page_size=page, sinks=draw(st.sampled_from((0, 0, 3))))
    residual, later = draw(st.sampled_from((0, 5))), draw(st.sampled_from((0, page, page + 7)))
    group = draw(st.sampled_from(divisors(page if per == "channel" else dim)))
    key = coded(draw(widths), per, group, residual=residual, pre_rope=pre_rope, **shared)
    group = draw(st.sampled_from(divisors(dim)))
    return key, coded(draw(widths), "token", group, residual=residual + later, rollback=7, **shared)


@st.composite
def calls(draw):
    dim = draw(st.sampled_from((16, 48, 64, 80, 96)))
    shape = dict(
        n=draw(st.one_of(st.integers(0, 140), st.sampled_from((0, 64, 128)))),
        queries=draw(st.one_of(st.just(1), st.integers(1, 16), st.integers(17, 40))),
        heads=draw(st.integers(1, 2)),
        repeats=draw(st.sampled_from((1, 2, 3, 7))),
        batch=draw(st.integers(1, 2)),
    )
    kind = draw(st.sampled_from(("none", "none", "bool", "float")))
    of_mask = draw(st.sampled_from((1, shape["batch"]))), draw(st.sampled_from((1, shape["heads"] * shape["repeats"])))
    total = shape["n"] + shape["queries"]
    mask = random_mask(kind, draw(seeds), *of_mask, shape["queries"], total, draw(st.sampled_from((0, min(total, 9)))))
    causal = mask is None and draw(st.booleans())
    softcap, pre_rope = draw(st.sampled_from((0.0, 0.0, 3.0))), draw(st.booleans())
    arguments = attend_arguments(
        draw(layouts(dim, pre_rope)), dim=dim, mask=mask, causal=causal, softcap=softcap, dtype=draw(dtypes), **shape
    )
    others = dict(sinks=randn(1, shape["heads"] * shape["repeats"]).to(DEVICE) if draw(st.booleans()) else None)
    if pre_rope:
        pairs, kind = draw(st.sampled_from((dim // 2, dim // 4, 5))), draw(st.sampled_from(("half", "interleaved")))
        others.update(rotary(draw(seeds), shape["batch"], shape["n"], f"{kind}-{pairs}"))
    return arguments, others


@pytest.mark.slow
@settings(few, max_examples=18)
@given(calls(), st.sampled_from(("", "sum", "max-1", "max-5")))
def test_attention_and_attention_mass_equal_the_reference(call, statistic):
    arguments, others = call
    assert_scores_as_the_reference(arguments, statistic, **others)


@pytest.mark.parametrize("queries", [1, 3])
def test_left_padded_rows_equal_masked_rows(queries):
    """Starts within a page, after all pages, and at 0."""
    specs, n = (coded(2, "channel", 16, 16, sinks=3), coded(2, "token", 16, 16, residual=16, sinks=3)), 100
    arguments = attend_arguments(specs, n, queries, batch=4, causal=queries > 1)
    starts = torch.tensor([0, 2, 37, 99], device=DEVICE)
    got, expected = (OPS.attend(*arguments, name, starts=starts)[0] for name in ("triton", "reference"))
    assert_close(got, expected, TOLERANCE[got.dtype])
    mask = torch.ones(queries, n + queries, dtype=torch.bool, device=DEVICE).tril(n)
    mask = mask & (torch.arange(n + queries, device=DEVICE) >= starts[:, None, None, None])
    arguments[6:8] = mask, False
    assert_close(got, OPS.attend(*arguments, "reference")[0], TOLERANCE[got.dtype])


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("per", ["channel", "token"])
def test_attend_at_every_width_over_many_splits(bits, per):
    keys, values = coded(bits, per, 16, 16), coded(bits, "token", 16, 16, residual=16)
    assert_attends_as_the_reference(attend_arguments((keys, values), 250, heads=1, repeats=4))


@pytest.mark.parametrize("v_bits", [1, 2, 8])
@pytest.mark.parametrize("k_bits", [1, 4, 8])
def test_attend_with_other_widths_for_values_than_for_keys(k_bits, v_bits):
    specs = coded(k_bits, "channel", 8, 32), coded(v_bits, "token", 16, 32, residual=32)
    assert_attends_as_the_reference(attend_arguments(specs, 133, heads=1))


KIVI = coded(2, "channel", 32, 32), coded(2, "token", 32, 32, residual=32)


def test_attend_with_nine_query_heads_on_three_and_sixteen_queries_needs_two_tiles():
    arguments = attend_arguments(KIVI, 150, 16, heads=3, repeats=3, dim=64, causal=True, dtype=torch.bfloat16)
    assert_attends_as_the_reference(arguments)


@pytest.mark.parametrize("queries", [1, 3, 20])
def test_cross_attention_has_no_new_tokens(queries):
    arguments = attend_arguments(KIVI, 150, queries, batch=2)
    arguments[4:6] = (x[:, :, :0] for x in arguments[4:6])
    assert_attends_as_the_reference(arguments)


@pytest.mark.parametrize("n", [0, 20, 150])
def test_attend_with_a_prompt_behind_stored_tokens(n):
    arguments = attend_arguments(KIVI, n, 45, heads=1, repeats=3, causal=True)
    assert_attends_as_the_reference(arguments)


@pytest.mark.parametrize("dim", [128, 192, 256])
def test_attend_to_wide_heads(dim):
    assert_attends_as_the_reference(attend_arguments(KIVI, 100, heads=1, dim=dim))


LATTICES = {
    "QuaRot": (coded(2, "token", 32, 32, rotation=0, center=True), coded(3, "token", 32, 32, rotation=1)),
    "1 dimension": (coded(2, "token", 16, 32, grid="d1n4"), coded(4, "token", 32, 32, grid="d1n16")),
    "HIGGS": tuple(coded(4, "token", 96, 32, rotation=0, grid="d2n16", center=c) for c in (True, False)),
    "HIGGS, 3 bits": tuple(coded(6, "token", 48, 32, rotation=0, grid="d2n64", center=c) for c in (True, False)),
    "beside uniform codes": (KIVI[0], coded(8, "token", 32, 32, residual=32, rotation=0, grid="d2n256")),
}


@pytest.mark.parametrize("specs", LATTICES.values(), ids=LATTICES)
@pytest.mark.parametrize("queries, dtype", [(1, torch.float32), (5, torch.bfloat16)], ids=str)
def test_attend_to_rotated_centred_and_lattice_codes(specs, queries, dtype):
    dim = 96 if specs[0].quantizer.group_size in (96, 48) else 64
    arguments = attend_arguments(specs, 140, queries, dim=dim, dtype=dtype, causal=queries > 1)
    if specs[0].transform.predictor:
        arguments[1][-1].copy_(state_of(specs[0], randn(0, 1, 2, 140, dim, dtype=dtype) + 1).center)
    assert_attends_as_the_reference(arguments)


@pytest.mark.parametrize("queries, dtype", [(1, torch.float32), (5, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("bits, per, pre_rope", [(2, "channel", False), (4, "token", False), (2, "channel", True)])
def test_attend_with_8_bit_scales(bits, per, pre_rope, queries, dtype):
    fields = dict(codec=SecondLevel(), pre_rope=pre_rope)
    specs = coded(bits, per, 16, 32, sinks=2, **fields), coded(2, "token", 16, 32, 32, sinks=2, codec=SecondLevel())
    turned = rotary(3, 2, 150, "half-16") if pre_rope else {}
    arguments = attend_arguments(specs, 150, queries, batch=2, causal=queries > 1, dtype=dtype)
    assert_scores_as_the_reference(arguments, "sum", **turned)


@pytest.mark.slow_cases("4-*", "*-5-torch.bfloat16", "2-0.25-*")
@pytest.mark.parametrize("queries, dtype", [(1, torch.float32), (5, torch.bfloat16)], ids=str)
@pytest.mark.parametrize(
    "bits, share, page, group, pre_rope",
    [(2, 0.25, 64, 64, False), (1, 0.1, 128, 32, False), (4, 1.0, 64, 16, False), (2, 0.5, 64, 64, True)],
)
def test_attend_to_boosted_channels(bits, share, page, group, pre_rope, queries, dtype):
    key = coded(bits, "channel", group, page, sinks=3, codec=Boosted(share), pre_rope=pre_rope)
    turned = rotary(3, 2, 300, "interleaved-10") if pre_rope else {}
    arguments = attend_arguments(
        (key, coded(2, "token", 16, page, page, sinks=3)), 300, queries, batch=2, causal=queries > 1, dtype=dtype
    )
    assert_scores_as_the_reference(arguments, "sum", **turned)


def test_boosted_channels_of_pages_too_small_for_products_are_decoded():
    specs = coded(2, "channel", 32, 32, codec=Boosted(0.25)), coded(2, "token", 16, 32, 32)
    with pytest.raises(KVPassError, match="need 16 tokens per page for each bit plane"):
        OPS.attend(*attend_arguments(specs, 100), "triton")


@pytest.mark.parametrize("per", ["channel", "token"])
def test_a_mean_is_rotated_with_the_keys(per):
    specs = coded(2, per, 32, 32, sinks=3, center=True, pre_rope=True), coded(3, "token", 16, 32, sinks=3)
    arguments = attend_arguments(specs, 140, 2, dim=64, dtype=torch.float16, causal=True)
    arguments[1][-1].copy_(state_of(specs[0], randn(0, 1, 2, 140, 64) + 1).center)
    assert_attends_as_the_reference(arguments, **rotary(0, 1, 140, "half-16"))


@pytest.mark.parametrize("specs", [LATTICES["QuaRot"], LATTICES["beside uniform codes"]], ids=["QuaRot", "KIVI"])
def test_with_eviction_importance_marks_padding(specs):
    specs = [recoded(spec, budget=160) for spec in specs]
    arguments = attend_arguments([recoded(s, budget=None) for s in specs], 150, 3, dim=64, batch=2)
    arguments[-2:] = map(str, specs)
    arguments[-6] = random_mask("bool", 0, 2, 1, 3, 153).to(DEVICE)
    importance = randn(0, 2, 2, 170).to(DEVICE)
    importance[0, :, :70] = -torch.inf
    if specs[0].transform.predictor:
        arguments[1][-1].copy_(randn(1, 2, 2, 1, 64))
    assert_scores_as_the_reference(arguments, "sum", importance)


@triton.jit
def _unpack(codes, scale, zero, out, rows, ROWS: tl.constexpr, L: tl.constexpr, DTYPE: tl.constexpr):
    PLANES: tl.constexpr = L.planes
    F: tl.constexpr = paired_unpacking.pair_format(None, L, DTYPE, PLANES)
    pool = unpacking.Pool(codes, scale, zero, None, None, None)
    for first in range(0, rows, ROWS):
        tokens, there = unpacking.row_tokens(first, rows, ROWS, L)
        channel, real = unpacking.channels(L, 1)
        read = paired_unpacking.load_paired_words(pool, first, rows, ROWS, L, F)
        for plane in tl.static_range(PLANES):
            x = paired_unpacking.paired_values(read, pool, first, rows, plane, L, F)
            at = (tokens + plane * (L.page // L.planes))[:, None] * L.dim + channel[None, :]
            tl.store(out + at, x, mask=there[:, None] & real[None, :])


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("per", ["channel", "token"])
def test_pairs_of_channels_unpack_to_codes_exactly(bits, per):
    """Unpacked operands of 16-bit products, which the interpreter does not multiply: scales are powers of two."""
    spec, planes, rng = coded(bits, per, 16, 32), num_planes(bits), torch.Generator().manual_seed(bits)
    codes, scale, zero = OPS.quantize(randn(0, 1, 1, 3 * 32, 48, dtype=torch.float16), [], str(spec), "reference")
    scale = 2.0 ** torch.randint(-3, 3, scale.shape, generator=rng)
    zero = scale * torch.randint(-9, 9, zero.shape, generator=rng)
    layout = launch.layout_of(spec, planes, 48)
    for dtype in (torch.float16, torch.bfloat16) if DEVICE == "cuda" else (torch.float16,):
        pool = on_device((codes, scale.to(dtype), zero.to(dtype)))
        out = torch.full((1, 1, 3 * 32, 48), torch.nan, dtype=dtype, device=DEVICE)
        _unpack[1,](*pool, out, 3 * 32 // planes, 16, layout, kernel_arguments.OPERANDS[dtype])
        assert out.equal(dequantize_pages(codes, scale, zero, spec).to(out))


def test_a_fully_masked_query_gets_zeros():
    mask = torch.ones(1, 1, 2, 102, dtype=torch.bool)
    mask[:, :, 0] = False
    arguments = attend_arguments(KIVI, 100, 2, mask=mask)
    assert_attends_as_the_reference(arguments)
    assert (OPS.attend(*arguments, "triton")[0][:, :, 0] == 0).all()


def test_rows_fully_hidden_by_a_bias_equal_the_reference():
    """The bias is -inf. The lowest finite number is added instead; if a row has nothing else, all splits have equal
    weight."""
    mask = torch.zeros(1, 1, 2, 102)
    mask[:, :, 0] = -torch.inf
    assert_attends_as_the_reference(attend_arguments(KIVI, 100, 2, mask=mask))


def test_attend_neither_reads_spare_capacity_nor_writes_the_state():
    arguments = attend_arguments(KIVI, 100)
    for state, spec in zip(arguments[1:3], KIVI, strict=True):
        for pool in state[:3]:
            pool[:, :, spec.retention.pages(100) :] = 77 if pool.dtype == torch.uint8 else float("nan")
    tensors = [*arguments[1], *arguments[2]]
    before = [tensor.clone() for tensor in tensors]
    assert torch.isfinite(OPS.attend(*arguments, "triton")[0]).all()
    assert_attends_as_the_reference(arguments)
    pairs = zip(before, tensors, strict=True)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def test_a_pool_smaller_than_the_length_is_an_error():
    arguments = attend_arguments(KIVI, 300)
    arguments[1][0] = arguments[1][0][:, :, :3].contiguous()
    with pytest.raises(KVPassError, match="room for 3 of 9 pages"):
        OPS.attend(*arguments, "triton")


# ---------------------------------------------------------------- encode and append


rotations = st.sampled_from((None, 0, 9))


@st.composite
def whole_pages(draw, page: int, dim: int, least: int, most: int):
    kind, shape = draw(st.sampled_from(("normal", "shifted", "outliers", "mixed magnitudes", "tiny", "two values"))), (
        draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(least, most)) * page, dim,
    )  # fmt: skip
    x = awkward(draw(seeds), kind, *shape, dtype=draw(dtypes), limit=100)
    return x.transpose(1, 2).contiguous().transpose(1, 2) if draw(st.booleans()) else x


@st.composite
def encoded(draw):
    per, page = draw(st.sampled_from(("channel", "token"))), draw(st.sampled_from((8, 16, 64, 128)))
    dim, eta = draw(st.sampled_from((16, 48, 80, 96, 128))), draw(st.sampled_from((0.0, 0.0, 0.045)))
    group, rotation = draw(st.sampled_from(divisors(page if per == "channel" else dim))), draw(rotations)
    return coded(draw(widths), per, group, page, eta=eta, rotation=rotation), draw(whole_pages(page, dim, 0, 3))


@st.composite
def encoded_on_grids(draw):
    name, page = draw(st.sampled_from(("d1n4", "d1n8", "d2n16", "d2n64", "d4n64"))), draw(st.sampled_from((8, 16, 64)))
    dim, fit = draw(st.sampled_from((16, 48, 80, 96))), draw(st.sampled_from(("minmax", "lsq")))
    group, bits = draw(st.sampled_from(divisors(dim))), grid_shape(name)[1]
    spec = coded(bits, "token", group, page, fit=fit, rotation=draw(rotations), grid=name)
    return spec, draw(whole_pages(page, dim, 1, 2))


def assert_quantizes_as_the_reference(spec, x):
    expected = OPS.quantize(x.to(DEVICE), [], str(spec), "reference")
    for got, wanted in zip(OPS.quantize(x.to(DEVICE), [], str(spec), "triton"), expected, strict=True):
        assert got.dtype == wanted.dtype and got.is_contiguous() and got.equal(wanted)


@settings(few, max_examples=30)
@given(encoded())
def test_quantize_equals_the_reference_bit_for_bit(case):
    assert_quantizes_as_the_reference(*case)


@settings(few)
@given(encoded_on_grids())
def test_quantize_on_a_grid_equals_the_reference_bit_for_bit(case):
    assert_quantizes_as_the_reference(*case)


@pytest.mark.parametrize("name", names())
def test_quantize_takes_the_first_of_equally_near_grid_points(name):
    """In one dimension 0 is equally near to two points, if the number of points is even."""
    spec = coded(grid_shape(name)[1], "token", 32, 8, grid=name)
    assert_quantizes_as_the_reference(spec, randn(0, 1, 1, 16, 32).relu())


@settings(few, max_examples=12)
@given(st.sampled_from((16, 32)), st.integers(1, 2), widths, dtypes, st.sampled_from((0.0, 0.045)), seeds)
def test_compensated_codes_equal_the_reference_up_to_ties(block, blocks, bits, dtype, eta, seed):
    """Sums of products are rounded in another order: the first block is equal bit for bit; in the others a value
    between two levels may take either."""
    dim = block * blocks
    spec = coded(bits, "channel", 8, 32, eta=eta, subspace=Subspace(3, 1.0, True, block))
    x = awkward(seed, "outliers", 2, 2, 64, dim, dtype=dtype, limit=100).transpose(1, 2).contiguous().transpose(1, 2)
    answers = randn(seed, 2, 2, dim - block, dim - block).mul(0.3).to(params_dtype(dtype)).to(DEVICE)
    got, expected = (OPS.quantize(x.to(DEVICE), [answers], str(spec), name) for name in ("triton", "reference"))
    assert all(mine[..., :block].equal(theirs[..., :block]) for mine, theirs in zip(got, expected, strict=True))
    assert (got[0] != expected[0]).float().mean() < 0.01
    values, wanted = (dequantize_pages(*encoded, spec) for encoded in (got, expected))
    off = (values - wanted).abs() > 0.02 * wanted.abs().amax()
    assert off.float().mean() < 0.01


def test_non_finite_groups_have_non_finite_parameters():
    for bad in (float("nan"), float("inf"), -float("inf")):
        x = randn(0, 1, 2, 32, 96)
        x[0, 1, 5, 2] = bad
        for spec in (*KIVI, LATTICES["HIGGS"][1], coded(8, "token", 16, 32, grid="d2n256", fit="lsq")):
            if DEVICE == "cpu":
                with pytest.raises(KVPassError, match="NaN"):
                    OPS.quantize(x, [], str(spec), "triton")
            else:
                parameters = OPS.quantize(x.to(DEVICE), [], str(spec), "triton")[1:]
                assert not all(torch.isfinite(parameter).all() for parameter in parameters)


@pytest.mark.parametrize("n, new", [(0, 100), (63, 1), (50, 5)])
def test_append_equals_the_reference_bit_for_bit(n, new):
    x = randn(0, 2, 2, n + new, 96).to(DEVICE)
    for spec in (*KIVI, LATTICES["QuaRot"][0], *LATTICES["HIGGS"]):
        states = []
        for name in ("triton", "reference"):
            state = state_of(spec, x[:, :, :n], room=n + new)
            OPS.append_(state.pack, state.length_tensor(n), x[:, :, n:], None, None, str(spec), name)
            states.append(state.pack)
        assert all(a.equal(b) for a, b in zip(*states, strict=True))


@pytest.mark.parametrize("n, new", [(0, 1), (0, 100), (63, 1), (50, 16)])
def test_append_layers_equals_the_reference(n, new):
    shapes = 2 * [(2, 32), (1, 64)]
    xs = [randn(i, 2, n + new, *shape).transpose(1, 2).to(DEVICE) for i, shape in enumerate(shapes)]
    for spec in (*KIVI, coded(3, "token", 16, 16, sinks=3, rollback=2)):
        states = []
        for name in ("triton", "reference"):
            layers = [state_of(spec, x[:, :, :n], room=n + new) for x in xs]
            states.append([tensor for state in layers for tensor in state.pack])
            OPS.append_layers_(states[-1], layers[0].length_tensor(n), [x[:, :, n:] for x in xs], str(spec), name)
        assert all(a.equal(b) for a, b in zip(*states, strict=True))


def said(on_the_host: int, on_the_device: int) -> torch.Tensor:
    """A length tensor as in a captured launch: its shape is that of the capture."""
    return torch.full((1,), on_the_device, device=DEVICE).expand(LENGTH_OFFSET + on_the_host)


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("captured, stored", [(10, 300), (299, 300), (310, 200), (300, 3), (290, 0)])
def test_attention_uses_the_length_on_the_device(captured, stored, queries):
    specs = coded(2, "channel", 16, 16, sinks=3, residual=5), coded(2, "token", 16, 16, sinks=3, residual=21)
    arguments = attend_arguments(specs, stored, queries=queries, causal=True)
    for state in arguments[1:3]:  # a pool has room for the tokens at capture
        state[:3] = (torch.cat([pool, pool[:, :, :1].expand(-1, -1, 40, -1, -1)], 2) for pool in state[:3])
    (expected,) = OPS.attend(*arguments, "reference")
    arguments[3] = said(captured, stored)
    (got,) = OPS.attend(*arguments, "triton")
    assert_close(got, expected, TOLERANCE[got.dtype])


@pytest.mark.parametrize("layers", [2, 65])
def test_append_uses_the_length_on_the_device(layers):
    spec, n = coded(2, "channel", 32, 32), 70
    xs = [randn(i, 1, 2, n + 1, 32).to(DEVICE) for i in range(layers)]
    stored = []
    for name, length in (("triton", said(40, n)), ("reference", length_tensor(n))):
        states = [state_of(spec, x[:, :, :n], room=n + 1) for x in xs]
        stored.append([tensor for state in states for tensor in state.pack])
        OPS.append_layers_(stored[-1], length, [x[:, :, n:] for x in xs], str(spec), name)
    assert all(a.equal(b) for a, b in zip(*stored, strict=True))


def test_tokens_whose_distance_exceeds_32_bits_are_written_to_their_windows():
    """As in a long prompt with a fused projection. The memory between tokens is never touched."""
    from kvpass.lowering.triton.append import _write

    count, stride, spec = 40, 1 << 26, coded(2, "token", 16, 16, residual=16)
    memory = torch.empty((count - 1) * stride + 16, dtype=torch.float16, device=DEVICE)
    x = memory.as_strided((1, 1, count, 16), (16, 16, stride, 1))
    x.copy_(randn(0, 1, 1, count, 16))
    assert (count - 1) * stride > 1 << 31
    rings = [torch.zeros(1, 1, spec.retention.ring_size, 16, dtype=torch.float16, device=DEVICE) for _ in range(2)]
    _write(rings[:1], 3, [x], spec.retention)
    layout(spec.retention).write([rings[1]], 3, [x])
    assert torch.equal(*rings) and rings[0].any()


def test_more_tokens_than_32_bit_offsets_reach_are_refused():
    """Pools of that many pages, all backed by the same memory."""
    spec, n = coded(2, "token", 16, 16, residual=16), 1 << 27
    q, *past, _, k_new, v_new, mask, causal, scale, softcap, k_spec, v_spec = attend_arguments([spec] * 2, 70, dim=16)
    for state in past:
        state[:3] = (pool[:, :, :1].expand(-1, -1, spec.retention.pages(n), -1, -1) for pool in state[:3])
    with pytest.raises(KVPassError, match=r"up to 134217727 tokens of 16 channels.*reference"):
        OPS.attend(q, *past, length_tensor(n), k_new, v_new, mask, causal, scale, softcap, k_spec, v_spec, "triton")


class _Recorded:
    """Replaces a kernel and records the grids of its launches."""

    def __init__(self):
        self.grids = []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return lambda *args, **options: None


def test_grids_stay_within_the_limits_of_cuda(monkeypatch):
    """3 million tokens, 72,000 heads of all samples: all backed by the same memory, and no kernel runs."""
    from kvpass.lowering.triton import append, codebook

    names = ("attend_split", "merge_splits", "sum_attention", "write_windows", "hadamard_runs")
    kernels = {name: _Recorded() for name in names}
    for name, kernel in kernels.items():
        monkeypatch.setattr({"write_windows": append, "hadamard_runs": codebook}.get(name, launch), name, kernel)
    codebook.hadamard(torch.zeros(1).expand(70_000, 2, 1, 16), 0)
    codebook.hadamard(torch.zeros(1).expand(1, 1, 3_000_000, 16), 0)
    spec = coded(2, "token", 16, 16, residual=16)
    long = torch.zeros(1, 1, 1, 16).expand(1, 1, 3_000_000, 16)
    append._write([torch.zeros(1, 1, spec.retention.ring_size, 16)], 3, [long], spec.retention)
    q, *past, length, k_new, v_new, mask, causal, scale, softcap, _, _ = attend_arguments([spec] * 2, 70, dim=16)
    many = [[tensor.expand(9000, *tensor.shape[1:]) for tensor in pack] for pack in past]
    q, k_new, v_new = (x.expand(9000, -1, -1, -1).repeat(1, 4, 1, 1) for x in (q, k_new, v_new))
    many = [[tensor[:, :1].expand(-1, 8, *(-1,) * (tensor.ndim - 2)) for tensor in pack] for pack in many]
    state = dict(statistic="sum", importance=None)
    OPS.attend(q, *many, length, k_new, v_new, mask, causal, scale, softcap, str(spec), str(spec), "triton", **state)
    for name, kernel in kernels.items():
        assert kernel.grids, name
        for grid in kernel.grids:
            assert grid[0] < 1 << 31 and all(size <= 65535 for size in grid[1:]), (name, grid)


@pytest.mark.slow
def test_the_first_gpu_stage_detects_wrong_results(monkeypatch):
    """`benchmarks/gpu.py` with small shapes: correct results pass its comparison, wrong ones fail."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    gpu = importlib.import_module("gpu")
    shape = dict(heads=4, kv_heads=2, head_dim=64)
    tried = [
        dict(scheme="kivi", dtype=torch.float16, batch=2, queries=queries, mask=mask, length=150)
        for queries, mask in ((1, None), (4, "float"))
    ]
    rows = list(gpu.correct(torch.device(DEVICE), tried=iter(tried), **shape))
    assert all(row["good"] for row in rows) and [row["queries"] for row in rows] == [1, 4], rows
    monkeypatch.setitem(gpu.TOLERANCE, torch.float16, -1.0)
    assert not next(gpu.correct(torch.device(DEVICE), tried=iter(tried[:1]), **shape))["good"]
    (broken,) = gpu.correct(torch.device(DEVICE), "none of these", iter(tried[:1]), **shape)
    assert not broken["good"] and "none of these" in broken["error"]
    with pytest.raises(SystemExit, match=r"CUDA|stage"):
        monkeypatch.setattr("sys.argv", ["gpu.py", "--stages", "correct" if DEVICE == "cpu" else "none"])
        gpu.main()


def test_a_gpu_stage_keeps_earlier_rows(monkeypatch, tmp_path):
    """Even if it ends before its last row."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    gpu = importlib.import_module("gpu")

    def rows():
        yield dict(good=True)
        yield dict(good=False)
        raise RuntimeError("the session is over")

    with pytest.raises(RuntimeError):
        gpu.run("stage", rows(), tmp_path, dict(device="none"))
    kept = json.loads((tmp_path / "stage.json").read_text())
    assert kept["rows"] == [dict(good=True), dict(good=False)] and kept["good"] is False


@pytest.fixture
def tables(monkeypatch, tmp_path):
    """No tuning results exist, and new ones are dropped after the test."""
    monkeypatch.setenv("KVPASS_CACHE", str(tmp_path))
    tuned.table.cache_clear()
    yield tmp_path / "launches"
    tuned.table.cache_clear()


def test_tuned_configurations_are_stored_and_used(tables, monkeypatch):
    specs = coded(2, "channel", 16, 16), coded(2, "token", 16, 16, residual=16)
    arguments, device = attend_arguments(specs, 100), torch.device(DEVICE)
    case = launch.case_of(specs, "", 32, 2, torch.float32, False)
    ships, *others = tuned.candidates(case)
    assert len(others) == len(set(others)) > 5
    times = {ships: 3.0} | {other: 2.0 + i for i, other in enumerate(others)}
    best, _ = tuned.tune(case, times.__getitem__)
    assert best == others[0]
    assert tuned.tune(case, {**times, best: 2.95}.__getitem__)[0] == ships  # within noise
    file = tuned.store(tuned.name_of(device), {case: best})
    tuned.table.cache_clear()
    assert tuned.configured(case, device) == best and file.parent == tables
    launched = []
    monkeypatch.setattr(launch, "splits_of", lambda rows, config, *_: launched.append(config) or 2)
    assert_attends_as_the_reference(arguments)
    with tuned.trying(case, ships, device):
        assert_attends_as_the_reference(arguments)
    assert_attends_as_the_reference(arguments)
    assert launched == [best, ships, best]
    file.write_text("not a valid table")
    tuned.table.cache_clear()
    with pytest.raises(KVPassError, match="delete it, or tune again"):
        tuned.configured(case, device)


TOY = {
    "tune": dict(schemes=("kivi",), length=96, batches=(1,), shape=(4, 2, 64), lowering="reference", most=3),
    "attend": dict(schemes=("kivi", "kivi-pre"), lengths=(128,), batches=(2,), shape=(4, 2, 64), lowering="reference"),
    "latent": dict(schemes=("kivi",), lengths=(96,), batches=(2,), shape=(4, 64, 32), lowering="reference"),
    "prompts": dict(schemes=("kivi",), lengths=(96,), queries=20, shape=(4, 2, 64), lowering="reference"),
    "quantize": dict(schemes=("kivi",), lengths=(64,), shape=(4, 2, 64), lowering="reference", rounds=1),
    "capacity": {},
    "generates": dict(schemes=("kivi",), prompt=40, new=12, shape=(1, 128, 4, 2), lowering="auto"),
    "step": dict(schemes=("kivi",), lengths=(40,), steps=2, shape=(1, 128, 4, 2), dtype=torch.float32),
    "due": dict(schemes=("waterfill-static",), lengths=(40,), steps=3, shape=(1, 128, 4, 2), dtype=torch.float32),
    "throughput": dict(
        schemes=("kivi",), length=40, batches=(2,), steps=2, shape=(1, 128, 4, 2), dtype=torch.float32, largest=3
    ),
}


@pytest.mark.slow_cases("generates", "step", "due", "throughput", "tune")
@pytest.mark.parametrize("stage", TOY)
def test_gpu_stages_run_at_toy_size(stage, monkeypatch, tables):
    """On the CPU, without graphs: the test checks that they run, not their measurements."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    rows = list(importlib.import_module("gpu").STAGES[stage](torch.device("cpu"), **TOY[stage]))
    assert rows and not [row for row in rows if "error" in row or not row.get("good", True)], rows

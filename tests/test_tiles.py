"""Attention of several queries over a past that is dequantized a tile at a time, against dequantizing all of it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpass.cache.per_cache import RotaryState
from kvpass.cache.state import KVState
from kvpass.codec.rope import rope_of, rotate
from kvpass.codec.tensors import Pack, calibrated_shapes
from kvpass.lowering import reference, tiles
from kvpass.lowering.call_types import AttendCall
from kvpass.lowering.partial_attention import Partial, attend_partially
from kvpass.lowering.reference import dequantize_predicted
from kvpass.lowering.table import LATENT, UNEQUAL, DispatchKey, few, select
from kvpass.schemes import LayerGeometry, available, get

from common import coded, naive_attention, only_reference, randn, state_of
from shared_bits import shared_tensors

CPU, DIM = torch.device("cpu"), 32
KIVI = coded(2, "channel", 32, 32), coded(2, "token", 16, 32, residual=32)
WITH_SINKS = coded(3, "channel", 16, 32, sinks=4), coded(1, "token", 8, 32, residual=32, sinks=4)
CENTRED = [coded(4, "token", 32, 32, rotation=0, grid="d2n16", center=c) for c in (True, False)]
BEFORE_ROPE = coded(4, "channel", 32, 32, pre_rope=True), KIVI[1]
PAGES_DIFFER = coded(2, "channel", 8, 16, sinks=2), coded(2, "token", 8, 24, residual=40, sinks=2)
EVICTING = [coded(2, per, 16, 16, residual=16, budget=64) for per in ("channel", "token")]
LOG = [coded(2, per, 16, 16, residual=32, keep="log") for per in ("channel", "token")]
OTHER_WINDOW = LOG[0], coded(2, "token", 16, 16, residual=32)


def call_of(specs, n, queries, dtype=torch.float32, causal=True, mask=None, softcap=0.0, rope="", sinks=False, seed=0):
    """Attention over ``n`` tokens of two samples, by four query heads on two KV heads, with room for more tokens."""
    states = [state_of(spec, randn(seed + i, 2, 2, n, DIM, dtype=dtype), room=n + 70) for i, spec in enumerate(specs)]
    past = [Pack.of(s.pack, s.spec) for s in states]
    q, *new = (randn(seed + 5 + i, 2, 2 * heads, queries, DIM, dtype=dtype) for i, heads in enumerate((2, 1, 1)))
    rotary = None
    if rope:
        angles = randn(9, 2, n, DIM // 2)
        rotary = angles.cos(), angles.sin(), rope
    logits = randn(8, 4) if sinks else None
    return AttendCall(q, *past, n, *new, mask, causal, DIM**-0.5, softcap, *specs, rotary, logits)


def random_mask(queries, tokens, heads=1, seed=1, hidden=0.3):
    return torch.rand(2, heads, queries, tokens, generator=torch.Generator().manual_seed(seed)) > hidden


def in_tiles(call, pages, monkeypatch):
    """The outputs of ``call`` in tiles of ``pages`` pages, with the log-sum-exp."""
    monkeypatch.setattr(tiles, "_VALUES", pages * 2 * 2 * DIM * max(spec.page_size for spec in call.specs))
    assert call.n > tiles._tile(call)
    return tiles.attend_in_tiles(call._replace(with_lse=True), dequantize_predicted)


def assert_as_at_once(call, got):
    expected, lse = reference.attend(call._replace(with_lse=True))
    assert got[0].shape == expected.shape and got[0].dtype == expected.dtype and got[0].is_contiguous()
    tolerance = 1e-5 if call.q.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, [expected, lse], atol=tolerance, rtol=tolerance)


CASES = {
    "kivi": dict(specs=KIVI, n=170, queries=5),
    "sinks, a long call": dict(specs=WITH_SINKS, n=133, queries=150),
    "mask, softcap": dict(specs=WITH_SINKS, n=140, queries=9, causal=False, mask=random_mask(9, 149), softcap=3.0),
    "mask by head": dict(specs=KIVI, n=140, queries=9, causal=False, mask=random_mask(9, 149, 4)),
    "bias by head": dict(specs=KIVI, n=140, queries=4, causal=False, mask=randn(3, 1, 4, 4, 144)),
    "grids, a mean, attention sinks": dict(specs=CENTRED, n=170, queries=16, sinks=True),
    "before rotary embedding": dict(specs=BEFORE_ROPE, n=170, queries=5, rope="half-16"),
    "pages of different sizes": dict(specs=PAGES_DIFFER, n=307, queries=5),
    "log-sparse": dict(specs=LOG, n=200, queries=6, causal=False, mask=random_mask(6, 206)),
    "bfloat16": dict(specs=KIVI, n=170, queries=5, dtype=torch.bfloat16),
    "float16, everything visible": dict(specs=KIVI, n=170, queries=5, causal=False, dtype=torch.float16),
}


@pytest.mark.parametrize("pages", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_attention_in_tiles_equals_attention_at_once(case, pages, monkeypatch):
    call = call_of(**CASES[case])
    assert_as_at_once(call, in_tiles(call, pages, monkeypatch))


@settings(max_examples=40)
@given(
    specs=st.sampled_from((KIVI, WITH_SINKS, PAGES_DIFFER, LOG)),
    n=st.integers(100, 330),
    queries=st.one_of(st.integers(2, 9), st.integers(10, 90)),
    kind=st.sampled_from(("causal", "bool", "padding", "bias", "all", "sparse", "sparse bias")),
    pages=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_any_number_of_queries_and_any_mask(specs, n, queries, kind, pages, seed):
    mask = None
    if kind == "bool":
        mask = random_mask(queries, n + queries, seed=seed)
    elif kind == "padding":
        seen = reference.seen_from(torch.tensor([seed % n, 0]), queries, n + queries)
        mask = seen | (torch.arange(queries) < 0)[:, None]
    elif kind == "bias":
        mask = randn(seed, 2, 4, queries, n + queries)
    elif kind.startswith("sparse"):
        mask = random_mask(1, n + queries, seed=seed, hidden=0.9).expand(-1, -1, queries, -1)
        if kind == "sparse bias":
            mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    call = call_of(specs, n, queries, causal=kind == "causal", mask=mask, seed=seed)
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert_as_at_once(call, in_tiles(call, pages, monkeypatch))


def test_a_fully_masked_query_gets_zeros(monkeypatch):
    mask = torch.ones(2, 1, 2, 72, dtype=torch.bool)
    mask[1, :, 1] = False
    got, lse = in_tiles(call_of(KIVI, 70, 2, causal=False, mask=mask), 1, monkeypatch)
    assert (got[1, :, 1] == 0).all() and got[0].isfinite().all() and (got[0] != 0).all()
    assert (lse[1, :, 1] == -torch.inf).all() and lse[0].isfinite().all()
    got, lse = in_tiles(call_of(KIVI, 70, 2, causal=False, mask=mask & False), 1, monkeypatch)
    assert (got == 0).all() and (lse == -torch.inf).all()


def counted():
    """A function that dequantizes pages, and a list that receives how many at each call."""
    pages = []

    def dequantize(kept, *rest):
        pages.append(kept[0].shape[2])
        return dequantize_predicted(kept, *rest)

    return dequantize, pages


def test_no_more_than_a_tile_is_dequantized_at_a_time_and_hidden_tiles_are_not(monkeypatch):
    counting, sizes = counted()
    monkeypatch.setattr(tiles, "_VALUES", 2 * 2 * 2 * DIM * 32)
    call = call_of(KIVI, 500, 40)
    tiles.attend_in_tiles(call, counting)
    assert max(sizes) == 2 and sum(sizes) == 15 + 14  # keys leave the window earlier than values
    sizes.clear()
    behind = torch.ones(1, 1, 40, 540, dtype=torch.bool)
    behind[..., :450] = False  # a sliding window
    tiles.attend_in_tiles(call._replace(causal=False, mask=behind), counting)
    assert sum(sizes) == 1


def test_of_selected_tokens_only_their_pages_are_dequantized_a_tile_at_a_time(monkeypatch):
    counting, pages = counted()
    monkeypatch.setattr(tiles, "_VALUES", 2 * 2 * 2 * DIM * 32)
    call = call_of(KIVI, 500, 1)
    for hidden in (False, torch.finfo(torch.float32).min):
        mask = torch.zeros(1, 1, 1, 501, dtype=torch.bool)
        mask[..., [0, 1, 70, 200, 201, 210, 499, 500]] = True  # in three pages, and in the window
        if hidden:
            mask = torch.zeros(mask.shape).masked_fill(~mask, hidden)
        selecting = call._replace(causal=False, mask=mask)
        (got,) = tiles.attend_in_tiles(selecting, counting)
        torch.testing.assert_close(got, reference.attend(selecting)[0], atol=1e-5, rtol=1e-5)
        assert pages == [2, 2, 1, 1]  # of keys and of values
        pages.clear()


def test_a_past_of_one_tile_is_dequantized_as_a_whole(monkeypatch):
    call = call_of(KIVI, 160, 2)
    for values, as_a_whole in ((160 * 2 * 2 * DIM, True), (160 * 2 * 2 * DIM - 1, False)):
        monkeypatch.setattr(tiles, "_VALUES", values)
        monkeypatch.setattr(tiles, "_in_tiles", lambda call, dequantize_fn: Partial(torch.ones(1), torch.ones(1)))
        (got,) = tiles.attend(call)
        assert torch.equal(got, reference.attend(call)[0] if as_a_whole else torch.ones(1))


# ---------------------------------------------------------------- every scheme

AT_ONCE = {"h2o", "qaq", "qaq-demote", "qaq-paper"}
"""Schemes that are dequantized as a whole, because what they store depends on attention scores."""
IN_TILES = set(available()) - AT_ONCE - {"streaming-llm"}  # it evicts, which only a cache can do: test_evicting_models


def states_of(plan, n, heads=2, dim=64):
    """States that hold ``n`` random tokens of two samples, and the last arguments of the ops for their keys."""
    room = 2, heads, dim, torch.float32, CPU, n
    shared = [
        shared_tensors(spec, heads, dim, i) if plan.shares_out else () for i, spec in enumerate((plan.key, plan.value))
    ]
    angles = shared[0][0] if plan.key.transform.numbered else None
    shared[0] = shared[0][angles is not None :]
    key, value = (
        KVState.allocate(spec, *room, shared=type(shared[0])(tensors) if tensors else None)
        for spec, tensors in zip((plan.key, plan.value), shared, strict=True)
    )
    for seed, state in enumerate((key, value)):
        if calibrated := calibrated_shapes(state.spec, dim):
            state.calibrate([randn(seed, *shape).sort().values for shape in calibrated.values()])
    k, v, q = randn(1, 2, heads, n, dim), randn(2, 2, heads, n, dim), randn(3, 2, 2 * heads, n, dim)
    tables, rope = {}, ""
    if plan.key.transform.turns:
        turned = (torch.arange(n + plan.key.page_size)[:, None] * 100 ** (-torch.arange(dim // 2) / (dim // 2))).expand(
            2, -1, -1
        )
        cos, sin, rope = turned.cos(), turned.sin(), rope_of(dim // 2, False)
        if plan.key.transform.page_rope:
            k, key.rotary = rotate(k, cos, sin, rope), RotaryState.of(plan.key, cos, sin)
        else:
            tables = dict(cos=cos, sin=sin, rope=rope)
    elif angles is not None:
        key.rotary = RotaryState(plan.key, 2, dim, torch.float32, CPU, n, angles)
    value.same_layer_keys = key
    key.append(k, 0, q, rope=rope if key.rotary is not None and angles is None else "")
    value.append(v, 0, q)
    return key, value, tables or key.tables()


@pytest.mark.parametrize("name", sorted(IN_TILES))
def test_every_scheme_is_read_in_tiles(name, monkeypatch):
    plan, queries, dim = get(name).plan_of(LayerGeometry(1, 4, 2, 64, torch.float32, CPU)), 20, 64
    n = 2 * max(plan.key.page_size, plan.value.page_size) + 150
    with only_reference():
        key, value, tables = states_of(plan, n)
    q, new = randn(4, 2, 4, queries, dim), [randn(5 + i, 2, 2, queries, dim) for i in range(2)]
    arguments = q, key.pack, value.pack, key.length_tensor(n), *new, None, True, dim**-0.5, 0.0, key.text, value.text
    monkeypatch.setattr(tiles, "_VALUES", 1)
    ran = []
    monkeypatch.setattr(tiles, "_in_tiles", lambda *given, run=tiles._in_tiles: ran.append(0) or run(*given))
    got, expected = (torch.ops.kvpass.attend(*arguments, name, **tables)[0] for name in ("eager", "reference"))
    assert ran
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", sorted(AT_ONCE))
def test_schemes_that_need_attention_scores_are_dequantized_as_a_whole(name):
    plan = get(name).plan_of(LayerGeometry(1, 4, 2, DIM, torch.float32, CPU))
    extras = ("attention mass",) if plan.key.statistic else ()
    dispatch = DispatchKey("attend", "cpu", (str(plan.key), str(plan.value)), 5, DIM, torch.float32, extras)
    assert select(dispatch, "eager").name == "reference"


@pytest.mark.parametrize(
    ("specs", "queries", "extras", "auto", "name"),
    [
        (KIVI, 1, ("mask",), "cpp", "inductor"),
        (KIVI, 1, ("latent attention",), "inductor-tiled", "inductor-tiled"),
        (KIVI, 2, (), "cpp", "inductor-tiled"),
        (KIVI, 16, ("mask", "sinks"), "cpp", "inductor-tiled"),
        (WITH_SINKS, 16, ("mask", "softcap"), "inductor-tiled", "inductor-tiled"),
        (KIVI, 17, (), "inductor-tiled", "inductor-tiled"),
        (KIVI, 2, ("values of another shape than keys",), "inductor-tiled", "inductor-tiled"),
        (KIVI, 2, ("attention mass",), "inductor-dense", "inductor-dense"),
        (LOG, 2, (), "cpp", "inductor-tiled"),
        (LOG, 2, ("mask",), "inductor-tiled", "inductor-tiled"),  # its columns are in token order, and pages are not
        (OTHER_WINDOW, 2, (), "inductor-dense", "inductor-dense"),
        (EVICTING, 2, (), "cpp", "inductor-tiled"),
    ],
)  # fmt: skip
def test_the_dispatcher_selects_attention_of_several_queries(specs, queries, extras, auto, name):
    dispatch = DispatchKey("attend", "cpu", tuple(map(str, specs)), few(queries), DIM, torch.float32, extras)
    assert (select(dispatch).name, select(dispatch, "inductor").name) == (auto, name)
    assert select(dispatch, name).name == name
    assert select(dispatch, "eager").name == ("tiled" if name == "inductor-tiled" else "reference")


# ---------------------------------------------------------------- parts


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("hide", [None, "some", "all of the first part"])
def test_parts_combine_to_attention_over_all_tokens(softcap, hide):
    q, k, v = (randn(i, 1, 2, 6, 16) for i in range(3))
    bias = None
    if hide is not None:
        bias = torch.zeros(1, 1, 6, 6)
        bias[..., 2, slice(1, 4) if hide == "some" else slice(0, 3)] = -torch.inf
    parts = [
        attend_partially(q, k[:, :, s], v[:, :, s], None if bias is None else bias[..., s], 0.3, softcap)
        for s in (slice(0, 3), slice(3, 6))
    ]
    expected = naive_attention(q, k, v, bias, scale=0.3, softcap=softcap, sinks=(logits := randn(9, 2)))
    got = parts[0].and_also(parts[1]).with_sinks(logits)
    torch.testing.assert_close(got.out.double(), torch.as_tensor(expected), atol=1e-5, rtol=1e-5)


def test_parts_that_see_nothing_count_nothing():
    nothing = Partial(torch.zeros(1, 1, 1, 4), torch.full((1, 1, 1), -torch.inf))
    both = nothing.and_also(Partial(torch.zeros(1, 1, 1, 4), nothing.lse))
    assert (both.out == 0).all() and both.lse.item() == -torch.inf
    something = Partial(torch.ones(1, 1, 1, 4), torch.zeros(1, 1, 1))
    assert (both.and_also(something).out == 1).all()


@pytest.mark.parametrize("scheme", ["waterfill", "kivi", "kivi-4", "higgs", "squat"])
def test_kernels_read_the_pages_of_latents_on_cpus(scheme):
    layer = LayerGeometry(0, 1, 1, 64, torch.float32, CPU, None, 1, 32, latent=True)
    plan = get(scheme).plan_of(layer)
    specs = str(plan.key), str(plan.value)
    assert select(DispatchKey("attend", "cpu", specs, 1, 64, torch.float32, (LATENT, UNEQUAL))).name == "inductor-tiled"

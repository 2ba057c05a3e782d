"""`KVState` and `PackedKV`: what they store and where, and the effects of reading, growing and cropping."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpass import KVPassError, NonFiniteError, schemes
from kvpass.cache.state import KVState
from kvpass.codec import CodecSpec, Subspace

from common import (
    DIM,
    WIDTHS,
    assert_same_contents,
    chunkings,
    coded,
    dtypes,
    naive_dequantize,
    queries_for,
    randn,
    recoded,
    seeds,
    specs,
    state_of,
)

pytestmark = pytest.mark.usefixtures("reference_lowering")

# ---------------------------------------------------------------- append


@given(specs(), chunkings(), seeds, dtypes)
def test_append_in_any_chunking_equals_append_at_once(spec, chunks, seed, dtype):
    x = randn(seed, 2, 2, sum(chunks), DIM, dtype=dtype)
    assert_same_contents(state_of(spec, x, chunks), state_of(spec, x), x.shape[2])


@given(specs(per="channel", subspace=True), chunkings(), seeds, dtypes)
def test_append_in_any_chunking_equals_append_at_once_with_a_subspace(spec, chunks, seed, dtype):
    x, q = randn(seed, 2, 2, sum(chunks), DIM, dtype=dtype), queries_for(spec, seed, 2, 2)
    chunked, whole = state_of(spec, x, chunks, q), state_of(spec, x, q=q)
    assert torch.equal(chunked.compensation, whole.compensation) and whole.compensation.any()
    assert_same_contents(chunked, whole, x.shape[2])


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("per, residual", [("channel", 0), ("token", 32)])
@pytest.mark.parametrize("sinks", [0, 4])
def test_token_by_token_equals_at_once_for_the_shipped_layouts(bits, per, residual, sinks):
    spec = coded(bits, per, 32, 32, residual=residual, sinks=sinks)
    x = randn(bits, 1, 2, 133, 32)
    assert_same_contents(state_of(spec, x, [1] * 133), state_of(spec, x), 133)


@pytest.mark.parametrize("head_dim, rows", [(64, 32), (128, 32), (64, 96)])
def test_compensated_pages_do_not_depend_on_how_many_are_encoded_together(head_dim, rows):
    spec = coded(2, "channel", 32, rows, subspace=Subspace(5, 1.0, True, head_dim // 2))
    x, q = randn(0, 1, 3, 1000, head_dim), queries_for(spec, 1, 1, 3, 300, head_dim)
    assert_same_contents(state_of(spec, x, [37] * 27 + [1], q), state_of(spec, x, q=q), 1000)


@given(specs(), seeds, st.integers(0, 60))
def test_an_empty_append_changes_nothing(spec, seed, n):
    x = randn(seed, 1, 2, n, DIM)
    state = state_of(spec, x)
    before = state.dequantize(n)
    state.append(x[:, :, :0], n)
    assert torch.equal(state.dequantize(n), before)


@given(specs(), chunkings(), seeds, dtypes)
def test_sinks_and_window_are_the_originals_bit_for_bit_and_as_many_as_promised(spec, chunks, seed, dtype):
    n = 0
    x = randn(seed, 2, 2, sum(chunks), DIM, dtype=dtype)
    state = KVState.allocate(spec, 2, 2, DIM, dtype, x.device, 0)
    for length in chunks:
        state.append(x[:, :, n : n + length], n)
        n += length
        window, dense, sinks = state.window(n), state.dequantize(n), min(n, spec.retention.sinks)
        exact = window.shape[2]
        if spec.retention.packed(n):
            assert spec.retention.residual <= exact <= spec.retention.window - 1
        else:
            assert exact == n - sinks < spec.retention.window
        assert torch.equal(window, x[:, :, n - exact : n])
        assert torch.equal(dense[:, :, n - exact :], x[:, :, n - exact : n])
        assert torch.equal(dense[:, :, :sinks], x[:, :, :sinks])
        assert spec.retention.packed(n) == n - sinks - exact


@given(specs(), st.integers(40, 150), seeds, dtypes)
def test_packed_tokens_dequantize_like_the_naive_implementation_rounded_once(spec, tokens, seed, dtype):
    x = randn(seed, 2, 2, tokens, DIM, dtype=dtype)
    state, used, sinks = state_of(spec, x), spec.retention.pages(tokens), spec.retention.sinks
    naive = naive_dequantize(state.codes[:, :, :used], state.scale[:, :, :used], state.zero_point[:, :, :used], spec)
    got = state.dequantize(tokens)
    assert got.dtype == dtype and got.shape == x.shape and got.is_contiguous()
    packed = got[:, :, sinks : sinks + spec.retention.packed(tokens)].double()
    assert torch.allclose(packed, naive, rtol=torch.finfo(dtype).eps, atol=4e-6)


def test_append_rounds_to_the_dtype_of_the_cache():
    spec, x = coded(2, "token", 8, 8, residual=8), randn(0, 1, 1, 20, DIM)
    state = KVState.allocate(spec, 1, 1, DIM, torch.bfloat16, "cpu", 20)
    state.append(x, 0)
    assert_same_contents(state, state_of(spec, x.bfloat16()), 20)


@pytest.mark.parametrize("shape", [(2, 2, 3, DIM), (1, 3, 3, DIM), (1, 2, 3, DIM + 8), (2, 3, DIM)])
def test_append_refuses_tensors_of_another_geometry_and_names_both(shape):
    state = KVState.allocate(coded(2, "token", 8, 8), 1, 2, DIM, torch.float32, "cpu", 8)
    with pytest.raises(KVPassError, match=r"\(1, 2, 16\), got"):
        state.append(torch.zeros(shape), 0)


@pytest.mark.parametrize("per", ["channel", "token"])
def test_a_refused_append_leaves_the_stored_tokens_alone(per):
    spec = coded(2, per, 8, 16, sinks=2)
    x = randn(0, 1, 2, 45, DIM)
    state, bad = state_of(spec, x), randn(1, 1, 2, 40, DIM)
    before = state.dequantize(45)
    bad[0, 1, 7, 3] = float("nan")
    with pytest.raises(NonFiniteError):
        state.append(bad, 45)
    assert torch.equal(state.dequantize(45), before)


def test_the_first_tokens_of_a_codec_with_a_subspace_need_queries():
    spec = coded(2, "channel", 8, 8, subspace=Subspace(2, 1.0, True, 8))
    with pytest.raises(KVPassError, match="queries"):
        state_of(spec, randn(0, 1, 1, 4, DIM))


# ---------------------------------------------------------------- growth


@given(specs(), chunkings(), seeds)
def test_growing_keeps_contents(spec, chunks, seed):
    x = randn(seed, 1, 2, sum(chunks), DIM)
    grown, roomy = state_of(spec, x, chunks, room=0), state_of(spec, x, chunks, room=4000)
    assert grown.codes.shape[2] < roomy.codes.shape[2] or spec.retention.pages(4000) <= 4
    assert_same_contents(grown, roomy, x.shape[2])


@pytest.mark.parametrize("step", [1, 7, 300])
def test_slack_stays_within_three_percent_or_four_pages(step):
    spec = coded(1, "channel", 8, 8)
    state = KVState.allocate(spec, 1, 1, 2, torch.float32, "cpu", 0)
    reallocations, capacity = 0, state.codes.shape[2]
    for n in range(0, 6000, step):
        state.reserve(n)
        pages = {getattr(state, name).shape[2] for name in ("codes", "scale", "zero_point")}
        assert len(pages) == 1
        (now,) = pages
        reallocations, capacity = reallocations + (now != capacity), now
        used = spec.retention.pages(n)
        assert used <= capacity <= max(used + 4, used * 1.032)
    assert reallocations <= 110  # geometric, not once a page


def test_allocating_for_all_tokens_never_moves_the_storage():
    spec = coded(2, "channel", 8, 16, sinks=3)
    state = KVState.allocate(spec, 1, 2, DIM, torch.float32, "cpu", 500)
    where = {name: tensor.data_ptr() for name, tensor in state.tensors()}
    for n in range(0, 500, 20):
        state.append(randn(n, 1, 2, 20, DIM), n)
    assert where == {name: tensor.data_ptr() for name, tensor in state.tensors()}


# ---------------------------------------------------------------- crop


@st.composite
def crops(draw):
    spec = draw(specs())
    old = draw(st.integers(1, 150))
    return spec, old, draw(st.integers(max(0, old - spec.retention.rollback), old))


@given(crops(), chunkings(60), seeds)
def test_crop_within_rollback_is_as_if_the_tokens_had_never_been_there(case, chunks, seed):
    spec, old, new = case
    x, y = randn(seed, 2, 2, old, DIM), randn(seed + 1, 2, 2, sum(chunks), DIM)
    state = state_of(spec, x)
    assert state.lossless_crop(new)
    state.crop(old, new)
    kept = torch.cat([x[:, :, :new], y], 2)
    n = new
    assert_same_contents(state, state_of(spec, x[:, :, :new]), new)
    for chunk in y.split(chunks, 2):
        state.append(chunk, n)
        n += chunk.shape[2]
        assert_same_contents(state, state_of(spec, kept[:, :, :n]), n)


def test_crop_across_a_flush_unpacks_the_page_without_loss():
    spec = coded(2, "channel", 32, 32)
    x = randn(0, 1, 2, 100, DIM)
    state = state_of(spec, x)
    state.crop(100, 90)
    assert spec.retention.packed(100) == 96 and spec.retention.packed(90) == 64
    assert torch.equal(state.window(90), x[:, :, 64:90])
    state.append(x[:, :, 90:], 90)
    assert_same_contents(state, state_of(spec, x), 100)


@given(specs(), st.integers(60, 150), st.floats(0, 1), seeds)
def test_crop_beyond_the_window_restores_dequantized_tokens(spec, old, share, seed):
    new = int(share * (old - 1))
    x = randn(seed, 2, 2, old, DIM)
    state = state_of(spec, x)
    before, lossless, exact_from = (
        state.dequantize(old),
        state.lossless_crop(new),
        max(0, old - spec.retention.ring_size),
    )
    state.crop(old, new)
    got, start = state.dequantize(new), min(new, spec.retention.sinks) + spec.retention.packed(new)
    if lossless:
        assert torch.equal(got[:, :, start:], x[:, :, start:new])
        assert torch.equal(got[:, :, :start], before[:, :, :start])
    else:
        assert torch.equal(got[:, :, :exact_from], before[:, :, : min(new, exact_from)])
        assert torch.equal(got[:, :, max(start, exact_from) :], x[:, :, max(start, exact_from) : new])


@given(specs(), st.integers(0, 120), seeds)
def test_crop_to_nothing_gives_an_empty_state_that_can_be_filled_again(spec, old, seed):
    x, y = randn(seed, 1, 2, old, DIM), randn(seed + 1, 1, 2, 70, DIM)
    state = state_of(spec, x)
    state.crop(old, 0)
    assert state.dequantize(0).shape == (1, 2, 0, DIM)
    state.append(y, 0)
    assert_same_contents(state, state_of(spec, y), 70)


@st.composite
def histories(draw):
    """Appends (positive) and crops (negative) that never go below zero."""
    n, steps = 0, []
    for _ in range(draw(st.integers(2, 9))):
        change = draw(st.one_of(st.integers(1, 70), st.integers(-40, -1), st.integers(-12, -1)))
        change = max(change, -n)
        if change:
            steps.append(change)
            n += change
    return steps


def ramp(spec: CodecSpec, tokens: int) -> torch.Tensor:
    """Token t has the value t. At 8 bits it dequantizes to t within a fraction, so a misplaced token is visible."""
    return torch.arange(tokens, dtype=torch.float32)[:, None].expand(1, 1, tokens, DIM).contiguous()


@settings(max_examples=80)
@given(specs(), histories())
def test_after_any_appends_and_crops_every_token_is_still_itself(spec, steps):
    spec = recoded(spec, bits=8)
    x, n = ramp(spec, 400), 0
    state = KVState.allocate(spec, 1, 1, DIM, x.dtype, "cpu", 0)
    for change in steps:
        if change > 0:
            change = min(change, 400 - n)
            state.append(x[:, :, n : n + change], n)
        else:
            state.crop(n, n + change)
        n += change
        if n:
            assert (state.dequantize(n) - x[:, :, :n]).abs().max() < 0.5, f"after {change:+} to {n} tokens"


def test_two_crops_that_together_exceed_the_rollback_do_not_mix_up_tokens():
    spec = coded(8, "channel", 32, 32, rollback=16)
    x = ramp(spec, 116)
    state = state_of(spec, x)
    state.crop(116, 106)
    lossless = state.lossless_crop(95)
    state.crop(106, 95)
    assert (state.window(95) - x[:, :, 64:95]).abs().max() < 0.5
    if lossless:
        assert torch.equal(state.window(95), x[:, :, 64:95])


def test_a_crop_after_one_that_had_to_restore_does_not_mix_up_tokens():
    spec = coded(8, "channel", 32, 32, rollback=16)
    x = ramp(spec, 300)
    state = state_of(spec, x)
    state.crop(300, 100)
    state.crop(100, 95)
    assert (state.dequantize(95) - x[:, :, :95]).abs().max() < 0.5


# ---------------------------------------------------------------- batch


@given(specs(), seeds, st.lists(st.integers(0, 2), min_size=1, max_size=5))
def test_map_selects_and_reorders_samples(spec, seed, order):
    x = randn(seed, 3, 2, 90, DIM)
    state, index = state_of(spec, x), torch.tensor(order)
    chosen = copy.deepcopy(state)
    chosen.map_(lambda tensor: tensor.index_select(0, index))
    assert_same_contents(chosen, state_of(spec, x[index]), 90)
    before = state.dequantize(90)
    chosen.append(randn(seed, len(order), 2, 40, DIM), 90)
    assert torch.equal(state.dequantize(90), before)  # a selection is independent of its source


def test_map_takes_the_compensation_along():
    spec = coded(2, "channel", 8, 8, subspace=Subspace(2, 1.0, True, 8))
    x, q = randn(0, 3, 2, 40, DIM), queries_for(spec, 1, 3, 2)
    chosen = state_of(spec, x, q=q)
    chosen.map_(lambda tensor: tensor[[2, 0]])
    alone = state_of(spec, x[[2, 0]], q=q[[2, 0]])
    chosen.append(x[[2, 0]], 40)
    alone.append(x[[2, 0]], 40)
    assert torch.allclose(chosen.compensation.float(), alone.compensation.float(), atol=2e-3)
    assert (chosen.dequantize(80) - alone.dequantize(80)).abs().mean() < 1e-3


# ---------------------------------------------------------------- bytes


@given(specs(), st.booleans(), st.integers(1, 3), st.integers(1, 3), dtypes, st.integers(0, 900))
def test_nbytes_is_the_closed_form_with_everything_counted(spec, subspace, batch, heads, dtype, tokens):
    if subspace and spec.quantizer.per == "channel":
        spec = recoded(spec, subspace=Subspace(3, 1.0, True, DIM // 4))
    state = KVState.allocate(spec, batch, heads, DIM, dtype, "cpu", tokens)
    pages = max(4, max(0, tokens - spec.retention.sinks - spec.retention.residual) // spec.page_size)
    codes = pages * spec.page_size * DIM * spec.bits // 8
    params = 2 * 2 * pages * spec.page_size * DIM // spec.quantizer.group_size
    ring = (spec.retention.sinks + spec.retention.window + spec.retention.rollback) * DIM * dtype.itemsize
    compensation = 2 * (DIM * 3 // 4) ** 2 if spec.quantizer.subspace else 0
    assert state.nbytes == batch * heads * (codes + params + ring + compensation)
    assert state.nbytes == sum(t.untyped_storage().nbytes() for _, t in state.tensors())


@given(specs(), chunkings(), seeds)
def test_nbytes_follows_growth_and_selection(spec, chunks, seed):
    state = state_of(spec, randn(seed, 3, 1, sum(chunks), DIM), chunks)
    swapped = copy.deepcopy(state)
    swapped.map_(lambda tensor: tensor[[1, 0]])
    for held in (state, swapped):
        assert held.nbytes == sum(t.untyped_storage().nbytes() for _, t in held.tensors())


def test_kivi_at_4096_tokens_takes_at_most_22_percent_of_a_bfloat16_cache():
    plan = schemes.get("kivi").plan(schemes.LayerGeometry(0, 1, 3, 64, torch.bfloat16, torch.device("cpu")))
    packed = sum(KVState.allocate(s, 1, 3, 64, torch.bfloat16, "cpu", 4096).nbytes for s in (plan.key, plan.value))
    assert packed <= 0.22 * (2 * 3 * 4096 * 64 * 2)

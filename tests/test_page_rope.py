"""Page-relative RoPE: which rotary tables are stored, and that keys are read correctly at any position."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpass.cache.per_cache import RotaryState
from kvpass.cache.state import KVState
from kvpass.codec.page_rope import (
    PageTables,
    before_rotation,
    from_page_rope,
    mean_in_page,
    neighbours,
    rows,
    to_page_rope,
)
from kvpass.codec.quantizer import Quantizer
from kvpass.codec.rope import rotate
from kvpass.codec.spec import CodecSpec
from kvpass.codec.transform import Transform
from kvpass.layout.retention import Retention
from kvpass.layout.window import length_tensor

from common import randn, seeds

DIM, SIZE, SINKS, ROPE = 32, 16, 3, "half-12"
EXACT = CodecSpec(Quantizer(32, "token", DIM), Retention(24, SIZE, SINKS), Transform(page_rope=True, center=True))


def tables(places, scale=1.0):
    """Rotary tables of tokens at these positions, ``[B, T]``."""
    angles = places.float()[..., None] * 100 ** (-torch.arange(12) / 12)
    return scale * angles.cos(), scale * angles.sin()


def stored(cos, sin, *calls, spec=EXACT):
    """The stored tables after calls with these numbers of tokens."""
    state, n = RotaryState(spec, len(cos), 2 * cos.shape[2], cos.dtype, "cpu", cos.shape[1]), 0
    for tokens in calls:
        new = cos[:, n : n + tokens], sin[:, n : n + tokens]
        torch.ops.kvpass.append_rotary_(state.cos, state.sin, length_tensor(n), *new, spec=str(spec))
        n += tokens
    return PageTables(state.cos, state.sin, ROPE)


def middles(cos, sin):
    """The tables of the middle tokens of pages, by definition."""
    return [table[:, SINKS + SIZE // 2 :: SIZE] for table in (cos, sin)]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), seeds)
def test_page_middles_and_relative_rotations_are_stored_in_any_chunking(calls, seed):
    places = torch.arange(sum(calls)) + torch.tensor([[0], [seed % 1000]])
    cos, sin = tables(places, scale=1.3)
    got = stored(cos, sin, *calls)
    for table, expected in zip(got[:2], middles(cos, sin), strict=True):
        assert torch.equal(table[:, SIZE : SIZE + expected.shape[1]], expected)
        assert not table[:, SIZE + expected.shape[1] :].any()
    if sum(calls) >= SIZE:
        first = max(0, calls[0] - SIZE)
        assert torch.equal(got.cos[:, :SIZE], cos[:, first : first + SIZE])
        turn = torch.complex(*neighbours(got, SIZE))
        expected = torch.complex(*tables((torch.arange(SIZE) - SIZE // 2)[None])).expand_as(turn)
        torch.testing.assert_close(turn, expected, atol=1e-4, rtol=1e-4)


@given(st.integers(1, 90), st.integers(1, 90), st.sampled_from([1, 3, 16]))
def test_a_call_captured_at_another_length_stores_the_same(captured, n, tokens):
    """Lengths are read from the device: the host's length is that of the capture."""
    cos, sin = tables(torch.arange(n + tokens)[None])
    expected, got = stored(cos, sin, n, tokens), stored(cos, sin, n)
    spec_room = rows(n + tokens, SIZE)
    own = [torch.cat([table, table.new_zeros(1, spec_room, table.shape[2])], 1)[:, :spec_room] for table in got[:2]]
    length = torch.tensor([n]).expand(length_tensor(captured).shape[0])
    torch.ops.kvpass.append_rotary_(*own, length, cos[:, n:], sin[:, n:], spec=str(EXACT))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(own, expected[:2], strict=True))


@given(seeds, st.integers(0, 3))
def test_page_relative_keys_round_trip_and_the_mean_is_rotated_with_them(seed, first):
    cos, sin = tables(torch.arange(200)[None] + 7, scale=0.8)
    page_tables, x = stored(cos, sin, 200), randn(seed, 1, 2, 3 * SIZE, DIM)
    inside = to_page_rope(x, page_tables, first, SIZE)
    torch.testing.assert_close(from_page_rope(inside, page_tables, first, SIZE), x, atol=1e-4, rtol=1e-4)
    of = slice(SINKS + first * SIZE, SINKS + (first + 3) * SIZE)
    rotated = rotate(x, cos[:, of], sin[:, of], ROPE)
    inside = to_page_rope(rotated, page_tables, first, SIZE)
    torch.testing.assert_close(before_rotation(inside, page_tables, SIZE), x, atol=1e-4, rtol=1e-4)
    mean = x[:, :, :1]
    same = to_page_rope(rotate(mean.expand_as(x), cos[:, of], sin[:, of], ROPE), page_tables, first, SIZE)
    torch.testing.assert_close(mean_in_page(mean, page_tables, SIZE).repeat(1, 1, 3, 1), same, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("places", ["neighbours", "anywhere", "not known"])
def test_keys_round_trip_at_any_position(places):
    """Positions that jump make a mean less useful, and have no other effect: exact storage loses nothing, and after a
    crop, tokens that return from pages are packed again."""
    at = torch.arange(150)[None] if places == "neighbours" else torch.randperm(150)[None] * 3
    cos, sin = tables(at, scale=1.2)
    state = KVState.allocate(EXACT, 1, 2, DIM, torch.float32, "cpu", 150)
    how = {} if places == "not known" else dict(rope=ROPE)
    x = randn(0, 1, 2, 150, DIM) + 3
    if how:
        state.rotary = RotaryState.of(EXACT, cos, sin)
        x = rotate(x, cos, sin, ROPE)
    for start, stop in ((0, 70), (70, 71), (71, 150)):
        state.append(x[:, :, start:stop], start, **how)
    torch.testing.assert_close(state.dequantize(150), x, atol=1e-4, rtol=1e-4)
    state.crop(150, 77)
    state.append(x[:, :, 77:], 77, **how)
    torch.testing.assert_close(state.dequantize(150), x, atol=1e-4, rtol=1e-4)

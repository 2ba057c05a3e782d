"""Attention of a few queries over pages that are dequantized a few at a time, against dequantizing all of them."""

import pytest
import torch

from kvpass.codec.tensors import Pack
from kvpass.lowering import reference
from kvpass.lowering.call_types import AttendCall
from kvpass.lowering.inductor import dense, drafts
from kvpass.lowering.table import DispatchKey, few, select

from common import coded, randn, state_of

DIM = 32
KIVI = coded(2, "channel", 32, 32), coded(2, "token", 16, 32, residual=32)
WITH_SINKS = coded(3, "channel", 16, 32, sinks=4), coded(1, "token", 8, 32, residual=32, sinks=4)
CENTRED = [coded(4, "token", 32, 32, rotation=0, grid="d2n16", center=c) for c in (True, False)]
BEFORE_ROPE = coded(4, "channel", 32, 32, pre_rope=True), KIVI[1]
EVICTING = [coded(2, per, 16, 16, residual=16, budget=64) for per in ("channel", "token")]
LOG = [coded(2, per, 16, 16, residual=32, keep="log") for per in ("channel", "token")]


def call_of(specs, n, queries, dtype=torch.float32, causal=True, mask=None, softcap=0.0, rope="", sinks=False):
    """Attention over ``n`` tokens of two samples, by four query heads on two KV heads, with room for more tokens."""
    states = [state_of(spec, randn(i, 2, 2, n, DIM, dtype=dtype), room=n + 70) for i, spec in enumerate(specs)]
    past = [Pack.of(s.pack, s.spec) for s in states]
    q, *new = (randn(5 + i, 2, 2 * heads, queries, DIM, dtype=dtype) for i, heads in enumerate((2, 1, 1)))
    rotary = None
    if rope:
        angles = randn(9, 2, n, DIM // 2)
        rotary = angles.cos(), angles.sin(), rope
    logits = randn(8, 4) if sinks else None
    return AttendCall(q, *past, n, *new, mask, causal, DIM**-0.5, softcap, *specs, rotary, logits)


def random_mask(queries, tokens):
    return torch.rand(2, 1, queries, tokens, generator=torch.Generator().manual_seed(1)) > 0.3


CASES = {
    "kivi": dict(specs=KIVI, n=170, queries=5),
    "sinks, before a page is full": dict(specs=WITH_SINKS, n=33, queries=2),
    "less than the sinks": dict(specs=WITH_SINKS, n=3, queries=3),
    "mask, softcap": dict(specs=WITH_SINKS, n=140, queries=9, causal=False, mask=random_mask(9, 149), softcap=3.0),
    "bias by head": dict(specs=KIVI, n=140, queries=4, causal=False, mask=randn(3, 1, 4, 4, 144)),
    "grids, a mean, attention sinks": dict(specs=CENTRED, n=170, queries=16, sinks=True),
    "before rotary embedding": dict(specs=BEFORE_ROPE, n=170, queries=5, rope="half-16"),
    "bfloat16": dict(specs=KIVI, n=170, queries=5, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("pages", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_attention_in_pieces_equals_attention_at_once(case, pages, monkeypatch):
    monkeypatch.setattr(drafts, "_VALUES", pages * 2 * 2 * 32 * DIM)
    call = call_of(**CASES[case])
    got, (expected,) = drafts.in_pieces(call), reference.attend(call)
    assert got.shape == expected.shape and got.dtype == expected.dtype
    tolerance = 1e-5 if got.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


def test_a_fully_masked_query_gets_zeros():
    mask = torch.ones(2, 1, 2, 72, dtype=torch.bool)
    mask[1, :, 1] = False
    got = drafts.in_pieces(call_of(KIVI, 70, 2, causal=False, mask=mask))
    assert (got[1, :, 1] == 0).all() and got[0].isfinite().all()


def test_a_past_of_one_piece_is_dequantized_as_a_whole(monkeypatch):
    call = call_of(KIVI, 170, 2)
    for values, as_a_whole in ((170 * 2 * 2 * DIM, True), (170 * 2 * 2 * DIM - 1, False)):
        monkeypatch.setattr(drafts, "_VALUES", values)
        monkeypatch.setattr(drafts, "in_pieces", lambda call: "pieces")
        (got,) = drafts.attend(call)
        assert torch.equal(got, dense.attend(call)[0]) if as_a_whole else got == "pieces"


@pytest.mark.parametrize(
    ("specs", "queries", "extras", "name"),
    [
        (KIVI, 1, ("mask",), "inductor"),
        (KIVI, 2, (), "inductor-drafts"),
        (WITH_SINKS, 16, ("mask", "softcap"), "inductor-drafts"),
        (KIVI, 17, (), "inductor-dense"),
        (KIVI, 2, ("attention mass",), "inductor-dense"),
        (LOG, 2, (), "inductor-dense"),
        (EVICTING, 2, (), "inductor-dense"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("lowering", ["auto", "inductor"])
def test_the_dispatcher_selects_attention_of_several_queries(specs, queries, extras, name, lowering):
    dispatch = DispatchKey("attend", "cpu", tuple(map(str, specs)), few(queries), DIM, torch.float32, 2, extras)
    assert select(dispatch, lowering).name == name
    assert select(dispatch, name).name == name

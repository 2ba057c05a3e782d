"""Attention over pages of every fused codec, against attention over the dequantized pages."""

import pytest
import torch

from kvpass.cache.state import KVState
from kvpass.codec import dequantize_pages
from kvpass.codec.hadamard import basis
from kvpass.codec.rope import rotate
from kvpass.codec.tensors import of_pages, read_shapes
from kvpass.layout.pool import whole
from kvpass.lowering.inductor.attention_graph import KeyTransform, page_scores
from kvpass.lowering.inductor.page_view import PAGE_VIEWS, page_values, points_of, view_pages
from kvpass.lowering.inductor.terms import KeyRotation
from kvpass.lowering.table import DispatchKey, select
from kvpass.schemes import LayerGeometry, get

from common import randn

DIM, TOKENS = 32, 150
CASES = {
    "kivi": dict(),
    "kivi, groups that straddle planes": dict(scheme="kivi", residual=48, group_size=16),
    "higgs": dict(),
    "kivi-s8": dict(group_size=16),
    "kvarn-k2v2": dict(residual=32),
    "zipcache": dict(group_size=16),
    "zipcache-salient": dict(residual=32),
    "polarquant": dict(residual=32, group_size=16),
    "polarquant-3": dict(residual=32, group_size=32, rope="pre"),
    "e8": dict(),
    "kitty-25": dict(residual=32, group_size=16),
    "kitty, one channel": dict(scheme="kitty", share=0.04, residual=64, group_size=64, sinks=3),
    "kvquant": dict(residual=32, group_size=16),
    "kvquant-3": dict(residual=16, group_size=16, rope="post"),
    "kvquant-4": dict(residual=32, group_size=32),
    "kvquant-calibrated": dict(),
    "kvquant-calibrated-3": dict(residual=48, rope="post"),
    "gear": dict(residual=32, group_size=16),
    "gear-l": dict(residual=32, group_size=16),
    "gear, 3 bits": dict(scheme="gear", bits=3, rank=0, residual=32, group_size=16),
}


def plan_of(case):
    fields = dict(CASES[case])
    scheme = get(fields.pop("scheme", case), **fields)
    return scheme.plan(LayerGeometry(0, 1, 2, DIM, torch.float32, torch.device("cpu")))


def stored(plan, batch=2, tokens=TOKENS):
    """Key and value states with tokens whose channels differ in scale."""
    states, sizes = [], torch.exp2(randn(7, DIM))
    for seed, spec in enumerate((plan.key, plan.value)):
        state = KVState.allocate(spec, batch, 2, DIM, torch.float32, "cpu", tokens)
        state.same_layer_keys = states[0] if states else None
        if spec.calibrated:
            points = torch.stack([torch.linspace(0, 1, 2**spec.bits) ** power for power in (1, 1.5)])
            ranges = torch.stack([-sizes, 2 * sizes]).expand(2, -1, -1)
            state.calibrate([points, ranges] if spec.quantizer.per == "channel" else [points])
        queries = randn(9, batch, 4, tokens, DIM) if spec.quantizer.needs_queries else None
        state.append(randn(seed, batch, 2, tokens, DIM) * sizes, 0, queries)
        states.append(state)
    return states


def tables(batch, tokens, pairs):
    angles = torch.rand(batch, tokens, pairs) * 6
    return 1.5 * angles.cos(), 1.5 * angles.sin()


def test_there_is_a_case_for_every_codec_that_is_fused():
    ours = {name for name, view in PAGE_VIEWS.items() if view.__module__.startswith("kvpass")}
    assert {spec.codec.name for case in CASES for spec in (plan_of(case).key, plan_of(case).value)} == ours


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("side", ["key", "value"])
def test_page_views_equal_dequantized_pages(case, side):
    state = dict(zip(("key", "value"), stored(plan_of(case)), strict=True))[side]
    spec, pages = state.spec, state.spec.retention.pages(TOKENS)
    kept = [whole(handle, pages)[:, :, :pages] for handle in state.handles[: len(of_pages(spec))]]
    kept += [getattr(state, name) for name in read_shapes(spec, DIM, torch.float32)]
    wanted = dequantize_pages(*kept, spec)
    hadamard = spec.transform.rotation
    hadamard = None if hadamard is None else basis(DIM, hadamard)
    found = view_pages([one.flatten(0, 1) for one in kept], spec.stored_as, points_of(spec, wanted.device), DIM)
    q, weights = randn(5, 4, 3, DIM), randn(6, 4, 3, pages, spec.page_size)
    tokens = torch.arange(pages * spec.page_size).view(pages, -1)
    by_rope = ["half-16", "interleaved-16", "half-10", "interleaved-5"] if spec.transform.pre_rope else [""]
    for rope in by_rope:
        rotation, rotated = None, wanted
        if rope:
            cos, sin = tables(2, tokens.numel(), 16)
            rotation, rotated = KeyRotation(cos, sin, rope, tokens), rotate(wanted, cos, sin, rope)

        def tables_of(each, rope=rope, rotation=rotation):
            pairs = int(rope.split("-")[1]) if rope else 0
            return (rotation.cos[:, each, :pairs], rotation.sin[:, each, :pairs]) if rope else None

        scores = page_scores(q, found, tokens, KeyTransform(tables_of, rope, hadamard))
        scores = sum((term.scores(q, rotation).flatten(2) for term in found.terms), scores)
        expected = q @ rotated.flatten(0, 1).mT
        torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-4)
    if spec.codec.name not in ("boosted", "polar"):  # of keys alone
        expected = weights.flatten(2) @ wanted.flatten(0, 1)
        torch.testing.assert_close(page_values(weights, found, hadamard), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.nightly_cases(
    "kvquant-calibrated-3", "kivi*", "higgs", "zipcache", "polarquant-3", "kitty, one channel", "kvquant-[34]", "gear?*"
)
@pytest.mark.parametrize("case", CASES)
def test_compiled_attention_equals_attention_over_dequantized_tokens(case):
    plan = plan_of(case)
    key, value = stored(plan)
    q, new, mask = randn(5, 2, 4, 1, DIM), randn(6, 2, 2, 1, DIM), torch.zeros(2, 1, 1, TOKENS + 1)
    mask[1, ..., :40] = -torch.inf
    past = (q, key.pack, value.pack, key.length_tensor(TOKENS), new, new, mask, False, 0.2, 0.0, key.text, value.text)
    cos, sin = tables(2, TOKENS, 16)
    turned = dict(cos=cos, sin=sin, rope="half-16") if plan.key.transform.pre_rope else {}
    (got,), (expected,) = (torch.ops.kvpass.attend(*past, name, **turned) for name in ("inductor", "reference"))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name, says", [("kitty", "boosted channels before"), ("gear", "low-rank error terms")])
def test_terms_that_rope_would_rotate_per_token_are_dequantized_first(name, says):
    plan = get(name, rope="pre").plan(LayerGeometry(0, 1, 2, 64, torch.float32, torch.device("cpu")))
    dispatch = DispatchKey("attend", "cpu", (str(plan.key), str(plan.value)), 1, 64)
    assert select(dispatch).name == "reference"
    with pytest.raises(Exception, match=says):
        select(dispatch, "inductor")

"""Bits divided among heads by the prompt's attention: how many each head gets, what they follow from, and pages whose
layout varies by sample."""

import heapq
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpass import KVPassError
from kvpass.cache.state import KVState
from kvpass.codec import dequantize_pages, quantize_pages
from kvpass.codec.by_head import ByHead, pairs_by_head
from kvpass.codec.layer_pages import high_precision_masks, page_bytes, share_of
from kvpass.codec.transform_coding import DISTORTION, PAIRS
from kvpass.layout.retention import Retention
from kvpass.lowering.cpp import dequantize_allocated, quantize_allocated
from kvpass.lowering.fit_sequence import concentration
from kvpass.runtime.simulated import Simulator
from kvpass.schemes import LayerGeometry, WaterfillConfig, get

from common import randn, seeds
from test_allocation import mixed
from tiny import llama, step_by_step, tokens

HEADS, DIM, CPU = 3, 32, torch.device("cpu")
SMALL = dict(scheme="waterfill", by_head=True, residual=16, recent=16, sinks=2, block_size=8)


def plan_of(**fields):
    return get(SMALL | fields).plan(LayerGeometry(0, 1, HEADS, DIM, torch.float32, CPU))


def recalling(batch: int, count: int, recalls: list[int]) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values. In sample b, the queries of head ``recalls[b]`` each find one earlier token."""
    k, v = (mixed(seed, batch, HEADS, count, DIM) for seed in (1, 2))
    q = randn(3, batch, HEADS, count, DIM) / 10
    for sample, head in enumerate(recalls):
        q[sample, head] = 6 * k[sample, head].roll(count // 2, 0)
    return q, k, v


def stored(plan, q, k, v) -> tuple[KVState, KVState]:
    """States that have stored all tokens at once."""
    states = [KVState.allocate(spec, *k.shape[:2], DIM, k.dtype, CPU, k.shape[2]) for spec in (plan.key, plan.value)]
    states[1].same_layer_keys = states[0]
    states[0].append(k, 0, q)
    states[1].append(v, 0)
    return states[0], states[1]


# ---------------------------------------------------------------- how many bits a head gets


@given(seeds, st.integers(1, 4), st.integers(1, 20))
def test_each_pair_goes_where_it_saves_most(seed, heads, pairs):
    """Against a heap that gives away one pair at a time, after one to the best coordinate of every head."""
    cost = (4 * randn(seed, 2, heads, 8)).exp().double()
    saved = [DISTORTION[2 * i] - DISTORTION[2 * i + 2] for i in range(PAIRS)]
    found = pairs_by_head(cost, pairs)
    assert found.sum(-1).tolist() == 2 * [pairs * heads]
    for sample, counts in zip(cost.tolist(), found.tolist(), strict=True):
        best = [max(range(8), key=row.__getitem__) for row in sample]
        levels = {(h, c): int(c == best[h]) for h, c in itertools.product(range(heads), range(8))}
        heap = [(-sample[h][c] * saved[level], h, c, level) for (h, c), level in levels.items()]
        heapq.heapify(heap)
        expected = [1] * heads
        for _ in range(pairs * heads - heads):
            _, h, c, level = heapq.heappop(heap)
            expected[h] += 1
            if level + 1 < PAIRS:
                heapq.heappush(heap, (-sample[h][c] * saved[level + 1], h, c, level + 1))
        assert counts == expected


def test_heads_that_recall_get_more_bits_and_pages_stay_as_large():
    """Keys and values alike, each sample on its own; without attention to packed tokens all heads count the same."""
    plan, recalls = plan_of(), [0, 2]
    states = stored(plan, *recalling(2, 200, recalls))
    for state in states:
        bits = state.widths.long().sum((2, 3))
        assert bits.argmax(-1).tolist() == recalls and (bits.amax(-1) > 1.2 * bits.amin(-1)).all()
        spec = state.spec
        assert {page_bytes(share, spec) for share in share_of(state.widths)} == {state.codes.shape[-1]}
        assert state.codes.shape[-1] == spec.codec.page_bytes({}, HEADS, DIM, spec)
    x = mixed(1, 1, 1, 100, DIM).expand(-1, HEADS, -1, -1)
    for state in stored(plan, torch.zeros_like(x), x, x):
        assert len(state.widths.long().sum((2, 3)).unique()) == 1


@pytest.mark.parametrize("asking", [70, 30])
@pytest.mark.parametrize("kind", ["", "bool", "float", "bias of each head"])
def test_concentration_is_that_of_attention(kind, asking):
    """Computed token by token, for queries of the last tokens. Padding neither asks nor is seen."""
    q, k, retention = randn(1, 2, 4, 70, 8) * 2, randn(2, 2, 2, 70, 8), Retention(24, 8, 3)
    first = torch.tensor([0, 45 if kind else 0])
    seen = torch.ones(70, 70, dtype=torch.bool).tril() & (torch.arange(70) >= first.view(2, 1, 1, 1))
    bias = randn(3, 2, 4, 70, 70) if kind == "bias of each head" else torch.zeros(2, 1, 70, 70)
    mask = {"": None, "bool": seen}.get(kind, bias.masked_fill(~seen, torch.finfo(torch.float32).min))
    found = concentration(q[:, :, -asking:], k, None if mask is None else mask[:, :, -asking:], retention)
    expected = torch.zeros(2, 2, 1, 2)
    for b, head in itertools.product(range(2), range(4)):
        start = int(first[b])
        valid = range(max(start, 70 - asking), 70)
        for t in (valid[int(len(valid) * (i + 0.5) / 64)] for i in range(64)):
            own = bias.expand(-1, 4, -1, -1)[b, head, t, start : t + 1]
            weights = (k[b, head // 2, start : t + 1] @ q[b, head, t] / 8**0.5 + own).softmax(0)
            packed = [j - start for j in range(max(start, 3), t - 16)]
            expected[b, head // 2, 0, 0] += weights[packed].square().sum() / 128
            expected[b, head // 2, 0, 1] += q[b, head, t].square().mean() / 128
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------- pages whose layout varies by sample


@pytest.mark.compiles
def test_samples_of_a_batch_are_stored_as_alone():
    """By PyTorch and by C++, of keys and of values."""
    q, k, v = recalling(2, 200, [0, 2])
    both = stored(plan_of(), q, k, v)
    for sample in range(2):
        one = slice(sample, sample + 1)
        for together, alone in zip(both, stored(plan_of(), q[one], k[one], v[one]), strict=True):
            assert torch.equal(together.widths[one], alone.widths)
            torch.testing.assert_close(together.dequantize(200)[one], alone.dequantize(200))
    x, chosen = k[:, :, :64], both[0].queries
    for state in both:
        basis, widths = state.basis, state.widths
        (pages,) = quantize_pages(x, state.spec, [basis, widths, chosen])
        (got,) = quantize_allocated.quantize(x, [basis, widths, chosen], state.spec)
        assert (got != pages).float().mean() < 1e-3  # sums of another order round differently
        values = dequantize_allocated.dequantize_pages([pages, basis, widths], state.spec)
        torch.testing.assert_close(values, dequantize_pages(pages, basis, widths, state.spec), atol=1e-4, rtol=1e-4)
        chosen = high_precision_masks(pages, state.spec.page_size, HEADS)


def test_a_text_in_one_pass_is_scored_as_token_by_token():
    """What the first packed tokens are fitted to is there however many tokens a call has."""
    model, ids = llama(), tokens(1, 90)
    one_pass = Simulator(model).logits(ids, 70, get(SMALL))
    stepwise = step_by_step(model, SMALL, ids, 70)[0]
    torch.testing.assert_close(stepwise[0, 1:], one_pass, atol=1e-3, rtol=1e-3)


# ---------------------------------------------------------------- where it is not used


def test_layers_without_ranks_or_with_one_head_have_no_bits_by_head():
    config = get(SMALL)
    for layer in (
        LayerGeometry(0, 1, 1, DIM, torch.float32, CPU),
        LayerGeometry(0, 1, HEADS, DIM, torch.float32, CPU, window=512),
    ):
        plan = config.plan(layer)
        assert not any(isinstance(spec.codec, ByHead) for spec in (plan.key, plan.value))
    with pytest.raises(KVPassError, match="by_head=True needs per-token bit widths"):
        WaterfillConfig(by_head=True, rich_key_fields=(0, 0), rich_value_fields=(0, 0))

"""Attention mass as an output of attention, and eviction by it, against lists of tokens in float64."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvpass import HeavyHitter, KVPassError, LogSparseEviction, Sinks, SnapKV, StreamingLLM, schemes
from kvpass.cache.state import KVState
from kvpass.codec import CodecSpec, dequantize_pages, quantize_pages
from kvpass.codec.pages import replace_tokens
from kvpass.layout.eviction import OBSERVED, choose, update_importance
from kvpass.lowering.reference import attention_mass
from kvpass.schemes import HIGGSConfig, IdentityConfig, KIVIConfig

from common import DIM, coded, dense_call, naive_attention, only_reference, randn, seeds, specs

GROUPS, REPEATS = 2, 2  # KV heads, query heads for each


# ---------------------------------------------------------------- which tokens stay


@given(seeds, st.integers(0, 24), st.integers(1, 30), st.integers(1, 24))
def test_the_most_important_tokens_stay_in_their_slots(seed, occupied, leaving, budget):
    occupied = min(occupied, budget)
    if occupied + leaving < budget:
        leaving = budget - occupied
    importance = randn(seed, 2, 3, occupied + leaving)
    importance[0, :, : occupied // 2] = -torch.inf  # padding
    slots = choose(importance, occupied, budget)
    for row, values in zip(slots.flatten(0, 1).tolist(), importance.flatten(0, 1), strict=True):
        assert sorted(row) == sorted(set(row))
        least = values[row].min()
        assert all(values[i] <= least for i in range(len(values)) if i not in row)
        for slot in range(occupied):
            assert row[slot] == slot or slot not in row
        arrived = [candidate for candidate in row if candidate >= occupied]
        assert arrived == sorted(arrived)


def test_the_oldest_tokens_are_found_at_any_length():
    """Above 2^24 float32 does not represent every integer."""
    spec, importance = coded(2, "token", 8, 8, budget=8, evict="age", rollback=8), torch.zeros(1, 1, 0)
    for tokens in [1 << 22] * 5 + [4]:
        total = update_importance(importance, importance.shape[-1], tokens, (), None, spec.retention)
        importance = total[..., -8:]
    assert (importance.diff() > 0).all()


@given(specs(), seeds)
def test_replaced_tokens_leave_the_others_as_they_were(spec, seed):
    with only_reference():
        old, x = randn(seed, 1, 2, 3 * spec.page_size, DIM), randn(seed + 1, 1, 2, 3 * spec.page_size, DIM)
        new = randn(seed + 2, 1, 2, 3 * spec.page_size) > 0
        new[:, :, : spec.page_size] = True  # a page of new tokens only
        pools = quantize_pages(old, spec)
        replaced = replace_tokens(pools, x, new, spec)
        before, after = dequantize_pages(*pools, spec), dequantize_pages(*replaced, spec)
        assert torch.equal(after[~new], before[~new])
        alone = dequantize_pages(*quantize_pages(x, spec), spec)
        assert torch.equal(after[:, :, : spec.page_size], alone[:, :, : spec.page_size])
        if spec.quantizer.per == "token":  # each token is quantized independently of its page
            assert torch.equal(after[new], alone[new])


# ---------------------------------------------------------------- one layer, by ops


class Layer:
    """One attention layer over a packed cache with a budget, driven by the ops as a graph drives it."""

    def __init__(self, config, batch=1):
        geometry = schemes.LayerGeometry(0, 1, GROUPS, DIM, torch.float32, torch.device("cpu"))
        plan = config.plan(geometry)
        self.spec = plan.key
        self.states = [KVState.allocate(s, batch, GROUPS, DIM, torch.float32, "cpu", 0) for s in (plan.key, plan.value)]
        heads = 1 if self.spec.retention.shared else GROUPS
        self.importance = torch.zeros(batch, heads, 0)
        self.slots = torch.zeros(batch, heads, self.spec.retention.budget, dtype=torch.int64)
        self.n = 0

    def step(self, q, k, v, mask=None, lowering="reference"):
        key, value = self.states
        stored = self.spec.retention.stored(self.n + k.shape[2])
        for state in self.states:
            state.reserve(stored)
        more = max(0, stored - self.importance.shape[2])
        self.importance = torch.nn.functional.pad(self.importance, (0, more))
        length = key.length_tensor(self.n)
        packs = [state.pack for state in self.states]
        out, *paid = torch.ops.kvpass.attend(
            q, *packs, length, k, v, mask, mask is None, 1 / math.sqrt(DIM), 0.0, key.text, value.text, lowering,
            statistic=self.spec.statistic, importance=self.importance,
        )  # fmt: skip
        for state, x in zip(self.states, (k, v), strict=True):
            first = state is key
            torch.ops.kvpass.append_(
                state.pack, length, x, None, mask, state.text, "reference",
                importance=self.importance if first else None, scores=paid if first else None, slots=self.slots,
            )  # fmt: skip
        self.n = stored
        return out

    def stored(self):
        with only_reference():
            key, value = (
                torch.ops.kvpass.dequantize(
                    s.pack, s.length_tensor(self.n), s.text, predictor=list(s.predictor), planes=list(s.pooled_planes)
                )
                for s in self.states
            )
        return key, value, self.importance[..., : self.n]


class Naive:
    """The same for one sequence, as a list of (token, key, value, attention mass) for each KV head."""

    def __init__(self, spec: CodecSpec):
        self.spec, self.heads, self.seen = spec, [[] for _ in range(GROUPS)], 0

    def step(self, q, k, v, padding=0):
        tokens = q.shape[2]
        out = torch.zeros(1, GROUPS * REPEATS, tokens, DIM, dtype=torch.float64)
        for head, kept in enumerate(self.heads):
            new = [[self.seen + i, k[0, head, i].double(), v[0, head, i].double(), 0.0] for i in range(tokens)]
            for i in range(padding):
                new[i][3] = -math.inf
            for i in range(tokens):
                visible = [t for t in kept + new[: i + 1] if t[3] != -math.inf]
                for r in range(REPEATS if i >= padding else 0):
                    query = q[0, head * REPEATS + r, i].double()
                    weights = torch.tensor([float(query @ t[1]) / math.sqrt(DIM) for t in visible]).double().softmax(0)
                    out[0, head * REPEATS + r, i] = sum(w * t[2] for w, t in zip(weights, visible, strict=True))
                    for token, weight in zip(visible, weights.tolist(), strict=True):
                        token[3] += weight
            kept += new
            self.heads[head] = self._evicted(kept)
        self.seen += tokens
        return out

    def _evicted(self, kept):
        gone, sinks = self.spec.retention.evicted(len(kept)), self.spec.retention.sinks
        candidates = kept[sinks : sinks + self.spec.retention.budget + gone] if gone else []
        if self.spec.retention.evict == "log":
            numbers = [token[0] for token in candidates]
            stay = numbers[:8]
            for i in range(8, len(numbers), 8):
                stay = (stay + numbers[i : i + 8])[::2]
            return [t for t in kept if t[0] not in numbers or t[0] in stay]
        worth = (lambda t: t[3]) if self.spec.retention.evict == "attention" else (lambda t: (t[3] != -math.inf, t[0]))
        lost = {t[0] for t in sorted(candidates, key=worth)[:gone]}
        return [t for t in kept if t[0] not in lost]


POLICIES = {
    "heavy hitters": HeavyHitter(16, recent=12, page_size=8),
    "heavy hitters and sinks": Sinks(3) + HeavyHitter(8, recent=4, page_size=8),
    "log-sparse": Sinks(1) + LogSparseEviction(8),
    "streaming": StreamingLLM(2, recent=24, exact=8, page_size=8),
    "streaming, all exact": StreamingLLM(1, recent=8, exact=8, page_size=4),
}


def draw(seed, length, batch=1):
    q = 3 * randn(seed, batch, GROUPS * REPEATS, length, DIM)
    return q, randn(seed + 1, batch, GROUPS, length, DIM), randn(seed + 2, batch, GROUPS, length, DIM)


@pytest.mark.parametrize("name", POLICIES)
@given(st.lists(st.one_of(st.just(1), st.integers(1, 40)), min_size=1, max_size=12), st.integers(0, 10), seeds)
def test_eviction_and_attention_mass_equal_a_naive_implementation(name, chunks, padding, seed):
    """Outputs, the tokens kept in each KV head, and their attention mass, for any way to cut a sequence."""
    layer, length = Layer(IdentityConfig(retention=POLICIES[name])), sum(chunks)
    naive, padding = Naive(layer.spec), min(padding, chunks[0] - 1)
    stream, start = draw(seed, length), 0
    for chunk in chunks:
        part = [x[:, :, start : start + chunk] for x in stream]
        mask = torch.ones(chunk, layer.n + chunk, dtype=torch.bool).tril(layer.n)[None, None]
        if start == 0:
            mask = mask & (torch.arange(chunk) >= padding)
        got, expected = layer.step(*part, mask if padding else None), naive.step(*part, padding if not start else 0)
        first = padding if start == 0 else 0
        torch.testing.assert_close(got[:, :, first:].double(), expected[:, :, first:], atol=1e-5, rtol=1e-5)
        start += chunk
        keys, values, importance = layer.stored()
        for head, kept in enumerate(naive.heads):
            assert len(kept) == layer.n
            padded = [token[3] == -math.inf for token in kept]  # which of them stay is not defined, but how many
            assert importance[0, min(head, importance.shape[1] - 1)].eq(-math.inf).sum() == sum(padded)
            kept = [token for token, is_padding in zip(kept, padded, strict=True) if not is_padding]
            mine = {tuple(key.tolist()): i for i, key in enumerate(keys[0, head])}
            where = [mine[tuple(token[1].float().tolist())] for token in kept]
            assert torch.equal(values[0, head, where].double(), torch.stack([token[2] for token in kept]))
            if layer.spec.retention.evict == "attention":
                paid = torch.tensor([token[3] for token in kept], dtype=torch.float64)
                torch.testing.assert_close(importance[0, head, where].double(), paid, atol=1e-5, rtol=1e-5)


@given(st.sampled_from(sorted(POLICIES)), st.integers(1, 300), st.integers(1, 30), seeds)
def test_sinks_and_recent_tokens_are_never_dropped_and_the_budget_is_kept(name, prompt, steps, seed):
    policy = POLICIES[name]
    layer, length = Layer(IdentityConfig(retention=policy)), prompt + steps
    spec, (q, k, v) = layer.spec, draw(seed, length)
    layer.step(q[:, :, :prompt], k[:, :, :prompt], v[:, :, :prompt])
    for i in range(prompt, length):
        layer.step(*(x[:, :, i : i + 1] for x in (q, k, v)))
    keys, _, _ = layer.stored()
    assert layer.n <= spec.retention.sinks + spec.retention.budget + spec.retention.window + spec.retention.rollback
    for head in range(GROUPS):
        held = {tuple(key.tolist()) for key in keys[0, head]}
        recent = range(max(0, length - spec.retention.residual), length)
        assert all(tuple(k[0, head, i].tolist()) in held for i in {*range(min(spec.retention.sinks, length)), *recent})


@pytest.mark.parametrize(
    "length, kept",
    [
        (11, [*range(11)]),
        (12, [0, 2, 4, 6, 8, 9, 10, 11]),
        (30, [0, 16, 20, 22, *range(24, 30)]),
        (64, [0, 52, 56, 58, *range(60, 64)]),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_log_sparse_eviction_keeps_the_tokens_of_the_papers_algorithm(length, kept, at_once):
    layer = Layer(IdentityConfig(retention=replace(LogSparseEviction(4), rollback=0)))
    stream = draw(0, length)
    for part in [stream] if at_once else zip(*(x.split(1, 2) for x in stream), strict=True):
        layer.step(*part)
    keys, _, _ = layer.stored()
    numbers = {tuple(key.tolist()): i for i, key in enumerate(stream[1][0, 0])}
    assert sorted(numbers[tuple(key.tolist())] for key in keys[0, 0]) == kept


@pytest.mark.parametrize("length", [60, 100])
def test_snapkv_keeps_the_tokens_that_the_last_queries_attend_to_and_their_neighbours(length):
    policy = replace(SnapKV(16, recent=32, page_size=4), rollback=0)
    layer, (q, k, v) = Layer(IdentityConfig(retention=policy)), draw(3, length)
    layer.step(q, k, v)
    keys, _, _ = layer.stored()
    packed = policy.packed(length)
    for head in range(GROUPS):
        mass = [0.0] * length
        for r in range(REPEATS):
            for i in range(length - OBSERVED, length):
                scores = k[0, head, : i + 1].double() @ q[0, head * REPEATS + r, i].double() / math.sqrt(DIM)
                for token, weight in enumerate(scores.softmax(0).tolist()):
                    mass[token] += weight
        before = length - OBSERVED
        score = [max(mass[max(0, t - 3) : min(before, t + 4)]) if t < before else mass[t] for t in range(packed)]
        wanted = {*sorted(range(packed), key=score.__getitem__)[-16:], *range(packed, length)}
        numbers = {tuple(key.tolist()): i for i, key in enumerate(k[0, head])}
        found = {numbers[tuple(key.tolist())] for key in keys[0, head]}
        least = min(score[token] for token in wanted if token < packed)
        assert len(found) == len(wanted) and len(wanted - found) < 7
        assert all(score[token] == pytest.approx(least) for token in wanted - found)  # neighbours have equal scores


def test_log_sparse_eviction_needs_equal_windows():
    with pytest.raises(KVPassError, match="must be equal"):
        replace(LogSparseEviction(8), budget=16)


def test_kv_heads_keep_their_own_tokens_unless_the_choice_is_shared():
    kept = {}
    for shared in (False, True):
        layer = Layer(IdentityConfig(retention=HeavyHitter(16, recent=8, page_size=8, shared=shared)))
        q, k, v = draw(4, 120)
        k[:, 1], v[:, 1] = k[:, 0], v[:, 0]  # so that tokens are comparable
        layer.step(q, k, v)
        keys, _, _ = layer.stored()
        kept[shared] = [{tuple(key.tolist()) for key in keys[0, head]} for head in range(GROUPS)]
    assert kept[False][0] != kept[False][1]
    assert kept[True][0] == kept[True][1]


@pytest.mark.slow
@pytest.mark.nightly_cases("0-higgs*", "5-*")
@pytest.mark.parametrize("config", [KIVIConfig(group_size=8), HIGGSConfig(group_size=DIM)], ids=str)
@pytest.mark.parametrize("padding", [0, 5])
def test_fused_attention_mass_equals_the_reference(config, padding):
    config = schemes.base.compose(config, Sinks(2) + HeavyHitter(32, recent=24, page_size=16))
    fused, reference = Layer(config, 2), Layer(config, 2)
    q, k, v = draw(9, 150, 2)
    mask = torch.ones(60, 60, dtype=torch.bool).tril()[None, None].repeat(2, 1, 1, 1)
    mask[1, :, :, :padding] = False
    for layer, lowering in ((fused, "inductor"), (reference, "reference")):
        layer.outputs = [layer.step(*(x[:, :, :60] for x in (q, k, v)), mask if padding else None)]
        for i in range(60, 150):
            one = mask.new_ones(2, 1, 1, layer.n + 1) if padding else None
            layer.outputs.append(layer.step(*(x[:, :, i : i + 1] for x in (q, k, v)), one, lowering))
    for mine, theirs in zip(fused.outputs[1:], reference.outputs[1:], strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)
    for mine, theirs in zip(fused.stored(), reference.stored(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def test_accumulated_mass_equals_attention_in_float64():
    q, k, _ = draw(3, 300)
    paid = attention_mass(dense_call(q, k, k, causal=True, scale=0.25, statistic="sum"), k)
    eye = torch.eye(300).expand(1, GROUPS, -1, -1)  # with these values the output is the weights
    weights = naive_attention(q, k, eye, causal=True, scale=0.25)
    torch.testing.assert_close(paid.double(), weights.unflatten(1, (GROUPS, REPEATS)).sum((2, 3)), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("decoded", [False, True], ids=["", "decoded"])
@pytest.mark.parametrize("queries, statistic", [(1, "sum"), (3, "sum"), (7, "max-5"), (7, "sum-5"), (1, "")])
@pytest.mark.usefixtures("reference_in_this_test")
def test_opcheck_attend_with_scores(queries, statistic, decoded):
    layer = Layer(KIVIConfig(group_size=8, retention=POLICIES["heavy hitters"]))
    q, k, v = draw(2, 60 + queries)
    layer.step(*(x[:, :, :60] for x in (q, k, v)))
    past = [state.pack for state in layer.states]
    if decoded:
        past = [[x.contiguous()] for x in layer.stored()[:2]]
    key, value = layer.states
    torch.library.opcheck(
        torch.ops.kvpass.attend.default,
        (
            *(q[:, :, 60:].contiguous(), *past, key.length_tensor(layer.n), k[:, :, 60:].contiguous()),
            *(v[:, :, 60:].contiguous(), None, True, 0.25, 0.0, key.text, value.text),
        ),
        dict(statistic=statistic, importance=layer.importance),
    )


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any op returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.numel = max([self.numel, *sizes])
        return out


def test_attention_mass_of_a_long_prompt_is_computed_in_pieces():
    sizes = {}
    for length in (2048, 8192):
        q, k = randn(0, 1, 2, length, 8), randn(1, 1, 1, length, 8)
        with Largest() as largest:
            attention_mass(dense_call(q, k, k, causal=True, scale=0.3, statistic="sum"), k)
        sizes[length] = largest.numel
    assert sizes[8192] <= 4 * sizes[2048] <= 8192**2 / 16

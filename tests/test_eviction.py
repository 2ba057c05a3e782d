"""Scores as an edge, and eviction by them: against lists of tokens, kept and attended to one at a time in float64."""

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache

import kvpass
from kvpass import HeavyHitter, KVPassError, Recent, Sinks, StreamingLLM, schemes
from kvpass.codec import CodecSpec, decode_pages, encode_pages
from kvpass.codec.eviction import choose
from kvpass.codec.pages import replace_tokens
from kvpass.lowering.reference import attention_paid
from kvpass.schemes import HIGGSConfig, IdentityConfig, KIVIConfig, SQuatConfig
from kvpass.state import KVState

from common import DIM, naive_attention, only_reference, randn, seeds, specs
from tiny import llama, step_by_step, tokens
from zoo import ZOO

GROUPS, REPEATS = 2, 2  # KV heads, query heads for each


# ---------------------------------------------------------------- who stays


@given(seeds, st.integers(0, 24), st.integers(0, 30), st.integers(1, 24))
def test_the_most_important_stay_and_keep_their_slots(seed, occupied, leaving, budget):
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


@given(specs(), seeds)
def test_replaced_tokens_leave_the_others_as_they_were(spec, seed):
    with only_reference():
        old, x = randn(seed, 1, 2, 3 * spec.page_size, DIM), randn(seed + 1, 1, 2, 3 * spec.page_size, DIM)
        new = randn(seed + 2, 1, 2, 3 * spec.page_size) > 0
        new[:, :, : spec.page_size] = True  # a page of new tokens only
        pools = encode_pages(old, spec)
        replaced = replace_tokens(pools, x, new, spec)
        before, after = decode_pages(*pools, spec), decode_pages(*replaced, spec)
        assert torch.equal(after[~new], before[~new])
        alone = decode_pages(*encode_pages(x, spec), spec)
        assert torch.equal(after[:, :, : spec.page_size], alone[:, :, : spec.page_size])
        if spec.per == "token":  # a token is coded alone, wherever it goes
            assert torch.equal(after[new], alone[new])


# ---------------------------------------------------------------- one layer, by ops


class Layer:
    """One attention layer over a packed cache with a budget, driven by the ops as a graph drives it."""

    def __init__(self, config, batch=1):
        geometry = schemes.LayerGeometry(0, 1, GROUPS, DIM, torch.float32, torch.device("cpu"))
        plan = config.plan(geometry)
        self.spec = plan.key
        self.states = [KVState.allocate(s, batch, GROUPS, DIM, torch.float32, "cpu", 0) for s in (plan.key, plan.value)]
        heads = 1 if self.spec.shared_eviction else GROUPS
        self.importance = torch.zeros(batch, heads, 0)
        self.slots = torch.zeros(batch, heads, self.spec.budget, dtype=torch.int64)
        self.n = 0

    def step(self, q, k, v, mask=None, lowering="reference"):
        key, value = self.states
        stored = self.spec.stored(self.n + k.shape[2])
        for state in self.states:
            state.reserve(stored)
        more = max(0, stored - self.importance.shape[2])
        self.importance = torch.nn.functional.pad(self.importance, (0, more))
        carrier = key.carrier(self.n)
        pools = [[s.codes, s.scale, s.zero_point, s.ring] for s in self.states]
        statistic = "sum" if self.spec.evict == "attention" else ""
        out, paid = torch.ops.kvpass.attend_scored(
            q, *pools, carrier, k, v, mask, mask is None, 1 / math.sqrt(DIM), 0.0, key.text, value.text, statistic,
            self.importance, lowering, center=key.center,
        )  # fmt: skip
        for state, x in zip(self.states, (k, v), strict=True):
            first = state is key
            torch.ops.kvpass.append_(
                state.codes, state.scale, state.zero_point, state.ring, None, carrier, x, None, mask, state.text,
                "reference", center=state.center, importance=self.importance if first else None,
                scores=[paid] if first else None, slots=self.slots,
            )  # fmt: skip
        self.n = stored
        return out

    def stored(self):
        with only_reference():
            key, value = (
                torch.ops.kvpass.decode(
                    s.codes,
                    s.scale,
                    s.zero_point,
                    s.ring,
                    s.carrier(self.n),
                    s.text,
                    predictor=list(s.predictor),
                )
                for s in self.states
            )
        return key, value, self.importance[..., : self.n]


class Naive:
    """The same for one sequence, as a list of (token, key, value, paid) for each KV head."""

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
        gone, sinks = self.spec.evicted(len(kept)), self.spec.sinks
        candidates = kept[sinks : sinks + self.spec.budget + gone] if gone else []
        worth = (lambda t: t[3]) if self.spec.evict == "attention" else (lambda t: (t[3] != -math.inf, t[0]))
        lost = {t[0] for t in sorted(candidates, key=worth)[:gone]}
        return [t for t in kept if t[0] not in lost]


POLICIES = {
    "heavy hitters": HeavyHitter(16, recent=12, page_size=8),
    "heavy hitters and sinks": Sinks(3) + HeavyHitter(8, recent=4, page_size=8),
    "streaming": StreamingLLM(2, recent=24, exact=8, page_size=8),
    "streaming, all exact": StreamingLLM(1, recent=8, exact=8, page_size=4),
}


def draw(seed, length, batch=1):
    q = 3 * randn(seed, batch, GROUPS * REPEATS, length, DIM)
    return q, randn(seed + 1, batch, GROUPS, length, DIM), randn(seed + 2, batch, GROUPS, length, DIM)


@pytest.mark.parametrize("name", POLICIES)
@given(st.lists(st.one_of(st.just(1), st.integers(1, 40)), min_size=1, max_size=12), st.integers(0, 10), seeds)
def test_what_stays_and_what_it_was_paid_is_that_of_a_list_of_tokens(name, chunks, padding, seed):
    """Outputs, the tokens kept in each KV head, and their accumulated scores, for any way to cut a sequence."""
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
            mine = {tuple(key.tolist()): i for i, key in enumerate(keys[0, head])}
            where = [mine[tuple(token[1].float().tolist())] for token in kept]
            assert torch.equal(values[0, head, where].double(), torch.stack([token[2] for token in kept]))
            if layer.spec.evict == "attention":
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
    assert layer.n <= spec.sinks + spec.budget + spec.residual + spec.page_size + spec.rollback
    for head in range(GROUPS):
        held = {tuple(key.tolist()) for key in keys[0, head]}
        recent = range(max(0, length - spec.residual), length)
        assert all(tuple(k[0, head, i].tolist()) in held for i in {*range(min(spec.sinks, length)), *recent})


def test_kv_heads_keep_their_own_tokens_unless_the_choice_is_shared():
    kept = {}
    for shared in (False, True):
        layer = Layer(IdentityConfig(retention=HeavyHitter(16, recent=8, page_size=8, shared=shared)))
        q, k, v = draw(4, 120)
        k[:, 1], v[:, 1] = k[:, 0], v[:, 0]  # so that tokens can be compared
        layer.step(q, k, v)
        keys, _, _ = layer.stored()
        kept[shared] = [{tuple(key.tolist()) for key in keys[0, head]} for head in range(GROUPS)]
    assert kept[False][0] != kept[False][1]
    assert kept[True][0] == kept[True][1]


@pytest.mark.parametrize("config", [KIVIConfig(group_size=8), HIGGSConfig(group_size=DIM)], ids=str)
@pytest.mark.parametrize("padding", [0, 5])
def test_the_fused_attention_pays_what_the_reference_does(config, padding):
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


def test_accumulated_scores_are_those_of_attention_in_float64():
    q, k, _ = draw(3, 300)
    paid = attention_paid(q, k, None, True, 0.25, 0.0, None)
    eye = torch.eye(300).expand(1, GROUPS, -1, -1)  # values that read the weights off
    weights = naive_attention(q, k, eye, causal=True, scale=0.25)
    torch.testing.assert_close(paid.double(), weights.unflatten(1, (GROUPS, REPEATS)).sum((2, 3)), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("decoded", [False, True], ids=["", "decoded"])
@pytest.mark.parametrize("queries, statistic", [(1, "sum"), (3, "sum"), (7, "max-5"), (1, "")])
@pytest.mark.usefixtures("reference_in_this_test")
def test_opcheck_attend_scored(queries, statistic, decoded):
    layer = Layer(KIVIConfig(group_size=8, retention=POLICIES["heavy hitters"]))
    q, k, v = draw(2, 60 + queries)
    layer.step(*(x[:, :, :60] for x in (q, k, v)))
    pools = [[s.codes, s.scale, s.zero_point, s.ring] for s in layer.states]
    if decoded:
        pools = [[x.contiguous()] for x in layer.stored()[:2]]
    key, value = layer.states
    torch.library.opcheck(
        torch.ops.kvpass.attend_scored.default,
        (
            *(q[:, :, 60:].contiguous(), *pools, key.carrier(layer.n), k[:, :, 60:].contiguous()),
            *(v[:, :, 60:].contiguous(), None, True, 0.25, 0.0, key.text, value.text, statistic, layer.importance),
        ),
    )


class Largest(TorchDispatchMode):
    """Notes the elements of the largest tensor any op returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.numel = max([self.numel, *sizes])
        return out


def test_scores_of_a_long_prompt_need_memory_for_some_rows_of_weights():
    sizes = {}
    for length in (2048, 8192):
        q, k = randn(0, 1, 2, length, 8), randn(1, 1, 1, length, 8)
        with Largest() as largest:
            attention_paid(q, k, None, True, 0.3, 0.0, None)
        sizes[length] = largest.numel
    assert sizes[8192] <= 4 * sizes[2048] <= 8192**2 / 16


# ---------------------------------------------------------------- models


SMALL = HeavyHitter(32, recent=24, page_size=16)
CONFIGS = {
    "h2o": IdentityConfig(retention=SMALL),
    "kivi+h2o": KIVIConfig(group_size=16, retention=Sinks(2) + SMALL),
    "squat+h2o": SQuatConfig(group_size=16, rank=4, block_size=16, retention=SMALL),
    "kivi-pre+h2o": KIVIConfig(group_size=16, rope="pre", retention=HeavyHitter(32, 24, 16, shared=True)),
    "kivi+streaming": KIVIConfig(group_size=16, retention=StreamingLLM(4, recent=48, exact=16, page_size=16)),
}


@pytest.mark.parametrize("name, padded", [*((name, name == "kivi+h2o") for name in CONFIGS if name != "h2o")])
def test_the_compiled_step_is_the_eager_one(name, padded):
    """Logits and contents, prompt shorter and longer than the budget, one decode graph throughout."""
    model, ids, mask = llama(), tokens(2, 130), None
    if padded:
        mask = torch.ones_like(ids)
        mask[1, :9] = 0
    for prompt in (40,) if padded else (40, 100):
        compiled, mine, report = step_by_step(model, CONFIGS[name], ids, prompt, mask)
        eager, theirs, _ = step_by_step(model, CONFIGS[name], ids, prompt, mask, lowering="eager")
        torch.testing.assert_close(compiled, eager, atol=1e-4, rtol=1e-4)
        assert sum(graph.compiled for graph in report.graphs) <= 1 + padded  # masks get longer than what is stored
        assert report.packed == report.fused == 2
        for a, b in zip(mine.layers, theirs.layers, strict=True):
            assert (a.seen, a.tokens) == (b.seen, b.tokens)
            assert a.seen == 130 > a.tokens == a.plan.key.stored(a.tokens)
            torch.testing.assert_close(a.keys + 0, b.keys + 0, atol=1e-3, rtol=1e-3)
            torch.testing.assert_close(
                a.importance_owner.importance.weights, b.importance_owner.importance.weights, atol=1e-3, rtol=1e-3
            )


@pytest.mark.parametrize("rope", ["post", "pre"])
def test_positions_stay_right_after_eviction(rope):
    """Sinks and recent tokens alone are what the untouched model computes when a mask hides the others."""
    policy = StreamingLLM(4, recent=32, exact=16, page_size=16)
    model, ids, prompt = llama(), tokens(1, 110), 90
    config = IdentityConfig(retention=policy, rope=rope)
    got, cache, _ = step_by_step(model, config, ids, prompt, lowering="eager")
    spec, kept, rows = cache.layers[0].plan.key, [], []
    for start, stop in [(0, prompt), *((i, i + 1) for i in range(prompt, 110))]:
        allowed = torch.zeros(stop, stop, dtype=torch.bool)
        for i in range(start, stop):
            allowed[i, [*kept, *range(start, i + 1)]] = True
        rows.append(allowed[start:])
        kept += range(start, stop)
        gone = spec.evicted(len(kept))
        kept = kept[: spec.sinks] + kept[spec.sinks + gone :]
    full = torch.zeros(110, 110, dtype=torch.bool)
    for stop, row in zip([prompt, *range(prompt + 1, 111)], rows, strict=True):
        full[stop - len(row) : stop, :stop] = row
    expected = model(input_ids=ids, attention_mask=full[None, None], use_cache=False).logits
    torch.testing.assert_close(got[0], expected[0, prompt - 1 :], atol=1e-5, rtol=1e-5)


def test_padding_is_never_attended_to_and_goes_first():
    """A padded row is the row alone, as long as what it lost was padding."""
    model, ids = llama(), tokens(1, 60)
    padded = torch.cat([torch.zeros(1, 30, dtype=torch.long), ids], 1)
    mask = torch.cat([torch.zeros(1, 30, dtype=torch.long), torch.ones_like(ids)], 1)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    expected = model(input_ids=ids).logits
    kvpass.apply(model, IdentityConfig(retention=HeavyHitter(16, recent=40, page_size=16)), lowering="eager")
    cache = DynamicCache(config=model.config)
    model(input_ids=padded[:, :60], attention_mask=mask[:, :60], position_ids=positions[:, :60], past_key_values=cache)
    for i in range(60, 90):
        out = model(
            input_ids=padded[:, i : i + 1], attention_mask=mask[:, : i + 1], position_ids=positions[:, i : i + 1],
            past_key_values=cache,
        ).logits  # fmt: skip
        torch.testing.assert_close(out[:, 0], expected[:, i - 30], atol=1e-5, rtol=1e-5)
    assert cache.layers[0].seen - cache.layers[0].tokens == 16


def test_generate_beams_copies_and_crops():
    model, ids = llama(), tokens(2, 120)
    kvpass.apply(model, "kivi+h2o")
    kvpass.remove(model)
    kvpass.apply(model, CONFIGS["kivi+h2o"])
    plain = model.generate(ids, max_new_tokens=40, do_sample=False)
    beams = model.generate(ids, max_new_tokens=40, do_sample=False, num_beams=2)
    assert plain.shape == beams.shape == (2, 160)
    cache = DynamicCache(config=model.config)
    model(input_ids=ids, past_key_values=cache)
    copied = copy.deepcopy(cache)
    step = ids[:, :1]
    first = model(input_ids=step, past_key_values=cache).logits
    assert torch.equal(first, model(input_ids=step, past_key_values=copied).logits)
    cache.crop(-1)  # what a rejected draft does
    again = model(input_ids=step, past_key_values=cache).logits
    torch.testing.assert_close(again, first, atol=1e-5, rtol=1e-5)
    with pytest.raises(KVPassError, match="have been evicted"):
        cache.crop(-100)
    cache.reset()
    model(input_ids=ids[:1], past_key_values=cache)
    assert cache.get_seq_length() == 120


@pytest.mark.parametrize("steps", [1, 9, 16])
def test_a_crop_within_the_rollback_finds_everything_again(steps):
    """Across a flush and across an eviction: what follows is what would have followed."""
    model, ids = llama(), tokens(1, 200)
    for prompt in (100, 108, 115):
        kvpass.apply(model, CONFIGS["h2o"], lowering="eager")
        cache = DynamicCache(config=model.config)
        model(input_ids=ids[:, :prompt], past_key_values=cache)
        stays = copy.deepcopy(cache)
        expected = model(input_ids=ids[:, 150:151], past_key_values=stays).logits
        for i in range(steps):
            model(input_ids=ids[:, prompt + i : prompt + i + 1], past_key_values=cache)
        cache.crop(-steps)
        evicted_meanwhile = cache.layers[0].tokens < stays.layers[0].tokens - 1
        got = model(input_ids=ids[:, 150:151], past_key_values=cache).logits
        if not evicted_meanwhile:
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        assert torch.isfinite(got).all() and cache.get_seq_length() == prompt + 1
        kvpass.remove(model)


def test_bits_fall_with_what_is_evicted():
    model, ids = llama(), tokens(1, 912)
    nbytes = []
    for length in (400, 912):
        _, cache, _ = step_by_step(
            model, IdentityConfig(retention=SMALL), ids[:, :length], length - 1, lowering="eager"
        )
        nbytes.append(kvpass.nbytes(cache))
    assert nbytes[0] == nbytes[1]
    assert kvpass.bits_per_value(cache) < 32 * 130 / 912


# ---------------------------------------------------------------- what cannot go together


def test_what_cannot_be_combined_says_why():
    for scheme, why in {
        "logquant+h2o": "is its retention policy",
        "kivi+nothing": "Known policies: h2o, streaming-llm",
        "nothing+h2o": "Unknown scheme",
    }.items():
        with pytest.raises(KVPassError, match=why):
            schemes.get(scheme)
    with pytest.raises(KVPassError, match="share codes"):
        kvpass.apply(llama(layers=8), "xquant+h2o")
    with pytest.raises(KVPassError, match="same tokens: use HeavyHitter"):
        KIVIConfig(rope="pre", retention=HeavyHitter(64, 32))
    with pytest.raises(KVPassError, match="multiple of page_size"):
        KIVIConfig(retention=HeavyHitter(50, 32))
    assert schemes.get("kivi-sinks+h2o").retention.sinks == 4
    assert schemes.get("kivi-pre+h2o").retention.shared
    assert schemes.get("streaming-llm").retention == kvpass.retention.POLICIES["streaming-llm"]
    assert schemes.get(schemes.get("kivi+h2o").to_dict()) == schemes.get("kivi+h2o")
    assert Recent(64).storage.keys() == {"page_size", "residual", "sinks", "keep"}


@pytest.mark.parametrize("scheme", ["kivi+h2o", "qaq"])
def test_one_tensor_alone_cannot_tell_what_its_tokens_are_worth(scheme):
    geometry = schemes.LayerGeometry(0, 1, 2, 32, torch.float32, torch.device("cpu"))
    with pytest.raises(KVPassError, match="depends on the attention"):
        kvpass.PackedKV.from_float(randn(0, 1, 2, 40, 32), schemes.get(scheme).plan(geometry).value)


def test_masks_of_ones_own_are_refused_once_tokens_are_gone():
    model, ids = llama(), tokens(1, 100)
    kvpass.apply(model, CONFIGS["h2o"], lowering="eager")
    cache = DynamicCache(config=model.config)
    model(input_ids=ids, past_key_values=cache)
    with pytest.raises(KVPassError, match="Pass a 2-D padding mask"):
        model(input_ids=ids[:, :1], past_key_values=cache, attention_mask=torch.ones(1, 1, 1, 101, dtype=torch.bool))


def test_alibi_is_refused():
    model = ZOO["BLOOM"].model("eager")
    kvpass.apply(model, IdentityConfig(retention=SMALL))
    with pytest.raises(KVPassError, match="keys are no longer in order"):
        model(input_ids=tokens(1, 20), past_key_values=DynamicCache(config=model.config))


def test_predicted_layers_evict_the_same_tokens(tmp_path):
    """AQUA-KV over H2O: one choice for all layers, so that every layer finds what it was predicted from."""
    model, ids = llama(layers=3), tokens(1, 150)
    calibration = kvpass.calibrate(model, tokens(4, 200, seed=1), "aqua", progress=False)
    mixed = calibration.retaining(HeavyHitter(32, recent=32))
    assert mixed.scheme.retention.shared and mixed.scheme.retention.sinks == 4
    compiled, mine, report = step_by_step(model, mixed, ids, 120)
    eager, _, _ = step_by_step(model, mixed, ids, 120, lowering="eager")
    torch.testing.assert_close(compiled, eager, atol=1e-3, rtol=1e-3)
    assert report.fused == 3 and {layer.tokens for layer in mine.layers} == {mine.layers[0].plan.key.stored(150)}
    lossless = calibration.retaining(HeavyHitter(128, recent=32))
    full, cache, _ = step_by_step(model, lossless, ids, 120, lowering="eager")
    plain, _, _ = step_by_step(model, calibration, ids, 120, lowering="eager")
    assert cache.layers[0].tokens == 150 and (full - plain).abs().max() < (eager - plain).abs().max()

"""Which tokens stay exact: LogQuant's stream against a naive version of its algorithm, and no token is ever lost."""

import pickle
from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpass
from kvpass import KVPassError, Recent, Retention, Sinks, schemes
from kvpass.cache.state import KVState
from kvpass.layout.window import LogSparseLayout, layout, ring_tokens
from kvpass.schemes import AquaKVConfig, KIVIConfig

from common import DIM, chunkings, coded, dtypes, naive_dequantize, randn, seeds, state_of

pytestmark = pytest.mark.usefixtures("reference_lowering")

windows = st.sampled_from((4, 8, 12))
sinks = st.sampled_from((0, 1, 4))


def log_spec(window, sinks=0, rollback=16, bits=2, per="channel"):
    group = 4 if per == "channel" else 8
    return coded(bits, per, group, window, residual=2 * window, sinks=sinks, rollback=rollback, keep="log")


def recent_spec(window, sinks=0, rollback=16):
    return coded(2, "channel", 4, window, residual=2 * window, sinks=sinks, rollback=rollback)


def algorithm_1(window: int, tokens: int) -> tuple[list[int], list[list[int]]]:
    """LogQuant's algorithm 1, token by token: the exact tokens, and the lists of tokens that left."""
    exact, left = [], []
    for token in range(tokens):
        exact.append(token)
        if len(exact) == 3 * window:
            left.append(exact[1 : 2 * window : 2])
            exact = exact[0 : 2 * window : 2] + exact[2 * window :]
    return exact, left


@pytest.mark.parametrize(
    "tokens, kept",
    [
        (12, [0, 2, 4, 6, 8, 9, 10, 11]),
        (30, [0, 16, 20, 22, *range(24, 30)]),
        (64, [0, 52, 56, 58, *range(60, 64)]),
    ],
)
def test_the_known_vectors_of_logquant(tokens, kept):
    assert layout(log_spec(4).retention).exact(tokens).tolist() == kept


@given(windows, sinks, st.integers(0, 300))
def test_exact_and_packed_tokens_are_those_of_algorithm_1(window, first, tokens):
    spec = log_spec(window, first)
    where = layout(spec.retention)
    exact, left = algorithm_1(window, max(0, tokens - first))
    assert where.exact(tokens).tolist() == [token + first for token in exact]
    assert spec.retention.pages(tokens) == len(left)
    assert where.page_tokens(0, len(left)).tolist() == [token + first for page in left for token in page]


@given(st.sampled_from((log_spec, recent_spec)), windows, sinks, st.integers(0, 400))
def test_every_policy_keeps_token_counts_and_drops_no_token(make, window, first, tokens):
    spec = make(window, first)
    where, head = layout(spec.retention), list(range(min(first, tokens)))
    exact, packed = where.exact(tokens).tolist(), where.page_tokens(0, spec.retention.pages(tokens)).tolist()
    assert sorted(head + exact + packed) == list(range(tokens))
    assert len(packed) == spec.retention.packed(tokens)
    if tokens - first >= 3 * window:
        assert 2 * window <= len(exact) <= 3 * window
        assert exact[0] == first or make is recent_spec  # token 0 is never removed
    order = where.token_order(tokens)
    if order is not None:
        assert [(head + packed + exact)[i] for i in order.tolist()] == list(range(tokens))


@given(st.sampled_from((log_spec, recent_spec)), windows, sinks, st.sampled_from((0, 3, 16)), st.integers(1, 300))
def test_exact_tokens_have_slots_of_their_own_that_last(make, window, first, rollback, tokens):
    spec = make(window, first, rollback)
    where, held = (
        layout(spec.retention),
        torch.cat([torch.arange(min(first, tokens)), layout(spec.retention).exact(tokens)]),
    )
    slots = where.slots(held)
    assert len(set(slots.tolist())) == len(held) and int(slots.max()) < first + spec.retention.ring_size
    assert slots.tolist() == [where.slot(token) for token in held.tolist()]
    assert not where.overwritten(held, tokens).any()
    table = ring_tokens(spec.retention, tokens)
    assert table[slots].tolist() == held.tolist() and (table >= 0).sum() == len(held)
    for back in range(min(rollback, tokens) + 1):  # the ring still holds what a crop within the rollback needs
        assert not where.overwritten(where.exact(tokens - back), tokens).any()


@given(windows, sinks, st.sampled_from((1, 2, 4)), st.sampled_from(("channel", "token")), chunkings(), seeds, dtypes)
def test_streaming_equals_prefill(window, first, bits, per, chunks, seed, dtype):
    window = 8 if bits == 1 and window % 8 else window
    spec, n = log_spec(window, first, bits=bits, per=per), sum(chunks)
    x = randn(seed, 2, 2, n, DIM, dtype=dtype)
    streamed, at_once = state_of(spec, x, chunks), state_of(spec, x)
    for name in ("codes", "scale", "zero_point"):
        used = [getattr(state, name)[:, :, : spec.retention.pages(n)] for state in (streamed, at_once)]
        assert torch.equal(*used), name
    exact = layout(spec.retention).exact(n)
    assert torch.equal(streamed.window(n), x[:, :, exact]) and torch.equal(at_once.window(n), x[:, :, exact])
    decoded = streamed.dequantize(n)
    assert torch.equal(decoded, at_once.dequantize(n))
    assert torch.equal(decoded[:, :, exact], x[:, :, exact])
    packed = layout(spec.retention).page_tokens(0, spec.retention.pages(n))
    pages = (t[:, :, : spec.retention.pages(n)] for t in (at_once.codes, at_once.scale, at_once.zero_point))
    expected = naive_dequantize(*pages, spec).to(dtype)
    torch.testing.assert_close(decoded[:, :, packed], expected, atol=2e-2, rtol=2e-2)


@given(windows, sinks, seeds, st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), min_size=1, max_size=6))
@settings(max_examples=60)
def test_after_any_appends_and_crops_every_token_is_still_itself(window, first, seed, steps):
    spec, n, restored = log_spec(window, first, bits=4), 0, False
    x, state = randn(seed, 1, 1, 300, DIM), KVState.allocate(spec, 1, 1, DIM, torch.float32, "cpu", 0)
    for more, back in steps:
        state.append(x[:, :, n : n + more], n)
        n += more
        lossless, new = state.lossless_crop(max(0, n - back)), max(0, n - back)
        if not restored and back <= spec.retention.rollback:
            assert lossless
        restored |= not lossless
        state.crop(n, new)
        n = new
        decoded = state.dequantize(n)
        assert n == 0 or (decoded - x[:, :, :n]).abs().max() < 1.0
        if not restored:
            exact = layout(spec.retention).exact(n)
            assert torch.equal(state.window(n), x[:, :, exact])


def test_streams_may_continue_in_and_out_of_inference_mode():
    where = LogSparseLayout(log_spec(4).retention)
    with torch.inference_mode():
        where.exact(50)
    assert where.exact(200).tolist() == layout(log_spec(4).retention).exact(200).tolist()
    with torch.inference_mode():
        where.exact(900)
    where.exact(2000)


# ---------------------------------------------------------------- policies as users write them


def test_policies_compose_and_travel_as_plain_data():
    policy = Sinks(4) + Recent(128, page_size=32)
    assert policy == Retention(128, 32, sinks=4) and Sinks(2) + policy == Retention(128, 32, sinks=6)
    assert kvpass.LogSparse(32) == Retention(96, 32, keep="log")
    config = schemes.get("kivi", retention=policy)
    assert schemes.get(config.to_dict()) == config
    plan = config.plan(schemes.LayerGeometry(0, 1, 2, 32, torch.float32, torch.device("cpu")))
    assert plan.key.retention == plan.value.retention == policy and policy.residual == 96


def test_impossible_retention_texts_are_refused():
    for impossible, says in (
        (lambda: Retention(64, 32, budget=50), "budget=50 must be a multiple of page_size=32"),
        (lambda: Retention(64, 32, budget=64, rollback=33), "rollback=33 at most page_size"),
        (lambda: Retention(64, 32, keep="log"), "residual=32 must be twice page_size=32"),
        (lambda: Retention(96, 32, keep="log", budget=64), "alternative retention policies"),
        (lambda: Retention(1 << 24, 32), "use smaller ones"),
    ):
        with pytest.raises(KVPassError, match=says):
            impossible()


def test_a_crop_goes_back_16_tokens_or_a_page_where_tokens_are_evicted():
    assert [kvpass.HeavyHitter(64, 32, page_size=page).rollback for page in (8, 32)] == [8, 16]
    assert Recent(64, page_size=8).rollback == 16


def test_a_copy_in_another_process_does_not_bring_its_hash_along():
    policy = Recent(64)
    hash(policy)
    assert set(vars(pickle.loads(pickle.dumps(policy)))) == {field.name for field in fields(policy)}


def test_the_window_of_a_backbone_does_not_matter_to_aqua():
    layer = schemes.LayerGeometry(1, 2, 2, 32, torch.float32, torch.device("cpu"), previous_layer=0)
    evicting, plain = KIVIConfig(retention=kvpass.HeavyHitter(64, recent=32)), KIVIConfig()
    assert AquaKVConfig(backbone=evicting).plan(layer) == AquaKVConfig(backbone=plain).plan(layer)


def test_logquant_and_its_twin_keep_as_many_exact_tokens():
    geometry = schemes.LayerGeometry(0, 1, 2, 32, torch.float32, torch.device("cpu"))
    log, twin = (schemes.get(name).plan(geometry).key.retention for name in ("logquant", "logquant-twin"))
    assert (log.keep, twin.keep, twin.sinks) == ("log", "recent", 1)
    for n in range(97, 400):
        assert len(layout(log).exact(n)) in range(64, 97) and len(layout(twin).exact(n)) in range(64, 97)


@pytest.mark.parametrize("scheme", ["kivi", "squat", "rtn", "xquant", "asymkv", "identity"])
@pytest.mark.parametrize("policy", [Recent(64, page_size=32), Sinks(4) + Recent(32), kvpass.LogSparse(32)], ids=str)
def test_every_scheme_takes_every_policy(scheme, policy):
    config = schemes.get(scheme, retention=policy, rope="pre")
    plan = config.plan(schemes.LayerGeometry(0, 1, 2, 64, torch.float32, torch.device("cpu")))
    assert (
        plan.key.retention.keep == plan.value.retention.keep == policy.keep and plan.key.retention.sinks == policy.sinks
    )


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: Recent(16, page_size=32), "page_size=32.*window of 16"),
        (lambda: Recent(0), "window=0"),
        (lambda: Sinks(-1) + Recent(32), "sinks=-1"),
        (lambda: schemes.get("kivi", retention=Recent(100)), "page_size=100 of the retention.*group_size=32"),
        (lambda: schemes.get("kivi", retention=Recent(64), sinks=4), "give sinks in the policy"),
        (lambda: schemes.get("logquant", retention=Recent(64)), "KIVIConfig"),
        (lambda: schemes.get("logquant", window=42), "page_size=42.*group_size=32"),
        (lambda: coded(2, "channel", 4, 8, residual=8, keep="log"), "residual=8 must be twice page_size=8"),
    ],
)
def test_impossible_policies_are_refused_with_the_reason(make, says):
    with pytest.raises(KVPassError, match=says):
        make()

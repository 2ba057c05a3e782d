"""Models that evict tokens by attention mass: the compiled step, `generate`, padding, and combinations that are
refused."""

import copy

import pytest
import torch
from transformers import DynamicCache

import kvpass
from kvpass import HeavyHitter, KVPassError, LogSparseEviction, Sinks, SnapKV, StreamingLLM, schemes
from kvpass.schemes import IdentityConfig, KIVIConfig, SQuatConfig

from common import randn
from tiny import llama, step_by_step, tokens
from zoo import ZOO

pytestmark = pytest.mark.usefixtures("nothing_compiled")

SMALL = HeavyHitter(32, recent=24, page_size=16)
CONFIGS = {
    "h2o": IdentityConfig(retention=SMALL),
    "kivi+h2o": KIVIConfig(group_size=16, retention=Sinks(2) + SMALL),
    "squat+h2o": SQuatConfig(group_size=16, rank=4, block_size=16, retention=SMALL),
    "kivi-pre+h2o": KIVIConfig(group_size=16, rope="pre", retention=HeavyHitter(32, 24, 16, shared=True)),
    "kivi+snapkv": KIVIConfig(group_size=16, retention=SnapKV(32, recent=24, page_size=16)),
    "kivi+log-sparse": KIVIConfig(group_size=16, retention=LogSparseEviction(16)),
    "kivi+streaming": KIVIConfig(group_size=16, retention=StreamingLLM(4, recent=48, exact=16, page_size=16)),
}


@pytest.mark.slow
@pytest.mark.nightly_cases("kivi+streaming*", "kivi+log*", "kivi-pre*", "squat*")
@pytest.mark.compiles
@pytest.mark.parametrize("name, padded", [*((name, name == "kivi+h2o") for name in CONFIGS if name != "h2o")])
def test_the_compiled_step_is_the_eager_one(name, padded):
    """Equal logits and contents, with prompts shorter and longer than the budget, in one decode graph."""
    model, ids, mask = llama(), tokens(2, 130), None
    if padded:
        mask = torch.ones_like(ids)
        mask[1, :9] = 0
    for prompt in (40,) if padded else (40, 100):
        compiled, mine, report = step_by_step(model, CONFIGS[name], ids, prompt, mask)
        eager, theirs, _ = step_by_step(model, CONFIGS[name], ids, prompt, mask, lowering="eager")
        torch.testing.assert_close(compiled, eager, atol=1e-4, rtol=1e-4)
        assert sum(graph.compiled for graph in report.graphs) <= 1 + padded  # masks outgrow the stored tokens
        assert report.packed == report.fused == 2
        for a, b in zip(mine.layers, theirs.layers, strict=True):
            assert (a.seen, a.tokens) == (b.seen, b.tokens)
            assert a.seen == 130 > a.tokens == a.plan.key.retention.stored(a.tokens)
            torch.testing.assert_close(a.keys + 0, b.keys + 0, atol=1e-3, rtol=1e-3)
            torch.testing.assert_close(
                a.importance_owner.importance.weights, b.importance_owner.importance.weights, atol=1e-3, rtol=1e-3
            )


@pytest.mark.slow_cases("post")
@pytest.mark.parametrize("rope", ["post", "pre"])
def test_positions_stay_right_after_eviction(rope):
    """Sinks and recent tokens alone give the results of the untouched model with a mask that hides the other tokens."""
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
        gone = spec.retention.evicted(len(kept))
        kept = kept[: spec.retention.sinks] + kept[spec.retention.sinks + gone :]
    full = torch.zeros(110, 110, dtype=torch.bool)
    for stop, row in zip([prompt, *range(prompt + 1, 111)], rows, strict=True):
        full[stop - len(row) : stop, :stop] = row
    expected = model(input_ids=ids, attention_mask=full[None, None], use_cache=False).logits
    torch.testing.assert_close(got[0], expected[0, prompt - 1 :], atol=1e-5, rtol=1e-5)


def test_padding_is_masked_and_evicted_first():
    """A padded row equals the row alone as long as only padding was evicted."""
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


def seen_by_each(spec, padding: list[int], stops: list[int]) -> torch.Tensor:
    """Which query sees which token, if padding is evicted first and then the oldest token, and calls end at ``stops``:
    ``[B, 1, S, S]`` bool. Each row is simulated token by token."""
    allowed = torch.eye(stops[-1], dtype=torch.bool).repeat(len(padding), 1, 1)
    for row, first in enumerate(padding):
        kept, start = [], 0
        for stop in stops:
            for i in range(max(start, first), stop):
                seen = [token for token in [*kept, *range(start, i + 1)] if token >= first]
                allowed[row, i, seen] = True
            kept += range(start, stop)
            gone = spec.retention.evicted(len(kept))
            candidates = kept[spec.retention.sinks : spec.retention.sinks + spec.retention.budget + gone]
            lost = sorted(candidates, key=lambda token: (token >= first, token))[:gone]
            kept, start = [token for token in kept if token not in lost], stop
    return allowed[:, None]


@pytest.mark.slow
@pytest.mark.parametrize("lowering", ["eager", "auto"])
@pytest.mark.parametrize(
    "stops",
    [[40, 41, 50, 90, 99, 130], [48, 96, 128, 129], [90, 95, 100, 105]],
    ids=["turns", "chunks", "drafts"],
)
def test_a_padded_batch_may_take_several_turns(stops, lowering):
    """Every token equals that of the untouched model with a mask that hides evicted tokens."""
    model, ids, padding = llama(layers=1), tokens(2, stops[-1]), [0, 13]
    policy = StreamingLLM(4, recent=48, exact=16, page_size=16)
    spec = IdentityConfig(retention=policy).plan(schemes.LayerGeometry(0, 1, 2, 32, torch.float32, torch.device("cpu")))
    mask = (torch.arange(stops[-1]) >= torch.tensor(padding)[:, None]).long()
    with torch.no_grad():
        allowed = seen_by_each(spec.key, padding, stops)
        expected = model(input_ids=ids, attention_mask=allowed, use_cache=False).logits
    kvpass.apply(model, IdentityConfig(retention=policy), lowering=lowering)
    model._kvpass.decode_step = model._kvpass.captured  # the pass alone, without Inductor's compile time
    cache, start = DynamicCache(config=model.config), 0
    for stop in stops:
        got = model(input_ids=ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache).logits
        for row, first in enumerate(padding):
            own = slice(max(start, first), stop)
            torch.testing.assert_close(got[row, own.start - start :], expected[row, own], atol=1e-5, rtol=1e-5)
        start = stop
    assert cache.layers[0].tokens < cache.layers[0].seen == stops[-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kivi+h2o", "kivi+streaming"])
def test_padded_batches_of_another_size_may_follow(name):
    """One prompt alone, then a padded batch, whole and in chunks."""
    model = kvpass.apply(llama(layers=1), CONFIGS[name], lowering="eager")
    for batch, length, options in ((1, 40, {}), (2, 50, {}), (2, 50, dict(prefill_chunk_size=20))):
        mask = torch.ones(batch, length, dtype=torch.long)
        mask[0, : 10 * (batch > 1)] = 0
        out = model.generate(tokens(batch, length), attention_mask=mask, max_new_tokens=3, **options)
        assert out.shape == (batch, length + 3)


@pytest.mark.nightly
@pytest.mark.compiles
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
    cache.crop(-1)  # as after a rejected draft
    again = model(input_ids=step, past_key_values=cache).logits
    torch.testing.assert_close(again, first, atol=1e-5, rtol=1e-5)
    with pytest.raises(KVPassError, match="tokens were evicted"):
        cache.crop(-100)
    cache.reset()
    model(input_ids=ids[:1], past_key_values=cache)
    assert cache.get_seq_length() == 120


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 9, 16])
def test_a_crop_within_the_rollback_restores_everything(steps):
    """Across a packed page and across an eviction: decoding continues exactly as without the crop."""
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


@pytest.mark.slow
def test_bits_fall_as_tokens_are_evicted():
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


def test_unsupported_combinations_are_refused_with_the_reason():
    for scheme, why in {
        "logquant+h2o": "is defined by its retention policy",
        "kivi+nothing": "Known policies: h2o, snapkv, streaming-llm, log-sparse",
        "nothing+h2o": "Unknown scheme",
    }.items():
        with pytest.raises(KVPassError, match=why):
            schemes.get(scheme)
    with pytest.raises(KVPassError, match="share codes"):
        kvpass.apply(llama(layers=8), "xquant+h2o")
    with pytest.raises(KVPassError, match="same tokens: use HeavyHitter"):
        KIVIConfig(rope="pre", retention=HeavyHitter(64, 32))
    with pytest.raises(KVPassError, match="multiple of page_size"):
        HeavyHitter(50, 32)
    assert schemes.get("kivi-sinks+h2o").retention.sinks == 4
    assert schemes.get("kivi-pre+h2o").retention.shared
    assert schemes.get("streaming-llm").retention == kvpass.layout.retention.POLICIES["streaming-llm"]
    assert schemes.get(schemes.get("kivi+h2o").to_dict()) == schemes.get("kivi+h2o")


@pytest.mark.parametrize("scheme", ["kivi+h2o", "qaq"])
def test_a_single_packed_tensor_cannot_evict_by_attention(scheme):
    geometry = schemes.LayerGeometry(0, 1, 2, 32, torch.float32, torch.device("cpu"))
    with pytest.raises(KVPassError, match="depends on attention scores"):
        kvpass.PackedKV.from_float(randn(0, 1, 2, 40, 32), schemes.get(scheme).plan(geometry).value)


def test_custom_masks_are_refused_after_eviction():
    model, ids = llama(), tokens(1, 100)
    kvpass.apply(model, CONFIGS["h2o"], lowering="eager")
    cache = DynamicCache(config=model.config)
    model(input_ids=ids, past_key_values=cache)
    with pytest.raises(KVPassError, match="Pass a 2-D padding mask"):
        model(input_ids=ids[:, :1], past_key_values=cache, attention_mask=torch.ones(1, 1, 1, 101, dtype=torch.bool))


def test_alibi_is_refused():
    model = ZOO["BLOOM"].model("eager")
    with pytest.raises(KVPassError, match="keys are no longer in order"):
        kvpass.apply(model, IdentityConfig(retention=SMALL))


@pytest.mark.nightly
@pytest.mark.compiles
def test_predicted_layers_evict_the_same_tokens(tmp_path):
    """AQUA-KV over H2O: one choice for all layers, so that every layer finds the tokens it was predicted from."""
    model, ids = llama(layers=3), tokens(1, 150)
    calibration = kvpass.calibrate(model, tokens(4, 200, seed=1), "aqua", progress=False)
    mixed = calibration.retaining(HeavyHitter(32, recent=32))
    assert mixed.scheme.retention.shared and mixed.scheme.retention.sinks == 4
    compiled, mine, report = step_by_step(model, mixed, ids, 120)
    eager, _, _ = step_by_step(model, mixed, ids, 120, lowering="eager")
    torch.testing.assert_close(compiled, eager, atol=1e-3, rtol=1e-3)
    assert report.fused == 3 and {layer.tokens for layer in mine.layers} == {
        mine.layers[0].plan.key.retention.stored(150)
    }
    lossless = calibration.retaining(HeavyHitter(128, recent=32))
    full, cache, _ = step_by_step(model, lossless, ids, 120, lowering="eager")
    plain, _, _ = step_by_step(model, calibration, ids, 120, lowering="eager")
    assert cache.layers[0].tokens == 150 and (full - plain).abs().max() < (eager - plain).abs().max()

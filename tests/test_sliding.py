"""Layers with a sliding window: what is behind the window is freed, and logits equal those of the untouched model."""

import random
import re

import pytest
import torch
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MistralConfig,
    MistralForCausalLM,
)

import kvpass
from kvpass import KVPassError
from kvpass.cache.sliding import SlidingLayer
from kvpass.cache.state import KVState
from kvpass.codec.quantizer import Quantizer
from kvpass.codec.spec import CodecSpec
from kvpass.layout.retention import Retention
from kvpass.schemes import IdentityConfig

from tiny import VOCABULARY, called, tokens

WINDOW = 24
_SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, max_position_embeddings=512, bos_token_id=1, eos_token_id=None, pad_token_id=0,
)  # fmt: skip
LOSSLESS = IdentityConfig(residual=8)
pytestmark = pytest.mark.usefixtures("reference_lowering")


def made(model_class, config_class, layers: int, **config):
    torch.manual_seed(0)
    model = model_class(config_class(**_SIZES, num_hidden_layers=layers, **config)).eval()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model


def mistral(window: int = WINDOW, **config):
    return made(MistralForCausalLM, MistralConfig, 2, sliding_window=window, **config)


def gemma(window: int = WINDOW, **config):
    return made(Gemma3ForCausalLM, Gemma3TextConfig, 6, sliding_window=window, query_pre_attn_scalar=16, **config)


def cohere():
    return made(Cohere2ForCausalLM, Cohere2Config, 4, sliding_window=WINDOW)


def llama4():
    return made(
        Llama4ForCausalLM, Llama4TextConfig, 4, attention_chunk_size=WINDOW, num_local_experts=2,
        num_experts_per_tok=1, intermediate_size_mlp=96,
    )  # fmt: skip


MODELS = {"all layers": mistral, "Gemma 3": gemma, "Cohere 2": cohere, "chunks": llama4}
STRADDLING = [(10, 0), (1, 0), (30, 0), (1, 0), (5, 3), (16, 0), *[(1, 0)] * 40, (60, 0), (1, 0), (1, 1), (1, 0)]


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return MODELS[request.param]()


@pytest.fixture
def applied(model):
    """Returns a function that applies a scheme, and undoes it after the test."""
    yield lambda scheme=LOSSLESS, **options: kvpass.apply(model, scheme, **{"lowering": "eager"} | options)
    kvpass.remove(model)


def recording(model):
    """A cache that frees nothing before it is cropped."""
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    return cache


def recorded(model, calls, batch=2):
    """`called`, with a cache that can be cropped beyond its window."""
    cache, logits = recording(model), []
    ids = tokens(batch, sum(new for new, _ in calls), seed=3)
    with torch.no_grad():
        for new, rejected in calls:
            start = cache.get_seq_length()
            logits.append(model(input_ids=ids[:, start : start + new], past_key_values=cache).logits)
            cache.crop(-rejected)
    return logits, cache


def test_calls_of_any_length_give_the_logits_of_the_untouched_model(model, applied):
    expected, cache = recorded(model, STRADDLING)
    applied()
    found, packed = recorded(model, STRADDLING)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    sliding = [layer for layer in packed.layers if isinstance(layer, SlidingLayer)]
    assert sliding and {type(layer).__name__ for layer in packed.layers} <= {"SlidingLayer", "PackedLayer"}
    for ours, theirs in zip(packed.layers, cache.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, atol=1e-6, rtol=0)
        assert ours.get_seq_length() == theirs.get_seq_length() == packed.get_seq_length()
    for layer in sliding:
        assert layer.behind and layer.tokens <= layer.plan.key.retention.most
    assert all(not layer.behind for layer in _reset(packed))


def _reset(cache):
    cache.reset()
    return [layer for layer in cache.layers if isinstance(layer, SlidingLayer)]


def left_padded():
    mask = torch.ones(3, 40, dtype=torch.long)
    mask[0, :30] = mask[1, :7] = 0
    return dict(input_ids=tokens(3, 40) * mask, attention_mask=mask)


MODES = {
    "greedy": dict(input_ids=tokens(1, 60), max_new_tokens=40),
    "shorter than the window": dict(input_ids=tokens(2, 5), max_new_tokens=50),
    "left padding": dict(**left_padded(), max_new_tokens=40),
    "beams": dict(input_ids=tokens(1, 30), num_beams=3, max_new_tokens=30),
    "prompt lookup": dict(
        input_ids=tokens(1, 8).repeat(1, 9), prompt_lookup_num_tokens=30, max_new_tokens=50
    ),
    "chunked prefill": dict(input_ids=tokens(1, 90), prefill_chunk_size=40, max_new_tokens=10),
    "static cache of a short prompt": dict(
        input_ids=tokens(2, 5), cache_implementation="static", disable_compile=True, max_new_tokens=40
    ),
    "static cache": dict(
        input_ids=tokens(2, 40), cache_implementation="static", disable_compile=True, max_new_tokens=30
    ),
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_generate_gives_the_tokens_and_logits_of_the_untouched_model(model, applied, mode):
    def generated():
        given = dict(MODES[mode], do_sample=False, return_dict_in_generate=True, output_logits=True)
        out = model.generate(**given)
        return out.sequences, torch.stack(out.logits, 1)

    expected = generated()
    applied()
    found = generated()
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], atol=1e-5, rtol=0)


def test_a_cache_that_is_not_recorded_can_be_cropped_by_a_few_tokens_only():
    model = kvpass.apply(mistral(), LOSSLESS, lowering="eager")
    _, cache = called(model, [(100, 0)])
    layer = cache.layers[0]
    most = layer.tokens - (WINDOW - 1)
    assert most >= 16
    with pytest.raises(KVPassError, match=f"only the last {most} tokens.*activate_past_recording"):
        cache.crop(-most - 1)
    rows, other = tokens(2, 100, seed=3), DynamicCache(config=model.config)
    cache.crop(-most)  # the refused crop has changed nothing
    with torch.no_grad():
        model(input_ids=rows[:, : 100 - most], past_key_values=other)
        again, expected = (model(input_ids=tokens(2, 1), past_key_values=one).logits for one in (cache, other))
    torch.testing.assert_close(again, expected, atol=1e-6, rtol=0)
    cache.crop(-cache.get_seq_length())
    assert layer.tokens == layer.behind == 0


def test_a_refused_crop_leaves_layers_of_full_attention_alone():
    model = kvpass.apply(gemma(), LOSSLESS, lowering="eager")
    _, cache = called(model, [(100, 0)])
    with pytest.raises(KVPassError, match="Crop fewer tokens"):
        cache.crop(-50)
    assert {layer.get_seq_length() for layer in cache.layers} == {100}
    with torch.no_grad():
        model(input_ids=tokens(2, 1), past_key_values=cache)


def test_a_failed_call_leaves_the_window_as_it_was():
    model = mistral()
    expected, _ = called(model, [(70, 0), (30, 0), (1, 0)])
    kvpass.apply(model, LOSSLESS, lowering="eager")
    ids, cache = tokens(2, 101, seed=3), DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids[:, :70], past_key_values=cache)
        broken = model.lm_head.weight
        model.lm_head.weight = None
        with pytest.raises(TypeError):
            model(input_ids=ids[:, 70:74], past_key_values=cache)
        model.lm_head.weight = broken
        found = [
            model(input_ids=ids[:, start:stop], past_key_values=cache).logits for start, stop in [(70, 100), (100, 101)]
        ]
    for ours, theirs in zip(found, expected[1:], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def test_a_window_is_saved_and_loaded(tmp_path):
    for make in (mistral, gemma):
        model = kvpass.apply(make(), LOSSLESS, lowering="eager")
        _, cache = called(model, [(100, 0), (1, 0)])
        loaded = kvpass.load_cache(kvpass.save_cache(cache, tmp_path / "cache.safetensors"), model)
        assert [getattr(layer, "behind", 0) for layer in loaded.layers] == [
            getattr(layer, "behind", 0) for layer in cache.layers
        ]
        with torch.no_grad():
            for count in (1, 40, 1):
                rows = [model(input_ids=tokens(2, count), past_key_values=one).logits for one in (cache, loaded)]
                assert torch.equal(*rows)


def test_a_prompt_longer_than_the_window_keeps_no_memory_for_what_is_behind_it():
    model = kvpass.apply(mistral(), LOSSLESS, lowering="eager")
    sizes = [kvpass.nbytes(called(model, [(length, 0), (1, 0)], batch=1)[1]) for length in (60, 460)]
    assert sizes[0] == sizes[1]
    assert kvpass.eval.footprint(mistral(), LOSSLESS, 460).nbytes == sizes[1]


@pytest.mark.parametrize("sinks", [0, 3])
@pytest.mark.parametrize("seed", range(4))
def test_the_state_holds_what_a_list_of_all_tokens_does(sinks, seed):
    chosen = random.Random(seed)
    page, span = chosen.choice([1, 4, 8]), chosen.randint(30, 60)
    retention = Retention(page * chosen.randint(1, 2), page, sinks, span=span)
    state = KVState.allocate(CodecSpec(Quantizer(32, "token", 1), retention), 2, 1, 8, torch.float32, "cpu", 1)
    everything, stored, freed = torch.empty(2, 1, 0, 8), 0, 0
    for step in range(120):
        if chosen.random() < 0.2 and stored:
            most = stored - sinks - span + 1 if freed else stored
            removed = chosen.randint(0, max(0, min(most, 20)))
            state.crop(stored, stored - removed)
            everything, stored = everything[:, :, : everything.shape[2] - removed], stored - removed
        x = torch.randn(2, 1, chosen.choice([1, 1, 1, 3, 17, 90]), 8)
        state.append(x, stored)
        everything, stored = torch.cat([everything, x], 2), stored + x.shape[2]
        if chosen.random() < 0.8 and (gone := retention.freed(stored)):
            state.free(stored, gone)
            freed, stored = freed + gone, stored - gone
            assert stored <= retention.most
        window = everything[:, :, max(0, everything.shape[2] - span + 1) :]
        assert torch.equal(state.dequantize(stored)[:, :, retention.hidden(stored) :], window), step


@pytest.mark.slow_cases("gemma")
@pytest.mark.parametrize("make", [mistral, gemma], ids=lambda make: make.__name__)
def test_a_step_is_one_graph_at_every_length_and_attends_without_a_mask(make):
    torch._dynamo.reset()
    model = make()
    calls = [(10, 0), *[(1, 0)] * 60]
    expected, _ = called(model, calls)
    kvpass.apply(model, LOSSLESS)
    kvpass.explain(model, graphs=True)
    found, _ = called(model, calls)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    report = kvpass.explain(model)
    assert len(report.graphs) == 1 and report.fused == len(report.layers)
    rewritten = next(stage.text for stage in report.graphs[0].stages if "rewritten" in stage.name)
    attends = re.findall(r"kvpass\.attend[^\n]*", rewritten)
    assert attends and all(re.search(r"mask = None|, None, False,", line) for line in attends), attends
    kvpass.remove(model)


def test_a_mask_that_hides_more_than_the_window_stays():
    model = mistral()
    inputs = left_padded() | dict(max_new_tokens=40, do_sample=False)
    expected = model.generate(**inputs, return_dict_in_generate=True, output_logits=True)
    kvpass.apply(model, LOSSLESS)
    found = model.generate(**inputs, return_dict_in_generate=True, output_logits=True)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), atol=1e-5, rtol=0)
    assert kvpass.explain(model).fused == 2 and len(kvpass.explain(model).graphs) == 1


def test_short_windows_stay_exact_and_the_report_says_why():
    kivi = kvpass.schemes.get("kivi", group_size=16)
    model = kvpass.apply(gemma(), kivi, lowering="eager")
    report = kvpass.explain(model)
    assert report.packed == 1
    assert "keeps at most 24 tokens" in report.layers[0].reason and "full precision" in report.layers[0].reason
    long = kvpass.explain(kvpass.apply(gemma(256), kivi, lowering="eager"))
    assert long.packed == 6 and "in a window of 256" in long.layers[0].plan
    with pytest.raises(KVPassError, match=r"packs no layer.*keeps at most 24 tokens"):
        kvpass.apply(mistral(), kivi, lowering="eager")
    evicting = kvpass.schemes.get("kivi+h2o", group_size=16)
    report = kvpass.explain(kvpass.apply(gemma(256), evicting, lowering="eager"))
    assert "selects which tokens" in report.layers[0].reason


# ---------------------------------------------------------------- calibrated bit widths
SHARED_OUT = dict(scheme="waterfill-static", recent=8, residual=16, sinks=2, block_size=8)


@pytest.fixture(scope="module", params=["static", "hybrid"])
def calibrated(request):
    """A model with windows of 128, and its calibration."""
    model = gemma(128)
    data = tokens(4, 160, seed=1)
    return model, kvpass.calibrate(model, data, {**SHARED_OUT, "form": request.param}, progress=False)


def test_a_calibration_packs_windows_that_are_long_enough(calibrated):
    model, calibration = calibrated
    assert len(calibration.predictors) == len(calibration.model["layers"]) == 6
    report = kvpass.explain(kvpass.apply(model, calibration, lowering="eager"))
    kvpass.remove(model)
    assert report.packed == 6 and "in a window of 128" in report.layers[0].plan
    short = gemma(24)
    of_short = kvpass.calibrate(short, tokens(2, 160, seed=1), SHARED_OUT, progress=False)
    assert len(of_short.predictors) == 1
    report = kvpass.explain(kvpass.apply(short, of_short, lowering="eager"))
    assert report.packed == 1 and "keeps at most 24 tokens" in report.layers[0].reason


@torch.no_grad()
def test_freed_pages_do_not_change_how_calibrated_keys_are_rotated(calibrated):
    """Page rotations follow token numbers, and freed tokens still count. A cache that frees nothing is the oracle."""
    model, calibration = calibrated
    calls = [(120, 0), (50, 0), (1, 0), (40, 0), (1, 0)]
    kvpass.apply(model, calibration, lowering="eager")
    try:
        found, cache = called(model, calls)
        kept, whole = called(model, calls, cache=recording(model))
    finally:
        kvpass.remove(model)
    for ours, theirs in zip(found, kept, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    sliding = [(own, whole.layers[i]) for i, own in enumerate(cache.layers) if isinstance(own, SlidingLayer)]
    assert len(sliding) == 5 and all(own.behind for own, _ in sliding)
    tables, complete = (layer.rotary_owner.rotary.cos for layer in sliding[0])
    freed = sliding[0][0].behind // 16
    torch.testing.assert_close(tables[:, :16], complete[:, :16], atol=0, rtol=0)
    rows = min(tables.shape[1], complete.shape[1] - freed)
    assert rows > 16 + 4
    torch.testing.assert_close(tables[:, 16:rows], complete[:, 16 + freed : rows + freed], atol=0, rtol=0)

"""Layers of a decoder that store encoded images (Mllama): packed beside layers of text, though written by other calls
and of another length."""

import copy

import pytest
import torch
from test_unpacked import generated, llama_vision
from transformers import DynamicCache

import kvpass
from kvpass import KVPassError
from kvpass.cache.cross import CrossLayer
from kvpass.cache.swap import cross_layers, packed_layers
from kvpass.cache.tensor import PackedKV
from kvpass.models.probe import calibrated_layers, probe
from kvpass.schemes import CalibratedWaterfillConfig, IdentityConfig, KIVIConfig, WaterfillConfig

from tiny import tokens

EXACT = IdentityConfig(residual=16)
LOSSY = KIVIConfig(group_size=16, residual=16)
TEXT = torch.ones(2, 20, dtype=torch.long)
NAMES = "pixel_values", "aspect_ratio_ids", "aspect_ratio_mask"


@pytest.fixture
def vision():
    """An untouched model, and inputs of 20 tokens and an image for each of 2 rows."""
    return llama_vision()


def image(inputs, images=1, seed=None):
    """The arguments for one image of ``inputs``, or for another; the mask has ``images``."""
    given = {name: inputs[name] for name in NAMES}
    if seed is not None:
        pixels = torch.randn(given["pixel_values"].shape, generator=torch.Generator().manual_seed(seed))
        given["pixel_values"] = pixels
    return given | seeing(inputs, images)


def seeing(inputs, images):
    return dict(cross_attention_mask=inputs["cross_attention_mask"].repeat(1, 1, images, 1))


def step(model, cache, ids, seen, **given):
    """Logits of the newest of ``ids``, with an attention mask of all ``seen`` tokens."""
    mask = torch.ones(len(ids), seen, dtype=torch.long)
    if "cross_attention_mask" in given:
        given["cross_attention_mask"] = given["cross_attention_mask"][:, : ids.shape[1]]
    return model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **given).logits[:, -1]


def chat(model, inputs, cache=None):
    """Logits of a chat: a prompt of text, a turn with an image, a token, a turn with a second image, a token."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    one, two = image(inputs), image(inputs, images=2, seed=3)
    turns = [(12, {}), (20, one), (1, seeing(inputs, 1)), (20, two), (1, seeing(inputs, 2))]
    found, seen = [], 0
    for turn, (count, given) in enumerate(turns):
        seen += count
        found.append(step(model, cache, tokens(2, count, seed=turn), seen, **given))
    return torch.stack(found), cache


@pytest.mark.slow_cases("captured prompts")
@pytest.mark.parametrize(
    ("scheme", "lowering"),
    [
        pytest.param(EXACT, "eager", id="eager"),
        pytest.param(EXACT, "reference", id="captured steps"),
        pytest.param(WaterfillConfig(residual=256), "reference", id="captured prompts"),
    ],
)
def test_images_of_later_turns_are_added(vision, scheme, lowering):
    """``WaterfillConfig`` captures prompts; everything here is in its exact window."""
    model, inputs = vision
    expected, untouched = chat(model, inputs)
    kvpass.apply(model, scheme, lowering=lowering)
    got, cache = chat(model, inputs)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    for mine, theirs in zip(cache.layers, untouched.layers, strict=True):
        torch.testing.assert_close(mine.keys.dequantize(), theirs.keys, atol=1e-4, rtol=0)
    assert [layer.get_seq_length() for layer in cache.layers] == [54, 2 * 68, 54, 2 * 68]


def test_pages_are_those_of_the_encoded_image(vision):
    model, inputs = vision
    exact = DynamicCache(config=model.config)
    step(model, exact, inputs["input_ids"], 20, **image(inputs))
    kvpass.apply(model, LOSSY, lowering="eager")
    cache = DynamicCache(config=model.config)
    step(model, cache, inputs["input_ids"], 20, **image(inputs))
    mine, keys = cache.layers[1], exact.layers[1].keys
    assert isinstance(mine, CrossLayer) and not torch.equal(mine.keys.dequantize(), keys)
    expected = PackedKV.from_float(keys, mine.plan.key).dequantize()
    torch.testing.assert_close(mine.keys.dequantize(), expected, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_the_captured_step_is_one_graph_that_reads_packed_images(vision):
    model, inputs = vision
    expected = generated(model, inputs)
    kvpass.apply(model, EXACT, lowering="reference", strict=True)
    torch.testing.assert_close(generated(model, inputs), expected, atol=1e-4, rtol=0)
    report = kvpass.explain(model)
    assert report.packed == report.fused == 4 and len(report.graphs) == 1


@pytest.mark.parametrize("images", [1, 2])
def test_a_failed_turn_leaves_the_images_as_they_were(vision, images, monkeypatch):
    model, inputs = vision
    kvpass.apply(model, EXACT, lowering="eager")
    cache = DynamicCache(config=model.config)
    step(model, cache, tokens(2, 12), 12, **(image(inputs) if images == 2 else {}))
    before = copy.deepcopy(cache)
    turn, another = (tokens(2, 4, seed=1), 16), image(inputs, images, seed=3)
    with monkeypatch.context() as patched:
        patched.setattr(model.model.language_model.layers[-1], "forward", fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            step(model, cache, *turn, **another)
    assert [layer.get_seq_length() for layer in cache.layers] == [12, 68 * (images - 1)] * 2
    expected = step(model, before, *turn, **another)
    assert torch.equal(step(model, cache, *turn, **another), expected)
    assert cache.layers[1].tokens == images * 68


def fail(*args, **kwargs):
    raise RuntimeError("on purpose")


def test_crop_keeps_images_and_reset_forgets_them(vision):
    model, inputs = vision
    kvpass.apply(model, EXACT, lowering="eager")
    expected, cache = chat(model, inputs)
    held = cache.layers[1].keys.dequantize()
    cache.crop(-5)
    assert torch.equal(cache.layers[1].keys.dequantize(), held) and len(cache.layers[0].keys[0, 0]) == 49
    cache.reset()
    assert not any(layer.is_initialized for layer in cache.layers)
    torch.testing.assert_close(chat(model, inputs, cache)[0], expected)


def test_rows_are_selected_in_text_and_images(vision):
    model, inputs = vision
    kvpass.apply(model, LOSSY, lowering="eager")
    cache = chat(model, inputs)[1]
    first = [layer.keys.dequantize()[:1] for layer in cache.layers]
    cache.batch_select_indices(torch.tensor([0]))
    assert all(torch.equal(layer.keys.dequantize(), old) for layer, old in zip(cache.layers, first, strict=True))
    step(model, cache, tokens(1, 1), 55, **{name: mask[:1] for name, mask in seeing(inputs, 2).items()})


def test_a_saved_cache_has_its_images(vision, tmp_path):
    model, inputs = vision
    kvpass.apply(model, LOSSY, lowering="eager")
    cache = chat(model, inputs)[1]
    kvpass.save_cache(cache, tmp_path / "cache")
    loaded = kvpass.load_cache(tmp_path / "cache", model)
    more = (tokens(2, 3, seed=9), 57)
    expected = step(model, cache, *more, **seeing(inputs, 2))
    assert torch.equal(step(model, loaded, *more, **seeing(inputs, 2)), expected)
    assert [layer.tokens for layer in cross_layers(loaded)] == [2 * 68] * 2 and len(packed_layers(loaded)) == 2


@pytest.mark.slow
def test_the_default_scheme_packs_images_in_a_captured_prompt(vision):
    model, inputs = vision
    expected = generated(kvpass.apply(model, lowering="eager"), inputs)
    kvpass.remove(model)
    torch.testing.assert_close(generated(kvpass.apply(model), inputs), expected, atol=1e-3, rtol=1e-3)
    report = kvpass.explain(model)
    assert report.packed == report.fused == 4 and "cross-attention: K less its mean" in report.layers[1].plan


def test_schemes_that_are_fitted_to_queries_keep_images_exact_and_say_so(vision):
    model, inputs = vision
    expected = chat(model, inputs)[1]
    kvpass.apply(model, dict(scheme="squat", group_size=16, block_size=8), lowering="eager")
    cache = chat(model, inputs)[1]
    rows = kvpass.explain(model).layers
    assert [row.packed for row in rows] == [True, False] * 2 and "fitted to queries" in rows[1].reason
    assert cache.layers[1].keys.shape == expected.layers[1].keys.shape


def test_an_update_outside_of_a_forward_is_refused(vision):
    model, inputs = vision
    kvpass.apply(model, EXACT, lowering="eager")
    layer = chat(model, inputs)[1].layers[1]
    with pytest.raises(KVPassError, match="by a forward of the model"):
        layer.update(layer.keys.dequantize(), layer.values.dequantize())


def test_a_calibration_leaves_images_out(vision):
    layers = calibrated_layers(CalibratedWaterfillConfig(), probe(vision[0]))
    assert [isinstance(layer, str) for layer in layers.values()] == [False, True] * 2
    assert "self-attention" in layers[1]

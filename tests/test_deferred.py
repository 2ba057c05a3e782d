"""Attention without a graph reads the cache as it is stored; everything else gets dequantized tensors."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache

import kvpass
from kvpass import KVPassError
from kvpass.cache import layer as layers
from kvpass.cache.deferred import DeferredKV, LayerRead
from kvpass.cache.layer import PackedLayer
from kvpass.lowering import tiles

from tiny import llama, tokens
from zoo import ZOO

CALLS = (0, 40), (40, 60), (60, 61), (61, 90)
SMALL = dict(scheme="kivi", group_size=8, residual=8)
IDENTITY = dict(scheme="identity", residual=8)


@pytest.fixture
def attended(monkeypatch):
    """A list with an entry for each attention that reads a cache as it is stored."""
    calls = []
    run = LayerRead.attend
    monkeypatch.setattr(LayerRead, "attend", lambda *given: calls.append(given[1].shape[2]) or run(*given))
    monkeypatch.setattr(tiles, "_VALUES", 1)  # tiles of one page
    return calls


@pytest.fixture
def never_dequantized(monkeypatch):
    def fail(*_):
        raise AssertionError("the past was dequantized")

    monkeypatch.setattr(LayerRead, "_dequantized", fail)


def in_calls(model, padding=0, **options):
    """The logits of a prompt, a turn, a token and a chunk, and the cache."""
    ids, cache, found = tokens(2, 90), DynamicCache(config=model.config), []
    mask = torch.ones(2, 90, dtype=torch.long)
    mask[0, :padding] = 0
    for start, stop in CALLS:
        given = dict(attention_mask=mask[:, :stop]) if padding else {}
        with torch.no_grad():
            found.append(model(input_ids=ids[:, start:stop], past_key_values=cache, **given, **options).logits)
    return torch.cat(found, 1)[:, padding:], cache


@pytest.mark.parametrize("padding", [0, 7])
@pytest.mark.usefixtures("never_dequantized")
def test_chunks_over_exact_pages_equal_the_untouched_model(padding, attended):
    model = llama()
    expected, _ = in_calls(model, padding)
    got, _ = in_calls(kvpass.apply(model, IDENTITY, lowering="eager"), padding)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert len(attended) == 2 * 3


@pytest.mark.parametrize("name", ["kivi", "higgs", "squat", "logquant", "xquant"])
def test_attention_over_stored_pages_equals_attention_over_dequantized_ones(name, attended, monkeypatch):
    scheme = dict(higgs=dict(scheme="higgs", residual=16), squat=dict(SMALL, scheme="squat", rank=2, block_size=16))
    scheme |= dict(logquant=dict(scheme="logquant", window=8, group_size=8))
    scheme |= dict(xquant=dict(SMALL, scheme="xquant", depth=None, kq=2, vq=2, km=0, vm=0))
    model = kvpass.apply(llama(), scheme.get(name, SMALL), lowering="eager")
    got, mine = in_calls(model, 5)
    assert attended
    monkeypatch.setattr(PackedLayer, "can_defer", False)
    expected, theirs = in_calls(model, 5)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    for a, b in zip(mine.layers, theirs.layers, strict=True):
        torch.testing.assert_close(a.keys.dequantize(), b.keys.dequantize(), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["Falcon, multi-query", "Gemma 3", "GPT-NeoX", "Cohere 2"])
def test_other_architectures_equal_the_untouched_model(name, attended):
    """With one KV head, and layers that are not packed."""
    model = ZOO[name].model("sdpa")
    expected, _ = in_calls(model)
    got, _ = in_calls(kvpass.apply(model, IDENTITY, lowering="eager"))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert attended


def test_attention_that_is_not_sdpa_gets_dequantized_tensors(attended):
    model = llama("eager")
    expected, _ = in_calls(model)
    got, _ = in_calls(kvpass.apply(model, IDENTITY, lowering="eager"))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert not attended


def test_a_compiled_model_reads_turns_as_they_are_stored(attended):
    """The default lowering runs turns and chunks without a graph, too."""
    model, (start, stop) = kvpass.apply(llama(), IDENTITY), (0, 40)
    ids, cache = tokens(2, 60), DynamicCache(config=model.config)
    for start, stop in ((0, 40), (40, 60)):
        with torch.no_grad():
            model(input_ids=ids[:, start:stop], past_key_values=cache)
    assert attended == [20, 20] and not kvpass.explain(model).graphs


# ---------------------------------------------------------------- reading the tensors otherwise


@pytest.fixture
def seen(monkeypatch):
    """What ``update`` returned for the first layer, with what it would return dequantized, of each call over a past."""
    found, update = [], PackedLayer.update

    def kept(layer, keys, values, *rest, **others):
        past = None
        if layers.length_of(layer.length) and layer.geometry.index == 0:
            past = layer.read()
        out = update(layer, keys, values, *rest, **others)
        if past is not None:
            found.append((out, [torch.cat(both, 2) for both in zip(past, (keys, values), strict=True)]))
        return out

    monkeypatch.setattr(PackedLayer, "update", kept)
    return found


def test_they_can_be_read_at_any_time_and_are_kept_beyond_their_forward(seen):
    in_calls(kvpass.apply(llama(), SMALL, lowering="eager"))
    assert len(seen) == 3
    for deferred, expected in seen:  # later calls have changed pages and window
        for mine, theirs in zip(deferred, expected, strict=True):
            assert isinstance(mine, DeferredKV) and mine.shape == theirs.shape and mine.dtype == theirs.dtype
            torch.testing.assert_close(mine + 0, theirs, atol=0, rtol=0)


def test_an_operation_gives_a_plain_tensor_and_in_place_ones_are_kept(monkeypatch):
    checked, update = [], PackedLayer.update

    def reading(layer, keys, values, *rest, **others):
        k, v = update(layer, keys, values, *rest, **others)
        if isinstance(k, DeferredKV):
            dense = k * 1
            assert type(dense) is torch.Tensor and type(k[:, :1]) is torch.Tensor and dense.shape == k.shape
            repeated = k[:, :, None, :, :].expand(*k.shape[:2], 2, *k.shape[2:]).reshape(len(k), -1, *k.shape[2:])
            assert torch.equal(repeated * 1, dense.repeat_interleave(2, 1))
            k.mul_(2)
            assert torch.equal(k * 1, 2 * dense)
            k.div_(2)
            checked.append(1)
        return k, v

    model = llama()
    expected, _ = in_calls(model)
    monkeypatch.setattr(PackedLayer, "update", reading)
    got, _ = in_calls(kvpass.apply(model, IDENTITY, lowering="eager"))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert checked


@pytest.mark.parametrize("how", ["causal", "swapped", "dropout", "a mask of other keys", "another dtype"])
def test_attention_that_a_cache_cannot_serve_is_that_of_torch(how, monkeypatch, attended):
    checked, update = [], PackedLayer.update

    def reading(layer, keys, values, *rest, **others):
        k, v = update(layer, keys, values, *rest, **others)
        if isinstance(k, DeferredKV) and keys.shape[2] > 1:
            q = torch.randn(*k.shape[:2], 3, k.shape[3])
            given = {"causal": dict(is_causal=True), "dropout": dict(dropout_p=1.0)}.get(how, {})
            if how == "a mask of other keys":
                given = dict(attn_mask=torch.ones(3, 1, dtype=torch.bool))
            both = (v, k) if how == "swapped" else (k, v)
            before = len(attended)
            got = scaled_dot_product_attention(q, *both, **given) if how != "another dtype" else None
            if got is None:
                with pytest.raises(RuntimeError):
                    scaled_dot_product_attention(q.double(), *both)
            else:
                torch.testing.assert_close(got, scaled_dot_product_attention(q, *(x * 1 for x in both), **given))
            assert len(attended) == before
            checked.append(1)
        return k, v

    monkeypatch.setattr(PackedLayer, "update", reading)
    in_calls(kvpass.apply(llama(), SMALL, lowering="eager"))
    assert checked


def test_after_a_forward_that_failed_they_cannot_be_read(monkeypatch):
    kept, update = [], PackedLayer.update

    def failing(layer, keys, values, *rest, **others):
        out = update(layer, keys, values, *rest, **others)
        if isinstance(out[0], DeferredKV):
            kept.append(out[0])
            raise ValueError("failed")
        return out

    monkeypatch.setattr(PackedLayer, "update", failing)
    with pytest.raises(ValueError, match="failed"):
        in_calls(kvpass.apply(llama(), SMALL, lowering="eager"))
    with pytest.raises(KVPassError, match=r"after the forward that failed\. Call the model again"):
        kept[0] + 0


def test_layers_release_what_they_read_as_soon_as_attention_has_run(monkeypatch):
    alive, update = [], PackedLayer.update

    def counting(layer, *given, **others):
        out = update(layer, *given, **others)
        alive.append(sum(ref() is not None for ref in layer.cache.context.reads))
        return out

    monkeypatch.setattr(PackedLayer, "update", counting)
    in_calls(kvpass.apply(llama(), SMALL, lowering="eager"))
    assert alive == [0, 0] + 3 * [1, 1]

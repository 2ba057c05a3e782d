"""The layers of a cache share one state, and so one length.

A copy has its own state. A change takes effect once every layer has made its part; after a failure the cache is as
before.
"""

import copy
import pickle

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

import kvpass
from kvpass import KVPassError, StreamingLLM
from kvpass.cache.swap import cross_layers, packed_layers, state_of
from kvpass.runtime.transformers import TransformersRuntime
from kvpass.schemes import IdentityConfig, KIVIConfig

from tiny import llama, tokens
from zoo import ZOO

KIVI = KIVIConfig(group_size=8, residual=8)


@pytest.fixture(scope="module")
def model():
    model = kvpass.apply(llama(), KIVI, lowering="eager")
    yield model
    kvpass.remove(model)


def filled(model, batch=2, cache=None):
    """A cache of 20 tokens in each row."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    with torch.no_grad():
        model(input_ids=tokens(batch, 20), past_key_values=cache)
    return cache


def lengths(cache):
    """The common length and batch of all packed layers, after a check that they share one state."""
    state, layers = state_of(cache), packed_layers(cache)
    assert state.layers == layers and all(layer.cache is state for layer in layers)
    assert {(layer.tokens, layer.seen) for layer in layers} == {(state.tokens, state.seen)}
    assert {len(layer.key_state.ring) for layer in layers} == {state.batch}
    return state.tokens, state.batch


CHANGES = {
    "nothing": (lambda cache: None, (20, 2)),
    "crop": (lambda cache: cache.crop(-3), (17, 2)),
    "reorder_cache": (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), (20, 2)),
    "batch_select_indices": (lambda cache: cache.batch_select_indices(torch.tensor([1])), (20, 1)),
    "batch_repeat_interleave": (lambda cache: cache.batch_repeat_interleave(2), (20, 4)),
    "reset": (lambda cache: cache.reset(), (0, 2)),
}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
@pytest.mark.parametrize("name", CHANGES)
def test_copies_of_a_cache_have_independent_states(model, name, copied):
    change, expected = CHANGES[name]
    cache = filled(model)
    other = copied(cache)
    change(other)
    assert lengths(other) == expected and lengths(cache) == (20, 2)
    assert state_of(other) is not state_of(cache)
    assert state_of(filled(model)) is not state_of(cache)  # caches of one model share nothing


def test_a_length_cannot_be_given_to_a_layer(model):
    layer = filled(model).layers[1]
    for name in ("tokens", "seen", "max_cache_len"):
        with pytest.raises(AttributeError):
            setattr(layer, name, 3)


def test_a_forward_that_fails_between_layers_leaves_one_length(model):
    cache = filled(model)

    def fail(*_):
        raise ZeroDivisionError

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    try:
        with pytest.raises(ZeroDivisionError), torch.no_grad():
            model(input_ids=tokens(2, 3), past_key_values=cache)
    finally:
        hook.remove()
    assert lengths(cache) == (20, 2) and state_of(cache).context is None
    assert not any(layer.updated for layer in cache.layers)
    with torch.no_grad():
        model(input_ids=tokens(2, 3), past_key_values=cache)
    assert lengths(cache) == (23, 2)


@pytest.mark.parametrize("name", [name for name in CHANGES if name != "nothing"])
def test_a_change_of_some_layers_has_no_effect_and_is_refused_until_a_reset(model, name):
    change, _ = CHANGES[name]
    cache = filled(model)
    first, second = cache.layers
    cache.layers = [first]
    change(cache)
    cache.layers = [first, second]
    assert {(layer.tokens, layer.seen) for layer in cache.layers} == {(20, 20)}
    refused = [lambda: model(input_ids=tokens(2, 1), past_key_values=cache), lambda: second.keys]
    refused += [lambda: first.crop(-3), lambda: kvpass.save_cache(cache, "cache")]
    refused += [lambda: second.crop(-2)]  # the other layer was changed otherwise
    for call in refused:
        with pytest.raises(KVPassError, match=r"inconsistent: reordering.* cache\.reset\(\)"):
            call()
    cache.reset()
    assert lengths(filled(model, 3, cache)) == (20, 3)


def test_a_change_that_failed_in_one_layer_is_not_repeated(model, monkeypatch):
    """Selecting rows twice would select the wrong rows."""
    cache = filled(model)
    monkeypatch.setattr(cache.layers[1].value_state, "map_", lambda _: 1 / 0)
    order = torch.tensor([1, 0])
    with pytest.raises(ZeroDivisionError):
        cache.reorder_cache(order)
    for layer in cache.layers:
        with pytest.raises(KVPassError, match="inconsistent"):
            layer.reorder_cache(order)


def test_layers_of_several_caches_are_not_one_cache(model):
    cache, other = filled(model), filled(model)
    cache.layers[1] = other.layers[1]
    with pytest.raises(KVPassError, match="come from another"):
        model(input_ids=tokens(2, 1), past_key_values=cache)
    other.layers.pop()
    with pytest.raises(KVPassError, match="layers are missing"):
        kvpass.save_cache(other, "cache")


def test_a_saved_cache_has_one_state(model, tmp_path):
    loaded = kvpass.load_cache(kvpass.save_cache(filled(model), tmp_path / "cache"), model)
    assert lengths(loaded) == (20, 2)


def test_a_static_cache_has_one_capacity(model):
    cache = filled(model, cache=StaticCache(config=model.config, max_cache_len=21))
    assert lengths(cache) == (20, 2) and {layer.max_cache_len for layer in cache.layers} == {21}
    with pytest.raises(KVPassError, match="max_cache_len=21"):
        model(input_ids=tokens(2, 2), past_key_values=cache)
    assert lengths(cache) == (20, 2)


def test_cross_attention_has_a_state_of_its_own():
    model = kvpass.apply(ZOO["BART"].model("sdpa"), IdentityConfig(residual=8), lowering="eager")
    cache = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
    with torch.no_grad():
        model(input_ids=tokens(2, 11), decoder_input_ids=tokens(2, 5), past_key_values=cache)
    for each in (cache, copy.deepcopy(cache)):
        (cross,) = {layer.cache for layer in cross_layers(each)}
        assert lengths(each) == (5, 2) and (cross.tokens, cross.batch) == (11, 2)
        assert cross is not state_of(each) and cross.layers == cross_layers(each)
        each.reorder_cache(torch.tensor([1, 0]))
        assert cross.edits == state_of(each).edits == 1
        each.reset()
        assert (cross.tokens, cross.edits) == (0, 0) and not any(layer.written for layer in cross.layers)


def test_apply_refuses_layers_that_evict_differently():
    class Mixed(KIVIConfig):
        def plan(self, layer):
            keep = StreamingLLM(2, recent=24, exact=8, page_size=8) if layer.index else None
            return KIVIConfig(group_size=8, retention=keep).plan(layer)

    model = llama()
    with pytest.raises(KVPassError, match="all layers must"):
        TransformersRuntime(
            model, Mixed(group_size=8), kvpass.models.probe.probe_cache(model)[1], strict=False, lowering="eager",
            max_cache_len=None, predictors={},
        )  # fmt: skip

"""Every method and attribute of the transformers cache classes: a packed cache gives the same answer, or raises a
`KVPassError` that says what to do and leaves the cache unchanged."""

import copy
import pickle

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

import kvpass
from kvpass import KVPassError
from kvpass.cache.layer import PackedLayer
from kvpass.schemes import IdentityConfig

from tiny import llama, tokens

NEW = torch.zeros(2, 2, 3, 32)  # keys or values of three tokens


def index(*numbers):
    return torch.tensor(numbers)


def contents(cache):
    return [tuple(x.clone() for x in (layer.keys, layer.values)) for layer in cache.layers]


def changed(change):
    """A function that applies ``change`` to a cache and returns its lengths and contents."""

    def action(cache):
        change(cache)
        lengths = [cache.get_seq_length(), cache.get_max_length(), cache.get_mask_sizes(1, 0), len(cache)]
        return [*lengths, *(x for pair in contents(cache) for x in pair)]

    return action


SAME = {
    "len": len,
    "iteration": lambda cache: [x for keys, values, _ in cache for x in (keys.clone(), values.clone())],
    "keys of a layer": lambda cache: cache.layers[1].keys.clone(),
    "get_seq_length": lambda cache: [cache.get_seq_length(), cache.get_seq_length(1), cache.get_seq_length(9)],
    "get_max_length": lambda cache: [cache.get_max_length(), cache.get_max_length(0), cache.get_max_length(9)],
    "get_mask_sizes": lambda cache: [cache.get_mask_sizes(3, 1), cache.get_mask_sizes(3, 9)],
    "get_query_offset": lambda cache: cache.get_query_offset(),
    "is_initialized": lambda cache: cache.is_initialized,
    "is_compileable": lambda cache: cache.is_compileable,
    "is_croppable": lambda cache: cache.is_croppable,
    "is_sliding": lambda cache: cache.is_sliding,
    "is_linear": lambda cache: cache.is_linear,
    "is_dummy": lambda cache: cache.is_dummy,
    "is_recording_past": lambda cache: cache.is_recording_past(0),
    "supports_early_init": lambda cache: cache.layers[0].supports_early_init,
    "activate_past_recording": changed(lambda cache: cache.activate_past_recording()),
    "early_initialization": changed(lambda cache: cache.early_initialization(2, 2, 32, torch.float32, "cpu")),
    "crop": changed(lambda cache: cache.crop(-3)),
    "crop nothing": changed(lambda cache: cache.crop(0)),
    "crop all": lambda cache: (cache.crop(-100), cache.get_seq_length()),
    "reset": lambda cache: (cache.reset(), cache.get_seq_length()),
    "reorder_cache": changed(lambda cache: cache.reorder_cache(index(1, 0))),
    "batch_repeat_interleave": changed(lambda cache: cache.batch_repeat_interleave(2)),
    "batch_select_indices": changed(lambda cache: cache.batch_select_indices(index(1))),
    "batch_select_indices, negative": changed(lambda cache: cache.batch_select_indices(index(-1, 0))),
    "batch_select_indices, mask": changed(lambda cache: cache.batch_select_indices(index(False, True))),
    "batch_select_indices, list": changed(lambda cache: cache.batch_select_indices([1, 1])),
    "deepcopy": changed(copy.deepcopy),
    "pickle": lambda cache: [x for pair in contents(pickle.loads(pickle.dumps(cache))) for x in pair],
    "a cache of its tensors": lambda cache: DynamicCache(list(cache)).get_seq_length(),
}

REFUSED = {
    "keys =": (lambda cache: setattr(cache.layers[0], "keys", NEW), "cannot be assigned"),
    "values =": (lambda cache: setattr(cache.layers[0], "values", NEW), "cannot be assigned"),
    "is_initialized =": (lambda cache: setattr(cache.layers[0], "is_initialized", False), "cannot be assigned"),
    "del keys": (lambda cache: delattr(cache.layers[0], "keys"), "deleted: .* crop"),
    "del values": (lambda cache: delattr(cache.layers[0], "values"), "deleted: .* crop"),
    "keys.zero_": (lambda cache: cache.layers[0].keys.zero_(), "dequantize"),
    "keys[0] =": (lambda cache: cache.layers[0].keys.__setitem__(0, 1.0), "dequantize"),
    "update": (lambda cache: cache.update(NEW, NEW, 0), "Call model"),
    "lazy_initialization": (lambda cache: cache.layers[0].lazy_initialization(NEW, NEW), "call model"),
    "offload": (lambda cache: cache.offload(0), "save_cache"),
    "prefetch": (lambda cache: cache.layers[0].prefetch(), "save_cache"),
    "crop, positive": (lambda cache: cache.crop(5), "pass minus the number of tokens"),
    "crop, not whole": (lambda cache: cache.crop(-1.5), "pass minus the number of tokens"),
    "crop, text": (lambda cache: cache.crop("3"), "pass minus the number of tokens"),
    "crop, None": (lambda cache: cache.crop(None), "pass minus the number of tokens"),
    "reorder_cache, out of bounds": (lambda cache: cache.reorder_cache(index(0, 5)), "values from 0 to 1"),
    "reorder_cache, floats": (lambda cache: cache.reorder_cache(index(0.0, 1.0)), "values from 0 to 1"),
    "reorder_cache, 2-D": (lambda cache: cache.reorder_cache(index([0, 1])), "1-D"),
    "batch_select_indices, out of bounds": (lambda cache: cache.batch_select_indices(index(2)), "values from 0 to 1"),
    "batch_select_indices, one number": (lambda cache: cache.batch_select_indices(0), "1-D"),
    "batch_select_indices, none": (lambda cache: cache.batch_select_indices([]), "at least one"),
    "batch_select_indices, mask": (lambda cache: cache.batch_select_indices(index(True)), "values from 0 to 1"),
    "batch_repeat_interleave, 0": (lambda cache: cache.batch_repeat_interleave(0), "at least one"),
    "batch_repeat_interleave, negative": (lambda cache: cache.batch_repeat_interleave(-1), "an integer of at least 1"),
    "batch_repeat_interleave, 1.5": (lambda cache: cache.batch_repeat_interleave(1.5), "an integer of at least 1"),
}

OF_OTHER_LAYERS = {  # transformers itself refuses them for full attention
    "get_conv_state", "get_recurrent_state", "has_previous_state", "update_conv_state", "update_indexer",
    "update_recurrent_state",
}  # fmt: skip


@pytest.fixture(scope="module")
def caches():
    """The packed cache of two rows of 20 tokens, half of them in pages, and the cache of the untouched model."""
    model = llama()
    packed, plain = (DynamicCache(config=model.config) for _ in range(2))
    with torch.no_grad():
        model(input_ids=tokens(2, 20), past_key_values=plain)
        kvpass.apply(model, IdentityConfig(residual=8), lowering="eager")
        model(input_ids=tokens(2, 20), past_key_values=packed)
    yield packed, plain
    kvpass.remove(model)


@pytest.mark.parametrize("name", SAME)
def test_packed_caches_answer_like_the_caches_they_replace(name, caches):
    packed, plain = (copy.deepcopy(cache) for cache in caches)
    assert isinstance(packed.layers[0], PackedLayer) and not isinstance(plain.layers[0], PackedLayer)
    torch.testing.assert_close(SAME[name](packed), SAME[name](plain), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_refusals_say_what_to_do_and_leave_the_cache_unchanged(name, caches):
    action, says = REFUSED[name]
    cache = copy.deepcopy(caches[0])
    with pytest.raises(KVPassError, match=says):
        action(cache)
    torch.testing.assert_close(contents(cache), contents(caches[0]), atol=0, rtol=0)
    assert cache.layers[0].cache.edits == 0


def test_every_public_name_of_a_cache_is_in_these_tables():
    public = {name for cls in (Cache, DynamicCache, CacheLayerMixin, DynamicLayer) for name in dir(cls)}
    covered = {word for name in (*SAME, *REFUSED) for word in name.replace(",", " ").split()} | OF_OTHER_LAYERS
    assert {name for name in public if not name.startswith("_")} - covered <= {"batch_size"}  # for layers that have it

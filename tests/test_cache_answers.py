"""Whatever a model asks of its cache, a packed cache gives the answer of the cache it replaces."""

import re
from pathlib import Path

import pytest
import torch
import transformers
from transformers import DynamicCache, HrmTextConfig, HrmTextForCausalLM

import kvpass
from kvpass.models.arguments import CACHE
from kvpass.schemes import IdentityConfig

from tiny import VOCABULARY, llama, tokens

LOSSLESS = IdentityConfig(residual=16)

ASKED = {
    # of any cache
    "get_seq_length", "get_mask_sizes", "get_query_offset", "get_max_length", "update", "layers", "is_initialized",
    "is_compileable", "is_sliding", "is_linear", "is_dummy", "is_croppable", "is_recording_past",
    "activate_past_recording", "crop", "reset", "early_initialization", "lazy_initialization",
    # of two in one
    "self_attention_cache", "cross_attention_cache", "is_updated",
}  # fmt: skip
"""Names that ordinary caches have. They are tested below or, if they change a cache, in `test_layers` and
`test_encoder`."""

OF_OTHER_CACHES = {
    # layers that are not packed: states of recurrences and convolutions, keys of an indexer
    "update_conv_state", "get_conv_state", "update_recurrent_state", "get_recurrent_state", "update_indexer",
    # dictionaries, tensors and objects that are called "cache", too
    "copy_", "clone", "device", "popitem", "move_to_end", "rnn_state", "rnn_state_initial", "hidden_state",
    "cell_state", "clear_all", "get_vision_features", "cache_vision_features", "value_cache", "key_cache",
    "set_linear_cache", "get_linear_cache", "seqlen_offset", "set_previous_accepted_tokens", "pool", "bytes_per_sector",
    "seq_length", "max_length", "cache", "weight", "bias", "input_layernorm", "encoder_attn", "parameters", "__init__",
    "update_compressor_states", "store_compression_weights", "update_overlap_state", "update_index",
}  # fmt: skip

OF_LAYERS = {"keys", "values", "update", "get_seq_length", "cumulative_length", "batch_select_indices",
             "batch_repeat_interleave", "is_initialized", "device"}  # fmt: skip


def test_models_use_no_other_cache_methods():
    """If this fails, models of the installed transformers call something new on a cache: check what an untouched cache
    answers at each moment below, implement it in `PackedLayer`, and add the name to the lists here."""
    root = Path(transformers.__file__).parent
    files = [*root.glob("models/*/modeling_*.py"), *root.glob("generation/*.py"), root / "masking_utils.py"]
    names = (
        r"(?:past_key_values?|cache|curr_cache|curr_past_key_values?|decoder_cache|self_attention_cache|"
        r"cross_attention_cache)"
    )
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    asked = set(re.findall(rf"\b{names}\.([A-Za-z_]+)", text))
    of_layers = set(re.findall(r"\.layers\[[^]\n]*\]\.([A-Za-z_]+)", text))
    of_layers |= set(re.findall(r"\b(?:cache_layer|layer_cache)\.([A-Za-z_]+)", text))
    assert asked <= ASKED | OF_OTHER_CACHES
    assert of_layers <= OF_LAYERS | OF_OTHER_CACHES


def answers(cache):
    """The answers to every name in `ASKED` that only reads."""
    layers = cache.layers
    return {
        "initialized": [cache.is_initialized, *(layer.is_initialized for layer in layers)],
        "length": [cache.get_seq_length(), *(cache.get_seq_length(i) for i in range(len(layers)))],
        "offset": cache.get_query_offset(),
        "masks": [cache.get_mask_sizes(queries, i) for queries in (1, 5) for i in range(len(layers))],
        "most": [cache.get_max_length(), *(cache.get_max_length(i) for i in range(len(layers)))],
        "kinds": [cache.is_compileable, cache.is_croppable, cache.is_sliding, cache.is_linear, cache.is_dummy],
        "recording": [cache.is_recording_past(i) for i in range(len(layers))],
        "batch": cache.batch_size,
        "there": [len(cache), bool(cache), len(layers)],
        "attributes": [
            [hasattr(layer, name) for name in ("batch_size", "max_batch_size", "record_past", "cumulative_length",
                                               "activate_past_recording", "indexer_keys", "sliding_window")]
            for layer in layers
        ],
    }  # fmt: skip


def shapes(cache):
    return [[None if x is None else tuple(x.shape) for x in (layer.keys, layer.values)] for layer in cache.layers]


@torch.no_grad()
def moments(model):
    """Answers before the first token, within a prompt, between calls, within a step, after a crop and after a reset."""
    cache, found = DynamicCache(config=model.config), {}

    def look(when, outside=False):
        found[when] = answers(cache), shapes(cache) if outside else None

    where = {"stage": ""}
    modules = {"model": model.model, "layer 0": model.model.layers[0], "layer 1": model.model.layers[1]}
    hooks = [
        module.register_forward_pre_hook(lambda *_, name=name: look(f"{where['stage']}, before {name}"))
        for name, module in modules.items()
    ]
    hooks.append(model.model.register_forward_hook(lambda *_: look(f"{where['stage']}, at its end")))
    look("empty", outside=True)
    for stage, count in (("prompt", 40), ("step", 1), ("turn", 7)):
        where["stage"] = stage
        model(input_ids=tokens(2, count), past_key_values=cache)
        look(f"after the {stage}", outside=True)
    cache.crop(-3)
    look("cropped", outside=True)
    where["stage"] = "after the crop"
    model(input_ids=tokens(2, 1), past_key_values=cache)
    cache.crop(-cache.get_seq_length())
    look("cropped to nothing", outside=True)
    cache.reset()
    look("reset", outside=True)
    where["stage"] = "another text"
    model(input_ids=tokens(3, 9), past_key_values=cache)
    look("after another text", outside=True)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("scheme", [LOSSLESS, "squat"], ids=str)
def test_cache_methods_return_what_the_replaced_cache_returns(scheme):
    expected = moments(llama())
    got = moments(kvpass.apply(llama(), scheme, lowering="eager"))
    assert got.keys() == expected.keys()
    for when in expected:
        assert got[when] == expected[when], when


@torch.no_grad()
@pytest.mark.parametrize("lowering", ["eager", "reference"])
def test_lengths_after_an_update_include_its_tokens(lowering):
    """Between layers, also in a graph: the second layer uses the length of the first."""

    def run(model):
        layer = model.model.layers[1]
        inner = layer.forward

        def shifted(hidden_states, **kwargs):
            return inner(hidden_states + kwargs[CACHE].get_seq_length(0) / 100, **kwargs)

        layer.forward = shifted
        cache = DynamicCache(config=model.config)
        return torch.cat([model(input_ids=tokens(1, n), past_key_values=cache).logits[:, -1] for n in (40, 1, 1, 1)])

    expected = run(llama())
    got = run(kvpass.apply(llama(), LOSSLESS, lowering=lowering))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_bidirectional_prefixes_are_attended_to_bidirectionally():
    """The model asks whether the cache has been used before."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_attention_heads=4)
    config = HrmTextConfig(**sizes, num_layers_per_stack=1, H_cycles=1, L_cycles=1, initializer_range=0.3)
    model = HrmTextForCausalLM(config).eval()
    ids, types = tokens(1, 40), torch.ones(1, 40, dtype=torch.long)
    expected, causal = model(input_ids=ids, token_type_ids=types).logits, model(input_ids=ids).logits
    assert (expected - causal).abs().max() > 1e-2
    kvpass.apply(model, LOSSLESS, lowering="eager")
    torch.testing.assert_close(model(input_ids=ids, token_type_ids=types).logits, expected, atol=1e-5, rtol=1e-5)

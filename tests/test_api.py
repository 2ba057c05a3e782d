"""The public functions, and their answers to bad input: a clear error and an untouched model."""

import copy
import inspect

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from transformers import (
    DynamicCache,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

import kvpass
from kvpass import KVPassError
from kvpass.cache.layer import PackedLayer
from kvpass.models.arguments import CACHE, CACHE_NAMES, cache_argument

from tiny import llama, tokens


@torch.no_grad()
def feed(model, length, cache=None, batch=1):
    cache = DynamicCache(config=model.config) if cache is None else cache
    return model(input_ids=tokens(batch, length), past_key_values=cache).logits, cache


def untouched(model):
    return "forward" not in vars(model) and not hasattr(model, "_kvpass")


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        (dict(scheme="kivvi"), "Known schemes: .*kivi.*squat"),
        (dict(scheme=3), "must be a name"),
        (dict(scheme={"bits": 4}), "names its scheme"),
        (dict(scheme={"scheme": "kivi", "bit": 4}), "no field"),
        (dict(scheme={"scheme": "kivi", "group_size": 24, "residual": 24}), "does not divide head_dim=32"),
        (dict(scheme={"scheme": "squat", "block_size": 20}), "block_size=20 does not divide head_dim=32"),
        (dict(scheme="kivi", lowering="cutlass"), "use one of auto, eager"),
        (dict(scheme="kivi", max_cache_len=0), "at least 1"),
    ],
)
def test_bad_arguments_are_refused_and_the_model_is_untouched(kwargs, match):
    model = llama()
    with pytest.raises(KVPassError, match=match):
        kvpass.apply(model, **kwargs)
    assert untouched(model)


def test_models_without_attention_to_pack_are_refused():
    models = [
        nn.Linear(3, 3),
        MambaForCausalLM(MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=32, state_size=4)),
    ]
    for model in models:
        with pytest.raises(KVPassError, match=r"kvpass needs|No packable attention"):
            kvpass.apply(model.eval(), scheme="kivi")
        assert untouched(model)


def test_plain_decoders_with_transformers_argument_names_are_told_to_pass_example_inputs():
    class Plain(nn.Linear):
        config = object()

        def forward(self, ids, cache=None): ...

    with pytest.raises(KVPassError, match="example_inputs"):
        kvpass.apply(Plain(3, 3), scheme="kivi")


def test_applying_twice_is_refused():
    model = kvpass.apply(llama(), scheme="kivi", lowering="eager")
    with pytest.raises(KVPassError, match="already applied"):
        kvpass.apply(model, scheme="squat")
    assert kvpass.explain(model).scheme.startswith("kivi")


def test_remove_gives_back_bit_identical_outputs_and_the_same_forward():
    model = llama()
    before, names = feed(model, 50)[0], set(vars(model))
    kvpass.apply(model, scheme="kivi", lowering="eager")
    feed(model, 50)
    assert kvpass.remove(model) is model
    assert set(vars(model)) == names and untouched(model)
    assert torch.equal(feed(model, 50)[0], before)
    for call in (kvpass.remove, kvpass.explain):
        with pytest.raises(KVPassError, match="not applied"):
            call(model)


def test_remove_restores_a_forward_of_the_instance():
    model = llama()
    own = model.forward
    model.forward = own
    kvpass.remove(kvpass.apply(model, scheme="kivi", lowering="eager"))
    assert vars(model)["forward"] is own


@pytest.mark.parametrize("own", [False, True])
def test_remove_refuses_to_drop_a_wrapper_of_forward(own):
    model, calls = llama(), []
    if own:
        model.forward = model.forward
    kvpass.apply(model, scheme="kivi", lowering="eager")
    ours = model.forward

    def wrapper(*args, **kwargs):
        calls.append(1)
        return ours(*args, **kwargs)

    model.forward = wrapper
    with pytest.raises(KVPassError, match=r"forward was replaced after kvpass.*wrapper.*Restore the forward"):
        kvpass.remove(model)
    assert model.forward is wrapper and kvpass.explain(model).packed == 2
    feed(model, 40)
    assert calls == [1]  # nothing remains half undone
    model.forward = ours
    kvpass.remove(model)
    assert untouched(model) or own


def test_remove_takes_a_forward_that_is_the_models_own_again():
    model = kvpass.apply(llama(), scheme="kivi", lowering="eager")
    del model.forward
    assert untouched(kvpass.remove(model))


def test_a_cache_of_another_model_or_an_earlier_apply_is_refused():
    first, second = (kvpass.apply(llama(seed=s), scheme="kivi", lowering="eager") for s in (0, 1))
    _, cache = feed(first, 40)
    with pytest.raises(KVPassError, match="another model"):
        feed(second, 1, cache)
    kvpass.apply(kvpass.remove(first), scheme="kivi", lowering="eager")
    with pytest.raises(KVPassError, match=r"earlier kvpass\.apply"):
        feed(first, 1, cache)
    assert cache.get_seq_length() == 40


def test_a_cache_that_holds_full_precision_tokens_is_refused_and_kept():
    model = llama()
    _, cache = feed(model, 40)
    kvpass.apply(model, scheme="kivi", lowering="eager")
    with pytest.raises(KVPassError, match="already holds 40"):
        feed(model, 1, cache)
    assert cache.get_seq_length() == 40
    assert not any(isinstance(layer, PackedLayer) for layer in cache.layers)


def test_a_full_cache_a_wrong_batch_and_a_positive_crop_are_refused_and_lose_nothing():
    model = kvpass.apply(llama(), scheme="kivi", lowering="eager", max_cache_len=48)
    _, cache = feed(model, 40)
    before = copy.deepcopy(cache.layers[0].key_state.codes)
    with pytest.raises(KVPassError, match="max_cache_len=48"):
        feed(model, 9, cache)
    with pytest.raises(KVPassError, match="batch of 1"):
        feed(model, 1, cache, batch=2)
    with pytest.raises(KVPassError, match="minus the number of tokens"):
        cache.crop(3)
    assert cache.get_seq_length() == 40 and torch.equal(before, cache.layers[0].key_state.codes)
    feed(model, 8, cache)
    assert cache.get_seq_length() == 48


class WithItsOwnCode(LlamaForCausalLM):
    """A model with its own code from before transformers renamed the cache argument."""

    def forward(self, input_ids=None, past_key_values=None, **kwargs):
        return super().forward(input_ids, **{CACHE: past_key_values}, **kwargs)


@pytest.mark.slow_cases("reference-Llama*")
@pytest.mark.parametrize("kind", [LlamaForCausalLM, WithItsOwnCode])
@pytest.mark.parametrize("lowering", ["eager", "reference"])
def test_caches_are_accepted_by_each_argument_name_and_by_position(kind, lowering):
    model = kind(llama().config).eval()
    own = cache_argument(model)
    assert own == (CACHE if kind is LlamaForCausalLM else "past_key_values")
    position = list(inspect.signature(model.forward).parameters).index(own)
    kvpass.apply(model, "kivi", lowering=lowering, strict=True)
    ways = [lambda cache, name=name: ((), {name: cache}) for name in CACHE_NAMES]
    ways.append(lambda cache: (((None,) * (position - 1) + (cache,)), {}))
    ways.append(lambda cache: ((), dict.fromkeys(CACHE_NAMES, cache)))
    logits = []
    for way in ways:
        cache = DynamicCache(config=model.config)
        args, kwargs = way(cache)
        for seed, length in enumerate((70, 1, 1)):
            out = model(tokens(1, length, seed), *args, **kwargs)
            assert out.past_key_values is cache and out[CACHE] is cache
        assert cache.get_seq_length() == 72 and isinstance(cache.layers[1], PackedLayer)
        logits.append(out.logits)
    assert all(torch.equal(each, logits[0]) for each in logits)
    assert sum(graph.compiled for graph in kvpass.explain(model).graphs) == (lowering != "eager")  # one for all forms
    ids = torch.cat([tokens(1, length, seed) for seed, length in enumerate((70, 1, 1))], 1)
    model.generation_config.eos_token_id = None
    out = model.generate(ids, do_sample=False, max_new_tokens=3, return_dict_in_generate=True)
    assert isinstance(out[CACHE].layers[0], PackedLayer) and out[CACHE].get_seq_length() == 74


@pytest.mark.parametrize("name", sorted({CACHE, "past_key_values"}))
def test_generate_accepts_the_cache_argument_names_of_transformers(name):
    model = kvpass.apply(llama(), "kivi", lowering="eager")
    _, cache = feed(model, 40)
    ids = torch.cat([tokens(1, 40), tokens(1, 1)], 1)
    model.generate(ids, **{name: cache}, max_new_tokens=3, do_sample=False)
    assert cache.get_seq_length() == 43


def test_two_caches_in_one_call_are_refused():
    model = kvpass.apply(llama(), "kivi", lowering="eager")
    one, other = (DynamicCache(config=model.config) for _ in range(2))
    with pytest.raises(KVPassError, match=f"different caches: pass {CACHE} alone"):
        model(tokens(1, 5), cache=one, past_key_values=other)
    model(tokens(1, 5), cache=None, past_key_values=other)
    assert (one.get_seq_length(), other.get_seq_length()) == (0, 5)


def test_a_submodule_cannot_write_to_a_packed_cache():
    model = kvpass.apply(llama(), scheme="kivi", lowering="eager")
    _, cache = feed(model, 10)
    with pytest.raises(KVPassError, match="outside the model"), torch.no_grad():
        model.model(input_ids=tokens(1, 1), past_key_values=cache)
    assert cache.get_seq_length() == 10


def test_a_failing_forward_leaves_the_cache_as_it_was():
    model = kvpass.apply(llama(), scheme="kivi", lowering="eager")
    _, cache = feed(model, 40)
    expected, _ = feed(model, 3, copy.deepcopy(cache))
    handle = model.lm_head.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        feed(model, 3, cache)
    handle.remove()
    assert cache.get_seq_length() == 40
    assert torch.equal(feed(model, 3, cache)[0], expected)


def test_a_changed_dtype_or_device_is_refused():
    model = kvpass.apply(llama(), scheme="kivi", lowering="eager")
    model.to(torch.bfloat16)
    with pytest.raises(KVPassError, match=r"After changing the dtype or the device, .* apply again"):
        feed(model, 5)
    model.to("meta", torch.float32)
    with pytest.raises(KVPassError, match=r"on meta.* After changing the dtype or the device, .* apply again"):
        model(input_ids=tokens(1, 5).to("meta"))


def test_non_finite_keys_are_refused():
    model = kvpass.apply(llama(), scheme="kivi", lowering="eager")
    model.model.layers[1].self_attn.k_proj.weight.data[3, 3] = torch.inf
    with pytest.raises(kvpass.NonFiniteError, match="NaN, infinity"):
        feed(model, 64)


def test_training_mode_and_use_cache_false_are_left_alone():
    model = kvpass.apply(llama(), scheme="kivi", lowering="eager")
    assert model(input_ids=tokens(1, 8), use_cache=False).past_key_values is None
    loss = model.train()(input_ids=tokens(1, 8), labels=tokens(1, 8), use_cache=False).loss
    loss.backward()
    assert model.lm_head.weight.grad is not None


def test_windows_that_are_too_short_to_pack_are_refused():
    config = MistralConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=16,
    )
    model = MistralForCausalLM(config).eval()
    with pytest.raises(KVPassError, match="sliding-window attention: the layer keeps at most 16 tokens"):
        kvpass.apply(model, scheme="kivi")
    assert untouched(model)


def test_explain_counts_every_byte():
    model = kvpass.apply(llama(), scheme="squat", lowering="eager")
    assert "2 of 2 cache layers packed" in str(kvpass.explain(model))
    _, cache = feed(model, 200)
    report = kvpass.explain(model)
    assert report.nbytes == kvpass.nbytes(cache)
    assert report.full_nbytes == 2 * 2 * 200 * 2 * 32 * 4
    assert kvpass.bits_per_value(cache) == pytest.approx(32 * report.nbytes / report.full_nbytes)
    with pytest.raises(KVPassError, match="empty"):
        kvpass.bits_per_value(DynamicCache(config=model.config))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_at_4096_tokens_kivi_holds_at_most_22_percent_of_a_bf16_cache(dtype):
    model = kvpass.apply(llama(kv_heads=1, head_dim=64).to(dtype), scheme="kivi", lowering="eager")
    cache = feed(model, 4096)[1]
    bf16 = 2 * 2 * 4096 * 64 * 2  # layers, K and V, tokens, head_dim, bytes
    assert kvpass.nbytes(cache) <= 0.22 * bf16
    everything = [value for layer in cache.layers for value in vars(layer).values() if torch.is_tensor(value)]
    assert not any(tensor.numel() >= 4096 * 64 for tensor in everything)  # the full-precision cache is gone


@pytest.mark.slow
def test_keys_and_values_of_a_packed_layer_read_like_tensors():
    model = kvpass.apply(llama(), scheme="kivi", lowering="eager")
    _, cache = feed(model, 70)
    keys = cache.layers[0].keys
    assert isinstance(keys, kvpass.PackedKV) and keys.shape == (1, 2, 70, 32) and keys.dtype == torch.float32
    assert torch.equal(keys * 1, cache.layers[0].key_state.dequantize(70))


def test_cache_methods_of_transformers_work():
    model = kvpass.apply(llama(), scheme="squat", lowering="eager")
    _, cache = feed(model, 70, batch=2)
    layer = cache.layers[0]
    keys = layer.keys.dequantize()
    assert cache.get_mask_sizes(5, 0) == (75, 0) and cache.get_seq_length() == 70 and layer.get_max_length() == -1
    cache.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(layer.keys.dequantize(), keys.flip(0))
    cache.batch_repeat_interleave(2)
    assert torch.equal(layer.keys.dequantize(), keys.flip(0).repeat_interleave(2, 0))
    cache.batch_select_indices(torch.tensor([3]))
    assert torch.equal(layer.keys.dequantize(), keys[:1])
    feed(model, 3, cache)
    other = copy.deepcopy(cache)
    feed(model, 30, other)
    assert (cache.get_seq_length(), other.get_seq_length()) == (73, 103)
    with pytest.warns(UserWarning, match="beyond the residual window"):
        other.crop(-90)
    other.reset()
    assert other.get_seq_length() == 0
    expected, _ = feed(model, 20, batch=3)
    assert torch.equal(feed(model, 20, other, batch=3)[0], expected)


def test_eager_lowering_compiles_nothing():
    torch._dynamo.reset()
    counters.clear()
    for scheme in ("kivi", "squat"):
        model = kvpass.apply(llama(), scheme=scheme, lowering="eager")
        model.generate(tokens(1, 40), max_new_tokens=40, do_sample=False)
    assert not counters["inductor"]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["kivi", "squat-pre", "logquant"])
def test_a_cache_filled_in_inference_mode_can_be_used_outside_of_it(scheme):
    model, other = (kvpass.apply(llama(), scheme=scheme, lowering="eager") for _ in range(2))
    caches = []
    for m, modes in (
        (model, (torch.inference_mode, torch.no_grad, torch.inference_mode)),
        (other, (torch.no_grad, torch.no_grad, torch.no_grad)),
    ):
        cache = DynamicCache(config=m.config)
        for mode, length in zip(modes, (120, 150, 3), strict=True):
            with mode():
                logits = m(input_ids=tokens(2, length), past_key_values=cache).logits
                cache.reorder_cache(torch.tensor([1, 0]))
        caches.append((cache, logits.clone()))
    assert torch.equal(caches[0][1], caches[1][1])
    assert caches[0][0].get_seq_length() == 273


def test_use_cache_argument_overrides_the_config():
    model = kvpass.apply(llama(), scheme="kivi", lowering="eager")
    model.config.use_cache = False
    with torch.no_grad():
        assert model(input_ids=tokens(1, 40)).past_key_values is None
        cache = model(input_ids=tokens(1, 40), use_cache=True).past_key_values
        assert isinstance(cache.layers[0], PackedLayer)
        assert model(input_ids=tokens(1, 1), past_key_values=cache, use_cache=True).past_key_values is cache

"""Common uses of a model: each equals the untouched model with lossless pages, or raises an error that says what to do.

`test_generate` compares compiled with eager quantization, in the modes of `generate` and for every scheme.
"""

import copy
import pickle

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import DynamicCache, PreTrainedTokenizerFast, pipeline

import kvpass
from kvpass import KVPassError
from kvpass.cache.layer import PackedLayer
from kvpass.calibration import backward
from kvpass.runtime.applied import is_applied
from kvpass.schemes import IdentityConfig, KIVIConfig

from tiny import VOCABULARY, llama, tokens
from zoo import ZOO

LOSSLESS, LOSSY = IdentityConfig(residual=16), KIVIConfig(residual=16, group_size=16)


def generate(model, **inputs):
    """Sequences, and the logits of each step, ``[B, S, V]``."""
    torch.manual_seed(0)
    inputs = dict(max_new_tokens=20, do_sample=False) | inputs
    out = model.generate(**inputs, return_dict_in_generate=True, output_logits=True)
    return out.sequences, torch.stack(out.logits, 1)


def padded(side, lengths=(40, 23, 31)):
    """Token ids and mask ``[B, S]`` of prompts of ``lengths``, padded on one side."""
    ids, mask = (torch.zeros(len(lengths), max(lengths), dtype=torch.long) for _ in range(2))
    for row, length in enumerate(lengths):
        where = slice(length) if side == "right" else slice(-length, None)
        ids[row, where], mask[row, where] = tokens(1, length, seed=row), 1
    return ids, mask


def assert_equal(got, expected, tolerance=1e-5):
    assert torch.equal(got[0], expected[0])
    if expected[1] is not None:
        torch.testing.assert_close(got[1], expected[1], atol=tolerance, rtol=tolerance)


def assert_fused(model, graphs=1):
    """Assert that every layer is packed and fused, in at most ``graphs`` decode graphs."""
    report = kvpass.explain(model)
    assert report.packed == len(report.layers) == 2
    assert report.fused == 2 or not report.graphs  # no step was compiled
    assert not any(graph.decoded or graph.refused for graph in report.graphs)
    assert sum(graph.compiled for graph in report.graphs) <= graphs


def check(model, use):
    """Assert that ``use`` gives the same on the untouched ``model`` and over lossless pages; returns the packed
    model."""
    torch._dynamo.reset()
    expected = use(model)
    kvpass.apply(model, LOSSLESS)
    assert_equal(use(model), expected)
    assert_fused(model)
    return model


@torch.no_grad()
def fed(model, ids, mask, prompt):
    """Logits after ``prompt`` tokens and after each further one, ``[B, S - prompt + 1, V]``."""
    cache, rows = DynamicCache(config=model.config), []
    for stop in range(prompt, ids.shape[1] + 1):
        part = ids[:, cache.get_seq_length() : stop]
        rows.append(model(input_ids=part, attention_mask=mask[:, :stop], past_key_values=cache).logits[:, -1])
    return torch.stack(rows, 1)


@pytest.mark.parametrize(
    ("model", "portable"),
    [(lambda: llama("flex_attention"), "sdpa"), (lambda: ZOO["Gemma 2"].model("flex_attention"), "eager")],
    ids=["Llama", "Gemma 2, which caps its scores"],
)
def test_flex_attention_is_written_in_a_way_that_can_be_captured(model, portable):
    """And restored. On a CPU without a suitable compiler flex_attention itself does not run, so the results are
    compared with "eager" attention."""
    model, (ids, mask) = model(), padded("left")
    model.set_attn_implementation("eager")
    expected = generate(model, input_ids=ids, attention_mask=mask)
    model.set_attn_implementation("flex_attention")
    with pytest.raises(KVPassError, match="group_size"):
        kvpass.apply(model, {"scheme": "kivi", "group_size": 7})
    assert model.config._attn_implementation == "flex_attention"
    kvpass.apply(model, LOSSLESS, lowering="eager")
    assert model.config._attn_implementation == portable
    assert f"'{portable}' replaces 'flex_attention'" in str(kvpass.explain(model))
    assert_equal(generate(model, input_ids=ids, attention_mask=mask), expected)
    kvpass.remove(model)
    assert model.config._attn_implementation == "flex_attention"


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)], ids=str)
def test_half_precision_gives_the_same_tokens(dtype, tolerance):
    """Eagerly the bits are equal. Compiled, tokens are equal except for ties within rounding, which a random model
    has."""
    torch._dynamo.reset()
    model, (ids, mask) = llama().to(dtype), padded("left", (60, 43, 51))
    expected = fed(model, ids, mask, 40)
    eager = fed(kvpass.apply(model, LOSSLESS, lowering="eager"), ids, mask, 40)
    assert torch.equal(eager, expected)
    compiled = fed(kvpass.apply(kvpass.remove(model), LOSSLESS), ids, mask, 40)
    assert_fused(model)
    torch.testing.assert_close(compiled, expected, atol=tolerance, rtol=0)
    best = expected.float().topk(2).values
    clear = best[..., 0] - best[..., 1] > tolerance
    assert torch.equal(compiled.argmax(-1)[clear], expected.argmax(-1)[clear]) and clear.float().mean() > 0.5


@torch.no_grad()
def behind_right_padding(model, steps=20):
    """Greedy decoding after prompts padded on the right, by hand: the mask grows, and positions are passed."""
    ids, mask = padded("right")
    last, cache = mask.sum(1) - 1, DynamicCache(config=model.config)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    out = model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
    logits = [out.logits[torch.arange(len(ids)), last]]
    for step in range(1, steps):
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        token, positions = logits[-1].argmax(-1, keepdim=True), (last + step)[:, None]
        out = model(input_ids=token, attention_mask=mask, position_ids=positions, past_key_values=cache)
        logits.append(out.logits[:, -1])
    logits = torch.stack(logits, 1)
    return logits.argmax(-1), logits


@pytest.mark.nightly
def test_padding_on_the_right_is_masked():
    model = kvpass.remove(check(llama(), behind_right_padding))
    compiled = behind_right_padding(kvpass.apply(model, LOSSY))
    assert_fused(model)
    eager = behind_right_padding(kvpass.apply(kvpass.remove(model), LOSSY, lowering="eager"))
    assert_equal(compiled, eager, 1e-4)


@pytest.fixture
def models():
    """The same weights, untouched and packed."""
    torch._dynamo.reset()
    return llama(), kvpass.apply(llama(), LOSSLESS)


@torch.no_grad()
@pytest.mark.parametrize("scheme", [LOSSLESS, "squat", "kivi"], ids=str)
def test_autocast_around_use(scheme):
    """Narrower keys and values under autocast are stored exactly; codecs compute in their declared dtypes."""
    model, ids = llama(), tokens(2, 90)
    ones = torch.ones_like(ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = fed(model, ids, ones, 60)
        kvpass.apply(kvpass.remove(kvpass.apply(model, scheme, lowering="eager")), scheme, lowering="eager")
        within = fed(model, ids, ones, 60)
    kvpass.apply(kvpass.remove(model), scheme, lowering="eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = fed(model, ids, ones, 60)
    close = dict(atol=2e-2, rtol=0) if scheme is LOSSLESS else dict(atol=0.5, rtol=0)
    torch.testing.assert_close(got, expected, **close)
    torch.testing.assert_close(within, expected, **close)


def chat(model):
    """Four turns over one growing cache."""
    cache, ids, logits = DynamicCache(config=model.config), tokens(1, 20), []
    for turn in range(4):
        out = generate(model, input_ids=ids, past_key_values=cache, max_new_tokens=9)
        ids = torch.cat([out[0], tokens(1, 7, seed=turn)], 1)
        logits.append(out[1])
    assert cache.get_seq_length() == 20 + 4 * 9 + 3 * 7 - 1
    return ids, torch.cat(logits, 1)


def reuse_of_a_prompt(model):
    """Two continuations of one prompt, each over a copy of its cache."""
    cache, prompt = DynamicCache(config=model.config), tokens(1, 40)
    with torch.no_grad():
        model(input_ids=prompt, past_key_values=cache)
    both = []
    for seed in (1, 2):
        ids = torch.cat([prompt, tokens(1, 9, seed)], 1)
        both.append(generate(model, input_ids=ids, past_key_values=copy.deepcopy(cache)))
    assert cache.get_seq_length() == 40
    return tuple(torch.cat(parts) for parts in zip(*both, strict=True))


def assisted(packed):
    """Decoding with drafts of another model, most of them rejected, with a packed or an untouched model."""

    def use(model):
        draft = llama(layers=1, seed=3)
        draft.lm_head, draft.model.embed_tokens = model.lm_head, model.model.embed_tokens
        draft = kvpass.apply(draft, LOSSLESS) if packed else draft
        return generate(model, input_ids=tokens(1, 40), assistant_model=draft, max_new_tokens=40)

    return use


def tokenizer():
    """Words "0", "1", ... for all tokens of the tiny vocabulary."""
    words = Tokenizer(WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", unk_token="0", padding_side="left")


def through_a_pipeline(model):
    """The output of a pipeline for two texts, one after the other, as tokens."""
    texts = [" ".join(map(str, tokens(1, length, seed=length)[0].tolist())) for length in (30, 17)]
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer())
    answers = pipe(texts, max_new_tokens=20, do_sample=False, return_full_text=False)
    return torch.tensor([[int(word) for word in answer["generated_text"].split()] for (answer,) in answers]), None


def mode(**inputs):
    return lambda model: generate(model, **inputs)


WAYS = {
    "chat": chat,
    "a prompt used twice": reuse_of_a_prompt,
    "drafts of a model": assisted(packed=False),
    "drafts of a packed model": assisted(packed=True),
    "a pipeline": through_a_pipeline,
    "chunked prefill": mode(input_ids=tokens(1, 90), prefill_chunk_size=40),
    "beam search": mode(input_ids=tokens(1, 30), num_beams=3),
    "several samples of each": mode(input_ids=tokens(1, 30), do_sample=True, num_return_sequences=3),
    "from embeddings": lambda model: generate(model, inputs_embeds=model.model.embed_tokens(tokens(1, 30)).detach()),
}


@pytest.mark.slow_cases("drafts*")
@pytest.mark.nightly_cases("drafts of a packed model")
@pytest.mark.parametrize("way", WAYS)
def test_ways_to_generate_equal_the_untouched_model(models, way):
    plain, model = models
    assert_equal(WAYS[way](model), WAYS[way](plain))
    assert_fused(model, graphs=2)  # a batch of one and of three, or drafts


def test_inference_mode_around_everything():
    check(llama(), torch.inference_mode()(mode(input_ids=tokens(1, 30))))


@pytest.mark.slow
def test_cropping_after_rejected_drafts_equals_assisted_decoding(models):
    """Some drafts of `assisted` must be rejected; otherwise the test would check nothing."""
    _, model = models
    kept = []
    crop, PackedLayer.crop = PackedLayer.crop, lambda self, n: (kept.append(n), crop(self, n))
    try:
        assisted(packed=False)(model)
    finally:
        PackedLayer.crop = crop
    assert min(kept) < 0


def lora(model):
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config).eval()


def test_a_model_with_lora_adapters_is_packed_inside():
    use = mode(input_ids=tokens(2, 40))
    model = check(lora(llama()), use)
    adapted = use(model)
    with model.disable_adapter():
        assert_equal(use(model), use(llama()))
    assert kvpass.remove(model) is model and not is_applied(model.get_base_model())
    assert_equal(use(model), adapted)


def test_adapters_may_come_after_apply():
    torch._dynamo.reset()
    use = mode(input_ids=tokens(2, 40))
    model = lora(kvpass.apply(llama(), LOSSLESS))
    assert_equal(use(model), use(lora(llama())))
    assert_fused(model)
    with pytest.raises(KVPassError, match="already applied"):
        kvpass.apply(model, LOSSLESS)


@pytest.mark.slow
def test_weights_quantized_by_torchao():
    model = llama()
    quantize_(model, Int8WeightOnlyConfig())
    check(model, mode(input_ids=tokens(2, 40)))


@pytest.mark.slow
def test_weights_of_four_bits_by_torchao():
    """On CPUs their products are bfloat16, in ops of torchao. Layers are still compiled only once."""
    from torchao.prototype.quantization.int4.inference_workflow import PrototypeInt4WeightOnlyConfig

    model = llama(layers=3).bfloat16()
    quantize_(model, PrototypeInt4WeightOnlyConfig(group_size=32, set_inductor_config=False))
    use = mode(input_ids=tokens(1, 40))
    _, expected = use(kvpass.apply(model, LOSSLESS, lowering="eager"))
    torch._dynamo.reset()
    _, got = use(kvpass.apply(kvpass.remove(model), LOSSLESS))
    torch.testing.assert_close(got[:, :2], expected[:, :2], atol=5e-2, rtol=5e-2)
    graph = kvpass.explain(model).graphs[-1]
    assert graph.fused == graph.repeats == 3 and not graph.refused


@pytest.mark.slow
def test_requantized_weights_are_noticed():
    """Dynamo does not check such weights; `kvpass.compile.subclasses` does."""
    model = llama()
    quantize_(model, Int8WeightOnlyConfig())
    use = mode(input_ids=tokens(2, 40))
    before = use(kvpass.apply(model, LOSSLESS))
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.qdata = weight.qdata.clone()  # equal contents at another address
    assert_equal(use(model), before)
    weight.qdata = weight.qdata.to(torch.int16)
    with pytest.raises(KVPassError, match="quantization of the weights changed"):
        use(model)


FULL = dict(backend="eager", fullgraph=True)


def compiled_forward(model, **options):
    model.forward = torch.compile(model.forward, backend="eager", **options)
    return model


def compiled_in_place(model):
    model.compile(**FULL)
    return model


def compiled_layers(model):
    for layer in model.model.layers:
        layer.compile(backend="eager")
    return model


COMPILED = {
    "forward": compiled_forward,
    "forward, fullgraph": lambda model: compiled_forward(model, fullgraph=True),
    "in place, fullgraph": compiled_in_place,
    "wrapped, fullgraph": lambda model: torch.compile(model, **FULL),
    "layers": compiled_layers,
}


@pytest.mark.slow_cases("before: forward, fullgraph", "wrapped, fullgraph", "forward", "before: layers")
@pytest.mark.parametrize("how", [*COMPILED, "before: forward, fullgraph", "before: layers"])
def test_a_model_may_be_compiled_before_apply_and_after(how, reference_in_this_test):
    """The recipes of transformers' documentation. After `apply` they compile kvpass's forward, which compiles steps."""
    torch._dynamo.reset()
    before, compiled = how.startswith("before: "), COMPILED[how.removeprefix("before: ")]
    model = kvpass.apply(compiled(llama()), LOSSLESS) if before else compiled(kvpass.apply(llama(), LOSSLESS))
    use = mode(input_ids=tokens(1, 40), max_new_tokens=4)
    assert_equal(use(model), use(llama()))
    assert_fused(model)


def test_fullgraph_functions_are_told_what_to_leave_out():
    model = kvpass.apply(llama(), LOSSLESS)
    call = torch.compile(lambda ids: model(input_ids=ids).logits, **FULL)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="call it without fullgraph=True"):
        call(tokens(1, 4))


def test_a_model_wrapped_by_torch_compile_is_packed_inside():
    model = check(torch.compile(llama(), backend="eager"), mode(input_ids=tokens(2, 40)))
    assert kvpass.remove(model) is model and "forward" not in vars(model._orig_mod)


def spread(**places):
    """A model with a layer on each of two devices, both the CPU unless ``places`` says otherwise. accelerate puts its
    hooks on all modules."""
    accelerate, model = pytest.importorskip("accelerate"), llama()
    around = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"), "cpu")
    layers = {f"model.layers.{i}": places.get(f"layer_{i}", "cpu") for i in range(len(model.model.layers))}
    return accelerate.dispatch_model(model, around | layers, offload_dir=places.get("folder"), force_hooks=True)


def test_hooks_of_accelerate_that_break_the_graph_are_refused():
    use, model = mode(input_ids=tokens(1, 40)), spread()
    with pytest.raises(KVPassError, match="remove_hook_from_module"):
        kvpass.apply(model, LOSSLESS)
    for scheme in ("kivi-pre", "qaq", "kivi+h2o"):
        with pytest.raises(KVPassError, match=r"needs the whole forward captured.*use 'kivi'"):
            kvpass.apply(model, scheme, lowering="eager")
    expected = use(model)
    assert_equal(use(kvpass.apply(model, LOSSLESS, lowering="eager")), expected)
    pytest.importorskip("accelerate").hooks.remove_hook_from_module(kvpass.remove(model), recurse=True)
    check(model, use)


@pytest.mark.parametrize("scheme", ["kivi-sinks", "squat"])
def test_a_model_spread_over_devices_stores_what_it_stores_on_one(scheme):
    """``squat`` fits its subspace to queries that are captured between the hooks."""
    found = []
    for model in (llama(), spread()):
        kvpass.apply(model, scheme, lowering="eager")
        cache = DynamicCache(config=model.config)
        generate(model, input_ids=tokens(1, 100), past_key_values=cache)
        found.append([stored.dequantize() for layer in cache.layers for stored in (layer.keys, layer.values)])
        assert kvpass.explain(model).packed == len(cache.layers)
    assert all(map(torch.equal, *found))


def offloaded(place, folder):
    """The model of `spread`, with the weights of one or of all layers on the host or on disk."""
    accelerate = pytest.importorskip("accelerate")
    if place == "disk, one layer":
        return spread(layer_1="disk", folder=str(folder))
    if place == "disk":
        return accelerate.disk_offload(llama(), str(folder), execution_device="cpu")
    return accelerate.cpu_offload(llama(), execution_device="cpu")


@pytest.mark.parametrize("place", ["host", "disk", "disk, one layer"])
def test_offloaded_weights_are_loaded_as_without_kvpass(tmp_path, place):
    model, use = offloaded(place, tmp_path / "weights"), mode(input_ids=tokens(2, 60))
    with pytest.raises(KVPassError, match="use lowering='eager'"):
        kvpass.apply(model, LOSSLESS)
    assert_equal(use(kvpass.apply(model, LOSSLESS, lowering="eager")), use(llama()))
    kvpass.remove(model)
    cache = DynamicCache(config=model.config)
    generate(kvpass.apply(model, "kivi-sinks", lowering="eager"), input_ids=tokens(1, 100), past_key_values=cache)
    file = kvpass.save_cache(cache, tmp_path / "cache.safetensors")
    resident = kvpass.apply(llama(), "kivi-sinks", lowering="eager")
    expected = DynamicCache(config=model.config)
    generate(resident, input_ids=tokens(1, 100), past_key_values=expected)
    for mine, theirs in zip(kvpass.load_cache(file, resident).layers, expected.layers, strict=True):
        assert torch.equal(mine.keys + 0, theirs.keys + 0) and torch.equal(mine.values + 0, theirs.values + 0)


CALIBRATED = [
    dict(scheme="aqua", rope="post", residual=32, first_layer="higgs-4"),
    dict(scheme="waterfill-static"),
    dict(scheme="kvquant-calibrated", rope="post"),
]


@pytest.mark.parametrize("scheme", CALIBRATED, ids=str)
def test_offloaded_weights_are_calibrated_on_for_a_model_that_fits(tmp_path, monkeypatch, scheme):
    data = tokens(4, 240)
    model, resident = offloaded("disk", tmp_path), llama()
    monkeypatch.setattr(backward, "_SMALL", 0)
    found, expected = (kvpass.calibrate(one, data, scheme, progress=False) for one in (model, resident))
    assert expected.predictors
    for index, both in expected.predictors.items():
        for mine, theirs in zip(found.predictors[index], both, strict=True):
            torch.testing.assert_close(mine, theirs)
    generate(kvpass.apply(resident, found, lowering="eager"), input_ids=tokens(1, 100))


def test_calibrating_on_offloaded_weights_needs_keys_behind_rotary_embedding(tmp_path):
    with pytest.raises(KVPassError, match="calibrate with rope='post'"):
        kvpass.calibrate(offloaded("disk", tmp_path), tokens(4, 100), "aqua", progress=False)


def test_a_backward_pass_keeps_no_offloaded_weights(tmp_path, monkeypatch):
    loaded, gradients = [], torch.autograd.grad

    class Watching(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.nn.functional.linear:
                loaded.append(StorageWeakRef(args[1].untyped_storage()))
            return func(*args, **(kwargs or {}))

    def checked(*args, **kwargs):
        assert loaded and all(weight.expired() for weight in loaded)
        return gradients(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", checked)
    with Watching():
        kvpass.calibrate(offloaded("disk", tmp_path), tokens(2, 240), "waterfill-static", progress=False)


def test_weights_without_values_are_refused(tmp_path):
    with pytest.raises(KVPassError, match="load them first"):
        kvpass.apply(spread(layer_1="meta", folder=str(tmp_path)), LOSSLESS, lowering="eager")


def test_copies_of_a_packed_model_are_refused():
    """A copy would run the original's forward, with the original's weights."""
    model = kvpass.apply(llama(), LOSSLESS, lowering="eager")
    for copying in (copy.deepcopy, pickle.dumps):
        with pytest.raises(KVPassError, match="apply to each copy"):
            copying(model)
    other = copy.deepcopy(kvpass.remove(model))
    assert_equal(
        *(generate(kvpass.apply(m, LOSSLESS, lowering="eager"), input_ids=tokens(1, 30)) for m in (model, other))
    )


def offloaded_cache(model):
    cache = DynamicCache(config=model.config)
    cache.offloading = True  # its constructor requires an accelerator
    generate(model, input_ids=tokens(1, 30), past_key_values=cache)


def prefix_tuning(model):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(model, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)).eval()
    generate(model, input_ids=tokens(1, 30))


REFUSED = {
    "use assistant_model": mode(input_ids=tokens(1, 30), assistant_early_exit=1),
    "Offloaded caches are not supported": offloaded_cache,
    "Prefix tuning": prefix_tuning,
    "call generate with a batch": lambda model: model(input_ids=tokens(1, 30), cache=object(), use_cache=False),
    "pass a transformers DynamicCache": lambda model: model(input_ids=tokens(1, 30), past_key_values=((),)),
}


@pytest.mark.parametrize("says", REFUSED)
def test_unsupported_uses_say_so(says):
    model = kvpass.apply(llama(), LOSSLESS, lowering="eager")
    with pytest.raises(KVPassError, match=says):
        REFUSED[says](model)


def test_a_wrapper_that_is_not_known_is_refused():
    with pytest.raises(KVPassError, match=r"kvpass.apply\(model.module\)"):
        kvpass.apply(torch.nn.DataParallel(llama()), LOSSLESS)

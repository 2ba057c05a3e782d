"""Saved, pickled and copied caches continue like the original, or raise an error that says why not."""

import copy
import io
import pickle
import random
import re
import subprocess
import sys
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import save_file
from transformers import DynamicCache

import kvpass
from kvpass import KVPassError
from kvpass.cache.swap import packed_layers
from kvpass.models.probe import probe
from kvpass.schemes import IdentityConfig, KIVIConfig, QAQConfig
from kvpass.schemes.calibrated import Calibration, describe
from kvpass.schemes.fingerprint import settings

from kinds import KINDS, answers, feed, filled, packed, same
from tiny import llama, tokens
from zoo import ZOO

pytestmark = pytest.mark.usefixtures("nothing_compiled")

KIVI = KIVIConfig(group_size=8, residual=8)
LONG = 43 + 170
"""Tokens after which every pool has grown."""


@pytest.fixture(scope="module", params=KINDS)
def cache(request):
    torch._dynamo.reset()
    return filled(packed(KINDS[request.param]), 43)


def through_a_file(cache, folder):
    return kvpass.load_cache(kvpass.save_cache(cache, folder / "cache.safetensors"), cache.model)


def through_pickle(cache, _):
    return pickle.loads(pickle.dumps(cache))


def through_torch(cache, _):
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def by_copying(cache, _):
    return copy.deepcopy(cache)


def without_model(cache, way, folder):
    """``cache`` saved or copied in one ``way``, without its model."""
    model = cache.__dict__.pop("model") if way is not through_a_file else cache.model
    kept = way(cache, folder)
    cache.model = kept.model = model
    return kept


@pytest.mark.slow_cases("qaq*", "kivi+h2o*")
@pytest.mark.nightly_cases("kivi+streaming*", "qaq without*")
@pytest.mark.parametrize("way", [through_a_file, through_pickle, through_torch, by_copying])
def test_a_loaded_cache_continues_like_the_saved_one(cache, way, tmp_path):
    """Beyond the next growth of its pools, and independently of the original."""
    kept = without_model(cache, way, tmp_path)
    assert kvpass.nbytes(kept) <= kvpass.nbytes(cache)
    for mine, theirs in zip(packed_layers(kept), packed_layers(cache), strict=True):
        assert (mine.tokens, mine.seen) == (theirs.tokens, theirs.seen)
        for a, b in zip(mine.states(), theirs.states(), strict=True):
            contents = a.contents(mine.tokens), b.contents(mine.tokens)
            assert contents[0].keys() == contents[1].keys()
            assert all(torch.equal(contents[0][name], contents[1][name]) for name in contents[0])
    before = answers(cache)
    assert same(answers(kept), before)
    ahead = feed(kept, LONG, 5), feed(kept, 1, 6)
    assert same(answers(cache), before)
    again = without_model(cache, by_copying, tmp_path)
    assert same([*ahead, *answers(kept)], [feed(again, LONG, 5), feed(again, 1, 6), *answers(again)])


def test_keys_and_values_of_a_layer_can_be_read(cache):
    for layer in packed_layers(cache):
        for read, state in zip((layer.keys, layer.values), layer.states(), strict=True):
            window = layer.geometry.window
            seen = slice(None) if window is None else slice(1 - window, None)  # what attention may read
            assert torch.equal(read + 0, state.dequantize(layer.tokens)[:, :, seen])


def test_a_file_that_was_read_is_written_again_bit_for_bit(cache, tmp_path):
    first = kvpass.save_cache(cache, tmp_path / "first")
    again = kvpass.save_cache(kvpass.load_cache(first, cache.model), tmp_path / "again")
    assert first.read_bytes() == again.read_bytes()
    assert {file.name for file in tmp_path.iterdir()} == {"first", "again"}


def test_a_prompt_is_continued_by_generate_in_the_compiled_step(tmp_path):
    torch._dynamo.reset()
    model, ids = kvpass.apply(llama(), KIVI), tokens(2, 100)
    cache = filled(model, 0)
    with torch.no_grad():
        model(input_ids=ids[:, :-1], past_key_values=cache)
    loaded = kvpass.load_cache(kvpass.save_cache(cache, tmp_path / "prompt"), model)
    both = [model.generate(ids, past_key_values=c, max_new_tokens=20, do_sample=False) for c in (cache, loaded)]
    assert torch.equal(*both) and kvpass.explain(model).fused == 2


IN_ANOTHER_PROCESS = """
import sys
sys.path.insert(0, sys.argv[1])
import kvpass
from kvpass.schemes import KIVIConfig
from tiny import llama, tokens
model = kvpass.apply(llama(), KIVIConfig(group_size=8, residual=8), lowering="eager")
cache = kvpass.load_cache(sys.argv[2], model)
print(model.generate(tokens(2, 44), past_key_values=cache, max_new_tokens=20, do_sample=False).tolist())
"""


def test_another_process_goes_on_with_the_same_tokens(tmp_path):
    model, ids = kvpass.apply(llama(), KIVI, lowering="eager"), tokens(2, 44)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids[:, :-1], past_key_values=cache)
    path = kvpass.save_cache(cache, tmp_path / "prompt")
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS, str(Path(__file__).parent), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    here = model.generate(ids, past_key_values=cache, max_new_tokens=20, do_sample=False)
    assert done.stdout.strip().splitlines()[-1] == str(here.tolist())


def test_a_file_is_little_larger_than_its_tokens(tmp_path):
    model = kvpass.apply(llama(layers=1), KIVI, lowering="eager")
    cache = filled(model, 1000)
    size = kvpass.save_cache(cache, tmp_path / "cache").stat().st_size
    used = sum(t.nbytes for layer in cache.layers for s in layer.states() for t in s.contents(1000).values())
    assert used < size < used + 7000 and used <= kvpass.nbytes(cache)


@pytest.mark.parametrize("seed", range(40))
def test_flipped_bits_are_detected(seed, saved, tmp_path):
    """Or has no effect."""
    model, path, expected = saved
    data, draw = bytearray(path.read_bytes()), random.Random(seed)
    header = 8 + int.from_bytes(data[:8], "little")
    place = draw.randrange(8) if seed < 4 else draw.randrange(header) if seed % 2 else draw.randrange(len(data))
    data[place] ^= 1 << draw.randrange(8)
    (tmp_path / "flipped").write_bytes(data)
    try:
        cache = kvpass.load_cache(tmp_path / "flipped", model)
    except KVPassError:
        return
    cache.model = model
    assert same(answers(cache), expected)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model, the file of a cache, and the results of calls over that cache."""
    model = kvpass.apply(llama(), KIVI, lowering="eager")
    cache = filled(model, 43)
    return model, kvpass.save_cache(cache, tmp_path_factory.mktemp("saved") / "cache"), answers(cache)


OTHERS = {
    "scheme": lambda: kvpass.apply(llama(), IdentityConfig(residual=8), lowering="eager"),
    "weights": lambda: kvpass.apply(llama(seed=1), KIVI, lowering="eager"),
    "layers": lambda: kvpass.apply(llama().double().bfloat16(), KIVI, lowering="eager"),
    "model": lambda: kvpass.apply(ZOO["Qwen2"].model("sdpa"), KIVI, lowering="eager"),
    "kvpass is not applied": llama,
}


@pytest.mark.parametrize("what", OTHERS)
def test_the_cache_of_another_model_scheme_or_dtype_is_refused(what, saved):
    with pytest.raises(KVPassError, match=what):
        kvpass.load_cache(saved[1], OTHERS[what]())


def adapted():
    """A model with two adapters, the first of them active, and kvpass applied."""
    model = llama()
    for name, seed in (("a", 1), ("b", 2)):
        config = peft.LoraConfig(r=2, target_modules=["k_proj"], init_lora_weights=False)
        torch.manual_seed(seed)
        model = model if name == "b" else peft.get_peft_model(model, config, adapter_name=name)
        if name == "b":
            model.add_adapter(name, config)
    return kvpass.apply(model.eval(), KIVI, lowering="eager")


def scaled(model):
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["a"] *= 2


CHANGES = {
    "_active_adapter was ['a'], but is ['b']": lambda model: model.set_adapter("b"),
    "_disable_adapters was False": lambda model: model.base_model.disable_adapter_layers(),
    "merged_adapters was []": lambda model: model.merge_adapter(),
    "k_proj.scaling was": scaled,
    "config.rope_parameters.factor": lambda model: model.config.rope_parameters.update(factor=2.0),
    "config.sliding_window": lambda model: setattr(model.config, "sliding_window", 4),
    "self_attn.scaling": lambda model: setattr(model.model.layers[1].self_attn, "scaling", 0.5),
}


@pytest.mark.parametrize("what", CHANGES)
def test_settings_that_change_results_are_compared_and_named(what, tmp_path):
    model = adapted()
    decoder = model.get_base_model()
    path = kvpass.save_cache(filled(decoder, 20), tmp_path / "cache")
    kvpass.load_cache(path, adapted())
    CHANGES[what](decoder if what.startswith(("config", "self_attn")) else model)
    with pytest.raises(KVPassError, match=f"{re.escape(what)}.* here.*Restore that adapter or setting"):
        kvpass.load_cache(path, model)


def test_a_calibration_is_for_the_adapter_it_was_made_with():
    model = adapted()
    layers = probe(kvpass.remove(model).get_base_model())
    described = describe(model.get_base_model(), layers)
    made = Calibration(QAQConfig(query_energy=[1.0, 2.0]), {}, described, {}, {})
    made.check(model.get_base_model(), layers)
    model.set_adapter("b")
    with pytest.raises(KVPassError, match=r"This calibration was.*_active_adapter was \['a'\], but is \['b'\] here"):
        made.check(model.get_base_model(), layers)


def test_the_dtype_of_autocast_is_compared(saved):
    model, path, _ = saved
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(KVPassError, match=r"autocast was None, but is 'torch.b"):
        kvpass.load_cache(path, model)


def test_settings_that_change_no_results_are_not_compared(saved):
    model, path = llama(), saved[1]
    before = settings(model)
    model.config.use_cache, model.config.pad_token_id, model.config._name_or_path = False, 3, "elsewhere"
    model.config._attn_implementation, model.generation_config.max_length = "eager", 99
    model.model.layers[0].calls, model.model.rotary_emb.max_seq_len_cached = 7, 8192
    model.train().eval().model.layers[0].register_forward_hook(lambda *_: None)
    assert settings(model) == before
    kvpass.load_cache(path, kvpass.apply(model, KIVI, lowering="eager"))


def test_files_of_an_older_format_say_what_to_do(saved, tmp_path, monkeypatch):
    cache = kvpass.load_cache(saved[1], saved[0])
    monkeypatch.setattr("kvpass.runtime.saved._FORMAT", 2)
    kvpass.save_cache(cache, tmp_path / "old")
    monkeypatch.undo()
    with pytest.raises(KVPassError, match=r"format 2.*run the prompt again.*adapters"):
        kvpass.load_cache(tmp_path / "old", saved[0])


@pytest.mark.parametrize("what", ["cannot be read", "not a safetensors file", "no packed cache", "modified"])
def test_files_that_are_no_cache_are_refused(what, saved, tmp_path):
    model, path, _ = saved
    file = tmp_path / "file"
    if what == "not a safetensors file":
        file.write_bytes(path.read_bytes()[:-100])
    elif what == "no packed cache":
        save_file({"x": torch.zeros(3)}, file)
    elif what == "modified":
        save_file({"x": torch.zeros(3)}, file, {"kvpass": "[]"})
    with pytest.raises(KVPassError, match=what):
        kvpass.load_cache(file, model)


def test_refusals_to_save_leave_the_existing_file(saved, tmp_path, monkeypatch):
    model, path = saved[0], tmp_path / "cache"
    path.write_text("before")
    with pytest.raises(KVPassError, match="not packed"):
        kvpass.save_cache(DynamicCache(config=model.config), path)
    cache = filled(model, 20)
    cache.reset()
    with pytest.raises(KVPassError, match="empty"):
        kvpass.save_cache(cache, path)
    cache = filled(model, 20)
    cache.layers[1].cache.whole = False
    with pytest.raises(KVPassError, match="inconsistent"):
        kvpass.save_cache(cache, path)
    monkeypatch.setattr("kvpass.runtime.saved.save_file", lambda tensors, file, _: (Path(file).touch(), 1 / 0))
    with pytest.raises(ZeroDivisionError):
        kvpass.save_cache(filled(model, 20), path)
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_layers_of_other_kinds_are_not_saved():
    model = kvpass.apply(ZOO["Qwen3-Next"].model("sdpa"), KIVI, lowering="eager")
    with pytest.raises(KVPassError, match="LinearAttentionLayer"):
        kvpass.save_cache(filled(model, 20), "cache")


def test_the_cache_of_a_model_that_kvpass_was_removed_from_is_not_saved():
    model = kvpass.apply(llama(), KIVI, lowering="eager")
    cache = filled(model, 20)
    kvpass.remove(model)
    with pytest.raises(KVPassError, match="removed"):
        kvpass.save_cache(cache, "cache")

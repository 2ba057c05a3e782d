"""Calibration: fitting predictors, saving them, and running a model with them."""

import copy
import dataclasses
import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import DynamicCache, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import kvpass
from kvpass import KVPassError, schemes
from kvpass.calibration import default_texts
from kvpass.calibration import fit as fitting
from kvpass.calibration.datatypes import collect_gradients, rope_between
from kvpass.calibration.default_texts import reading_for
from kvpass.calibration.own_words import TOKENS, own_words
from kvpass.cli.shared import scheme as cli_scheme
from kvpass.codec.predictor import matrix
from kvpass.codec.rope import rotate
from kvpass.eval.quality import packed
from kvpass.progress import bar
from kvpass.schemes import hub
from kvpass.schemes.calibrated import Calibration

from tiny import llama, tokens

pytestmark = pytest.mark.usefixtures("nothing_compiled")

SMALL = dict(scheme="aqua", residual=32)
SHARING = dict(scheme="xquant", kq=0, vq=0, km=0, vm=0)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


# ---------------------------------------------------------------- calibrate


def data(count=4, length=200):
    return [tokens(1, length, seed=i) for i in range(count)]


@pytest.fixture(scope="module")
def calibrated():
    torch._dynamo.reset()
    model = llama(layers=3)
    return model, kvpass.calibrate(model, data(), SMALL, progress=False)


def test_results_contain_the_measurements(calibrated):
    model, calibration = calibrated
    assert set(calibration.predictors) == set(calibration.explained) == {1, 2}
    assert all(0.3 < share <= 1 for both in calibration.explained.values() for share in both)
    assert calibration.scheme.first_layer != "auto" and len(calibration.facts["first_layer"]) == 3
    assert not hasattr(model, "_kvpass")
    bits = calibration.bits_saved
    shares = [s for both in calibration.explained.values() for s in both]
    assert math.isclose(bits, sum(-math.log(1 - s, 4) for s in shares) / 6, rel_tol=1e-9)
    values = 3 * 2 * 2 * 32
    tokens_then = calibration.pays_off_at
    assert 8 * calibration.nbytes <= tokens_then * values * bits < 8 * calibration.nbytes + values * bits


def test_residuals_fitted_on_reconstructions_are_smaller_than_those_of_the_mean(calibrated):
    """On the calibration sequences, with dequantized inputs of each layer."""
    model, _ = calibrated
    calibration = kvpass.calibrate(model, data(2), {**SMALL, "predictor": "linear"}, progress=False)
    assert all(share > 0 for both in calibration.explained.values() for share in both)


@pytest.mark.parametrize("predictor", ["linear", "linear-4", "low-rank"])
def test_an_input_that_is_left_out_has_weights_of_zero(predictor):
    width = 2 * 32
    for values_from, unused in (("keys", slice(None, width)), ("values", slice(width, None))):
        fields = dict(predictor=predictor, values_from=values_from, first_layer="higgs-4")
        calibration = kvpass.calibrate(llama(layers=2), data(2), {**SMALL, **fields}, progress=False)
        first = matrix(calibration.predictors[1][1][: 3 if predictor == "linear-4" else 1])
        assert not first[:, unused].any() and first.any()
        assert matrix(calibration.predictors[1][0][: 3 if predictor == "linear-4" else 1]).any(0).all()


def test_a_bias_alone_is_the_mean_of_the_tokens_that_are_packed(tmp_path):
    fields = dict(predictor="bias", rope="post", first_layer="identity", backbone="identity")
    model, sequences = llama(layers=2), data(2, 4 + 64)
    calibration = kvpass.calibrate(model, sequences, {**SMALL, **fields}, progress=False)
    (bias,), (of_values,) = calibration.predictors[1]
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=sequences[0], past_key_values=cache)
    for found, exact in ((bias, cache.layers[1].keys), (of_values, cache.layers[1].values)):
        torch.testing.assert_close(found.float(), exact[0, :, 4:].mean(1).flatten(), atol=1e-3, rtol=1e-3)
    assert calibration.explained[1][0] < 0.2
    calibration.save(tmp_path)
    kvpass.apply(model, kvpass.load(tmp_path), lowering="eager")


def test_a_network_normalizes_all_inputs_together_and_takes_all():
    for fields in (dict(values_from="keys"), dict(layers_below=(1, 2))):
        with pytest.raises(KVPassError, match="use values_from='both' and layers_below"):
            kvpass.schemes.get("aqua", predictor="mlp", **fields)


def test_predictors_read_the_layers_below_that_are_asked_for(tmp_path):
    width = 2 * 32
    fields = dict(predictor="linear", layers_below=(2,), first_layer="higgs-4")
    calibration = kvpass.calibrate(llama(layers=4), data(2), {**SMALL, **fields}, progress=False)
    for layer, below in ((1, 0), (2, 1), (3, 1)):  # the lowest layer stands for those that are missing
        for role, weights in enumerate(calibration.predictors[layer]):
            read = matrix(weights[:1]).unflatten(1, (2 + role, width)).abs().sum((0, 2)) > 0
            assert read.tolist() == [i == below for i in range(2)] + [True] * role
    assert_same(kvpass.load(calibration.save(tmp_path)), calibration)


@pytest.mark.slow
@pytest.mark.parametrize("below", [(1,), (1, 2), (2,)])
@torch.no_grad()
def test_layers_dequantize_to_what_calibration_saw(calibrated, below, monkeypatch):
    """The chain of layers on which predictors were fitted equals the one that a cache dequantizes, up to 16-bit
    rounding in files."""
    model, calibration = calibrated
    kept = {}
    original = fitting._Chain._dequantize

    def spy(self, part, *args):
        out = original(self, part, *args)
        kept[part.layer, part.role] = self._load(0, part.layer, part.role)
        return out

    monkeypatch.setattr(fitting._Chain, "_dequantize", spy)
    config = kvpass.schemes.get(calibration.scheme, predictor="linear", layers_below=below)
    again = kvpass.calibrate(model, data(), config, progress=False)
    with packed(model, again):
        cache = DynamicCache(config=model.config)
        model(input_ids=data()[0], past_key_values=cache)
        for (layer, role), expected in kept.items():
            state = cache.layers[layer].states()[role]
            got = state.dequantize(200)[:, :, 4 : 4 + state.spec.retention.packed(200)]
            apart = (got - expected).square().sum() / expected.square().sum()
            assert apart < 5e-3  # a value at the edge of its cell may round to the other side


@pytest.mark.slow
def test_an_interrupted_calibration_goes_on_and_another_scheme_starts_with_its_keys(tmp_path, monkeypatch):
    model, calls = llama(layers=3), []
    reference = kvpass.calibrate(model, data(), SMALL, progress=False)

    def count(_, args, kwargs):
        calls.append(kwargs["input_ids"].shape[1])

    model.register_forward_pre_hook(count, with_kwargs=True)
    fits, original = [], fitting.fit

    def failing(*args, **kwargs):
        if len(fits) == 2:
            raise KeyboardInterrupt
        fits.append(1)
        return original(*args, **kwargs)

    chosen = kvpass.schemes.get(SMALL, first_layer=reference.scheme.first_layer)
    monkeypatch.setattr(fitting, "fit", failing)
    with pytest.raises(KeyboardInterrupt):
        kvpass.calibrate(model, data(), chosen, work=tmp_path, progress=False)
    assert calls.count(200) >= 1
    monkeypatch.setattr(fitting, "fit", original)
    calls.clear()
    resumed = kvpass.calibrate(model, data(), chosen, work=tmp_path, progress=False)
    assert calls.count(200) == 0  # only the probe ran
    assert_same(resumed, reference)
    kvpass.calibrate(model, data(), {**SMALL, "predictor": "low-rank"}, work=tmp_path, progress=False)
    assert calls.count(200) == 0


def test_keys_and_values_of_few_layers_at_once_give_the_same_calibration(tmp_path, monkeypatch):
    model, most = llama(layers=4), []
    scheme = {**SMALL, "first_layer": "identity", "fit_on": "original"}
    reference = kvpass.calibrate(model, data(), scheme, progress=False)
    original = fitting.Collected.read

    def read(self, *args):
        found = original(self, *args)
        most.append(len({path.stem.split("-", 2)[2] for path in tmp_path.glob("*/sequence-*.safetensors")}))
        return found

    monkeypatch.setattr(fitting.Collected, "read", read)
    options = dict(work=tmp_path, progress=False)
    assert_same(kvpass.calibrate(model, data(), scheme, layers_at_once=1, **options), reference)
    assert max(most) == 2
    with pytest.raises(KVPassError, match="layers_at_once=0 must be an integer"):
        kvpass.calibrate(model, data(), scheme, layers_at_once=0, **options)


def assert_same(a: Calibration, b: Calibration):
    assert a.scheme == b.scheme and a.model == b.model and a.explained == b.explained
    for layer in b.predictors:
        for mine, theirs in zip(a.predictors[layer], b.predictors[layer], strict=True):
            assert len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))


SHARED_OUT = dict(scheme="waterfill-static", residual=32, recent=32)


@torch.no_grad()
def test_without_data_a_model_is_calibrated_on_what_it_writes():
    model, state = llama(layers=2), torch.random.get_rng_state()
    model.lm_head.weight *= 20  # far from uniform
    texts = own_words(model)
    assert [ids.shape for ids in texts] == [(512,)] * 8 and torch.equal(torch.random.get_rng_state(), state)
    for text in torch.cat(texts).view(-1, TOKENS)[:4]:
        chances = model(text[None]).logits[0, :-1].log_softmax(-1)
        assert chances[range(TOKENS - 1), text[1:]].mean() > chances.mean() + 1  # not written at random
    found, same = (kvpass.calibrate(model, ids, SHARED_OUT, progress=False) for ids in (None, texts))
    assert_same(found, same)


def test_a_model_that_cannot_write_needs_token_ids():
    with pytest.raises(KVPassError, match=r"pass token ids"):
        own_words(torch.nn.Linear(2, 2))


def test_given_a_tokenizer_the_texts_that_come_with_kvpass_are_read(monkeypatch):
    monkeypatch.setattr(default_texts.texts, "read", lambda source: f"{source} " * 4000)
    words = {name: number for number, name in enumerate(["<unk>", *default_texts.texts.to_calibrate()])}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "<unk>")), unk_token="<unk>")
    tokenizer.backend_tokenizer.pre_tokenizer = WhitespaceSplit()
    sequences = reading_for(schemes.get("waterfill")).sequences(tokenizer)
    assert [ids.unique().tolist() for ids in sequences] == [[i] for i in range(1, len(words)) for _ in range(4)]
    model = llama(layers=2)
    given = tokenizer, SimpleNamespace(tokenizer=tokenizer), sequences  # the second one is like a processor
    *found, same = (kvpass.calibrate(model, data, SHARED_OUT, progress=False) for data in given)
    for each in found:
        assert_same(each, same)


def test_texts_have_to_be_tokenized():
    with pytest.raises(KVPassError, match="token ids, not text"):
        kvpass.calibrate(llama(layers=2), ["some text", "and more"], SHARED_OUT)


def test_a_reading_shorter_than_a_sequence_is_refused():
    with pytest.raises(KVPassError, match="less than one sequence"):
        dataclasses.replace(reading_for(schemes.get("aqua")), tokens=1000)


def test_keys_with_a_bias_are_centred_in_the_first_layer():
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, bos_token_id=1, eos_token_id=None,
        )
    ).eval()  # fmt: skip
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.k_proj.bias, std=20)
    calibration = kvpass.calibrate(model, data(), SMALL, progress=False)
    first = calibration.scheme.first_layer
    assert first.name == "identity" or first.center
    raw, *_ = calibration.facts["first_layer"].values()
    assert raw[0] > 0.1  # uncentred, the first layer's own error


@pytest.mark.parametrize(
    "arguments, says",
    [
        (dict(data=data(1)), "at least 2 sequences"),
        (dict(data=[tokens(1, 50)] * 3), "of at least 68 tokens"),
        (dict(data=torch.rand(3, 100)), "takes integer token ids"),
        (dict(scheme="kivi"), "needs no calibration"),
        (
            dict(
                scheme={
                    "scheme": "aqua",
                    "backbone": {"scheme": "xquant", **dict.fromkeys(("kq", "vq", "km", "vm"), 0)},
                }
            ),
            "shares quantized values between layers",
        ),
    ],
)
def test_what_cannot_be_calibrated_is_refused(arguments, says):
    model = llama(layers=3)
    with pytest.raises(KVPassError, match=says):
        kvpass.calibrate(model, **{"data": data(), "scheme": SMALL, **arguments}, progress=False)
    assert not hasattr(model, "_kvpass")


def test_a_packed_model_is_not_calibrated():
    with pytest.raises(KVPassError, match=r"kvpass.remove\(model\) first"):
        kvpass.calibrate(kvpass.apply(llama(), "kivi", lowering="eager"), data(), SMALL)


@pytest.mark.parametrize(
    "fields, says",
    [
        (dict(backbone="aqua"), "itself predicts from other layers"),
        (dict(predictor="cubic"), "There is no predictor"),
        (dict(predicted="neither"), "must be 'both'"),
        (dict(fit_on="thin air"), "must be 'reconstructed'"),
        (dict(ridge=-1.0), "must be from 0 to 1e6"),
        (dict(rank=0), "at least 1"),
        (dict(layers_below=()), "in ascending order"),
        (dict(layers_below=(2, 1)), "in ascending order"),
        (dict(layers_below=(0, 1)), "from 1 to 8"),
    ],
)
def test_impossible_configs_are_refused(fields, says):
    with pytest.raises(KVPassError, match=says):
        kvpass.schemes.get("aqua", **fields)


# ---------------------------------------------------------------- files


def test_calibrations_survive_saving_and_loading(calibrated, tmp_path):
    model, calibration = calibrated
    folder = calibration.save(tmp_path / "new")
    assert sorted(file.name for file in folder.iterdir()) == ["calibration.json", "predictors.safetensors"]
    assert_same(kvpass.load(folder), calibration)
    with packed(model, kvpass.load(folder), strict=True):
        assert kvpass.explain(model).packed == 3


class LocalHub:
    """Stands in for `huggingface_hub`: repositories are folders, and revisions are their copies."""

    def __init__(self, root):
        self.root = root

    def HfApi(self):
        return self

    def create_repo(self, repo, private, exist_ok):
        (self.root / repo).mkdir(parents=True, exist_ok=exist_ok)

    def upload_folder(self, *, repo_id, folder_path, path_in_repo, revision, allow_patterns, commit_message):
        target = self.root / repo_id / (path_in_repo or "")
        target.mkdir(parents=True, exist_ok=True)
        for name in allow_patterns:
            shutil.copy(folder_path / name, target)
        return f"https://hub/{repo_id}/commit/1"

    def snapshot_download(self, repo, *, revision, allow_patterns):
        if not (self.root / repo).is_dir():
            raise FileNotFoundError(f"no repository {repo}")
        for name in allow_patterns:
            assert (self.root / repo / name).is_file()
        return str(self.root / repo)


def test_the_hub_keeps_calibrations_by_name(calibrated, tmp_path, monkeypatch):
    _, calibration = calibrated
    monkeypatch.setattr(hub, "huggingface_hub", LocalHub(tmp_path))
    assert "owner/model" in calibration.push("hub:owner/model/aqua")
    assert_same(kvpass.load("hub:owner/model/aqua"), calibration)
    assert_same(cli_scheme("hub:owner/model/aqua@main"), calibration)
    assert hub.HubName.of("hub:a/b.c/d/e@v1.0") == ("a/b.c", "d/e", "v1.0")
    with pytest.raises(KVPassError, match="hub:owner/other cannot be downloaded: no repository owner/other"):
        kvpass.load("hub:owner/other")
    for name in ("hub:", "hub:owner", "hub:a/b/../../c", "hub:a/b@"):
        with pytest.raises(KVPassError, match="is not of the form hub:owner/name"):
            calibration.push(name)
    (tmp_path / "owner/model/aqua/predictors.safetensors").write_bytes(b"")
    with pytest.raises(KVPassError, match="is truncated or was modified"):
        kvpass.load("hub:owner/model/aqua")


def damage(folder, how):
    tensors, facts = folder / "predictors.safetensors", folder / "calibration.json"
    content = json.loads(facts.read_text())
    if how == "missing":
        tensors.unlink()
    elif how == "truncated":
        tensors.write_bytes(tensors.read_bytes()[:-100])
    elif how == "altered":
        changed = load_file(tensors)
        save_file({name: tensor + tensor for name, tensor in changed.items()}, tensors)
    elif how == "no JSON":
        facts.write_text(facts.read_text()[:-30])
    elif how == "another format":
        facts.write_text(json.dumps({**content, "format": 99}))
    elif how == "another scheme version":
        facts.write_text(json.dumps({**content, "scheme": {**content["scheme"], "version": 99}}))
    elif how == "a list":
        facts.write_text("[1, 2]")
    elif how == "incomplete":
        del content["explained"]
        facts.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "how, says",
    [
        ("missing", "holds no calibration: No such file"),
        ("truncated", "is truncated or was modified"),
        ("altered", "is truncated or was modified"),
        ("no JSON", "is not valid JSON"),
        ("another format", "format 99"),
        ("another scheme version", "version 99"),
        ("a list", "format None"),
        ("incomplete", "Calibrate again"),
    ],
)
def test_damaged_files_are_refused(calibrated, tmp_path, how, says):
    folder = calibrated[1].save(tmp_path)
    damage(folder, how)
    with pytest.raises(KVPassError, match=says):
        kvpass.load(folder)


def test_calibrations_of_other_models_are_refused(calibrated):
    _, calibration = calibrated
    for other in (llama(layers=3, seed=1), llama(layers=2), llama(layers=3, kv_heads=4)):
        with pytest.raises(KVPassError, match="made for another model"):
            kvpass.apply(other, calibration)
        assert not hasattr(other, "_kvpass")


@pytest.mark.slow
def test_the_same_weights_in_another_dtype_are_the_same_model(calibrated):
    model, calibration = calibrated
    half = copy.deepcopy(model).to(torch.bfloat16)
    with packed(half, calibration):
        out = half.generate(tokens(1, 90), max_new_tokens=3, do_sample=False)
    assert out.shape == (1, 93)


def test_a_scheme_without_its_calibration_says_what_to_do():
    with pytest.raises(KVPassError, match=r"kvpass.calibrate\(model, tokenizer, 'aqua'\)"):
        kvpass.apply(llama(), "aqua")


# ---------------------------------------------------------------- in a model


def generate(model, batch=2, prompt=70, new=40, padding=0):
    ids, mask = tokens(batch, prompt), torch.ones(batch, prompt, dtype=torch.long)
    ids[0, :padding], mask[0, :padding] = 0, 0
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=new, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    return out.sequences, torch.stack(out.logits), out.past_key_values


@pytest.mark.slow
@pytest.mark.nightly_cases("pre-*")
@pytest.mark.compiles
@pytest.mark.parametrize("rope, padding", [("pre", 9), ("post", 0)])
def test_generate_is_one_graph_and_equals_the_eager_path(rope, padding):
    """While pages are packed, also with left padding."""
    model = llama(layers=3)
    calibration = kvpass.calibrate(model, data(), {**SMALL, "rope": rope}, progress=False)
    with packed(model, calibration, strict=True):
        sequences, logits, cache = generate(model, padding=padding)
        report = kvpass.explain(model)
        decoding = [graph for graph in report.graphs if graph.compiled]
        assert len(decoding) == 1 and (decoding[0].fused, decoding[0].reconstructed, decoding[0].decoded) == (3, 3, 0)
        assert report.nbytes == kvpass.nbytes(cache)
        assert f"pay off from {calibration.pays_off_at:,} tokens on" in str(report)
        assert report.calibration_nbytes == calibration.nbytes
    torch._dynamo.reset()
    if rope == "post":  # before rotary embedding, prefill is always captured
        with packed(model, calibration, lowering="eager"):
            again, expected, other = generate(model, padding=padding)
        assert torch.equal(sequences, again)
        torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)
        for mine, theirs in zip(cache.layers, other.layers, strict=True):
            torch.testing.assert_close(mine.keys, theirs.keys, atol=1e-3, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.compiles
@torch.no_grad()
def test_a_lossless_backbone_gives_the_untouched_model():
    model = llama(layers=3)
    _, expected, _ = generate(model, padding=9)
    torch._dynamo.reset()
    scheme = dict(SMALL, backbone="identity", first_layer="identity")
    with packed(model, kvpass.calibrate(model, data(), scheme, progress=False)):
        _, logits, _ = generate(model, padding=9)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_copies_of_a_cache_share_the_predictors(calibrated):
    model, calibration = calibrated
    with packed(model, calibration):
        _, _, cache = generate(model)
        other = copy.deepcopy(cache)
        mine, theirs = (c.layers[2].key_state.predictor for c in (cache, other))
        assert all(a is b for a, b in zip(mine, theirs, strict=True))
        assert torch.equal(cache.layers[2].keys, other.layers[2].keys)
        assert kvpass.nbytes(cache) == kvpass.nbytes(other)


@torch.no_grad()
def test_cropping_beyond_the_window_restores_dequantized_tokens(calibrated):
    model, calibration = calibrated
    with packed(model, calibration):
        cache = DynamicCache(config=model.config)
        model(input_ids=tokens(1, 120), past_key_values=cache)
        before = [[x.clone() for x in (layer.keys, layer.values)] for layer in cache.layers]
        with pytest.warns(UserWarning, match="beyond the residual window"):
            cache.crop(-50)
        for layer, pair in zip(cache.layers, before, strict=True):
            for now, then in zip((layer.keys, layer.values), pair, strict=True):
                torch.testing.assert_close(now, then[:, :, :70], atol=1e-6, rtol=1e-6)


@torch.no_grad()
def test_a_forward_that_breaks_is_refused_or_runs_uncaptured(calibrated):
    """Keys stored before rotary embedding need a graph. With keys stored after it, the result equals the eager
    lowering."""
    model, calibration = calibrated
    layer = model.model.layers[1].self_attn
    original = layer.forward

    def breaking(*args, **kwargs):
        torch._dynamo.graph_break()
        return original(*args, **kwargs)

    def of(rope):
        scheme = kvpass.schemes.get(calibration.scheme, rope=rope)
        return Calibration(scheme, calibration.predictors, calibration.model, calibration.explained, {})

    with packed(model, of("post"), lowering="eager"):
        expected = generate(model)[1]
    layer.forward = breaking
    try:
        with packed(model, of("pre")), pytest.raises(KVPassError, match=r"from the layer below.*Use scheme='kivi'"):
            generate(model)
        with packed(model, of("post")):
            assert torch.allclose(generate(model)[1], expected, atol=1e-4)
            assert "steps are not compiled" in str(kvpass.explain(model))
    finally:
        del layer.forward


def test_the_first_packed_layer_needs_none_below():
    """Whatever its index: earlier layers may stay in full precision."""
    geometry = kvpass.schemes.LayerGeometry(5, 8, 2, 32, torch.float32, torch.device("cpu"))
    assert not kvpass.schemes.get("aqua").plan(geometry).looks_at_previous


# ---------------------------------------------------------------- datatypes


def test_gradients_of_keys_are_those_before_rotary_embedding(tmp_path):
    """Against finite differences of the loss with respect to the keys before rotary embedding."""
    model, ids = llama().double(), tokens(1, 24)
    projection, at = model.model.layers[1].self_attn.k_proj, [(5, 3), (17, 40), (22, 20)]
    layers = [0, 1]
    (file,) = collect_gradients(model, [ids], layers, tmp_path, bar("", 1, "", False).__enter__())
    found = load_file(file)["1.0"].float()

    def run(token=0, channel=0, by=0.0):
        """The loss with one key changed, and the keys before and after rotary embedding with their tables."""
        seen = []

        def moved(_, inputs, out):
            out = out.clone()
            out[0, token, channel] += by
            seen.append(out.detach().view(1, ids.shape[1], 2, -1).transpose(1, 2))
            return out

        hook, cache = projection.register_forward_hook(moved), DynamicCache(config=model.config)
        with torch.no_grad():
            logits = model(ids, past_key_values=cache).logits
        hook.remove()
        return torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum"), seen[0], cache

    _, before, cache = run()
    x = torch.zeros(1, ids.shape[1], 1)
    cos, sin = model.model.rotary_emb(x, torch.arange(ids.shape[1])[None])
    half = cos.shape[-1] // 2
    rope = rope_between(before.float(), cache.layers[1].keys.float(), cos[..., :half], sin[..., :half])
    assert rope == f"half-{half}"
    turned_back = rotate(found, cos[..., :half], -sin[..., :half], rope)
    for token, channel in at:
        up, down = (run(token, channel, by)[0] for by in (1e-4, -1e-4))
        head, inside = divmod(channel, before.shape[-1])
        assert float(turned_back[0, head, token, inside]) == pytest.approx(float(up - down) / 2e-4, rel=2e-2, abs=1e-3)


@pytest.mark.slow
@pytest.mark.nightly_cases("fields1")
@pytest.mark.compiles
@pytest.mark.parametrize("fields", [dict(), dict(rope="post", bits=3, skip_layers=(1, 0))])
def test_a_calibrated_datatype_generates_compiled_what_it_does_eagerly(fields, tmp_path):
    model = llama(layers=3)
    calibration = kvpass.calibrate(model, data(2), {"scheme": "kvquant-calibrated", **fields}, progress=False)
    assert_same(kvpass.load(calibration.save(tmp_path)), calibration)
    ids, mask, runs = tokens(2, 70), torch.ones(2, 70, dtype=torch.long), []
    mask[1, :13] = 0
    for lowering in ("auto", "eager"):
        kvpass.apply(model, calibration, lowering=lowering)
        how = dict(do_sample=False, max_new_tokens=30, return_dict_in_generate=True, output_logits=True)
        out, report = model.generate(input_ids=ids, attention_mask=mask, **how), kvpass.explain(model)
        runs.append((torch.stack(out.logits), out.past_key_values))
        kvpass.remove(model)
        if lowering == "auto":
            assert report.packed == report.fused == 3 and report.calibration.startswith("datatypes")
            (step,) = (graph for graph in report.graphs if graph.compiled)
            assert step.lowerings["attend"] == "inductor"
    torch.testing.assert_close(runs[0][0], runs[1][0], atol=1e-4, rtol=1e-4)
    exact = model(ids, attention_mask=mask, use_cache=True).past_key_values
    for layer, plain in zip(runs[0][1].layers, exact.layers, strict=True):
        values = layer.value_state.dequantize(70)[0, :, :70]
        assert (values - plain.values[0]).norm() < 0.5 * plain.values[0].norm()


def test_tensors_of_a_datatype_are_checked():
    model = llama()
    calibration = kvpass.calibrate(model, data(2), "kvquant-calibrated", progress=False)
    (points, ranges), values = calibration.predictors[0]
    for wrong in (([points], values), ([points, ranges[:1]], values), ([points, ranges * float("nan")], values)):
        with pytest.raises(KVPassError, match="key tensors of layer 0"):
            dataclasses.replace(calibration, predictors={**calibration.predictors, 0: wrong})
    with pytest.raises(KVPassError, match="must be calibrated on the model first"):
        kvpass.apply(model, "kvquant-calibrated")

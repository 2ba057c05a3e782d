"""Perplexity in windows: each token once, pooled, resumable, and equal to decoding token by token."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpass import KVPassError
from kvpass.cli import main
from kvpass.eval.text_windows import Perplexity, perplexities, windows
from kvpass.schemes import AsymKVConfig, KIVIConfig, XQuantConfig

from tiny import llama, step_by_step, tokens

pytestmark = pytest.mark.usefixtures("nothing_compiled")

KIVI = KIVIConfig(residual=16, group_size=16)


@given(st.integers(2, 300), st.integers(2, 64), st.integers(1, 64))
def test_windows_score_each_token_but_the_first_once_after_a_full_context(length, context, stride):
    stride = min(stride, context)
    parts = list(windows(length, context, stride))
    assert [t for _, scored, end in parts for t in range(scored, end)] == list(range(1, length))
    for begin, scored, end in parts:
        assert 0 <= begin < scored < end <= length and end - begin <= max(context, stride + 1)
        assert begin == 0 or end - begin >= min(context, stride + 1)


@torch.no_grad()
def test_full_precision_is_the_mean_of_all_tokens_and_a_scheme_that_of_decoding():
    model, ids = llama(), tokens(1, 150)
    found = perplexities(model, ids, {"full": None, "kivi": KIVI}, 64, 32, progress=False)
    full, kivi = [], []
    for begin, scored, end in windows(150, 64, 32):
        window = ids[:, begin:end]
        logits = model(input_ids=window).logits[0].double().log_softmax(-1)
        full += [-logits[t - 1, window[0, t]].item() for t in range(scored - begin, end - begin)]
        decoded, *_ = step_by_step(model, KIVI, window[:, :-1], max(1, scored - begin - 1), lowering="eager")
        rows = decoded[0].double().log_softmax(-1)[-(end - scored) :]
        kivi += [-row[token].item() for row, token in zip(rows, window[0, scored - begin :], strict=True)]
    assert found["full"].value == pytest.approx(math.exp(sum(full) / 149), rel=1e-4)
    assert found["kivi"].value == pytest.approx(math.exp(sum(kivi) / 149), rel=1e-4)
    assert found["kivi"].ratio(found["full"])[0] != pytest.approx(1, abs=1e-6)


@pytest.mark.slow
def test_schemes_that_take_many_passes_are_decoded():
    same = dict(residual=16, group_size=16, depth=None)
    schemes = {"xquant": XQuantConfig(**same, kq=2, vq=2, km=0, vm=0), "asymkv": AsymKVConfig(**same, l_k=2, l_v=2)}
    found = perplexities(llama(), tokens(1, 70), schemes, 40, progress=False)
    assert found["xquant"].counts == (39, 30) and found["xquant"].value != found["asymkv"].value


@pytest.mark.slow
def test_a_run_continues_from_its_file_and_refuses_those_of_others(tmp_path, monkeypatch):
    from kvpass.eval import text_windows as module

    model, ids, file = llama(), tokens(1, 100), tmp_path / "found.json"
    whole = perplexities(model, ids, {"kivi": KIVI}, 32, file=file, progress=False)
    written = json.loads(file.read_text())
    written["schemes"]["kivi"]["surprisals"] = written["schemes"]["kivi"]["surprisals"][:2]
    file.write_text(json.dumps(written))
    scored, original = [], module._sum
    monkeypatch.setattr(module, "_sum", lambda *args: scored.append(args) or original(*args))
    assert perplexities(model, ids, {"kivi": KIVI}, 32, file=file, progress=False) == whole
    assert len(scored) == len(whole["kivi"].counts) - 2 > 0
    with pytest.raises(KVPassError, match="same text, context and stride"):
        perplexities(model, ids, {"kivi": KIVI}, 33, file=file, progress=False)
    with pytest.raises(KVPassError, match="another scheme called 'kivi'"):
        perplexities(model, ids, {"kivi": None}, 32, file=file, progress=False)
    file.write_text("[]")
    with pytest.raises(KVPassError, match="holds no perplexities"):
        perplexities(model, ids, {"kivi": KIVI}, 32, file=file, progress=False)


def test_ratios_are_paired_by_window():
    one, other = Perplexity((2.0, 4.0), (2, 2)), Perplexity((1.0, 3.0), (2, 2))
    ratio, error = one.ratio(other)
    assert ratio == pytest.approx(math.exp(0.5)) and error == pytest.approx(0)
    with pytest.raises(KVPassError, match="same windows"):
        one.ratio(Perplexity((1.0,), (4,)))


@pytest.mark.parametrize("context, stride", [(1, 1), (8, 9)])
def test_impossible_windows_are_refused(context, stride):
    with pytest.raises(KVPassError, match="use a stride from 1"):
        perplexities(llama(), tokens(1, 20), {"full": None}, context, stride)


def test_the_command_prints_each_scheme_beside_full_precision(tmp_path, capsys, monkeypatch):
    from kvpass import models
    from kvpass.eval import texts

    monkeypatch.setattr(models, "load", lambda *args, **options: (llama(), None))
    monkeypatch.setattr(texts, "tokens", lambda tokenizer, source, count: tokens(1, count))
    file = tmp_path / "found.json"
    assert main(["perplexity", "--schemes", "kivi", "--tokens", "90", "--context", "64", "--resume", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["cache", "full", "kivi"] and "1.0000 ± 0.0000" in lines[1]
    assert len(json.loads(file.read_text())["schemes"]) == 2

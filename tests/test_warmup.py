"""After warmup nothing compiles again, whoever calls; and a call that waits for a compilation says so."""

import io
import sys
from contextlib import nullcontext

import pytest
import torch
from transformers import DynamicCache

import kvpass
from kvpass import KVPassError
from kvpass.progress import announced, stage
from kvpass.schemes import KIVIConfig

from tiny import llama, tokens
from zoo import ZOO

pytestmark = pytest.mark.usefixtures("reference_in_this_test")


def captured(model):
    return [str(graph) for graph in kvpass.explain(model).graphs]


def generate(model, batch=1, padding=0, **options):
    ids = tokens(batch, 60)
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    return model.generate(ids, attention_mask=mask, max_new_tokens=8, min_new_tokens=8, do_sample=False, **options)


@pytest.mark.slow_cases("kivi*")
@pytest.mark.nightly_cases("kivi+h2o", "kivi")
@pytest.mark.parametrize("scheme", ["kivi", "kivi-pre", "kivi+h2o"])
def test_a_warm_model_captures_nothing(scheme):
    model = kvpass.apply(llama(layers=1), scheme)
    kvpass.warmup(model, [1, 2, 3], padded=True, drafts="h2o" not in scheme).result()
    warm = captured(model)
    assert any("compiled" in graph for graph in warm)
    generate(model)
    for batch, padding in ((1, 3), (2, 0), (3, 5), (4, 5)):
        generate(model, batch, padding)
    if "h2o" not in scheme:
        generate(model, prompt_lookup_num_tokens=4)
    assert captured(model) == warm


@pytest.mark.slow_cases("inference_mode")
@pytest.mark.parametrize("mode", [nullcontext, torch.inference_mode])
def test_it_is_warm_for_calls_of_the_same_mode(mode):
    model = kvpass.apply(llama(layers=1), "kivi-pre")
    with mode():
        kvpass.warmup(model, turns=True)
        warm = captured(model)
        cache, seen = DynamicCache(config=model.config), 0
        for count in (50, 1, 1, 30, 1):
            positions = torch.arange(seen, seen := seen + count)[None]
            with torch.no_grad():
                model(input_ids=tokens(1, count), position_ids=positions, past_key_values=cache, logits_to_keep=1)
    assert captured(model) == warm


@pytest.mark.slow
def test_an_encoder_decoder_is_warmed_up():
    model = kvpass.apply(ZOO["BART"].model("sdpa"), KIVIConfig(group_size=8, residual=8))
    kvpass.warmup(model, padded=True)
    warm = captured(model)
    assert warm
    model.generate(tokens(1, 20), max_new_tokens=5, do_sample=False)
    assert captured(model) == warm


def test_background_warmup_is_awaited_and_passes_on_errors(monkeypatch):
    model = kvpass.apply(llama(layers=1), "kivi")
    done = kvpass.warmup(model, background=True)
    ids = generate(model)
    done.result()
    assert len(captured(model)) == 1
    kvpass.remove(model)
    model = kvpass.apply(llama(layers=1), "kivi", lowering="eager")
    assert torch.equal(ids, generate(model))

    kvpass.remove(model)
    kvpass.apply(model, "kivi")
    monkeypatch.setattr(type(model.model), "forward", None)
    with pytest.raises(TypeError):
        kvpass.warmup(model, background=True).result()


def test_the_report_ignores_warmup_caches():
    model = kvpass.apply(llama(layers=1), "kivi")
    kvpass.warmup(model)
    assert (kvpass.explain(model).tokens, kvpass.explain(model).nbytes) == (0, 0)


def test_what_cannot_be_warmed_up_is_refused():
    model = llama(layers=1)
    with pytest.raises(KVPassError):
        kvpass.warmup(model)
    kvpass.apply(model, "kivi")
    with pytest.raises(KVPassError, match="batch_sizes"):
        kvpass.warmup(model, [0])


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_only_on_a_terminal(terminal, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return terminal

    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    stage("nothing")
    with announced("a step of Llama"):
        stage("rewriting it")
        with announced("kernels of a cache"):
            pass
    shown = screen.getvalue()
    assert ("a step of Llama" in shown and "kernels of a cache" in shown and "kvpass.warmup" in shown) == terminal
    assert terminal or not shown

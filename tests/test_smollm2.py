"""The promises of the README on a real model: SmolLM2-135M-Instruct from a Python package, with real text."""

import copy
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import DynamicCache

import kvpass
from kvpass import models
from kvpass.codec import dequantize_pages, quantize_pages
from kvpass.codec.subspace import compensation_matrix, precision_matrix
from kvpass.eval import quality, texts
from kvpass.lowering.fit_sequence import fit_compensation
from kvpass.runtime.simulated import Simulator
from kvpass.schemes import LayerGeometry, get

pytestmark = [pytest.mark.model, pytest.mark.slow]


@pytest.fixture(scope="module")
def smollm2():
    torch._dynamo.reset()
    return models.load()


@pytest.fixture(scope="module")
def prose(smollm2):
    return texts.tokens(smollm2[1], "prose", 2048)


@torch.no_grad()
def step(model, token, cache):
    return model(input_ids=token, past_key_values=cache).logits[:, -1]


def one_step_compiled_and_eager(model, out):
    """Run one more step over the cache of ``out`` and over a copy; assert that logits agree, and return both caches."""
    cache = out.past_key_values
    other = copy.deepcopy(cache)
    compiled = step(model, out.sequences[:, -1:], cache)
    model._kvpass.eager = True
    eager = step(model, out.sequences[:, -1:], other)
    torch.testing.assert_close(compiled, eager, atol=1e-4, rtol=0)
    return cache, other


def test_three_hundred_tokens_are_one_decode_graph(smollm2, prose):
    model, _ = smollm2
    counters.clear()
    with quality.packed(model, "kivi"):
        out = model.generate(
            prose[:, :64], do_sample=False, min_new_tokens=300, max_new_tokens=300, return_dict_in_generate=True
        )
        report = kvpass.explain(model)
        assert out.sequences.shape == (1, 364)
        assert (report.packed, report.fused) == (30, 30)
        assert len(report.graphs) == 1 and report.graphs[0].decoded == 0
        assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]

        cache, other = one_step_compiled_and_eager(model, out)
        for mine, theirs in zip(cache.layers, other.layers, strict=True):
            for a, b in zip(mine.states(), theirs.states(), strict=True):
                used = a.spec.retention.pages(363)  # no page was due in this step
                assert torch.equal(a.codes[:, :, :used], b.codes[:, :, :used])
                assert torch.equal(a.scale[:, :, :used], b.scale[:, :, :used])
                torch.testing.assert_close(a.ring, b.ring, atol=1e-4, rtol=1e-4)


def attention_inputs(model, ids):
    """Queries and keys of every layer after RoPE, as passed to SDPA."""
    calls = []
    original = torch.nn.functional.scaled_dot_product_attention

    def spy(q, k, v, **kwargs):
        calls.append((q, k))
        return original(q, k, v, **kwargs)

    torch.nn.functional.scaled_dot_product_attention = spy
    try:
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
    finally:
        torch.nn.functional.scaled_dot_product_attention = original
    return calls


def test_squat_errs_less_than_kivi_in_the_query_subspace_of_real_keys(smollm2, prose):
    """Also for queries after the prompt: the subspace generalizes."""
    model, _ = smollm2
    prompt, total, better = 768, 1024, 0
    calls = attention_inputs(model, prose[:, :total])
    for q, k in calls:
        geometry = LayerGeometry(0, 1, k.shape[1], k.shape[3], k.dtype, k.device)
        squat, kivi = (kvpass.schemes.get(name).plan(geometry).key for name in ("squat", "kivi"))
        stacked = q.unflatten(1, (k.shape[1], -1))
        precision = precision_matrix(stacked[..., :prompt, :].flatten(2, 3), squat.quantizer.subspace)
        compensation = compensation_matrix(precision, squat.quantizer.subspace.block_size)
        keys = k[:, :, :prompt]
        error = {
            name: dequantize_pages(*quantize_pages(keys, spec, [compensation]), spec) - keys
            for name, spec in (("squat", squat), ("kivi", kivi))
        }
        later = stacked[..., prompt:, :].flatten(2, 3)
        squared = {name: (later @ e.mT).square().mean().item() for name, e in error.items()}
        better += squared["squat"] < squared["kivi"]
    assert better >= 0.9 * len(calls)


@pytest.mark.nightly
def test_squat_is_closer_to_full_precision_than_kivi_at_the_shipped_default(smollm2, prose):
    (model, _), ids = smollm2, prose[:, :1152]
    full = quality.reference_logits(model, ids, 1024).log_softmax(-1)
    simulator = Simulator(model)
    divergence = {
        name: (full.exp() * (full - simulator.logits(ids, 1024, get(name)).log_softmax(-1))).sum(-1).mean()
        for name in ("kivi", "squat")
    }
    assert divergence["squat"] < divergence["kivi"]


def test_a_prefill_of_4096_tokens_leaves_no_float_cache(smollm2):
    model, tokenizer = smollm2
    ids = texts.tokens(tokenizer, "prose", 4096)
    with quality.packed(model, "kivi", lowering="eager"), torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
        bf16 = 2 * 30 * 4096 * 3 * 64 * 2
        assert kvpass.nbytes(cache) <= 0.22 * bf16
        assert kvpass.explain(model).nbytes == kvpass.nbytes(cache)


def test_the_reference_compensation_is_what_prefill_stored(smollm2, prose):
    """The captured graph passes on the queries that SDPA receives."""
    model, _ = smollm2
    ids = prose[:, :256]
    calls = attention_inputs(model, ids)
    with quality.packed(model, "squat", lowering="eager"), torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
        for layer, (q, _) in zip(cache.layers, calls, strict=True):
            expected = fit_compensation(q, None, 3, layer.plan.key.quantizer.subspace)
            torch.testing.assert_close(layer.key_state.compensation.double(), expected, atol=2e-2, rtol=2e-2)


def test_the_script_of_the_readme_prints_what_the_readme_shows(capsys, monkeypatch):
    root = Path(__file__).parents[1]
    after = (root / "README.md").read_text(encoding="utf-8").split("```python\n")[1]
    script, shown = after.split("```")[0], after.split("```text\n")[1].split("```")[0]
    monkeypatch.chdir(root)
    exec(script, {})
    assert capsys.readouterr().out.strip() == shown.strip()

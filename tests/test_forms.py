"""A process may call a model in any number of forms: none reaches Dynamo's limit, and each gets the right answer."""

from contextlib import nullcontext

import pytest
import torch
from transformers import DynamicCache

import kvpass
from kvpass import KVPassError

from tiny import llama, tokens

pytestmark = pytest.mark.usefixtures("nothing_compiled")

MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "neither": nullcontext}
SCHEMES = ["kivi-pre", "qaq"]


FORMS = [("no_grad", batch, padding, turns) for batch in (1, 2, 3, 5, 7) for padding in (0, 5) for turns in (1, 2, 3)]
FORMS += [("inference_mode", 2, 0, 1), ("neither", 2, 0, 1)]


def answer(model, mode, batch, padding, turns, **asked):
    """Logits ``[batch, 3 * turns, V]`` after prompts and two steps after each; a row is the same in every batch."""
    cache, mask, logits = DynamicCache(config=model.config), torch.ones(batch, 0, dtype=torch.int64), []
    with MODES[mode]():
        for turn, count in enumerate((40, 9, 20)[:turns]):
            ids = tokens(7, count, seed=turn)[:batch]
            for _ in range(3):
                seen = torch.ones_like(ids)
                if not logits:
                    seen[0, :padding] = 0
                mask = torch.cat([mask, seen], 1)
                out = model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **asked)
                ids = out.logits[:, -1:].argmax(-1)
                logits.append(out.logits[:, -1:])
                if asked:
                    check_records(out, model, batch, **asked)
    return torch.cat(logits, 1).detach().clone()


def check_records(out, model, batch, output_hidden_states=False, output_attentions=False):
    """Check that the requested outputs are present and belong to this call."""
    layers = model.config.num_hidden_layers
    if output_hidden_states:
        assert len(out.hidden_states) == layers + 1
        assert torch.equal(model.lm_head(out.hidden_states[-1]), out.logits)
    if output_attentions:
        assert [weights.shape[0] for weights in out.attentions] == [batch] * layers
        assert all(torch.allclose(weights.sum(-1), torch.ones(())) for weights in out.attentions)


@pytest.fixture(scope="module")
def expected():
    """Results of fresh models for a batch of 7, by scheme and padding."""
    known = {}

    def of(scheme, batch, padding, turns):
        if (scheme, padding) not in known:
            model = kvpass.apply(llama(layers=1), scheme, lowering="eager")
            known[scheme, padding] = answer(model, "no_grad", 7, padding, 3)
        return known[scheme, padding][:batch, : 3 * turns]

    return of


def assert_answers(model, scheme, forms, expected):
    for mode, *call in forms:
        torch.testing.assert_close(answer(model, mode, *call), expected(scheme, *call), atol=1e-4, rtol=1e-4)


@pytest.mark.nightly_cases("kivi-pre", "qaq")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_model_is_called_in_thirty_two_forms(scheme, expected):
    model = kvpass.apply(llama(layers=1), scheme, lowering="eager")
    assert_answers(model, scheme, FORMS, expected)
    graphs = len(kvpass.explain(model).graphs)
    assert_answers(model, scheme, FORMS[::-1], expected)
    assert len(kvpass.explain(model).graphs) == graphs <= 16


@pytest.mark.nightly
@pytest.mark.compiles
def test_no_form_of_a_compiled_step_counts_towards_the_limit_of_another(expected):
    model = kvpass.apply(llama(layers=1), "kivi-pre")
    forms = [("no_grad", 1, 0, 1), ("no_grad", 2, 0, 1), ("no_grad", 2, 5, 1), ("inference_mode", 2, 0, 1)]
    with torch._dynamo.config.patch(recompile_limit=1):
        assert_answers(model, "kivi-pre", forms, expected)


@pytest.mark.nightly
def test_a_form_that_reaches_the_limit_starts_again(expected):
    """One batch of several rows, then another: a second graph."""
    model = kvpass.apply(llama(layers=1), "kivi-pre", lowering="eager")
    with torch._dynamo.config.patch(recompile_limit=1):
        assert_answers(model, "kivi-pre", [("no_grad", batch, 0, 1) for batch in (2, 3, 2)], expected)


@pytest.mark.slow
def test_hidden_states_and_attentions_are_recorded_while_decoding():
    model = kvpass.apply(llama("eager", layers=1), "kivi-pre", lowering="eager")
    asked = [dict(output_hidden_states=True), dict(output_attentions=True)]
    plain, *others = (answer(model, "no_grad", 2, 0, 1, **what) for what in ({}, *asked))
    for other in others:
        torch.testing.assert_close(other, plain, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_schemes_that_need_scores_record_hidden_states_and_refuse_attentions():
    model = kvpass.apply(llama("eager", layers=1), "qaq", lowering="eager")
    with pytest.raises(KVPassError, match="leave out output_attentions"):
        answer(model, "no_grad", 2, 0, 1, output_attentions=True)
    answer(model, "no_grad", 2, 0, 1, output_hidden_states=True)


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.parametrize("scheme", ["kivi", "kivi-pre"])
def test_a_compiled_step_records_hidden_states_in_one_graph(scheme):
    model = kvpass.apply(llama(layers=1), scheme)
    answer(model, "no_grad", 1, 0, 1, output_hidden_states=True)
    (step,) = [graph for graph in kvpass.explain(model).graphs if graph.compiled]
    assert step.fused == 1 and not step.decoded


def test_attentions_that_sdpa_does_not_give_are_refused_before_anything_is_stored():
    model = kvpass.apply(llama(layers=1), "kivi-pre", lowering="eager")
    cache = DynamicCache(config=model.config)
    with pytest.raises(KVPassError, match="set_attn_implementation"):
        model(input_ids=tokens(1, 40), past_key_values=cache, output_attentions=True)
    assert cache.get_seq_length() == 0 and answer(model, "no_grad", 1, 0, 1).isfinite().all()

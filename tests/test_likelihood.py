"""Likelihoods of continuations read the context from the packed cache."""

import pytest
import torch

import kvpass
from kvpass.errors import KVPassError
from kvpass.eval.likelihood import likelihoods

from tiny import llama, tokens

pytestmark = pytest.mark.usefixtures("nothing_compiled")


@pytest.fixture(scope="module")
def model():
    made = llama()
    with torch.no_grad():
        for parameter in made.model.layers.parameters():
            parameter.mul_(6 if parameter.ndim > 1 else 1)
    return made


def requests():
    """Three continuations, of different lengths, of one context, and one of a context of a single token."""
    context = tokens(1, 90)[0].tolist()
    continuations = [tokens(1, length, seed=length)[0].tolist() for length in (1, 7, 40)]
    return [(context[:1], continuations[1]), *((context, continuation) for continuation in continuations)]


def totals(model, **options):
    return torch.tensor([each.total for each in likelihoods(model, requests(), **options)])


def packed(model, scheme, **options):
    torch._dynamo.reset()
    kvpass.apply(model, scheme, lowering="eager")
    try:
        return totals(model, **options)
    finally:
        kvpass.remove(model)


@torch.no_grad()
def test_full_precision_gives_the_likelihoods_of_one_forward(model):
    expected = []
    for context, continuation in requests():
        logits = model(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1]
        expected.append(logits.log_softmax(-1).gather(1, torch.tensor(continuation)[:, None]).sum())
    torch.testing.assert_close(totals(model), torch.stack(expected), atol=1e-3, rtol=0)
    torch.testing.assert_close(packed(model, "identity"), torch.stack(expected), atol=1e-3, rtol=0)


@torch.no_grad()
def test_greedy_says_whether_the_model_would_have_written_the_continuation(model):
    context = tokens(1, 40)
    written = model.generate(context, max_new_tokens=4, do_sample=False)[0, 40:].tolist()
    first, second = likelihoods(model, [(context[0].tolist(), written), (context[0].tolist(), [*written[:3], 1])])
    assert first.greedy and not second.greedy


@pytest.mark.slow_cases("qaq")  # its prompt and its calls are captured
@pytest.mark.parametrize("scheme", ["kivi-1", "asymkv", "qaq"])
def test_even_a_single_token_reads_the_context_as_packed(model, scheme):
    """The likelihoods that a forward over context and continuation gives are the same for every scheme."""
    full, found = totals(model), packed(model, scheme)
    assert found[0] == pytest.approx(float(full[0]), abs=1e-3)  # nothing is packed after one token
    assert ((found - full).abs()[1:] > 1e-3).all()


@torch.no_grad()
def test_token_by_token_the_continuation_is_packed_as_generate_packs_it(model):
    context, continuation = requests()[-1]
    kvpass.apply(model, "kivi-1", lowering="eager")
    try:
        cache = kvpass.models.probe.fresh_cache(model)
        model(torch.tensor([context[:-1]]), past_key_values=cache)
        rows = [
            model(torch.tensor([[token]]), past_key_values=cache).logits[0]
            for token in [context[-1], *continuation[:-1]]
        ]
    finally:
        kvpass.remove(model)
    expected = torch.cat(rows).log_softmax(-1).gather(1, torch.tensor(continuation)[:, None]).sum()
    found = packed(model, "kivi-1", token_by_token=True)
    assert float(found[-1]) == pytest.approx(float(expected), abs=1e-3)
    assert abs(found[-1] - packed(model, "kivi-1")[-1]) > 1e-2


def test_answers_of_one_question_do_not_depend_on_each_other(model):
    together, alone = packed(model, "kivi-1"), packed(model, "kivi-1", batch=1)
    torch.testing.assert_close(together, alone, atol=1e-3, rtol=0)


def test_a_request_without_context_is_refused(model):
    with pytest.raises(KVPassError, match="at least one token of context"):
        likelihoods(model, [([], [1])])

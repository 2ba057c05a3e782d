"""Steps that are called again below Dynamo (``mode="reduce-overhead"`` on CPUs) equal the original steps bit for bit,
and are not called again if anything but their arguments has changed."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import Cache

import kvpass
from kvpass.cache.swap import packed_layers
from kvpass.runtime.steps import recall

from tiny import llama, tokens

KIVI = dict(scheme="kivi", group_size=8, residual=8)


@pytest.fixture(autouse=True)
def reference(reference_in_this_test):
    """Other tests cover the contents of a step."""


@pytest.fixture
def through_dynamo(monkeypatch):
    """A list with one entry for each step that went through Dynamo."""
    steps, noted = [], recall.noted
    monkeypatch.setattr(recall, "noted", lambda: (steps.append(1), noted())[1])
    return steps


def steps_of(model, mode, calls, scheme=KIVI, between=lambda model, call: None, **arguments):
    """Outputs of ``calls`` with these numbers of tokens, some of which are cropped afterwards, the cache, and the
    report."""
    kvpass.apply(model, scheme, mode=mode)
    cache, ids, outputs = DynamicCache(config=model.config), tokens(1, sum(new for new, _ in calls)), []
    for call, (new, rejected) in enumerate(calls):
        between(model, call)
        start = cache.get_seq_length()
        outputs.append(model(input_ids=ids[:, start : start + new], past_key_values=cache, **arguments))
        if rejected:
            cache.crop(-rejected)
    return outputs, cache, kvpass.explain(model)


def assert_same(got, expected):
    (_, mine, _), (_, theirs, _) = got, expected
    for pair in zip(packed_layers(mine), packed_layers(theirs), strict=True):
        for states in zip(*(layer.states() for layer in pair), strict=True):
            contents = (state.contents(mine.get_seq_length()) for state in states)
            torch.testing.assert_close(*contents, rtol=0, atol=0)
    for mine, theirs in zip(got[0], expected[0], strict=True):
        assert torch.equal(mine.logits, theirs.logits)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [KIVI, dict(scheme="waterfill", residual=16, recent=0, sinks=0), "identity"])
def test_a_recalled_step_equals_the_step(scheme, through_dynamo):
    """While pools grow, pages are packed, drafts are verified and tokens are cropped."""
    calls = [(14, 0), *[(1, 0)] * 30, (3, 2), (3, 1), (3, 0), *[(1, 0)] * 10, (1, 4), *[(1, 0)] * 20]
    expected = steps_of(llama(layers=3), None, calls, scheme)
    got = steps_of(llama(layers=3), "reduce-overhead", calls, scheme)
    assert_same(got, expected)
    assert len(through_dynamo) < 20 and "replayed steps skip Dynamo's per-step guard checks" in str(got[2])


@pytest.mark.slow
def test_more_outputs_and_other_arguments(through_dynamo):
    calls, arguments = [(14, 0), *[(1, 0)] * 6], dict(output_hidden_states=True)
    expected = steps_of(llama(layers=3), None, calls, **arguments)
    got = steps_of(llama(layers=3), "reduce-overhead", calls, **arguments)
    assert_same(got, expected)
    assert len(through_dynamo) < 3
    for mine, theirs in zip(got[0], expected[0], strict=True):
        assert mine.past_key_values is got[1]
        torch.testing.assert_close(mine.hidden_states, theirs.hidden_states, rtol=0, atol=0)


@pytest.mark.slow
def test_generate_with_padding_and_beams(through_dynamo):
    ids, found = tokens(3, 14), []
    mask = (torch.arange(14) >= torch.tensor([5, 0, 11])[:, None]).long()
    for mode in (None, "reduce-overhead"):
        model = kvpass.apply(llama(layers=3), KIVI, mode=mode)
        for beams in (1, 2):
            found.append(model.generate(ids, attention_mask=mask, max_new_tokens=16, do_sample=False, num_beams=beams))
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
    assert len(through_dynamo) < 4  # beams are reordered at each step


def other_parameter(model):
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 2)


def other_storage(model):
    model.model.norm.weight.data = model.model.norm.weight.data * 2


def other_module(model):
    model.model.layers[1].mlp.act_fn = nn.ReLU()


@pytest.mark.slow_cases("other_storage", "other_parameter")
@pytest.mark.parametrize("change", [other_parameter, other_storage, other_module])
def test_another_weight_or_module_is_noticed(change):
    def between(model, call):
        if call == 4:
            change(model)

    calls = [(14, 0), *[(1, 0)] * 6]
    expected = steps_of(llama(layers=3), None, calls, between=between)
    assert_same(steps_of(llama(layers=3), "reduce-overhead", calls, between=between), expected)


def other_attribute(model):
    model.model.layers[1].mlp.forward = model.model.layers[0].mlp.forward


@pytest.mark.slow
def test_a_new_turn_checks_everything_again(through_dynamo):
    """Including changes to anything other than weights and modules."""

    def between(model, call):
        if call == 5:
            other_attribute(model)

    calls = [(14, 0), *[(1, 0)] * 4, (20, 0), *[(1, 0)] * 4]
    expected = steps_of(llama(layers=3), None, calls, between=between)
    assert_same(steps_of(llama(layers=3), "reduce-overhead", calls, between=between), expected)
    assert len(through_dynamo) == 2


class Branching(nn.Module):
    """A layer that behaves differently after 20 tokens; the graph of a step has a guard for it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states, **arguments):
        out = self.inner(hidden_states, **arguments)
        (cache,) = (value for value in arguments.values() if isinstance(value, Cache))
        return out * 2 if cache.get_seq_length() > 20 else out


def branching():
    model = llama(layers=3)
    model.model.layers[1] = Branching(model.model.layers[1])
    return model


@pytest.mark.slow
def test_guards_on_lengths_are_checked_again():
    calls = [(14, 0), *[(1, 0)] * 12]
    assert_same(steps_of(branching(), "reduce-overhead", calls), steps_of(branching(), None, calls))


class Held:
    """An object that holds a tensor and is not checked for changes."""

    tensor = torch.ones(())


class Shifted(nn.Module):
    """A layer that reads a tensor that is neither a parameter nor a buffer."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.shift = inner, Held()

    def forward(self, x):
        return self.inner(x) + self.shift.tensor


def test_external_tensors_are_read_in_place(through_dynamo):
    def between(model, call):
        model.model.norm.shift.tensor = torch.full((), float(call))

    def shifted():
        model = llama(layers=3)
        model.model.norm = Shifted(model.model.norm)
        return model

    calls = [(14, 0), *[(1, 0)] * 6]
    got = steps_of(shifted(), "reduce-overhead", calls, between=between)
    assert_same(got, steps_of(shifted(), None, calls, between=between))
    assert "steps are not replayed: it reads a tensor of shape ()" in str(got[2])
    assert len(through_dynamo) == 1  # the model was checked once


def test_threads_share_a_model_and_call_steps_of_their_own_caches():
    model = kvpass.apply(llama(layers=3), KIVI, mode="reduce-overhead")

    def decoded(seed):
        ids, cache, logits = tokens(1, 60, seed), DynamicCache(config=model.config), []
        for stop in (30, *range(31, 61)):
            logits.append(model(input_ids=ids[:, cache.get_seq_length() : stop], past_key_values=cache).logits[:, -1])
        return torch.cat(logits)

    expected = [decoded(seed) for seed in range(3)]
    with ThreadPoolExecutor(3) as threads:
        for _ in range(3):
            for got, alone in zip(threads.map(decoded, range(3)), expected, strict=True):
                assert torch.equal(got, alone)


def test_recalls_do_not_keep_caches_alive():
    model = kvpass.apply(llama(layers=3), KIVI, mode="reduce-overhead")
    cache = DynamicCache(config=model.config)
    for count in (14, 1, 1, 1, 1):
        output = model(input_ids=tokens(1, count), past_key_values=cache)
    first = packed_layers(cache)[0]
    assert kvpass.explain(model).recalled
    ring = weakref.ref(first.key_state.ring)
    cache.batch_select_indices(torch.tensor([0]))
    assert ring() is None
    gone = weakref.ref(first)
    del cache, output, first
    gc.collect()
    assert gone() is None

"""Capturing the prompt's queries without a graph stores the same bits as a captured prefill."""

import pytest
import torch
from transformers import DynamicCache

import kvpass
from kvpass import KVPassError
from kvpass.runtime.transformers import TransformersRuntime
from kvpass.schemes import SQuatConfig

from tiny import llama, tokens
from zoo import ZOO

pytestmark = pytest.mark.usefixtures("nothing_compiled")

SQUAT = SQuatConfig(residual=16, group_size=16, rank=2)


def prefilled(model, padding=0):
    """The cache after a prompt of two rows, the first of which is left-padded."""
    ids, cache = tokens(2, 70), DynamicCache(config=model.config)
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask, past_key_values=cache)
    return cache


@pytest.mark.parametrize("padding", [0, 9])
def test_codes_equal_those_of_a_captured_prefill(padding, monkeypatch):
    model = kvpass.apply(llama(), SQUAT)
    handed_over = prefilled(model, padding)
    assert not kvpass.explain(model).graphs
    kvpass.remove(model)
    monkeypatch.setattr(TransformersRuntime, "captures_queries", False)
    kvpass.apply(model, SQUAT)
    captured = prefilled(model, padding)
    assert [graph.fused for graph in kvpass.explain(model).graphs] == [2]
    for mine, theirs in zip(handed_over.layers, captured.layers, strict=True):
        for (name, a), (_, b) in zip(mine.key_state.tensors(), theirs.key_state.tensors(), strict=True):
            assert torch.equal(a, b), name
        assert mine.key_state.compensation.abs().max() > 0


@pytest.mark.parametrize("name", ["BART", "Falcon, multi-query", "Cohere 2"])
def test_queries_of_other_architectures_are_captured(name):
    """With cross-attention, one KV head, and layers that are not packed."""
    model = kvpass.apply(ZOO[name].model("sdpa"), SQUAT, lowering="eager")
    assert model._kvpass.captures_queries


@pytest.mark.slow
def test_without_sdpa_the_prompt_is_captured():
    model = kvpass.apply(llama("eager"), SQUAT)
    prefilled(model)
    assert (
        not model._kvpass.captures_queries and len(kvpass.explain(model).graphs) <= 2
    )  # of one sequence, and of several


def test_a_call_without_its_queries_stores_nothing():
    model = kvpass.apply(llama(), SQUAT, lowering="eager")
    prefilled(model)
    cache, ids = DynamicCache(config=model.config), tokens(1, 40)
    model.set_attn_implementation("eager")
    with torch.no_grad(), pytest.raises(KVPassError, match="0 of 2 layers called SDPA"):
        model(input_ids=ids, past_key_values=cache)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        again = model(input_ids=ids, past_key_values=cache).logits
        expected = model(input_ids=ids).logits
    assert torch.equal(again, expected) and cache.get_seq_length() == 40

"""Captured steps of models with recurrent or convolution states: one graph, packed layers fused, states updated."""

import copy
from functools import partial

import pytest
import torch
from transformers import (
    DynamicCache,
    Lfm2Config,
    Lfm2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

import kvpass
from kvpass import KVPassError
from kvpass.cache.stateful import states_of
from kvpass.compile import backend
from kvpass.errors import NotCapturedError
from kvpass.runtime.runtime import Runtime
from kvpass.schemes import IdentityConfig, KIVIConfig

from tiny import VOCABULARY, falcon_h1, tokens

LOSSLESS = IdentityConfig(residual=16)
PROMPT, STEPS = 36, 6
_SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=512, pad_token_id=0, eos_token_id=None, bos_token_id=1,
)  # fmt: skip


def qwen3_next(layers=3):
    """Layers of linear attention between those with keys and values; one before the first."""
    config = Qwen3NextConfig(
        **_SIZES, num_hidden_layers=2 * layers, layer_types=["linear_attention", "full_attention"] * layers,
        head_dim=16, linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2,
        linear_num_value_heads=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )  # fmt: skip
    return Qwen3NextForCausalLM(config)


def lfm2(layers=3, first=1, last=1):
    """Layers with a convolution state between those with keys and values; ``first`` and ``last`` more at the ends."""
    types = ["conv"] * first + ["full_attention", "conv"] * layers + ["conv"] * last
    config = Lfm2Config(**_SIZES, num_hidden_layers=len(types), layer_types=types, conv_L_cache=3)
    return Lfm2ForCausalLM(config)


def built(make, **sizes):
    torch.manual_seed(0)
    return make(**sizes).eval()


def held(cache):
    """Copies of all states of a cache, by layer, name and number."""
    return {
        (index, name, number): state.clone()
        for index, layer in enumerate(cache.layers)
        for name, states in states_of(layer)
        for number, state in states.items()
        if state is not None
    }


@torch.no_grad()
def decoded(model, batch=2, padding=0, rows=None, cache=None, steps=STEPS):
    """Logits and states after a prompt and after each step, and the cache. ``rows`` of the batch are selected halfway
    through the steps."""
    ids, cache = tokens(batch, PROMPT + STEPS), cache or DynamicCache(config=model.config)
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    logits, states = [], []
    for stop in range(PROMPT, PROMPT + steps + 1):
        if rows is not None and stop == PROMPT + STEPS // 2:
            cache.reorder_cache(rows)
            ids, mask = ids[rows], mask[rows]
        seen = dict(attention_mask=mask[:, :stop]) if padding else {}
        given = ids[:, (0 if stop == PROMPT else stop - 1) : stop]
        logits.append(model(input_ids=given, past_key_values=cache, **seen).logits[:, -1])
        states.append(held(cache))
    return logits, states, cache


def check_equal(found, expected):
    """Check that two results of `decoded` have the same logits and states at each step."""
    for step, (mine, theirs) in enumerate(zip(found[0], expected[0], strict=True)):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4, msg=lambda text, step=step: f"{step}: {text}")
    for mine, theirs in zip(found[1], expected[1], strict=True):
        assert mine.keys() == theirs.keys() and mine
        for place, state in mine.items():
            torch.testing.assert_close(state, theirs[place], atol=1e-5, rtol=1e-4)


def steps(model):
    report = kvpass.explain(model)
    assert report.pieces is None
    return [graph for graph in report.graphs if graph.compiled]


MODELS = {"Falcon-H1": partial(falcon_h1, 3), "Qwen3-Next": qwen3_next, "LFM2": lfm2}


@pytest.mark.slow_cases("Falcon*", "Qwen3*")
@pytest.mark.parametrize("name", MODELS)
def test_steps_are_one_graph_that_updates_the_states_of_the_untouched_model(name, nothing_compiled):
    model = built(MODELS[name])
    calls = dict(plain={}, padded=dict(padding=5), selected=dict(rows=torch.tensor([1, 0])))
    expected = {call: decoded(model, **given) for call, given in calls.items()}
    kvpass.apply(model, LOSSLESS)
    for call, given in calls.items():
        check_equal(decoded(model, **given), expected[call])
    graphs = steps(model)
    assert [graph.repeats for graph in graphs] == [3, 3]  # with padding and without
    assert all(graph.fused == 3 and not graph.refused for graph in graphs)
    kvpass.remove(model)


def test_a_cache_starts_anew_after_a_reset(nothing_compiled):
    model = built(lfm2)
    expected = decoded(model)
    kvpass.apply(model, LOSSLESS)
    *_, cache = decoded(model)
    cache.reset()
    check_equal(decoded(model, cache=cache), expected)
    check_equal(decoded(model), expected)
    assert len(steps(model)) == 1
    kvpass.remove(model)


def test_a_copied_cache_does_not_share_states_with_the_original(nothing_compiled):
    model = kvpass.apply(built(lfm2), LOSSLESS)
    *_, cache = decoded(model)
    before, other = held(cache), copy.deepcopy(cache)
    with torch.no_grad():
        model(input_ids=tokens(2, 1), past_key_values=other)
    assert all(torch.equal(state, before[place]) for place, state in held(cache).items())
    assert any(not torch.equal(state, before[place]) for place, state in held(other).items())
    kvpass.remove(model)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_quantized_steps_equal_those_that_are_not_captured(name, nothing_compiled):
    model, scheme = built(MODELS[name]), KIVIConfig(group_size=8, residual=16)
    kvpass.apply(model, scheme, lowering="eager")
    expected = decoded(model, padding=5)
    kvpass.remove(model)
    kvpass.apply(model, scheme)
    check_equal(decoded(model, padding=5), expected)
    assert [(graph.fused, graph.decoded) for graph in steps(model)] == [(3, 0)]
    kvpass.remove(model)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [3, 14])  # in pieces of one repeat, and of several
def test_compiled_pieces_write_their_own_states(layers, reference_in_this_test):
    model = built(lfm2, layers=layers)
    expected = decoded(model)
    kvpass.apply(model, LOSSLESS)
    check_equal(decoded(model), expected)
    assert [graph.repeats for graph in steps(model)] == [layers]
    kvpass.remove(model)


@pytest.mark.parametrize("whole", [True, False])
def test_a_step_that_cannot_be_captured_runs_uncaptured_if_none_of_it_has_run(whole, nothing_compiled, monkeypatch):
    model = built(lfm2)
    expected = decoded(model)
    kvpass.apply(model, LOSSLESS)

    def refuse(*_):
        raise NotCapturedError("a reason")

    monkeypatch.setattr(backend, "find", refuse)
    runtime = Runtime.of(decoded(model, steps=0)[2])
    runtime.slides = whole  # such steps are one graph or none
    runtime.prepare()
    if whole:
        check_equal(decoded(model), expected)
        assert kvpass.explain(model).fused == 0
    else:
        with pytest.raises(KVPassError, match=r"a reason. Parts of it may have run.*lowering='eager'"):
            decoded(model)
    kvpass.remove(model)

"""Repeated layers are analyzed and compiled once, and the graph still computes the same."""

import copy

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import DynamicCache

import kvpass
from kvpass import HeavyHitter
from kvpass.compile import backend, repeats
from kvpass.compile.calls import ATTEND
from kvpass.schemes import KIVIConfig, SQuatConfig, WaterfillConfig, XQuantConfig

from tiny import llama, tokens

PROMPT, STEPS = 90, 45  # pages are packed on the way
pytestmark = pytest.mark.usefixtures("reference_in_this_test")


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    """The modules that Inductor would compile; they run uncompiled."""
    torch._dynamo.reset()
    modules = []

    def run(module, inputs):
        modules.append(module)
        return module.forward

    monkeypatch.setattr(backend, "compile_fx", run)
    return modules


def widened(model, every: int, first: int = 0):
    """``model`` with a wider MLP in some layers."""
    for layer in model.model.layers[first::every]:
        layer.mlp = copy.deepcopy(llama(layers=1, seed=1).model.layers[0].mlp)
        for linear, shape in (("gate_proj", (160, 64)), ("up_proj", (160, 64)), ("down_proj", (64, 160))):
            getattr(layer.mlp, linear).weight = torch.nn.Parameter(torch.randn(shape) / 8)
    return model


@torch.no_grad()
def decoded(model, scheme, batch=1, padding=0, prompt=PROMPT, **call):
    """Logits of the end of a prompt and of the steps after it, the contents of the layers' caches, and the report."""
    kvpass.apply(model, scheme)
    ids, cache, rows = tokens(batch, prompt + STEPS), DynamicCache(config=model.config), []
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    for start, stop in [(0, prompt), *((i, i + 1) for i in range(prompt, prompt + STEPS))]:
        seen = dict(attention_mask=mask[:, :stop]) if padding else {}
        output = model(input_ids=ids[:, start:stop], past_key_values=cache, **seen, **call)
        rows.append(torch.cat([output.logits[:, -1], *(each[:, -1] for each in output.hidden_states or ())], -1))
    held = [state.contents(layer.tokens) for layer in cache.layers for state in layer.states()]
    report = kvpass.explain(model)
    kvpass.remove(model)
    return torch.stack(rows), held, report


def as_a_whole(model, scheme, **call):
    """Decode ``model`` in pieces and as a whole, check that the results are equal, and return the report of the
    pieces."""
    rows, held, report = decoded(model, scheme, **call)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repeats, "FEWEST", 99)
        expected, others, whole = decoded(model, scheme, **call)
    assert all(not graph.repeats and graph.whole == "it has fewer than 99 packed layers" for graph in whole.graphs)
    assert [(g.fused, g.decoded, g.rotated) for g in report.graphs] == [
        (g.fused, g.decoded, g.rotated) for g in whole.graphs
    ]
    torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-6)
    for contents, other in zip(held, others, strict=True):
        assert contents.keys() == other.keys()
        assert all(torch.equal(contents[name], other[name]) for name in contents)
    return report


def steps(report):
    return [graph for graph in report.graphs if graph.compiled]


def test_five_layers_are_three_pieces_with_one_attention(compiled):
    _, _, report = decoded(llama(layers=5), "kivi")
    (graph,) = steps(report)
    attends = [len(module.graph.find_nodes(op="call_function", target=ATTEND)) for module in compiled]
    assert sorted(attends) == [0, 0, 1]
    assert graph.repeats == 5 and graph.fused == 5 and report.fused == 5 and not graph.unfused
    assert "shared by 5 repeats of the same layers): 5 attentions fused" in str(report)


def test_the_pass_processes_no_more_nodes_for_deeper_models():
    def nodes(layers):
        model = kvpass.apply(llama(layers=layers), "kivi")
        report = kvpass.explain(model, graphs=True)
        with torch.no_grad():
            cache = DynamicCache(config=model.config)
            for part in tokens(1, PROMPT + 1).split([PROMPT, 1], 1):
                model(input_ids=part, past_key_values=cache)
        return [sum(stage.ops.values()) for stage in report.graphs[0].stages[1:-1]]

    assert nodes(3) == nodes(7)


@pytest.mark.slow_cases("squat*", "*rope=pre*", "kivi-2-0", "kivi-1-0")
@pytest.mark.nightly_cases("*rope=pre*-0", "higgs-*")
@pytest.mark.parametrize("batch, padding", [(1, 0), (2, 0), (2, 7)])
@pytest.mark.parametrize("scheme", ["kivi", "squat", "higgs", KIVIConfig(rope="pre"), SQuatConfig(rope="pre")], ids=str)
def test_pieces_compute_the_same_as_the_whole(scheme, batch, padding):
    report = as_a_whole(llama(layers=4), scheme, batch=batch, padding=padding)
    assert report.graphs and all(graph.repeats == 4 for graph in report.graphs)


@pytest.mark.slow
def test_pieces_store_what_goes_by_queries_tables_and_keys_as_the_whole_does():
    report = as_a_whole(llama(layers=4), WaterfillConfig(residual=16), batch=2, padding=7)
    assert report.graphs and all(graph.repeats == 4 for graph in report.graphs)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_layers_that_differ_stay_outside_of_the_repeats(attention):
    report = as_a_whole(widened(llama(attention, layers=6), every=6), "kivi")  # the first one
    assert [graph.repeats for graph in steps(report)] == [5]
    report = as_a_whole(widened(llama(attention, layers=6), every=6, first=5), "kivi")
    assert [graph.repeats for graph in steps(report)] == [5]


@pytest.mark.slow
def test_layers_that_take_turns_repeat_together():
    report = as_a_whole(widened(llama(layers=8), every=2), "kivi")
    (graph,) = steps(report)
    assert graph.repeats in (3, 4) and graph.fused == 8


@pytest.mark.slow
def test_layers_that_share_codes_repeat_together():
    report = as_a_whole(llama(layers=12), XQuantConfig(kq=2, vq=2, km=2, vm=2))
    (graph,) = steps(report)
    assert graph.repeats == 5 and graph.fused == 12


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [KIVIConfig(group_size=16, retention=HeavyHitter(32, 24, 16)), "qaq"], ids=str)
def test_layers_that_exchange_data_are_processed_as_a_whole(scheme):
    _, _, report = decoded(llama(layers=4), scheme)
    assert report.graphs and not any(graph.repeats for graph in report.graphs)


@pytest.mark.slow
def test_reading_every_layer_prevents_splitting():
    report = as_a_whole(llama(layers=4), "kivi", output_hidden_states=True)
    assert report.graphs and not any(graph.repeats for graph in report.graphs)


@pytest.mark.slow
def test_a_model_that_is_not_fused_is_processed_as_a_whole_and_says_why():
    report = as_a_whole(llama("eager", layers=4), "kivi", output_attentions=True)
    (graph,) = steps(report)
    assert not graph.repeats and sorted(graph.unfused) == [0, 1, 2, 3]
    assert str(report).count("not fused: ") == 4


@pytest.mark.slow
def test_many_layers_are_taken_a_few_at_a_time():
    report = as_a_whole(llama(layers=14), "kivi")
    (graph,) = steps(report)
    assert graph.repeats == 14 and graph.fused == 14  # in pieces of four, and one of two


def test_two_layers_are_not_split():
    assert [graph.repeats for graph in steps(decoded(llama(layers=2), "kivi")[2])] == [0]


def test_a_graph_that_repeats_itself_serves_every_length_and_cache(compiled):
    counters.clear()
    model = kvpass.apply(llama(layers=4), "kivi")
    with torch.no_grad():
        for prompt in (40, 70, 33):
            cache = DynamicCache(config=model.config)
            for part in tokens(1, prompt + 40, prompt).split([prompt, *[1] * 40], 1):
                model(input_ids=part, past_key_values=cache)
    assert counters["stats"]["unique_graphs"] == 1 and len(compiled) == 3


@pytest.mark.slow
def test_weights_of_the_same_shape_but_another_layout_are_not_alike():
    model = llama(layers=4)
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data = weight.data.t().contiguous().t()
    report = as_a_whole(model, "kivi")
    assert [graph.repeats for graph in steps(report)] == [0]

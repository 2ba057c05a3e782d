"""Models that torch cannot capture or does not compile: kvpass reports this at once, in its own words, with an
alternative."""

import re

import pytest
import torch
from transformers import DynamicCache

import kvpass
from kvpass import KVPassError, NotFusedError
from kvpass.cache.layer import PackedLayer
from kvpass.compile.normalise import normalise
from kvpass.compile.report import GraphReport

from tiny import llama, tokens

pytestmark = pytest.mark.usefixtures("reference_lowering")
IDENTITY = {"scheme": "identity", "residual": 16}
DYNAMIC = dict(rope_type="dynamic", rope_theta=10000.0, factor=4.0)  # its tables depend on the values of positions


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch.compiler.set_stance("default")


@torch.no_grad()
def call(model, length, cache, seed=0):
    return model(input_ids=tokens(1, length, seed), past_key_values=cache).logits[:, -1]


def steps(model, count=3, prompt=70):
    cache = DynamicCache(config=model.config)
    call(model, prompt, cache)
    for seed in range(count):
        call(model, 1, cache, seed)
    return cache


def breaking(model, layer=0):
    """``model`` with a layer that Dynamo cannot capture."""
    return behind(model, layer, lambda output: torch._dynamo.graph_break() or output)


def behind(model, layer, change):
    """``model`` with ``change`` applied after one of its layers, without a hook, because hooks prevent compiled
    steps."""
    inner = model.model.layers[layer].forward
    model.model.layers[layer].forward = lambda *args, **kwargs: change(inner(*args, **kwargs))
    return model


def by_values(model, branch=False):
    """``model`` with a first layer whose control flow depends on the values of a tensor."""

    def change(output):
        many = output.sum() > 1e9 if branch else int(output.abs().argmax()) > 10**9
        return output * 2 if many else output

    return behind(model, 0, change)


# ---------------------------------------------------------------- captures that fail


@pytest.mark.parametrize("broken", ["break", "branch", "sizes"])
def test_a_prompt_that_cannot_be_captured_names_a_scheme_that_works(broken):
    made = {"break": breaking, "branch": lambda model: by_values(model, True), "sizes": by_values}[broken]
    model = kvpass.apply(made(llama()), "kivi-pre", lowering="eager")
    cache = DynamicCache(config=model.config)
    with pytest.raises(KVPassError, match=r"before rotary embedding.* capture failed: .*Use scheme='kivi'") as raised:
        call(model, 40, cache)
    assert raised.value.__cause__ is not None and not isinstance(raised.value.__cause__, KVPassError)
    assert cache.get_seq_length() == 0
    kvpass.remove(model)
    kvpass.apply(model, "kivi", lowering="eager")
    assert torch.isfinite(call(model, 40, cache)).all()  # it is unchanged


def test_suggested_schemes_keep_the_requested_options():
    model = kvpass.apply(breaking(llama()), {"scheme": "waterfill", "recent": 64}, lowering="eager")
    with pytest.raises(KVPassError, match=r"'rope': 'post', 'recent': 64"):
        call(model, 40, DynamicCache(config=model.config))


@pytest.mark.parametrize("attention, scheme", [("sdpa", {"scheme": "waterfill", "rope": "post"}), ("eager", "kivi")])
def test_the_default_scheme_gives_way_to_one_that_needs_no_graph(attention, scheme, caplog):
    """At the first prompt, or already in `apply` if attention may not be understood."""
    model = kvpass.apply(breaking(llama(attention)), lowering="eager")
    forward, cache = model.forward, DynamicCache(config=model.config)
    logits = call(model, 40, cache)
    warned = [record for record in caplog.records if "the default scheme does not work" in record.message]
    report = kvpass.explain(model)
    assert len(warned) == 1 and "graph_break" in report.instead_of and report.instead_of in str(report)
    assert report.packed == 2 and all(type(layer) is PackedLayer for layer in cache.layers)
    with torch.no_grad():
        again = forward(input_ids=tokens(1, 40), past_key_values=DynamicCache(config=model.config)).logits[:, -1]
    torch.testing.assert_close(again, logits)
    with pytest.raises(KVPassError, match="kvpass is already applied"):
        kvpass.apply(model)
    kvpass.remove(model)
    kvpass.apply(model, scheme, lowering="eager")
    torch.testing.assert_close(call(model, 40, DynamicCache(config=model.config)), logits)


def test_the_default_scheme_stays_once_it_has_worked():
    model = kvpass.apply(llama(), lowering="eager")
    call(model, 40, DynamicCache(config=model.config))
    breaking(model)
    torch._dynamo.reset()
    with pytest.raises(KVPassError, match="'rope': 'post'"), torch.no_grad():
        model(input_ids=tokens(2, 40), past_key_values=DynamicCache(config=model.config))


def test_queries_without_a_graph_and_without_sdpa_leave_other_schemes():
    """`apply` detects this."""
    model = by_values(llama("eager"))
    with pytest.raises(KVPassError, match=r"fitted to the prompt's queries.*Use scheme='kivi'"):
        kvpass.apply(model, "squat", lowering="eager")
    kvpass.apply(model, "kivi", lowering="eager")


def test_a_step_that_cannot_be_captured_runs_uncaptured_and_says_so(monkeypatch, caplog):
    def broken(gm):
        raise RuntimeError("cannot mutate tensors with frozen storage")

    expected = steps(llama())
    model = kvpass.apply(llama(), IDENTITY)
    monkeypatch.setattr("kvpass.compile.backend.normalise", broken)
    cache = steps(model)
    torch.testing.assert_close(cache.layers[1].keys + 0, expected.layers[1].keys)
    assert "steps are not compiled: cannot mutate tensors with frozen storage" in str(kvpass.explain(model))
    assert kvpass.explain(model).fused == 0
    assert len([record for record in caplog.records if record.name == "kvpass"]) == 1
    kvpass.remove(model)
    kvpass.apply(model, IDENTITY, strict=True)
    cache = steps(model, 0)
    with pytest.raises(NotFusedError, match="frozen storage"):
        call(model, 1, cache)
    assert cache.get_seq_length() == 70


def test_vmap_is_captured():
    """As in transformers' masks of token types, and in Jamba's scan."""

    def masked(x, allowed):
        mask = torch.vmap(
            torch.vmap(lambda row, key: row.new_ones(()) * (key <= row) * allowed[key], (None, 0)), (0, None)
        )
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, mask(torch.arange(6), torch.arange(6)).float())

    x, allowed, graphs = torch.randn(1, 1, 6, 8), torch.rand(6) > 0.5, []

    def backend(gm, _):
        graphs.append(normalise(gm).graph)
        return gm.forward

    compiled = torch.compile(masked, backend=backend, fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(x, allowed), masked(x, allowed))
    (graph,) = graphs
    assert torch.ops.aten.scaled_dot_product_attention.default in {node.target for node in graph.nodes}
    assert not [node for node in graph.nodes if "batch_dim" in str(node.target)]


# ---------------------------------------------------------------- steps that are not compiled, or in pieces


@pytest.mark.parametrize(
    ("config", "stance", "why"),
    [
        (dict(rope_parameters=DYNAMIC), "default", "Data-dependent branching"),
        ({}, "force_eager", r"set_stance\('force_eager'\)"),
    ],
)
def test_functions_that_dynamo_skips_are_reported_and_strict_raises(config, stance, why, caplog):
    torch.compiler.set_stance(stance)
    model = kvpass.apply(llama(**config), IDENTITY)
    steps(model)
    report = kvpass.explain(model)
    assert report.fused == 0 and all(re.search(why, report.why_not_fused(layer)) for layer in report.layers)
    assert "steps are not compiled: " in str(report) and "no graph captured yet" not in str(report)
    (record,) = (record for record in caplog.records if record.name == "kvpass")
    assert re.search(why, record.getMessage())
    kvpass.remove(model)
    kvpass.apply(model, IDENTITY, strict=True)
    cache = steps(model, 0)
    with pytest.raises(NotFusedError, match=why):
        call(model, 1, cache)
    assert cache.get_seq_length() == 70


def test_the_default_scheme_says_that_torch_is_switched_off():
    torch.compiler.set_stance("force_eager")
    model = kvpass.apply(llama(), "waterfill")
    with pytest.raises(KVPassError, match=r"set_stance\('force_eager'\).*'rope': 'post'"):
        steps(model)
    kvpass.remove(model)
    kvpass.apply(model)
    assert steps(model).get_seq_length() == 73
    assert re.search(r"set_stance\('force_eager'\).*'rope': 'post'", str(kvpass.explain(model)))


def test_graph_breaks_are_reported_with_layer_and_cause():
    model = kvpass.apply(breaking(llama(layers=3), 1), IDENTITY)
    steps(model, 2)
    assert "torch._dynamo.graph_break()" in kvpass.explain(model).pieces.why


def test_fused_layers_are_counted_across_graph_breaks():
    model = kvpass.apply(llama(layers=3), IDENTITY, lowering="eager")
    report, graphs = kvpass.explain(model), [GraphReport(n, 0, 0, 0, [], compiled=True) for n in (1, 1)]
    report.graphs += graphs
    assert report.stepped(graphs, [1], lambda: "a break")
    assert report.fused == 2 and [bool(report.why_not_fused(layer)) for layer in report.layers] == [False, True, False]
    assert "steps are not one graph: a break" in str(report) and "1 layers outside any graph" in str(report)
    assert not report.stepped(graphs, [1], lambda: pytest.fail("it is the same as before"))


def test_recompilations_are_reported():
    torch.compiler.set_stance("force_eager")
    model = kvpass.apply(llama(), IDENTITY)
    cache = steps(model)
    assert kvpass.explain(model).fused == 0
    torch.compiler.set_stance("default")
    call(model, 1, cache)
    assert kvpass.explain(model).fused == 2 and "not compiled" not in str(kvpass.explain(model))


def test_dynamo_disabled_by_the_environment_is_reported(monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # torch reads it whenever a function is compiled
    model = kvpass.apply(llama(), IDENTITY)
    steps(model)
    assert "steps are not compiled: TORCHDYNAMO_DISABLE" in str(kvpass.explain(model))


# ---------------------------------------------------------------- refusals within a graph


@pytest.mark.parametrize("scheme", ["identity", "kivi-pre", "waterfill"])
def test_another_dtype_is_refused_in_the_same_words_by_every_scheme(scheme):
    model = kvpass.apply(llama(), scheme).to(torch.bfloat16)
    with pytest.raises(KVPassError) as raised:
        call(model, 40, DynamicCache(config=model.config))
    assert str(raised.value).startswith("The model computed keys or values in torch.bfloat16 on cpu")
    assert str(raised.value).endswith("the packed model then works inside it, too.")

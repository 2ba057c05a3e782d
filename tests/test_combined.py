"""Attention whose softmax is computed in parts: over two caches (T5Gemma 2), or with sinks by query (Inkling 2)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx import Graph, GraphModule

import kvpass
from kvpass.compile.combine import over_both, with_sinks
from kvpass.errors import KVPassError
from kvpass.schemes import IdentityConfig, KIVIConfig

from common import randn, without_inductor
from field import uses_of
from shrink import find


def run(compute, *tensors):
    """The results of the nodes that ``compute(graph, *placeholders)`` adds for ``tensors``."""
    graph = Graph()
    nodes = [graph.placeholder(f"x{i}") for i in range(len(tensors))]
    for node, tensor in zip(nodes, tensors, strict=True):
        node.meta["val"] = tensor
    graph.output(compute(graph, *nodes))
    return GraphModule(torch.nn.Module(), graph)(*tensors)


@given(split=st.integers(1, 9), hidden=st.integers(0, 1023), seed=st.integers(0, 1000))
def test_parts_combine_to_attention_over_all_tokens(split, hidden, seed):
    q, k, v = randn(seed, 2, 3, 4, 8), randn(seed + 1, 2, 3, 10, 8), randn(seed + 2, 2, 3, 10, 8)
    sinks = randn(seed + 3, 2, 3, 4, 1)
    scores = q @ k.mT
    scores[:, :, 0] = scores[:, :, 0].masked_fill(torch.tensor([bool(hidden >> t & 1) for t in range(10)]), -torch.inf)
    parts = []
    for some in (slice(split), slice(split, None)):
        lse = scores[..., some].logsumexp(-1)
        parts += [scores[..., some].softmax(-1).nan_to_num(0) @ v[:, :, some], lse]
    out, lse = run(lambda graph, a, b, c, d: over_both(graph, (a, b), (c, d)), *parts)
    torch.testing.assert_close(out, scores.softmax(-1).nan_to_num(0) @ v)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    torch.testing.assert_close(run(with_sinks, out, lse, sinks), weights @ v)


@pytest.mark.parametrize("name", ["T5Gemma2ForConditionalGeneration", "Inkling2ForCausalLM"])
def test_captured_steps_of_padded_batches_equal_those_of_the_model(name):
    """Layers with sliding windows included."""
    model, use = use_of(name, "generate padded")
    expected = torch.stack(use(model).logits)
    with without_inductor():
        kvpass.apply(model, IdentityConfig(residual=16), lowering="reference")
        got, report = torch.stack(use(model).logits), kvpass.explain(model)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert report.fused == report.packed == len(report.layers)


@pytest.mark.slow_cases("Inkling2*")
@pytest.mark.parametrize("name", ["T5Gemma2ForConditionalGeneration", "Inkling2ForCausalLM"])
def test_captured_steps_over_lossy_pages_equal_eager_ones(name):
    model, use = use_of(name, "generate")
    results = [torch.stack(use(model).logits)]
    with without_inductor():
        for lowering in ("reference", "eager"):
            kvpass.apply(model, KIVIConfig(residual=16, group_size=16), lowering=lowering)
            results.append(torch.stack(use(model).logits))
            kvpass.remove(model)
    untouched, captured, eager = results
    torch.testing.assert_close(captured, eager, atol=1e-4, rtol=1e-4)
    assert (captured - untouched).abs().max() > 1e-4


@pytest.mark.slow
def test_attention_mass_is_refused():
    model, use = use_of("Inkling2ForCausalLM", "generate")
    with pytest.raises(KVPassError, match="attention mass is not available"):
        kvpass.apply(model, "h2o")
        use(model)


def use_of(name, use):
    """A tiny model, and one of its uses by `field`."""
    architecture = find(name)
    model = architecture.model()
    return model, uses_of(model, architecture)[use][0]

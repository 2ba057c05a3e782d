"""Unmodified ``model.generate`` over a packed cache: the compiled path gives the same tokens as the eager packed
path."""

import pytest
import torch

import kvpass

from tiny import called, llama, tokens

SCHEMES = ["kivi", "squat"]


@pytest.fixture(scope="module", params=SCHEMES)
def models(request):
    """The same weights under one scheme, in a compiled and an eager model."""
    torch._dynamo.reset()
    compiled = kvpass.apply(llama(), scheme=request.param)
    eager = kvpass.apply(llama(), scheme=request.param, lowering="eager")
    return compiled, eager


def left_padded(lengths=(40, 23, 61, 7)):
    width = max(lengths)
    ids, mask = torch.zeros(len(lengths), width, dtype=torch.long), torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = tokens(1, length, seed=row)
        mask[row, width - length :] = 1
    return dict(input_ids=ids, attention_mask=mask)


def generate(model, **inputs):
    torch.manual_seed(0)
    out = model.generate(**inputs, return_dict_in_generate=True)
    return out.sequences, out.past_key_values


MODES = {
    "greedy": dict(input_ids=tokens(1, 70), do_sample=False, max_new_tokens=70),
    "greedy from a prompt of one token": dict(input_ids=tokens(1, 1), do_sample=False, max_new_tokens=40),
    "sampling": dict(input_ids=tokens(2, 50), do_sample=True, top_k=20, max_new_tokens=30),
    "left-padded batch of 4": dict(**left_padded(), do_sample=False, max_new_tokens=40),
    "beam search": dict(input_ids=tokens(1, 30), num_beams=3, do_sample=False, max_new_tokens=20),
    "prompt lookup": dict(
        input_ids=tokens(1, 8).repeat(1, 9), do_sample=False, prompt_lookup_num_tokens=5, max_new_tokens=60
    ),
    "chunked prefill": dict(input_ids=tokens(1, 90), do_sample=False, prefill_chunk_size=40, max_new_tokens=10),
}


@pytest.mark.slow_cases("*prompt lookup", "*left-padded batch of 4", "*sampling", "squat*", "kivi-greedy")
@pytest.mark.nightly_cases("kivi-prompt lookup", "squat-sampling")
@pytest.mark.parametrize("mode", MODES)
def test_compiled_generation_equals_eager_packed_generation(models, mode):
    compiled, eager = (generate(model, **MODES[mode]) for model in models)
    assert torch.equal(compiled[0], eager[0])
    layers = compiled[1].layers
    assert all(type(layer).__name__ == "PackedLayer" for layer in layers)
    assert {layer.tokens for layer in layers} == {layer.tokens for layer in eager[1].layers}
    assert layers[0].tokens > 0


@pytest.mark.slow_cases("squat")
def test_a_second_turn_continues_the_same_cache(models):
    sequences = []
    for model in models:
        first, cache = generate(model, input_ids=tokens(2, 40), do_sample=False, max_new_tokens=30)
        turn = torch.cat([first, tokens(2, 9, seed=5)], 1)
        before = cache.get_seq_length()
        second, same = generate(model, input_ids=turn, past_key_values=cache, do_sample=False, max_new_tokens=30)
        assert same is cache and cache.get_seq_length() > before
        sequences.append(second)
    assert torch.equal(*sequences)


@pytest.mark.slow
def test_drafts_of_any_length_are_verified_by_one_graph():
    """While pages are packed, with rejections, and between steps of one token. Short calls that are not consecutive,
    such as short chat turns, are not compiled."""
    torch._dynamo.reset()
    compiled, eager = (kvpass.apply(llama(), "kivi", lowering=lowering) for lowering in ("auto", "eager"))
    graphs = []
    for calls in (
        [(40, 0), (1, 0), (9, 0), (1, 0), (1, 0), (14, 0), (1, 0)],
        [(40, 0), (1, 0), (5, 2), (16, 3), (2, 1), (1, 0), (12, 0), (9, 8), (7, 0), (3, 0)],
    ):
        (got, mine), (expected, other) = (called(model, calls) for model in (compiled, eager))
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
        total = sum(new - rejected for new, rejected in calls)
        for a, b in zip(mine.layers, other.layers, strict=True):
            assert a.tokens == b.tokens == total
            for states in zip(a.states(), b.states(), strict=True):
                torch.testing.assert_close(*(state.dequantize(total) for state in states), atol=1e-4, rtol=1e-4)
        graphs.append(sum(graph.compiled for graph in kvpass.explain(compiled).graphs))
    assert graphs == [1, 2] and kvpass.explain(compiled).fused == 2


def test_generation_is_packed_and_fused(models):
    compiled, _ = models
    generate(compiled, **MODES["greedy"])
    report = kvpass.explain(compiled)
    assert (report.packed, report.fused) == (2, 2)
    assert not any(graph.decoded or graph.refused for graph in report.graphs)
    assert "cpp" in {graph.lowerings["attend"] for graph in report.graphs if graph.compiled}  # without padding
    assert 0 < report.nbytes < report.full_nbytes


def test_packed_generation_is_close_to_full_precision_with_8_bits():
    model = llama()
    expected = generate(model, **MODES["greedy"])[0]
    kvpass.apply(model, scheme={"scheme": "kivi", "bits": 8}, lowering="eager")
    assert (generate(model, **MODES["greedy"])[0] == expected).float().mean() > 0.9


def test_a_static_cache_is_packed_at_fixed_capacity(models):
    results = []
    for model in models:
        sequences, cache = generate(
            model, input_ids=tokens(1, 40), do_sample=False, max_new_tokens=30, cache_implementation="static"
        )
        capacity = {layer.key_state.codes.shape[2] for layer in cache.layers}
        assert all(layer.max_cache_len for layer in cache.layers) and len(capacity) == 1
        results.append(sequences)
    assert torch.equal(*results)


OTHERS = {
    "rtn": dict(scheme="rtn", group_size=32),
    "kivi-lsq": "kivi-lsq",
    "squat-pre": "squat-pre",
    "logquant": "logquant",
    "asymkv": dict(scheme="asymkv", l_k=1, l_v=0, depth=None),
    "xquant": dict(scheme="xquant", kq=2, vq=0, km=2, vm=0, depth=None),
    "quarot": dict(scheme="quarot", group_size=32),
    "higgs": "higgs",
}


@pytest.mark.slow
@pytest.mark.nightly_cases("logquant", "*lsq", "squat-pre", "asymkv", "quarot", "rtn")
@pytest.mark.parametrize("name", OTHERS)
def test_every_scheme_generates_compiled_what_it_generates_eagerly(name):
    """A left-padded batch whose pages are packed by the prompt and, several times, by the decode step."""
    torch._dynamo.reset()
    inputs = dict(**left_padded((120, 96, 61, 7)), do_sample=False, max_new_tokens=70)
    compiled, eager = (kvpass.apply(llama(), scheme=OTHERS[name], lowering=lowering) for lowering in ("auto", "eager"))
    (got, cache), (expected, other) = generate(compiled, **inputs), generate(eager, **inputs)
    assert torch.equal(got, expected)
    for mine, theirs in zip(cache.layers, other.layers, strict=True):
        assert mine.tokens == theirs.tokens == 189
        for a, b in zip(mine.states(), theirs.states(), strict=True):
            prompt = a.spec.retention.pages(120)  # pages packed by the prompt, eagerly in both
            assert torch.equal(a.codes[:, :, :prompt], b.codes[:, :, :prompt])
            torch.testing.assert_close(a.dequantize(189)[:, :, -8:], b.dequantize(189)[:, :, -8:], atol=1e-4, rtol=1e-4)
    report = kvpass.explain(compiled)
    decoding = [graph for graph in report.graphs if graph.compiled]
    assert (report.packed, report.fused) == (2, 2) and len(decoding) == 1
    assert not any(graph.decoded or graph.refused for graph in report.graphs)

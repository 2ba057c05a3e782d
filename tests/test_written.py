"""Attention is recognized by what it computes: ways of writing it, and what resembles it and is something else."""

import pytest
import torch
import transformers
from torch.nn.functional import scaled_dot_product_attention

import kvpass
from kvpass.cache.state import KVState
from kvpass.compile.backend import Backend
from kvpass.layout.window import length_tensor

from common import coded, randn
from tiny import VOCABULARY, called, tokens
from zoo import ZOO

pytestmark = pytest.mark.usefixtures("nothing_compiled")

BATCH, HEADS, DIM, PAST = 2, 4, 16, 21
LEAST = torch.finfo(torch.float32).min


def merged(x):
    return x.reshape(BATCH * HEADS, -1, DIM)


def scores_of(q, k):
    return torch.bmm(merged(q), merged(k).transpose(1, 2))


def with_heads(scores):
    return scores.view(BATCH, HEADS, *scores.shape[1:])


def attended(weights, v):
    return torch.bmm(weights, merged(v)).view(BATCH, HEADS, -1, DIM)


def bias_by_head(q, k, v, mask, sinks):
    scores = with_heads(scores_of(q, k)) + mask
    return attended(scores.view(BATCH * HEADS, *scores.shape[2:]).softmax(-1), v)


def bounded(q, k, v, mask, sinks):
    scores = torch.max(with_heads(scores_of(q, k)) + mask, torch.full((), LEAST))
    weights = scores.view(BATCH * HEADS, *scores.shape[2:]).softmax(-1)
    return attended(with_heads(weights).view(BATCH * HEADS, *weights.shape[1:]), v)


def queries_of_three_dims(q, k, v, mask, sinks):
    q = q.permute(2, 0, 1, 3).reshape(q.shape[2], BATCH, HEADS * DIM)  # [S, B, H D]
    q = q.view(-1, BATCH * HEADS, DIM).transpose(0, 1)
    return attended(torch.bmm(q, merged(k).transpose(1, 2)).softmax(-1), v)


def sinks_that_rescale(q, k, v, mask, sinks):
    scores = q @ k.transpose(2, 3) * 0.3 + mask
    scale = (torch.logsumexp(scores, -1) - sinks.view(1, -1, 1)).float().sigmoid()
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v * scale.unsqueeze(-1)


def sinks_that_rescale_kept_dims(q, k, v, mask, sinks):
    scores = q @ k.transpose(2, 3)
    return scores.softmax(-1) @ v * (scores.logsumexp(-1, keepdim=True) - sinks.view(1, -1, 1, 1)).sigmoid()


def halves_of_values(q, k, v, mask, sinks):
    first, second = (half.repeat(1, 2, 1, 1) for half in v.chunk(2, dim=1))
    return scaled_dot_product_attention(q, k, first) - 0.5 * scaled_dot_product_attention(q, k, second)


def heads_in_another_order(q, k, v, mask, sinks):
    return scaled_dot_product_attention(q, k.flip(1), torch.stack([v[:, 2], v[:, 0], v[:, 0], v[:, 3]], 1))


WAYS = [
    bias_by_head, bounded, queries_of_three_dims, sinks_that_rescale, sinks_that_rescale_kept_dims, halves_of_values,
    heads_in_another_order,
]  # fmt: skip


def sinks_with_another_sign(q, k, v, mask, sinks):
    scores = q @ k.transpose(2, 3) * 0.3
    return scores.softmax(-1) @ v * (sinks.view(1, -1, 1) - scores.logsumexp(-1)).sigmoid().unsqueeze(-1)


def a_temperature_per_query(q, k, v, mask, sinks):
    scores = q @ k.transpose(2, 3) * 0.3
    return scores.softmax(-1) @ v * (scores.logsumexp(-1) - sinks.sum()).sigmoid().unsqueeze(-1)


def a_bound_that_matters(q, k, v, mask, sinks):
    return torch.max(q @ k.transpose(2, 3) + mask, torch.full((), -1.0)).softmax(-1) @ v


def a_mixture_of_heads(q, k, v, mask, sinks):
    return scaled_dot_product_attention(q, k, v + v.flip(1))


def tokens_in_another_order(q, k, v, mask, sinks):
    return scaled_dot_product_attention(q, k, v.flip(2))


OTHERS = [
    sinks_with_another_sign, a_temperature_per_query, a_bound_that_matters, a_mixture_of_heads,
    tokens_in_another_order,
]  # fmt: skip


def stepped(way, queries=1):
    """The report of the graph of attention written in a ``way``, its output, and that of the same without the pass."""
    states, new = [], []
    for which in range(2):
        state = KVState.allocate(coded(32, "token", 1, 8), BATCH, HEADS, DIM, torch.float32, torch.device("cpu"), PAST)
        state.append(randn(which, BATCH, HEADS, PAST, DIM), 0)
        states.append(state)
        new.append(randn(10 + which, BATCH, HEADS, queries, DIM))
    length = length_tensor(PAST, torch.device("cpu"))
    torch._dynamo.reset()
    mask = torch.zeros(BATCH, 1, queries, PAST + queries)
    mask[0, :, :, :5] = LEAST
    torch._dynamo.mark_dynamic(length, 0)
    torch._dynamo.mark_dynamic(mask, 3)

    def step(q, k, v, length, mask, sinks, *tensors):
        half, wholes = len(tensors) // 2, []
        for i, (state, present) in enumerate(zip(states, (k, v), strict=True)):
            part = list(tensors[i * half : (i + 1) * half])
            wholes.append(torch.cat([torch.ops.kvpass.dequantize(part, length, state.text), present], 2))
        return way(q, *wholes, mask, sinks)

    packs = (tensor for state in states for tensor in state.pack)
    given = randn(5, BATCH, HEADS, queries, DIM), *new, length, mask, randn(6, HEADS), *packs
    backend = Backend(lowering="reference", interpret=True)
    got = torch.compile(step, backend=backend, fullgraph=True)(*given)
    (report,) = backend.graphs
    return report, got, step(*given)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_attention_is_fused_however_it_is_written(way, queries):
    report, got, expected = stepped(way, queries)
    assert (report.fused, report.decoded, report.refused) == (1, 0, [])
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: other.__name__)
def test_what_is_something_else_stays_as_it_is(other):
    report, got, expected = stepped(other)
    assert (report.fused, report.decoded) == (0, 2) and report.refused
    torch.testing.assert_close(got, expected)


def test_values_in_another_order_are_dequantized_and_the_report_says_so():
    report, _, _ = stepped(halves_of_values)
    assert report.reconstructed == 1 and "over a dequantized cache" in str(report)


# ---------------------------------------------------------------- models


def diffllama():
    config = transformers.DiffLlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=512,
    )  # fmt: skip
    return transformers.DiffLlamaForCausalLM(config)


def granite_swa():
    config = transformers.GraniteSWAConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, layer_types=["full_attention"] * 2, pad_token_id=0,
    )  # fmt: skip
    return transformers.GraniteSWAForCausalLM(config)


def trocr():
    config = transformers.TrOCRConfig(
        vocab_size=VOCABULARY, d_model=64, decoder_ffn_dim=96, decoder_layers=2, decoder_attention_heads=4,
        max_position_embeddings=512,
    )  # fmt: skip
    return transformers.TrOCRForCausalLM(config)


MODELS = {
    "DiffLlama": diffllama,
    "Granite SWA": granite_swa,
    "TrOCR": trocr,
    "XGLM": lambda: ZOO["XGLM"].model("eager"),
}


@pytest.fixture(params=MODELS)
def model(request):
    if request.param == "Granite SWA" and not hasattr(transformers, "GraniteSWAConfig"):
        pytest.skip("this version of transformers has no Granite SWA")
    torch.manual_seed(0)
    return MODELS[request.param]().eval()


CALLS = [(30, 0), *[(1, 0)] * 6, (4, 2), (1, 0)]


def test_a_models_steps_are_those_of_the_untouched_model(model):
    expected, _ = called(model, CALLS)
    kvpass.apply(model, kvpass.schemes.IdentityConfig(residual=8))
    found, _ = called(model, CALLS)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert kvpass.explain(model).fused == 2


@pytest.mark.slow_cases("Granite*", "TrOCR", "XGLM")
def test_the_default_scheme_serves_the_model(model, recwarn):
    kvpass.apply(model)
    with torch.no_grad():
        model.generate(input_ids=tokens(2, 150), max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None)
    report = kvpass.explain(model)
    assert "waterfill" in report.scheme and not report.instead_of and report.fused == 2, str(report)
    assert not [warning for warning in recwarn if "kvpass" in str(warning.message)]

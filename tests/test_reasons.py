"""Every reason that the pass gives for an attention it does not match, each on a graph to which it applies."""

import re

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import kvpass
from kvpass.cache.state import KVState
from kvpass.compile.find import find, find_unpacked
from kvpass.compile.normalise import normalise
from kvpass.schemes import LayerGeometry

SCALE = 32**-0.5
TOKENS, GEOMETRY = 40, LayerGeometry(0, 1, 2, 32, torch.float32, torch.device("cpu"))


def captured(step, *inputs, look):
    """The result of ``look`` on the normalized graph of ``step``."""
    torch._dynamo.reset()
    said = []

    def backend(gm, _):
        said.append(look(normalise(gm).graph))
        return gm.forward

    with torch.no_grad():
        torch.compile(step, backend=backend, fullgraph=True)(*inputs)
    return said[0]


def reasons(attend):
    """Why ``attend(q, k, v)``, over two packed heads and one new token, is not matched."""
    plan = kvpass.schemes.get("kivi").plan(GEOMETRY)
    states = [KVState.allocate(spec, 1, 2, 32, torch.float32, "cpu", 64) for spec in (plan.key, plan.value)]
    x = torch.randn(1, 2, TOKENS, 32)
    for state in states:
        state.append(x, 0)
    key, value = states

    def step(q, new, length, key_tensors, value_tensors):
        k, v = (
            torch.cat([torch.ops.kvpass.dequantize(tensors, length, text), new], 2)
            for tensors, text in ((key_tensors, key.text), (value_tensors, value.text))
        )
        return attend(q, k, v)

    inputs = torch.randn(1, 2, 1, 32), x[:, :, :1], key.length_tensor(TOKENS), key.pack, value.pack
    found, refused = captured(step, *inputs, look=lambda graph: find(graph, {}))
    return found, refused


def scores(q, k):
    return q @ k.transpose(2, 3) * SCALE


def with_sinks(q, k, v, logits, drop=slice(None, -1), behind=True):
    own = scores(q, k)
    both = torch.cat([own, logits] if behind else [logits, own], -1)
    return (both - both.max(-1, keepdim=True).values).softmax(-1)[..., drop] @ v


def sinks():
    return torch.ones(1, 2, 1, 1)


MATCHED = {
    "SDPA": lambda q, k, v: scaled_dot_product_attention(q, k, v),
    "softmax": lambda q, k, v: scores(q, k).softmax(-1) @ v,
    "sinks": lambda q, k, v: with_sinks(q, k, v, sinks()),
}


def returned(q, k, v):
    weights = scores(q, k).softmax(-1)
    return weights @ v, weights.to(torch.float64)


def counted(q, k, v):
    weights = scores(q, k).softmax(-1)
    return weights @ v + weights.sum()


def with_their_mean(q, k, v):
    own = scores(q, k)
    return (own + own.mean(-1, keepdim=True)).softmax(-1) @ v


def scores_returned(q, k, v):
    own = scores(q, k)
    return own.softmax(-1) @ v, own


REASONS = {
    "weights are returned": (returned, "the attention weights are returned: leave out output_attentions"),
    "weights are read twice": (counted, "weights are also used outside .*: by aten.matmul.default, aten.sum.default"),
    "scores are returned": (scores_returned, "the attention scores are returned: leave out output_attentions"),
    "scores are read twice": (with_their_mean, "scores are also used outside .*aten.mean.dim"),
    "learned scale": (
        lambda q, k, v: (scores(q, k) * torch.ones(2, 1, 1)).softmax(-1) @ v,
        "aten.mul.Tensor is applied where scores are multiplied, scaled or masked",
    ),
    "einsum": (
        lambda q, k, v: torch.einsum("bhsd,bhtd->bhst", q, k).softmax(-1) @ v,
        "aten.einsum.default is applied where scores are multiplied",
    ),
    "softmax over queries": (
        lambda q, k, v: scores(q, k).softmax(-2) @ v,
        "softmax over a dim other than the keys",
    ),
    "no product behind": (
        lambda q, k, v: torch.einsum("bhst,bhtd->bhsd", scores(q, k).softmax(-1), v),
        "softmax is followed by aten.einsum.default instead of a product with the values",
    ),
    "sinks that stay": (
        lambda q, k, v: with_sinks(q, k, torch.cat([v, v[:, :, :1]], 2), sinks(), slice(None)),
        "the sink weights are not sliced off after the softmax",
    ),
    "sinks in front": (
        lambda q, k, v: with_sinks(q, k, v, sinks(), slice(1, None), behind=False),
        "something other than one logit per head or query is concatenated after the scores",
    ),
    "two sinks": (
        lambda q, k, v: with_sinks(q, k, v, sinks().repeat(1, 1, 1, 2), slice(None, -2)),
        "something other than one logit per head or query",
    ),
    "keys are permuted": (
        lambda q, k, v: (q @ k.permute(0, 1, 3, 2) * SCALE).softmax(-1) @ v,
        "keys enter the product through aten.permute.default",
    ),
    "bias before the softcap": (
        lambda q, k, v: (((scores(q, k) + k[:, :, :, 0][:, :, None]) / 30).tanh() * 30).softmax(-1) @ v,
        "a bias is added before the softcap",
    ),
    "keys are scaled": (
        lambda q, k, v: scaled_dot_product_attention(q, k * 2, v),
        "aten.mul.Tensor stands between the cache and the attention",
    ),
    "keys are turned over": (
        lambda q, k, v: scaled_dot_product_attention(q[..., :16], k.reshape(1, 2, -1, 16), v.repeat(1, 1, 2, 1)),
        "keys or values are reshaped by something other than head repetition",
    ),
    "another token": (
        lambda q, k, v: scaled_dot_product_attention(q, *(torch.cat([x, x[:, :, :1], x[:, :, :1]], 2) for x in (k, v))),
        "concatenated with something other than the new tokens",
    ),
    "keys of another sort": (
        lambda q, k, v: scaled_dot_product_attention(q + v.mean(), q * 2, q * 2),
        "keys or values come from aten.mul.Tensor, not from a packed cache",
    ),
    "keys of the caller": (
        lambda q, k, v: scaled_dot_product_attention(q + k.mean(), q, q),
        "keys or values come from placeholder .*, not from a packed cache",
    ),
    "dropout": (
        lambda q, k, v: scaled_dot_product_attention(q, k, v, dropout_p=0.5),
        r"attention with dropout: call model.eval\(\)",
    ),
}


@pytest.mark.parametrize("name", MATCHED)
def test_fused_attention_has_no_reason(name):
    found, refused = reasons(MATCHED[name])
    assert len(found) == 1 and not refused


@pytest.mark.parametrize("name", REASONS)
def test_reasons_match_their_graphs(name):
    attend, reason = REASONS[name]
    _, refused = reasons(attend)
    (said,) = refused
    assert re.search(reason, said), said
    assert ("output_attentions" in said) == ("returned" in name)


def test_attention_of_a_decoder_without_a_cache_has_to_be_causal():
    q = torch.randn(1, 2, 8, 32)

    def step(q):
        return scaled_dot_product_attention(q, q, q)

    _, refused = captured(step, q, look=find_unpacked)
    assert refused == ["attention that is not causal over the tokens of the call"]

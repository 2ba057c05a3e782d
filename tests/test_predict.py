"""Predictors: what they compute, what is stored for them, and what a chain of layers dequantizes to."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpass import KVPassError, LogSparse, PackedKV, schemes
from kvpass.cache.state import KVState
from kvpass.codec import dequantize_pages, quantize_pages
from kvpass.codec.center import fit_center
from kvpass.codec.predictor import MATRICES, matrix, parse_predictor, predict
from kvpass.codec.rope import rotate
from kvpass.codec.tensors import Pack
from kvpass.lowering import reference
from kvpass.lowering.call_types import AttendCall
from kvpass.lowering.inductor import attend as inductor_attend
from kvpass.schemes import LayerGeometry

from common import DIM, chunkings, coded, naive_unpack, only_reference, randn, recoded, seeds, state_of

HEADS, WIDTH = 2, 2 * DIM
GEOMETRY = LayerGeometry(0, 3, HEADS, DIM, torch.float32, torch.device("cpu"))
predictors = st.sampled_from(("bias", "linear", "linear-4", "low-rank", "low-rank-4", "mlp"))


def packed_matrix(seed: int, outputs: int, inputs: int) -> list[torch.Tensor]:
    spec = coded(4, "channel", outputs, outputs)
    parts = quantize_pages(randn(seed, 1, 1, outputs, inputs) / inputs**0.5, spec)
    return [part[0, 0, 0] for part in parts]


def weights_of(predictor: str, role: int, seed: int, layers: int = 1) -> list[torch.Tensor]:
    """Random weights for the keys (role 0) or values of a layer, to predict from ``layers`` below."""
    kind, bits = parse_predictor(predictor)
    inputs, hidden = WIDTH * (layers + role), {"bias": 0, "linear": WIDTH, "low-rank": 8, "mlp": 2 * WIDTH}[kind]
    shapes = [(hidden, inputs)] if kind == "linear" else [(hidden, inputs), (WIDTH, hidden)]
    out = []
    for i, shape in enumerate(shapes[: MATRICES[kind]]):
        out += packed_matrix(seed + i, *shape) if bits == 4 else [randn(seed + i, *shape).half() / shape[1] ** 0.5]
    return out + [randn(seed + 9, size).half() for size in ((hidden, WIDTH) if kind == "mlp" else (WIDTH,))]


# ---------------------------------------------------------------- the function


def naive(predictor, tensors, references):
    """One token at a time, in float64."""
    kind, bits = parse_predictor(predictor)
    step = 3 if bits == 4 else 1
    mats = [matrix(tensors[i * step : (i + 1) * step]).double() for i in range(MATRICES[kind])]
    biases = [bias.double() for bias in tensors[MATRICES[kind] * step :]]
    batch, heads, tokens, dim = references[0].shape
    out = torch.empty(batch, heads, tokens, dim, dtype=torch.float64)
    for b in range(batch):
        for t in range(tokens):
            x = torch.cat([reference[b, h, t] for reference in references for h in range(heads)]).double()
            if kind == "bias":
                y = biases[0]
            elif kind == "linear":
                y = mats[0] @ x + biases[0]
            elif kind == "low-rank":
                y = mats[1] @ (mats[0] @ x) + biases[0]
            else:
                normed = (x - x.mean()) / (x.var(unbiased=False) + 1e-5).sqrt()
                hidden = mats[0] @ normed + biases[0]
                y = mats[1] @ (hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))) + biases[1]
            out[b, :, t] = y.view(heads, dim)
    return out


@given(predictors, st.sampled_from((0, 1)), seeds)
def test_prediction_is_the_definition_token_by_token(predictor, role, seed):
    tensors = weights_of(predictor, role, seed)
    references = [randn(seed + i, 2, HEADS, 16, DIM) for i in range(1 + role)]
    expected = naive(predictor, tensors, references)
    torch.testing.assert_close(predict(predictor, tensors, references, 8).double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("predictor", ["linear", "low-rank", "mlp"])
def test_a_page_is_predicted_alike_alone_and_among_others(predictor):
    tensors, x = weights_of(predictor, 0, 0), randn(1, 2, HEADS, 7 * 32, DIM)
    together = predict(predictor, tensors, [x], 32)
    for page in range(7):
        rows = slice(32 * page, 32 * page + 32)
        assert torch.equal(predict(predictor, tensors, [x[:, :, rows]], 32), together[:, :, rows])


@given(seeds)
def test_four_bit_weights_are_unpacked_as_they_were_packed(seed):
    codes, scale, zero_point = packed_matrix(seed, 32, 12)
    expected = torch.from_numpy(naive_unpack(codes.numpy(), 4)).double() * scale.double() + zero_point.double()
    torch.testing.assert_close(matrix([codes, scale, zero_point]).double(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("predictor", ["mlp-4", "quadratic", "linear-2"])
def test_unknown_predictors_are_refused(predictor):
    with pytest.raises(KVPassError, match="There is no predictor"):
        coded(2, "token", 16, 32, predictor=predictor)


# ---------------------------------------------------------------- the mean


def test_only_a_significant_mean_is_subtracted():
    x = randn(0, 1, 1, 400, 8)
    x[..., 3] += 2
    center = fit_center(x, torch.float16)
    assert center.shape == (1, 1, 1, 8) and abs(center[0, 0, 0, 3] - 2) < 0.2
    assert not center[..., [0, 1, 2, 4, 5, 6, 7]].any()
    assert not fit_center(x[:, :, :1], torch.float16).any()  # one token says nothing about a mean


@given(chunkings(), seeds, st.sampled_from((torch.float32, torch.bfloat16)))
def test_centred_keys_are_the_residual_and_the_mean(chunks, seed, dtype):
    spec = coded(2, "token", 16, 32, residual=0, sinks=2, center=True)
    x = (randn(seed, 2, 2, sum(chunks), DIM) + torch.arange(DIM)).to(dtype)
    state, n = state_of(spec, x, chunks), x.shape[2]
    if packed := spec.retention.packed(n):
        plain, page = recoded(spec, predictor=""), x[:, :, 2 : 2 + packed]
        rest = (page.float() - state.center.float()).to(dtype)
        expected = (dequantize_pages(*quantize_pages(rest, plain), plain) + state.center.float()).to(dtype)
        with only_reference():
            assert torch.equal(state.dequantize(n)[:, :, 2 : 2 + packed], expected)
            assert torch.equal(PackedKV.view(state, n).dequantize(), state.dequantize(n))
        assert state.nbytes >= state.center.nbytes > 0


def test_centring_keys_with_a_mean_lowers_the_error_of_a_grid():
    x = randn(0, 1, HEADS, 260, DIM) + 10 * randn(1, 1, HEADS, 1, DIM)
    errors = []
    for center in (True, False):
        spec = schemes.get("higgs", center=center).plan(GEOMETRY).key
        errors.append((state_of(spec, x).dequantize(260) - x).square().mean())
    assert errors[0] < 0.1 * errors[1]


@pytest.mark.slow
@pytest.mark.nightly_cases("130-higgs-", "5-*")
@pytest.mark.parametrize("name, rope", [("higgs", ""), ("uniform", "half-8")])
@pytest.mark.parametrize("n", [5, 130])
def test_fused_attention_over_centred_keys(name, n, rope):
    """The mean meets the query once, or is rotated with the keys."""
    if name == "uniform":
        k_spec = coded(2, "token", 16, 32, center=True, pre_rope=bool(rope))
        v_spec = coded(2, "token", 16, 32, residual=32)
    else:
        plan = schemes.get(name, center=True).plan(GEOMETRY)
        k_spec, v_spec = plan.key, plan.value
    x = [randn(i, 2, HEADS, n + 1, DIM) + 3 for i in range(2)]
    states = [state_of(s, t[:, :, :n], room=n) for s, t in zip((k_spec, v_spec), x, strict=True)]
    assert n < 32 or states[0].center.abs().min() > 1
    packs = [Pack.of(s.pack, s.spec) for s in states]
    angle = randn(3, 2, n + 80, DIM // 2)
    rotary = (angle.cos(), angle.sin(), rope) if rope else None
    q, new = randn(7, 2, 6, 1, DIM), [t[:, :, n:] for t in x]
    with only_reference():
        k, v = (s.dequantize(n) for s in states)
    k = k if rotary is None else rotate(k, *rotary)
    call = AttendCall(q, *packs, n, *new, None, False, 0.3, 0.0, k_spec, v_spec, rotary)
    expected = reference.attention(call, torch.cat([k, new[0]], 2), torch.cat([v, new[1]], 2))
    torch.testing.assert_close(reference.attend(call)[0], expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(inductor_attend.attend(call)[0], expected, atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------- a chain of layers


BACKBONES = ("higgs", "kivi", "rtn-2", "quarot-2")


def aqua(**fields):
    return schemes.get("aqua", **{"rope": "post", "residual": 32, **fields})


def plans(backbone: str, predictor: str, layers: int = 1):
    """Three layers of AQUA-KV with small pages, and the same backbone without predictors."""
    small = {} if backbone == "higgs" else dict(group_size=16)
    coding = schemes.get(backbone, **small)
    below = tuple(range(1, layers + 1))
    config = aqua(backbone=coding, first_layer=coding, predictor=predictor, sinks=2, layers_below=below)
    layers = [dataclasses.replace(GEOMETRY, index=i, previous_layer=i - 1 if i else None) for i in range(3)]
    return [config.plan(layer) for layer in layers]


def build(plans, weights, dtype=torch.float32):
    """States of keys and values of every layer, linked."""
    out = []
    for i, plan in enumerate(plans):
        pair = [KVState.allocate(s, 2, HEADS, DIM, dtype, "cpu", 8) for s in (plan.key, plan.value)]
        for role, state in enumerate(pair):
            if plan.looks_at_previous:
                state.previous_layer, state.predictor = out[i - 1][role], weights[i][role]
                state.layers_below = plan.layers_below
        if plan.looks_at_previous:
            pair[1].same_layer_keys = pair[0]
        out.append(pair)
    return out


def feed(states, tokens, chunks, layers=1):
    """Append ``tokens[layer][role]`` in chunks, layer by layer. Returns the reconstructions that each layer handed on,
    concatenated over chunks. ``layers``: how many layers below are predicted from."""
    n, left, spec = 0, [[[], []] for _ in states], states[0][0].spec
    for chunk in chunks:
        leaving = spec.retention.packed(n + chunk) - spec.retention.packed(n)
        edges = [torch.full((2, layers * HEADS, max(32, leaving), DIM), torch.nan) for _ in range(2)]
        for i, pair in enumerate(states):
            for role, state in enumerate(pair):
                state.reserve(n + chunk)
                torch.ops.kvpass.append_(
                    state.pack, state.length_tensor(n), tokens[i][role][:, :, n : n + chunk], None, None, state.text,
                    "reference", edges[role], edges[0] if role else None, list(state.predictor),
                )  # fmt: skip
                left[i][role].append(edges[role][:, :HEADS, :leaving].clone())
        n += chunk
    return [[torch.cat(parts, 2) for parts in pair] for pair in left]


def example(seed, predictor, backbone="higgs", length=150, layers=1):
    drawn = plans(backbone, predictor, layers)
    weights = [[weights_of(predictor, role, seed + 20 * i + 3 * role, layers) for role in range(2)] for i in range(3)]
    tokens = [[randn(seed + 7 * i + role, 2, HEADS, length, DIM) for role in range(2)] for i in range(3)]
    return drawn, weights, tokens


@given(predictors, st.sampled_from(BACKBONES), st.sampled_from((1, 2)), chunkings(), seeds)
def test_dequantizing_layer_by_layer_equals_the_values_seen_while_quantizing(predictor, backbone, layers, chunks, seed):
    """Bit for bit, and for any chunking: quantized values, scales and dequantized tokens."""
    length, layers = sum(chunks), 1 if predictor == "mlp" else layers
    drawn, weights, tokens = example(seed, predictor, backbone, length, layers)
    if backbone in ("higgs", "quarot-2"):  # their mean is that of the tokens packed first
        drawn[0] = dataclasses.replace(drawn[0], key=recoded(drawn[0].key, center=False))
    at_once, in_chunks = build(drawn, weights), build(drawn, weights)
    edges, again = feed(at_once, tokens, [length], layers), feed(in_chunks, tokens, chunks, layers)
    packed = drawn[0].key.retention.packed(length)
    for i in range(3):
        for role in range(2):
            with only_reference():
                decoded = at_once[i][role].dequantize(length)
                assert torch.equal(decoded, in_chunks[i][role].dequantize(length))
            assert torch.equal(decoded[:, :, 2 : 2 + packed], edges[i][role])
            assert torch.equal(edges[i][role], again[i][role])
            exact = torch.ones(length, dtype=torch.bool)
            exact[2 : 2 + packed] = False
            assert torch.equal(decoded[:, :, exact], tokens[i][role][:, :, exact])


@pytest.mark.slow_cases("150-*")
@pytest.mark.parametrize("backbone, predictor", [("higgs", "linear-4"), ("kivi", "mlp")])
@pytest.mark.parametrize("length", [150, 40])
def test_the_compiled_chain_equals_the_reference(backbone, predictor, length):
    """With many pages and with one."""
    drawn, weights, tokens = example(3, predictor, backbone, length)
    states = build(drawn, weights)
    feed(states, tokens, [length])
    for pair in states:
        for state in pair:
            with only_reference():
                expected = state.dequantize(length)
            torch.testing.assert_close(state.dequantize(length), expected, atol=1e-5, rtol=1e-5)


@given(st.sampled_from(("linear", "linear-4", "low-rank", "mlp")), st.sampled_from(BACKBONES), seeds)
def test_zero_predictors_are_the_backbone_bit_for_bit(predictor, backbone, seed):
    drawn, weights, tokens = example(seed, predictor, backbone)
    weights = [[[torch.zeros_like(t) for t in one] for one in pair] for pair in weights]
    states = build(drawn, weights)
    feed(states, tokens, [150])
    for i, plan in enumerate(drawn):
        for role, spec in enumerate((plan.key, plan.value)):
            spec = recoded(spec, predictor="" if i else spec.transform.predictor)
            alone, pages = state_of(spec, tokens[i][role]), spec.retention.pages(150)
            for name in ("codes", "scale", "zero_point"):
                assert torch.equal(getattr(states[i][role], name)[:, :, :pages], getattr(alone, name)[:, :, :pages])
            with only_reference():
                assert torch.equal(states[i][role].dequantize(150), alone.dequantize(150))


@given(predictors, seeds)
def test_a_lossless_backbone_is_the_identity_whatever_is_predicted(predictor, seed):
    _, weights, tokens = example(seed, predictor)
    config = aqua(backbone="identity", first_layer="identity", predictor=predictor)
    states = build(
        [config.plan(dataclasses.replace(GEOMETRY, previous_layer=i - 1 if i else None)) for i in range(3)], weights
    )
    feed(states, tokens, [100, 50])
    for pair, expected in zip(states, tokens, strict=True):
        for state, x in zip(pair, expected, strict=True):
            torch.testing.assert_close(state.dequantize(150), x, atol=1e-5, rtol=1e-5)


def test_log_sparse_tokens_are_predicted_from_the_same_tokens_below():
    config = aqua(retention=LogSparse(32), sinks=0, predictor="linear")
    drawn = [config.plan(dataclasses.replace(GEOMETRY, previous_layer=i - 1 if i else None)) for i in range(3)]
    _, weights, tokens = example(5, "linear", length=400)
    same = [[weights[1][0], weights[1][1]] for _ in range(3)]
    states = build(drawn, same)
    # the layer below predicts this one exactly, so the residual is 0
    for i in (1, 2):
        previous_layer = [t.clone() for t in tokens[i - 1]]
        tokens[i][0] = predict("linear", same[i][0], [previous_layer[0]], 400)
        tokens[i][1] = predict("linear", same[i][1], [previous_layer[1], tokens[i][0]], 400)
    feed(states, tokens, [150] + [1] * 250)
    first = (states[0][0].dequantize(400) - tokens[0][0]).square().mean()
    second = (states[1][0].dequantize(400) - tokens[1][0]).square().mean()
    assert first > 0 and second < 3 * first  # predicted from other tokens it would be far off
    shuffled = predict("linear", same[1][0], [tokens[0][0].roll(1, 2)], 400)
    assert second < 0.2 * (shuffled - tokens[1][0]).square().mean()


def test_a_layer_that_repeats_the_one_two_below_is_predicted_from_that():
    drawn, _, tokens = example(7, "linear", "kivi", layers=2)
    bias = torch.zeros(WIDTH).half()
    of_keys = torch.cat([torch.zeros(WIDTH, WIDTH), torch.eye(WIDTH)], 1).half()
    of_values = torch.cat([of_keys, torch.zeros(WIDTH, WIDTH).half()], 1)
    states = build(drawn, [[[torch.zeros_like(of_keys), bias], [torch.zeros_like(of_values), bias]]] * 2 + [
        [[of_keys, bias], [of_values, bias]]
    ])  # fmt: skip
    tokens[2] = tokens[0]
    feed(states, tokens, [150], layers=2)
    for role in range(2):
        errors = [
            (state[role].dequantize(150) - x[role]).square().sum() for state, x in zip(states, tokens, strict=True)
        ]
        assert 0 < errors[2] < 0.4 * errors[0] and 0 < errors[2] < 0.4 * errors[1]


@pytest.mark.parametrize("sinks", [0, 4])
def test_keys_that_are_not_predicted_are_stored_as_by_their_scheme_alone(sinks):
    """A first layer on a grid that did not subtract the mean of keys with a bias would ruin all layers above."""
    alone = schemes.get("higgs", sinks=sinks, rope="pre", residual=128)
    scheme = schemes.get("aqua-paper", backbone="higgs", first_layer="higgs", sinks=sinks, predicted="values")
    for layer in (GEOMETRY, dataclasses.replace(GEOMETRY, index=1, previous_layer=0)):
        assert scheme.plan(layer).key == alone.plan(layer).key
    assert scheme.plan(GEOMETRY).key.transform.center == (sinks > 0)


def test_a_residual_is_no_tensor_of_its_own():
    spec = coded(2, "token", 16, 32, predictor="linear")
    with pytest.raises(KVPassError, match="needs the layer below"):
        PackedKV.from_float(randn(0, 1, 2, 40, DIM), spec)

"""Groups across heads: one wide head quantized as before, stored by head."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpass
from kvpass import HeavyHitter, KVPassError
from kvpass.codec import dequantize_pages, quantize_pages
from kvpass.schemes import HIGGSConfig, LayerGeometry, QuaRotConfig, RTNConfig, get

from common import randn, seeds
from tiny import llama, step_by_step, tokens

PAGE = 32
BACKBONES = {
    "higgs": HIGGSConfig(residual=PAGE),
    "higgs-lsq": HIGGSConfig(residual=PAGE, grid="d2n64", fit="lsq"),
    "quarot": QuaRotConfig(residual=PAGE, bits=2),
    "rtn": RTNConfig(residual=PAGE, bits=3),
}


def geometry(heads, head_dim):
    return LayerGeometry(0, 1, heads, head_dim, torch.float32, torch.device("cpu"))


def spec_of(config, heads, head_dim, **fields):
    return get(config, **fields).plan(geometry(heads, head_dim)).value


@settings(max_examples=12)
@given(seeds, st.sampled_from(sorted(BACKBONES)), st.sampled_from([(3, 32, 96), (2, 32, 16), (4, 16, 64), (3, 16, 48)]))
def test_heads_are_quantized_as_one_head_of_all_channels(seed, name, shape):
    heads, head_dim, group = shape
    x = randn(seed, 2, heads, 2 * PAGE, head_dim) * torch.exp2(randn(seed + 1, heads, 1, head_dim))
    spec = spec_of(BACKBONES[name], heads, head_dim, across_heads=True, group_size=group)
    wide = spec_of(BACKBONES[name], 1, heads * head_dim, group_size=group)
    got = dequantize_pages(*quantize_pages(x, spec), spec)
    one = x.transpose(1, 2).flatten(2).unsqueeze(1)
    wanted = dequantize_pages(*quantize_pages(one, wide), wide)
    assert torch.equal(got.transpose(1, 2).flatten(2), wanted[:, 0])


@pytest.mark.parametrize("name", sorted(BACKBONES))
def test_layers_are_quantized_together_as_one_by_one(name):
    spec = spec_of(BACKBONES[name], 3, 32, across_heads=True, group_size=1024)
    layers = [randn(seed, 1, 3, PAGE, 32) for seed in range(2)]
    together = quantize_pages(torch.cat(layers, 1), spec)
    for i, x in enumerate(layers):
        alone = quantize_pages(x, spec)
        assert all(torch.equal(all_.chunk(2, 1)[i], own) for all_, own in zip(together, alone, strict=True))


@pytest.mark.parametrize(
    "config, bits",
    [(HIGGSConfig(), 2 + 16 / 1024), (QuaRotConfig(bits=2), 2 + 32 / 1024), (RTNConfig(bits=2), 2 + 32 / 1024)],
)
def test_groups_of_1024_cost_the_papers_bits(config, bits):
    spec = spec_of(config, 8, 128, across_heads=True, group_size=1024, residual=128)
    kept = quantize_pages(randn(0, 1, 8, 128, 128), spec)
    assert 8 * sum(tensor.nbytes for tensor in kept) / (8 * 128 * 128) == bits


def test_the_papers_aqua_has_groups_across_heads_in_every_layer():
    config = get("aqua-paper")
    plans = [
        config.plan(LayerGeometry(i, 2, 8, 128, torch.float32, torch.device("cpu"), i - 1 if i else None))
        for i in (0, 1)
    ]
    for plan in plans:
        assert all(str(spec.quantizer).endswith("g1024 across 8 heads") for spec in (plan.key, plan.value))
    assert [plan.key.bits for plan in plans] == [8, 4]  # of pairs of values


@pytest.mark.parametrize(
    "fields, says",
    [
        (dict(group_size=48), "group_size=48 does not divide the 64 channels of all heads"),
        (dict(retention=HeavyHitter(64, recent=32)), "supports neither eviction"),
    ],
)
def test_impossible_groups_are_refused(fields, says):
    with pytest.raises(KVPassError, match=says):
        spec_of(HIGGSConfig(), 2, 32, across_heads=True, **fields)


def test_groups_across_heads_have_scales_of_16_bits():
    with pytest.raises(KVPassError, match="leave out scale_bits or across_heads"):
        RTNConfig(across_heads=True, scale_bits=8)


@torch.no_grad()
def test_a_chunked_prompt_is_stored_as_a_whole_one():
    scheme = HIGGSConfig(residual=16, across_heads=True, group_size=1024)
    ids, runs = tokens(2, 70), []
    for chunks in ([70], [20, 13, 37]):
        model, cache = kvpass.apply(llama(), scheme, lowering="eager"), None
        for part in ids.split(chunks, 1):
            cache = model(input_ids=part, past_key_values=cache, use_cache=True).past_key_values
        runs.append(cache.layers[0].states()[0].dequantize(70))
    torch.testing.assert_close(*runs)


@pytest.mark.slow
@torch.no_grad()
def test_compiled_steps_dequantize_such_pages_and_say_so():
    scheme, ids = HIGGSConfig(residual=16, across_heads=True, group_size=1024), tokens(1, 60)
    (got, _, report), (wanted, _, _) = (
        step_by_step(llama(), scheme, ids, 50, lowering=how) for how in ("auto", "eager")
    )
    torch.testing.assert_close(got, wanted, atol=1e-3, rtol=1e-3)
    (decoding,) = [graph for graph in report.graphs if graph.compiled]
    assert decoding.lowerings["attend"] == "reference"

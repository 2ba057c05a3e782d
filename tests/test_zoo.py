"""Every architecture of the zoo: untouched against lossless pages, and for some, compiled against eager quantization.

``pytest -m zoo`` prints the matrix. ``--whole-zoo`` runs every architecture with both kinds of attention and of cache,
and compares compiled with eager lossy quantization in each.
"""

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

import kvpass
from kvpass import KVPassError
from kvpass.cache.layer import PackedLayer
from kvpass.cache.sliding import SlidingLayer
from kvpass.cache.swap import cache_layers
from kvpass.schemes import IdentityConfig, KIVIConfig

from tiny import VOCABULARY
from zoo import ZOO

PROMPT, PADDING, STEPS = 40, 6, 20
LOSSLESS, LOSSY = IdentityConfig(residual=16), KIVIConfig(residual=16, group_size=16)
TWICE = ("Llama", "eager", "static")


def pytest_generate_tests(metafunc):
    if "cell" in metafunc.fixturenames:
        whole = metafunc.config.getoption("--whole-zoo")
        cells = [
            (name, attention, cache)
            for name in ZOO
            for attention in ("sdpa", "eager")
            for cache in ("dynamic", "static")
            if whole or (name, attention, cache) == TWICE or (attention, cache) == (ZOO[name].attention, "dynamic")
        ]
        metafunc.parametrize("cell", cells, ids=["-".join(cell) for cell in cells])


def empty_cache(model, kind):
    """A cache for `run`, of one ``kind`` or of two caches of it."""

    def one(tokens):
        if kind == "static":
            return StaticCache(config=model.config, max_cache_len=tokens)
        return DynamicCache(config=model.config)

    if model.config.is_encoder_decoder:
        return EncoderDecoderCache(one(1 + STEPS), one(PROMPT))
    return one(PROMPT + STEPS)


def run(model, kind):
    """Logits of each step of `generate` from a left-padded prompt, ``[B, STEPS, V]``, and the cache."""
    cache = empty_cache(model, kind)
    ids = torch.randint(2, VOCABULARY, (2, PROMPT), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    ids[0, :PADDING], mask[0, :PADDING] = 0, 0
    out = model.generate(
        ids, attention_mask=mask, past_key_values=cache, max_new_tokens=STEPS, do_sample=False,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    return torch.stack(out.logits, 1), out.past_key_values


@pytest.mark.slow_cases("G[LPR]*", "Gemma [23]*", "[!BGT]*", "BLOOM*", "Granite*", "T5*")
@pytest.mark.nightly_cases("Cohere 2-*", "Llama-eager-static")
@pytest.mark.zoo
def test_zoo(cell, record_property, pytestconfig):
    lossy = pytestconfig.getoption("--whole-zoo") or cell[0] == TWICE[0]
    name, attention, cache_kind = cell
    species = ZOO[name]
    if name == "Qwen3-Next" and torch.__version__ < "2.13":
        pytest.skip("torch.compile alone corrupts the heap with it: offsets of its experts are wrong")
    try:
        model = species.model(attention)
    except (ValueError, ImportError) as error:
        record_property("zoo", (name, f"{attention}, {cache_kind}", "not offered"))
        pytest.skip(f"transformers does not offer it: {error}")
    if species.packed is None:
        with pytest.raises(KVPassError, match=species.why):
            kvpass.apply(model, LOSSLESS)
        record_property("zoo", (name, f"{attention}, {cache_kind}", f"refused: {species.why}"))
        return
    expected, plain = run(model, cache_kind)

    fused = species.packed if species.fused is None else species.fused
    kvpass.apply(model, LOSSLESS, strict=fused == species.packed)
    got, cache = run(model, cache_kind)
    report = kvpass.explain(model)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert (report.packed, report.fused) == (species.packed, fused)
    assert fused or species.why in str(report)
    assert all(species.why in layer.reason for layer in report.layers if not layer.packed)
    others = report.packed < len(report.layers)  # an unpacked sliding window has another shape once it is full
    assert sum(graph.compiled for graph in report.graphs) <= 1 + others
    for mine, theirs in zip(cache_layers(cache), cache_layers(plain), strict=True):
        if isinstance(mine, PackedLayer):
            own_prompt = species.encoder and not mine.is_cross  # one token to start with
            stored = PROMPT if mine.is_cross else (1 if own_prompt else PROMPT) + STEPS - 1  # the last is not fed again
            window = isinstance(mine, SlidingLayer)
            assert mine.tokens == stored - (mine.behind if window else 0)
            for row, first in (
                (0, 0 if own_prompt else PADDING),
                (1, 0),
            ):  # values of padding depend on how attention is written
                for x, y in ((mine.keys + 0, theirs.keys), (mine.values + 0, theirs.values)):
                    part = slice(-x.shape[2], None) if window else slice(first, mine.tokens)
                    torch.testing.assert_close(x[row, :, part], y[row, :, part], atol=1e-5, rtol=1e-5)
    kvpass.remove(model)
    assert torch.equal(run(model, cache_kind)[0], expected)

    record_property("zoo", (name, f"{attention}, {cache_kind}", f"{report.fused} of {len(report.layers)} fused"))
    if not lossy:
        return
    kvpass.apply(model, LOSSY)
    compiled, _ = run(model, cache_kind)
    kvpass.remove(model)
    kvpass.apply(model, LOSSY, lowering="eager")
    eager, _ = run(model, cache_kind)
    torch.testing.assert_close(compiled, eager, atol=1e-4, rtol=1e-4)

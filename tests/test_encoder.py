"""Encoder-decoders: self-attention is packed as in any decoder, cross-attention once, by the first forward.

`test_zoo` checks that every step equals that of the untouched model.
"""

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache

import kvpass
from kvpass import KVPassError
from kvpass.cache.cross import CrossLayer
from kvpass.cache.swap import cache_layers
from kvpass.schemes import IdentityConfig, KIVIConfig

from tiny import tokens
from zoo import ZOO

pytestmark = pytest.mark.usefixtures("nothing_compiled")

LOSSY = KIVIConfig(residual=16, group_size=16)


def generate(model, source, **options):
    """Sequences, logits ``[B, S, V]`` and cache of greedy decoding with ``source`` tokens, some of them padding."""
    ids = tokens(2, source)
    mask = torch.ones_like(ids)
    mask[0, -5:] = 0
    options = dict(max_new_tokens=24, do_sample=False) | options
    out = model.generate(ids, attention_mask=mask, return_dict_in_generate=True, output_logits=True, **options)
    return out.sequences, torch.stack(out.logits, 1), out.past_key_values


@pytest.mark.slow
@pytest.mark.compiles
def test_one_graph_serves_every_source_length_and_equals_eager():
    model, eager = (kvpass.apply(ZOO["BART"].model("sdpa"), LOSSY, lowering=lowering) for lowering in ("auto", "eager"))
    for source in (50, 81, 33):
        got, expected = generate(model, source), generate(eager, source)
        assert torch.equal(got[0], expected[0])
        torch.testing.assert_close(got[1], expected[1], atol=1e-4, rtol=1e-4)
        assert [layer.tokens for layer in cache_layers(got[2])] == [24, 24, source, source]
    report = kvpass.explain(model)
    assert (report.packed, report.fused, len(report.graphs)) == (4, 4, 1)
    assert "attend: cpp" in str(report) and "cross-attention: K 2 bit" in str(report)
    assert report.nbytes == kvpass.nbytes(got[2]) and report.tokens == 24
    assert (
        report.full_nbytes == 2 * 2 * (2 * 24 + 2 * 33) * 64 * 4
    )  # K and V, batch, tokens of four layers, heads, bytes
    assert kvpass.bits_per_value(got[2]) == pytest.approx(32 * report.nbytes / report.full_nbytes)


@pytest.mark.parametrize("mode", [dict(num_beams=3), dict(decoder_input_ids=tokens(2, 20)), dict(use_cache=False)])
def test_other_ways_to_generate_equal_the_untouched_model(mode):
    model = ZOO["T5"].model("sdpa")
    expected = generate(model, 40, **mode)
    kvpass.apply(model, IdentityConfig(residual=16), lowering="eager")
    got = generate(model, 40, **mode)
    assert torch.equal(got[0], expected[0])
    torch.testing.assert_close(got[1], expected[1], atol=1e-5, rtol=1e-5)


@pytest.mark.slow_cases("scheme1*")
@pytest.mark.parametrize(
    ("scheme", "why"),
    [
        (dict(scheme="squat", group_size=16, block_size=8), "fitted to queries"),
        (dict(scheme="kivi", group_size=16, rope="pre"), "no rotary embedding"),
        (KIVIConfig(group_size=16, retention=kvpass.StreamingLLM(2, recent=64)), "selects tokens as they arrive"),
        (dict(scheme="xquant", group_size=16, kq=2, vq=0, km=2, vm=0, depth=None), "reads other layers"),
    ],
)
def test_unsupported_cross_attention_stays_in_full_precision_and_is_reported(scheme, why):
    model = kvpass.apply(ZOO["BART"].model("sdpa"), scheme, lowering="eager")
    _, logits, cache = generate(model, 40)
    assert torch.isfinite(logits).all()
    rows = kvpass.explain(model).layers
    assert all(row.packed for row in rows[:2]) and not rows[3].packed
    assert why in rows[3].reason and "use another scheme" in rows[3].reason
    assert rows[3].nbytes == rows[3].full_nbytes == 2 * 2 * 40 * 64 * 4
    assert not isinstance(cache.cross_attention_cache.layers[1], CrossLayer)


def test_misuse_of_the_caches_is_refused_with_what_to_do():
    model = kvpass.apply(ZOO["BART"].model("sdpa"), LOSSY, lowering="eager")
    with pytest.raises(KVPassError, match="needs an EncoderDecoderCache"):
        model(input_ids=tokens(1, 4), decoder_input_ids=tokens(1, 2), past_key_values=DynamicCache())
    cache = generate(model, 40)[2]
    layer = cache.cross_attention_cache.layers[0]
    with pytest.raises(KVPassError, match="by a forward of the model"):
        layer.update(layer.keys.dequantize(), layer.values.dequantize())
    half_used = EncoderDecoderCache(DynamicCache(config=model.config), cache.cross_attention_cache)
    with pytest.raises(KVPassError, match="Layer 0 of the cache is CrossLayer"):
        model(input_ids=tokens(2, 4), decoder_input_ids=tokens(2, 2), past_key_values=half_used)
    assert not kvpass.cache.swap.packed_layers(half_used)
    with pytest.raises(KVPassError, match="does not support encoder-decoders"):
        kvpass.calibrate(kvpass.remove(model), tokens(2, 100))


def test_a_cache_that_was_reset_serves_another_batch():
    model = kvpass.apply(ZOO["BART"].model("sdpa"), LOSSY, lowering="eager")
    cache = generate(model, 40)[2]
    cache.reset()
    other = dict(input_ids=tokens(3, 30, seed=1), max_new_tokens=8, do_sample=False)
    assert torch.equal(model.generate(**other, past_key_values=cache), model.generate(**other))

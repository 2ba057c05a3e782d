"""One pass over a text computes the same as decoding it token by token through the packed cache."""

import pytest
import torch
from decoders import CatDecoder, NanoDecoder

import kvpass
from kvpass import KVPassError, Recent, Sinks, schemes
from kvpass.eval import quality
from kvpass.runtime.simulated import Simulator
from kvpass.schemes import (
    HIGGSConfig,
    IdentityConfig,
    KIVIConfig,
    KVQuantConfig,
    LogQuantConfig,
    SQuatConfig,
    WaterfillConfig,
)

from tiny import llama, step_by_step, tokens

pytestmark = pytest.mark.usefixtures("nothing_compiled")

TOTAL = 120
SCHEMES = {
    "kivi": KIVIConfig(residual=16, group_size=16),
    "kivi, sinks": KIVIConfig(group_size=16, retention=Sinks(4) + Recent(32)),
    "squat": SQuatConfig(residual=16, group_size=16),
    "higgs": HIGGSConfig(residual=16),
    "logquant": LogQuantConfig(window=32),
    "kivi before RoPE": KIVIConfig(residual=16, group_size=16, rope="pre"),
    "squat before RoPE": SQuatConfig(residual=16, group_size=16, rope="pre"),
    "waterfill": WaterfillConfig(residual=16, recent=8),
    "kivi, scales in 8 bits": KIVIConfig(residual=16, group_size=16, scale_bits=8),
    "kvquant": KVQuantConfig(residual=16, group_size=16),
}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


@pytest.mark.slow_cases("kivi before RoPE-*")
@pytest.mark.slow_cases(
    "squat before RoPE-60-sdpa",
    "kivi, scales*",
    "kivi-60-sdpa",
    "squat-60-sdpa",
    "waterfill*",
    "kivi-1-eager",
    "higgs-1-*",
)
@pytest.mark.nightly_cases("kivi, sinks-*", "kvquant-*", "logquant-*")
@pytest.mark.parametrize(
    ("name", "prompt", "attention"),
    [(name, 60, "sdpa") for name in SCHEMES] + [("kivi", 1, "eager"), ("higgs", 1, "sdpa"), ("logquant", 1, "sdpa")],
)
def test_one_pass_equals_token_by_token(name, prompt, attention):
    model, ids = llama(attention).double(), tokens(2, TOTAL)  # in float64, so that there are no ties
    expected, _, _ = step_by_step(model, SCHEMES[name], ids, prompt, lowering="eager")
    simulator = Simulator(model)
    got = torch.stack([simulator.logits(row[None], prompt, SCHEMES[name]) for row in ids])
    torch.testing.assert_close(got, expected[:, 1:], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_scoring_in_one_pass_is_scoring_token_by_token():
    model, ids = llama().double(), tokens(1, TOTAL)
    chosen = {"kivi": SCHEMES["kivi"], "kivi, sinks": SCHEMES["kivi, sinks"], "by scores": "qaq"}
    slow = quality.evaluate(model, {"text": ids}, 60, chosen, progress=False, lowering="eager")["text"]
    fast = quality.evaluate(model, {"text": ids}, 60, chosen, progress=False, one_pass=True, lowering="eager")["text"]
    for mine, theirs in zip(fast, slow, strict=True):
        assert mine.divergences == pytest.approx(theirs.divergences, rel=1e-4)
        assert (mine.top1, mine.scheme, mine.values) == (theirs.top1, theirs.scheme, theirs.values)
        assert mine.bits_per_value == pytest.approx(theirs.bits_per_value, rel=0.05)  # storage grows in steps
        assert bool(mine.step_seconds) == (mine.scheme == "by scores")
        assert mine.kl_error == pytest.approx(theirs.kl_error, rel=1e-3) and mine.kl > 0
    kivi, sinks, _ = fast
    assert kivi.beats(sinks) == -sinks.beats(kivi) and kivi.beats(kivi) == 0


def test_a_decoder_without_a_cache_is_simulated_and_says_so():
    torch.manual_seed(0)
    model, ids = NanoDecoder().eval(), tokens(2, 90)
    with torch.no_grad():
        expected = model(ids)
    kvpass.apply(model, IdentityConfig(residual=16), example_inputs=(ids[:, :8],))
    torch.testing.assert_close(model(ids), expected, atol=1e-5, rtol=1e-5)
    kvpass.remove(model)
    kvpass.apply(model, SCHEMES["kivi"], example_inputs=(ids[:, :8],))
    short, long = model(ids[:, :60]), model(ids)
    torch.testing.assert_close(short, long[:, :60], atol=1e-5, rtol=1e-5)  # causal, page by page
    torch.testing.assert_close(long[:, :16], expected[:, :16], atol=1e-5, rtol=1e-5)  # nothing is packed yet
    assert not torch.allclose(long, expected, atol=1e-3)
    assert "simulated: the model has no cache" in str(kvpass.explain(model))
    kvpass.remove(model)
    with torch.no_grad():
        assert torch.equal(model(ids), expected)


def test_a_decoder_without_a_cache_equals_one_with_it():
    """The same weights: with the cache passed in and out, and applied to the whole text each time."""
    torch.manual_seed(0)
    model, ids = CatDecoder().eval(), tokens(2, 70)
    kvpass.apply(model, SCHEMES["kivi"], example_inputs=(ids[:, :8],), lowering="eager")
    rows, cache = [], None
    for t in range(70):
        logits, cache = model(ids[:, t : t + 1], cache)
        rows.append(logits)
    kvpass.remove(model)

    class Uncached(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, idx):
            return self.model(idx)[0]

    uncached = kvpass.apply(Uncached().eval(), SCHEMES["kivi"], example_inputs=(ids[:, :8],))
    torch.testing.assert_close(uncached(ids), torch.cat(rows, 1), atol=1e-4, rtol=1e-4)


class Backwards(NanoDecoder):
    """Attends to all tokens."""

    def forward(self, idx):
        q = self.wte(idx).unflatten(-1, (2, 32)).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(q, q, q)


@pytest.mark.parametrize("scheme", ["kivi+h2o", "qaq"])
def test_schemes_that_need_more_than_one_pass_say_so(scheme):
    model, ids = NanoDecoder().eval(), tokens(2, 8)
    with pytest.raises(KVPassError, match="cannot be simulated in one pass"):
        kvpass.apply(model, schemes.get(scheme), example_inputs=(ids,))
    assert not hasattr(model, "_kvpass")


def test_attention_that_is_not_causal_is_refused():
    with pytest.raises(KVPassError, match="not causal"):
        kvpass.apply(Backwards().eval(), "kivi", example_inputs=(tokens(2, 8),))

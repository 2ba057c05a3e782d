"""No memory, or Ctrl-C, at any step of a call over a cache: it is as before, or as after, or it refuses until it is
reset. Never anything in between.

``pytest tests/test_faults.py --every-fault`` tries every line of kvpass that runs, instead of some, and prints a table.
"""

import copy
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

import kvpass
from kvpass import HeavyHitter, KVPassError, Sinks, StreamingLLM
from kvpass.cache import packed_layers
from kvpass.schemes import (
    HIGGSConfig,
    IdentityConfig,
    KIVIConfig,
    LogQuantConfig,
    QAQConfig,
    SQuatConfig,
    XQuantConfig,
)

from common import randn
from faults import ERRORS, outcomes
from tiny import llama, tokens
from zoo import ZOO

pytestmark = pytest.mark.filterwarnings("ignore:crop from")
SMALL = dict(group_size=8, residual=8)


@dataclass(frozen=True)
class Kind:
    """A kind of state. captured: a graph is made of each prompt, which takes long: fewer calls are tried."""

    scheme: object
    model: Callable = llama
    captured: bool = False


KINDS = {
    "identity": Kind(IdentityConfig(residual=8)),
    "kivi": Kind(KIVIConfig(**SMALL)),
    "squat": Kind(SQuatConfig(**SMALL, rank=2, block_size=16)),
    "higgs, centred": Kind(HIGGSConfig(group_size=16, residual=8, sinks=2, center=True)),
    "logquant": Kind(LogQuantConfig(window=8, group_size=8)),
    "xquant": Kind(XQuantConfig(**SMALL, depth=None, kq=2, vq=2, km=0, vm=0)),
    "kivi, layers that are not packed": Kind(KIVIConfig(**SMALL), lambda: ZOO["Gemma 3"].model("sdpa")),
    "kivi, cross-attention": Kind(KIVIConfig(**SMALL), lambda: ZOO["BART"].model("sdpa")),
    "kivi before RoPE": Kind(KIVIConfig(**SMALL, rope="pre"), captured=True),
    "kivi+h2o": Kind(
        KIVIConfig(group_size=8, retention=Sinks(2) + HeavyHitter(16, recent=8, page_size=8)), captured=True
    ),
    "kivi+streaming-llm": Kind(
        KIVIConfig(group_size=8, retention=StreamingLLM(2, recent=24, exact=8, page_size=8)), captured=True
    ),
    "qaq": Kind(QAQConfig(residual=8), captured=True),
    "qaq without originals": Kind(QAQConfig(residual=8, keep_originals=False), captured=True),
}


def feed(cache, count: int, seed: int) -> torch.Tensor:
    """Logits of ``count`` tokens. What an encoder gave depends on ``seed``, too."""
    model, layers = cache.model, packed_layers(cache)
    batch = layers[0].batch_size if layers and layers[0].tokens else 2
    inputs = dict(input_ids=tokens(batch, count, seed))
    if model.config.is_encoder_decoder:
        encoded = BaseModelOutput(last_hidden_state=randn(seed, batch, 11, model.config.hidden_size))
        inputs = dict(decoder_input_ids=inputs["input_ids"], encoder_outputs=encoded)
    with torch.no_grad():
        return model(**inputs, past_key_values=cache).logits


CALLS = {
    "a prompt": (0, lambda cache: feed(cache, 21, 1)),
    "a step": (43, lambda cache: feed(cache, 1, 1)),
    "a step that packs or evicts": (None, lambda cache: feed(cache, 1, 1)),
    "many tokens": (43, lambda cache: feed(cache, 70, 1)),
    "crop": (43, lambda cache: cache.crop(-3)),
    "crop beyond the window": (43, lambda cache: cache.crop(-38)),
    "reorder": (43, lambda cache: cache.reorder_cache(torch.tensor([1, 0]))),
    "select": (43, lambda cache: cache.batch_select_indices(torch.tensor([1, 1]))),
    "reset": (43, lambda cache: cache.reset()),
}
"""Tokens that are stored before, None for as many as make something happen; and the call."""
FEW = "a step", "a step that packs or evicts", "many tokens", "select"


def filled(model, stored: int | None) -> DynamicCache:
    """A cache of two rows that knows its model."""
    own = DynamicCache(config=model.config)
    cache = EncoderDecoderCache(own, DynamicCache(config=model.config)) if model.config.is_encoder_decoder else own
    cache.model = model
    if stored != 0:
        feed(cache, stored or 43, 0)
    layer = packed_layers(cache)[0] if stored is None else None
    while layer is not None and layer.plan.key.pages(layer.tokens) == layer.plan.key.pages(layer.tokens + 1):
        feed(cache, 1, layer.tokens)
    return cache


def copied(cache: DynamicCache) -> DynamicCache:
    """A copy, with the same model."""
    return copy.deepcopy(cache, {id(cache.model): cache.model})


def answers(cache: DynamicCache) -> list[torch.Tensor]:
    """Logits of some calls over a copy of ``cache``."""
    cache = copied(cache)
    return [feed(cache, count, seed) for count, seed in ((9, 7), (1, 8))]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(x.shape == y.shape and torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module", params=KINDS)
def packed(request):
    """A kind of state, by name, and a model with it."""
    torch._dynamo.reset()
    kind = KINDS[request.param]
    return request.param, kvpass.apply(kind.model(), kind.scheme, lowering="eager")


def possible(kind: str, name: str, every: bool) -> bool:
    """Whether a call can be made at all, and is short enough."""
    if "crop" in name and ("not packed" in kind or (name != "crop" and "+" in kind)):
        return False  # the window of what is not packed is full; what is evicted is gone
    if name == "select" and "cross" in kind:
        return False  # transformers refuses it
    return every or not KINDS[kind].captured or name in FEW


@pytest.mark.parametrize("fault", ERRORS)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_fails_anywhere_leaves_a_whole_cache_or_one_that_refuses(
    packed, name, fault, request, record_property
):
    (kind, model), (stored, call) = packed, CALLS[name]
    every = request.config.getoption("every_fault")
    if not possible(kind, name, every):
        pytest.skip("cannot be, or takes long")
    before = filled(model, stored)
    after = copied(before)
    call(after)
    unchanged, changed, fresh = answers(before), answers(after), answers(filled(model, 0))
    assert not same(unchanged, changed)

    def verdict(cache) -> str:
        try:
            got = answers(cache)
        except KVPassError as error:
            assert "cache.reset()" in str(error)
            cache.reset()
            return "refused" if same(answers(cache), fresh) else "REFUSED, AND NOT MENDED BY RESET"
        return "as before" if same(got, unchanged) else "as after" if same(got, changed) else "WRONG"

    seed = zlib.crc32(f"{kind} {name} {fault}".encode())
    found = outcomes(lambda: copied(before), call, verdict, ERRORS[fault], None if every else 6, seed)
    record_property("fault", (kind, name, fault, dict(found)))
    assert set(found) <= {"as before", "as after", "refused"}, found

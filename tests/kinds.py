"""Small caches with every kind of state, and functions to fill and compare them."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

import kvpass
from kvpass import HeavyHitter, Sinks, StreamingLLM
from kvpass.cache.swap import packed_layers, state_of
from kvpass.schemes import (
    CalibratedWaterfillConfig,
    GEARConfig,
    HIGGSConfig,
    IdentityConfig,
    KIVIConfig,
    LogQuantConfig,
    QAQConfig,
    SQuatConfig,
    WaterfillConfig,
    XQuantConfig,
)

from common import randn
from shrink import find
from tiny import calibrated, llama, tokens
from zoo import ZOO

SMALL = dict(group_size=8, residual=8)


@dataclass(frozen=True)
class Kind:
    """A kind of state. captured: each prompt is captured as a graph, which takes long, so tests make fewer calls."""

    scheme: object
    model: Callable = llama
    captured: bool = False


KINDS = {
    "identity": Kind(IdentityConfig(residual=8)),
    "kivi": Kind(KIVIConfig(**SMALL)),
    "squat": Kind(SQuatConfig(**SMALL, rank=2, block_size=16)),
    "higgs, centred": Kind(HIGGSConfig(group_size=16, residual=8, sinks=2, center=True)),
    "waterfill": Kind(WaterfillConfig(residual=16, recent=8, sinks=2, rope="post")),
    "waterfill, by head": Kind(WaterfillConfig(residual=16, recent=8, sinks=2, by_head=True)),
    "waterfill, static": Kind(CalibratedWaterfillConfig(residual=16, recent=8, sinks=2, block_size=8)),
    "waterfill, hybrid": Kind(CalibratedWaterfillConfig(residual=16, recent=8, sinks=2, block_size=8, form="hybrid")),
    "kivi, scales in 8 bits": Kind(KIVIConfig(**SMALL, scale_bits=8)),
    "gear": Kind(GEARConfig(**SMALL, rank=1)),
    "logquant": Kind(LogQuantConfig(window=8, group_size=8)),
    "xquant": Kind(XQuantConfig(**SMALL, depth=None, kq=2, vq=2, km=0, vm=0)),
    "kivi, layers that are not packed": Kind(KIVIConfig(**SMALL), lambda: ZOO["Gemma 3"].model("sdpa")),
    "kivi, latents": Kind(KIVIConfig(**SMALL), lambda: ZOO["DeepSeek-V3"].model("sdpa")),
    "waterfill, latents": Kind(
        WaterfillConfig(residual=16, recent=8, sinks=2), lambda: ZOO["DeepSeek-V3"].model("sdpa")
    ),
    "identity, an indexer": Kind(IdentityConfig(residual=8), lambda: find("DeepseekV32ForCausalLM").model()),
    "identity, states": Kind(IdentityConfig(residual=8), lambda: find("FalconH1ForCausalLM").model()),
    "identity, sliding windows": Kind(IdentityConfig(residual=8), lambda: ZOO["Mistral, sliding"].model("sdpa")),
    "kivi, cross-attention": Kind(KIVIConfig(**SMALL), lambda: ZOO["BART"].model("sdpa")),
    "kivi before RoPE": Kind(KIVIConfig(**SMALL, rope="pre"), captured=True),
    "kivi+h2o": Kind(
        KIVIConfig(group_size=8, retention=Sinks(2) + HeavyHitter(16, recent=8, page_size=8)), captured=True
    ),
    "kivi+streaming-llm": Kind(
        KIVIConfig(group_size=8, retention=StreamingLLM(2, recent=24, exact=8, page_size=8)), captured=True
    ),
    "qaq": Kind(QAQConfig(residual=8), captured=True),
    "qaq without originals": Kind(QAQConfig(residual=8, window=12, keep_originals=False), captured=True),
}


def packed(kind: Kind):
    """A model packed with a kind of state, calibrated if the scheme needs it."""
    model = kind.model()
    return kvpass.apply(model, calibrated(model, kind.scheme), lowering="eager")


def feed(cache, count: int, seed: int) -> torch.Tensor:
    """Logits of ``count`` random tokens. The output of an encoder depends on ``seed``, too."""
    model, state = cache.model, state_of(cache)
    batch = state.batch if state is not None and state.tokens else 2
    inputs = dict(input_ids=tokens(batch, count, seed))
    if model.config.is_encoder_decoder:
        encoded = BaseModelOutput(last_hidden_state=randn(seed, batch, 11, model.config.hidden_size))
        inputs = dict(decoder_input_ids=inputs["input_ids"], encoder_outputs=encoded)
    with torch.no_grad():
        return model(**inputs, past_key_values=cache).logits


def filled(model, stored: int | None) -> DynamicCache:
    """A cache of two rows with a reference to its model."""
    own = DynamicCache(config=model.config)
    cache = EncoderDecoderCache(own, DynamicCache(config=model.config)) if model.config.is_encoder_decoder else own
    cache.model = model
    if stored != 0:
        feed(cache, stored or 43, 0)
    layer = packed_layers(cache)[0] if stored is None else None
    while layer is not None and layer.plan.key.retention.pages(layer.tokens) == layer.plan.key.retention.pages(
        layer.tokens + 1
    ):
        feed(cache, 1, layer.tokens)
    return cache


def copied(cache: DynamicCache) -> DynamicCache:
    """A copy with a reference to the same model."""
    return copy.deepcopy(cache, {id(cache.model): cache.model})


def answers(cache: DynamicCache) -> list[torch.Tensor]:
    """Logits of some calls over a copy of ``cache``."""
    cache = copied(cache)
    return [feed(cache, count, seed) for count, seed in ((9, 7), (1, 8))]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(x.shape == y.shape and torch.equal(x, y) for x, y in zip(a, b, strict=True))

"""Texts that a model writes itself, for a calibration without any data."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..accelerate_hooks import device_of
from ..errors import KVPassError

WRITTEN, TOKENS = 32, 128  # texts that are sampled in one batch, and their tokens
_JOINED = 4  # texts per sequence
_SAMPLED: dict[str, Any] = dict(  # from the model's own distribution, whatever its generation config says
    do_sample=True, num_beams=1, temperature=1.0, top_k=0, top_p=1.0, repetition_penalty=1.0, no_repeat_ngram_size=0
)


@torch.no_grad()
def own_words(model: nn.Module) -> list[Tensor]:
    """Sequences ``[512]`` int64 of 4 texts each, sampled from ``model`` after random first tokens, the same ones in
    every call.

    Raises `KVPassError` for models that cannot ``generate``.
    """
    if not hasattr(model, "generate"):
        raise KVPassError(
            "This model has no generate() to write texts with: pass token ids, kvpass.calibrate(model, ids)."
        )
    writer: Any = model
    device, vocabulary = device_of(model), writer.config.get_text_config().vocab_size
    with _seeded(device):
        first = torch.randint(vocabulary, (WRITTEN, 1)).to(device)
        length = dict(max_new_tokens=TOKENS - 1, min_new_tokens=TOKENS - 1)  # no text ends early
        written = writer.generate(first, attention_mask=torch.ones_like(first), **length, **_SAMPLED)
    return list(written.view(-1, _JOINED * TOKENS))


@contextmanager
def _seeded(device: torch.device) -> Iterator[None]:
    """Within this context, random numbers start from a fixed seed; the caller's are left as they are."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        yield

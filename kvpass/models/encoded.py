"""Encoder outputs for a decoder, so that its forward can run without its encoder and the encoder's inputs."""

import inspect
import typing
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from ..errors import KVPassError

_IMAGES = "cross_attention_states"
_ALSO_READ = "attention_mask", "router_logits"
"""Fields of an encoder's output that some models always read; None says that they are absent."""


def has_encoder(model: nn.Module) -> bool:
    """Whether ``model`` is an encoder-decoder, whose decoder arguments are named ``decoder_*``."""
    return getattr(getattr(model, "config", None), "is_encoder_decoder", False)


def encoded(model: nn.Module, batch: int, tokens: int) -> ModelOutput:
    """``encoder_outputs`` for ``model``: zeros ``[batch, tokens, width]`` in its dtype, as the output class that the
    encoder is annotated with. Raises `KVPassError` if the width is unknown."""
    seq2seq: Any = model
    encoder = seq2seq.get_encoder()
    hidden = torch.zeros(batch, tokens, _width(seq2seq, encoder), dtype=seq2seq.dtype, device=seq2seq.device)
    kind = _output_class(encoder)
    pooled = dict(pooler_output=hidden) if "pooler_output" in kind.__dataclass_fields__ else {}
    output = kind(last_hidden_state=hidden, **pooled)
    for name in _ALSO_READ:
        if not hasattr(output, name):
            setattr(output, name, None)
    return output


def encoded_images(model: nn.Module, tokens: int) -> dict[str, torch.Tensor]:
    """The argument with which a decoder without ``encoder_outputs`` gets encoded images: zeros ``[1, tokens,
    hidden_size]`` in the dtype of ``model``. Empty if its forward has no such argument."""
    if _IMAGES not in inspect.signature(model.forward).parameters:
        return {}
    decoder: Any = model
    width = decoder.config.get_text_config(decoder=True).hidden_size
    return {_IMAGES: torch.zeros(1, tokens, width, dtype=decoder.dtype, device=decoder.device)}


def _width(model: Any, encoder: nn.Module) -> int:
    """The number of channels that ``encoder`` returns."""
    own: Any = getattr(encoder, "config", None)
    configs: list[Any] = [own, own.get_text_config()] if isinstance(own, PretrainedConfig) else []
    configs += [model.config.get_text_config(encoder=True), model.config.get_text_config(decoder=True)]
    for config in configs:
        adapted = "output_hidden_size" if getattr(config, "add_adapter", False) else "hidden_size"
        for name in (adapted, "hidden_size"):
            if isinstance(width := getattr(config, name, None), int):
                return width
    raise KVPassError(
        f"{type(model).__name__} does not state the width of its encoder's output: set hidden_size in the encoder's "
        "config."
    )


def _output_class(encoder: nn.Module) -> Any:
    """The class that the forward of ``encoder`` is annotated to return, or else `BaseModelOutput`."""
    try:
        returned = typing.get_type_hints(encoder.forward).get("return")
    except (NameError, TypeError, AttributeError):  # the annotation uses names imported for type checkers only
        returned = None
    for kind in (returned, *typing.get_args(returned)):
        fields = getattr(kind, "__dataclass_fields__", ())
        if isinstance(kind, type) and issubclass(kind, ModelOutput) and "last_hidden_state" in fields:
            return kind
    return BaseModelOutput

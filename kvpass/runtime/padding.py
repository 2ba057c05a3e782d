"""Detect 2-D padding masks that hide nothing, or only left padding.

On a CPU a mask is read in every call. On an accelerator that would wait for the device, so a mask is read only once, at
the prompt. This is enough for a mask that stays the same, such as an encoder's. But ``generate`` makes a new mask for
each token: the previous one with a column of ones appended. (Some versions of transformers drop an all-ones mask before
the first token.) `PaddingMasks` observes that call and carries the finding over to the new mask;
``tests/test_private_apis.py`` checks the behaviour it relies on. About any other mask, and about one that was written
to, nothing is known, and it is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin

_METHOD = "_update_model_kwargs_for_generation"
_KNOWN = "_kvpass_padding"  # attribute of a mask: the finding, and the mask's version at that time
_NAMES = "attention_mask", "decoder_attention_mask"


@dataclass(frozen=True)
class Padding:
    """The tokens that a mask hides: in each row those before ``starts``, ``[B]`` int64 on the mask's device. None means
    that the mask hides nothing."""

    starts: Tensor | None = None


class PaddingMasks:
    """Findings about the masks that ``model`` is called with."""

    def __init__(self, model: nn.Module):
        common = getattr(type(model), _METHOD, None) is getattr(GenerationMixin, _METHOD, self)
        self._seen = common and _METHOD not in vars(model)

    def install(self, model: nn.Module) -> None:
        """Observe how ``generate`` extends masks, unless ``model`` overrides that method."""
        if self._seen:
            setattr(model, _METHOD, partial(_updated, getattr(model, _METHOD)))

    def uninstall(self, model: nn.Module) -> None:
        """Restore the method."""
        if self._seen:
            delattr(model, _METHOD)

    def find(self, mask: Tensor, of_prompt: bool) -> Padding | None:
        """The padding that the 2-D ``mask`` expresses; None if it is unknown. On a CPU the mask is read, and None is
        returned for any mask that hides something. On other devices it is read only if nothing is known about it and it
        belongs to a prompt."""
        if not self.waits(mask):
            return Padding() if mask.all() else None
        padding = known(mask)
        if padding is None and of_prompt and (padding := self.read(mask)) is not None:
            _note(mask, padding)
        return padding

    @staticmethod
    def waits(mask: Tensor) -> bool:
        """Whether reading ``mask`` waits for a device."""
        return mask.device.type != "cpu"

    @staticmethod
    def read(mask: Tensor) -> Padding | None:
        """The padding that ``mask`` expresses; None if it hides anything other than left padding. Reads the mask
        once."""
        starts = (mask == 0).sum(1)
        left = mask == (torch.arange(mask.shape[1], device=mask.device) >= starts[:, None]).to(mask.dtype)
        whole, on_the_left = torch.stack([~starts.any(), left.all()]).tolist()
        if whole:
            return Padding()
        return Padding(starts) if on_the_left else None


def _updated(
    original: Callable[..., dict[str, Any]], outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """The result of ``original``, the arguments for the next token, with findings about the old masks carried over to
    the new ones."""
    before = {name: model_kwargs.get(name) for name in _NAMES}
    updated = original(outputs, model_kwargs, *args, **kwargs)
    for name, mask in before.items():
        after, padding = updated.get(name), known(mask)
        if isinstance(after, Tensor) and after is not mask and padding is not None:
            _note(after, padding)
    return updated


def known(mask: Any) -> Padding | None:
    """The finding about ``mask``; None if there is none, or if the mask has been written to since."""
    if not isinstance(mask, Tensor) or mask.is_inference():
        return None
    padding, version = getattr(mask, _KNOWN, (None, None))
    return padding if version == mask._version else None


def _note(mask: Tensor, padding: Padding) -> None:
    if not mask.is_inference():  # inference tensors have no version counter
        setattr(mask, _KNOWN, (padding, mask._version))

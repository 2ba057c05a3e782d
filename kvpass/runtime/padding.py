"""2-D padding masks that hide nothing, or only what is before a row's first token: read where that costs nothing, and
on accelerators once, at the prompt.

To read a mask there is to wait for the device. One that stays the same, as an encoder's, need be read once. But
``generate`` makes a new one for every token, the last one with ones behind it, unless its version of transformers drops
a mask of ones before the first. That is seen as it happens, so what was found out about a mask is known of the next one
too; ``tests/test_private_apis.py`` has what is relied on. Of any other mask, and of one that was written to, nothing is
known, and it stays.
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
_KNOWN = "_kvpass_padding"  # attribute of a mask: what was found out, and its version then
_NAMES = "attention_mask", "decoder_attention_mask"


@dataclass(frozen=True)
class Padding:
    """What a mask hides: of each row what is before ``starts``, ``[B]`` int64 on its device; nothing, if there are
    none."""

    starts: Tensor | None = None


class PaddingMasks:
    """What is known of the masks that ``model`` is called with."""

    def __init__(self, model: nn.Module):
        common = getattr(type(model), _METHOD, None) is getattr(GenerationMixin, _METHOD, self)
        self._seen = common and _METHOD not in vars(model)

    def install(self, model: nn.Module) -> None:
        """See what ``generate`` makes of masks, if ``model`` has no way of its own."""
        if self._seen:
            setattr(model, _METHOD, partial(_updated, getattr(model, _METHOD)))

    def uninstall(self, model: nn.Module) -> None:
        """Give the method back."""
        if self._seen:
            delattr(model, _METHOD)

    def find(self, mask: Tensor, of_prompt: bool) -> Padding | None:
        """What ``mask``, 2-D, hides, if that is known. It is read unless that would make a step wait; where it would
        not, masks that hide something are left as they are."""
        if not self.waits(mask):
            return Padding() if mask.all() else None
        padding = known(mask)
        if padding is None and of_prompt and (padding := self.read(mask)) is not None:
            _note(mask, padding)
        return padding

    @staticmethod
    def waits(mask: Tensor) -> bool:
        """Whether to read ``mask`` is to wait for a device."""
        return mask.device.type != "cpu"

    @staticmethod
    def read(mask: Tensor) -> Padding | None:
        """What ``mask`` hides, None if that is more than padding on the left. Reads it once."""
        starts = (mask == 0).sum(1)
        left = mask == (torch.arange(mask.shape[1], device=mask.device) >= starts[:, None]).to(mask.dtype)
        whole, on_the_left = torch.stack([~starts.any(), left.all()]).tolist()
        if whole:
            return Padding()
        return Padding(starts) if on_the_left else None


def _updated(
    original: Callable[..., dict[str, Any]], outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """What ``original`` makes of arguments for the next token; what is known of masks is known of theirs."""
    before = {name: model_kwargs.get(name) for name in _NAMES}
    updated = original(outputs, model_kwargs, *args, **kwargs)
    for name, mask in before.items():
        after, padding = updated.get(name), known(mask)
        if isinstance(after, Tensor) and after is not mask and padding is not None:
            _note(after, padding)
    return updated


def known(mask: Any) -> Padding | None:
    """What has been found out about ``mask``, if it has not been written to since."""
    if not isinstance(mask, Tensor) or mask.is_inference():
        return None
    padding, version = getattr(mask, _KNOWN, (None, None))
    return padding if version == mask._version else None


def _note(mask: Tensor, padding: Padding) -> None:
    if not mask.is_inference():  # whose versions nobody counts
        setattr(mask, _KNOWN, (padding, mask._version))

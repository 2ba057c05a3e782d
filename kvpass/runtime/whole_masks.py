"""Padding masks that hide nothing: read where that costs nothing, and on accelerators once, at the prompt.

To read a mask there is to wait for the device. One that stays the same, as an encoder's, need be read once. But
``generate`` makes a new one for every token, the last one with ones behind it, unless its version of transformers drops
a mask of ones before the first. That is seen as it happens, so of a mask that hid nothing the next is known to hide
nothing either; ``tests/test_private_apis.py`` has what is relied on. Any other mask, and one that was written to, is
not known, and stays.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import GenerationMixin

_METHOD = "_update_model_kwargs_for_generation"
_KNOWN = "_kvpass_hides_nothing"  # attribute of a mask: its version when that was true
_NAMES = "attention_mask", "decoder_attention_mask"


class WholeMasks:
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

    def hides_nothing(self, mask: Tensor, of_prompt: bool) -> bool:
        """Whether ``mask``, 2-D, is known to hide nothing. It is read unless that would make a step wait."""
        if self.waits(mask) and (is_known(mask) or not of_prompt):
            return is_known(mask)
        whole = self.read(mask)
        if whole:
            _note(mask)
        return whole

    @staticmethod
    def waits(mask: Tensor) -> bool:
        """Whether to read ``mask`` is to wait for a device."""
        return mask.device.type != "cpu"

    @staticmethod
    def read(mask: Tensor) -> bool:
        """Whether every element of ``mask`` is set."""
        return bool(mask.all())


def _updated(
    original: Callable[..., dict[str, Any]], outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """What ``original`` makes of arguments for the next token; of masks that were known it makes known ones."""
    before = {name: model_kwargs.get(name) for name in _NAMES}
    updated = original(outputs, model_kwargs, *args, **kwargs)
    for name, mask in before.items():
        after = updated.get(name)
        if isinstance(after, Tensor) and after is not mask and is_known(mask):
            _note(after)
    return updated


def is_known(mask: Any) -> bool:
    """Whether ``mask`` has been found to hide nothing, and not been written to since."""
    return isinstance(mask, Tensor) and not mask.is_inference() and getattr(mask, _KNOWN, None) == mask._version


def _note(mask: Tensor) -> None:
    if not mask.is_inference():  # whose versions nobody counts
        setattr(mask, _KNOWN, mask._version)

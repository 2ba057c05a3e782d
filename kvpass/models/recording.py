"""Outputs that transformers records with hooks: hidden states and attentions.

transformers installs these hooks under a lock in the first call that asks for them, which cannot be captured. So this
file installs them beforehand. No other file depends on how they work.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.utils import output_capturing

from ..errors import KVPassError

RECORDS = output_capturing.__name__
"""The module of the recording hooks, which do nothing in a call that requests no recorded output."""


def refuse_what_is_not_recorded(model: PreTrainedModel, arguments: dict[str, Any]) -> None:
    """Raise `KVPassError` if ``arguments`` request attention weights, which SDPA does not return, of a forward that has
    to be captured."""
    if asks_for("attentions", model, arguments) and model.config.get_text_config()._attn_implementation == "sdpa":
        raise KVPassError(
            "output_attentions=True: SDPA returns no attention weights, and this scheme captures the whole forward as "
            "one graph. Call model.set_attn_implementation('eager') first."
        )


def put_up_hooks(model: PreTrainedModel, arguments: dict[str, Any]) -> None:
    """Install the hooks that ``arguments`` need, so that ``model`` can be captured with them."""
    if asks_for("attentions", model, arguments) or asks_for("hidden_states", model, arguments):
        for recorder in _recorders(model):
            output_capturing.maybe_install_capturing_hooks(recorder)


def asks_for(what: str, model: Any, arguments: dict[str, Any]) -> bool:
    """Whether a call with ``arguments`` asks ``model`` for its "hidden_states" or "attentions"."""
    asked = arguments.get(f"output_{what}")
    return bool(getattr(model.config, f"output_{what}", False) if asked is None else asked)


def _recorders(model: nn.Module) -> Iterator[PreTrainedModel]:
    """The modules within ``model`` whose forward records outputs, outermost first."""
    for module in model.modules():
        if not isinstance(module, PreTrainedModel):
            continue
        forward: Any = type(module).forward
        while forward is not None and getattr(forward, "__globals__", None) is not vars(output_capturing):
            forward = getattr(forward, "__wrapped__", None)
        if forward is not None:
            yield module

"""Outputs that transformers records by hooks: hidden states and attentions. It puts the hooks up at the first call that
asks for them, under a lock, which cannot be captured: here they are up before. The only file that knows how.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.utils import output_capturing

from ..errors import KVPassError

RECORDS = output_capturing.__name__
"""The module whose hooks record outputs: they do nothing in a call that does not ask for any."""


def refuse_what_is_not_recorded(model: PreTrainedModel, arguments: dict[str, Any]) -> None:
    """Raise `KVPassError` if ``arguments`` ask a forward that has to be captured for weights SDPA does not give."""
    if _asked("attentions", model, arguments) and model.config.get_text_config()._attn_implementation == "sdpa":
        raise KVPassError(
            "output_attentions=True: SDPA returns no attention weights, and this scheme captures the whole forward as "
            "one graph. Call model.set_attn_implementation('eager') first."
        )


def put_up_hooks(model: PreTrainedModel, arguments: dict[str, Any]) -> None:
    """Make ``model`` ready to be captured with what ``arguments`` ask for."""
    if _asked("attentions", model, arguments) or _asked("hidden_states", model, arguments):
        for recorder in _recorders(model):
            output_capturing.maybe_install_capturing_hooks(recorder)


def _asked(what: str, model: PreTrainedModel, arguments: dict[str, Any]) -> bool:
    asked = arguments.get(f"output_{what}")
    return bool(getattr(model.config, f"output_{what}", False) if asked is None else asked)


def _recorders(model: nn.Module) -> Iterator[PreTrainedModel]:
    """The models within ``model``, outermost first, whose forward records."""
    for module in model.modules():
        if not isinstance(module, PreTrainedModel):
            continue
        forward: Any = type(module).forward
        while forward is not None and getattr(forward, "__globals__", None) is not vars(output_capturing):
            forward = getattr(forward, "__wrapped__", None)
        if forward is not None:
            yield module

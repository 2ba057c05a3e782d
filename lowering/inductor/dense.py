"""Attention of several query tokens, and attention over keys and values that differ in shape: dequantizes all of them
first, with a kernel if their codec has one."""

from torch import Tensor

from kvpass.codec.tensors import Pack

from .. import reference
from ..append import PER_CHANNEL_BITS
from ..call_types import AttendCall
from ..table import LATENT, LSE, UNEQUAL, DispatchKey, implements, refuses_extras
from .page_view import ATTENDED
from .pages import WIDTHS, dequantize_all

_VALUES = WIDTHS | PER_CHANNEL_BITS | {"per=channel", "per=token", "keep=log", "rotation", "grid"}
for _side, _features in zip(
    ATTENDED, ({*_VALUES, "pre_rope", "center", "page_rope", "numbered"}, _VALUES), strict=True
):
    _side.update(_features)


def _refuses(dispatch: DispatchKey) -> str | None:
    if not dispatch.specs:
        return "the past is already dequantized."
    if dispatch.queries == 1 and not refuses_extras(dispatch, UNEQUAL, LATENT, LSE):
        return "it attends with several query tokens."
    return None


@implements("attend", "inductor-dense", has=ATTENDED, refuses=_refuses, lowering="inductor")
def attend(call: AttendCall[Pack]) -> list[Tensor]:
    return reference.attend(call, dequantize_all)

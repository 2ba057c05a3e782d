"""Attention of several query tokens on CPUs, a tile at a time (`kvpass.lowering.tiles`), for codecs whose pages a
kernel can dequantize."""

from torch import Tensor

from kvpass.codec.tensors import Pack

from .. import tiles
from ..call_types import AttendCall
from ..table import implements
from . import dense
from .pages import dequantize_all


@implements("attend", "inductor-tiled", has=dense.ATTENDED, refuses=tiles.refuses, lowering="inductor")
def attend(call: AttendCall[Pack]) -> list[Tensor]:
    return tiles.attend_in_tiles(call, dequantize_all)

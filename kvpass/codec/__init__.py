"""Quantizer primitives: the pure functions of tensors from which schemes are composed."""

from typing import Any

from ..versions import warn_renamed
from . import (  # noqa: F401  (importing them registers their codecs)
    across_heads,
    allocation,
    balance,
    boost,
    by_head,
    datatype,
    error_term,
    lattice,
    mixed,
    nuq,
    polar,
    salient,
    second_level,
    shares,
    sketch,
)
from .allocation import Allocation
from .by_head import ByHead
from .codec import CODECS, Codec, Kept
from .pages import dequantize_pages, quantize_pages
from .quantizer import Adaptive, Quantizer, Subspace
from .shares import Shares
from .spec import CodecSpec, parse
from .transform import Transform

__all__ = [
    "CODECS",
    "Adaptive",
    "Allocation",
    "ByHead",
    "Codec",
    "CodecSpec",
    "Kept",
    "Quantizer",
    "Shares",
    "Subspace",
    "Transform",
    "dequantize_pages",
    "parse",
    "quantize_pages",
]

_RENAMED = {"encode_pages": "quantize_pages", "decode_pages": "dequantize_pages"}


def __getattr__(name: str) -> Any:
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warn_renamed(f"kvpass.codec.{name}", _RENAMED[name])
    return globals()[_RENAMED[name]]

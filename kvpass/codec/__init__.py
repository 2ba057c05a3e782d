"""Quantizer primitives: pure functions of tensors that the schemes are composed of."""

from . import (  # noqa: F401  (they register their codecs)
    allocation,
    balance,
    boost,
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
from .codec import CODECS, Codec, Kept
from .pages import decode_pages, encode_pages
from .quantizer import Adaptive, Quantizer, Subspace
from .shares import Shares
from .spec import CodecSpec, parse
from .transform import Transform

__all__ = [
    "CODECS",
    "Adaptive",
    "Allocation",
    "Codec",
    "CodecSpec",
    "Kept",
    "Quantizer",
    "Shares",
    "Subspace",
    "Transform",
    "decode_pages",
    "encode_pages",
    "parse",
]

"""Quantizer primitives: pure functions of tensors that the schemes are composed of."""

from .kept import CODECS, Codec, Kept
from .pages import decode_pages, encode_pages
from .spec import CodecSpec, Subspace, parse

__all__ = ["CODECS", "Codec", "CodecSpec", "Kept", "Subspace", "decode_pages", "encode_pages", "parse"]

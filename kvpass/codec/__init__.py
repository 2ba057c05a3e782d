"""Quantizer primitives: pure functions of tensors that the schemes are composed of."""

from .pages import decode_pages, encode_pages
from .spec import CodecSpec, Subspace, parse

__all__ = ["CodecSpec", "Subspace", "decode_pages", "encode_pages", "parse"]

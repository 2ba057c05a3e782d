"""Reads the additional terms of pages: values that exist for few channels, for few values, or at low rank.

A term contributes to scores and to the output directly; it is never added to dequantized values.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvpass.codec.bitpack import FIELDS, byte_rows
from kvpass.codec.outliers import places
from kvpass.codec.quantizer import Quantizer
from kvpass.codec.rope import parse_rope
from kvpass.codec.spec import CodecSpec

from .planes import Planes, in_storage_order


class KeyRotation(NamedTuple):
    """The rotation of keys that are stored before rotary embedding: tables ``[B, tokens, p]``, the text of the
    rotation, and the token ids ``[N, P]`` in pages."""

    cos: Tensor
    sin: Tensor
    rope: str
    tokens: Tensor


class Term(Protocol):
    """A term that pages hold in addition to their planes."""

    def scores(self, q: Tensor, rotation: KeyRotation | None) -> Tensor:
        """The term's contribution to the scores of queries ``[BH, R, D]``: ``[BH, R, N, P]``."""
        ...

    def values(self, weights: Tensor) -> Tensor:
        """The term's contribution to the output, weighted by ``[BH, R, N, P]``: ``[BH, R, D]``."""
        ...


class Boost(NamedTuple):
    """The lower codes of the boosted channels of each page (`codec.boost`). They are multiplied by the queries of these
    channels."""

    planes: Planes
    of_channels: Tensor  # [BH, N, K]

    def scores(self, q: Tensor, rotation: KeyRotation | None) -> Tensor:
        index = self.of_channels[:, None].expand(-1, q.shape[1], -1, -1)
        selected = q[:, :, None].expand(-1, -1, index.shape[2], -1).gather(-1, index)
        selected = torch.cat([selected, selected[..., :1]], -1)[
            ..., :-1
        ]  # with cat, it is computed once, not per token
        by_plane = [self.planes.values(j) for j in range(self.planes.runs)]
        by_head = [(x * selected[:, r, :, None]).sum(-1) for r in range(q.shape[1]) for x in by_plane]
        return in_storage_order(by_head, self.planes.runs).unflatten(-1, (index.shape[2], -1))

    def values(self, weights: Tensor) -> Tensor:
        raise NotImplementedError("Only keys have boosted channels.")


class LowRank(NamedTuple):
    """A product of two thin matrices (`codec.error_term`). Queries are multiplied by the wide one, weights by the tall
    one."""

    tall: Tensor  # [BH, N, P, r]
    wide: Tensor  # [BH, N, r, D]

    def scores(self, q: Tensor, rotation: KeyRotation | None) -> Tensor:
        folded = (q[:, :, None, None] * self.wide[:, None].float()).sum(-1)
        return (folded.unsqueeze(-2) * self.tall[:, None].float()).sum(-1)

    def values(self, weights: Tensor) -> Tensor:
        folded = (weights.unsqueeze(-1) * self.tall[:, None].float()).sum(-2)
        return (folded.unsqueeze(-1) * self.wide[:, None].float()).sum((2, 3))

    def at(self, token: Tensor, channel: Tensor) -> Tensor:
        parts = zip(self.tall.float().unbind(-1), self.wide.float().unbind(-2), strict=True)
        products = [tall.gather(-1, token) * wide.gather(-1, channel) for tall, wide in parts]
        return torch.stack(products).sum(0)


class Outliers(NamedTuple):
    """The exact values of a page (`codec.outliers`), minus their dequantized values in the other terms."""

    differences: Tensor  # [BH, N, K]
    token: Tensor
    channel: Tensor
    page_size: int
    head_dim: int

    def scores(self, q: Tensor, rotation: KeyRotation | None) -> Tensor:
        heads, shape = q.shape[1], self.differences.shape
        channel, token = (each[:, None].expand(-1, heads, -1, -1) for each in (self.channel, self.token))
        by_page = q[:, :, None].expand(-1, -1, shape[1], -1)
        selected = by_page.gather(-1, channel)
        if rotation is not None:
            cos, sin, partner = self._rotation_of(rotation)
            selected = selected * cos[:, None] + by_page.gather(-1, partner[:, None].expand_as(channel)) * sin[:, None]
        zeros = torch.zeros(*selected.shape[:-1], self.page_size, device=q.device)
        return zeros.scatter_add(-1, token, selected * self.differences[:, None])

    def _rotation_of(self, rotation: KeyRotation) -> tuple[Tensor, Tensor, Tensor]:
        """Factors for the query's channel and for the other channel of its rotary pair, and the index of that channel;
        each ``[BH, N, K]``."""
        (pairs, interleaved), channel = parse_rope(rotation.rope), self.channel
        first = channel % 2 == 0 if interleaved else channel < pairs
        pair = channel // 2 if interleaved else channel % pairs
        partner = torch.where(first, channel + (1 if interleaved else pairs), channel - (1 if interleaved else pairs))
        in_pair = channel < 2 * pairs
        tokens = rotation.tokens.expand(channel.shape[0], -1, -1).gather(-1, self.token)
        at = tokens * rotation.cos.shape[-1] + torch.where(in_pair, pair, 0)
        at = at.unflatten(0, (rotation.cos.shape[0], -1)).flatten(1)
        cos, sin = (
            table.flatten(1).gather(1, at).view(channel.shape).float() for table in (rotation.cos, rotation.sin)
        )
        cos, sin = torch.where(in_pair, cos, 1.0), torch.where(in_pair, torch.where(first, sin, -sin), 0.0)
        return cos, sin, torch.where(in_pair, partner, channel)

    def values(self, weights: Tensor) -> Tensor:
        heads = weights.shape[1]
        channel, token = (each[:, None].expand(-1, heads, -1, -1) for each in (self.channel, self.token))
        selected = weights.gather(-1, token) * self.differences[:, None]
        zeros = torch.zeros(*selected.shape[:2], self.head_dim, device=selected.device)
        return zeros.scatter_add(-1, channel.flatten(2), selected.flatten(2))


_At = Callable[[Tensor, Tensor], Tensor]


def outliers(values: Tensor, positions: Tensor, at: _At, spec: CodecSpec, head_dim: int) -> list[Term]:
    """The term for outliers; empty if there are none. ``at(token, channel)`` returns the dequantized values of the
    other terms at these places, ``[BH, N, K]``."""
    if not values.shape[-1]:
        return []
    flat = places(positions)
    token, channel = flat // head_dim, flat % head_dim
    return [Outliers(values.squeeze(-2).float() - at(token, channel), token, channel, spec.page_size, head_dim)]


def code_at(codes: Tensor, bits: int, token: Tensor, channel: Tensor) -> Tensor:
    """Codes of pages ``[BH, N, rows, D]`` at tokens and channels ``[BH, N, K]``: ``[BH, N, K]`` int32."""
    page_size, start, place = codes.shape[-2] * 8 // bits, 0, 0
    code = torch.zeros_like(token, dtype=torch.int32)
    for width in FIELDS[bits]:
        rows = byte_rows(page_size, width)
        line = start + token % rows
        byte = codes.flatten(-2).gather(-1, line * codes.shape[-1] + channel).int()
        code = code | (((byte >> (token // rows * width).int()) & (2**width - 1)) << place)
        start, place = start + rows, place + width
    return code


class AffineParams(NamedTuple):
    """Scales and zero points of whole pages, each ``[BH, N, rows, columns]``, and the quantizer that says how they are
    grouped. zero_point: None for quantization without one."""

    scale: Tensor
    zero_point: Tensor | None
    quantizer: Quantizer


def affine_at(numbers: Tensor, params: AffineParams, token: Tensor, channel: Tensor) -> Tensor:
    """Dequantize ``numbers`` ``[BH, N, K]`` with the scales and zero points of their tokens and channels."""
    scale, zero_point, quantizer = params
    size, columns = quantizer.group_size, scale.shape[-1]
    at = token // size * columns + channel if quantizer.per == "channel" else token * columns + channel // size
    of, zero = (p.float().flatten(-2).gather(-1, at) for p in (scale, zero_point))
    return numbers * of + zero

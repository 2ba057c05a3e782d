"""Stores pages that hold all heads of a layer, with a bit width per head, coordinate and rank of tokens.

Tokens are quantized as in `codec.allocation`: with a basis, a bit width per coordinate, fields of two bits and of one,
a gain per token and head, and ranks of a page's tokens. The difference is that the number of bits varies by head. So
one page holds all heads of a layer: the mask of high-precision tokens ``[P / 8, H]``, and for each rank the bit pairs
of all heads ``[T / 4, pairs]``, their single bits ``[T / 8, singles]`` and gains ``[T, heads]``. The columns of one
head are adjacent. A head without bits in a rank has no gain there.

*widths*, ``[B or 1, H, ranks, D]`` uint8, determines the coordinate of each field: the pairs of a head are ordered by
level, lowest bits first, then by coordinate. The highest bit of an odd bit width is a single bit. The *share* of a
layer, ``[ranks, 3, H + 1]`` int32, holds the number of fields: the column at which each head's pairs, single bits and
gains start, and the end of the last head's. It follows from the widths (`share_of`).
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..errors import KVPassError
from ..layout.pool import of_pages
from .bitpack import byte_rows, pack, unpack
from .codec import NO_KEYS, Codec, Kept
from .spec import CodecSpec
from .tensors import Pack
from .token_ranks import Ranked
from .transform_coding import FIELD_BITS, UNIT, best_gain, fields_first, gains, middle, steps_of


def share_of(widths: Tensor) -> Tensor:
    """The share of a layer whose bit widths are ``widths`` ``[..., H, ranks, D]``: ``[..., ranks, 3, H + 1]`` int32 on
    the host."""
    widths = widths.long().cpu()
    each = torch.stack([(widths // 2).sum(-1), (widths % 2).sum(-1), widths.amax(-1).clamp(max=1)], -1)
    ends = each.movedim(-3, -1).cumsum(-1)  # [..., ranks, 3, H]
    return torch.cat([torch.zeros_like(ends[..., :1]), ends], -1).int()


class _Rank(NamedTuple):
    """Layout of one rank in a page: its number of tokens, and the start columns of each head's pairs, single bits and
    gains, followed by the end of the last head's."""

    tokens: int
    pairs: list[int]
    singles: list[int]
    gains: list[int]

    @property
    def parts(self) -> list[tuple[int, int]]:
        """Rows and columns of the pairs, the single bits and the gains."""
        rows = *(byte_rows(self.tokens, bits) for bits in FIELD_BITS), self.tokens
        return [(count, columns[-1]) for count, columns in zip(rows, self[1:], strict=True)]

    @property
    def heads(self) -> list[int]:
        """Indices of the heads that have a gain."""
        return [h for h, (start, stop) in enumerate(pairwise(self.gains)) if stop > start]


def _ranks(share: Tensor, spec: CodecSpec) -> list[_Rank]:
    counts = LayerPages.of(spec).tokens(spec.page_size)
    return [_Rank(tokens, *each) for tokens, each in zip(counts, share.tolist(), strict=True)]


def _parts(share: Tensor, spec: CodecSpec) -> list[tuple[int, int]]:
    """Rows and columns of each part of a page."""
    mask = [(byte_rows(spec.page_size, 1), share.shape[-1] - 1)] if LayerPages.of(spec).ranked else []
    return mask + [part for rank in _ranks(share, spec) for part in rank.parts]


def high_precision_masks(pages: Tensor, page_size: int, heads: int) -> Tensor:
    """Masks of high-precision tokens, from key pages ``[B, 1, N, 1, bytes]`` of ``heads`` heads:
    ``[B, H, N, P / 8, 1]``."""
    rows = byte_rows(page_size, 1)
    return _by_head(pages[:, 0, :, 0, : rows * heads].unflatten(-1, (rows, heads)))


def _by_head(high_mask: Tensor) -> Tensor:
    """``[B, N, P / 8, H]`` -> ``[B, H, N, P / 8, 1]``."""
    return high_mask.permute(0, 3, 1, 2).unsqueeze(-1)


def fields_of(widths: Tensor, starts: Sequence[int], single: bool) -> tuple[Tensor, Tensor]:
    """Channel and shift of each pair, or of each single bit, of a rank, in page order; each ``[B, F]`` int64.

    The channel is ``head * D + coordinate``. The shift is the position of the field's lowest bit in the code.

    widths: ``[B, H, D]``.
    starts: start column of each head's fields, and the end of the last head's.
    """
    widths, size = widths.long(), widths.shape[-1]
    first, channels, shifts = fields_first(widths, single), [], []
    for head, (start, stop) in enumerate(pairwise(starts)):
        index = first[:, head, : stop - start]
        channels.append(index % size + head * size)
        shifts.append(widths[:, head].gather(-1, index) - 1 if single else 2 * (index // size))
    return torch.cat(channels, -1), torch.cat(shifts, -1)


def _by_kind(widths: Tensor, rank: _Rank) -> list[tuple[Tensor, Tensor]]:
    return [fields_of(widths, rank.pairs, False), fields_of(widths, rank.singles, True)]


def _quantize_rank(units: Tensor, widths: Tensor, rank: _Rank) -> list[Tensor]:
    """Quantize coordinates ``[B, H, N, T, D]`` of the tokens of one rank to the tensors that `_Rank.parts` lists."""
    own = widths.long()[:, :, None, None]
    steps, most = steps_of(units.device)[own], 2.0**own - 1
    levels, codes = best_gain(units, steps, most, own)
    wide, parts = codes.to(torch.uint8).permute(0, 2, 3, 1, 4).flatten(-2), []  # [B, N, T, H * D]
    for bits, (channels, shifts) in zip(FIELD_BITS, _by_kind(widths, rank), strict=True):
        index, shift = (each[:, None, None].expand(*wide.shape[:-1], -1) for each in (channels, shifts))
        parts.append(pack(wide.gather(-1, index) >> shift.to(torch.uint8) & (2**bits - 1), bits))
    return [*parts, (levels + UNIT).to(torch.uint8).squeeze(-1)[:, rank.heads].permute(0, 2, 3, 1)]


def _dequantize_rank(kept: Sequence[Tensor], widths: Tensor, rank: _Rank) -> Tensor:
    """Inverse of `_quantize_rank` up to rounding: coordinates ``[B, N, T, H * D]``."""
    (heads, size), of_gains = widths.shape[1:], gains(kept[2])
    units = of_gains.new_zeros(*of_gains.shape[:-1], heads * size)
    worth = (steps_of(widths.device)[widths.long()] * (widths > 0)).flatten(1)
    for packed, bits, (channels, shifts) in zip(kept, FIELD_BITS, _by_kind(widths, rank), strict=False):
        weight = worth.gather(-1, channels) * torch.exp2(shifts.float())
        fields = (unpack(packed, bits) - middle(bits)) * weight[:, None, None]
        units = units.scatter_add(-1, channels[:, None, None].expand_as(fields), fields)
    of_head = units.new_zeros(*units.shape[:-1], heads)
    of_head[..., rank.heads] = of_gains
    return units * of_head.repeat_interleave(size, -1)


def page_bytes(share: Tensor, spec: CodecSpec) -> int:
    """Bytes per page of a layer with this share."""
    return sum(rows * columns for rows, columns in _parts(share, spec))


def _of_alike(widths: Tensor) -> list[tuple[slice, Tensor]]:
    """The share of each sample with bit widths ``widths`` ``[B or 1, H, ranks, D]``; one for all if they are equal."""
    shares = share_of(widths)
    if len(shares) == 1 or bool((shares == shares[:1]).all()):
        return [(slice(None), shares[0])]
    return [(slice(i, i + 1), share) for i, share in enumerate(shares)]


class LayerPages(Ranked, Codec):
    """Base of codecs whose pages hold all heads of a layer (`codec.layer_pages`)."""

    tensors = {"codes": Kept(lambda spec, head_dim: (1, 0), torch.uint8)}  # `page_bytes` gives the size
    quantizes_with: ClassVar[tuple[str, ...]] = ("basis", "widths", "queries")
    dequantizes_with: ClassVar[tuple[str, ...]] = ("basis", "widths")
    whole_layer: ClassVar[bool] = True

    @property
    def ranks(self) -> int:
        """Number of ranks: groups of a page's tokens with different bit widths."""
        return 2 if self.ranked else 1

    @property
    def basis_and_widths(self) -> dict[str, Kept]:
        """Declares ``basis`` and ``widths`` as tensors of a sequence, for codecs that fit them to it."""
        return {
            "basis": Kept(lambda spec, head_dim: (head_dim, self.block_size)),
            "widths": Kept(lambda spec, head_dim: (self.ranks, head_dim), torch.uint8),
        }

    def marks(self, pack: Pack, first: int, count: int, spec: CodecSpec) -> Tensor:
        if pack.key_pages is None:
            raise KVPassError(NO_KEYS)
        rooms, batch = pack.pools[0].shape[2], len(pack.ring)  # key and value pools hold the same number of pages
        pool = of_pages(pack.key_pages, batch, pack.key_pages.untyped_storage().nbytes() // (batch * rooms))
        return self.marks_in(pool[:, :, first : first + count], pack.fitted["widths"].shape[1], spec)

    def marks_in(self, key_pages: Tensor, heads: int, spec: CodecSpec) -> Tensor:
        return high_precision_masks(key_pages, spec.page_size, heads)

    def quantize(self, x: Tensor, spec: CodecSpec, fitted: Sequence[Tensor] = ()) -> tuple[Tensor]:
        """Quantize whole pages ``[B, H, N * P, D]`` to bytes ``[B, 1, N, 1, bytes]`` uint8.

        fitted: the basis ``[B or 1, H, D, b]`` and widths ``[B or 1, H, ranks, D]``, after what the subclass takes. If
            tokens have ranks, also the queries ``[B or 1, H, Q, D]`` that select the high-precision tokens or, for
            values that follow their keys, the mask from `high_precision_masks`.
        """
        _, basis, widths, chosen = self.opened(fitted, spec)
        high_mask, by_rank = self.by_rank(x, basis, spec, chosen)
        pages = []
        for which, share in _of_alike(widths):
            kept = [] if high_mask is None else [high_mask[which].squeeze(-1).permute(0, 2, 3, 1)]
            for i, (of_rank, rank) in enumerate(zip(by_rank, _ranks(share, spec), strict=True)):
                kept += _quantize_rank(of_rank[which], widths[which, :, i], rank)
            pages.append(torch.cat([part.flatten(2) for part in kept], -1))
        return (torch.cat(pages).unsqueeze(1).unsqueeze(3),)

    def dequantize(self, pages: Tensor, basis: Tensor, widths: Tensor, spec: CodecSpec) -> Tensor:
        """Inverse of `quantize` up to rounding: ``[B, H, N * P, D]`` float32."""
        heads, _, size = widths.shape[1:]
        masks: list[Tensor] = []
        by_rank: list[list[Tensor]] = [[] for _ in range(self.ranks)]
        for which, share in _of_alike(widths):
            parts = _parts(share, spec)
            split = pages[which, 0, :, 0].split([rows * columns for rows, columns in parts], -1)
            kept = [part.unflatten(-1, shape) for part, shape in zip(split, parts, strict=True)]
            if self.ranked:
                masks.append(_by_head(kept.pop(0)))
            for i, rank in enumerate(_ranks(share, spec)):
                units = _dequantize_rank(kept[3 * i : 3 * i + 3], widths[which, :, i], rank)
                by_rank[i].append(units.unflatten(-1, (heads, size)).permute(0, 3, 1, 2, 4))
        return self.from_ranks([torch.cat(one) for one in by_rank], torch.cat(masks) if masks else None, basis)

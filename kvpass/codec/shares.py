"""Quantizes with calibrated bit widths: one water-filling over the whole model divides the bits by the cost of errors.

Bits are divided among layers, keys and values, heads, coordinates, and ranks of tokens. Tokens are quantized as in
`codec.allocation`: with a basis, a bit width per coordinate, fields of two bits and of one, a gain per token and head,
and ranks of a page's tokens. The difference is that the number of bits varies by head. So one page holds all heads of a
layer: the mask of high-precision tokens ``[P / 8, H]``, and for each rank the bit pairs of all heads
``[T / 4, pairs]``, their single bits ``[T / 8, singles]`` and gains ``[T, heads]``. The columns of one head are
adjacent. A head without bits in a rank has no gain there.

The *share* of a layer, ``[ranks, 3, H + 1]`` int32 on the host, holds the number of fields: the column at which each
head's pairs, single bits and gains start, and the end of the last head's. *widths*, ``[B or 1, H, ranks, D]`` uint8,
determines the coordinate of each field: the pairs of a head are ordered by level, lowest bits first, then by
coordinate. The highest bit of an odd bit width is a single bit.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import KVPassError
from ..fields import check_integers
from ..layout.pool import of_pages
from .allocation import Ranked, check_bits, check_page_size, choose
from .bitpack import byte_rows, pack, unpack
from .codec import NO_KEYS, Codec, Kept
from .spec import CodecSpec
from .tensors import Pack
from .transform_coding import (
    DISTORTION,
    FIELD_BITS,
    PAIRS,
    UNIT,
    allocate,
    best_gain,
    coordinates,
    field_widths,
    fit_axes,
    gains,
    middle,
    steps_of,
)

WIDEST = 2 * PAIRS + 1
"""Largest bit width of a coordinate."""


def share_of(widths: Tensor) -> Tensor:
    """The share of a layer whose bit widths are ``widths`` ``[H, ranks, D]``."""
    widths = widths.long().cpu()
    each = torch.stack([(widths // 2).sum(-1), (widths % 2).sum(-1), widths.amax(-1).clamp(max=1)])  # [3, H, ranks]
    ends = each.permute(2, 0, 1).cumsum(-1)
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
    counts = Shares.of(spec).tokens(spec.page_size)
    return [_Rank(tokens, *each) for tokens, each in zip(counts, share.tolist(), strict=True)]


def _parts(share: Tensor, spec: CodecSpec) -> list[tuple[int, int]]:
    """Rows and columns of each part of a page."""
    mask = [(byte_rows(spec.page_size, 1), share.shape[-1] - 1)] if Shares.of(spec).ranked else []
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
    if single:
        there, shift = widths % 2 > 0, widths - 1
    else:
        level = torch.arange(PAIRS, device=widths.device).view(-1, 1)
        there = (widths.unsqueeze(-2) // 2 > level).flatten(-2)
        shift = (2 * level).expand(PAIRS, size).flatten().expand(there.shape)
    first = torch.argsort(there, dim=-1, descending=True, stable=True)
    channels, shifts = [], []
    for head, (start, stop) in enumerate(pairwise(starts)):
        index = first[:, head, : stop - start]
        channels.append(index % size + head * size)
        shifts.append(shift[:, head].gather(-1, index))
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


def fit(x: Tensor, metric: Tensor, share: Tensor, spec: CodecSpec, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Fit basis ``[B, H, D, b]`` float64 and widths ``[B, H, ranks, D]`` uint8 to tokens ``[B, H, T, D]``.

    metric: ``[1, H, D, b]``, the cost of errors.
    share: the layer's share, which fixes the number of fields of each kind.
    valid: ``[B, T]`` bool, False for padding, which is ignored.
    """
    size = Shares.of(spec).block_size
    metric = metric.unflatten(2, (-1, size)).expand(len(x), -1, -1, -1, -1)
    basis, cost = fit_axes(x, metric, size, valid)
    by_rank = []
    for pairs, singles, _ in share.diff(dim=-1).tolist():
        heads = zip(cost.unbind(1), pairs, singles, strict=True)
        by_rank.append(torch.stack([divided(*of_head) for of_head in heads], 1))
    return basis, torch.stack(by_rank, 2).to(torch.uint8)


def divided(cost: Tensor, pairs: int, singles: int) -> Tensor:
    """Bit widths ``[..., D]`` that divide ``pairs`` bit pairs and ``singles`` single bits by error costs
    ``[..., D]``."""
    none = torch.zeros_like(cost, dtype=torch.long)
    if pairs:
        places = allocate(cost, pairs, singles)
        bits = field_widths(pairs, singles, cost.device)
        return none.scatter_add(-1, places % cost.shape[-1], bits.expand(places.shape))
    return none.scatter(-1, cost.topk(singles, -1).indices, 1)


def water_fill(cost: Tensor, bits: int, size: Tensor | None = None) -> Tensor:
    """Bit widths ``[...]`` uint8 that minimize the total error for a total of ``bits`` bits.

    Greedy: each bit goes to the coordinate whose error it reduces most. cost: ``[...]``, the error cost of each
    coordinate. size: ``[...]``, how much a bit of it counts towards ``bits``; default 1. Raises `KVPassError` if the
    coordinates cannot take that many bits.
    """
    saved = -torch.tensor(DISTORTION[: WIDEST + 1], dtype=torch.float64).diff()
    size = torch.ones_like(cost, dtype=torch.float64) if size is None else size.double()
    each = ((cost.double() / size).flatten().unsqueeze(-1) * saved).flatten()
    most = round(WIDEST * float(size.sum()))
    if not 0 <= bits <= most:
        raise KVPassError(f"{cost.numel()} coordinates take 0 to {most} bits, not {bits}.")
    order = each.sort(descending=True, stable=True).indices // WIDEST
    taken = order[size.flatten()[order].cumsum(0) <= bits + 1e-6]  # sums of sizes are rounded
    return torch.bincount(taken, minlength=cost.numel()).view(cost.shape).to(torch.uint8)


def page_bytes(share: Tensor, spec: CodecSpec) -> int:
    """Bytes per page of a layer with this share."""
    known = _page_bytes.setdefault(share, {})
    if spec not in known:
        known[spec] = sum(rows * columns for rows, columns in _parts(share, spec))
    return known[spec]


_page_bytes: MutableMapping[Tensor, dict[CodecSpec, int]] = WeakIdKeyDictionary()  # each op asks for them in each step


@dataclass(frozen=True)
class Shares(Ranked, Codec, name="shares"):
    """Per-channel bit widths, with a calibrated number of bits per head (`codec.shares`).

    block_size: number of neighbouring channels that are decorrelated together.
    ranked: give more bits to the half of a page's tokens that has the most attention mass under the calibration's
        queries.
    follows: take that half from the layer's keys.
    adapts: fit mean, basis and the bit widths within a head to the first packed tokens, under the calibrated metric.
        Otherwise all of them come from the calibration.
    """

    block_size: int
    ranked: bool = True
    follows: bool = False
    adapts: bool = False

    tensors = {"codes": Kept(lambda spec, head_dim: (1, 0), torch.uint8)}  # the size comes from `page_bytes`
    quantizes_with = "share", "basis", "widths", "queries"
    dequantizes_with = "share", "basis", "widths"
    dequantizes_any_bytes = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integers(self, block_size=1)
        if self.follows and not self.ranked:
            raise KVPassError("follows=True needs per-token bit widths: set ranked=True.")

    @property
    def ranks(self) -> int:
        """Number of ranks: groups of a page's tokens with different bit widths."""
        return 2 if self.ranked else 1

    def describe(self, quantizer: str) -> str:
        by = "per channel and token" if self.ranked else "per channel"
        return f"calibrated bit widths, {by}, blocks of {self.block_size}"

    def check(self, spec: CodecSpec) -> None:
        check_bits(spec)
        check_page_size(spec, self.ranked)

    def check_head(self, head_dim: int) -> None:
        if head_dim % self.block_size:
            raise KVPassError(f"block_size={self.block_size} does not divide head_dim={head_dim}.")

    def sequence(self, spec: CodecSpec) -> dict[str, Kept]:
        """With ``adapts``: ``basis`` ``[B, H, D, b]`` and ``widths`` ``[B, H, ranks, D]`` uint8."""
        if not self.adapts:
            return {}
        return {
            "basis": Kept(lambda spec, head_dim: (head_dim, self.block_size)),
            "widths": Kept(lambda spec, head_dim: (self.ranks, head_dim), torch.uint8),
        }

    def model(self, spec: CodecSpec) -> tuple[str, ...]:
        """``share`` ``[ranks, 3, H + 1]`` int32 on the host; ``metric`` and ``basis`` ``[1, H, D, b]``, ``center``
        ``[1, H, 1, D]``, ``queries`` ``[1, H, Q, D]``, 16-bit; ``widths`` ``[1, H, ranks, D]`` uint8, and ``steps`` of
        the same shape, 16-bit: step sizes of the coordinates if their codes are entropy coded."""
        center = ("center",) if spec.transform.center else ()
        found = ("share", "metric") if self.adapts else ("share", *center, "basis", "widths", "steps")
        return (*found, "queries") if self.chooses else found

    def page_bytes(self, model: Mapping[str, Tensor], spec: CodecSpec) -> int:
        return page_bytes(model["share"], spec)

    def fit_tokens(self, kept: Mapping[str, Tensor], x: Tensor, valid: Tensor | None, spec: CodecSpec) -> None:
        if not self.adapts:
            return
        basis, widths = fit(x, kept["metric"], kept["share"], spec, valid)
        kept["basis"].copy_(basis)
        kept["widths"].copy_(widths)

    def marks(self, pack: Pack, first: int, count: int, spec: CodecSpec) -> Tensor:
        if pack.key_pages is None:
            raise KVPassError(NO_KEYS)
        rooms, batch = pack.pools[0].shape[2], len(pack.ring)  # key and value pools hold the same number of pages
        pool = of_pages(pack.key_pages, batch, pack.key_pages.untyped_storage().nbytes() // (batch * rooms))
        return self.marks_in(pool[:, :, first : first + count], pack.fitted["widths"].shape[1], spec)

    def marks_in(self, key_pages: Tensor, heads: int, spec: CodecSpec) -> Tensor:
        return high_precision_masks(key_pages, spec.page_size, heads)

    def units(
        self, x: Tensor, basis: Tensor, spec: CodecSpec, chosen: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """The coordinates of whole pages ``[B, H, N * P, D]`` in ``basis``, in token order, float32, and the mask of
        their high-precision tokens ``[B, H, N, P / 8, 1]``; None without ranks. ``chosen`` as in `by_rank`."""
        if not self.ranked:
            return coordinates(x, basis), None
        return coordinates(x, basis), chosen[0] if self.follows else choose(x, spec, chosen[0])

    def quantize(self, x: Tensor, spec: CodecSpec, fitted: Sequence[Tensor] = ()) -> tuple[Tensor]:
        """Quantize whole pages ``[B, H, N * P, D]`` to bytes ``[B, 1, N, 1, bytes]`` uint8.

        fitted: the layer's share, its basis ``[B or 1, H, D, b]`` and widths ``[B or 1, H, ranks, D]``. If tokens have
            ranks, also the queries ``[1, H, Q, D]`` that select the high-precision tokens or, for values that follow
            their keys, the mask from `high_precision_masks`.
        """
        share, basis, widths, *chosen = fitted
        high_mask, by_rank = self.by_rank(x, basis, spec, chosen)
        kept = [] if high_mask is None else [high_mask.squeeze(-1).permute(0, 2, 3, 1)]
        for i, (of_rank, rank) in enumerate(zip(by_rank, _ranks(share, spec), strict=True)):
            kept += _quantize_rank(of_rank, widths[:, :, i], rank)
        return (torch.cat([part.flatten(2) for part in kept], -1).unsqueeze(1).unsqueeze(3),)

    def dequantize(self, pages: Tensor, share: Tensor, basis: Tensor, widths: Tensor, spec: CodecSpec) -> Tensor:
        """Inverse of `quantize` up to rounding: ``[B, H, N * P, D]`` float32."""
        parts, (heads, _, size) = _parts(share, spec), widths.shape[1:]
        split = pages[:, 0, :, 0].split([rows * columns for rows, columns in parts], -1)
        kept = [part.unflatten(-1, shape) for part, shape in zip(split, parts, strict=True)]
        high_mask, by_rank = _by_head(kept.pop(0)) if self.ranked else None, []
        for i, rank in enumerate(_ranks(share, spec)):
            units = _dequantize_rank(kept[3 * i : 3 * i + 3], widths[:, :, i], rank)
            by_rank.append(units.unflatten(-1, (heads, size)).permute(0, 3, 1, 2, 4))
        return self.from_ranks(by_rank, high_mask, basis)

"""Quantizes with per-channel bit widths, in a basis fitted to the tokens, and gives more bits where errors cost more.

This is transform coding, as in image and audio compression. Blocks of neighbouring channels are decorrelated (the KLT
of their covariance under the metric of their errors). Bits are divided among coordinates by the cost of an error in
each, which approximates reverse water-filling (Cover & Thomas, Elements of Information Theory, 10.3). Each token has an
8-bit gain: the size of its coordinates.

Quantized coordinates are uniform and stored as *fields*: pairs of bits, and single bits for odd bit widths. All heads
have the same number of fields of each kind, so all pages have one shape. Each head assigns fields to coordinates, and
weights to fields, on its own. Dequantization is linear in the fields: scales, bit widths and basis are applied to a
query once, and a cached value is read as two bits and nothing else.

Half of a page's tokens, the *high-precision* ones, may get more fields than the others (`codec.token_ranks`). A sample
of the prompt's queries selects them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..errors import KVPassError
from ..fields import check_integers
from .bitpack import byte_rows, pack, unpack
from .codec import Codec, Kept
from .probes import PROBES, some_queries
from .spec import CodecSpec
from .token_ranks import RANKS, Ranked, slots, tokens_at
from .transform_coding import (
    FIELD_BITS,
    PAIRS,
    SHIFTS,
    UNIT,
    allocate,
    best_gain,
    field_widths,
    fit_axes,
    gains,
    metric_of,
    middle,
    steps_of,
    weights,
    widths_of,
)

SHARES = 16
"""`Allocation` counts fields per this many channels."""


class Rank(NamedTuple):
    """The stored tokens of one rank, all uint8: pairs of bits ``[..., N, T / 4, .]``, single bits
    ``[..., N, T / 8, .]`` and gains ``[..., N, T, 1]``."""

    pairs: Tensor
    singles: Tensor
    gains: Tensor


@cache
def _parts(spec: CodecSpec, head_dim: int) -> list[tuple[int, int]]:
    """Rows and columns of each part of a page: the mask of high-precision tokens, then the parts of each `Rank`."""
    allocation, parts = Allocation.of(spec), []
    if allocation.ranked:
        parts.append((byte_rows(spec.page_size, 1), 1))
    for tokens, counts in zip(allocation.tokens(spec.page_size), allocation.counts(head_dim), strict=True):
        parts += [(byte_rows(tokens, bits), count) for bits, count in zip(FIELD_BITS, counts, strict=True)]
        parts.append((tokens, 1))
    return parts


def _page(spec: CodecSpec, head_dim: int) -> tuple[int, int]:
    return 1, sum(rows * columns for rows, columns in _parts(spec, head_dim))


def split_pages(pages: Tensor, spec: CodecSpec, head_dim: int) -> tuple[Tensor | None, list[Rank]]:
    """Split pages ``[..., N, 1, bytes]`` into the mask of high-precision tokens ``[..., N, P / 8, 1]`` and a list of
    `Rank`.

    The mask is None if tokens have no ranks.
    """
    parts = _parts(spec, head_dim)
    split = pages.squeeze(-2).split([rows * columns for rows, columns in parts], -1)
    views = [part.unflatten(-1, shape) for part, shape in zip(split, parts, strict=True)]
    high_mask = views.pop(0) if Allocation.of(spec).ranked else None
    return high_mask, [Rank(*views[i : i + 3]) for i in range(0, len(views), 3)]


def _placed(cost: Tensor, pairs: int, singles: int) -> Tensor:
    """Places of the fields of one rank, ``[..., F]`` int64: ``(width * 8 + shift) * D + coordinate``."""
    size, found = cost.shape[-1], allocate(cost, pairs, singles)
    bits = field_widths(pairs, singles, cost.device)
    widths = torch.zeros_like(cost, dtype=torch.long).scatter_add(-1, found % size, bits.expand(found.shape))
    return widths.gather(-1, found % size) * SHIFTS * size + found


def _quantize_rank(units: Tensor, places: Tensor, counts: tuple[int, int]) -> Rank:
    """Quantize the coordinates ``[B, H, N, T, D]`` of the tokens of one rank. places: ``[B, H, 1, F]``."""
    places, head_dim = places.long().unsqueeze(2), units.shape[-1]
    widths = widths_of(places, head_dim)
    steps, most = steps_of(units.device)[widths], 2.0**widths - 1
    levels, codes = best_gain(units, steps, most, widths)
    index = (places % head_dim).expand(*codes.shape[:-1], -1)
    fields = codes.to(torch.uint8).gather(-1, index) >> (places // head_dim % SHIFTS).to(torch.uint8)
    kinds = zip(fields.split(counts, -1), FIELD_BITS, strict=True)
    pairs, singles = (pack(part & (2**bits - 1), bits) for part, bits in kinds)
    return Rank(pairs, singles, (levels + UNIT).to(torch.uint8))


def field_rows(basis: Tensor, places: Tensor) -> Tensor:
    """The contribution of each field to the channels of a token, per unit of field and gain: ``[B, H, F, D]``
    float32."""
    size, head_dim = basis.shape[-1], basis.shape[-2]
    coordinate, kind = places.mT.long() % head_dim, places.mT.long() // head_dim
    rows = basis.float().gather(-2, coordinate.expand(-1, -1, -1, size)) * weights(basis.device)[kind]
    mine = torch.arange(head_dim // size, device=basis.device) == coordinate // size
    return torch.where(mine.unsqueeze(-1), rows.unsqueeze(-2), 0.0).flatten(-2)


def _dequantize_rank(rank: Rank, rows: Tensor) -> Tensor:
    kinds = zip(rank, FIELD_BITS, strict=False)
    fields = torch.cat([unpack(packed, bits) - middle(bits) for packed, bits in kinds], -1)
    return fields * gains(rank.gains) @ rows


@dataclass(frozen=True)
class Allocation(Ranked, Codec, name="allocated"):
    """Per-channel and per-token bit widths, in a basis fitted to the first packed tokens (`codec.allocation`).

    pairs, singles: number of bit pairs and of single bits per 16 channels: (2 * pairs + singles) / 16 bits per value.
        A channel has at most one single bit, so ``singles`` in 16 channels have an odd bit width.
    block_size: number of neighbouring channels that are decorrelated together; 1 means no decorrelation.
    weighted: weight errors by the prompt's queries, or, with "optional", by those that the call has; otherwise errors
        cost the same in all channels.
    rich_pairs, rich_singles: ``pairs`` and ``singles`` for the high-precision tokens of a page. If both are 0, all
        tokens of a page have the same bit widths.
    follows: take the high-precision tokens from the layer's keys; otherwise the prompt's queries select them.
    """

    pairs: int
    singles: int
    block_size: int
    weighted: bool | Literal["optional"]
    rich_pairs: int = 0
    rich_singles: int = 0
    follows: bool = False

    tensors = {"codes": Kept(_page, torch.uint8)}
    quantizes_with: ClassVar[tuple[str, ...]] = ("basis", "fields", "queries")
    dequantizes_with: ClassVar[tuple[str, ...]] = ("basis", "fields")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integers(self, pairs=1, singles=0, block_size=1, rich_pairs=0, rich_singles=0)
        for pairs, singles in self._shares:
            if pairs > PAIRS * SHARES or singles > SHARES:
                raise KVPassError(
                    f"pairs={pairs}, singles={singles}: {SHARES} channels take at most {PAIRS * SHARES} pairs of bits "
                    f"and {SHARES} single bits."
                )
        if self.ranked and not self.rich_pairs:
            raise KVPassError("rich_pairs=0: per-token bit widths need at least one pair of bits.")
        if self.follows and not self.ranked:
            raise KVPassError("follows=True needs per-token bit widths: set rich_pairs or rich_singles.")

    @property
    def ranked(self) -> bool:
        """Whether half of a page's tokens gets more bits than the other half."""
        return bool(self.rich_pairs or self.rich_singles)

    @property
    def _shares(self) -> list[tuple[int, int]]:
        low, high = (self.pairs, self.singles), (self.rich_pairs, self.rich_singles)
        return [high, low] if self.ranked else [low]

    def counts(self, head_dim: int) -> list[tuple[int, int]]:
        """Number of bit pairs and of single bits of a token of ``head_dim`` channels, per rank."""
        return [(pairs * head_dim // SHARES, singles * head_dim // SHARES) for pairs, singles in self._shares]

    def fields(self, head_dim: int) -> list[int]:
        """Number of fields of a token, of both kinds together, per rank."""
        return [sum(counts) for counts in self.counts(head_dim)]

    @property
    def bits(self) -> float:
        """Average bits per value, without gains and masks."""
        each = [(2 * pairs + singles) / SHARES for pairs, singles in self._shares]
        return each[0] / RANKS + each[1] * (1 - 1 / RANKS) if self.ranked else each[0]

    def describe(self, quantizer: str) -> str:
        by = "per channel and token" if self.ranked else "per channel"
        return f"{self.bits:g} bits on average, {by}, blocks of {self.block_size}"

    def check_head(self, head_dim: int) -> None:
        super().check_head(head_dim)
        if head_dim % SHARES:
            raise KVPassError(
                f"head_dim={head_dim} is not a multiple of {SHARES}, the number of parts of a head that get bits of "
                "their own: use another scheme, such as 'kivi'."
            )

    @property
    def needs_queries(self) -> bool:
        return self.weighted is True or self.chooses

    @property
    def takes_queries(self) -> bool:
        return bool(self.weighted) or self.chooses

    def sequence(self, spec: CodecSpec) -> dict[str, Kept]:
        """``basis`` ``[B, H, D, b]``, which holds the error metric until the basis is fitted; ``fields``
        ``[B, H, 1, F]``, the places of fields (`fit_basis`); ``queries``, which select the keys that get more bits."""
        found = {
            "basis": Kept(lambda spec, head_dim: (head_dim, self.block_size)),
            "fields": Kept(lambda spec, head_dim: (1, sum(self.fields(head_dim))), torch.int32),
        }
        return {**found, "queries": PROBES} if self.chooses else found

    def fit_queries(self, kept: Mapping[str, Tensor], q: Tensor | None, valid: Tensor | None, spec: CodecSpec) -> None:
        if q is None or not self.weighted:
            kept["basis"].zero_()
        else:
            kept["basis"].copy_(metric_of(q, valid, self.block_size))
        if q is not None and self.chooses:
            kept["queries"].copy_(some_queries(q, valid, kept["queries"].dtype))

    def fit_basis(self, x: Tensor, metric: Tensor | None, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Fit the basis ``[B, H, D, b]`` float64 and the places of fields ``[B, H, 1, F]``.

        Row i of the basis is the contribution of coordinate i to the b channels of its block. Places come from
        `transform_coding.allocate`.

        x: ``[B, H, T, D]``, the tokens.
        metric: ``[B, H, D / b, b, b]``, the cost of errors, up to a factor. None or 0 means that errors in all channels
            cost the same.
        valid: ``[B, T]`` bool, False for padding, which is ignored.
        """
        basis, cost = fit_axes(x, metric, self.block_size, valid)
        places = [_placed(cost, *counts) for counts in self.counts(x.shape[-1])]
        return basis, torch.cat(places, -1).unsqueeze(2)

    def fit_tokens(self, kept: Mapping[str, Tensor], x: Tensor, valid: Tensor | None, spec: CodecSpec) -> None:
        basis, places = self.fit_basis(x, kept["basis"].unflatten(2, (-1, self.block_size)), valid)
        kept["basis"].copy_(basis)
        kept["fields"].copy_(places)

    def opened(self, fitted: Sequence[Tensor], spec: CodecSpec) -> tuple[int, Tensor, Tensor, list[Tensor]]:
        basis, places, *chosen = fitted
        return _page(spec, basis.shape[-2])[1], basis, places, chosen

    def quantize(self, x: Tensor, spec: CodecSpec, fitted: Sequence[Tensor] = ()) -> tuple[Tensor]:
        """Quantize whole pages ``[B, H, N * P, D]`` to bytes ``[B, H, N, 1, .]`` uint8; `split_pages` shows the layout.

        fitted: the basis and the places of fields (`Allocation.fit_basis`). If tokens have ranks, also the queries
            ``[B, H, Q, D]`` that select the high-precision tokens (`some_queries`) or, for values that follow
            their keys, `Codec.marks`.
        """
        _, basis, places, chosen = self.opened(fitted, spec)
        high_mask, by_rank = self.by_rank(x, basis, spec, chosen)
        head_dim, kept = x.shape[-1], [] if high_mask is None else [high_mask]
        for of_rank, own, counts in zip(
            by_rank, places.split(self.fields(head_dim), -1), self.counts(head_dim), strict=True
        ):
            kept += _quantize_rank(of_rank, own, counts)
        return (torch.cat([part.flatten(-2) for part in kept], -1).unsqueeze(-2),)

    def dequantize(self, pages: Tensor, basis: Tensor, places: Tensor, spec: CodecSpec) -> Tensor:
        """Inverse of `quantize` up to rounding: ``[B, H, N * P, D]`` float32."""
        high_mask, ranks = split_pages(pages, spec, basis.shape[-2])
        rows = field_rows(basis, places).unsqueeze(2).split(self.fields(basis.shape[-2]), -2)
        values = torch.cat([_dequantize_rank(*each) for each in zip(ranks, rows, strict=True)], 3)
        if high_mask is not None:
            values = tokens_at(slots(high_mask), values)
        return values.flatten(2, 3)

"""Bits where errors cost most: tokens in a basis fitted to them, each of whose channels has a width of its own.

Transform coding, as for pictures and sound: blocks of neighbouring channels are decorrelated (the KLT of their
covariance under the metric of their errors), and coordinates share the bits by what an error in each costs, as reverse
water-filling would (Cover & Thomas, Elements of Information Theory, 10.3). A token has a gain, the size of its
coordinates, in 8 bits.

Codes are uniform, and kept in *fields*: pairs of bits, and single ones for widths that are odd. All heads have as many
fields of each kind, so that pages are of one shape; which coordinate a field belongs to, and how much it weighs there,
is the head's own. Scales, widths and basis are linear in a field, so that a query takes them once and a cached value is
read as two bits and nothing else.

Tokens of a page may have *ranks*: the half of them that attention pays most, the rich, have more fields than the
rest. A page keeps its tokens by rank, and a bit for each that says which it has. Which tokens those are is said by some
of the prompt's queries, and values go by their keys.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import KVPassError
from ..fields import check_integers
from .bitpack import byte_rows, pack, smallest_page, unpack
from .codec import Codec, Kept
from .probes import PROBES, some_queries
from .spec import CodecSpec
from .transform_coding import (
    FIELD_BITS,
    PAIRS,
    SHIFTS,
    STEPS,
    UNIT,
    allocate,
    best_gain,
    blocks,
    fit_axes,
    gains,
    metric_of,
    middle,
    weights,
    widths_of,
)

SHARES = 16
"""Channels that `Allocation` counts fields of."""
RICH = 2
"""Of so many tokens of a page one may get more bits."""


class Rank(NamedTuple):
    """What pages keep of their tokens of one rank: pairs of bits ``[..., N, T / 4, .]``, single ones ``[..., N, T / 8,
    .]`` and gains ``[..., N, T, 1]``, uint8."""

    pairs: Tensor
    singles: Tensor
    gains: Tensor


@cache
def _parts(spec: CodecSpec, head_dim: int) -> list[tuple[int, int]]:
    """Rows and columns of what a page keeps: who is rich, then a `Rank` after the other."""
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
    """What pages ``[..., N, 1, bytes]`` keep: who is rich, ``[..., N, P / 8, 1]``, if somebody is, and their ranks."""
    parts = _parts(spec, head_dim)
    split = pages.squeeze(-2).split([rows * columns for rows, columns in parts], -1)
    views = [part.unflatten(-1, shape) for part, shape in zip(split, parts, strict=True)]
    rich = views.pop(0) if Allocation.of(spec).ranked else None
    return rich, [Rank(*views[i : i + 3]) for i in range(0, len(views), 3)]


def slots(rich: Tensor) -> Tensor:
    """Where pages ``[..., N, P / 8, 1]`` keep each of their tokens: ``[..., N, P]`` int64."""
    is_rich = unpack(rich, 1).squeeze(-1)
    token = torch.arange(is_rich.shape[-1], device=rich.device)
    before = (is_rich.float() @ (token[:, None] < token).float()).long()  # how many rich ones come before
    poor = (token - before + len(token) // RICH).clamp(max=len(token) - 1)  # pages that are not written have no rich
    return torch.where(is_rich > 0, before, poor)


def _placed(cost: Tensor, pairs: int, singles: int) -> Tensor:
    """The places of the fields of one rank, ``[..., F]`` int64: ``(width * 8 + shift) * D + coordinate``."""
    size, found = cost.shape[-1], allocate(cost, pairs, singles)
    bits = torch.tensor(FIELD_BITS, device=cost.device).repeat_interleave(torch.tensor([pairs, singles]))
    widths = torch.zeros_like(cost, dtype=torch.long).scatter_add(-1, found % size, bits.expand(found.shape))
    return widths.gather(-1, found % size) * SHIFTS * size + found


def _quantize_rank(units: Tensor, places: Tensor, counts: tuple[int, int]) -> Rank:
    """Tokens of one rank, ``[B, H, N, T, D]`` coordinates, whose fields have these places ``[B, H, 1, F]``."""
    places, head_dim = places.long().unsqueeze(2), units.shape[-1]
    widths = widths_of(places, head_dim)
    steps, most = torch.tensor([1.0, *STEPS], device=units.device)[widths], 2.0**widths - 1
    levels, codes = best_gain(units, steps, most, widths)
    index = (places % head_dim).expand(*codes.shape[:-1], -1)
    fields = codes.to(torch.uint8).gather(-1, index) >> (places // head_dim % SHIFTS).to(torch.uint8)
    kinds = zip(fields.split(counts, -1), FIELD_BITS, strict=True)
    pairs, singles = (pack(part & (2**bits - 1), bits) for part, bits in kinds)
    return Rank(pairs, singles, (levels + UNIT).to(torch.uint8))


def choose(x: Tensor, spec: CodecSpec, queries: Tensor) -> Tensor:
    """Who is rich of keys ``[B, H, N * P, D]``: those to which ``queries`` pay most attention among their page.
    ``[B, H, N, P / 8, 1]`` uint8.

    An error in a key is seen by the square of its weight.
    """
    paid = (x.float() @ queries.float().mT).unflatten(2, (-1, spec.page_size)).softmax(3).square().sum(-1)
    most = paid.topk(spec.page_size // RICH, -1).indices
    rich = torch.zeros_like(paid, dtype=torch.uint8).scatter(-1, most, 1)
    return pack(rich.unsqueeze(-1), 1)


def field_rows(basis: Tensor, places: Tensor) -> Tensor:
    """What 1 in each field adds to the channels of a token of gain 1: ``[B, H, F, D]`` float32."""
    size, head_dim = basis.shape[-1], basis.shape[-2]
    coordinate, kind = places.mT.long() % head_dim, places.mT.long() // head_dim
    rows = basis.float().gather(-2, coordinate.expand(-1, -1, -1, size)) * weights(basis.device)[kind]
    mine = torch.arange(head_dim // size, device=basis.device) == coordinate // size
    return torch.where(mine.unsqueeze(-1), rows.unsqueeze(-2), 0.0).flatten(-2)


def _dequantize_rank(rank: Rank, rows: Tensor) -> Tensor:
    kinds = zip(rank, FIELD_BITS, strict=False)
    fields = torch.cat([unpack(packed, bits) - middle(bits) for packed, bits in kinds], -1)
    return fields * gains(rank.gains) @ rows


def check_page_size(spec: CodecSpec, ranked: bool) -> None:
    """Raise `KVPassError` unless fields of a page of ``spec`` fill whole bytes, those of its rich tokens, too."""
    multiple = smallest_page(min(FIELD_BITS)) * (RICH if ranked else 1)
    if spec.page_size % multiple:
        raise KVPassError(
            f"page_size={spec.page_size} does not fill whole bytes: use a residual that is a multiple of {multiple}."
        )


def check_bits(spec: CodecSpec) -> None:
    """Raise `KVPassError` unless ``spec`` says the widest bit width there may be."""
    if spec.bits != 8 or spec.quantizer.grid:
        raise KVPassError("Per-channel bit widths need bits=8, the widest there may be, and no grid.")


@dataclass(frozen=True)
class Allocation(Codec, name="allocated"):
    """Widths by channel, in a basis that is fitted to the tokens packed first (`codec.allocation`), and by token.

    pairs, singles: of 16 channels, how many pairs of bits they share, and how many single bits; (2 * pairs + singles) /
        16 bits a value. A channel has at most one single bit, so that many have an odd width.
    block_size: neighbouring channels that are decorrelated together; 1 takes channels as they are.
    weighted: errors cost what the prompt's queries make of them; otherwise the same in all channels.
    rich_pairs, rich_singles: the same as ``pairs`` and ``singles``, of the half of a page's tokens that attention
        pays most; 0 and 0 for a page of tokens that are all alike.
    follows: that half is the one of the layer's keys; otherwise it is chosen by the prompt's queries.
    """

    pairs: int
    singles: int
    block_size: int
    weighted: bool
    rich_pairs: int = 0
    rich_singles: int = 0
    follows: bool = False

    tensors = {"codes": Kept(_page, torch.uint8)}
    quantizes_with = "basis", "fields", "queries"
    dequantizes_with = "basis", "fields"

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
        """Whether some tokens of a page have other widths than the rest."""
        return bool(self.rich_pairs or self.rich_singles)

    @property
    def chooses(self) -> bool:
        return self.ranked and not self.follows

    @property
    def _shares(self) -> list[tuple[int, int]]:
        plain, rich = (self.pairs, self.singles), (self.rich_pairs, self.rich_singles)
        return [rich, plain] if self.ranked else [plain]

    def tokens(self, page_size: int) -> list[int]:
        """How many tokens of a page there are of each rank, richest first."""
        return [page_size // RICH, page_size - page_size // RICH] if self.ranked else [page_size]

    def counts(self, head_dim: int) -> list[tuple[int, int]]:
        """How many pairs of bits, and how many single bits, a token of ``head_dim`` channels has, by rank."""
        return [(pairs * head_dim // SHARES, singles * head_dim // SHARES) for pairs, singles in self._shares]

    def fields(self, head_dim: int) -> list[int]:
        """How many fields, of either kind, a token has, by rank."""
        return [sum(counts) for counts in self.counts(head_dim)]

    @property
    def bits(self) -> float:
        """Bits a value, on average."""
        each = [(2 * pairs + singles) / SHARES for pairs, singles in self._shares]
        return each[0] / RICH + each[1] * (1 - 1 / RICH) if self.ranked else each[0]

    def describe(self, quantizer: str) -> str:
        by = "per channel and token" if self.ranked else "per channel"
        return f"{self.bits:g} bits on average, {by}, blocks of {self.block_size}"

    def check_head(self, head_dim: int) -> None:
        for name, size in (("block_size", self.block_size), (str(SHARES), SHARES)):
            if head_dim % size:
                raise KVPassError(f"{name}={size} does not divide head_dim={head_dim}.")

    @property
    def needs_queries(self) -> bool:
        return self.weighted or self.chooses

    @property
    def follows_keys(self) -> bool:
        return self.follows

    def check(self, spec: CodecSpec) -> None:
        check_bits(spec)
        check_page_size(spec, self.ranked)

    def sequence(self, spec: CodecSpec) -> dict[str, Kept]:
        """``basis`` ``[B, H, D, b]`` holds what errors cost until it is fitted; ``fields`` ``[B, H, 1, F]`` are places
        (`fit_basis`); ``queries`` choose the tokens of keys that get more bits."""
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
        """The basis that tokens ``[B, H, T, D]`` are quantized in, ``[B, H, D, b]`` float64, and the places of its
        fields, ``[B, H, 1, F]`` (`transform_coding.allocate`).

        Row i of the basis is what a step in coordinate i adds to the channels of its block of b.

        metric: ``[B, H, D / b, b, b]``, up to a factor: what errors cost; None or 0 if those of all channels cost the
            same. valid: ``[B, T]`` bool; padding is left out.
        """
        basis, cost = fit_axes(x, metric, self.block_size, valid)
        places = [_placed(cost, *counts) for counts in self.counts(x.shape[-1])]
        return basis, torch.cat(places, -1).unsqueeze(2)

    def fit_tokens(self, kept: Mapping[str, Tensor], x: Tensor, valid: Tensor | None, spec: CodecSpec) -> None:
        basis, places = self.fit_basis(x, kept["basis"].unflatten(2, (-1, self.block_size)), valid)
        kept["basis"].copy_(basis)
        kept["fields"].copy_(places)

    def quantize(self, x: Tensor, spec: CodecSpec, fitted: Sequence[Tensor] = ()) -> tuple[Tensor]:
        """Whole pages ``[B, H, N * P, D]`` as bytes, ``[B, H, N, 1, .]`` uint8: see `opened`.

        fitted: the basis and the places of its fields, see `Allocation.fit_basis`; where tokens have ranks, besides the
        queries ``[B, H, Q, D]`` that choose (`some_queries`), or for values that follow what their keys chose,
        `Codec.marks`.
        """
        basis, places, *chosen = fitted
        inverse = torch.linalg.inv(basis.double().unflatten(-2, (-1, self.block_size)))
        units = (blocks(x, self.block_size) @ inverse).transpose(2, 3).flatten(-2).float()
        units, kept = units.unflatten(2, (-1, spec.page_size)), []
        if self.ranked:
            rich = chosen[0] if self.follows else choose(x, spec, chosen[0])
            kept.append(rich)
            units = units.gather(3, slots(rich).argsort(-1).unsqueeze(-1).expand_as(units))
        head_dim, by_rank = x.shape[-1], units.split(self.tokens(spec.page_size), 3)
        for of_rank, own, counts in zip(
            by_rank, places.split(self.fields(head_dim), -1), self.counts(head_dim), strict=True
        ):
            kept += _quantize_rank(of_rank, own, counts)
        return (torch.cat([part.flatten(-2) for part in kept], -1).unsqueeze(-2),)

    def dequantize(self, pages: Tensor, basis: Tensor, places: Tensor, spec: CodecSpec) -> Tensor:
        """Inverse of `quantize` up to rounding: ``[B, H, N * P, D]`` float32."""
        rich, ranks = split_pages(pages, spec, basis.shape[-2])
        rows = field_rows(basis, places).unsqueeze(2).split(self.fields(basis.shape[-2]), -2)
        values = torch.cat([_dequantize_rank(*each) for each in zip(ranks, rows, strict=True)], 3)
        if rich is not None:
            values = values.gather(3, slots(rich).unsqueeze(-1).expand_as(values))
        return values.flatten(2, 3)

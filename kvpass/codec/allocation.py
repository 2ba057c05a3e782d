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

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import KVPassError
from .affine import check_finite
from .bitpack import byte_rows, pack, smallest_page, unpack
from .kept import CODECS, Codec, Kept
from .quantizer import PAIRS, QUERIES, RICH, Allocation
from .spec import CodecSpec

FIELD_BITS = 2, 1
STEPS = 1.5958, 0.9957, 0.5860, 0.3352, 0.1881, 0.1041, 0.0569, 0.0308
"""Steps of uniform codes of 1 to 8 bits, of least squared error for a normal variable (Max 1960, table 2)."""
DISTORTION = 1.0, 0.3634, 0.1188, 0.03744, 0.01154, 0.003495, 0.001041, 0.0003035, 0.0000869
"""Their squared error, of 0 to 8 bits."""
_SHRINKAGE = 0.05  # of the covariance towards its diagonal, besides that of a block of tokens
_FLOOR = 0.02  # of the mean cost of a channel: none costs less, as later queries may look where the prompt's do not
_OCTAVE, UNIT = 16, 128  # gains in a factor of 2, and the code of gain 1
_TRIED = 0, -6, -3, 3, 6  # gains beside the size of a token's coordinates, of which the best is taken
_LEAST_GAIN, _LEAST_VARIANCE = 1e-9, 2.0**-16  # a basis is kept in 16 bits
SHIFTS = 8  # more than the bits of a code that are below a field


def allocation_of(spec: CodecSpec) -> Allocation:
    """The `Allocation` of ``spec``. Raises `KVPassError` if it has none."""
    if spec.quantizer.allocation is None:
        raise KVPassError("Per-channel bit widths need an Allocation: Quantizer(..., allocation=Allocation(...)).")
    return spec.quantizer.allocation


class Rank(NamedTuple):
    """What pages keep of their tokens of one rank: pairs of bits ``[..., N, T / 4, .]``, single ones ``[..., N, T / 8,
    .]`` and gains ``[..., N, T, 1]``, uint8."""

    pairs: Tensor
    singles: Tensor
    gains: Tensor


@cache
def _parts(spec: CodecSpec, head_dim: int) -> list[tuple[int, int]]:
    """Rows and columns of what a page keeps: who is rich, then a `Rank` after the other."""
    allocation, parts = allocation_of(spec), []
    if allocation.ranked:
        parts.append((byte_rows(spec.page_size, 1), 1))
    for tokens, counts in zip(allocation.tokens(spec.page_size), allocation.counts(head_dim), strict=True):
        parts += [(byte_rows(tokens, bits), count) for bits, count in zip(FIELD_BITS, counts, strict=True)]
        parts.append((tokens, 1))
    return parts


def _page(spec: CodecSpec, head_dim: int) -> tuple[int, int]:
    return 1, sum(rows * columns for rows, columns in _parts(spec, head_dim))


def opened(pages: Tensor, spec: CodecSpec, head_dim: int) -> tuple[Tensor | None, list[Rank]]:
    """What pages ``[..., N, 1, bytes]`` keep: who is rich, ``[..., N, P / 8, 1]``, if somebody is, and their ranks."""
    parts = _parts(spec, head_dim)
    split = pages.squeeze(-2).split([rows * columns for rows, columns in parts], -1)
    views = [part.unflatten(-1, shape) for part, shape in zip(split, parts, strict=True)]
    rich = views.pop(0) if allocation_of(spec).ranked else None
    return rich, [Rank(*views[i : i + 3]) for i in range(0, len(views), 3)]


def rich_bytes(pages: Tensor, page_size: int) -> Tensor:
    """Who is rich in the pages ``[..., N, 1, bytes]`` of keys: ``[..., N, P / 8, 1]``."""
    return pages.squeeze(-2)[..., : byte_rows(page_size, 1)].unsqueeze(-1)


def slots(rich: Tensor) -> Tensor:
    """Where pages ``[..., N, P / 8, 1]`` keep each of their tokens: ``[..., N, P]`` int64."""
    is_rich = unpack(rich, 1).squeeze(-1)
    token = torch.arange(is_rich.shape[-1], device=rich.device)
    before = (is_rich.float() @ (token[:, None] < token).float()).long()  # how many rich ones come before
    poor = (token - before + len(token) // RICH).clamp(max=len(token) - 1)  # pages that are not written have no rich
    return torch.where(is_rich > 0, before, poor)


def allocate(cost: Tensor, pairs: int, singles: int) -> Tensor:
    """Where fields go: ``[..., pairs + singles]`` int64, ``shift * D + coordinate`` for each, pairs first.

    cost: ``[..., D]``, that of an error in each coordinate as large as it is itself.

    Given who has an odd width, pairs go where they save most, which is exact: what a further pair saves gets less and
    less. Odd are those that gain most by it at a price of pairs, and of some prices the best is taken.
    """
    size, saved = cost.shape[-1], torch.tensor(DISTORTION, dtype=cost.dtype, device=cost.device)
    levels = torch.arange(PAIRS, device=cost.device)

    def saves(odd: Tensor) -> Tensor:
        """What a pair more saves, by how many there are: ``[..., PAIRS, D]``."""
        width = odd.unsqueeze(-2) + 2 * levels.unsqueeze(-1)
        return cost.unsqueeze(-2) * (saved[width] - saved[width + 2])

    none = torch.zeros_like(cost, dtype=torch.long)
    price = saves(none).flatten(-2).topk(pairs, -1).values[..., -1:]
    prices = price * torch.exp2(
        torch.linspace(-3, 3, 25, dtype=cost.dtype, device=cost.device).view(-1, *none.dim() * [1])
    )
    total = cost.unsqueeze(-1) * saved + prices.unsqueeze(-1) * (torch.arange(len(DISTORTION), device=cost.device) // 2)
    prefers = total[..., 0:-1:2].amin(-1) - total[..., 1::2].amin(-1)
    odd = torch.zeros_like(prefers, dtype=torch.long).scatter(-1, prefers.topk(singles, -1).indices, 1)
    left = (cost * saved[odd]).sum(-1) - saves(odd).flatten(-2).topk(pairs, -1).values.sum(-1)
    best = left.argmin(0, keepdim=True).unsqueeze(-1)
    odd = odd.gather(0, best.expand(1, *odd.shape[1:])).squeeze(0)
    chosen = saves(odd).flatten(-2).topk(pairs, -1).indices.sort(-1).values  # level * D + coordinate
    several = none.scatter_add(-1, chosen % size, torch.ones_like(chosen))
    rows = torch.argsort(odd, dim=-1, descending=True, stable=True)[..., :singles]
    return torch.cat([2 * (chosen // size) * size + chosen % size, 2 * several.gather(-1, rows) * size + rows], -1)


def blocks(x: Tensor, size: int) -> Tensor:
    """``[B, H, T, D]`` -> ``[B, H, D / size, T, size]`` float64."""
    found: Tensor = x.double().unflatten(-1, (-1, size)).transpose(2, 3)
    return found


def second_moment(x: Tensor, size: int, valid: Tensor | None = None) -> Tensor:
    """Sums of products of the channels of a block over tokens ``[B, H, T, D]``: ``[B, H, D / size, size, size]``.

    valid: ``[B, T]`` bool; tokens that are padding are left out.
    """
    if valid is not None:
        x = x * valid[:, None, :, None]
    of_blocks = blocks(x, size)
    moment: Tensor = of_blocks.mT @ of_blocks
    return moment


def fit_basis(
    x: Tensor, metric: Tensor | None, allocation: Allocation, valid: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The basis that tokens ``[B, H, T, D]`` are coded in, ``[B, H, D, b]`` float64, and the places of its fields,
    ``[B, H, 1, F]`` (`allocate`).

    Row i of the basis is what a step in coordinate i adds to the channels of its block of b.

    metric: ``[B, H, D / b, b, b]``, up to a factor: what errors cost; None or 0 if those of all channels cost the same.
    """
    basis, cost = fit_axes(x, metric, allocation.block_size, valid)
    places = [_placed(cost, *counts) for counts in allocation.counts(x.shape[-1])]
    return basis, torch.cat(places, -1).unsqueeze(2)


def fit_axes(x: Tensor, metric: Tensor | None, size: int, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The basis alone, in blocks of ``size`` channels, and what an error in each of its coordinates costs that is as
    large as the coordinate: ``[B, H, D]`` float64."""
    covariance = second_moment(x, size, valid)
    diagonal = covariance.diagonal(dim1=-2, dim2=-1)
    least = 1e-6 * diagonal.mean((-1, -2), keepdim=True)
    tokens = torch.full((len(x),), x.shape[2], device=x.device) if valid is None else valid.sum(-1).clamp_min(1)
    count = tokens[:, None, None, None, None]
    covariance = (covariance + torch.diag_embed((_SHRINKAGE + size / count.squeeze(-1)) * diagonal + least)) / count
    identity = torch.eye(size, dtype=covariance.dtype, device=x.device)
    covariance = covariance + _LEAST_VARIANCE * identity
    metric = identity.expand_as(covariance) if metric is None else metric.double()
    mean = metric.diagonal(dim1=-2, dim2=-1).mean((-1, -2), keepdim=True).unsqueeze(-1)
    metric = torch.where(mean > 0, metric / mean, identity) + _FLOOR * identity
    energy, directions = torch.linalg.eigh(metric)
    root = energy.clamp_min(_FLOOR / 2).sqrt().unsqueeze(-2)
    half, inverse = (directions * root) @ directions.mT, (directions / root) @ directions.mT
    cost, vectors = torch.linalg.eigh(half @ covariance @ half)
    basis = cost.sqrt().unsqueeze(-1) * (vectors.mT @ inverse)
    return basis.flatten(2, 3), cost.flatten(2)


def _placed(cost: Tensor, pairs: int, singles: int) -> Tensor:
    """The places of the fields of one rank, ``[..., F]`` int64: ``(width * 8 + shift) * D + coordinate``."""
    size, found = cost.shape[-1], allocate(cost, pairs, singles)
    bits = torch.tensor(FIELD_BITS, device=cost.device).repeat_interleave(torch.tensor([pairs, singles]))
    widths = torch.zeros_like(cost, dtype=torch.long).scatter_add(-1, found % size, bits.expand(found.shape))
    return widths.gather(-1, found % size) * SHIFTS * size + found


def widths_of(places: Tensor, head_dim: int) -> Tensor:
    """The width of each coordinate, ``[..., D]`` int64, from the places of the fields of one rank ``[..., F]``."""
    places = places.long()
    none = places.new_zeros((*places.shape[:-1], head_dim))
    return none.scatter(-1, places % head_dim, places // head_dim // SHIFTS)


def weights(device: torch.device) -> Tensor:
    """What 1 in a field is worth, in units of its coordinate: by its place over ``D``, float32."""
    kinds = torch.arange(len(DISTORTION) * SHIFTS, device=device)
    steps = torch.tensor([0.0, *STEPS], device=device)[kinds // SHIFTS]
    return steps * torch.exp2((kinds % SHIFTS).float())


def encode(x: Tensor, spec: CodecSpec, fitted: Sequence[Tensor], stored: None = None) -> tuple[Tensor]:
    """Whole pages ``[B, H, N * P, D]`` as bytes, ``[B, H, N, 1, .]`` uint8: see `opened`.

    fitted: the basis and the places of its fields, see `fit_basis`; where tokens have ranks, besides the queries ``[B,
    H, Q, D]`` that choose (`some_queries`), or for values that follow what their keys chose, `rich_bytes`.
    """
    allocation, (basis, places, *chosen) = allocation_of(spec), fitted
    inverse = torch.linalg.inv(basis.double().unflatten(-2, (-1, allocation.block_size)))
    units = (blocks(x, allocation.block_size) @ inverse).transpose(2, 3).flatten(-2).float()
    units, kept = units.unflatten(2, (-1, spec.page_size)), []
    if allocation.ranked:
        rich = chosen[0] if allocation.follows else choose(x, spec, chosen[0])
        kept.append(rich)
        units = units.gather(3, slots(rich).argsort(-1).unsqueeze(-1).expand_as(units))
    head_dim, by_rank = x.shape[-1], units.split(allocation.tokens(spec.page_size), 3)
    for of_rank, own, counts in zip(
        by_rank, places.split(allocation.fields(head_dim), -1), allocation.counts(head_dim), strict=True
    ):
        kept += _encode_rank(of_rank, own, counts)
    return (torch.cat([part.flatten(-2) for part in kept], -1).unsqueeze(-2),)


def _encode_rank(units: Tensor, places: Tensor, counts: tuple[int, int]) -> Rank:
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


def best_gain(units: Tensor, steps: Tensor, most: Tensor, widths: Tensor) -> tuple[Tensor, Tensor]:
    """Gains, as the levels that are kept ``[..., 1]``, and codes ``[..., D]`` of tokens ``[..., D]``.

    Coordinates share bits so that the errors of all that have any cost about as much. So an error is worth as much as
    those that its width usually makes, and of a few gains about the size of a token the one of least error is taken.
    """
    used = widths > 0
    worth = used / torch.tensor(DISTORTION, device=units.device)[widths]
    size = ((units * used).square().sum(-1, keepdim=True) / used.sum(-1, keepdim=True).clamp_min(1)).sqrt()
    if units.device.type == "cpu":
        check_finite(size)
    first = (size.clamp_min(_LEAST_GAIN).log2() * _OCTAVE).round()
    least, levels, codes = torch.full_like(size, torch.inf), torch.zeros_like(first), torch.zeros_like(units)
    for more in _TRIED:
        tried = (first + more).clamp(-UNIT, 255 - UNIT)
        step = steps * torch.exp2(tried / _OCTAVE)
        found = (units / step + most / 2).round().clamp(min=0).minimum(most)
        error = (((found - most / 2) * step - units).square() * worth).sum(-1, keepdim=True)
        better = error < least
        least, levels, codes = error.minimum(least), tried.where(better, levels), found.where(better, codes)
    return levels, codes


def some_queries(q: Tensor, valid: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`QUERIES` of those of a KV head, ``[B, H, N, D]``, that are no padding, as far apart as can be, and scaled as
    attention does: ``[B, H, Q, D]``.

    valid: ``[B, N]`` bool.
    """
    if valid is None:
        valid = torch.ones(len(q), q.shape[2], dtype=torch.bool, device=q.device)
    those = torch.argsort(~valid, dim=-1, stable=True)
    apart = (torch.arange(QUERIES, device=q.device) + 0.5) / QUERIES
    index = those.gather(-1, (valid.sum(-1, keepdim=True) * apart).long())
    chosen = q.gather(2, index[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3]))
    return (chosen.float() / math.sqrt(q.shape[3])).to(dtype)


def choose(x: Tensor, spec: CodecSpec, queries: Tensor) -> Tensor:
    """Who is rich of keys ``[B, H, N * P, D]``: those to which ``queries`` pay most attention among their page.
    ``[B, H, N, P / 8, 1]`` uint8.

    An error in a key is seen by the square of its weight.
    """
    paid = (x.float() @ queries.float().mT).unflatten(2, (-1, spec.page_size)).softmax(3).square().sum(-1)
    most = paid.topk(spec.page_size // RICH, -1).indices
    rich = torch.zeros_like(paid, dtype=torch.uint8).scatter(-1, most, 1)
    return pack(rich.unsqueeze(-1), 1)


def gains(stored: Tensor) -> Tensor:
    """Gains, float32, from how they are stored."""
    return torch.exp2((stored.float() - UNIT) / _OCTAVE)


def field_rows(basis: Tensor, places: Tensor) -> Tensor:
    """What 1 in each field adds to the channels of a token of gain 1: ``[B, H, F, D]`` float32."""
    size, head_dim = basis.shape[-1], basis.shape[-2]
    coordinate, kind = places.mT.long() % head_dim, places.mT.long() // head_dim
    rows = basis.float().gather(-2, coordinate.expand(-1, -1, -1, size)) * weights(basis.device)[kind]
    mine = torch.arange(head_dim // size, device=basis.device) == coordinate // size
    return torch.where(mine.unsqueeze(-1), rows.unsqueeze(-2), 0.0).flatten(-2)


def middle(bits: int) -> float:
    """The middle of the codes of a field, which stands for 0."""
    return (2.0**bits - 1) / 2


def decode(pages: Tensor, basis: Tensor, places: Tensor, spec: CodecSpec) -> Tensor:
    """Inverse of `encode` up to rounding: ``[B, H, N * P, D]`` float32."""
    rich, ranks = opened(pages, spec, basis.shape[-2])
    rows = field_rows(basis, places).unsqueeze(2).split(allocation_of(spec).fields(basis.shape[-2]), -2)
    values = torch.cat([_decode_rank(*each) for each in zip(ranks, rows, strict=True)], 3)
    if rich is not None:
        values = values.gather(3, slots(rich).unsqueeze(-1).expand_as(values))
    return values.flatten(2, 3)


def _decode_rank(rank: Rank, rows: Tensor) -> Tensor:
    kinds = zip(rank, FIELD_BITS, strict=False)
    fields = torch.cat([unpack(packed, bits) - middle(bits) for packed, bits in kinds], -1)
    return fields * gains(rank.gains) @ rows


def _check(spec: CodecSpec) -> None:
    check_page_size(spec, allocation_of(spec).ranked)


def check_page_size(spec: CodecSpec, ranked: bool) -> None:
    """Raise `KVPassError` unless fields of a page of ``spec`` fill whole bytes, those of its rich tokens, too."""
    multiple = smallest_page(min(FIELD_BITS)) * (RICH if ranked else 1)
    if spec.page_size % multiple:
        raise KVPassError(
            f"page_size={spec.page_size} does not fill whole bytes: use a residual that is a multiple of {multiple}."
        )


CODECS["allocated"] = Codec({"codes": Kept(_page, torch.uint8)}, encode, decode, ("basis", "fields"), _check)

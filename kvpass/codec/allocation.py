"""Bits where errors cost most: tokens in a basis fitted to them, each of whose channels has a width of its own.

Transform coding, as for pictures and sound: blocks of neighbouring channels are decorrelated (the KLT of their
covariance under the metric of their errors), and coordinates share the bits by what an error in each costs, as reverse
water-filling would (Cover & Thomas, Elements of Information Theory, 10.3). A token has a gain, the size of its
coordinates, in 8 bits.

Codes are uniform, and kept in *fields*: pairs of bits, and single ones for widths that are odd. All heads have as many
fields of each kind, so that pages are of one shape; which coordinate a field belongs to, and how much it weighs there,
is the head's own. Scales, widths and basis are linear in a field, so that a query takes them once and a cached value is
read as two bits and nothing else.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..errors import KVPassError
from .affine import check_finite
from .bitpack import byte_rows, pack, smallest_page, unpack
from .kept import CODECS, Codec, Kept
from .quantizer import PAIRS, Allocation
from .spec import CodecSpec

FIELD_BITS = 2, 1
STEPS = 1.5958, 0.9957, 0.5860, 0.3352, 0.1881, 0.1041, 0.0569, 0.0308
"""Steps of uniform codes of 1 to 8 bits, of least squared error for a normal variable (Max 1960, table 2)."""
DISTORTION = 1.0, 0.3634, 0.1188, 0.03744, 0.01154, 0.003495, 0.001041, 0.0003035, 0.0000869
"""Their squared error, of 0 to 8 bits."""
_SHRINKAGE = 0.05  # of the covariance towards its diagonal, besides that of a block of tokens
_FLOOR = 0.02  # of the mean cost of a channel: none costs less, as later queries may look where the prompt's do not
_OCTAVE, _UNIT = 16, 128  # gains in a factor of 2, and the code of gain 1
_LEAST_GAIN, _LEAST_VARIANCE = 1e-9, 2.0**-16  # a basis is kept in 16 bits


def allocation_of(spec: CodecSpec) -> Allocation:
    """The `Allocation` of ``spec``. Raises `KVPassError` if it has none."""
    if spec.quantizer.allocation is None:
        raise KVPassError("Widths by channel need an Allocation: Quantizer(..., allocation=Allocation(...)).")
    return spec.quantizer.allocation


def _rows(kind: int) -> Callable[[CodecSpec, int], tuple[int, int]]:
    def shape(spec: CodecSpec, head_dim: int) -> tuple[int, int]:
        return byte_rows(spec.page_size, FIELD_BITS[kind]), allocation_of(spec).counts(head_dim)[kind]

    return shape


def _gain(spec: CodecSpec, head_dim: int) -> tuple[int, int]:
    return spec.page_size, 1


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

    metric: ``[B, H, D / b, b, b]``, up to a factor: what errors cost; None if those of all channels cost the same.
    """
    size = allocation.block_size
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
    places = allocate(cost.flatten(2), *allocation.counts(x.shape[-1])).unsqueeze(2)
    widths = widths_of(places, allocation, x.shape[-1])
    step = torch.tensor([1.0, *STEPS], dtype=cost.dtype, device=x.device)[widths].view_as(cost)
    basis = (cost.sqrt() * step).unsqueeze(-1) * (vectors.mT @ inverse)
    return basis.flatten(2, 3), places


def widths_of(places: Tensor, allocation: Allocation, head_dim: int) -> Tensor:
    """The width of each coordinate, ``[..., D]`` int64, from the places of fields ``[..., F]``."""
    kinds = torch.tensor([FIELD_BITS, allocation.counts(head_dim)], device=places.device)
    bits = kinds[0].repeat_interleave(kinds[1])
    none = places.new_zeros((*places.shape[:-1], head_dim), dtype=torch.long)
    return none.scatter_add(-1, places.long() % head_dim, bits.expand(places.shape))


def encode(x: Tensor, spec: CodecSpec, fitted: Sequence[Tensor], stored: None = None) -> tuple[Tensor, Tensor, Tensor]:
    """What is kept of whole pages ``[B, H, N * P, D]``: pairs of bits ``[B, H, N, P / 4, .]``, single ones
    ``[B, H, N, P / 8, .]`` and gains ``[B, H, N, P, 1]``, uint8.

    fitted: the basis and the places of its fields, see `fit_basis`.
    """
    (basis, places), size = fitted, allocation_of(spec).block_size
    head_dim = x.shape[-1]
    widths = widths_of(places, allocation_of(spec), head_dim)
    inverse = torch.linalg.inv(basis.double().unflatten(-2, (-1, size)))
    steps = (blocks(x, size) @ inverse).transpose(2, 3).flatten(-2).float()
    units = steps * torch.tensor([0.0, *STEPS], device=x.device)[widths]
    gain = (units.square().sum(-1, keepdim=True) / (widths > 0).sum(-1, keepdim=True)).sqrt()
    if x.device.type == "cpu":
        check_finite(gain)
    levels = (gain.clamp_min(_LEAST_GAIN).log2() * _OCTAVE).round().clamp(-_UNIT, 255 - _UNIT)
    most = 2.0**widths - 1
    codes = (steps / torch.exp2(levels / _OCTAVE) + most / 2).round().clamp(min=0).minimum(most).to(torch.uint8)
    index = (places.long() % head_dim).expand(*codes.shape[:-1], -1)
    fields = (codes.gather(-1, index) >> (places // head_dim).to(torch.uint8)).unflatten(2, (-1, spec.page_size))
    kinds = fields.split(allocation_of(spec).counts(head_dim), -1)
    pairs, singles = (pack(part & (2**bits - 1), bits) for part, bits in zip(kinds, FIELD_BITS, strict=True))
    return pairs, singles, (levels + _UNIT).to(torch.uint8).unflatten(2, (-1, spec.page_size))


def gains(stored: Tensor) -> Tensor:
    """Gains, float32, from how they are stored."""
    return torch.exp2((stored.float() - _UNIT) / _OCTAVE)


def field_rows(basis: Tensor, places: Tensor) -> Tensor:
    """What 1 in each field adds to the channels of a token of gain 1: ``[B, H, F, D]`` float32."""
    size, head_dim = basis.shape[-1], basis.shape[-2]
    coordinate, shift = places.mT.long() % head_dim, places.mT.long() // head_dim
    rows = basis.float().gather(-2, coordinate.expand(-1, -1, -1, size)) * torch.exp2(shift.float())
    mine = torch.arange(head_dim // size, device=basis.device) == coordinate // size
    return torch.where(mine.unsqueeze(-1), rows.unsqueeze(-2), 0.0).flatten(-2)


def middle(bits: int) -> float:
    """The middle of the codes of a field, which stands for 0."""
    return (2.0**bits - 1) / 2


def decode(pairs: Tensor, singles: Tensor, gain: Tensor, basis: Tensor, places: Tensor, spec: CodecSpec) -> Tensor:
    """Inverse of `encode` up to rounding: ``[B, H, N * P, D]`` float32."""
    kinds = zip((pairs, singles), FIELD_BITS, strict=True)
    fields = torch.cat([unpack(packed, bits) - middle(bits) for packed, bits in kinds], -1) * gains(gain)
    return fields.flatten(2, 3) @ field_rows(basis, places)


def _check(spec: CodecSpec) -> None:
    multiple = smallest_page(min(FIELD_BITS))
    if spec.page_size % multiple:
        raise KVPassError(
            f"page_size={spec.page_size} does not fill whole bytes of fields: use a residual that is a multiple of "
            f"{multiple}."
        )


CODECS["allocated"] = Codec(
    {"codes": Kept(_rows(0), torch.uint8), "singles": Kept(_rows(1), torch.uint8), "gain": Kept(_gain, torch.uint8)},
    encode,
    decode,
    ("basis", "fields"),
    _check,
)

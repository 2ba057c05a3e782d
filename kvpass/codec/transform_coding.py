"""Transform coding: a basis in which coordinates are decorrelated, and bits shared among them by what errors cost.

Blocks of neighbouring channels are decorrelated (the KLT of their covariance under the metric of their errors), and
coordinates share the bits by what an error in each costs, as reverse water-filling would (Cover & Thomas, Elements of
Information Theory, 10.3). Quantized coordinates are uniform and stored as *fields*: pairs of bits, and single bits for
odd bit widths.
"""

import torch
from torch import Tensor

from .affine import check_finite

PAIRS = 3
"""Pairs of bits of the widest coordinates, which have 6 or 7 bits."""
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


def metric_of(q: Tensor, valid: Tensor | None, size: int) -> Tensor:
    """What errors cost under queries ``[B, H, N, D]``, by blocks of ``size`` channels: their second moment
    ``[B, H, D, size]`` in units of its mean, as if ``size`` more of them had looked everywhere; 0 without queries.

    valid: ``[B, N]`` bool; queries of padding are left out.
    """
    seen = second_moment(q, size, valid)
    queries = q.shape[2] if valid is None else valid.sum(-1).clamp_min(1)[:, None, None, None, None]
    each = seen.diagonal(dim1=-2, dim2=-1).mean((-1, -2), keepdim=True).unsqueeze(-1) / queries
    moment = seen + size * each * torch.eye(size, dtype=seen.dtype, device=q.device)
    mean = moment.diagonal(dim1=-2, dim2=-1).mean((-1, -2))[..., None, None, None]
    return torch.where(mean > 0, moment / mean, 0.0).flatten(2, 3)


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


def gains(stored: Tensor) -> Tensor:
    """Gains, float32, from how they are stored."""
    return torch.exp2((stored.float() - UNIT) / _OCTAVE)


def middle(bits: int) -> float:
    """The middle of the codes of a field, which stands for 0."""
    return (2.0**bits - 1) / 2

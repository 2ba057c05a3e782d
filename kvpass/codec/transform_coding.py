"""Transform coding: fits a decorrelating basis, and divides bits among its coordinates by the cost of their errors.

Blocks of neighbouring channels are decorrelated (the KLT of their covariance under the metric of their errors). Bits
are divided among coordinates by the cost of an error in each, which approximates reverse water-filling (Cover & Thomas,
Elements of Information Theory, 10.3). Quantized coordinates are uniform and stored as *fields*: pairs of bits, and
single bits for odd bit widths.
"""

from functools import cache

import torch
from torch import Tensor

from .affine import check_finite

PAIRS = 3
"""Largest number of bit pairs of a coordinate, whose bit width is then 6 or 7."""
WIDEST = 2 * PAIRS + 1
"""Largest bit width of a coordinate."""
FIELD_BITS = 2, 1
STEPS = 1.5958, 0.9957, 0.5860, 0.3352, 0.1881, 0.1041, 0.0569, 0.0308
"""Step sizes of uniform quantizers with 1 to 8 bits that minimize the squared error of a standard normal variable (Max
1960, table 2)."""
DISTORTION = 1.0, 0.3634, 0.1188, 0.03744, 0.01154, 0.003495, 0.001041, 0.0003035, 0.0000869
"""Squared error of these quantizers, for 0 to 8 bits."""
_SHRINKAGE = 0.05  # shrinks the covariance towards its diagonal; a term for the number of tokens is added
_FLOOR = 0.02  # minimum cost of a channel relative to the mean: later queries may differ from the prompt's
OCTAVE, UNIT = 16, 128  # gain levels per factor of 2, and the level of gain 1
GAINS_TRIED = 0, -6, -3, 3, 6  # gain levels to try, relative to the size of a token's coordinates
LEAST_GAIN, _LEAST_VARIANCE = 1e-9, 2.0**-16  # a basis is stored in 16 bits
_TOKENS = 1024  # to sum the second moment of at a time
SHIFTS = 8  # number of possible shifts of a field in its code


@cache
def steps_of(device: torch.device) -> Tensor:
    """The step size of each bit width from 0 on, float32; 1 for none. Kept, because copying from the host waits for the
    device."""
    with torch.inference_mode(False):
        return torch.tensor([1.0, *STEPS], device=device)


@cache
def _distortions(device: torch.device) -> Tensor:
    """`DISTORTION` on ``device``, float32."""
    with torch.inference_mode(False):
        return torch.tensor(DISTORTION, device=device)


def divided(cost: Tensor, pairs: Tensor, singles: Tensor) -> Tensor:
    """Bit widths ``[..., D]`` int64 that divide ``pairs`` bit pairs and ``singles`` single bits, each ``[...]`` int64,
    among coordinates.

    cost: ``[..., D]``, the cost of an error in each coordinate that is as large as the coordinate itself.

    For a given set of odd bit widths, each pair goes to the coordinate where it saves most. This is optimal, because
    each further pair of a coordinate saves less. The odd bit widths go to the coordinates that gain most from a single
    bit at a given price per pair. Several prices are tried, and the one with the least total error is used.
    """
    size, distortion = cost.shape[-1], torch.tensor(DISTORTION, dtype=cost.dtype, device=cost.device)
    pairs, singles = (count.expand(cost.shape[:-1]).unsqueeze(-1) for count in (pairs, singles))
    levels = torch.arange(PAIRS, device=cost.device)

    def saves(odd: Tensor) -> Tensor:
        """Error saved by one more pair, for each number of pairs that a coordinate has: ``[..., PAIRS * D]``."""
        width = odd.unsqueeze(-2) + 2 * levels.unsqueeze(-1)
        return (cost.unsqueeze(-2) * (distortion[width] - distortion[width + 2])).flatten(-2)

    of_even = _largest(saves(torch.zeros_like(cost, dtype=torch.long)), pairs)
    steps = torch.linspace(-3, 3, 25, dtype=cost.dtype, device=cost.device).view(-1, *cost.dim() * [1])
    prices = of_even.gather(-1, (pairs - 1).clamp_min(0)) * torch.exp2(steps)
    of_pairs = torch.arange(len(DISTORTION), device=cost.device) // 2
    total = cost.unsqueeze(-1) * distortion + prices.unsqueeze(-1) * of_pairs
    odd = (_places(total[..., 0:-1:2].amin(-1) - total[..., 1::2].amin(-1)) < singles).long()
    saved = _largest(saves(odd), pairs).cumsum(-1)
    saved = torch.where(pairs > 0, saved.gather(-1, (pairs - 1).clamp_min(0).expand(*odd.shape[:-1], 1)), 0)
    best = ((cost * distortion[odd]).sum(-1, keepdim=True) - saved).argmin(0, keepdim=True)
    odd = odd.gather(0, best.expand(1, *odd.shape[1:])).squeeze(0)
    found: Tensor = odd + 2 * (_places(saves(odd)) < pairs).unflatten(-1, (PAIRS, size)).sum(-2)
    return found


def _largest(x: Tensor, counts: Tensor) -> Tensor:
    """At least as many of the largest entries of each row of ``x`` ``[..., N]`` as any of ``counts``, in descending
    order."""
    if x.device.type != "cpu":  # other devices would have to wait for the counts
        return x.sort(-1, descending=True).values
    return x.topk(max(1, int(counts.max())), -1).values


def _places(x: Tensor) -> Tensor:
    """The place of each entry of ``x`` ``[..., N]`` in its row, in descending order from 0 on."""
    return torch.argsort(x, dim=-1, descending=True, stable=True).argsort(-1)


def allocate(cost: Tensor, pairs: int, singles: int) -> Tensor:
    """Assign fields to coordinates: ``[..., pairs + singles]`` int64, each ``shift * D + coordinate``, pairs first.

    cost: ``[..., D]``, as for `divided`.
    """
    size, counts = cost.shape[-1], (torch.tensor(count, device=cost.device) for count in (pairs, singles))
    widths = divided(cost, *counts)
    chosen, rows = fields_first(widths, single=False)[..., :pairs], fields_first(widths, single=True)[..., :singles]
    high = widths.gather(-1, rows) // 2
    return torch.cat([2 * (chosen // size) * size + chosen % size, 2 * high * size + rows], -1)


def fields_first(widths: Tensor, single: bool) -> Tensor:
    """Indices of all places for fields of one kind, those with a field first and in order.

    They are ``level * D + coordinate`` for bit pairs, ``[..., PAIRS * D]`` int64, and the coordinate for single bits,
    ``[..., D]``. widths: ``[..., D]`` int64.
    """
    there = widths % 2 > 0
    if not single:
        there = (widths.unsqueeze(-2) // 2 > torch.arange(PAIRS, device=widths.device).unsqueeze(-1)).flatten(-2)
    return torch.argsort(there, dim=-1, descending=True, stable=True)


def field_widths(pairs: int, singles: int, device: torch.device) -> Tensor:
    """The width of each of the fields that `allocate` assigns, in bits: ``[pairs + singles]`` int64."""
    return torch.tensor([FIELD_BITS[0]] * pairs + [FIELD_BITS[1]] * singles, device=device)


def coordinates(x: Tensor, basis: Tensor) -> Tensor:
    """The coordinates of tokens ``[B, H, T, D]`` in a basis ``[B or 1, H, D, b]``: ``[B, H, T, D]`` float32."""
    found = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    size = basis.shape[-1]
    for part, of_block, matrix in zip(
        x.split(size, -1), found.split(size, -1), inverse_of(basis).unbind(2), strict=True
    ):
        of_block.copy_(part.double() @ matrix)
    return found


def inverse_of(basis: Tensor) -> Tensor:
    """The inverses of the blocks of a basis ``[B, H, D, b]``: ``[B, H, D / b, b, b]`` float64."""
    found: Tensor = torch.linalg.inv_ex(basis.double().unflatten(-2, (-1, basis.shape[-1])))[0]
    return found  # unlike `inv`, this waits for no device


def times_blocks(x: Tensor, matrices: Tensor) -> Tensor:
    """Tokens ``[B, H, T, D]`` times block-diagonal matrices ``[B or 1, H, D / b, b, b]``."""
    parts = zip(x.split(matrices.shape[-1], -1), matrices.unbind(2), strict=True)
    return torch.cat([part @ matrix for part, matrix in parts], -1)


def second_moment(x: Tensor, size: int, valid: Tensor | None = None) -> Tensor:
    """Second moment of the channels of each block, summed over tokens ``x`` ``[B, H, T, D]``:
    ``[B, H, D / size, size, size]`` float64. Products are summed in float32 over some tokens at a time.

    valid: ``[B, T]`` bool, False for padding, which is ignored.
    """
    if valid is not None:
        x = x * valid[:, None, :, None]
    moment = torch.zeros((), dtype=torch.float64, device=x.device)
    for some in x.split(_TOKENS, 2):
        moment = moment + torch.stack([(part.mT @ part).double() for part in some.float().split(size, -1)], 2)
    return moment


def metric_of(q: Tensor, valid: Tensor | None, size: int) -> Tensor:
    """The cost of key errors under queries ``[B, H, N, D]``, per block of ``size`` channels: ``[B, H, D, size]``.

    It is the second moment of the queries plus that of ``size`` isotropic queries of average energy, divided by its
    mean diagonal. It is 0 without queries.

    valid: ``[B, N]`` bool, False for padding, which is ignored.
    """
    seen = second_moment(q, size, valid)
    queries = q.shape[2] if valid is None else valid.sum(-1).clamp_min(1)[:, None, None, None, None]
    each = seen.diagonal(dim1=-2, dim2=-1).mean((-1, -2), keepdim=True).unsqueeze(-1) / queries
    moment = seen + size * each * torch.eye(size, dtype=seen.dtype, device=q.device)
    mean = moment.diagonal(dim1=-2, dim2=-1).mean((-1, -2))[..., None, None, None]
    return torch.where(mean > 0, moment / mean, 0.0).flatten(2, 3)


def fit_axes(x: Tensor, metric: Tensor | None, size: int, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Fit the basis ``[B, H, D, size]`` float64 in blocks of ``size`` channels, and its costs ``[B, H, D]`` float64.

    The cost of a coordinate is the cost of an error as large as the coordinate itself. For the arguments see
    `Allocation.fit_basis`.
    """
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
    """The bit width of each coordinate, ``[..., D]`` int64, from the places ``[..., F]`` of the fields of one rank."""
    places = places.long()
    none = places.new_zeros((*places.shape[:-1], head_dim))
    return none.scatter(-1, places % head_dim, places // head_dim // SHIFTS)


def weights(device: torch.device) -> Tensor:
    """The weight of a field in units of its coordinate, float32. The index is the field's place divided by ``D``."""
    kinds = torch.arange(len(DISTORTION) * SHIFTS, device=device)
    steps = steps_of(device)[kinds // SHIFTS] * (kinds >= SHIFTS)
    return steps * torch.exp2((kinds % SHIFTS).float())


def best_gain(units: Tensor, steps: Tensor, most: Tensor, widths: Tensor) -> tuple[Tensor, Tensor]:
    """Gain levels ``[..., 1]`` and quantized coordinates ``[..., D]`` of tokens ``[..., D]``.

    Several gains close to the size of the token are tried, and the one with the least weighted error is used. Bits are
    allocated so that all coordinates with bits contribute about the same cost. So the squared error of a coordinate is
    divided by the error that its bit width usually makes.

    steps, most, widths: step size, largest code and bit width of each coordinate.
    """
    used = widths > 0
    worth = used / _distortions(units.device)[widths]
    size = ((units * used).square().sum(-1, keepdim=True) / used.sum(-1, keepdim=True).clamp_min(1)).sqrt()
    if units.device.type == "cpu":
        check_finite(size)
    first = (size.clamp_min(LEAST_GAIN).log2() * OCTAVE).round()
    least, levels, codes = torch.full_like(size, torch.inf), torch.zeros_like(first), torch.zeros_like(units)
    for more in GAINS_TRIED:
        tried = (first + more).clamp(-UNIT, 255 - UNIT)
        step = steps * torch.exp2(tried / OCTAVE)
        found = (units / step + most / 2).round().clamp(min=0).minimum(most)
        error = (((found - most / 2) * step - units).square() * worth).sum(-1, keepdim=True)
        better = error < least
        least, levels, codes = error.minimum(least), tried.where(better, levels), found.where(better, codes)
    return levels, codes


def gains(stored: Tensor) -> Tensor:
    """Gains, float32, from their stored levels."""
    return torch.exp2((stored.float() - UNIT) / OCTAVE)


def middle(bits: int) -> float:
    """The midpoint of a field of ``bits`` bits, which represents 0."""
    return (2.0**bits - 1) / 2

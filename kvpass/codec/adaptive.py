"""Quantizes with per-token bit widths (QAQ, arXiv 2403.04643): a token gets the bits its allowed error requires.

Outliers stay exact. A *class* is one of the available bit widths. Quantization is mid-rise: codes are
``floor((x - zero_point) / step)`` with the step of the widest class, and dequantize to the middle of their cell. The
code of a narrower class is the high bits of that code. So codes are stored as bit planes: the first plane has all
tokens, each further plane only the tokens of a class that has these bits. Reducing the bit width of a token drops rows
of a plane; increasing it needs the original token.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .affine import dequantize, round_toward
from .bitpack import pack, unpack
from .quantizer import Adaptive

_LEVEL_BITS = 2, 4, 8


def level_bits(classes: int, page_size: int) -> int:
    """Bits that store the class of a token: enough for all, and such that a page fills whole bytes."""
    return next(bits for bits in _LEVEL_BITS if classes <= 2**bits and page_size * bits % 8 == 0)


def pack_rows(codes: Tensor, bits: int) -> Tensor:
    """Pack each token separately: codes ``[..., D]`` -> ``[..., D * bits / 8]`` bytes."""
    return pack(codes.unsqueeze(-1), bits).squeeze(-1) if bits else codes[..., :0]


def unpack_rows(rows: Tensor, bits: int) -> Tensor:
    """Inverse of `pack_rows`."""
    return unpack(rows.unsqueeze(-1), bits).squeeze(-1)


def pack_levels(levels: Tensor, page_size: int, classes: int) -> Tensor:
    """Pack classes ``[B, H, T]`` to ``[B, H, T / P, P * b / 8]`` bytes, with b of `level_bits`."""
    return pack_rows(levels.unflatten(-1, (-1, page_size)), level_bits(classes, page_size))


def unpack_levels(packed: Tensor, page_size: int, classes: int) -> Tensor:
    """Inverse of `pack_levels`."""
    return unpack_rows(packed, level_bits(classes, page_size)).flatten(-2)


@dataclass
class Tokens:
    """T quantized tokens of a K or V cache, each with the bit width of its class.

    planes: bytes ``[B, H, T or fewer, D * b / 8]``. The first plane has a row for each token. Each further plane has a
        row for each token whose class has its bits, in token order; rows after these are undefined. If the narrowest
        class has no bits, the rows of the first plane are empty.
    levels: ``[B, H, T]`` uint8, the class of each token: an index of its bit width.
    step, zero_point: ``[B, H, T, 1]``, 16-bit; the step is that of the widest class.
    outliers, where: ``[B, T, k]``, the exact values, and their indices among the ``H * D`` values of the token.
    """

    planes: list[Tensor]
    levels: Tensor
    step: Tensor
    zero_point: Tensor
    outliers: Tensor
    where: Tensor


def plane_bits(widths: Sequence[int]) -> list[int]:
    """Bits per value of each plane: (2, 3, 4) -> [2, 1, 1], (0, 2) -> [0, 2]."""
    return [width - below for below, width in zip((0, *widths), widths, strict=False)]


def where_dtype(values: int) -> torch.dtype:
    """The dtype for indices of a token's values."""
    return torch.uint8 if values <= 256 else torch.int16


def split_outliers(x: Tensor, share: float) -> tuple[Tensor, Tensor, Tensor]:
    """The smallest and the largest values of each token, over all heads: half of ``share`` each.

    x: ``[B, H, T, D]``. Returns the values ``[B, T, k]``, their indices ``[B, T, k]`` (`where_dtype`), and a bool mask
    of them with the shape of ``x``.
    """
    batch, heads, tokens, dim = x.shape
    flat = x.transpose(1, 2).flatten(2)
    count = round(share * heads * dim)
    order = flat.argsort(-1)
    where = torch.cat([order[..., : count // 2], order[..., heads * dim - (count - count // 2) :]], -1)
    is_outlier = torch.zeros_like(flat, dtype=torch.bool).scatter_(-1, where, True)
    is_outlier = is_outlier.view(batch, tokens, heads, dim).transpose(1, 2)
    return flat.gather(-1, where), where.to(where_dtype(heads * dim)), is_outlier


def fit_range(x: Tensor, is_outlier: Tensor, bits: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Fit a range of ``2**bits`` cells to each token and head of ``x`` ``[B, H, T, D]``, without outliers.

    Returns step and zero point, ``[B, H, T, 1]`` in ``dtype``, rounded outwards, so that every value is in a cell.
    """
    x, none = x.float(), is_outlier.all(-1, keepdim=True)
    low = x.masked_fill(is_outlier, torch.inf).amin(-1, keepdim=True).masked_fill(none, 0)
    high = x.masked_fill(is_outlier, -torch.inf).amax(-1, keepdim=True).masked_fill(none, 0)
    zero_point = round_toward(low, dtype, up=False)
    return round_toward((high - zero_point.float()) / 2**bits, dtype, up=True), zero_point


def assign_cells(x: Tensor, step: Tensor, zero_point: Tensor, bits: int) -> Tensor:
    """The cell index of each value, uint8."""
    cells = (x.float() - zero_point.float()) / torch.where(step > 0, step, 1).float()
    return cells.floor().clamp(0, 2**bits - 1).to(torch.uint8)


def to_planes(codes: Tensor, levels: Tensor, widths: Sequence[int]) -> list[Tensor]:
    """Split codes ``[B, H, T, D]`` of the widest class into the bit planes of `Tokens`."""
    planes, left = [], widths[-1]
    for level, bits in enumerate(plane_bits(widths)):
        left -= bits
        part = (codes >> left) & (2**bits - 1)
        if level:
            has = levels >= level
            rows = has.logical_not().sort(dim=-1, stable=True).indices[..., : int(has.sum(-1).amax())]
            part = part.gather(2, rows.unsqueeze(-1).expand(*rows.shape, part.shape[-1]))
        planes.append(pack_rows(part, bits))
    return planes


def from_planes(planes: Sequence[Tensor], levels: Tensor, widths: Sequence[int]) -> Tensor:
    """Codes ``[B, H, T, D]`` of the widest class; bits that a token does not have are 0."""
    left, codes = widths[-1], None
    for level, (plane, bits) in enumerate(zip(planes, plane_bits(widths), strict=True)):
        left -= bits
        if not level and not bits:
            head_dim = planes[1].shape[-1] * 8 // plane_bits(widths)[1]
            codes = plane.new_zeros(*levels.shape, head_dim)
        elif not level:
            codes = unpack_rows(plane, bits) << left
        elif plane.shape[2]:
            has = levels >= level
            row = (has.cumsum(-1) - 1).clamp(0, plane.shape[2] - 1).unsqueeze(-1)
            part = unpack_rows(plane.gather(2, row.expand(*levels.shape, plane.shape[-1])), bits) << left
            codes = codes | torch.where(has.unsqueeze(-1), part, 0)
    return codes


def dequantize_tokens(tokens: Tokens, widths: Sequence[int]) -> Tensor:
    """Dequantize ``tokens`` to ``[B, H, T, D]`` float32."""
    codes = from_planes(tokens.planes, tokens.levels, widths)
    cells = torch.tensor([2.0 ** (widths[-1] - width) for width in widths], device=codes.device)
    middle = cells[tokens.levels.long()].unsqueeze(-1) / 2
    values = dequantize(codes + middle, tokens.step, tokens.zero_point)
    batch, heads, count, dim = values.shape
    flat = values.transpose(1, 2).reshape(batch, count, heads * dim)
    flat = flat.scatter(-1, tokens.where.long() % (heads * dim), tokens.outliers.float())
    return flat.view(batch, count, heads, dim).transpose(1, 2)


def largest_mass(importance: Tensor, n: int, mass: Tensor) -> Tensor:
    """The largest attention weight of each token: the maximum of ``mass`` ``[B, H, T]``, measured in this call, and
    ``importance``, the maximum so far of the first n tokens."""
    return torch.cat([torch.maximum(importance[..., :n], mass[..., :n]), mass[..., n:]], -1)


def allowed_deviation(spec: Adaptive, seen: int, importance: Tensor, energy: Tensor | float | None) -> Tensor:
    """The allowed standard deviation of each token's error, ``[B, H, T]`` (section 4.1 of the paper).

    seen: number of tokens that are attended to.
    importance: ``[B, H, T]``, the expected attention mass.
    energy: for keys: squared norm of the scaled queries, a number or ``[B, H, 1]``.
    """
    if spec.role == "value":
        return spec.sigma / (math.sqrt(seen) * importance.clamp_min(1e-12))
    energy = torch.as_tensor(energy, device=importance.device).clamp_min(1e-12)
    variance = math.log1p(seen**3 / max(1, seen - 1) * spec.sigma**2) / energy
    return variance.sqrt().expand_as(importance)


def levels_for(step: Tensor, deviation: Tensor, widths: Sequence[int]) -> Tensor:
    """The narrowest class whose rounding error has at most the allowed standard ``deviation``: ``[B, H, T]`` uint8.

    The rounding error is uniform in a cell. If no class is precise enough, this is the widest class.
    """
    span = step.squeeze(-1).float() * 2 ** widths[-1]
    bits = (span / (2 * math.sqrt(3) * deviation)).clamp_min(1e-30).log2().ceil()
    levels = torch.zeros_like(bits, dtype=torch.uint8)
    return sum(((bits > width).to(torch.uint8) for width in widths[:-1]), levels)


def carve(pool: Tensor, places: Tensor, lead: Sequence[int]) -> list[Tensor]:
    """Views ``[B, H, rows, bytes]`` of the planes in ``pool``.

    places: ``[planes, 3]``, start offset, number of rows and bytes per row of each plane. lead: B and H.
    """
    found = []
    for start, rows, row_bytes in places.tolist():
        size = lead[0] * lead[1] * rows * row_bytes
        found.append(pool[start : start + size].view(*lead, rows, row_bytes))
    return found

"""Presents the pages of each codec to attention: as planes of values, and additional terms.

The content of a page is a sum of terms. The first term exists for all values: codes that a shift and a mask extract
from bytes, dequantized by scales and zero points, a codebook, or a lattice. Other terms (`inductor.terms`) exist for
few channels, for few values, or at low rank. They contribute to scores and to the output directly.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from kvpass.codec import lattice, salient
from kvpass.codec.bitpack import num_planes, unpack_plane, unpack_plane_unshifted
from kvpass.codec.codebook import grid, look_up
from kvpass.codec.error_term import ErrorTerm
from kvpass.codec.lattice_points import words
from kvpass.codec.quantizer import Quantizer
from kvpass.codec.second_level import expand
from kvpass.codec.spec import CodecSpec

from ..table import select
from .planes import Planes, weighted_sum
from .terms import AffineParams, Boost, LowRank, Term, affine_at, code_at, outliers


class Pages(NamedTuple):
    """Pages as attention reads them.

    kinds: planes of the tokens of a page, by kind of token.
    slots: ``[BH, N, P]``, the index of each token in the order of ``kinds``; None if the order is that of the tokens.
    terms: additional terms.
    """

    kinds: list[Planes]
    slots: Tensor | None = None
    terms: Sequence[Term] = ()


View = Callable[[Sequence[Tensor], CodecSpec, Tensor | None, int], Pages]
PAGE_VIEWS: dict[str, View] = {}
"""How attention reads pages, by the name of their codec."""
ATTENDED: tuple[set[str], set[str]] = set(), set()
"""Features of keys and of values that Inductor's attention supports. `views` adds codecs."""


def views(*codecs: str, of_values: bool = True) -> Callable[[View], View]:
    """Register the decorated function: it tells attention how to read the pages of the codecs with these names, of keys
    and, if ``of_values``, of values. A codec without a view is dequantized before attention.

    The function takes the arguments of `view_pages`.
    """

    def register(view: View) -> View:
        for name in codecs:
            PAGE_VIEWS[name] = view
            for features in ATTENDED[: 1 + of_values]:
                features.add(f"codec={name}")
        select.cache_clear()
        return view

    return register


def view_pages(kept: Sequence[Tensor], spec: CodecSpec, points: Tensor | None, head_dim: int) -> Pages:
    """The `Pages` of a codec's tensors.

    kept: the page tensors, each ``[BH, N, ...]``, followed by the sequence tensors that `Codec.dequantize` takes, each
        ``[BH, ...]``.
    points: see `points_of`.
    """
    return PAGE_VIEWS[spec.codec.name](kept, spec, points, head_dim)


def points_of(spec: CodecSpec, device: torch.device) -> Tensor | None:
    """The look-up table of E8 or a grid; None for other codecs."""
    if isinstance(spec.codec, lattice.E8):
        return words(device)
    return grid(spec.quantizer.grid, device) if spec.quantizer.grid else None


def plain(kept: Sequence[Tensor], quantizer: Quantizer, points: Tensor | None) -> Planes:
    """Planes of the default codec's codes, scale and zero point. points: the points of its grid."""
    codes, scale, zero_point = kept

    def values(plane: int) -> Tensor:
        if quantizer.grid:
            indices = unpack_plane(codes, quantizer.bits, plane)
            tokens = indices.shape[-2]
            of_groups = scale.narrow(-2, plane * tokens, tokens).float().unsqueeze(-1)
            return (look_up(indices, points).unflatten(-1, (-1, quantizer.group_size)) * of_groups).flatten(-2)
        numbers, unit = unpack_plane_unshifted(codes, quantizer.bits, plane)
        return scaled(numbers.float(), unit, AffineParams(scale, zero_point, quantizer), plane)

    return Planes(num_planes(quantizer.bits), values)


def scaled(numbers: Tensor, unit: float, params: AffineParams, plane: int) -> Tensor:
    """Dequantize a plane of ``numbers`` ``[..., N, T, D]``, in units of ``unit``."""
    (scale, zero_point, quantizer), tokens = params, numbers.shape[-2]

    def affine(x: Tensor, of_plane: Callable[[Tensor], Tensor]) -> Tensor:
        x = x * (of_plane(scale) * unit)
        return x if zero_point is None else x + of_plane(zero_point)

    if quantizer.per == "token":
        groups = numbers.unflatten(-1, (-1, quantizer.group_size))
        return affine(groups, lambda p: p.narrow(-2, plane * tokens, tokens).float().unsqueeze(-1)).flatten(-2)
    first, count = plane * tokens // quantizer.group_size, max(1, tokens // quantizer.group_size)
    if (first + count) * quantizer.group_size < (plane + 1) * tokens:  # groups that straddle planes
        index = torch.arange(plane * tokens, (plane + 1) * tokens, device=numbers.device) // quantizer.group_size
        return affine(numbers, lambda p: p.index_select(-2, index).float())
    groups = numbers.unflatten(-2, (count, -1))
    return affine(groups, lambda p: p.narrow(-2, first, count).float().unsqueeze(-2)).flatten(-3, -2)


@views("")
def _plain(kept: Sequence[Tensor], spec: CodecSpec, points: Tensor | None, head_dim: int) -> Pages:
    return Pages([plain(kept, spec.quantizer, points)])


@views("second-level")
def _two_levels(kept: Sequence[Tensor], spec: CodecSpec, points: Tensor | None, head_dim: int) -> Pages:
    return Pages([plain([kept[0], *expand(*kept[1:])], spec.quantizer, None)])


@views("sinkhorn", "channel-separable")
def _balanced(kept: Sequence[Tensor], spec: CodecSpec, points: Tensor | None, head_dim: int) -> Pages:
    """Pages divided by one factor per token or per channel (`codec.balance`)."""
    *kept, factor = kept
    planes = plain(kept, spec.quantizer, None)

    def values(plane: int) -> Tensor:
        x = planes.values(plane)
        per_token = factor.shape[-2] > 1
        of_plane = factor.narrow(-2, plane * x.shape[-2], x.shape[-2]) if per_token else factor
        return x * of_plane.float()

    return Pages([Planes(planes.runs, values)])


@views("polar", of_values=False)
def _polar(kept: Sequence[Tensor], spec: CodecSpec, points: Tensor | None, head_dim: int) -> Pages:
    """Radii and angles (`codec.polar`). The sine is computed as a cosine shifted by a quarter turn."""
    planes = plain(kept, spec.quantizer, None)

    def values(plane: int) -> Tensor:
        radius, angle = planes.values(plane).unflatten(-1, (2, -1)).split(1, -2)
        quarter = torch.arange(2, device=angle.device).unsqueeze(-1) * (math.pi / 2)
        return (radius * (angle - quarter).cos()).flatten(-2)

    return Pages([Planes(planes.runs, values)])


@views("salient")
def _salient(kept: Sequence[Tensor], spec: CodecSpec, points: Tensor | None, head_dim: int) -> Pages:
    """Salient and other tokens, each kind with pages of its own (`codec.salient`)."""
    marks, *kept = kept
    by_kind = zip(salient.of_kinds(kept), salient.kinds(spec, head_dim), strict=True)
    kinds = [planes for tensors, kind in by_kind for planes in view_pages(tensors, kind, None, head_dim).kinds]
    return Pages(kinds, salient.slots(marks, salient.tokens_of(spec)[0]))


# ---------------------------------------------------------------- codebooks and the lattice


@views("nuq")
def _nuq(kept: Sequence[Tensor], spec: CodecSpec, points: Tensor | None, head_dim: int) -> Pages:
    """A datatype per page (`codec.nuq`)."""
    codes, scale, zero_point, levels, values, positions = kept[:6]
    affine = AffineParams(scale, zero_point, spec.quantizer)
    return _datatype_pages(codes, levels, affine, (values, positions), spec, head_dim)


@views("datatype")
def _datatype(kept: Sequence[Tensor], spec: CodecSpec, points: Tensor | None, head_dim: int) -> Pages:
    """A calibrated datatype (`codec.datatype`). For keys, the calibrated channel ranges act as scales of one group, the
    whole page."""
    codes, scale, zero_point, values, positions, datatype, *ranges = kept
    shape, quantizer = (-1, codes.shape[1], -1, -1), spec.quantizer
    if ranges:
        zero_point, scale = (one.expand(shape) for one in ranges[0].unsqueeze(1).split(1, -2))
        quantizer = replace(quantizer, group_size=spec.page_size)
    levels, affine = datatype[:, None, 1:].expand(shape), AffineParams(scale, zero_point, quantizer)
    return _datatype_pages(codes, levels, affine, (values, positions), spec, head_dim)


def _datatype_pages(
    codes: Tensor,
    levels: Tensor,
    affine: AffineParams,
    outlier_tensors: tuple[Tensor, Tensor],
    spec: CodecSpec,
    head_dim: int,
) -> Pages:
    """Pages whose codes are indices of ``levels`` ``[BH, N, 1, 2**bits]``.

    The selection is a chain of comparisons, because vector code has no look-up in a table that differs by page.
    outlier_tensors: values of the outliers, and their positions.
    """
    levels = levels.float().unsqueeze(-2)

    def values(plane: int) -> Tensor:
        code, unit = unpack_plane_unshifted(codes, spec.bits, plane)
        code, selected = code.float(), levels[..., 0]
        for i in range(1, 2**spec.bits):
            selected = torch.where(code >= i / unit, levels[..., i], selected)
        return scaled(selected, 1.0, affine, plane)

    def at(token: Tensor, channel: Tensor) -> Tensor:
        code = code_at(codes, spec.bits, token, channel)
        return affine_at(levels.flatten(2).gather(-1, code.long()), affine, token, channel)

    return Pages([Planes(num_planes(spec.bits), values)], None, outliers(*outlier_tensors, at, spec, head_dim))


@views("e8")
def _lattice(kept: Sequence[Tensor], spec: CodecSpec, points: Tensor | None, head_dim: int) -> Pages:
    """Points of E8 (`codec.lattice`)."""
    codes, scale = kept
    return Pages([Planes(1, lambda plane: lattice.rotated(codes, scale, spec, points))])


# ---------------------------------------------------------------- codes with additional terms


@views("boosted", of_values=False)
def _boosted(kept: Sequence[Tensor], spec: CodecSpec, points: Tensor | None, head_dim: int) -> Pages:
    codes, scale, zero_point, lower, channels = kept
    planes = plain((codes, scale, zero_point), spec.quantizer, None)
    if not channels.shape[-1]:
        return Pages([planes])
    channels = channels.long()
    fine = scale.float().gather(-1, channels.expand(*scale.shape[:-1], -1)) * 0.5**spec.bits
    fine = torch.cat([fine, fine[..., :1]], -1)[..., :-1]  # with cat, it is computed once

    def values(plane: int) -> Tensor:
        numbers, unit = unpack_plane_unshifted(lower, spec.bits, plane)
        return scaled(numbers.float(), unit, AffineParams(fine, None, spec.quantizer), plane)

    return Pages([planes], None, [Boost(Planes(planes.runs, values), channels.squeeze(-2))])


@views("error-term")
def _error_term(kept: Sequence[Tensor], spec: CodecSpec, points: Tensor | None, head_dim: int) -> Pages:
    codes, scale, zero_point, values, positions, tall, wide = kept
    low_rank = [LowRank(tall, wide)] if ErrorTerm.of(spec).rank else []

    def at(token: Tensor, channel: Tensor) -> Tensor:
        code = code_at(codes, spec.bits, token, channel).float()
        dequantized = affine_at(code, AffineParams(scale, zero_point, spec.quantizer), token, channel)
        return sum((term.at(token, channel) for term in low_rank), dequantized)

    terms = [*low_rank, *outliers(values, positions, at, spec, head_dim)]
    return Pages([plain((codes, scale, zero_point), spec.plain.quantizer, None)], None, terms)


def page_values(weights: Tensor, pages: Pages, basis: Tensor | None) -> Tensor:
    """Sum of the values in pages, weighted by ``weights`` ``[BH, R, N, P]``: ``[BH, R, D]``. basis: the rotation of the
    values, which is undone."""
    by_slot = weights
    if pages.slots is not None:
        by_slot = torch.zeros_like(weights).scatter(-1, pages.slots[:, None].expand_as(weights), weights)
    planes = [[kind.values(j) for j in range(kind.runs)] for kind in pages.kinds]
    counts = [sum(plane.shape[2] for plane in of_kind) for of_kind in planes]
    parts = zip(by_slot.split(counts, -1), planes, strict=True)
    out = reduce(torch.add, (weighted_sum(*part) for part in parts))
    out = out if basis is None else out @ basis.mT
    return sum((term.values(weights) for term in pages.terms), out)

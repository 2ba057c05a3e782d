"""Attention over pages with widths by channel (`kvpass.codec.allocation`): fields are read as they are stored, and the
query, or the output, takes what they stand for.
"""

from functools import cache

import torch
from torch import Tensor

from kvpass.codec.allocation import FIELD_BITS, Rank, allocation_of, gains, middle, opened, slots, weights
from kvpass.codec.bitpack import num_planes, unpack_plane_unshifted
from kvpass.codec.rope import join_pairs, rotate_pairs, split_pairs
from kvpass.codec.spec import CodecSpec

from .planes import in_storage_order, weighted_sum

_GAINS = 256


@cache
def look_up_table(device: torch.device) -> Tensor:
    """The gain of each code, and behind them what 1 in a field is worth by its kind: powers are expensive where they
    are not vectors."""
    return torch.cat([gains(torch.arange(_GAINS, device=device)), weights(device)])


def page_scores(q: Tensor, pages: Tensor, spec: CodecSpec, table: Tensor, basis: Tensor, places: Tensor) -> Tensor:
    """``q`` ``[BH, R, 1 or N, D]``, as it is or as it is seen from each page, with the keys in pages ``[BH, N, 1,
    bytes]``: ``[BH, R, N * P]``, in the order of tokens."""
    head_dim = q.shape[-1]
    rich, ranks = opened(pages, spec, head_dim)
    *of_fields, _ = _of_fields(q, table, basis, places).split([*allocation_of(spec).fields(head_dim), 1], -1)
    scores = torch.cat([_rank_scores(*each, table) for each in zip(of_fields, ranks, strict=True)], -1)
    if rich is not None:
        scores = scores.gather(-1, slots(rich)[:, None].expand_as(scores))
    return scores.flatten(2)


def _of_fields(q: Tensor, table: Tensor, basis: Tensor, places: Tensor) -> Tensor:
    """What 1 in each field adds to the scores of ``q`` ``[BH, R, M, D]``: ``[BH, R, M, F + 1]``, the last is none."""
    (_, heads, pages, head_dim), size = q.shape, basis.shape[-1]
    rows = basis.flatten(0, 1).float().unflatten(-2, (-1, size))  # [BH, D / b, b, b]
    by_block = q.unflatten(-1, (-1, size)).permute(0, 3, 1, 2, 4).flatten(2, 3) @ rows.mT
    steps = by_block.unflatten(2, (heads, pages)).permute(0, 2, 3, 1, 4).flatten(3)
    coordinate, weight = _places(places, head_dim, table)
    of_fields = steps.gather(-1, coordinate[:, None, None].expand(*steps.shape[:-1], -1)) * weight[:, None, None]
    # concatenated, they are computed once: otherwise anew for every token
    return torch.cat([of_fields, of_fields[..., :1]], -1)


def _rank_scores(of_fields: Tensor, rank: Rank, table: Tensor) -> Tensor:
    """The scores of one rank's tokens, of queries whose fields are worth ``[BH, R, 1 or N, F]``: ``[BH, R, N, T]``."""
    heads, planes, singles = of_fields.shape[1], num_planes(1), rank.singles.shape[-1]
    of_pairs, of_singles = of_fields.unsqueeze(3).split([rank.pairs.shape[-1], singles], -1)
    offset = of_pairs.sum(-1) * middle(2) + of_singles.sum(-1) * middle(1)
    by_head = []
    for r in range(heads):
        for plane in range(planes):
            two, one = _tokens_of(rank, plane)
            each = (two[0] * (of_pairs[:, r] * two[1])).sum(-1)
            if singles:
                each = each + (one[0] * (of_singles[:, r] * one[1])).sum(-1)
            by_head.append(each - offset[:, r])
    scores = in_storage_order(by_head, planes).unflatten(-1, (-1, rank.gains.shape[-2]))
    return scores * _gains(rank, table).unsqueeze(1)


def _gains(rank: Rank, table: Tensor) -> Tensor:
    return table[rank.gains.squeeze(-1).int()]


def turned_back(q: Tensor, tables: tuple[Tensor, Tensor], rope: str) -> Tensor:
    """``q`` ``[BH, R, D]`` as it is seen from tokens with rotary tables ``[B, M, p]``: ``[BH, R, M, D]``."""
    batch = tables[0].shape[0]
    first, second, rest = (part.unflatten(0, (batch, -1)).unsqueeze(3) for part in split_pairs(q, rope))
    cos, sin = (table[:, None, None].float() for table in tables)
    turned = rotate_pairs(first, second, cos, -sin)
    rest = rest.expand(*turned[0].shape[:-1], -1)
    return join_pairs(*turned, rest, rope).flatten(0, 1)


def _places(places: Tensor, head_dim: int, table: Tensor) -> tuple[Tensor, Tensor]:
    """The coordinate of each field and its weight there, ``[BH, F]``."""
    places = places.flatten(0, 2).long()
    # concatenated, they are computed once: a division for each field of each page takes longer than all else
    both = torch.cat([(places % head_dim).float(), table[_GAINS + places // head_dim]], -1)
    coordinates, weight = both.chunk(2, -1)
    return coordinates.long(), weight


def _tokens_of(rank: Rank, plane: int) -> tuple[tuple[Tensor, float], tuple[Tensor, float]]:
    """Pairs and single bits of one in 8 of a rank's tokens, ``[BH, N, T / 8, .]`` float32, and what 1 in them is
    worth."""
    codes, unit = unpack_plane_unshifted(rank.pairs, 2, plane // 2)
    half = codes.shape[-2] // 2
    one, unit_of_one = unpack_plane_unshifted(rank.singles, 1, plane)
    return (codes.narrow(-2, plane % 2 * half, half).float(), unit), (one.float(), unit_of_one)


def as_stored(on_pages: Tensor, pages: Tensor, spec: CodecSpec, table: Tensor, head_dim: int) -> Tensor:
    """Weights of the tokens in pages, ``[BH, R, N * P]``, as pages keep those, and times their gains."""
    rich, ranks = opened(pages, spec, head_dim)
    by_page = on_pages.unflatten(-1, (-1, spec.page_size))
    if rich is not None:
        by_page = torch.zeros_like(by_page).scatter(-1, slots(rich)[:, None].expand_as(by_page), by_page)
    return (by_page * torch.cat([_gains(rank, table) for rank in ranks], -1)[:, None]).flatten(2)


def page_values(on_pages: Tensor, pages: Tensor, spec: CodecSpec, table: Tensor, basis: Tensor, places: Tensor):
    """Values in pages, weighted by what `as_stored` gave, ``[BH, R, N, P]``: ``[BH, R, D]``."""
    head_dim, size = basis.shape[-2:]
    ranks, parts = opened(pages, spec, head_dim)[1], []
    by_rank = on_pages.split(allocation_of(spec).tokens(spec.page_size), -1)
    for (*kinds, _), of_rank in zip(ranks, by_rank, strict=True):
        total = of_rank.sum((2, 3)).unsqueeze(-1)
        for packed, bits in zip(kinds, FIELD_BITS, strict=True):
            if packed.shape[-1]:
                parts.append(_kind_values(of_rank, packed, bits) - middle(bits) * total)
    coordinates, weight = _places(places, head_dim, table)
    mine = torch.arange(head_dim, device=basis.device)[:, None] == coordinates[:, None]
    of_fields = torch.where(mine, weight[:, None], 0.0)  # [BH, D, F]
    of_rows = (torch.cat(parts, -1)[:, :, None] * of_fields[:, None]).sum(-1)
    rows = basis.flatten(0, 1).float().unflatten(-2, (-1, size))
    return (of_rows.unflatten(-1, (-1, size, 1)) * rows[:, None]).sum(-2).flatten(-2)


def _kind_values(weights: Tensor, packed: Tensor, bits: int) -> Tensor:
    """Fields ``[BH, N, rows, F]`` weighted by ``[BH, R, N, P]``: ``[BH, R, F]``."""
    planes = (unpack_plane_unshifted(packed, bits, plane) for plane in range(num_planes(bits)))
    return weighted_sum(weights, [codes.float() * unit for codes, unit in planes])

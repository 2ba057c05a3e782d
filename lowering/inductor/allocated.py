"""Attention over pages with widths by channel (`kvpass.codec.allocation`): fields are read as they are stored, and the
query, or the output, takes what they stand for.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from kvpass.codec.allocation import FIELD_BITS, field_rows, gains, middle
from kvpass.codec.bitpack import num_planes, unpack_plane_unshifted
from kvpass.codec.rope import join_pairs, rotate_pairs, split_pairs

from .planes import in_storage_order, weighted_sum


@cache
def gain_table(device: torch.device) -> Tensor:
    """The gain of each code: powers are expensive where they are not vectors."""
    return gains(torch.arange(256, device=device))


def page_gains(pools: Sequence[Tensor], table: Tensor) -> Tensor:
    """Gains of tokens in pages, ``[BH, N, P]``."""
    return table[pools[-1].squeeze(-1).int()]


def page_scores(q: Tensor, pools: Sequence[Tensor], table: Tensor, basis: Tensor, places: Tensor) -> Tensor:
    """``q`` ``[BH, R, 1 or N, D]``, as it is or as it is seen from each page, with the keys in pages: ``[BH, R, N *
    P]``, in storage order.

    pools: pairs of bits ``[BH, N, P / 4, .]``, single ones ``[BH, N, P / 8, .]`` and gains ``[BH, N, P, 1]``.
    """
    pairs, singles, _ = pools
    heads, planes = q.shape[1], num_planes(1)
    of_fields = _of_fields(q, basis, places).unsqueeze(3)
    of_pairs, of_singles, _ = of_fields.split([pairs.shape[-1], singles.shape[-1], 1], -1)
    offset = of_pairs.sum(-1) * middle(2) + of_singles.sum(-1) * middle(1)
    by_head = []
    for r in range(heads):
        for plane in range(planes):
            two, one = _tokens_of(pairs, singles, plane)
            each = (two[0] * (of_pairs[:, r] * two[1])).sum(-1)
            if singles.shape[-1]:
                each = each + (one[0] * (of_singles[:, r] * one[1])).sum(-1)
            by_head.append(each - offset[:, r])
    return in_storage_order(by_head, planes) * page_gains(pools, table).flatten(1).unsqueeze(1)


def _of_fields(q: Tensor, basis: Tensor, places: Tensor) -> Tensor:
    """What 1 in each field adds to the scores of ``q`` ``[BH, R, M, D]``: ``[BH, R, M, F + 1]``, the last is none."""
    rows = field_rows(basis, places).flatten(0, 1).mT  # [BH, D, F]
    # concatenated, they are computed once: otherwise anew for every token
    rows = torch.cat([rows, rows[..., :1]], -1)
    return (q.flatten(1, 2) @ rows).unflatten(1, q.shape[1:3])


def turned_back(q: Tensor, tables: tuple[Tensor, Tensor], rope: str) -> Tensor:
    """``q`` ``[BH, R, D]`` as it is seen from tokens with rotary tables ``[B, M, p]``: ``[BH, R, M, D]``."""
    batch = tables[0].shape[0]
    first, second, rest = (part.unflatten(0, (batch, -1)).unsqueeze(3) for part in split_pairs(q, rope))
    cos, sin = (table[:, None, None].float() for table in tables)
    turned = rotate_pairs(first, second, cos, -sin)
    rest = rest.expand(*turned[0].shape[:-1], -1)
    return join_pairs(*turned, rest, rope).flatten(0, 1)


def _places(places: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """The coordinate of each field and its weight there, ``[BH, F]``."""
    places = places.flatten(0, 2).long()
    return places % head_dim, (1 << places // head_dim).float()


def _tokens_of(pairs: Tensor, singles: Tensor, plane: int) -> tuple[tuple[Tensor, float], tuple[Tensor, float]]:
    """Pairs and single bits of one in 8 tokens of each page, ``[BH, N, P / 8, .]`` float32, and what 1 in them is
    worth."""
    codes, unit = unpack_plane_unshifted(pairs, 2, plane // 2)
    half = codes.shape[-2] // 2
    one, unit_of_one = unpack_plane_unshifted(singles, 1, plane)
    return (codes.narrow(-2, plane % 2 * half, half).float(), unit), (one.float(), unit_of_one)


def page_values(weights: Tensor, pools: Sequence[Tensor], basis: Tensor, places: Tensor) -> Tensor:
    """Values in pages, weighted by ``[BH, R, N, P]``, gains included: ``[BH, R, D]``."""
    *kinds, _ = pools
    head_dim, size = basis.shape[-2:]
    total, parts = weights.sum((2, 3)).unsqueeze(-1), []
    for packed, bits in zip(kinds, FIELD_BITS, strict=True):
        if packed.shape[-1]:
            parts.append(_kind_values(weights, packed, bits) - middle(bits) * total)
    coordinates, weight = _places(places, head_dim)
    mine = torch.arange(head_dim, device=basis.device)[:, None] == coordinates[:, None]
    of_fields = torch.where(mine, weight[:, None], 0.0)  # [BH, D, F]
    of_rows = (torch.cat(parts, -1)[:, :, None] * of_fields[:, None]).sum(-1)
    rows = basis.flatten(0, 1).float().unflatten(-2, (-1, size))
    return (of_rows.unflatten(-1, (-1, size, 1)) * rows[:, None]).sum(-2).flatten(-2)


def _kind_values(weights: Tensor, packed: Tensor, bits: int) -> Tensor:
    """Fields ``[BH, N, rows, F]`` weighted by ``[BH, R, N, P]``: ``[BH, R, F]``."""
    planes = (unpack_plane_unshifted(packed, bits, plane) for plane in range(num_planes(bits)))
    return weighted_sum(weights, [codes.float() * unit for codes, unit in planes])

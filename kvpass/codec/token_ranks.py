"""Gives half of each page's tokens, the *high-precision* ones, more bits than the others.

They are the tokens whose errors would cost most. Keys and a sample of queries select them (`choose`); values reuse the
selection of their keys. A page stores its tokens by *rank*, high-precision tokens first, and a bit mask of them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import KVPassError
from .bitpack import pack, smallest_page, unpack
from .spec import CodecSpec
from .transform_coding import FIELD_BITS, coordinates, times_blocks

RANKS = 2
"""Number of ranks, of equally many tokens each, if tokens have ranks."""
_PRIOR = 4.0  # weight of queries that attend to all tokens of a page alike, relative to the prompt's


def slots(high_mask: Tensor) -> Tensor:
    """The slot of each token in its page, from the masks of high-precision tokens ``[..., N, P / 8, 1]``:
    ``[..., N, P]`` int64.

    High-precision tokens come first.
    """
    is_high = unpack(high_mask, 1).squeeze(-1)
    token = torch.arange(is_high.shape[-1], device=high_mask.device)
    before = (is_high.float() @ (token[:, None] < token).float()).long()  # number of high-precision tokens before each
    # unwritten pages have no high-precision tokens
    low_slot = (token - before + len(token) // RANKS).clamp(max=len(token) - 1)
    return torch.where(is_high > 0, before, low_slot)


def choose(x: Tensor, spec: CodecSpec, queries: Tensor, units: Tensor | None = None) -> Tensor:
    """Select the high-precision tokens of keys ``[B, H, N * P, D]``; returns a bit mask ``[B, H, N, P / 8, 1]`` uint8.

    They are the tokens of each page with the largest squared error to expect. It grows with the square of a token's
    weight: under ``queries`` (softmax within the page), and under later ones that may attend to any token of the page.

    units: coordinates of the tokens, ``[B, H, N * P, D]``. Their squared size counts as well, because a token's steps
        are proportional to its size. None if all tokens have the same steps.
    """
    mass = (x.float() @ queries.float().mT).unflatten(2, (-1, spec.page_size)).softmax(3).square().sum(-1)
    if units is not None:
        size = units.unflatten(2, (-1, spec.page_size)).square().sum(-1)
        mass = (mass / mass.mean(-1, keepdim=True) + _PRIOR) * size
    most = mass.topk(spec.page_size // RANKS, -1).indices
    high_mask = torch.zeros_like(mass, dtype=torch.uint8).scatter(-1, most, 1)
    return pack(high_mask.unsqueeze(-1), 1)


def tokens_at(places: Tensor, x: Tensor) -> Tensor:
    """Tokens of pages ``[B, H, N, P, D]`` at ``places`` ``[B, H, N, P]`` of each page."""
    size = x.shape[3]
    first = torch.arange(0, places.numel(), size, device=x.device).view(*places.shape[:3], 1)
    return x.flatten(0, 3).index_select(0, (first + places).flatten()).view_as(x)


class Ranked:
    """Base of codecs that can give half of each page's tokens, the high-precision ones, more bits than the others.

    block_size: number of neighbouring channels that are decorrelated together.
    follows: take the high-precision tokens from the layer's keys; otherwise queries select them.
    """

    block_size: int
    follows: bool

    @property
    def ranked(self) -> bool:
        """Whether half of a page's tokens gets more bits than the other half."""
        raise NotImplementedError

    def check(self, spec: CodecSpec) -> None:
        if spec.bits != 8 or spec.quantizer.grid:
            raise KVPassError("Per-channel bit widths need bits=8, the largest possible bit width, and no grid.")
        multiple = smallest_page(min(FIELD_BITS)) * (RANKS if self.ranked else 1)
        if spec.page_size % multiple:
            raise KVPassError(
                f"page_size={spec.page_size} does not fill whole bytes: use a residual that is a multiple of "
                f"{multiple}."
            )

    def check_head(self, head_dim: int) -> None:
        if head_dim % self.block_size:
            raise KVPassError(f"block_size={self.block_size} does not divide head_dim={head_dim}.")

    @property
    def chooses(self) -> bool:
        return self.ranked and not self.follows

    @property
    def follows_keys(self) -> bool:
        return self.follows

    def opened(self, fitted: Sequence[Tensor], spec: CodecSpec) -> tuple[int, Tensor, Tensor, list[Tensor]]:
        """Bytes per page, basis, places of fields or bit widths, and what selects the high-precision tokens, from the
        ``fitted`` that `Codec.quantize` takes."""
        raise NotImplementedError

    def tokens(self, page_size: int) -> list[int]:
        """Number of tokens of a page in each rank, high-precision tokens first."""
        return [page_size // RANKS, page_size - page_size // RANKS] if self.ranked else [page_size]

    def units(
        self, x: Tensor, basis: Tensor, spec: CodecSpec, chosen: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """The coordinates of whole pages ``[B, H, N * P, D]`` in ``basis``, in token order, float32, and the mask of
        their high-precision tokens ``[B, H, N, P / 8, 1]``; None without ranks. ``chosen`` as in `by_rank`."""
        units = coordinates(x, basis)
        if not self.ranked:
            return units, None
        return units, chosen[0] if self.follows else choose(x, spec, chosen[0], units)

    def by_rank(
        self, x: Tensor, basis: Tensor, spec: CodecSpec, chosen: Sequence[Tensor]
    ) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """The mask of the high-precision tokens ``[B, H, N, P / 8, 1]``, None without ranks, and for each rank the
        coordinates of its tokens in ``basis``, ``[B, H, N, T, D]`` float32.

        x: whole pages, ``[B, H, N * P, D]``.
        chosen: with ranks, the queries that select the high-precision tokens, or the mask if ``follows``.
        """
        units, high_mask = self.units(x, basis, spec, chosen)
        return high_mask, self.to_ranks(units, high_mask, spec)

    def to_ranks(self, units: Tensor, high_mask: Tensor | None, spec: CodecSpec) -> tuple[Tensor, ...]:
        """The coordinates of the tokens of each rank, ``[B, H, N, T, D]``, from those of whole pages
        ``[B, H, N * P, D]``."""
        units = units.unflatten(2, (-1, spec.page_size))
        if high_mask is not None:
            units = tokens_at(slots(high_mask).argsort(-1), units)
        found: tuple[Tensor, ...] = units.split(self.tokens(spec.page_size), 3)
        return found

    def from_ranks(self, by_rank: Sequence[Tensor], high_mask: Tensor | None, basis: Tensor) -> Tensor:
        """Inverse of `by_rank`: tokens ``[B, H, N * P, D]`` float32."""
        units = torch.cat([*by_rank], 3)
        if high_mask is not None:
            units = tokens_at(slots(high_mask), units)
        return times_blocks(units.flatten(2, 3), basis.float().unflatten(-2, (-1, basis.shape[-1])))

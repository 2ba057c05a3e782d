"""The values of a page that lie farthest out are kept exactly, with their positions, and do not stretch the scales of
the others (KVQuant, arXiv 2401.18079, section 3.4; GEAR, arXiv 2403.05527).

The papers take as many of each channel or token; here all groups of a page compete, in units of their own deviation, so
that a share of 1 % means something in pages of 32 tokens too. Values and positions take 16 bits each.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import KVPassError
from ..fields import check_fraction
from .affine import params_dtype
from .codec import Codec, Kept
from .pages import grouped
from .spec import CodecSpec

_ADDRESSES = 1 << 16


@dataclass(frozen=True)
class Outliers(Codec):
    """A codec that keeps some values exactly.

    share: of the values of a page, those that are.
    """

    share: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction("share", self.share)


def count(spec: CodecSpec, head_dim: int) -> int:
    """How many values of a page are kept exactly. Raises `KVPassError` for pages of more values than 16 bits count."""
    values = spec.page_size * head_dim
    if values > _ADDRESSES:
        raise KVPassError(
            f"Pages of {spec.page_size} x {head_dim} values have too many positions for 16-bit indices: use smaller "
            "pages."
        )
    return math.ceil(Outliers.of(spec).share * values - 1e-9)


def split(pages: Tensor, spec: CodecSpec, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Pages ``[..., P, D]`` float32 with the middle of their group in the place of what is kept exactly; values ``[...,
    1, K]`` that are, in the dtype of parameters for a cache of ``dtype``, and their positions ``[..., 1, K]`` int16."""
    groups, dim = grouped(pages, spec.quantizer)
    middle = groups.median(dim, keepdim=True).values
    off = (groups - middle).abs()
    relative = off / off.mean(dim, keepdim=True).clamp_min(torch.finfo(off.dtype).tiny)
    order = relative.reshape(pages.shape).flatten(-2).topk(count(spec, pages.shape[-1]), -1).indices
    values = pages.flatten(-2).gather(-1, order).to(params_dtype(dtype))
    fill = middle.expand(groups.shape).reshape(pages.shape).flatten(-2).gather(-1, order)
    rest = pages.flatten(-2).scatter(-1, order, fill).view(pages.shape)
    return rest, values.unsqueeze(-2), order.to(torch.int16).unsqueeze(-2)  # beyond 2**15 negative, see `merge`


def places(positions: Tensor) -> Tensor:
    """Positions as they are stored -> indices of the values of a page, int64."""
    return positions.squeeze(-2).long() % _ADDRESSES


def merge(pages: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    """Dequantized ``pages`` with the values that are kept exactly."""
    return pages.flatten(-2).scatter(-1, places(positions), values.squeeze(-2).float()).view(pages.shape)


OUTLIERS = {
    "values": Kept(lambda spec, head_dim: (1, count(spec, head_dim))),
    "positions": Kept(lambda spec, head_dim: (1, count(spec, head_dim)), torch.int16),
}

"""Keeps the outliers of a page exact, with their positions, so that they do not widen the scales of the other values
(KVQuant, arXiv 2401.18079, section 3.4; GEAR, arXiv 2403.05527).

The papers keep a fixed number of outliers per channel or token. Here all values of a page compete, in units of the mean
deviation of their group, so a fraction of 1 % is meaningful even in pages of 32 tokens. Values and positions take 16
bits each.
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
    """Base class of codecs that keep some values exact.

    share: fraction of a page's values that are kept exact.
    """

    share: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction("share", self.share)


def count(spec: CodecSpec, head_dim: int) -> int:
    """Number of exact values per page. Raises `KVPassError` if a page has more values than 16 bits can index."""
    values = spec.page_size * head_dim
    if values > _ADDRESSES:
        raise KVPassError(
            f"Pages of {spec.page_size} x {head_dim} values have too many positions for 16-bit indices: use smaller "
            "pages."
        )
    return math.ceil(Outliers.of(spec).share * values - 1e-9)


def split(pages: Tensor, spec: CodecSpec, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Split outliers off pages ``[..., P, D]`` float32.

    Returns the pages with outliers replaced by the median of their group, the outliers ``[..., 1, K]`` in
    ``params_dtype(dtype)``, and their positions ``[..., 1, K]`` int16. dtype: the dtype of the cache.
    """
    groups, dim = grouped(pages, spec.quantizer)
    middle = groups.median(dim, keepdim=True).values
    off = (groups - middle).abs()
    relative = off / off.mean(dim, keepdim=True).clamp_min(torch.finfo(off.dtype).tiny)
    order = relative.reshape(pages.shape).flatten(-2).topk(count(spec, pages.shape[-1]), -1).indices
    values = pages.flatten(-2).gather(-1, order).to(params_dtype(dtype))
    fill = middle.expand(groups.shape).reshape(pages.shape).flatten(-2).gather(-1, order)
    rest = pages.flatten(-2).scatter(-1, order, fill).view(pages.shape)
    return rest, values.unsqueeze(-2), order.to(torch.int16).unsqueeze(-2)  # from 2**15 on negative, see `places`


def places(positions: Tensor) -> Tensor:
    """Convert stored positions ``[..., 1, K]`` to indices of a page's values, ``[..., K]`` int64."""
    return positions.squeeze(-2).long() % _ADDRESSES


def merge(pages: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    """Write the exact values into dequantized ``pages``."""
    return pages.flatten(-2).scatter(-1, places(positions), values.squeeze(-2).float()).view(pages.shape)


OUTLIERS = {
    "values": Kept(lambda spec, head_dim: (1, count(spec, head_dim))),
    "positions": Kept(lambda spec, head_dim: (1, count(spec, head_dim)), torch.int16),
}

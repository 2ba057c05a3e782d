"""Quantizes with a non-uniform datatype calibrated per layer, and keeps outliers exact (KVQuant, arXiv 2401.18079).

`codec.nuq` fits a datatype to each page instead. Keys use the calibrated range of their channel, and the keys farthest
outside of it are outliers (section 3.4: thresholds of keys are found offline). Values use the range of their token
without its outliers, as in `codec.nuq`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .affine import params_dtype
from .bitpack import pack, unpack
from .codec import Kept
from .nuq import check_datatype, in_range, nearest, split_in_range
from .outliers import OUTLIERS, Outliers, count, merge
from .pages import Affine, dequantize_groups
from .spec import CodecSpec


def in_units(pages: Tensor, spec: CodecSpec, dtype: torch.dtype, ranges: Tensor | None) -> tuple[Tensor, ...]:
    """Normalize pages ``[..., P, D]`` to their range, [0, 1], and split off outliers.

    Returns the normalized pages, scale and zero point (empty for keys), outliers ``[..., 1, K]`` and their positions
    ``[..., 1, K]`` int16.

    dtype: the dtype of the cache.
    ranges: for keys: ``[..., 2, D]``, minimum and span of each channel. None for values.
    """
    if ranges is None:
        return split_in_range(pages, spec, dtype)
    low, span = ranges.float().split(1, -2)
    beyond = ((pages - low) / torch.where(span > 0, span, 1) - 0.5).abs().flatten(-2)
    order = beyond.topk(count(spec, pages.shape[-1]), -1).indices
    values = pages.flatten(-2).gather(-1, order).to(params_dtype(dtype)).unsqueeze(-2)
    none = values.new_empty(*pages.shape[:-2], 0, pages.shape[-1])
    return in_range(pages, low, span), none, none.clone(), values, order.to(torch.int16).unsqueeze(-2)


def _of_values(spec: CodecSpec, head_dim: int) -> tuple[int, int]:
    return (0, head_dim) if spec.quantizer.per == "channel" else spec.params_shape(head_dim)


@dataclass(frozen=True)
class CalibratedDatatype(Outliers, name="datatype"):
    """A calibrated non-uniform datatype, with calibrated channel ranges for keys, and exact outliers.

    share: fraction of a page's values that are kept exact.
    """

    tensors = {"codes": Affine.tensors["codes"], "scale": Kept(_of_values), "zero_point": Kept(_of_values), **OUTLIERS}
    quantizes_with = "datatype", "ranges"
    dequantizes_with = "datatype", "ranges"

    def check(self, spec: CodecSpec) -> None:
        check_datatype(spec)

    def sequence(self, spec: CodecSpec) -> dict[str, Kept]:
        found = {"datatype": Kept(lambda spec, head_dim: (2, 2**spec.bits), calibrated=True)}
        if spec.quantizer.per == "channel":
            found["ranges"] = Kept(lambda spec, head_dim: (2, head_dim), calibrated=True)
        return found

    def quantize(self, x: Tensor, spec: CodecSpec, fitted: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        """Quantize whole pages ``[B, H, N * P, D]``.

        Returns codes, scale and zero point as `quantize_pages` (scale and zero point are empty for keys), outliers and
        their positions.

        fitted: the datatype ``[B, H, 2, 2**bits]``: ascending points for choosing codes, and the points that the codes
            dequantize to. For keys also the ranges ``[B, H, 2, D]``.
        """
        datatype, *ranges = (one.float().unsqueeze(2) for one in fitted)
        pages = x.float().unflatten(2, (-1, spec.page_size))
        units, *rest = in_units(pages, spec, x.dtype, ranges[0] if ranges else None)
        chosen_by = datatype[..., 0, :].expand(*units.shape[:3], -1).contiguous()
        codes = nearest(units.flatten(-2), chosen_by).to(torch.uint8).view(pages.shape)
        return pack(codes, spec.bits), *rest

    def dequantize(self, *kept_fitted_and_spec: Any) -> Tensor:
        """Inverse of `quantize` up to rounding: ``[B, H, N * P, D]`` float32."""
        codes, scale, zero_point, values, positions, datatype, *ranges, spec = kept_fitted_and_spec
        which = unpack(codes, spec.bits)
        points = datatype[..., 1, :].float().unsqueeze(2).expand(*which.shape[:3], -1)
        units = points.gather(-1, which.flatten(-2).long()).view(which.shape)
        if ranges:
            low, span = ranges[0].float().unsqueeze(2).split(1, -2)
            pages = units * span + low
        else:
            pages = dequantize_groups(units, scale, zero_point, spec.quantizer)
        return merge(pages, values, positions).flatten(2, 3)

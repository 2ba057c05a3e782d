"""Quantizes some channels of a page with twice the bits (Kitty, arXiv 2511.18643).

All channels have codes of the same bit width. A second, dense tensor holds the lower half of the bits of the boosted
channels. The scale applies to the upper half alone, so all channels are read in the same way, and the second tensor
refines some of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import KVPassError
from ..fields import check_fraction
from .bitpack import byte_rows, pack, unpack
from .codec import Codec, Kept
from .pages import Affine, dequantize_groups, quantize_pages
from .quantizer import UNIFORM
from .spec import CodecSpec


def boosted(spec: CodecSpec, head_dim: int) -> int:
    """Number of boosted channels."""
    return int(Boosted.of(spec).share * head_dim + 1e-6)


def _twice(spec: CodecSpec) -> CodecSpec:
    return replace(spec.plain, quantizer=replace(spec.plain.quantizer, bits=2 * spec.bits))


@dataclass(frozen=True)
class Boosted(Codec, name="boosted"):
    """Quantizes some channels of a page with twice the bits.

    share: fraction of a page's channels that are boosted.
    """

    share: float

    tensors = {
        **Affine.tensors,
        "lower": Kept(
            lambda spec, head_dim: (byte_rows(spec.page_size, spec.bits), boosted(spec, head_dim)), torch.uint8
        ),
        "channels": Kept(lambda spec, head_dim: (1, boosted(spec, head_dim)), torch.int16),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction("share", self.share)

    def check(self, spec: CodecSpec) -> None:
        quantizer, of = spec.quantizer, spec.transform
        if quantizer.per != "channel" or quantizer.grid or quantizer.subspace is not None or of.rotation is not None:
            raise KVPassError("Boosted channels need uniform per-channel quantization: no grid, subspace or rotation.")
        if 2 * quantizer.bits not in UNIFORM:
            raise KVPassError(
                f"bits={quantizer.bits}: boosted channels use twice as many bits, which must be one of {list(UNIFORM)}."
            )

    def quantize(self, x: Tensor, spec: CodecSpec, fitted: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        """Quantize whole pages ``[B, H, N * P, D]``.

        Returns codes, scale and zero point as `quantize_pages`, the lower codes of the boosted channels
        ``[B, H, N, rows, K]`` uint8, and the indices of these channels ``[B, H, N, 1, K]`` int16. Boosted are the
        channels with the largest average magnitude.
        """
        bits, pages = spec.bits, x.float().unflatten(2, (-1, spec.page_size))
        one, two = quantize_pages(x, spec.plain), quantize_pages(x, _twice(spec))
        size = pages.abs().mean(-2, keepdim=True)
        channels = size.topk(boosted(spec, x.shape[-1]), -1).indices.sort(-1).values
        chosen = torch.zeros_like(size, dtype=torch.bool).scatter(-1, channels, True)
        both = unpack(two[0], 2 * bits)
        codes = torch.where(chosen, both >> bits, unpack(one[0], bits))
        lower = both.gather(-1, channels.expand(*both.shape[:-1], -1)) & (2**bits - 1)
        scale = torch.where(chosen, two[1] * 2**bits, one[1])
        return (
            pack(codes, bits),
            scale,
            torch.where(chosen, two[2], one[2]),
            pack(lower, bits),
            channels.to(torch.int16),
        )

    def dequantize(
        self, codes: Tensor, scale: Tensor, zero_point: Tensor, lower: Tensor, channels: Tensor, spec: CodecSpec
    ) -> Tensor:
        """Inverse of `quantize` up to rounding: ``[B, H, N * P, D]`` float32."""
        upper, below = unpack(codes, spec.bits).float(), unpack(lower, spec.bits) * 0.5**spec.bits
        values = upper.scatter_add(-1, channels.long().expand(below.shape), below)
        return dequantize_groups(values, scale, zero_point, spec.quantizer).flatten(2, 3)

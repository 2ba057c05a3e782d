"""Quantizes rotated pages to points of the E8 lattice, 2 bits per value (`codec.lattice_points`)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import KVPassError
from .affine import params_dtype
from .codebook import fit_rms
from .codec import Codec, Kept
from .hadamard import hadamard, inverse_hadamard
from .lattice_points import DIM, UNIT, assign, points, words
from .spec import CodecSpec


def rotated(codes: Tensor, scale: Tensor, spec: CodecSpec, table: Tensor) -> Tensor:
    """Dequantize to pages ``[..., P, D]`` float32, still rotated. table: `lattice_points.words`."""
    low, high = codes.chunk(2, -1)
    code = low.int() + (high.int() << 8)
    groups = points(code, table).flatten(-2).unflatten(-1, (-1, spec.quantizer.group_size))
    scaled: Tensor = groups * (scale.float() / UNIT).unsqueeze(-1)
    return scaled.flatten(-2)


@dataclass(frozen=True)
class E8(Codec, name="e8"):
    """Quantizes groups of a token's channels, after a rotation, to 65,536 points, each for eight channels."""

    tensors = {
        "codes": Kept(lambda spec, head_dim: (spec.page_size, head_dim // 4), torch.uint8),
        "scale": Kept(lambda spec, head_dim: (spec.page_size, head_dim // spec.quantizer.group_size)),
    }
    dequantizes_any_bytes = True

    def check(self, spec: CodecSpec) -> None:
        quantizer = spec.quantizer
        if quantizer.bits != 2 or quantizer.per != "token" or quantizer.group_size % DIM:
            raise KVPassError(
                f"The E8 lattice quantizes {DIM} channels of a token at a time, at 2 bits each; got "
                f"bits={quantizer.bits}, per={quantizer.per!r}, group_size={quantizer.group_size}."
            )

    def quantize(self, x: Tensor, spec: CodecSpec, fitted: Sequence[Tensor] = ()) -> tuple[Tensor, Tensor]:
        """Quantize whole pages ``[B, H, N * P, D]`` to codes ``[B, H, N, P, D / 4]`` uint8, all low bytes before all
        high bytes, and 16-bit scales of groups ``[B, H, N, P, D / group_size]``."""
        pages = hadamard(x.float().unflatten(2, (-1, spec.page_size)), spec.transform.rotation)
        groups = pages.unflatten(-1, (-1, spec.quantizer.group_size))
        scale = fit_rms(groups, params_dtype(x.dtype))
        units = UNIT * groups / torch.where(scale > 0, scale, 1).float()
        code = assign(units.reshape(-1, DIM)).view(*pages.shape[:-1], -1)
        return torch.cat([code.to(torch.uint8), (code >> 8).to(torch.uint8)], -1), scale.squeeze(-1)

    def dequantize(self, codes: Tensor, scale: Tensor, spec: CodecSpec) -> Tensor:
        """Inverse of `quantize` up to rounding: ``[B, H, N * P, D]`` float32."""
        pages = rotated(codes, scale, spec, words(codes.device))
        return inverse_hadamard(pages.flatten(2, 3), spec.transform.rotation)

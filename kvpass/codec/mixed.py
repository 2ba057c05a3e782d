"""Quantizes with two bit widths per token: the largest channels of a page get one bit more (TurboQuant, arXiv
2504.19874, section 4.3: 2.5 and 3.5 bits).

The two sets of channels are rotated separately and have separate norms.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from ..errors import KVPassError
from ..fields import check_fraction
from .bitpack import byte_rows, smallest_page
from .codec import Codec, Kept
from .pages import dequantize_pages, quantize_pages
from .quantizer import Quantizer
from .spec import CodecSpec


def counts(spec: CodecSpec, head_dim: int) -> tuple[int, int]:
    """Number of channels with ``bits`` bits, and with one bit more. Raises `KVPassError` if either is 0."""
    more = int(Mixed.of(spec).share * head_dim + 1e-6)
    if not 0 < more < head_dim:
        raise KVPassError(
            f"share={Mixed.of(spec).share} of {head_dim} channels leaves one of the two bit widths without channels: "
            "use a share closer to 0.5."
        )
    return head_dim - more, more


@cache
def _alone(spec: CodecSpec, bits: int, channels: int) -> CodecSpec:
    """The spec that quantizes one set of ``channels`` channels."""
    return replace(spec.plain, quantizer=Quantizer(bits, "token", channels, grid=f"d1n{2**bits}"))


def _both(spec: CodecSpec, head_dim: int) -> list[CodecSpec]:
    return [_alone(spec, spec.bits + i, count) for i, count in enumerate(counts(spec, head_dim))]


def _order(channels: Tensor, head_dim: int) -> Tensor:
    """A permutation of all channels, ``[..., 1, D]`` int64, with ``channels`` ``[..., 1, K]`` last."""
    more = torch.zeros(*channels.shape[:-1], head_dim, device=channels.device)
    more = more.scatter(-1, channels.long() % head_dim, 1.0)  # a page that holds nothing yet has any indices
    return more.argsort(dim=-1, stable=True)


def _columns(spec: CodecSpec, head_dim: int, which: int) -> tuple[int, int]:
    return byte_rows(spec.page_size, spec.bits + which), counts(spec, head_dim)[which]


@dataclass(frozen=True)
class Mixed(Codec, name="mixed"):
    """Two bit widths in a token: the largest channels of a page have one bit more.

    share: fraction of a page's channels that have one bit more.
    """

    share: float

    tensors = {
        "codes": Kept(lambda spec, head_dim: _columns(spec, head_dim, 0), torch.uint8),
        "scale": Kept(lambda spec, head_dim: (spec.page_size, 1)),
        "wide": Kept(lambda spec, head_dim: _columns(spec, head_dim, 1), torch.uint8),
        "wide_scale": Kept(lambda spec, head_dim: (spec.page_size, 1)),
        "channels": Kept(lambda spec, head_dim: (1, counts(spec, head_dim)[1]), torch.int16),
    }

    dequantizes_any_bytes = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction("share", self.share)

    def check(self, spec: CodecSpec) -> None:
        if spec.quantizer.grid != f"d1n{2**spec.bits}" or spec.bits > 3:
            raise KVPassError("Mixed bit widths need a scalar grid of 1 to 3 bits: d1n2, d1n4 or d1n8.")
        if spec.page_size % smallest_page(spec.bits + 1):
            raise KVPassError(
                f"page_size={spec.page_size} does not fill whole bytes at {spec.bits + 1} bits: use larger pages."
            )

    def quantize(self, x: Tensor, spec: CodecSpec, fitted: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        """Quantize whole pages ``[B, H, N * P, D]``.

        Returns codes and scales of both sets of channels, as `quantize_pages`, and the indices of the channels with one
        bit more, ``[B, H, N, 1, K]`` int16: the channels with the largest average magnitude.
        """
        pages, narrow_and_wide = x.float().unflatten(2, (-1, spec.page_size)), counts(spec, x.shape[-1])
        channels = pages.abs().mean(-2, keepdim=True).topk(narrow_and_wide[1], -1).indices.sort(-1).values
        order = _order(channels, x.shape[-1]).expand(pages.shape)
        parts = pages.gather(-1, order).flatten(2, 3).to(x.dtype).split(narrow_and_wide, -1)
        kept = [quantize_pages(*each)[:2] for each in zip(parts, _both(spec, x.shape[-1]), strict=True)]
        return *kept[0], *kept[1], channels.to(torch.int16)

    def dequantize(
        self, codes: Tensor, scale: Tensor, wide: Tensor, wide_scale: Tensor, channels: Tensor, spec: CodecSpec
    ) -> Tensor:
        """Inverse of `quantize` up to rounding: ``[B, H, N * P, D]`` float32."""
        head_dim = codes.shape[-1] + wide.shape[-1]
        none = scale[..., :0, :]
        kept = (codes, scale, none), (wide, wide_scale, none)
        parts = [dequantize_pages(*each, of) for each, of in zip(kept, _both(spec, head_dim), strict=True)]
        pages: Tensor = torch.cat(parts, -1).unflatten(2, (-1, spec.page_size))
        back = _order(channels, head_dim).argsort(-1).expand(pages.shape)
        tokens: Tensor = pages.gather(-1, back).flatten(2, 3)
        return tokens

"""Quantizes the salient tokens of a page with twice the bits (ZipCache, arXiv 2405.14256, section 4.2).

Salient tokens and the others are quantized separately, as if each kind filled pages of its own: keys per channel,
values per token and channel-separable.

Saliency is normalized attention mass: ``sum_k A[k, i] / nnz(A[:, i])`` over probes k. The probes are a sample of
`probes.QUERIES` of the prompt's queries. A is their softmax over all tokens that are packed in one call, without a
causal mask, so the divisor is the same for all tokens. Values use the selection of their keys.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import KVPassError
from ..fields import check_fraction
from ..layout.retention import Retention
from .balance import ChannelSeparable
from .bitpack import byte_rows, pack, smallest_page, unpack
from .codec import Codec, Kept
from .pages import Affine, dequantize_pages, quantize_pages
from .probes import PROBES, some_queries
from .spec import CodecSpec


def tokens_of(spec: CodecSpec) -> tuple[int, int]:
    """Number of salient tokens of a page, and of the others. Raises `KVPassError` unless both fill whole bytes."""
    salient = round(Salient.of(spec).share * spec.page_size)
    counts, widths = (salient, spec.page_size - salient), (2 * spec.bits, spec.bits)
    if min(counts) <= 0 or any(n % smallest_page(bits) for n, bits in zip(counts, widths, strict=True)):
        found = f"{counts[0]} tokens at {widths[0]} bits and {counts[1]} at {widths[1]}"
        raise KVPassError(
            f"share={Salient.of(spec).share} gives {found}: both must be above 0 and fill whole bytes. Use another "
            "share or larger pages."
        )
    return counts


@cache
def kinds(spec: CodecSpec, head_dim: int) -> list[CodecSpec]:
    """The specs for salient tokens and for the others, each with pages of its own."""
    codes, keys, specs = spec.plain.quantizer, spec.quantizer.per == "channel", []
    codes = replace(codes, codec=None if keys else ChannelSeparable())
    for n, bits in zip(tokens_of(spec), (2 * spec.bits, spec.bits), strict=True):
        own = replace(codes, bits=bits, group_size=n if keys else head_dim)
        specs.append(replace(spec, quantizer=own, retention=Retention(n, n)))
    return specs


def slots(marks: Tensor, salient: int) -> Tensor:
    """The slot of each token in its page: ``[..., N, P]`` int64. Salient tokens come first.

    marks: ``[..., N, 1, P / 8]``, bit masks of salient tokens. salient: number of salient tokens of a page.
    """
    is_salient = unpack(marks.mT, 1).squeeze(-1)
    token = torch.arange(is_salient.shape[-1], device=marks.device)
    before = (is_salient.float() @ (token[:, None] < token).float()).long()  # number of salient tokens before each
    other = (token - before + salient).clamp(max=len(token) - 1)  # unwritten pages have no salient tokens
    return torch.where(is_salient > 0, before, other)


def marked(x: Tensor, spec: CodecSpec, probes: Tensor) -> Tensor:
    """Bit mask ``[B, H, N, P / 8, 1]`` uint8 of the salient tokens of keys ``x`` ``[B, H, N * P, D]``: the tokens of
    each page with the most attention mass under ``probes`` ``[B, H, Q, D]``."""
    mass = (x.float() @ probes.float().mT).softmax(2).mean(-1).unflatten(2, (-1, spec.page_size))
    most = mass.topk(tokens_of(spec)[0], -1).indices
    return pack(torch.zeros_like(mass, dtype=torch.uint8).scatter(-1, most, 1).unsqueeze(-1), 1)


def of_kinds(kept: Sequence[Tensor]) -> list[list[Tensor]]:
    """Split the page tensors after the marks by kind, and drop the empty ones."""
    return [[tensor for tensor in half if tensor.shape[-2]] for half in (kept[:4], kept[4:])]


def _kept(which: int, name: str) -> Kept:
    def shape(spec: CodecSpec, head_dim: int) -> tuple[int, ...]:
        of = kinds(spec, head_dim)[which]
        tensors = of.codec.tensors
        return tensors[name].shape(of, head_dim) if name in tensors else (0, head_dim)

    return Kept(shape, torch.uint8 if name == "codes" else None)


_TENSORS = (*Affine.tensors, "factor")


@dataclass(frozen=True)
class Salient(Codec, name="salient"):
    """Pages whose salient tokens are quantized with twice the bits.

    share: fraction of a page's tokens that are salient.
    chosen_by: "queries": a sample of the prompt's queries selects them. "keys": values use the selection of the layer's
        keys.
    """

    share: float
    chosen_by: Literal["queries", "keys"]

    tensors = {
        "marks": Kept(lambda spec, head_dim: (1, byte_rows(spec.page_size, 1)), torch.uint8),
        **{f"{kind}{name}": _kept(i, name) for i, kind in enumerate(("", "other_")) for name in _TENSORS},
    }
    quantizes_with = ("queries",)
    dequantizes_any_bytes = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction("share", self.share)

    @property
    def chooses(self) -> bool:
        return self.chosen_by == "queries"

    @property
    def needs_queries(self) -> bool:
        return self.chooses

    @property
    def follows_keys(self) -> bool:
        return self.chosen_by == "keys"

    def check(self, spec: CodecSpec) -> None:
        codes = spec.quantizer
        if codes.bits > 4 or codes.grid or codes.eta or codes.subspace or spec.transform.rotation is not None:
            raise KVPassError("Salient tokens need uniform quantization of at most 4 bits: no grid, eta or rotation.")
        if spec.transform.pre_rope:
            raise KVPassError("Saliency is measured by queries after rotary embedding: set rope='post'.")
        tokens_of(spec)

    def sequence(self, spec: CodecSpec) -> dict[str, Kept]:
        return {"queries": PROBES} if self.chooses else {}

    def fit_queries(self, kept: Mapping[str, Tensor], q: Tensor | None, valid: Tensor | None, spec: CodecSpec) -> None:
        if self.chooses and q is not None:
            kept["queries"].copy_(some_queries(q, valid, kept["queries"].dtype))

    def quantize(self, x: Tensor, spec: CodecSpec, fitted: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        """Quantize whole pages ``[B, H, N * P, D]`` to marks ``[B, H, N, 1, P / 8]`` uint8, then the page tensors of
        salient tokens, then those of the other tokens.

        fitted: for keys the probes ``[B, H, Q, D]``; for values the marks of their keys ``[B, H, N, P / 8, 1]``.
        """
        (chosen,), counts, head_dim = fitted, tokens_of(spec), x.shape[-1]
        marks = chosen if self.follows_keys else marked(x, spec, chosen)
        order = slots(marks.mT, counts[0]).argsort(-1).unsqueeze(-1)
        by_kind = x.unflatten(2, (-1, spec.page_size)).gather(3, order.expand(*order.shape[:-1], head_dim))
        kept = [marks.mT]
        for part, each in zip(by_kind.split(counts, 3), kinds(spec, head_dim), strict=True):
            codes, scale, zero_point, *factor = quantize_pages(part.flatten(2, 3), each)
            kept += [codes, scale, zero_point, *(factor or [scale[..., :0, :]])]
        return tuple(kept)

    def dequantize(self, *kept_and_spec: Any) -> Tensor:
        """Inverse of `quantize` up to rounding: ``[B, H, N * P, D]`` float32."""
        marks, *kept, spec = kept_and_spec
        each = zip(of_kinds(kept), kinds(spec, kept[0].shape[-1]), strict=True)
        by_kind = torch.cat([dequantize_pages(*own, of).unflatten(2, (-1, of.page_size)) for own, of in each], 3)
        where = slots(marks, tokens_of(spec)[0]).unsqueeze(-1)
        return by_kind.gather(3, where.expand_as(by_kind)).flatten(2, 3)

"""Some tokens of a page in twice the bits: those that matter most by ZipCache's saliency (arXiv 2405.14256, section
4.2). Either kind of token is coded by itself, as if it were a page: keys per channel, values per token behind a factor
for each channel.

The saliency of token i is its normalised attention, ``sum_k A[k, i] / nnz(A[:, i])`` over probe tokens k. Probes are
`QUERIES` of the prompt's queries, spread evenly, and A is their softmax over all tokens that are packed at once: no
causal mask, so that every probe sees every token and the divisor is the same for all. Values have more bits where their
keys do. A page keeps its tokens by kind, the salient ones first, and a bit for each that says which it is.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import KVPassError
from ..layout.retention import Retention
from .bitpack import byte_rows, pack, smallest_page, unpack
from .kept import CODECS, Codec, Kept, built_in, codec_of
from .pages import decode_pages, encode_pages
from .spec import CodecSpec


def tokens_of(spec: CodecSpec) -> tuple[int, int]:
    """How many tokens of a page are salient, and how many are not. Raises `KVPassError` if these are no pages."""
    salient = round(spec.quantizer.share * spec.page_size)
    counts = salient, spec.page_size - salient
    for count, bits in zip(counts, (2 * spec.bits, spec.bits), strict=True):
        if count <= 0 or count % smallest_page(bits):
            raise KVPassError(
                f"share={spec.quantizer.share}: of {spec.page_size} tokens {counts[0]} would have {2 * spec.bits} bits "
                f"and {counts[1]} have {spec.bits}, which do not fill whole bytes."
            )
    return counts


@cache
def kinds(spec: CodecSpec, head_dim: int) -> list[CodecSpec]:
    """What salient tokens, and the others, are coded by: as pages of their own."""
    keys, specs = spec.quantizer.per == "channel", []
    for count, bits in zip(tokens_of(spec), (2 * spec.bits, spec.bits), strict=True):
        quantizer = replace(
            built_in(spec).quantizer, bits=bits, codec="" if keys else "channel-separable",
            group_size=count if keys else head_dim, chosen_by="",
        )  # fmt: skip
        specs.append(replace(spec, quantizer=quantizer, retention=Retention(count, count)))
    return specs


class Page(NamedTuple):
    """What pages keep: which tokens are salient ``[..., N, P / 8, 1]``, and of either kind what its codec keeps."""

    marks: Tensor
    of_kinds: list[list[Tensor]]


def _shapes(spec: CodecSpec, head_dim: int, name: str) -> list[tuple[int, ...]]:
    return [codec_of(each).tensors[name].shape(each, head_dim) for each in kinds(spec, head_dim)]


def opened(kept: Sequence[Tensor], spec: CodecSpec, head_dim: int) -> Page:
    """The `Page` of what is kept."""
    codes, *params = kept
    shapes = [(spec.page_size // 8, 1), *_shapes(spec, head_dim, "codes")]
    marks, *of_codes = codes.squeeze(-2).split([prod(shape) for shape in shapes], -1)
    of_kinds = [[part.unflatten(-1, shape)] for part, shape in zip(of_codes, shapes[1:], strict=True)]
    for name, both in zip(("scale", "zero_point", "factor"), params, strict=True):
        if both.shape[-2]:
            rows = [shape[0] for shape in _shapes(spec, head_dim, name)]
            for found, part in zip(of_kinds, both.split(rows, -2), strict=True):
                found.append(part)
    return Page(marks.unsqueeze(-1), of_kinds)


def slots(marks: Tensor, salient: int) -> Tensor:
    """Where pages ``[..., N, P / 8, 1]`` keep each of their tokens, of which so many are salient: ``[..., N, P]``
    int64."""
    is_salient = unpack(marks, 1).squeeze(-1)
    token = torch.arange(is_salient.shape[-1], device=marks.device)
    before = (is_salient.float() @ (token[:, None] < token).float()).long()  # how many salient ones come before
    other = (token - before + salient).clamp(max=len(token) - 1)  # pages that are not written have no salient ones
    return torch.where(is_salient > 0, before, other)


def saliency(x: Tensor, queries: Tensor) -> Tensor:
    """The normalised attention that probes ``[B, H, Q, D]``, scaled as attention does, pay to keys ``[B, H, T, D]``:
    ``[B, H, T]`` float32."""
    return (x.float() @ queries.float().mT).softmax(2).mean(-1)


def _marked(x: Tensor, spec: CodecSpec, queries: Tensor) -> Tensor:
    paid = saliency(x, queries).unflatten(2, (-1, spec.page_size))
    most = paid.topk(tokens_of(spec)[0], -1).indices
    return pack(torch.zeros_like(paid, dtype=torch.uint8).scatter(-1, most, 1).unsqueeze(-1), 1)


def encode(x: Tensor, spec: CodecSpec, fitted: Sequence[Tensor], stored: None = None) -> tuple[Tensor, ...]:
    """What is kept of whole pages ``[B, H, N * P, D]``: bytes ``[B, H, N, 1, .]``, marks first, and scales, zero points
    and factors of both kinds of tokens.

    fitted: the probes ``[B, H, Q, D]`` for keys; for values the marks of their keys.
    """
    (chosen,), counts, head_dim = fitted, tokens_of(spec), x.shape[-1]
    marks = chosen if spec.quantizer.chosen_by == "keys" else _marked(x, spec, chosen)
    order = slots(marks, counts[0]).argsort(-1).unsqueeze(-1)
    by_kind = x.unflatten(2, (-1, spec.page_size)).gather(3, order.expand(*order.shape[:-1], head_dim))
    parts = zip(by_kind.split(counts, 3), kinds(spec, head_dim), strict=True)
    kept = [encode_pages(part.flatten(2, 3), each) for part, each in parts]
    codes = torch.cat([marks.flatten(-2), *(each[0].flatten(-2) for each in kept)], -1).unsqueeze(-2)
    scale, zero_point, *factor = (torch.cat(both, -2) for both in list(zip(*kept, strict=True))[1:])
    return codes, scale, zero_point, *(factor or [scale[..., :0, :].expand(*scale.shape[:-2], 0, head_dim)])


def decode(codes: Tensor, scale: Tensor, zero_point: Tensor, factor: Tensor, spec: CodecSpec) -> Tensor:
    """Inverse of `encode` up to rounding: ``[B, H, N * P, D]`` float32."""
    head_dim = factor.shape[-1]
    page = opened((codes, scale, zero_point, factor), spec, head_dim)
    parts = [
        decode_pages(*kept, each).unflatten(2, (-1, each.page_size))
        for kept, each in zip(page.of_kinds, kinds(spec, head_dim), strict=True)
    ]
    where = slots(page.marks, tokens_of(spec)[0]).unsqueeze(-1)
    return torch.cat(parts, 3).gather(3, where.expand(*where.shape[:-1], head_dim)).flatten(2, 3)


def _check(spec: CodecSpec) -> None:
    quantizer, of = spec.quantizer, spec.transform
    if quantizer.bits > 4 or quantizer.grid or quantizer.eta or quantizer.subspace or of.rotation is not None:
        raise KVPassError("Tokens have two widths where codes are uniform, up to 4 bits: no grid, eta or rotation.")
    if of.pre_rope:
        raise KVPassError("Saliency is attention behind rotary embedding: use rope='post'.")
    if not quantizer.chosen_by:
        raise KVPassError("Which tokens are salient is chosen by queries, and for values by their keys: chosen_by.")
    tokens_of(spec)


def _bytes(spec: CodecSpec, head_dim: int) -> tuple[int, int]:
    return 1, byte_rows(spec.page_size, 1) + sum(map(prod, _shapes(spec, head_dim, "codes")))


def _params(spec: CodecSpec, head_dim: int) -> tuple[int, int]:
    (rows, columns), (more, _) = _shapes(spec, head_dim, "scale")
    return rows + more, columns


CODECS["salient"] = Codec(
    {
        "codes": Kept(_bytes, torch.uint8),
        "scale": Kept(_params),
        "zero_point": Kept(_params),
        "factor": Kept(lambda spec, head_dim: (0 if spec.quantizer.per == "channel" else 2, head_dim)),
    },
    encode,
    decode,
    check=_check,
)

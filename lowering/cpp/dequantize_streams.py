"""Dequantizes chunks whose codes are entropy coded (`kvpass.codec.entropy_coding`) on CPUs: from decompressed streams
to tokens, without codes or coordinates of all tokens in memory."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from kvpass.codec.entropy_coding import Streams
from kvpass.codec.page_rope import PageTables
from kvpass.codec.rope import parse_rope
from kvpass.codec.shares import Shares
from kvpass.codec.spec import CodecSpec

from .attend_codes import LANES
from .build import BYTES, FLOATS, INT32S, INT64S, NUMBER, WRITTEN_FLOATS, build, source

_TOKENS = 4  # of one rank, that a kernel dequantizes at a time
_TYPES = [BYTES, *2 * [INT64S], INT32S, FLOATS, BYTES, *3 * [FLOATS], WRITTEN_FLOATS, *6 * [NUMBER]]


def serves(spec: CodecSpec) -> bool:
    """Whether there is a kernel for pages of ``spec``."""
    shares = Shares.of(spec)
    return not shares.block_size % LANES and not spec.page_size % (_TOKENS * shares.ranks)


@cache
def kernel(spec: CodecSpec, head_dim: int, rope: str) -> Callable[..., None]:
    """The kernel for pages of ``spec``, whose tokens have page-relative RoPE ``rope``, or none."""
    shares, (pairs, interleaved) = Shares.of(spec), parse_rope(rope) if rope else (0, False)
    defines = dict(
        HEAD=head_dim, BLOCK=shares.block_size, PAGE=spec.page_size, RANKS=shares.ranks, PAIRS=pairs,
        INTERLEAVED=int(interleaved), CENTERED=int(spec.transform.center), TOKENS=_TOKENS,
    )  # fmt: skip
    return build(source(defines, "dequantize_streams.cpp"), _TYPES)


def dequantize(
    streams: Streams, places: Tensor, basis: Tensor, ranks: Tensor | None, mean: Tensor | None,
    middles: PageTables | None, spec: CodecSpec, out: Tensor,
) -> None:  # fmt: skip
    """Dequantize the keys, or the values, of a chunk of several layers into ``out`` ``[L, H, T, D]`` float32.

    streams: of the whole chunk.
    places: ``[R * L * H * D, 2]`` int64, of each rank, layer, head and coordinate: its row among the rows of all
        streams, and its stream.
    basis: ``[R, L, H, D, b]`` float32, times the step of each coordinate.
    ranks: ``[L, H, N, P / 8, 1]`` uint8, the masks of high-precision tokens, if tokens have ranks.
    mean: ``[L, H, P or 1, D]`` float32, which is added, if ``spec`` centers.
    middles: rotary tables ``[N, p]`` of the middle tokens of pages, for page-relative RoPE.
    """
    layers, heads, tokens, head_dim = out.shape
    none = out.new_empty(0)
    cos, sin, rope = (none, none, "") if middles is None else middles
    masks = none.byte() if ranks is None else ranks.contiguous()
    means = none if mean is None else mean.expand(-1, -1, spec.page_size, -1).contiguous()
    kernel(spec.stored_as, head_dim, rope)(
        streams.data, streams.table, places, streams.exceptions, basis, masks, means, cos, sin, out,
        len(streams.table), len(streams.exceptions), layers * heads, tokens // spec.page_size, out.stride(1),
        torch.get_num_threads(),
    )  # fmt: skip

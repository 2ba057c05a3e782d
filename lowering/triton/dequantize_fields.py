"""Dequantizes pages with per-channel bit widths (`kvpass.codec.allocation`, `kvpass.codec.layer_pages`), and attends
with many query tokens to a tile of pages at a time."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpass.codec.spec import CodecSpec, parse
from kvpass.codec.token_ranks import Ranked

from .. import reference
from ..append import PER_CHANNEL_PAGES
from ..call_types import AttendCall, DequantizeCall
from ..table import FEW, DispatchKey, implements
from ..tiles import attend_in_tiles, refuses_call
from .allocated import Fitted, number_of
from .configs import cdiv, power_of_two, refuses_device
from .kernel_arguments import OPERANDS, check_values
from .read_fields import (
    columns_of,
    middle_of,
    pages_of_head,
    piece_fields,
    pieces_of,
    ranks_of,
    tile_gains,
    tile_numbers,
)

_CHANNELS = 64  # per program


@triton.jit(do_not_specialize=["count", "size"])
def dequantize_fields(
    pages, places, middles, rows, out, count, size, HEADS: tl.constexpr, DIM: tl.constexpr, PAGES: tl.constexpr,
    CHANNELS: tl.constexpr, L: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Write the tokens of ``count`` pages to ``out`` ``[BH, count * P, D]`` float32, in token order.

    rows: what each field adds to the channels of a token, per unit of field and gain, ``[BH, width, D]`` float32. If
    pages hold all heads, ``places`` and ``middles`` are results of `share_rows`, and pages have ``size`` bytes.
    Grid: KV heads of all samples; runs of ``PAGES`` pages; runs of ``CHANNELS`` channels.
    """
    group, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * PAGES
    own = pages_of_head(pages, places, size, group, count, HEADS, L)
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    rows, out = rows + group * L.width * DIM, out + group * count * L.page * DIM
    for rank in tl.static_range(ranks_of(L)):
        found = tl.zeros((PAGES * L.tokens, CHANNELS), tl.float32)
        for i in tl.static_range(pieces_of(L, rank)):
            field = columns_of(L, rank, i)
            middle = tl.load(middles + group * L.width + field)[None, :] if L.shared else middle_of(L, rank, i)
            fields = piece_fields(own, first, count, rank, i, PAGES, L, N) - middle
            of_field = tl.load(rows + field[:, None] * DIM + channel[None, :], mask=(channel < DIM)[None, :], other=0)
            found = tl.dot(fields, of_field, found, input_precision="tf32x3")
        found *= tile_gains(own, first, count, rank, PAGES, L, N, 0)[:, None]
        token = tile_numbers(own, first, count, rank, PAGES, L) - L.sinks
        real = (token < count * L.page)[:, None] & (channel < DIM)[None, :]
        tl.store(out + token[:, None] * DIM + channel[None, :], found, mask=real)


def dequantize_pages(kept: Sequence[Tensor], spec: CodecSpec, references=(), predictor=()) -> Tensor:
    """`reference.dequantize_predicted` of these codecs, which have no predictors: ``[B, H, N * P, D]`` float32."""
    pages, basis, fields = kept
    (batch, _, count, *_), (_, heads, head_dim, _) = pages.shape, basis.shape
    check_values(count * spec.page_size, head_dim, f"{head_dim} channels")
    out = torch.empty(batch, heads, count * spec.page_size, head_dim, device=pages.device)
    with torch.cuda.device_of(pages):
        own = Fitted.of(pages.contiguous(), basis, fields, batch, spec, torch.float32)
        together = cdiv(32 if head_dim <= 128 else 16, own.layout.tokens)  # longer tiles spill registers
        dequantize_fields[batch * heads, cdiv(count, together), cdiv(head_dim, _CHANNELS)](
            own.pages, own.places, own.middles, own.rows, out, count, own.size, heads, head_dim, together, _CHANNELS,
            own.layout, number_of((own.layout,), OPERANDS[torch.float32]), num_warps=8, enable_fp_fusion=True,
        )  # fmt: skip
    return out


def _refuses(dispatch: DispatchKey) -> str | None:
    if reason := refuses_device(dispatch):
        return reason
    specs = [parse(text) for text in dispatch.specs]
    if not specs or not all(isinstance(spec.codec, Ranked) for spec in specs):
        return "it dequantizes pages with per-channel bit widths."
    odd = next((spec.page_size for spec in specs if not power_of_two(spec.page_size)), None)
    return None if odd is None else f"page_size must be a power of two, not {odd}."


def _refuses_prompts(dispatch: DispatchKey) -> str | None:
    if dispatch.queries:
        return f"it attends with more than {FEW} query tokens."
    return _refuses(dispatch) or refuses_call(dispatch)


@implements("dequantize", "triton", has=(PER_CHANNEL_PAGES,), refuses=_refuses, by_name_only=True)
def dequantize(call: DequantizeCall) -> Tensor:
    return reference.read(dequantize_pages, call)


@implements(
    "attend", "triton-tiles", has=2 * (PER_CHANNEL_PAGES,), refuses=_refuses_prompts, by_name_only=True,
    lowering="triton",
)  # fmt: skip
def attend(call: AttendCall) -> list[Tensor]:
    return attend_in_tiles(call, dequantize_pages)

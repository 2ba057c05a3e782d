"""Quantizes pages that hold all heads (`kvpass.codec.layer_pages`): one launch finds gains and codes of all heads and
writes them where `share_rows` says."""

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpass.codec.layer_pages import LayerPages
from kvpass.codec.spec import CodecSpec
from kvpass.codec.transform_coding import DISTORTION, GAINS_TRIED, LEAST_GAIN, OCTAVE, PAIRS, UNIT, steps_of

from .allocated import layout_of, places_of
from .read_fields import slots_of
from .read_shares import LINES

_LEVELS: tl.constexpr = tl.constexpr(PAIRS)
_OCTAVE, _UNIT, _LEAST = tl.constexpr(OCTAVE), tl.constexpr(UNIT), tl.constexpr(LEAST_GAIN)
_OF_WARP = 512  # values of a tile per warp: more spill registers
_INTEGER = tl.constexpr(12582912.0)  # added and subtracted, it rounds half to even


@triton.jit
def _rounded(x):
    return (x + _INTEGER) - _INTEGER


@triton.jit
def _token_of_slot(marks, page_size: tl.constexpr, tokens: tl.constexpr, rank):
    """The token of a page in each slot of a rank. marks: the mask of high-precision tokens."""
    token = tl.arange(0, page_size)
    rich = tl.load(marks + token % (page_size // 8)).to(tl.int32) >> token // (page_size // 8) & 1
    mine = slots_of(rich, token, tokens, 0)[:, None] == (rank * tokens + tl.arange(0, tokens))[None, :]
    return tl.sum(tl.where(mine, token[:, None], 0), 0)


@triton.jit
def _best_gain(units, step, most, worth, TRIED: tl.constexpr):
    """`kvpass.codec.transform_coding.best_gain`: gain levels ``[tokens]``, and codes."""
    used = tl.sum((worth > 0).to(tl.float32), 1)
    size = tl.sqrt(tl.sum(tl.where(worth > 0, units * units, 0.0), 1) / tl.maximum(used, 1.0))
    first = _rounded(tl.log2(tl.maximum(size, _LEAST)) * _OCTAVE)
    least, levels = tl.full(first.shape, float("inf"), tl.float32), first * 0
    codes = units * 0
    for i in tl.static_range(len(TRIED)):
        tried = tl.minimum(tl.maximum(first + TRIED[i], -_UNIT), 255 - _UNIT)
        stride = step * tl.exp2(tried / _OCTAVE)[:, None]
        found = tl.minimum(tl.maximum(_rounded(tl.div_rn(units, stride) + most * 0.5), 0.0), most)
        off = (found - most * 0.5) * stride - units
        error = tl.sum(off * off * worth, 1)
        better = error < least
        least, levels = tl.where(better, error, least), tl.where(better, tried, levels)
        codes = tl.where(better[:, None], found, codes)
    return levels, codes.to(tl.int32)


@triton.jit
def _packed(fields, PER_BYTE: tl.constexpr):
    """Bytes of ``fields`` ``[tokens, coordinates]``, of ``8 / PER_BYTE`` bits each, as `kvpass.codec.bitpack.pack`."""
    planes = tl.reshape(fields, (PER_BYTE, fields.shape[0] // PER_BYTE, fields.shape[1]))
    shift = tl.arange(0, PER_BYTE) * (8 // PER_BYTE)
    return tl.sum(planes << shift[:, None, None], 0).to(tl.uint8)


@triton.jit(do_not_specialize=["pages", "size", "own"])
def quantize_shares(
    units, marks, widths, places, constants, out, pages, size, own, HEADS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, PAGE: tl.constexpr, RANKS: tl.constexpr, TRIED: tl.constexpr,
):  # fmt: skip
    """Quantize coordinates ``units`` ``[BH, pages * P, D]`` to ``out`` ``[B, pages, size]``.

    marks: masks of high-precision tokens ``[BH, pages, P / 8]``; None without ranks. own: number of heads that
    ``widths`` ``[., ranks, D]`` has. constants: step size, largest code and weight of an error by bit width.
    Grid: KV heads of all samples; pages; ranks.
    """
    group, page, rank = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    tokens: tl.constexpr = PAGE // RANKS
    marked: tl.constexpr = PAGE // 8
    column, head = tl.arange(0, WIDTH), group % HEADS
    out += (group // HEADS * pages + page) * size
    token = tl.arange(0, tokens)
    if marks is not None:
        marks += (group * pages + page) * marked
        token = _token_of_slot(marks, PAGE, tokens, rank)
        if rank == 0:
            row = tl.arange(0, marked)
            tl.store(out + row * HEADS + head, tl.load(marks + row))
    real = column < DIM
    width = tl.load(widths + (group % own * RANKS + rank) * DIM + column, mask=real, other=0).to(tl.int32)
    step, most, worth = (
        tl.load(constants + width)[None, :], tl.load(constants + 8 + width)[None, :],
        tl.load(constants + 16 + width)[None, :],
    )  # fmt: skip
    at = units + (group * pages + page) * PAGE * DIM + token[:, None] * DIM + column[None, :]
    levels, codes = _best_gain(tl.load(at, mask=real[None, :], other=0), step, most, worth, TRIED)
    table = places + (group * RANKS + rank) * LINES * WIDTH
    numbers = table + (LINES - 1) * WIDTH
    place_of = table + column // 2 + column % 2 * (WIDTH // 2)
    row = tl.arange(0, tokens // 4)[:, None] * tl.load(numbers)
    for level in tl.static_range(_LEVELS):
        place = tl.load(place_of + level * WIDTH)[None, :]
        there = tl.broadcast_to((width // 2 > level)[None, :], (tokens // 4, WIDTH))
        tl.store(out + (row + place), _packed(codes >> 2 * level & 3, 4), mask=there)
    row = tl.arange(0, tokens // 8)[:, None] * tl.load(numbers + 1)
    place = tl.load(place_of + _LEVELS * WIDTH)[None, :]
    there = tl.broadcast_to((width % 2 > 0)[None, :], (tokens // 8, WIDTH))
    highest = codes >> tl.maximum(width - 1, 0)[None, :] & 1
    tl.store(out + (row + place), _packed(highest, 8), mask=there)
    start, each = tl.load(numbers + 3), tl.load(numbers + 2)
    has_bits = tl.arange(0, tokens) * 0 + tl.max(width, 0) > 0
    tl.store(out + (start + tl.arange(0, tokens) * each), (levels + _UNIT).to(tl.uint8), mask=has_bits)


@cache
def _constants(device: torch.device) -> Tensor:
    """Step size, largest code and weight of an error, for widths from 0 to 7: ``[3, 8]``."""
    widths = torch.arange(8)
    worth = torch.where(widths > 0, 1 / torch.tensor(DISTORTION[:8]), 0.0)
    return torch.stack([steps_of(widths.device)[:8], 2.0**widths - 1, worth]).to(device)


def quantize(x: Tensor, fitted: Sequence[Tensor], spec: CodecSpec) -> tuple[Tensor]:
    """Quantize whole pages ``[B, H, N * P, D]`` to bytes ``[B, 1, N, 1, bytes]``, as `LayerPages.quantize`."""
    codec = LayerPages.of(spec)
    bytes_of_page, basis, widths, chosen = codec.opened(fitted, spec)
    units, high_mask = codec.units(x, basis, spec, chosen)
    (batch, heads, tokens, head_dim), layout = x.shape, layout_of(spec, x.shape[3])
    pages, ranks = tokens // spec.page_size, len(layout.pieces)
    width, of_rank = layout.width // ranks, spec.page_size // ranks
    widths = widths.contiguous()
    out = torch.empty((batch, 1, pages, 1, bytes_of_page), dtype=torch.uint8, device=x.device)
    _, places, _ = places_of(basis.contiguous(), widths, batch, spec, torch.float32)
    with torch.cuda.device_of(x):
        quantize_shares[batch * heads, pages, ranks](
            units.contiguous(), None if high_mask is None else high_mask.contiguous(), widths, places,
            _constants(x.device), out, pages, bytes_of_page, len(widths) * heads, heads, head_dim, width,
            spec.page_size, ranks, GAINS_TRIED, num_warps=min(16, max(4, of_rank * width // _OF_WARP)),
            enable_fp_fusion=False,
        )  # fmt: skip
    return (out,)

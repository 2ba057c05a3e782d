"""Launches attention over pages with per-channel bit widths, and decides which calls are supported."""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpass.codec.allocation import Allocation
from kvpass.codec.bitpack import byte_rows
from kvpass.codec.layer_pages import LayerPages
from kvpass.codec.rope import parse_rope
from kvpass.codec.spec import CodecSpec
from kvpass.codec.tensors import Pack
from kvpass.codec.token_ranks import Ranked
from kvpass.codec.transform_coding import FIELD_BITS, steps_of, weights
from kvpass.layout.pool import whole
from kvpass.layout.window import on_device

from ..call_types import AttendCall
from .attend_fields import attend_fields, fields_to_channels, merge_fields
from .configs import AttendConfig, cdiv, splits_of
from .kernel_arguments import MERGED_AT_ONCE, OPERANDS, check_values, mask_and_strides, operand_dtype, rules_of
from .page_queries import field_rows, mean_rows, page_queries
from .read_fields import LEAST, Fields, Number, Piece
from .read_shares import LINES, share_rows
from .scores import LOG2E
from .unpacking import Layout

_NUMBERS = {tl.bfloat16: Number(tl.bfloat16, 7, 0x43), tl.float16: Number(tl.float16, 10, 0x64)}
_ROWS = 16  # fields per program of `field_rows`
_LINES = 64  # pages times rows per tile of `page_queries`
_CHANNELS = 32  # channels per program of `fields_to_channels`


def refuses_fields(specs: list[CodecSpec]) -> str | None:
    """The reason why attention over specs with per-channel bit widths is not supported, or None. Other features are
    checked elsewhere."""
    of_keys, of_values = (spec.codec for spec in specs)
    if not isinstance(of_keys, Ranked) or type(of_values) is not type(of_keys):
        return "keys and values must both have per-channel bit widths of the same kind, or neither."
    if (of_values.ranked, of_values.follows) != (of_keys.ranked, of_keys.ranked):
        return "values must have the same per-token bit widths as their keys."
    transform = specs[0].transform
    if transform.pre_rope:
        return (
            "keys stored before rotary embedding in a fitted basis have to be dequantized first: queries cannot be "
            "projected onto it."
        )
    return None


def _widths(count: int) -> list[int]:
    """Split ``count`` columns into runs of power-of-two widths, with little padding."""
    found, padded = [], max(LEAST.value, triton.next_power_of_2(count))
    while count > LEAST.value and padded > 4 * count // 3:
        found.append(padded // 2)
        count -= padded // 2
        padded = max(LEAST.value, triton.next_power_of_2(count))
    return [*found, padded]


@cache
def layout_of(spec: CodecSpec, head_dim: int) -> Fields:
    """The layout of pages of ``spec`` for kernels."""
    if isinstance(spec.codec, LayerPages):
        return _layout_of_layers(spec, head_dim)
    allocation, retention = Allocation.of(spec), spec.retention
    start, at, pieces, gains = byte_rows(spec.page_size, 1) if allocation.ranked else 0, 0, [], []
    for tokens, counts in zip(allocation.tokens(spec.page_size), allocation.counts(head_dim), strict=True):
        of_rank = []
        for bits, count in zip(FIELD_BITS, counts, strict=True):
            first = 0
            for width in _widths(count) if count else ():
                of_rank.append(Piece(bits, start, count, first, min(width, count - first), width, at))
                first, at = first + width, at + width
            start += byte_rows(tokens, bits) * count
        pieces.append(tuple(of_rank))
        gains.append(start)
        start += tokens
    return Fields(
        start, spec.page_size, tokens, tuple(gains), tuple(pieces), at, allocation.ranked, retention.sinks,
        retention.residual,
    )  # fmt: skip


def _layout_of_layers(spec: CodecSpec, head_dim: int) -> Fields:
    tokens, width = LayerPages.of(spec).tokens(spec.page_size), max(LEAST.value, triton.next_power_of_2(head_dim))
    pieces = tuple((Piece(0, 0, 0, 0, head_dim, width, rank * width),) for rank in range(len(tokens)))
    return Fields(
        0, spec.page_size, tokens[0], (0,) * len(tokens), pieces, len(tokens) * width, len(tokens) > 1,
        spec.retention.sinks, spec.retention.residual, shared=True,
    )  # fmt: skip


@cache
def _columns(spec: CodecSpec, head_dim: int, device: torch.device) -> Tensor:
    """The field of each column of the padded fields of a head; -1 for padding."""
    of_all, first = [], 0
    for pieces, counts in zip(layout_of(spec, head_dim).pieces, Allocation.of(spec).counts(head_dim), strict=True):
        for bits, count in zip(FIELD_BITS, counts, strict=True):
            for piece in (one for one in pieces if one.bits == bits):
                numbers = range(first + piece.first, first + piece.first + piece.real)
                of_all += [*numbers, *[-1] * (piece.width - piece.real)]
            first += count
    return torch.tensor(of_all, dtype=torch.int32, device=device)


_weights = cache(weights)


def number_of(layouts: tuple[Fields, ...], operand: tl.dtype) -> Number:
    """How fields become floats: read four bytes at a time if all offsets are multiples of 4."""
    pieces = [piece for layout in layouts for of_rank in layout.pieces for piece in of_rank]
    offsets = [offset for piece in pieces for offset in (piece.start, piece.row)]
    offsets += [offset for layout in layouts for offset in (*layout.gains, layout.size)]
    fours = not any(offset % 4 for offset in offsets)
    return _NUMBERS[operand] if fours and operand in _NUMBERS else Number(operand, 0, 0)


def _config(rows: int, tokens: int, shared: bool) -> tuple[AttendConfig, int]:
    """The configuration for ``rows`` query rows per KV head and ``tokens`` tokens per page and rank, and the number of
    pages per iteration."""
    of_tile = 4 if rows <= 4 and not shared else 8  # products of 16 rows spill registers, as do codes of 4 pages
    pages = max(16 // of_tile, cdiv(32, tokens))
    stages = 1 if shared else 3  # with more, tables are prefetched, too, which costs more than it gains
    return AttendConfig(of_tile * pages, rows=pages, together=1, exact=32, warps=4, stages=stages), pages


def _exact_layout(spec: CodecSpec, head_dim: int, rope: str = "") -> Layout:
    retention = spec.retention
    return Layout(
        8, 1, False, head_dim, retention.page_size, 1, retention.sinks, retention.residual, retention.ring_size,
        head_dim, *(parse_rope(rope) if rope else ()),
    )  # fmt: skip


def places_of(
    basis: Tensor, widths: Tensor, batch: int, spec: CodecSpec, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The results of `share_rows` for ``batch`` samples: ``rows`` in ``dtype``, ``places`` and ``middles``."""
    (_, heads, head_dim, size), layout = basis.shape, layout_of(spec, basis.shape[2])
    ranks = len(layout.pieces)
    width, device = layout.width // ranks, basis.device
    rows = torch.empty((batch * heads, layout.width, head_dim), dtype=dtype, device=device)
    places = torch.empty((batch * heads, ranks, LINES.value, width), dtype=torch.int32, device=device)
    middles = torch.empty((batch * heads, layout.width), dtype=torch.float32, device=device)
    share_rows[batch * heads, ranks, cdiv(head_dim, _CHANNELS)](
        basis, widths, steps_of(device), rows, places, middles, len(widths) * heads, head_dim, size, heads,
        triton.next_power_of_2(heads), width, layout.page, ranks, _CHANNELS,
    )  # fmt: skip
    return rows, places, middles


@dataclass
class Fitted:
    """The pages of the keys or values of a layer, and the contributions of their fields to channels (`field_rows`,
    `share_rows`). If pages hold all heads, also where fields are, the midpoints of codes, and bytes per page."""

    pages: Tensor
    rows: Tensor
    layout: Fields
    places: Tensor | None = None
    middles: Tensor | None = None
    size: int = 0

    @classmethod
    def of_pack(cls, pack: Pack, n: int, spec: CodecSpec, dtype: torch.dtype) -> "Fitted":
        pages, (basis, fields) = whole(pack.pools[0], spec.retention.pages(n)), pack.dequantizes_with(spec)
        return cls.of(pages, basis, fields, len(pack.ring), spec, dtype)

    @classmethod
    def of(
        cls, pages: Tensor, basis: Tensor, fields: Tensor, batch: int, spec: CodecSpec, dtype: torch.dtype
    ) -> "Fitted":
        """fields: the places of fields or, if pages hold all heads, the bit widths of coordinates. dtype: of
        ``rows``."""
        basis, fields = basis.contiguous(), fields.contiguous()
        (_, heads, head_dim, size), layout = basis.shape, layout_of(spec, basis.shape[2])
        if not layout.shared:
            groups = batch * heads
            rows = torch.empty((groups, layout.width, head_dim), dtype=dtype, device=basis.device)
            field_rows[groups, layout.width // _ROWS](
                basis, fields, _columns(spec, head_dim, basis.device), _weights(basis.device), rows, head_dim, size,
                fields.shape[-1], layout.width, _ROWS,
            )  # fmt: skip
            return cls(pages, rows, layout)
        rows, places, middles = places_of(basis, fields, batch, spec, dtype)
        return cls(pages, rows, layout, places, middles, pages.shape[-1])

    @property
    def capacity(self) -> int:
        """Capacity of the pool in pages."""
        return self.pages.shape[2]


class _Projected(NamedTuple):
    """Query rows as each page sees them: the results of `page_queries`."""

    fields: Tensor
    sums: Tensor
    mean: Tensor | None

    @classmethod
    def of(
        cls, q: Tensor, keys: Fitted, center: Tensor | None, tables: "_Tables", length: Tensor, scale: float,
        groups: int, R: Layout, N: Number, dtype: torch.dtype,
    ) -> "_Projected":  # fmt: skip
        K, (batch, heads, queries, head_dim) = keys.layout, q.shape
        rows, page_rope = heads // groups * queries, tables.cos is not None
        size, runs = (batch * groups, keys.capacity if page_rope else 1, rows), K.width // LEAST.value
        fields, sums = q.new_empty((*size, K.width), dtype=dtype), q.new_empty((*size, runs), dtype=torch.float32)
        mean = of_mean = None
        if center is not None and page_rope:
            mean = q.new_empty((*size, K.page), dtype=torch.float32)
            of_mean = q.new_empty((batch * groups, K.page, head_dim), dtype=dtype)
            center = center.expand(batch, -1, -1, -1).contiguous()
            mean_rows[batch * groups,](center, *tables[:2], of_mean, *tables.strides, groups, R, K)
        elif center is not None:
            mean = (q.float().view(batch, groups, rows, head_dim) * center.float()).sum(-1) * (scale * LOG2E.value)
        page_queries[batch * groups, max(1, cdiv(size[1] * rows, _LINES))](
            q, keys.rows, keys.middles, of_mean, keys.pages, keys.places, keys.size, *tables[:2], fields,
            sums, mean, length, scale, rows, size[1], *tables.strides, groups, R, K, N, _LINES, LEAST.value, 3,
            num_warps=4, maxnreg=128 if q.element_size() == 2 and head_dim <= 128 else None,
        )  # fmt: skip
        return cls(fields, sums, mean)


class _Tables(NamedTuple):
    """Rotary tables of pages, ``[B, P + N, p]`` each; None without page-relative RoPE. strides: of samples and rows."""

    cos: Tensor | None
    sin: Tensor | None
    strides: tuple[int, ...]
    rope: str

    @classmethod
    def of(cls, key: Pack, batch: int) -> "_Tables":
        if key.page_tables is None or not key.page_tables.rope:
            return cls(None, None, (0, 0), "")
        cos, sin, rope = key.page_tables
        cos, sin = (table.contiguous().expand(batch, -1, -1) for table in (cos, sin))
        return cls(cos, sin, cos.stride()[:2], rope)


def _merged(summed: Tensor, exact: Tensor, partial_lse: Tensor, values: Fitted, call: AttendCall[Pack]) -> list[Tensor]:
    """Merge the results of splits and of exact tokens, and convert them to channels: what ``call`` returns."""
    (heads_of_all, splits, rows, width), (_, heads, queries, head_dim) = summed.shape, call.q.shape
    merged, of_exact = exact.new_empty((heads_of_all, rows, width)), exact.new_empty((heads_of_all, rows))
    lse = exact.new_empty(call.q.shape[:3]) if call.with_lse else None
    merge_fields[heads_of_all * rows, width // LEAST.value](
        summed, partial_lse, call.sinks, merged, of_exact, lse, rows, splits, queries, heads, width, MERGED_AT_ONCE,
        LEAST.value, num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip
    out = torch.empty_like(call.q, memory_format=torch.contiguous_format)
    fields_to_channels[heads_of_all * rows, cdiv(head_dim, _CHANNELS)](
        merged, exact, of_exact, values.rows, out, rows, head_dim, width, _CHANNELS, LEAST.value, enable_fp_fusion=True
    )
    return [out] if lse is None else [out, lse]


def attend_allocated(call: AttendCall[Pack]) -> list[Tensor]:
    """What ``call`` returns, which must not ask for attention mass."""
    q, key, value, n, k_new, v_new, mask = call[:7]
    k_spec, v_spec = call.specs
    q, k_new, (batch, heads, queries, head_dim), groups = q.contiguous(), k_new.contiguous(), q.shape, k_new.shape[1]
    rows, length = heads // groups * queries, on_device(call.length, n, q.device)
    widest = max(head_dim * (2 * groups if isinstance(k_spec.codec, LayerPages) else 1), 2 * rows)
    check_values(n + queries, widest, f"{head_dim} channels here")
    dtype = operand_dtype(q.dtype)
    with torch.cuda.device_of(q):
        keys, values = Fitted.of_pack(key, n, k_spec, dtype), Fitted.of_pack(value, n, v_spec, torch.float32)
        K, V, tables = keys.layout, values.layout, _Tables.of(key, batch)
        N, (config, pages) = number_of((K, V), OPERANDS[dtype]), _config(rows, K.tokens, K.shared)
        mask, of_mask = mask_and_strides(mask)
        R, W = _exact_layout(k_spec, head_dim, tables.rope), _exact_layout(v_spec, head_dim)
        center = key.fitted.get("center")
        projected = _Projected.of(q, keys, center, tables, length, call.scale, groups, R, N, dtype)
        tiles = cdiv(rows, config.queries // pages)
        splits = splits_of(v_spec.retention.pages(n), config, batch * groups * tiles, q.device)
        summed = q.new_empty((batch * groups, splits, rows, V.width), dtype=torch.float32)
        exact = q.new_empty((batch * groups, rows, head_dim), dtype=torch.float32)
        lse = exact.new_empty((batch * groups, splits + 1, rows))
        rules = rules_of(call, mask, config.queries)
        attend_fields[batch * groups, splits + 1, tiles](
            q, keys.pages, keys.places, key.ring, values.pages, values.places, values.middles, value.ring, k_new,
            v_new.contiguous(), *projected, mask, summed, exact, lse, length, queries, k_new.shape[2], call.scale,
            keys.size, values.size, keys.capacity, values.capacity, *of_mask, pages, config.exact, rules, K, V,
            _exact_layout(k_spec, head_dim), W, N, bool(tables.rope), config.stages,
            num_warps=config.warps, maxnreg=config.registers, enable_fp_fusion=True,
        )  # fmt: skip
        return _merged(summed, exact, lse, values, call)

"""Ops for attention of one query token over pages with per-channel bit widths (`kvpass.codec.allocation`) on CPUs.

Fields are read as stored. Their weights and the basis are applied to the query or to the output instead. Inductor's
graphs call the two ops. A field is unpacked once for several queries. The transformed query and the token order of a
page stay in the processor's cache.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpass.codec.allocation import Allocation
from kvpass.codec.layer_pages import LayerPages
from kvpass.codec.page_rope import PageTables, before_middle
from kvpass.codec.rope import parse_rope
from kvpass.codec.spec import CodecSpec, parse
from kvpass.codec.tensors import page_shapes
from kvpass.codec.transform_coding import PAIRS, gains, weights

from .build import BYTES, FLOATS, INT32S, NUMBER, WRITTEN_FLOATS, build, source, text

_library = torch.library.Library("kvpass_cpu", "DEF")
_library.define(
    "allocated_scores(Tensor q, Tensor pages, Tensor basis, Tensor places, Tensor table, Tensor? mean, Tensor? cos, "
    "Tensor? sin, Tensor? relative_cos, Tensor? relative_sin, SymInt count, SymInt room, str spec, str rope) "
    "-> Tensor"
)
_library.define(
    "allocated_values(Tensor weights, Tensor pages, Tensor basis, Tensor places, Tensor table, SymInt count, "
    "SymInt room, str spec) -> Tensor"
)

PAGE_FILES = "allocated_layout.h", "allocated_slots.h", "allocated.h"
"""The C++ files that read pages, each of which needs those before it."""
_FITTED = [BYTES, FLOATS, INT32S, FLOATS]  # pages, basis, places, table
_TYPES = {
    "allocated_scores": [*6 * [FLOATS], *_FITTED, WRITTEN_FLOATS, *8 * [NUMBER]],
    "allocated_values": [FLOATS, *_FITTED, WRITTEN_FLOATS, *4 * [NUMBER]],
}


@cache
def look_up_table(device: torch.device) -> Tensor:
    """The gain of each 8-bit level, followed by the weight of each kind of field (`transform_coding.weights`)."""
    return torch.cat([gains(torch.arange(256, device=device)), weights(device)])


def defines_of(spec: CodecSpec, head_dim: int) -> dict[str, int]:
    """The macros of allocated_layout.h."""
    if isinstance(spec.codec, LayerPages):
        pairs, singles = PAIRS * head_dim, head_dim
        return dict(
            PAGE_BYTES=0, NUM_FIELDS=LayerPages.of(spec).ranks * head_dim, RANKED=int(LayerPages.of(spec).ranked),
            SHARED=1, HIGH_PAIRS=pairs, HIGH_SINGLES=singles, LOW_PAIRS=pairs, LOW_SINGLES=singles,
        )  # fmt: skip
    allocation, (shape, _) = Allocation.of(spec), page_shapes(spec, head_dim, torch.float32)["codes"]
    high, low = ([(0, 0)] * (not allocation.ranked)) + allocation.counts(head_dim)
    return dict(
        PAGE_BYTES=shape[-1], NUM_FIELDS=sum(allocation.fields(head_dim)), RANKED=int(allocation.ranked),
        HIGH_PAIRS=high[0], HIGH_SINGLES=high[1], LOW_PAIRS=low[0], LOW_SINGLES=low[1], SHARED=0,
    )  # fmt: skip


def common_of(spec: CodecSpec, head_dim: int, queries: int, dtype: torch.dtype = torch.float32) -> dict[str, int]:
    """The macros that allocated_layout.h shares with tokens.h, for tokens of ``dtype``."""
    block_size = (LayerPages if isinstance(spec.codec, LayerPages) else Allocation).of(spec).block_size
    return dict(
        QUERIES=queries, HEAD=head_dim, BLOCK=block_size, PAGE=spec.page_size,
        SINKS=spec.retention.sinks, BFLOAT16=int(dtype == torch.bfloat16),
    )  # fmt: skip


def fields_type(spec: CodecSpec) -> str:
    """The C++ type of ``Fields*`` (allocated_layout.h)."""
    return BYTES if isinstance(spec.codec, LayerPages) else INT32S


def page_source(spec: CodecSpec, head_dim: int) -> str:
    """The C++ source of the layout of pages, for kernels that quantize or dequantize them."""
    return source(common_of(spec, head_dim, queries=1)) + text(defines_of(spec, head_dim), *PAGE_FILES)


@cache
def _kernel(name: str, spec: str, head_dim: int, queries: int) -> Callable[..., None]:
    """The kernel ``name`` for pages of ``spec`` and KV heads with ``queries`` query heads."""
    parsed = parse(spec)
    defines = common_of(parsed, head_dim, queries) | defines_of(parsed, head_dim)
    return build(source(defines, "tokens.h", *PAGE_FILES, f"{name}.h", f"{name}.cpp"), _TYPES[name])


def _scores(
    q, pages, basis, places, table, mean, cos, sin, relative_cos, relative_sin, count: int, room: int, spec: str,
    rope: str,
) -> Tensor:  # fmt: skip
    (batch, heads), (pairs, interleaved) = pages.shape[:2], parse_rope(rope) if rope else (0, False)
    out = q.new_empty((*q.shape[:2], count * parse(spec).page_size))
    tables = (cos, sin, relative_cos, relative_sin) if pairs else 4 * (q,)
    _kernel("allocated_scores", spec, q.shape[2], q.shape[1])(
        q, *tables, q if mean is None else mean, pages, basis, places, table, out, batch, heads, count, room, pairs,
        int(interleaved), int(mean is not None), torch.get_num_threads(),
    )  # fmt: skip
    return out


def _values(weights, pages, basis, places, table, count: int, room: int, spec: str) -> Tensor:
    out = _fake_values(weights, pages, basis, places, table, count, room, spec)
    _kernel("allocated_values", spec, basis.shape[1], weights.shape[1])(
        weights, pages, basis, places, table, out, len(weights), count, room, torch.get_num_threads()
    )
    return out


def _fake_scores(q, *rest) -> Tensor:
    *_, count, _, spec, _ = rest
    return q.new_empty((*q.shape[:2], count * parse(spec).page_size))


def _fake_values(weights, pages, basis, *rest) -> Tensor:
    return weights.new_empty((*weights.shape[:2], basis.shape[1]))


_library.impl("allocated_scores", _scores, "CPU")
_library.impl("allocated_values", _values, "CPU")
torch.library.register_fake("kvpass_cpu::allocated_scores", _fake_scores, lib=_library)
torch.library.register_fake("kvpass_cpu::allocated_values", _fake_values, lib=_library)


class Pages(NamedTuple):
    """The pages of keys or of values that an op reads, and what it needs to dequantize them.

    handle, room: handle of the pool, and its capacity in pages.
    num_pages: number of pages to read.
    basis, places: the fitted basis ``[B, H, D, b]`` and places of fields ``[B, H, 1, F]``.
    table: see `look_up_table`.
    """

    handle: Tensor
    num_pages: int
    room: int
    basis: Tensor
    places: Tensor
    table: Tensor
    spec: CodecSpec

    @property
    def arguments(self) -> list[Any]:
        """The arguments that both ops share."""
        basis, places = self.basis.flatten(0, 1).float().contiguous(), self.places.flatten(0, 2).contiguous()
        return [self.handle, basis, places, self.table, self.num_pages, self.room, str(self.spec)]


def page_scores(q: Tensor, page_tables: PageTables | None, mean: Tensor | None, pages: Pages) -> Tensor:
    """Scores of ``q`` ``[BH, R, D]`` with the keys in pages: ``[BH, R, N * P]``, in token order.

    page_tables: rotary tables of page-relative RoPE; None without it.
    mean: ``[B, H, 1, D]``, the mean that was subtracted from keys before rotary embedding; None without one.
    """
    *fitted, count, room, spec = pages.arguments
    size, rope = pages.spec.page_size, ""
    tables: list[Tensor | None] = [None, None, None, None]
    if page_tables is not None:
        rope, pairs = page_tables.rope, parse_rope(page_tables.rope)[0]
        of_pages = (table[:, size : size + count, :pairs].float() for table in page_tables[:2])
        in_page = (table[:, :-1].mT for table in before_middle(page_tables, size))  # [B, pairs, tokens]
        tables = [table.contiguous() for table in (*of_pages, *in_page)]
    if mean is not None:
        mean = mean.flatten(0, 2).float().contiguous()
    return torch.ops.kvpass_cpu.allocated_scores(q.contiguous(), *fitted, mean, *tables, count, room, spec, rope)


def page_values(weights: Tensor, pages: Pages) -> Tensor:
    """Sum of the values in pages, weighted by ``weights`` ``[BH, R, N * P]``: ``[BH, R, D]``."""
    return torch.ops.kvpass_cpu.allocated_values(weights.contiguous(), *pages.arguments)

"""Store tokens in a server's blocks (`kvpass.paged.block_layout`) and attend over them, for all requests of a step at
once.

Attention reads every token from where a kvpass cache would: sinks from the head of a request's first block, packed
tokens from pages, and exact ones, including those of the step, from the window. It processes a context in pieces and
accumulates, so that memory does not grow with contexts.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..codec.calibrated_layer import CalibratedLayer
from ..codec.center import fit_centers
from ..codec.spec import CodecSpec
from ..lowering.page_codecs import Codecs
from ..lowering.table import AUTO, DispatchKey, Implementation, implements, lowerings, select
from . import flash_attention, single_query_calibrated, single_query_cpp, single_query_inductor
from .batch import Batch, BlockTable, Due, Tiles, pages_of
from .block_layout import Blocks
from .context_spans import Places, Span, spans

_VALUES = 1 << 20  # keys, or scores, processed at a time


_text = cache(str)

Attention = Callable[[Tensor, Batch, Tiles], Tensor]
"""Attention of tiles of new tokens ``q`` ``[T, H_q, D]``: ``[N, Q, H_q, D]``, or ``[N, H_q, D]`` for single tokens."""


class Layer(NamedTuple):
    """What attention over one layer needs besides a batch.

    window: ``[blocks, H, tokens, 2 * D]``, keys and values.
    codecs: those of keys and of values.
    calibrated: what a calibration has fitted to the layer, for codecs that take tensors of the model; then the keys and
        values of all heads share a page.
    softcap: 0 for none.
    kernel, tiled: attention of one token of each request, and of several. Without ``kernel``, one is attended to as
        several are.
    storing: ``(batch, k, v)`` to nothing, what `store` does; None is in plain torch. `with_kernel` chooses all three.
    """

    blocks: Blocks
    window: Tensor
    key: CodecSpec
    value: CodecSpec
    codecs: tuple[Codecs, Codecs]
    scale: float
    softcap: float = 0.0
    calibrated: CalibratedLayer | None = None
    kernel: Attention | None = None
    tiled: Attention | None = None
    storing: Callable[[Batch, Tensor, Tensor], None] | None = None

    def dispatch(self, op: str, queries: int) -> DispatchKey:
        """What decides who attends with ``queries`` tokens of a request, 0 for any number of them."""
        specs, used = (_text(self.key), _text(self.value)), ("softcap",) if self.softcap else ()
        head_dim, dtype = self.window.shape[-1] // 2, self.window.dtype
        return DispatchKey(op, self.window.device.type, specs, queries, head_dim, dtype, extras=used)

    @property
    def sides(self) -> tuple[tuple[str, CodecSpec, tuple[Tensor, ...], Codecs], ...]:
        return (
            ("key", self.key, self.blocks.key, self.codecs[0]),
            ("value", self.value, self.blocks.value, self.codecs[1]),
        )

    @property
    def windows(self) -> tuple[Tensor, Tensor]:
        """Exact keys and exact values: ``[blocks, H, tokens, D]`` each."""
        keys, values = self.window.split(self.window.shape[-1] // 2, -1)
        return keys, values

    def fitted(self, which: int, names: Sequence[str], first: Tensor) -> list[Tensor]:
        """Those of the tensors ``names`` that keys (0) or values (1) have: of the model, or of the requests whose first
        blocks are ``first``."""
        if self.calibrated is None:
            return self.blocks.fitted(self.sides[which][0], tuple(names), first)
        tensors = (self.calibrated.key, self.calibrated.value)[which]
        return [tensors[name] for name in names if name in tensors]

    def read(self, which: int, span: Span, dtype: torch.dtype) -> Tensor:
        """Keys (0) or values (1) of a span: ``[A, H, C, D]`` of ``dtype``."""
        parts = [self._read(which, part[which], span.first).to(dtype) for part in span.parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def _read(self, which: int, places: Places, first: Tensor) -> Tensor:
        side, spec, pools, codecs = self.sides[which]
        at = places.block, slice(None), places.place
        if places.kind == "window":
            return self.windows[which][at].transpose(1, 2)
        if places.kind == "sinks":
            return self.blocks.head[f"{side}.sinks"][at].transpose(1, 2)
        kept = [pool[at].transpose(1, 2) for pool in pools]  # [A, H, C / P, ...]
        fitted = self.fitted(which, spec.codec.dequantizes_with, first)
        values = codecs.dequantize([*kept, *fitted], spec, (), ())
        if spec.transform.center and self.calibrated is not None:
            assert places.page is not None, "pages have numbers"
            values = self.calibrated.from_pages(values, self.calibrated.middles(places.page))
        elif spec.transform.center:
            values = values + self.blocks.head[f"{side}.center"][first].float()
        return values.to(self.window.dtype)  # as a cache dequantizes them


def lowerings_of_blocks() -> list[str]:
    """The lowerings that `with_kernel` takes besides "auto"."""
    return lowerings("paged_attend_one")


def with_kernel(layer: Layer, lowering: str = AUTO) -> Layer:
    """``layer`` with what attends to single tokens of requests and to several, and with what stores tokens.
    ``lowering`` selects those that it implements. Raises `KVPassError` if it cannot serve ``layer``."""

    def chosen(op: str, queries: int) -> Any:
        return _selected(layer.dispatch(op, queries), lowering).run(layer)

    layer = layer._replace(tiled=chosen("paged_attend", 0))  # first, because one token may be attended to like several
    return layer._replace(kernel=chosen("paged_attend_one", 1), storing=chosen("paged_store", 0))


def _selected(dispatch: DispatchKey, lowering: str) -> Implementation:
    """The implementation that ``lowering`` selects, or "auto" if it has none of this op."""
    return select(dispatch, lowering if lowering in lowerings(dispatch.op) else AUTO)


def never_waits(
    key: CodecSpec, value: CodecSpec, head_dim: int, dtype: torch.dtype, device: str, lowering: str = AUTO
) -> bool:
    """Whether steps that bring one token of each request never wait for the device, so that a CUDA graph can capture
    them: whether Triton kernels attend and store."""
    specs = _text(key), _text(value)
    steps = (DispatchKey(op, device, specs, queries, head_dim, dtype)
             for op, queries in (("paged_attend_one", 1), ("paged_store", 0)))  # fmt: skip
    return all(_selected(step, lowering).name == "triton" for step in steps)


def warm(layer: Layer, q_heads: int) -> None:
    """Run once everything that may be compiled. Writes to block 0, which must belong to no request."""
    (_, heads, _, width), size, device = layer.window.shape, layer.key.page_size, layer.window.device
    past = torch.full((2,), layer.value.retention.window + layer.value.retention.sinks + size, device=device)
    tables = (BlockTable(torch.zeros(2, 2 * int(past[0]), dtype=torch.long, device=device), one) for one in (1, 1))
    start = torch.arange(3, device=device)
    pages, window = tables
    q = layer.window.new_zeros(2, q_heads, width // 2)
    x = layer.window.new_zeros(2, heads, size, width // 2)
    first = pages.blocks[:, 0]
    stored: tuple[Tensor, ...] = ()
    for which in range(2):
        stored = _quantized(layer, which, x, first, stored)
    batch = Batch(start, past, past + 1, pages, window, 0)
    new = layer.window.new_zeros(2, heads, width // 2)
    store(batch, layer, new, new)
    for each in (layer, layer._replace(kernel=None)):
        attend(batch, each, q, torch.empty_like(q))


def store(batch: Batch, layer: Layer, k: Tensor, v: Tensor) -> None:
    """Store the new tokens of all requests, ``k`` and ``v`` ``[T, H, D]``, and quantize the pages that leave the
    window."""
    (layer.storing or _in_torch(layer))(batch, k, v)


@implements("paged_store", "reference")
def _in_torch(layer: Layer) -> Callable[[Batch, Tensor, Tensor], None]:
    """What stores tokens in plain torch."""
    return partial(_store, layer)


def _store(layer: Layer, batch: Batch, k: Tensor, v: Tensor) -> None:
    block, place = batch.in_window
    k, v = k[: len(block)], v[: len(block)]  # the rest is padding of the batch
    layer.window[block, :, place] = torch.cat([k, v], -1)
    count = layer.key.retention.sinks
    if count and len((found := batch.sinks(count))[0]):
        rows, block, place = found
        for (side, *_), x in zip(layer.sides, (k, v), strict=True):
            layer.blocks.head[f"{side}.sinks"][block, :, place] = x[rows]
    stored: tuple[Tensor, ...] = ()
    for which, ((side, spec, pools, _), window) in enumerate(zip(layer.sides, layer.windows, strict=True)):
        due = batch.due(spec.retention)
        if not len(due.owner):
            continue
        block, place = due.tokens
        x = window[block, :, place].transpose(1, 2).contiguous()  # [M, H, P, D]
        if layer.calibrated is not None:  # whose codec raises for NaN, which must not stop other requests
            x = x.nan_to_num(0.0, 0.0, 0.0)
        if spec.transform.center and layer.calibrated is not None:
            x = layer.calibrated.to_pages(x, layer.calibrated.middles(due.page).unsqueeze(1))
        elif spec.transform.center:
            _fit_centers(batch, layer.blocks.head[f"{side}.center"], due, x, spec)
            x = (x.float() - layer.blocks.head[f"{side}.center"][due.first].float()).to(x.dtype)
        stored = _quantized(layer, which, x, due.first, stored)
        for pool, pages in zip(pools, stored, strict=True):
            pool[due.block, :, due.slot] = pages.squeeze(2)


def _quantized(layer: Layer, which: int, x: Tensor, first: Tensor, key_pages: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The page tensors of keys (0) or values (1) ``x`` ``[M, H, P, D]`` of requests with these first blocks. key_pages:
    those of their keys, for values."""
    _, spec, _, codecs = layer.sides[which]
    fitted = layer.fitted(which, spec.codec.quantizes_with, first)
    if spec.quantizer.follows_keys:
        fitted.append(spec.codec.marks_in(key_pages[0], x.shape[1], spec))
    return codecs.quantize(x, fitted, spec)


def _fit_centers(batch: Batch, centers: Tensor, due: Due, x: Tensor, spec: CodecSpec) -> None:
    """Fit the key mean of those requests whose first pages are due."""
    fresh = (pages_of(batch.past, spec.retention) == 0) & (pages_of(batch.total, spec.retention) > 0)
    requests = fresh.nonzero().flatten()
    if len(requests):
        number = fresh.long().cumsum(0) - 1
        theirs = fresh[due.owner].nonzero().flatten()
        found = fit_centers(x[theirs], number[due.owner[theirs]], len(requests), centers.dtype)
        centers[batch.pages.blocks[requests, 0]] = found


def attend(batch: Batch, layer: Layer, q: Tensor, out: Tensor) -> None:
    """Attention of all new tokens ``q`` ``[T, H_q, D]``, after `store`, written to ``out`` of that shape."""
    for tiles in batch.tiles:
        if layer.kernel is not None and tiles.rows.shape[1] == 1:
            out[tiles.rows[:, 0]] = layer.kernel(q, batch, tiles).to(out.dtype)
            continue
        found = _tiled(layer)(q, batch, tiles).to(out.dtype, memory_format=torch.contiguous_format)
        out.index_copy_(0, tiles.rows.flatten(), found.flatten(0, 1))


def _tiled(layer: Layer) -> Attention:
    return layer.tiled or select(layer.dispatch("paged_attend", 0)).run(layer)


@implements("paged_attend_one", "reference")
def _as_several(layer: Layer) -> Attention:
    """What attends to single tokens as to several."""
    return lambda q, batch, tiles: _tiled(layer)(q, batch, tiles).squeeze(1)


@implements("paged_attend", "reference")
def _in_spans(layer: Layer) -> Attention:
    """What attends to several tokens in plain torch."""
    return partial(_attend, layer, _over_spans, True)


def _refuses_flash(dispatch: DispatchKey) -> str | None:
    if dispatch.device != "cpu":
        return "it runs on CPUs."
    return f"it does not support {', '.join(dispatch.extras)}." if dispatch.extras else None


@implements("paged_attend", "cpp", refuses=_refuses_flash)
def _by_flash_attention(layer: Layer) -> Attention:
    """The same, by `flash_attention`."""
    return partial(_attend, layer, _over_parts, False)


for _name, _module in (  # the last is preferred
    ("inductor", single_query_inductor),
    ("cpp", single_query_cpp),
    ("cpp-calibrated", single_query_calibrated),
):
    implements("paged_attend_one", _name, _module.HAS, _module.refuses, lowering=_name.partition("-")[0])(
        _module.SingleQueryAttention
    )
if find_spec("triton") is not None:
    from ..lowering.triton.configs import INTERPRETED
    from . import attend_triton, store_triton

    for _op, _found, _run in (
        ("paged_attend", attend_triton, attend_triton.TiledAttention),
        ("paged_attend_one", attend_triton, attend_triton.attention_of_one),
        ("paged_store", store_triton, store_triton.Storing),
    ):
        implements(_op, "triton", _found.HAS, _found.refuses, by_name_only=INTERPRETED)(_run)


def _attend(
    layer: Layer, run: Callable[[list[Span], Layer, Tensor], Tensor], materializes: bool, q: Tensor, batch: Batch,
    tiles: Tiles,
) -> Tensor:  # fmt: skip
    """Attention of some tiles over dequantized spans: ``[N, Q, H_q, D]`` float32.

    run: `_over_spans` or `_over_parts`. materializes: whether it holds scores of all queries in memory.
    """
    rows = q.index_select(0, tiles.rows.flatten()).unflatten(0, tiles.rows.shape).transpose(1, 2)  # [N, H_q, Q, D]
    per_token = layer.window.shape[1] * layer.window.shape[3] // 2
    if materializes:
        per_token = max(per_token, q.shape[1] * tiles.rows.shape[1])
    several = spans(batch, tiles, layer.key.retention, layer.value.retention, max(1, _VALUES // per_token))
    found: Tensor = run(several, layer, rows)
    return found.transpose(1, 2)


def _over_spans(several: list[Span], layer: Layer, rows: Tensor) -> Tensor:
    """Attention of ``rows`` ``[N, H_q, Q, D]`` over spans: float32 of that shape."""
    rows = rows.float() * layer.scale
    first, *others = several

    def on_span(some: slice | Tensor, span: Span) -> tuple[Tensor, Tensor]:
        keys, values = (layer.read(side, span, torch.float32) for side in range(2))
        return _on_span(rows[some], keys, values, span.mask, layer.softcap)

    total, logsum = on_span(slice(None), first)
    for span in others:
        some = span.tiles if len(span.tiles) < len(rows) else slice(None)
        out, of_span = on_span(some, span)
        total[some] = torch.lerp(total[some], out, torch.sigmoid(of_span - logsum[some]))
        logsum[some] = torch.logaddexp(logsum[some], of_span)
    return total


def _over_parts(several: list[Span], layer: Layer, rows: Tensor) -> Tensor:
    """The same, by `flash_attention`."""
    dtype = rows.dtype if rows.dtype == layer.window.dtype and rows.dtype in flash_attention.DTYPES else torch.float32
    parts = flash_attention.Parts(rows.to(dtype), layer.scale)
    for span in several:
        keys, values = (layer.read(side, span, dtype) for side in range(2))
        parts.add(span.tiles, keys, values, span.mask)
    return parts.out


def _on_span(rows: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, softcap: float) -> tuple[Tensor, Tensor]:
    """Attention of scaled ``rows`` ``[N, H_q, Q, D]`` over a span, and the logarithm of the sum of its weights."""
    of_heads = rows.unflatten(1, (keys.shape[1], -1))  # [N, H, R, Q, D]
    scores = of_heads @ keys.mT.unsqueeze(2)
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask.unsqueeze(1)
    logsum = scores.logsumexp(-1, keepdim=True)
    out = (scores - logsum).exp() @ values.unsqueeze(2)
    return out.flatten(1, 2), logsum.flatten(1, 2)

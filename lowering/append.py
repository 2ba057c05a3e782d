"""Stores tokens: quantizes the pages that leave the window, replaces evicted tokens, and writes new tokens to the
ring."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpass.codec.adaptive import largest_mass
from kvpass.codec.affine import check_finite
from kvpass.codec.bitpack import FIELDS
from kvpass.codec.page_rope import PageTables, mean_of_tokens, to_page_rope
from kvpass.codec.pages import dequantize_pages, replace_tokens, share_codes
from kvpass.codec.predictor import PREDICTORS, predict, with_below
from kvpass.codec.quantizer import RAW
from kvpass.codec.spec import CodecSpec
from kvpass.codec.tensors import Pack, of_pages, of_state
from kvpass.errors import KVPassError
from kvpass.layout.eviction import choose, every_second, evict, update_importance
from kvpass.layout.pool import whole
from kvpass.layout.retention import Retention
from kvpass.layout.window import layout

from .call_types import AppendCall, AppendLayersCall
from .fit_sequence import fit_to_queries, fit_to_tokens, fits_tokens, keep_pairs, not_padding

PLACES = frozenset({"keep=log", "pre_rope"})
"""Features that decide where tokens are stored, or whether keys have rotary embedding. They do not affect how pages are
quantized and dequantized."""
APPENDED = PLACES | {"own_codes", "rounding", "budget", "shared", "center", *(f"predictor={x}" for x in PREDICTORS)}
APPENDED |= {f"evict={rule}" for rule in ("observed", "age", "log")}
"""Features that `append` implements for every lowering."""
MERGED = PLACES | {f"bits={bits}" for bits in (*FIELDS, *RAW)} | {"per=channel", "per=token", "fit=lsq", "eta"}
MERGED |= {"rotation", "grid"}
"""Features of the specs that `append_layers` may be called with, besides per-channel bit widths."""
PER_CHANNEL_BITS = frozenset(f"codec={codec}" for codec in ("allocated", "by_head", "shares"))
PER_CHANNEL_BITS |= {f"codec.{field}" for field in ("rich_pairs", "rich_singles", "follows", "ranked", "adapts")}
"""Features of codecs with per-channel bit widths."""
PER_CHANNEL_PAGES = PLACES | PER_CHANNEL_BITS | {"per=token", "bits=8", "center", "page_rope", "numbered"}
"""Features of specs with these codecs whose pages kernels quantize and dequantize."""
CHUNK = 4096  # tokens predicted, or gathered from layers, at a time: bounds temporary memory


def stands_alone(spec: CodecSpec) -> bool:
    """Whether `append_layers` takes layers with ``spec``: what is stored depends only on their own tokens or, with a
    codec, on nothing that another layer decides."""
    if spec.transform.predictor:
        return False
    fitted = of_state(spec)[len(of_pages(spec)) + 1 :]
    return spec.quantizer.codec is not None or (not fitted and spec.features <= MERGED)


def decide(call: AppendCall) -> None:
    """Add the attention mass of ``call`` to its ``importance`` and, if there are more tokens than the budget, choose
    which to keep.

    ``call.slots`` is then the candidate that each slot of the packed tokens holds after the call.
    """
    n, x, spec = call.n, call.x, call.spec
    importance, slots, retention, tokens = call.importance, call.slots, spec.retention, x.shape[2]
    sinks, budget, gone = retention.sinks, retention.budget, retention.evicted(n + tokens)
    valid = None if call.mask is None else not_padding(call.mask, x.shape[0], tokens)
    total = update_importance(importance, n, tokens, call.scores, valid, retention)
    if gone:
        candidates = total[..., sinks : sinks + budget + gone]
        if retention.evict == "log":
            candidates = every_second(candidates, budget)
        slots.copy_(choose(candidates, min(retention.packed(n), budget), budget))
        total = evict(total, slots, gone, retention)
    importance[..., : total.shape[-1]] = total


@dataclass
class _Pages:
    """Writes the pages of one state.

    page_tables: the rotary tables of page-relative RoPE; None without it.
    center: the mean to subtract; None without one.
    references: for predictors: the tokens to predict from, for the tokens written in this call and in page order.
    keep: overwrite the first reference with the dequantized tokens.
    """

    pools: tuple[Tensor, ...]
    spec: CodecSpec
    page_tables: PageTables | None
    center: Tensor | None
    predictor: Sequence[Tensor]
    references: Sequence[Tensor]
    keep: bool

    def write(self, first: int, x: Tensor, quantize: Callable, at: int) -> None:
        """Quantize ``x`` ``[B, H, T, D]`` into whole pages from ``first`` on. ``at`` is the index of the first token in
        the references."""
        spec, count = self.spec, x.shape[2] // self.spec.page_size
        pools = tuple(pool[:, :, first : first + count] for pool in self.pools)
        references = [reference[:, :, at : at + x.shape[2]] for reference in self.references]
        x, less = to_page_rope(x, self.page_tables, first, spec.page_size), None
        if self.center is not None:
            less = mean_of_tokens(self.center, self.page_tables, spec.page_size, x.shape[2])
        if spec.transform.predictor:
            less = predict(spec.transform.predictor, self.predictor, references, spec.page_size)
        new = quantize(pools, x if less is None else (x.float() - less).to(x.dtype))
        if x.device.type == "cpu":
            check_finite(*new[1:])
        if spec.own_codes < 1:
            new = share_codes(pools[0], x, new, spec)
        for pool, pages in zip(pools, new, strict=True):
            pool.copy_(pages)
        if self.keep:
            values = dequantize_pages(*new, spec)
            values = values if less is None else values + less
            below = references[0] if spec.transform.predictor else None
            references[0].copy_(with_below(values, below, references[0].shape[1] // values.shape[1]))


def write_each(
    rings: Sequence[Tensor], n: int, xs: Sequence[Tensor], retention: Retention, length: Tensor | None = None
) -> None:
    """Write the tokens ``xs`` of several layers, each ``[B, H, S, D]``, to their ``rings``, after ``n`` stored tokens.

    length: ``n`` on the device.
    """
    layout(retention).write(rings, n, xs)


def append(quantize: Callable, call: AppendCall, write: Callable = write_each) -> None:
    """Run ``call``. Raises `KVPassError` if the codec needs the prompt's queries and the call has none.

    quantize: quantizes the pages that leave the window. write: writes tokens to rings, as `write_each`.
    """
    pack, n, x, spec = call[:4]
    ring, retention = pack.ring, spec.retention
    if spec.quantizer.needs_queries and n == 0 and call.q is None:
        raise KVPassError("This codec is fitted to the prompt's queries: pass q with the first keys.")
    if n == 0:
        fit_to_queries(pack, call.q, call.mask, x, spec)
    if spec.quantizer.adaptive is not None:
        _stage(call)
        return
    if call.importance is not None:
        decide(call)
    stop = n + x.shape[2]
    gone = retention.evicted(stop)
    if gone or retention.pages(stop) > retention.pages(n):
        keys = None if call.same_layer_keys is None else call.same_layer_keys[:, : x.shape[1]]
        references = [reference for reference in (call.edge, keys) if reference is not None]
        pools = tuple(whole(pool, retention.pages(retention.stored(stop))) for pool in pack.pools)
        center, keep = pack.fitted.get("center"), call.edge is not None
        _pack(_Pages(pools, spec, pack.page_tables, center, call.predictor, references, keep), quantize, call, gone)
    write([ring], n, [x], retention, call.length)
    if gone:  # tokens after the packed ones moved up
        ring[:, :, retention.sinks :] = ring[:, :, retention.sinks :].roll(-gone, 2)


def _pack(pages: _Pages, quantize: Callable, call: AppendCall, gone: int) -> None:
    """Quantize the pages that leave the window in ``call``. ``gone`` is the number of packed tokens to evict for
    them."""
    pack, n, x, spec = call[:4]
    retention, size, written = spec.retention, spec.page_size, 0
    first, last = retention.pages(n), retention.pages(n + x.shape[2])

    def leaving(start: int, end: int) -> Tensor:
        return layout(retention).leaving(pack.ring, n, x, start, end)

    if not first:
        if fits_tokens(spec):
            valid = None if n or call.mask is None else not_padding(call.mask, len(x), x.shape[2])
            fit_to_tokens(pack, leaving(0, last), spec, valid)
        keep_pairs(pack)
    if gone:
        settled, first = min(first * size, retention.budget), (retention.budget + gone) // size
        if retention.budget:
            _settle(pages, leaving(settled // size, first), settled, call.slots, pack)
            written = retention.budget
    step = max(1, CHUNK // size) if spec.transform.subtracts or pages.keep else max(1, last - first)
    for start in range(first, last, step):
        tokens = leaving(start, min(start + step, last))
        fitted = pack.quantizes_with(spec)
        if spec.quantizer.follows_keys:
            fitted.append(spec.codec.marks(pack, start, tokens.shape[2] // size, spec))
        pages.write(start - gone // size, tokens, lambda _, y, fitted=fitted: quantize(y, fitted, spec), written)
        written += tokens.shape[2]


def _stage(call: AppendCall) -> None:
    """Write the tokens that leave the window to ``originals``: after the earlier tokens, or at the start if originals
    are not kept. Their bit widths are chosen after the forward."""
    pack, n, x, spec = call[:4]
    where, pages = layout(spec.retention), spec.retention.pages
    if call.importance is not None:
        (mass,) = call.scores
        call.importance[..., : n + x.shape[2]] = largest_mass(call.importance, n, mass)
    first, last = pages(n), pages(n + x.shape[2])
    if last > first:
        tokens = where.leaving(pack.ring, n, x, first, last)
        start = first * spec.page_size if spec.quantizer.adaptive.keep_originals else 0
        call.originals[:, :, start : start + tokens.shape[2]].copy_(tokens, non_blocking=True)
    where.write([pack.ring], n, [x])


def _settle(pages: _Pages, tokens: Tensor, settled: int, slots: Tensor, pack: Pack) -> None:
    """Write the ``tokens`` that ``slots`` keeps. The first ``settled`` candidates are already in their slots."""
    heads, spec = tokens.shape[1], pages.spec
    slots = slots.expand(-1, heads, -1)
    index = (slots - settled).clamp_min(0).unsqueeze(-1).expand(-1, -1, -1, tokens.shape[3])
    arriving = tokens.gather(2, index)
    fitted = pack.quantizes_with(spec)
    pages.write(0, arriving, lambda pools, y: replace_tokens(pools, y, slots >= settled, spec, fitted), 0)


def append_layers(quantize: Callable, call: AppendLayersCall, write: Callable = write_each) -> None:
    """Run ``call``, with the result of `append` for each layer.

    Pages leave the windows of all layers at the same time, so few calls of ``quantize`` suffice. If the codec is fitted
    first, or pages leave that hold all heads of a layer, layers are appended one by one.
    """
    packs, n, xs, spec, length, qs, mask = call
    retention = spec.retention
    first, last = retention.pages(n), retention.pages(n + xs[0].shape[2])
    at_first = bool(spec.codec.sequence(spec)) and (n == 0 or first == 0 < last)
    of_layers = spec.codec.whole_layer and (n == 0 or last > first)  # heads of several layers cannot share a page
    if at_first or of_layers:
        for pack, x, q in zip(packs, xs, qs or [None] * len(xs), strict=True):
            append(quantize, AppendCall(pack, n, x, spec, length, q, mask), write)
        return
    at_once = max(1, CHUNK // max(1, (last - first) * retention.page_size))
    for layers in _alike(xs, at_once) if last > first else ():
        some = [packs[i] for i in layers]
        leaving = [layout(retention).leaving(packs[i].ring, n, xs[i], first, last) for i in layers]
        new = _quantize_together(quantize, some, leaving, first, spec)
        if new[0].device.type == "cpu":
            check_finite(*new[1:])
        for which, pages in enumerate(new):
            for pack, of_layer in zip(some, pages.chunk(len(some), 1), strict=True):
                whole(pack.pools[which], last)[:, :, first:last] = of_layer
    write([pack.ring for pack in packs], n, xs, retention, length)


def _quantize_together(
    quantize: Callable, packs: Sequence[Pack], leaving: Sequence[Tensor], first: int, spec: CodecSpec
) -> tuple[Tensor, ...]:
    """Quantize the tokens ``leaving`` the windows of layers of one shape to pages from ``first`` on, as if they were
    heads of one layer."""

    def joined(tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), 1)

    x, fitted = (
        joined(leaving),
        [joined(of_all) for of_all in zip(*(pack.quantizes_with(spec) for pack in packs), strict=True)],
    )
    if spec.quantizer.follows_keys:
        count = x.shape[2] // spec.page_size
        fitted.append(joined([spec.codec.marks(pack, first, count, spec) for pack in packs]))
    x = to_page_rope(x, page_tables := packs[0].page_tables, first, spec.page_size)
    if "center" in packs[0].fitted:
        center = joined([pack.fitted["center"] for pack in packs])
        x = (x.float() - mean_of_tokens(center, page_tables, spec.page_size, x.shape[2])).to(x.dtype)
    return quantize(x, fitted, spec)


def _alike(xs: Sequence[Tensor], most: int) -> Iterator[list[int]]:
    """Group the indices of ``xs`` by shape, at most ``most`` per group."""
    by_shape: dict[torch.Size, list[int]] = {}
    for i, x in enumerate(xs):
        by_shape.setdefault(x.shape, []).append(i)
    for same in by_shape.values():
        yield from (same[i : i + most] for i in range(0, len(same), most))

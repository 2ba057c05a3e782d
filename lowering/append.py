"""Storing tokens: who leaves the window is encoded, who lost its place is replaced, the present goes to the ring."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpass.codec.adaptive import largest_mass
from kvpass.codec.affine import check_finite
from kvpass.codec.bitpack import FIELDS
from kvpass.codec.frame import Frames, into_frames, mean_of_tokens
from kvpass.codec.pages import decode_pages, replace_tokens, share_codes
from kvpass.codec.predictor import PREDICTORS, predict
from kvpass.codec.quantizer import RAW
from kvpass.codec.spec import CodecSpec
from kvpass.codec.tensors import Pack, of_model
from kvpass.errors import KVPassError
from kvpass.layout.eviction import choose, evict, update_importance
from kvpass.layout.pool import whole
from kvpass.layout.retention import Retention
from kvpass.layout.window import layout

from .fit_sequence import fit_to_queries, fit_to_tokens, fits_tokens, keep_pairs, not_padding

PLACES = frozenset({"keep=log", "pre_rope"})
"""Features that say where tokens lie, or what they are, which is the same to whoever encodes and decodes pages."""
APPENDED = PLACES | {"own_codes", "budget", "evict=age", "shared", "center", *(f"predictor={x}" for x in PREDICTORS)}
"""Those that `append` takes care of, whoever encodes."""
MERGED = PLACES | {f"bits={bits}" for bits in (*FIELDS, *RAW)} | {"per=channel", "per=token", "fit=lsq", "eta"}
MERGED |= {"rotation", "grid"}
"""Those of all specs that `append_layers` may be called with, besides allocations."""
CHUNK = 4096  # tokens predicted, or gathered from layers, at a time: what is needed in between stays small


def decide(
    importance: Tensor,
    n: int,
    x: Tensor,
    scores: Sequence[Tensor],
    mask: Tensor | None,
    slots: Tensor,
    retention: Retention,
) -> None:
    """Account for the attention of this call in ``importance``, and if there are too many tokens, choose who stays:
    ``slots`` then says which of them each slot of the packed tokens holds from now on."""
    tokens, sinks, budget = x.shape[2], retention.sinks, retention.budget
    valid = None if mask is None else not_padding(mask, x.shape[0], tokens)
    total, gone = update_importance(importance, n, tokens, scores, valid, retention), retention.evicted(n + tokens)
    if gone:
        slots.copy_(choose(total[..., sinks : sinks + budget + gone], min(retention.packed(n), budget), budget))
        total = evict(total, slots, gone, retention)
    importance[..., : total.shape[-1]] = total


@dataclass
class _Pages:
    """Where one state's pages are written.

    frames: of all pages, if they have any. center: the mean that is subtracted, if one is.
    references: what the predictor looks at, for the tokens written in this call and in the order of their pages; with
    ``keep``, the first of them is overwritten with what those tokens decode to.
    """

    pools: tuple[Tensor, ...]
    spec: CodecSpec
    frames: Frames | None
    center: Tensor | None
    predictor: Sequence[Tensor]
    references: Sequence[Tensor]
    keep: bool

    def write(self, first: int, x: Tensor, encode: Callable, at: int) -> None:
        """Encode whole pages ``x`` ``[B, H, T, D]`` into pages from ``first`` on; ``at`` is their first token in the
        references."""
        spec, count = self.spec, x.shape[2] // self.spec.page_size
        pools = tuple(pool[:, :, first : first + count] for pool in self.pools)
        references = [reference[:, :, at : at + x.shape[2]] for reference in self.references]
        x, less = into_frames(x, self.frames, first, spec.page_size), None
        if self.center is not None:
            less = mean_of_tokens(self.center, self.frames, spec.page_size, x.shape[2])
        if spec.transform.predictor:
            less = predict(spec.transform.predictor, self.predictor, references, spec.page_size)
        new = encode(pools, x if less is None else (x.float() - less).to(x.dtype))
        if x.device.type == "cpu":
            check_finite(*new[1:])
        if spec.own_codes < 1:
            new = share_codes(pools[0], x, new, spec)
        for pool, pages in zip(pools, new, strict=True):
            pool.copy_(pages)
        if self.keep:
            values = decode_pages(*new, spec)
            references[0].copy_(values if less is None else values + less)


def write_each(
    rings: Sequence[Tensor], n: int, xs: Sequence[Tensor], retention: Retention, length: Tensor | None = None
) -> None:
    """Store the tokens ``xs`` of layers, ``[B, H, S, D]`` each, behind the ``n`` that are there, as ``length`` says on
    the device, in their ``rings``."""
    layout(retention).write(rings, n, xs)


def append(
    encode: Callable,
    pack: Pack,
    n: int,
    x: Tensor,
    q: Tensor | None,
    mask: Tensor | None,
    spec: CodecSpec,
    edge: Tensor | None = None,
    same_layer_keys: Tensor | None = None,
    predictor: Sequence[Tensor] = (),
    importance: Tensor | None = None,
    scores: Sequence[Tensor] = (),
    slots: Tensor | None = None,
    originals: Tensor | None = None,
    length: Tensor | None = None,
    write: Callable = write_each,
) -> None:
    """Store ``x`` as tokens ``[n, n + S)``; pages that fall out of the window are encoded by ``encode``.

    edge: in, what the tokens that are packed now are in the layer below, in the order of their pages; out, what they
        are in this one.
    same_layer_keys: the same of this layer's keys, for values.
    importance, scores, slots: see `decide`, for specs with a budget; where ``importance`` is None, ``slots`` holds what
        was decided.
    originals: where tokens that get widths of their own wait for them.
    length, write: what holds ``n`` on the device, and who stores tokens in rings, as `write_each`.
    """
    ring, retention = pack.ring, spec.retention
    if spec.quantizer.needs_queries and n == 0 and q is None:
        raise KVPassError("This codec is fitted to the prompt's queries, and none were passed with its keys.")
    if n == 0:
        fit_to_queries(pack, q, mask, x.shape[1], spec)
    if spec.quantizer.adaptive is not None:
        _stage(pack, originals, n, x, scores, importance, spec)
        return
    if importance is not None:
        decide(importance, n, x, scores, mask, slots, retention)
    stop = n + x.shape[2]
    gone = retention.evicted(stop)
    if gone or retention.pages(stop) > retention.pages(n):
        references = [reference for reference in (edge, same_layer_keys) if reference is not None]
        pools = tuple(whole(pool, retention.pages(retention.stored(stop))) for pool in pack.pools)
        pages = _Pages(pools, spec, pack.frames, pack.fitted.get("center"), predictor, references, edge is not None)
        _pack(pages, encode, pack, n, x, gone, slots, mask)
    write([ring], n, [x], retention, length)
    if gone:  # tokens behind the packed ones have moved up
        ring[:, :, retention.sinks :] = ring[:, :, retention.sinks :].roll(-gone, 2)


def _pack(
    pages: _Pages, encode: Callable, pack: Pack, n: int, x: Tensor, gone: int, slots: Tensor | None, mask: Tensor | None
) -> None:
    """Encode the pages that leave the window with ``x``; ``gone`` packed tokens have to make room for them."""
    spec, retention, size, written = pages.spec, pages.spec.retention, pages.spec.page_size, 0
    first, last = retention.pages(n), retention.pages(n + x.shape[2])

    def leaving(start: int, end: int) -> Tensor:
        return layout(retention).leaving(pack.ring, n, x, start, end)

    if not first:
        if fits_tokens(spec):
            valid = None if n or mask is None else not_padding(mask, len(x), x.shape[2])
            fit_to_tokens(pack, leaving(0, last), spec, valid)
        keep_pairs(pack)
    if gone:
        settled, first = min(first * size, retention.budget), (retention.budget + gone) // size
        if retention.budget:
            _settle(pages, leaving(settled // size, first), settled, slots, pack)
            written = retention.budget
    step = max(1, CHUNK // size) if spec.transform.subtracts or pages.keep else max(1, last - first)
    for start in range(first, last, step):
        tokens = leaving(start, min(start + step, last))
        fitted = pack.encodes_with(spec)
        if spec.quantizer.follows_keys:
            fitted.append(spec.codec.marks(pack, start, tokens.shape[2] // size, spec))
        pages.write(start - gone // size, tokens, lambda _, y, fitted=fitted: encode(y, fitted, spec), written)
        written += tokens.shape[2]


def _stage(
    pack: Pack, originals: Tensor, n: int, x: Tensor, scores, importance: Tensor | None, spec: CodecSpec
) -> None:
    """Put the tokens that are due into ``originals``, where their widths are chosen when the forward is over: behind
    those of earlier calls, or at the beginning if those are not kept."""
    where, pages = layout(spec.retention), spec.retention.pages
    if importance is not None:
        (mass,) = scores
        importance[..., : n + x.shape[2]] = largest_mass(importance, n, mass)
    first, last = pages(n), pages(n + x.shape[2])
    if last > first:
        tokens = where.leaving(pack.ring, n, x, first, last)
        start = first * spec.page_size if spec.quantizer.adaptive.keep_originals else 0
        originals[:, :, start : start + tokens.shape[2]].copy_(tokens, non_blocking=True)
    where.write([pack.ring], n, [x])


def _settle(pages: _Pages, tokens: Tensor, settled: int, slots: Tensor, pack: Pack) -> None:
    """Write those of ``tokens`` that got a slot; the first ``settled`` candidates have theirs already."""
    heads, spec = tokens.shape[1], pages.spec
    slots = slots.expand(-1, heads, -1)
    index = (slots - settled).clamp_min(0).unsqueeze(-1).expand(-1, -1, -1, tokens.shape[3])
    arriving = tokens.gather(2, index)
    fitted = pack.encodes_with(spec)
    pages.write(0, arriving, lambda pools, y: replace_tokens(pools, y, slots >= settled, spec, fitted), 0)


def append_layers(
    encode: Callable, packs: Sequence[Pack], n: int, xs, spec: CodecSpec, length: Tensor | None = None,
    q: Sequence[Tensor] | None = None, mask: Tensor | None = None, *, write: Callable = write_each,
) -> None:  # fmt: skip
    """`append` to each of many layers: ``write`` stores the tokens in the rings, as `write_each` does, and pages, which
    are due together, are encoded by few calls, or layer by layer where their codec is fitted first.

    q: the queries of each layer; with ``mask``, for codecs that are fitted to them.
    """
    retention = spec.retention
    first, last = retention.pages(n), retention.pages(n + xs[0].shape[2])
    at_first = bool(spec.codec.sequence(spec)) and (n == 0 or first == 0 < last)
    if at_first or of_model(spec):  # pages of layers whose bits a calibration shares out differ in size
        for pack, x, of_layer in zip(packs, xs, q or [None] * len(xs), strict=True):
            append(encode, pack, n, x, of_layer, mask, spec, length=length, write=write)
        return
    at_once = max(1, CHUNK // max(1, (last - first) * retention.page_size))
    for layers in _alike(xs, at_once) if last > first else ():
        some = [packs[i] for i in layers]
        leaving = [layout(retention).leaving(packs[i].ring, n, xs[i], first, last) for i in layers]
        new = _encode_together(encode, some, leaving, first, spec)
        if new[0].device.type == "cpu":
            check_finite(*new[1:])
        for which, pages in enumerate(new):
            for pack, of_layer in zip(some, pages.chunk(len(some), 1), strict=True):
                whole(pack.pools[which], last)[:, :, first:last] = of_layer
    write([pack.ring for pack in packs], n, xs, retention, length)


def _encode_together(
    encode: Callable, packs: Sequence[Pack], leaving: Sequence[Tensor], first: int, spec: CodecSpec
) -> tuple[Tensor, ...]:
    """The tokens ``leaving`` layers of one shape as their pages from ``first`` on, as if of one layer."""

    def joined(tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), 1)

    x, fitted = (
        joined(leaving),
        [joined(of_all) for of_all in zip(*(pack.encodes_with(spec) for pack in packs), strict=True)],
    )
    if spec.quantizer.follows_keys:
        count = x.shape[2] // spec.page_size
        fitted.append(joined([spec.codec.marks(pack, first, count, spec) for pack in packs]))
    x = into_frames(x, frames := packs[0].frames, first, spec.page_size)
    if "center" in packs[0].fitted:
        center = joined([pack.fitted["center"] for pack in packs])
        x = (x.float() - mean_of_tokens(center, frames, spec.page_size, x.shape[2])).to(x.dtype)
    return encode(x, fitted, spec)


def _alike(xs: Sequence[Tensor], most: int) -> Iterator[list[int]]:
    """Which of ``xs`` have the same shape, up to ``most`` at a time."""
    by_shape: dict[torch.Size, list[int]] = {}
    for i, x in enumerate(xs):
        by_shape.setdefault(x.shape, []).append(i)
    for same in by_shape.values():
        yield from (same[i : i + most] for i in range(0, len(same), most))

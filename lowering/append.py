"""Storing tokens: who leaves the window is encoded, who lost its place is replaced, the present goes to the ring."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpass.codec.affine import check_finite
from kvpass.codec.bitpack import FIELDS
from kvpass.codec.kept import Pack
from kvpass.codec.pages import decode_pages, replace_tokens, share_codes
from kvpass.codec.predictor import MEAN, PREDICTORS, fit_center, predict
from kvpass.codec.spec import RAW, CodecSpec
from kvpass.codec.subspace import compensation_matrix, precision_matrix
from kvpass.errors import KVPassError
from kvpass.layout.eviction import choose, evict, update_importance
from kvpass.layout.pool import whole
from kvpass.layout.window import layout

PLACES = frozenset({"keep=log", "pre_rope"})
"""Features that say where tokens lie, or what they are, which is the same to whoever encodes and decodes pages."""
APPENDED = PLACES | {"own_codes", "budget", "evict=age", "shared_eviction", *(f"predictor={x}" for x in PREDICTORS)}
"""Those that `append` takes care of, whoever encodes."""
MERGED = PLACES | {f"bits={bits}" for bits in (*FIELDS, *RAW)} | {"per=channel", "per=token", "fit=lsq", "eta"}
MERGED |= {"rotation", "grid"}
"""Those of all specs that `append_layers` may be called with."""
CHUNK = 4096  # tokens predicted, or gathered from layers, at a time: what is needed in between stays small


def not_padding(mask: Tensor, batch: int, tokens: int) -> Tensor:
    """Which of the last ``tokens`` tokens may attend to themselves, ``[B, tokens]`` bool: padding may not."""
    own = mask[:, 0].diagonal(mask.shape[-1] - tokens, -2, -1)
    return (own if own.dtype == torch.bool else own == 0).expand(batch, -1)


def fit_compensation(q: Tensor, mask: Tensor | None, num_key_value_heads: int, spec: CodecSpec) -> Tensor:
    """The compensation matrix of the prompt's queries ``[B, H_q, S, D]``; those of padding tokens are left out."""
    stacked = q.unflatten(1, (num_key_value_heads, -1))
    valid = None if mask is None else not_padding(mask, q.shape[0], q.shape[2]).repeat(1, stacked.shape[2])
    precision = precision_matrix(stacked.flatten(2, 3), spec.subspace, valid)
    return compensation_matrix(precision, spec.subspace.block_size)


def decide(
    importance: Tensor, n: int, x: Tensor, scores: Sequence[Tensor], mask: Tensor | None, slots: Tensor, spec: CodecSpec
) -> None:
    """Account for the attention of this call in ``importance``, and if there are too many tokens, choose who stays:
    ``slots`` then says which of them each slot of the packed tokens holds from now on."""
    tokens = x.shape[2]
    valid = None if mask is None else not_padding(mask, x.shape[0], tokens)
    total, gone = update_importance(importance, n, tokens, scores, valid, spec), spec.evicted(n + tokens)
    if gone:
        candidates = total[..., spec.sinks : spec.sinks + spec.budget + gone]
        slots.copy_(choose(candidates, min(spec.packed(n), spec.budget), spec.budget))
        total = evict(total, slots, gone, spec)
    importance[..., : total.shape[-1]] = total


@dataclass
class _Pages:
    """Where one state's pages are written.

    references: what the predictor looks at, for the tokens written in this call and in the order of their pages; with
    ``keep``, the first of them is overwritten with what those tokens decode to.
    """

    pools: tuple[Tensor, ...]
    spec: CodecSpec
    predictor: Sequence[Tensor]
    references: Sequence[Tensor]
    keep: bool

    def write(self, first: int, x: Tensor, encode: Callable, at: int) -> None:
        """Encode whole pages ``x`` ``[B, H, T, D]`` into pages from ``first`` on; ``at`` is their first token in the
        references."""
        spec, count = self.spec, x.shape[2] // self.spec.page_size
        pools = tuple(pool[:, :, first : first + count] for pool in self.pools)
        references = [reference[:, :, at : at + x.shape[2]] for reference in self.references]
        prediction = predict(spec.predictor, self.predictor, references, spec.page_size) if spec.predictor else None
        new = encode(pools, x if prediction is None else (x.float() - prediction).to(x.dtype))
        if x.device.type == "cpu":
            check_finite(*new[1:])
        if spec.own_codes < 1:
            new = share_codes(pools[0], x, new, spec)
        for pool, pages in zip(pools, new, strict=True):
            pool.copy_(pages)
        if self.keep:
            values = decode_pages(*new, spec)
            references[0].copy_(values if prediction is None else values + prediction)


def append(
    encode: Callable,
    pack: Pack,
    n: int,
    x: Tensor,
    q: Tensor | None,
    mask: Tensor | None,
    spec: CodecSpec,
    edge: Tensor | None = None,
    beside: Tensor | None = None,
    predictor: Sequence[Tensor] = (),
    importance: Tensor | None = None,
    scores: Sequence[Tensor] = (),
    slots: Tensor | None = None,
) -> None:
    """Store ``x`` as tokens ``[n, n + S)``; pages that fall out of the window are encoded by ``encode``.

    edge: in, what the tokens that are packed now are in the layer below, in the order of their pages; out, what they
        are in this one.
    beside: the same of this layer's keys, for values.
    importance, scores, slots: see `decide`, for specs with a budget; where ``importance`` is None, ``slots`` holds what
        was decided.
    """
    ring, compensation = pack.ring, pack.compensation
    if spec.subspace is not None and n == 0:
        if q is None:
            raise KVPassError("This codec needs the prompt's queries, and no attention handed them over.")
        compensation.copy_(fit_compensation(q, mask, x.shape[1], spec))
    if importance is not None:
        decide(importance, n, x, scores, mask, slots, spec)
    if spec.adaptive is not None:
        _stage(edge, ring, compensation, n, x, q, mask, spec)
        return
    stop = n + x.shape[2]
    gone = spec.evicted(stop)
    if gone or spec.pages(stop) > spec.pages(n):
        if spec.predictor == MEAN:
            predictor = (pack.center,)
        references = [reference for reference in (edge, beside) if reference is not None]
        pools = tuple(whole(pool, spec.pages(spec.stored(stop))) for pool in pack.pools)
        pages = _Pages(pools, spec, predictor, references, edge is not None)
        _pack(pages, encode, ring, compensation, n, x, gone, slots)
    layout(spec).write(ring, n, x)
    if gone:  # tokens behind the packed ones have moved up
        ring[:, :, spec.sinks :] = ring[:, :, spec.sinks :].roll(-gone, 2)


def _pack(
    pages: _Pages, encode: Callable, ring: Tensor, compensation: Tensor | None, n: int, x: Tensor, gone: int, slots
) -> None:
    """Encode the pages that leave the window with ``x``; ``gone`` packed tokens have to make room for them."""
    spec, size, written = pages.spec, pages.spec.page_size, 0
    first, last = spec.pages(n), spec.pages(n + x.shape[2])

    def leaving(start: int, end: int) -> Tensor:
        return layout(spec).leaving(ring, n, x, start, end)

    if spec.predictor == MEAN and not first:
        (center,) = pages.predictor
        center.copy_(fit_center(leaving(0, last), center.dtype))
    if gone:
        settled, first = min(first * size, spec.budget), (spec.budget + gone) // size
        if spec.budget:
            _settle(pages, leaving(settled // size, first), settled, slots, compensation)
            written = spec.budget
    step = max(1, CHUNK // size) if spec.predictor or pages.keep else max(1, last - first)
    for start in range(first, last, step):
        tokens = leaving(start, min(start + step, last))
        pages.write(start - gone // size, tokens, lambda _, y: encode(y, compensation, spec), written)
        written += tokens.shape[2]


def _stage(
    originals: Tensor, ring: Tensor, energy: Tensor | None, n: int, x: Tensor, q: Tensor | None, mask, spec: CodecSpec
) -> None:
    """Put the tokens that are due into ``originals``, where their widths are chosen when the forward is over: behind
    those of earlier calls, or at the beginning if those are not kept."""
    if energy is not None and n == 0:
        energy.copy_(query_energy(q, mask, x.shape[1]))
    first, last = spec.pages(n), spec.pages(n + x.shape[2])
    if last > first:
        tokens = layout(spec).leaving(ring, n, x, first, last)
        start = first * spec.page_size if spec.adaptive.keep_originals else 0
        originals[:, :, start : start + tokens.shape[2]].copy_(tokens, non_blocking=True)
    layout(spec).write(ring, n, x)


_QUANTILE = 0.9


def query_energy(q: Tensor, mask: Tensor | None, num_key_value_heads: int) -> Tensor:
    """What 90 % of the squared norms of queries ``[B, H_q, S, D]`` are below, over those of a KV head that are not
    padding: ``[B, H_kv, 1, 1]`` float32."""
    energy = q.float().square().sum(-1).unflatten(1, (num_key_value_heads, -1))
    if mask is not None:
        padding = ~not_padding(mask, q.shape[0], q.shape[2])
        energy = energy.masked_fill(padding[:, None, None], torch.nan)
    return energy.flatten(2).nanquantile(_QUANTILE, -1, keepdim=True).unsqueeze(-1)


def _settle(pages: _Pages, tokens: Tensor, settled: int, slots: Tensor, compensation: Tensor | None) -> None:
    """Write those of ``tokens`` that got a slot; the first ``settled`` candidates have theirs already."""
    heads, spec = tokens.shape[1], pages.spec
    slots = slots.expand(-1, heads, -1)
    index = (slots - settled).clamp_min(0).unsqueeze(-1).expand(-1, -1, -1, tokens.shape[3])
    arriving = tokens.gather(2, index)
    pages.write(0, arriving, lambda pools, y: replace_tokens(pools, y, slots >= settled, spec, compensation), 0)


def write_each(rings: Sequence[Tensor], n: int, xs: Sequence[Tensor], spec: CodecSpec) -> None:
    """Store the tokens ``xs`` of layers, ``[B, H, S, D]`` each, behind the ``n`` that are there, in their ``rings``."""
    for ring, x in zip(rings, xs, strict=True):
        layout(spec).write(ring, n, x)


def append_layers(
    encode: Callable, packs: Sequence[Pack], n: int, xs, spec: CodecSpec, write: Callable = write_each
) -> None:
    """`append` to each of many layers: pages, which are due together, are encoded by few calls, and ``write`` stores
    the tokens in the rings, as `write_each` does."""
    first, last = spec.pages(n), spec.pages(n + xs[0].shape[2])
    at_once = max(1, CHUNK // max(1, (last - first) * spec.page_size))
    rings = [pack.ring for pack in packs]
    for layers in _alike(xs, at_once) if last > first else ():
        leaving = [layout(spec).leaving(rings[i], n, xs[i], first, last) for i in layers]
        new = encode(leaving[0] if len(layers) == 1 else torch.cat(leaving), None, spec)
        if new[1].device.type == "cpu":
            check_finite(*new[1:])
        for which, pages in enumerate(new):
            for i, of_layer in zip(layers, pages.chunk(len(layers)), strict=True):
                whole(packs[i].pools[which], last)[:, :, first:last] = of_layer
    write(rings, n, xs, spec)


def _alike(xs: Sequence[Tensor], most: int) -> Iterator[list[int]]:
    """Which of ``xs`` have the same shape, up to ``most`` at a time."""
    by_shape: dict[torch.Size, list[int]] = {}
    for i, x in enumerate(xs):
        by_shape.setdefault(x.shape, []).append(i)
    for same in by_shape.values():
        yield from (same[i : i + most] for i in range(0, len(same), most))

"""Storing and attending over a server's blocks (`kvpass.codec.blocks`), for all requests of a step at once.

Attention takes every token from the place that a cache of `kvpass` would take it from: first tokens from the head of a
request's first block, packed ones from pages, and from the window those that are exact, the step's own among them. It
goes through a context a piece at a time, and adds up as it goes, so that memory does not grow with contexts.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvpass.codec.blocks import Blocks
from kvpass.codec.center import fit_centers
from kvpass.codec.kept import codec_of
from kvpass.codec.spec import CodecSpec
from kvpass.layout.batch import Batch, Due, Table, Tiles, pages_of

from . import flash
from .inductor import blocks as fused
from .inductor.pages import decode_all
from .reference import decode_predicted
from .table import DispatchKey, select

_VALUES = 1 << 20  # of keys, and scores, at a time
_SMALL = 1 << 18  # keys that are worth a mask


class Codecs(NamedTuple):
    """How pages are encoded and decoded: ``encode(x, fitted, spec)``, and ``decode(kept, spec, (), ())``."""

    encode: Callable[..., tuple[Tensor, ...]]
    decode: Callable[..., Tensor]


def codecs_for(spec: CodecSpec, device: torch.device, head_dim: int, lowering: str = "auto") -> Codecs:
    """Who encodes and decodes pages of ``spec``, as the table says. Raises `KVPassError` if nobody can."""

    def chosen(op: str):
        return select(DispatchKey(op, device.type, (str(spec),), head_dim=head_dim), lowering)

    decode = decode_all if chosen("decode").name == "inductor" else decode_predicted
    return Codecs(chosen("encode").run, decode)


class Layer(NamedTuple):
    """What attention over one layer needs besides a batch.

    window: ``[blocks, H, tokens, 2 * D]``, keys and values. codecs: of keys and of values. softcap: 0 for none.
    kernel: what attends to single tokens of requests, if there is one (`with_kernel`).
    """

    blocks: Blocks
    window: Tensor
    key: CodecSpec
    value: CodecSpec
    codecs: tuple[Codecs, Codecs]
    scale: float
    softcap: float = 0.0
    kernel: fused.Attention | None = None

    @property
    def sides(self) -> tuple[tuple[str, CodecSpec, tuple[Tensor, ...], Codecs], ...]:
        return (
            ("key", self.key, self.blocks.key, self.codecs[0]),
            ("value", self.value, self.blocks.value, self.codecs[1]),
        )

    def read_window(self, batch: Batch, owner: Tensor, tokens: Tensor) -> Tensor:
        """Keys and values of ``tokens`` ``[A, C]`` of requests ``owner`` ``[A]``: ``[A, C, H, 2 * D]``."""
        block, place = batch.window.find(owner[:, None], tokens)
        return self.window[block, :, place]


def with_kernel(layer: Layer) -> Layer:
    """``layer`` with the kernel that serves it, if one does."""
    served = layer.window.device.type == "cpu" and fused.serves(layer.key, layer.value)
    return layer._replace(kernel=fused.Attention(layer)) if served else layer


def warm(layer: Layer, q_heads: int) -> None:
    """Run everything once that may be compiled, on blocks as they are, which are not written to."""
    (_, heads, _, width), size, device = layer.window.shape, layer.key.page_size, layer.window.device
    past = torch.full((2,), layer.value.retention.window + layer.value.retention.sinks + size, device=device)
    tables = (Table(torch.zeros(2, 2 * int(past[0]), dtype=torch.long, device=device), one) for one in (1, 1))
    start = torch.arange(3, device=device)
    pages, window = tables
    q = layer.window.new_zeros(2, q_heads, width // 2)
    x = layer.window.new_zeros(2, heads, size, width // 2)
    first = pages.blocks[:, 0]
    for side, spec, _, codecs in layer.sides:
        codecs.encode(x, layer.blocks.fitted(side, codec_of(spec).fitted, first), spec)
    for each in (layer, layer._replace(kernel=None)):
        attend(Batch(start, past, past + 1, pages, window, 0), each, q, torch.empty_like(q))


def store(batch: Batch, layer: Layer, k: Tensor, v: Tensor) -> None:
    """Store the new tokens of all requests, ``[T, H, D]`` both, and encode the pages that leave the window."""
    block, place = batch.in_window
    k, v = k[: len(block)], v[: len(block)]  # what is behind them fills up a batch
    layer.window[block, :, place] = torch.cat([k, v], -1)
    if count := layer.key.retention.sinks:
        rows, block, place = batch.sinks(count)
        for (side, *_), x in zip(layer.sides, (k, v), strict=True):
            layer.blocks.head[f"{side}.sinks"][block, :, place] = x[rows]
    dim = k.shape[-1]
    for (side, spec, pools, codecs), own in zip(layer.sides, (slice(dim), slice(dim, None)), strict=True):
        due = batch.due(spec.retention)
        if not len(due.owner):
            continue
        x = layer.read_window(batch, due.owner, due.tokens)[..., own].transpose(1, 2).contiguous()  # [M, H, P, D]
        first = batch.pages.blocks[due.owner, 0]
        if spec.transform.center:
            _fit_centers(batch, layer.blocks.head[f"{side}.center"], due, x, spec)
            x = (x.float() - layer.blocks.head[f"{side}.center"][first].float()).to(x.dtype)
        fitted = layer.blocks.fitted(side, codec_of(spec).fitted, first)
        block, slot = batch.page(due.owner, due.page)
        for pool, pages in zip(pools, codecs.encode(x, fitted, spec), strict=True):
            pool[block, :, slot] = pages.squeeze(2)


def _fit_centers(batch: Batch, centers: Tensor, due: Due, x: Tensor, spec: CodecSpec) -> None:
    """Fit the mean of those requests whose first pages are due."""
    fresh = (pages_of(batch.past, spec.retention) == 0) & (pages_of(batch.total, spec.retention) > 0)
    requests = fresh.nonzero().flatten()
    if len(requests):
        number = fresh.long().cumsum(0) - 1
        theirs = fresh[due.owner].nonzero().flatten()
        found = fit_centers(x[theirs], number[due.owner[theirs]], len(requests), centers.dtype)
        centers[batch.pages.blocks[requests, 0]] = found


class _Piece(NamedTuple):
    """Tokens of the contexts of some tiles. keys, values: ``[N, H, C, D]`` float32. seen: ``[N, 1 or Q, C]`` bool."""

    tiles: Tensor
    keys: Tensor
    values: Tensor
    seen: Tensor

    def joined(self, other: "_Piece") -> "_Piece":
        """Both, of the same tiles, as one."""
        queries = max(self.seen.shape[1], other.seen.shape[1])
        seen = torch.cat([one.seen.expand(-1, queries, -1) for one in (self, other)], -1)
        keys, values = (torch.cat(pair, 2) for pair in zip(self[1:3], other[1:3], strict=True))
        return _Piece(self.tiles, keys, values, seen)


def attend(batch: Batch, layer: Layer, q: Tensor, out: Tensor) -> None:
    """Attention of all new tokens ``q`` ``[T, H_q, D]``, behind `store`, into ``out`` of that shape."""
    for tiles in batch.tiles:
        if layer.kernel is not None and tiles.rows.shape[1] == 1:
            rows = batch.rows(tiles, layer.key.retention, layer.value.retention, fused.UNIT)
            out[rows.row] = layer.kernel(q, rows).to(out.dtype)
            continue
        found = _attend(batch, tiles, layer, q)
        valid = tiles.valid
        out[tiles.rows[valid]] = found[valid].to(out.dtype)


def _attend(batch: Batch, tiles: Tiles, layer: Layer, q: Tensor) -> Tensor:
    """Attention of some tiles: ``[N, Q, H_q, D]`` float32."""
    rows = q[tiles.rows].float().transpose(1, 2).contiguous()  # [N, H_q, Q, D]
    total, logsum = torch.zeros_like(rows), rows.new_full((*rows.shape[:3], 1), flash.LEAST)
    if flash.serves(q.device, layer.softcap):
        on_piece, pieces = _flash_on_piece, _joined(_pieces(batch, tiles, layer, 0))
    else:
        on_piece, pieces = _on_piece, _pieces(batch, tiles, layer, q.shape[1])
    for piece in pieces:
        some = piece.tiles if len(piece.tiles) < len(rows) else slice(None)
        out, of_piece = on_piece(rows[some], piece, layer)
        new = torch.logaddexp(logsum[some], of_piece)
        total[some] = total[some] * (logsum[some] - new).exp() + out * (of_piece - new).exp()
        logsum[some] = new
    return total.transpose(1, 2)


def _on_piece(rows: Tensor, piece: _Piece, layer: Layer) -> tuple[Tensor, Tensor]:
    """Attention of ``rows`` ``[N, H_q, Q, D]`` over a piece, and the logarithm of the sum of its weights."""
    of_heads = rows.unflatten(1, (piece.keys.shape[1], -1))  # [N, H, R, Q, D]
    scores = of_heads @ piece.keys.mT.unsqueeze(2) * layer.scale
    if layer.softcap:
        scores = torch.tanh(scores / layer.softcap) * layer.softcap
    scores = scores.masked_fill(~piece.seen[:, None, None], flash.LEAST)
    logsum = scores.logsumexp(-1, keepdim=True)
    out = (scores - logsum).exp() @ piece.values.unsqueeze(2)
    return out.flatten(1, 2), logsum.flatten(1, 2)


def _flash_on_piece(rows: Tensor, piece: _Piece, layer: Layer) -> tuple[Tensor, Tensor]:
    """`_on_piece`, whose scores are never in memory."""
    return flash.attend(rows, piece.keys, piece.values, None if piece.seen.all() else piece.seen, layer.scale)


def _joined(pieces: Iterator[_Piece]) -> Iterator[_Piece]:
    """``pieces``, small ones of the same tiles as one. Large ones stay apart: all is seen of them, without a mask."""
    last = next(pieces)
    for piece in pieces:
        alike = len(last.tiles) == len(piece.tiles) and bool((last.tiles == piece.tiles).all())
        if alike and last.keys.numel() + piece.keys.numel() <= _SMALL:
            last = last.joined(piece)
        else:
            yield last
            last = piece
    yield last


def _pieces(batch: Batch, tiles: Tiles, layer: Layer, heads: int) -> Iterator[_Piece]:
    """The contexts of ``tiles``, piece by piece: those tokens of which keys and values are in pages, those of which one
    of both is, those that are exact, and sinks. heads: those whose scores of a piece are in memory."""
    retention, size = layer.key.retention, layer.key.page_size
    past = batch.past[tiles.owner]
    k_pages, v_pages = pages_of(past, layer.key.retention), pages_of(past, layer.value.retention)
    both, either = torch.minimum(k_pages, v_pages), torch.maximum(k_pages, v_pages)
    per_token = max(layer.window.shape[1] * layer.window.shape[3] // 2, heads * tiles.rows.shape[1])
    for start, count, some in _runs(both, max(1, _VALUES // (size * per_token))):
        page = start + torch.arange(count, device=past.device)
        seen = (page < both[some, None]).repeat_interleave(size, 1)
        page = torch.minimum(page, both[some, None] - 1)
        keys, values = (_decoded(batch, layer, side, tiles.owner[some], page) for side in range(2))
        yield _Piece(some, keys, values, seen[:, None])
    if extra := int((either - both).max()):
        yield from _half_packed(batch, tiles, layer, both, k_pages, v_pages, extra)
    begin = torch.minimum(batch.total[tiles.owner], retention.sinks + either * size)
    left = tiles.positions[:, -1] + 1 - begin  # behind the last query of a tile nobody looks
    for start, count, some in _runs(left, max(1, _VALUES // per_token)):
        token = begin[some, None] + start + torch.arange(count, device=past.device)
        seen = token[:, None] <= tiles.positions[some, :, None]
        token = torch.minimum(token, tiles.positions[some, -1:])
        keys, values = _exact(layer, batch, tiles.owner[some], token)
        yield _Piece(some, keys, values, seen)
    if retention.sinks:
        token = torch.arange(retention.sinks, device=past.device)
        first = batch.pages.blocks[tiles.owner, 0]
        keys, values = (layer.blocks.head[f"{side}.sinks"][first].float() for side in ("key", "value"))
        seen = token <= tiles.positions[..., None]
        absent = ~seen[:, -1, None, :, None]  # any bytes
        everyone = torch.arange(len(past), device=past.device)
        yield _Piece(everyone, keys.masked_fill(absent, 0), values.masked_fill(absent, 0), seen)


def _runs(counts: Tensor, at_once: int) -> Iterator[tuple[int, int, Tensor]]:
    """Pieces of ``counts[i]`` things of each tile i: where one begins, how many it is at most, and which have some."""
    most, start = int(counts.max()), 0
    while start < most:
        some = (counts > start).nonzero().flatten()
        count = min(max(1, at_once // len(some)), most - start)
        yield start, count, some
        start += count


def _decoded(batch: Batch, layer: Layer, which: int, owner: Tensor, page: Tensor) -> Tensor:
    """Pages ``[A, C]`` of requests ``owner`` ``[A]``: ``[A, H, C * P, D]`` float32."""
    side, spec, pools, codecs = layer.sides[which]
    block, slot = batch.page(owner[:, None], page)
    kept = [pool[block, :, slot].flatten(0, 1).unsqueeze(2) for pool in pools]  # [A * C, H, 1, ...]
    first = batch.pages.blocks[owner, 0]
    fitted = layer.blocks.fitted(side, codec_of(spec).fitted, first.repeat_interleave(page.shape[1]))
    values = codecs.decode([*kept, *fitted], spec, (), ())
    values = values.unflatten(0, page.shape).transpose(1, 2).flatten(2, 3)
    if spec.transform.center:
        values = values + layer.blocks.head[f"{side}.center"][first].float()
    return values.to(layer.window.dtype).float()  # as a cache decodes them


def _exact(layer: Layer, batch: Batch, owner: Tensor, token: Tensor) -> Sequence[Tensor]:
    """Keys and values of tokens ``[A, C]`` that are in the window: ``[A, H, C, D]`` float32 both."""
    return layer.read_window(batch, owner, token).transpose(1, 2).float().chunk(2, -1)


def _half_packed(
    batch: Batch, tiles: Tiles, layer: Layer, both: Tensor, k_pages: Tensor, v_pages: Tensor, extra: int
) -> Iterator[_Piece]:
    """Tokens whose keys are in pages and whose values are exact, or the other way round."""
    some = (k_pages != v_pages).nonzero().flatten()
    size, owner = layer.key.page_size, tiles.owner[some]
    page = both[some, None] + torch.arange(extra, device=both.device)
    token = layer.key.retention.sinks + page[..., None] * size + torch.arange(size, device=both.device)
    last = torch.maximum(k_pages, v_pages)[some, None]
    seen = (page < last).repeat_interleave(size, 1)
    token = torch.where(seen, token.flatten(1), batch.past[owner, None] - 1)
    exact = _exact(layer, batch, owner, token)
    packed = [_decoded(batch, layer, which, owner, torch.minimum(page, last - 1)) for which in range(2)]
    of_keys = (k_pages > v_pages)[some, None, None, None]
    keys, values = (
        torch.where(mine, *pair)
        for mine, pair in zip((of_keys, ~of_keys), zip(packed, exact, strict=True), strict=True)
    )
    yield _Piece(some, keys, values, seen[:, None])

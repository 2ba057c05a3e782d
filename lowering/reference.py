"""Plain PyTorch: the definition of every op, the oracle of the tests, and the eager path."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpass.codec.adaptive import Tokens, carve, decode_tokens, unpack_levels
from kvpass.codec.frame import mean_of_tokens, out_of_frames
from kvpass.codec.pages import decode_pages, encode_pages
from kvpass.codec.predictor import predict
from kvpass.codec.rope import rotate
from kvpass.codec.spec import CodecSpec
from kvpass.codec.tensors import Pack
from kvpass.layout.pool import whole
from kvpass.layout.window import layout

from .append import CHUNK, append, append_layers
from .fit_sequence import not_padding
from .table import implements


@implements("encode", "reference")
def encode(x: Tensor, fitted: Sequence[Tensor], spec: CodecSpec) -> tuple[Tensor, ...]:
    return encode_pages(x, spec, fitted)


def decode_predicted(pages: Sequence[Tensor], spec: CodecSpec, references, predictor) -> Tensor:
    """What is kept of whole pages, decoded, with what was predicted of them; ``references`` hold the same tokens."""
    values, kind = decode_pages(*pages, spec), spec.transform.predictor
    return values + predict(kind, predictor, references, spec.page_size) if kind else values


def pieces(
    decode_fn, pack: Pack, n: int, spec: CodecSpec, references=(), predictor=(), at_once=None
) -> Iterator[Tensor]:
    """Sinks, pages (``at_once``, or all; decoded by ``decode_fn``, see `decode_predicted`) and window, as stored.

    references: what the predictor looks at, all ``n`` tokens each.
    """
    used, sinks, where, ring = spec.retention.pages(n), spec.retention.sinks, layout(spec.retention), pack.ring
    pools, fitted = [whole(pool, used) for pool in pack.pools], pack.decodes_with(spec)
    if sinks:
        yield ring[:, :, : min(n, sinks)]
    for first in range(0, used, at_once or max(1, used)):
        pages = slice(first, min(first + (at_once or used), used))
        same = [where.in_pages(reference, pages.start, pages.stop) for reference in references]
        values = decode_fn([*(pool[:, :, pages] for pool in pools), *fitted], spec, same, predictor)
        if (center := pack.fitted.get("center")) is not None:
            values = values + mean_of_tokens(center, pack.frames, spec.page_size, values.shape[2])
        yield out_of_frames(values, pack.frames, first, spec.page_size)
    yield where.read(ring, n)


def read(decode_fn, pack: Pack, n: int, spec: CodecSpec, references=(), predictor=(), present=None) -> Tensor:
    """All `pieces` in token order, and ``present`` tokens ``[B, H, S, D]`` behind them."""
    at_once = max(1, CHUNK // spec.page_size) if spec.transform.subtracts else None
    parts = pieces(decode_fn, pack, n, spec, references, predictor, at_once)
    stored, order = [part.to(pack.ring.dtype) for part in parts], layout(spec.retention).token_order(n)
    if order is not None:
        stored = [torch.cat(stored, 2).index_select(2, order.to(pack.ring.device))]
    return torch.cat(stored if present is None else [*stored, present], 2)


@implements("decode", "reference")
def decode(pack: Pack, n: int, spec: CodecSpec, references=(), predictor=()) -> Tensor:
    if spec.quantizer.adaptive is not None:
        return _read_adaptive(pack, n, spec)
    return read(decode_predicted, pack, n, spec, references, predictor)


def _read_adaptive(pack: Pack, n: int, spec: CodecSpec) -> Tensor:
    """Tokens with widths of their own."""
    codes, scale, zero_point, levels, outliers, where = pack.pools
    packed, sinks = spec.retention.packed(n), min(n, spec.retention.sinks)
    pool, places = pack.planes
    planes = [codes[:, :, :packed], *carve(pool, places, codes.shape[:2])]
    levels = unpack_levels(levels[:, :, : packed // spec.page_size])
    each = (tensor[:, :, :packed] for tensor in (scale, zero_point))
    tokens = Tokens(planes, levels, *each, *(tensor[:, 0, :packed] for tensor in (outliers, where)))
    values = decode_tokens(tokens, spec.quantizer.adaptive.widths).to(pack.ring.dtype)
    return torch.cat([pack.ring[:, :, :sinks], values, layout(spec.retention).read(pack.ring, n)], 2)


@implements("append_", "reference")
def append_(*args) -> None:
    append(encode, *args)


@implements("append_layers_", "reference")
def append_layers_(*args) -> None:
    append_layers(encode, *args)


def causal_mask(queries: int, tokens: int, device: torch.device) -> Tensor:
    """Which of the keys each of the last ``queries`` of ``tokens`` tokens sees, ``[S, T]`` bool."""
    return torch.ones(queries, tokens, dtype=torch.bool, device=device).tril(tokens - queries)


def seen_from(starts: Tensor, queries: int, tokens: int) -> Tensor:
    """Which tokens each of the last ``queries`` sees, if rows begin at ``starts``: ``[B, 1, S, T]`` bool."""
    behind = torch.arange(tokens, device=starts.device) >= starts[:, None, None, None]
    return causal_mask(queries, tokens, starts.device) & behind


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, softcap: float, sinks=None
) -> Tensor:
    """Grouped-query attention of ``q`` ``[B, H_q, S, D]`` over dense ``k``, ``v`` ``[B, H_kv, T, D]``, contiguous."""
    queries, tokens = q.shape[2], k.shape[2]
    if queries == 1:
        causal = False
    if causal and tokens > queries:
        mask, causal = causal_mask(queries, tokens, q.device), False
    if softcap or sinks is not None:
        return _spelled_out_attention(q, k, v, mask, causal, scale, softcap, sinks)
    if queries == 1 and (mask is None or mask.shape[1] == 1):  # query heads of a KV head as rows of one product
        out = F.scaled_dot_product_attention(q.view(*k.shape[:2], -1, q.shape[3]), k, v, attn_mask=mask, scale=scale)
        return out.reshape(*q.shape[:3], v.shape[3]).contiguous()
    gqa = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=gqa)
    return out.contiguous()


def _spelled_out_attention(q, k, v, mask, causal, scale, softcap, sinks):
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = q.float() @ k.float().mT * scale
    if causal:
        mask = causal_mask(scores.shape[-2], scores.shape[-1], q.device)
    weights = attention_weights(scores, mask, softcap, sinks)
    return (weights[..., : v.shape[2]] @ v.float()).to(q.dtype).contiguous()


def attention_weights(scores: Tensor, mask: Tensor | None, softcap: float, sinks: Tensor | None) -> Tensor:
    """Softmax of ``scores`` ``[B, H_q, S, T]``; that of the sinks comes last, if there are any."""
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    return scores.softmax(-1).nan_to_num(0)  # a query that may see nothing gets zeros, as in SDPA


@implements("attend", "reference")
def attend(
    q, key, value, n, k_new, v_new, mask, causal, scale, softcap, k_spec, v_spec, rotary=None, sinks=None,
    statistic="", importance=None, length=None, starts=None, decode_fn=decode_predicted,
) -> list[Tensor]:  # fmt: skip
    """``key`` and ``value`` are a `Pack` each: decode the past, attend to it and to the present. Or a past ``[B, H_kv,
    n, D]`` that is decoded already.

    rotary: (cos, sin, rope) for keys stored before rotary embedding. sinks: logits ``[H_q]`` without values. statistic,
    importance, length, starts: see `kvpass.ops`. decode_fn: who decodes pages.
    """
    if starts is not None:
        mask, causal = seen_from(starts, q.shape[2], n + q.shape[2]), False
    if not n:
        k, v = k_new, v_new
    else:
        v = _behind(value, decode_fn, n, v_spec, v_new)
        k = _behind(key, decode_fn, n, k_spec, k_new, rotary)
    if mask is not None and importance is not None and k_spec.retention.evicts:
        mask = with_past(mask, importance, n, q.shape)
    out = attention(q, k, v, mask, causal, scale, softcap, sinks)
    return [out, attention_mass(q, k, mask, causal, scale, softcap, sinks, statistic)] if statistic else [out]


def _behind(past: Pack | Tensor, decode_fn, n: int, spec: CodecSpec, present: Tensor, rotary=None) -> Tensor:
    """The tokens of the past, decoded and rotated, and the present behind them."""
    if isinstance(past, Pack):
        if rotary is None:
            return read(decode_fn, past, n, spec, present=present)
        past = read(decode_fn, past, n, spec)
    return torch.cat([past if rotary is None else rotate(past, *rotary), present], 2)


def with_past(mask: Tensor, importance: Tensor, n: int, queries: tuple[int, ...]) -> Tensor:
    """``mask`` ``[B or 1, H_q or 1, S, n + S]`` with columns of the past by ``importance``, where padding is -inf."""
    batch, heads, new, _ = queries
    valid = importance[..., :n] > -torch.inf
    if valid.shape[1] > 1:
        valid = valid.repeat_interleave(heads // valid.shape[1], 1)
    if mask.dtype != torch.bool:
        valid = torch.zeros(valid.shape, dtype=mask.dtype, device=mask.device).masked_fill(~valid, -torch.inf)
    rows = max(valid.shape[1], mask.shape[1])
    past, present = valid[:, :, None].expand(batch, rows, new, -1), mask[..., n:].expand(batch, rows, -1, -1)
    return torch.cat([past, present], -1)


_ROWS, _WEIGHTS = 256, 1 << 21  # queries, and of one head weights, held at a time: memory does not grow with T x T


def attention_mass(q, k, mask, causal, scale, softcap, sinks, statistic="sum") -> Tensor:
    """The attention each key was paid by the queries ``[B, H_q, S, D]`` that are not padding and the query heads of its
    KV head, see `kvpass.ops`: ``[B, H_kv, T]`` float32. Needs memory for some rows of weights, not for all."""
    queries, tokens, heads = q.shape[2], k.shape[2], k.shape[1]
    own = None if mask is None else not_padding(mask, q.shape[0], queries)
    total, k = torch.zeros(*k.shape[:3], device=k.device), k.float()
    behind, last = torch.arange(tokens, device=q.device), statistic.removeprefix("max-")
    step = max(16, min(_ROWS, _WEIGHTS // tokens))
    for first in range(0 if statistic == "sum" else max(0, queries - int(last)), queries, step):
        rows, seen = slice(first, min(first + step, queries)), tokens
        part = None if mask is None else mask[:, :, rows]
        if causal:
            seen = tokens - queries + rows.stop  # nobody here looks behind it
            part = behind[:seen] <= torch.arange(rows.start, rows.stop, device=q.device)[:, None] + tokens - queries
        chunk = q[:, :, rows].float().unflatten(1, (heads, -1))
        scores = (chunk @ k[:, :, :seen].unsqueeze(2).mT).flatten(1, 2) * scale
        weights = attention_weights(scores, part, softcap, sinks)[..., :seen]
        if own is not None:
            weights = weights * own[:, None, rows, None]
        weights, mass = weights.unflatten(1, (heads, -1)), total[..., :seen]
        mass.copy_(mass + weights.sum((2, 3)) if statistic == "sum" else torch.maximum(mass, weights.amax((2, 3))))
    return total

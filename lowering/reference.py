"""Plain PyTorch: the definition of every op, the oracle of the tests, and the eager path."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpass.codec.adaptive import Tokens, carve, decode_tokens, unpack_levels
from kvpass.codec.pages import decode_pages, encode_pages
from kvpass.codec.predictor import predict
from kvpass.codec.rope import rotate
from kvpass.codec.spec import CodecSpec
from kvpass.layout.pool import whole
from kvpass.layout.window import layout

from .append import CHUNK, append, append_layers, not_padding
from .table import implements


@implements("encode", "reference")
def encode(x: Tensor, compensation: Tensor | None, spec: CodecSpec) -> tuple[Tensor, Tensor, Tensor]:
    return encode_pages(x, spec, compensation)


def decode_predicted(codes, scale, zero_point, spec: CodecSpec, references, predictor) -> Tensor:
    """Whole pages, with what was subtracted from them; ``references`` hold the same tokens."""
    values = decode_pages(codes, scale, zero_point, spec)
    return values + predict(spec.predictor, predictor, references, spec.page_size) if spec.predictor else values


def pieces(
    decode_fn, codes, scale, zero_point, ring, n: int, spec: CodecSpec, references=(), predictor=(), at_once=None
) -> Iterator[Tensor]:
    """Sinks, pages (``at_once``, or all; decoded by ``decode_fn``, see `decode_predicted`) and window, as stored.

    references: what the predictor looks at, all ``n`` tokens each.
    """
    used, where = spec.pages(n), layout(spec)
    opened = [whole(pool, used) for pool in (codes, scale, zero_point)]
    if spec.sinks:
        yield ring[:, :, : min(n, spec.sinks)]
    for first in range(0, used, at_once or max(1, used)):
        pages = slice(first, min(first + (at_once or used), used))
        same = [where.in_pages(reference, pages.start, pages.stop) for reference in references]
        yield decode_fn(*(pool[:, :, pages] for pool in opened), spec, same, predictor)
    yield where.read(ring, n)


def read(
    decode_fn, codes, scale, zero_point, ring, n: int, spec: CodecSpec, references=(), predictor=(), present=None
) -> Tensor:
    """All `pieces` in token order, and ``present`` tokens ``[B, H, S, D]`` behind them."""
    at_once = max(1, CHUNK // spec.page_size) if spec.predictor else None
    parts = pieces(decode_fn, codes, scale, zero_point, ring, n, spec, references, predictor, at_once)
    stored, order = [part.to(ring.dtype) for part in parts], layout(spec).token_order(n)
    if order is not None:
        stored = [torch.cat(stored, 2).index_select(2, order.to(ring.device))]
    return torch.cat(stored if present is None else [*stored, present], 2)


@implements("decode", "reference")
def decode(codes, scale, zero_point, ring, n: int, spec: CodecSpec, references=(), tables=()) -> Tensor:
    if spec.adaptive is None:
        return read(decode_predicted, codes, scale, zero_point, ring, n, spec, references, tables)
    levels, outliers, where, pool, places = tables
    packed, sinks = spec.packed(n), min(n, spec.sinks)
    planes = [codes[:, :, :packed], *carve(pool, places, codes.shape[:2])]
    levels = unpack_levels(levels[:, :, : packed // spec.page_size])
    each = (tensor[:, :, :packed] for tensor in (scale, zero_point))
    tokens = Tokens(planes, levels, *each, *(tensor[:, 0, :packed] for tensor in (outliers, where)))
    values = decode_tokens(tokens, spec.adaptive.widths).to(ring.dtype)
    return torch.cat([ring[:, :, :sinks], values, layout(spec).read(ring, n)], 2)


@implements("append_", "reference")
def append_(*args) -> None:
    append(encode, *args)


@implements("append_layers_", "reference")
def append_layers_(*args) -> None:
    append_layers(encode, *args)


def causal_mask(queries: int, tokens: int, device: torch.device) -> Tensor:
    """Which of the keys each of the last ``queries`` of ``tokens`` tokens sees, ``[S, T]`` bool."""
    return torch.ones(queries, tokens, dtype=torch.bool, device=device).tril(tokens - queries)


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
        mask = causal_mask(*scores.shape[-2:], q.device)
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
    q, key, value, n, k_new, v_new, mask, causal, scale, softcap, k_spec, v_spec, rotary=None, sinks=None, center=None,
    decode_fn=decode_predicted,
) -> Tensor:  # fmt: skip
    """``key`` and ``value`` are (codes, scale, zero_point, ring): decode the past, attend to it and to the present.

    rotary: (cos, sin, rope) for keys stored before rotary embedding. sinks: logits ``[H_q]`` without values. center:
    the mean that was subtracted from keys. decode_fn: who decodes pages.
    """
    k, v = _all_tokens(decode_fn, key, value, n, k_new, v_new, k_spec, v_spec, rotary, center)
    return attention(q, k, v, mask, causal, scale, softcap, sinks)


def _all_tokens(decode_fn, key, value, n, k_new, v_new, k_spec, v_spec, rotary, center) -> tuple[Tensor, Tensor]:
    """Keys and values of the past, decoded and keys rotated, with those of the call behind them."""
    if not n:
        return k_new, v_new
    v = read(decode_fn, *value, n, v_spec, present=v_new)
    k = read(decode_fn, *key, n, k_spec, (), (center,), k_new if rotary is None else None)
    return k if rotary is None else torch.cat([rotate(k, *rotary), k_new], 2), v


@implements("attend_decoded", "reference")
def attend_decoded(q, k, v, k_new, v_new, mask, causal, scale, softcap, rotary=None, sinks=None) -> Tensor:
    """The same over a past ``k``, ``v`` ``[B, H_kv, n, D]`` that is decoded already."""
    return attention(q, *_with_present(k, v, k_new, v_new, rotary), mask, causal, scale, softcap, sinks)


def _with_present(k, v, k_new, v_new, rotary) -> tuple[Tensor, Tensor]:
    """Keys, rotated, and values of a decoded past with those of the call behind them."""
    if not k.shape[2]:
        return k_new, v_new
    return torch.cat([k if rotary is None else rotate(k, *rotary), k_new], 2), torch.cat([v, v_new], 2)


@implements("attend_scored", "reference")
def attend_scored(
    q, key, value, n, k_new, v_new, mask, causal, scale, softcap, k_spec, v_spec, rotary, sinks, center, statistic,
    importance, decode_fn=decode_predicted,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention, and what was paid to each token: see `kvpass.ops`."""
    if len(key) > 1:
        k, v = _all_tokens(decode_fn, key, value, n, k_new, v_new, k_spec, v_spec, rotary, center)
    else:
        k, v = _with_present(key[0], value[0], k_new, v_new, rotary)
    if mask is not None and k_spec.budget is not None:
        mask = with_past(mask, importance, n, q.shape)
    out = attention(q, k, v, mask, causal, scale, softcap, sinks)
    if not statistic:
        return out, q.new_empty((*k.shape[:2], 0), dtype=torch.float32)
    return out, attention_paid(q, k, mask, causal, scale, softcap, sinks, statistic)


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


def attention_paid(q, k, mask, causal, scale, softcap, sinks, statistic="sum") -> Tensor:
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
        weights, paid = weights.unflatten(1, (heads, -1)), total[..., :seen]
        paid.copy_(paid + weights.sum((2, 3)) if statistic == "sum" else torch.maximum(paid, weights.amax((2, 3))))
    return total

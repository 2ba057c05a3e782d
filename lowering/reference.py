"""Plain PyTorch: the definition of every op, the oracle of the tests, and the eager path."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpass.codec.affine import check_finite
from kvpass.codec.pages import decode_pages, encode_pages, share_codes
from kvpass.codec.predict import MEAN, fit_center, predict
from kvpass.codec.rotary import rotate
from kvpass.codec.spec import CodecSpec
from kvpass.codec.subspace import compensation_matrix, precision_matrix
from kvpass.codec.window import layout, read_tokens, write_tokens
from kvpass.errors import KVPassError

from .table import implements


@implements("encode", "reference")
def encode(x: Tensor, compensation: Tensor | None, spec: CodecSpec) -> tuple[Tensor, Tensor, Tensor]:
    return encode_pages(x, spec, compensation)


_CHUNK = 4096  # tokens predicted at a time: what is needed in between stays small


def decode_predicted(codes, scale, zero_point, spec: CodecSpec, references, predictor) -> Tensor:
    """Whole pages, with what was subtracted from them; ``references`` hold the same tokens."""
    values = decode_pages(codes, scale, zero_point, spec)
    return values + predict(spec.predictor, predictor, references, spec.page_size) if spec.predictor else values


def read(decode_fn, codes, scale, zero_point, ring, n: int, spec: CodecSpec, references=(), predictor=()) -> Tensor:
    """Sinks, pages (decoded by ``decode_fn``, see `decode_predicted`) and window, in token order.

    references: what the predictor looks at, all ``n`` tokens each.
    """
    used, where, chunks = spec.pages(n), layout(spec), []
    step = max(1, _CHUNK // spec.page_size) if spec.predictor else max(1, used)
    for first in range(0, max(1, used), step):
        pages = slice(first, min(first + step, used))
        pools = (pool[:, :, pages] for pool in (codes, scale, zero_point))
        same = [where.in_pages(reference, pages.start, pages.stop) for reference in references]
        chunks.append(decode_fn(*pools, spec, same, predictor).to(ring.dtype))
    sinks = min(n, spec.sinks)
    stored = torch.cat([ring[:, :, :sinks], *chunks, read_tokens(ring, spec, where.exact(n))], 2)
    order = where.token_order(n)
    return stored if order is None else stored.index_select(2, order.to(ring.device))


@implements("decode", "reference")
def decode(*args) -> Tensor:
    return read(decode_predicted, *args)


def fit_compensation(q: Tensor, mask: Tensor | None, num_key_value_heads: int, spec: CodecSpec) -> Tensor:
    """The compensation matrix of the prompt's queries ``[B, H_q, S, D]``; queries of padding tokens (those that may not
    attend to themselves) are left out."""
    stacked = q.unflatten(1, (num_key_value_heads, -1))
    valid = None
    if mask is not None:
        own = mask[:, 0].diagonal(mask.shape[-1] - q.shape[2], -2, -1)
        own = own if own.dtype == torch.bool else own == 0
        valid = own.expand(q.shape[0], -1).repeat(1, stacked.shape[2])
    precision = precision_matrix(stacked.flatten(2, 3), spec.subspace, valid)
    return compensation_matrix(precision, spec.subspace.block_size)


def append(
    encode_fn,
    codes,
    scale,
    zero_point,
    ring,
    compensation,
    n,
    x,
    q,
    mask,
    spec: CodecSpec,
    edge=None,
    beside=None,
    predictor=(),
    center=None,
) -> None:
    """Store ``x`` as tokens ``[n, n + S)``; pages that fall out of the window are encoded by ``encode_fn``.

    edge: in, what the tokens that leave are in the layer below, by pages; out, what they are in this one.
    beside: the same of this layer's keys, for values.
    center: where the mean is kept that the predictor of that name subtracts.
    """
    if spec.subspace is not None and n == 0:
        if q is None:
            raise KVPassError("This codec needs the prompt's queries, and no attention handed them over.")
        compensation.copy_(fit_compensation(q, mask, x.shape[1], spec))
    stop = n + x.shape[2]
    first, last = spec.pages(n), spec.pages(stop)
    if last > first:
        tokens = _leaving(ring, n, x, layout(spec).page_tokens(first, last), spec)
        if spec.predictor == MEAN:
            predictor = (center,)
            if not first:
                center.copy_(fit_center(tokens, center.dtype))
        step = max(1, _CHUNK // spec.page_size) if spec.predictor or edge is not None else last - first
        for start in range(first, last, step):
            stop_page = min(start + step, last)
            part = slice((start - first) * spec.page_size, (stop_page - first) * spec.page_size)
            references = [t[:, :, part] for t in (edge, beside) if t is not None]
            _encode_into(
                [pool[:, :, start:stop_page] for pool in (codes, scale, zero_point)],
                encode_fn, compensation, tokens[:, :, part], spec, references, predictor, edge is not None,
            )  # fmt: skip
    write_tokens(ring, spec, n, x)


def _encode_into(pools, encode_fn, compensation, x, spec, references, predictor, keep: bool) -> None:
    """Encode whole pages ``x`` into ``pools``; with ``keep``, leave what they decode to in the first reference."""
    prediction = predict(spec.predictor, predictor, references, spec.page_size) if spec.predictor else None
    residual = x if prediction is None else (x.float() - prediction).to(x.dtype)
    new = encode_fn(residual, compensation, spec)
    if x.device.type == "cpu":
        check_finite(*new[1:])
    if spec.own_codes < 1:
        new = share_codes(pools[0], x, new, spec)
    for pool, pages in zip(pools, new, strict=True):
        pool.copy_(pages)
    if keep:
        values = decode_pages(*new, spec)
        references[0].copy_(values if prediction is None else values + prediction)


def _leaving(ring: Tensor, n: int, x: Tensor, tokens: Tensor, spec: CodecSpec) -> Tensor:
    """``tokens``, of which those before ``n`` are in the ring and the others in ``x``."""
    known, device = tokens < n, ring.device
    if not known.any():
        return x.index_select(2, (tokens - n).to(device))
    if known.all():
        return read_tokens(ring, spec, tokens)
    out = x.new_empty((*x.shape[:2], len(tokens), x.shape[3]))
    out[:, :, known.to(device)] = read_tokens(ring, spec, tokens[known])
    out[:, :, ~known.to(device)] = x.index_select(2, (tokens[~known] - n).to(device))
    return out


@implements("append_", "reference")
def append_(*args) -> None:
    append(encode, *args)


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, softcap: float, sinks=None
) -> Tensor:
    """Grouped-query attention of ``q`` ``[B, H_q, S, D]`` over dense ``k``, ``v`` ``[B, H_kv, T, D]``, contiguous."""
    queries, tokens = q.shape[2], k.shape[2]
    if queries == 1:
        causal = False
    if causal and tokens > queries:
        mask = torch.ones(queries, tokens, dtype=torch.bool, device=q.device).tril(tokens - queries)
        causal = False
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
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1).nan_to_num(0)  # a query that may see nothing gets zeros, as in SDPA
    return (weights[..., : v.shape[2]] @ v.float()).to(q.dtype).contiguous()


@implements("attend", "reference")
def attend(
    q, key, value, n, k_new, v_new, mask, causal, scale, softcap, k_spec, v_spec, rotary=None, sinks=None, center=None
) -> Tensor:
    """``key`` and ``value`` are (codes, scale, zero_point, ring): decode the past, attend to it and to the present.

    rotary: (cos, sin, rope) for keys stored before rotary embedding. sinks: logits ``[H_q]`` without values. center:
    the mean that was subtracted from keys.
    """
    k, v = decode(*key, n, k_spec, (), (center,)), decode(*value, n, v_spec)
    return attend_decoded(q, k, v, k_new, v_new, mask, causal, scale, softcap, rotary, sinks)


@implements("attend_decoded", "reference")
def attend_decoded(q, k, v, k_new, v_new, mask, causal, scale, softcap, rotary=None, sinks=None) -> Tensor:
    """The same over a past ``k``, ``v`` ``[B, H_kv, n, D]`` that is decoded already."""
    if k.shape[2]:
        k_new = torch.cat([k if rotary is None else rotate(k, *rotary), k_new], 2)
        v_new = torch.cat([v, v_new], 2)
    return attention(q, k_new, v_new, mask, causal, scale, softcap, sinks)

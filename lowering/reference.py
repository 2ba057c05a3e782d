"""Implements every op in plain PyTorch: the definition of the ops, the oracle of the tests, and the eager path."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpass.codec.adaptive import Tokens, carve, dequantize_tokens, unpack_levels
from kvpass.codec.page_rope import from_page_rope, mean_of_tokens
from kvpass.codec.pages import dequantize_pages, quantize_pages
from kvpass.codec.predictor import predict
from kvpass.codec.rope import rotate
from kvpass.codec.spec import CodecSpec
from kvpass.codec.tensors import Pack
from kvpass.layout.pool import whole
from kvpass.layout.window import layout

from .append import CHUNK, append, append_layers
from .call_types import AppendCall, AppendLayersCall, AttendCall, DequantizeCall, parse_statistic
from .fit_sequence import not_padding
from .table import EAGER, implements


@implements("quantize", "reference", lowering=EAGER)
def quantize(x: Tensor, fitted: Sequence[Tensor], spec: CodecSpec) -> tuple[Tensor, ...]:
    return quantize_pages(x, spec, fitted)


def dequantize_predicted(pages: Sequence[Tensor], spec: CodecSpec, references, predictor) -> Tensor:
    """Dequantize whole pages and add the prediction, if the spec has a predictor. ``references`` hold the same tokens
    (`codec.predictor.predict`)."""
    values, kind = dequantize_pages(*pages, spec), spec.transform.predictor
    return values + predict(kind, predictor, references, spec.page_size) if kind else values


def pieces(dequantize_fn, call: DequantizeCall, at_once=None) -> Iterator[Tensor]:
    """Yield the dequantized tokens of ``call`` in storage order: sinks, pages, window; each ``[B, H, T, D]``.

    dequantize_fn: dequantizes pages, as `dequantize_predicted`.
    at_once: number of pages per piece; None yields all pages as one piece.
    """
    pack, n, spec = call[:3]
    used, sinks = spec.retention.pages(n), spec.retention.sinks
    if sinks:
        yield pack.ring[:, :, : min(n, sinks)]
    for first in range(0, used, at_once or max(1, used)):
        yield read_pages(dequantize_fn, call, slice(first, min(first + (at_once or used), used)))
    yield layout(spec.retention).read(pack.ring, n)


def read_pages(dequantize_fn, call: DequantizeCall, pages: slice | Tensor) -> Tensor:
    """The dequantized tokens of ``pages``, in storage order: ``[B, H, T, D]``. A selection, ``[M]`` int64, can only be
    read without predictors and page-relative RoPE. For other arguments see `pieces`."""
    pack, n, spec, references, predictor = call
    used, fitted = spec.retention.pages(n), pack.dequantizes_with(spec)
    pools, same = [whole(pool, used)[:, :, pages] for pool in pack.pools], []
    if isinstance(pages, slice):
        same = [layout(spec.retention).in_pages(reference, pages.start, pages.stop) for reference in references]
    values = dequantize_fn([*pools, *fitted], spec, same, predictor)
    if (center := pack.fitted.get("center")) is not None:
        values = values + mean_of_tokens(center, pack.page_tables, spec.page_size, values.shape[2])
    if isinstance(pages, slice):
        return from_page_rope(values, pack.page_tables, pages.start, spec.page_size)
    return values


def read(dequantize_fn, call: DequantizeCall, present: Tensor | None = None) -> Tensor:
    """Concatenate all `pieces` in token order: ``[B, H, n, D]`` in the dtype of the cache. With ``present``
    ``[B, H, S, D]``, these tokens are appended."""
    pack, n, spec = call[:3]
    at_once = max(1, CHUNK // spec.page_size) if spec.transform.subtracts else None
    parts = pieces(dequantize_fn, call, at_once)
    stored, order = [part.to(pack.ring.dtype) for part in parts], layout(spec.retention).token_order(n)
    if order is not None:
        stored = [torch.cat(stored, 2).index_select(2, order.to(pack.ring.device))]
    return torch.cat(stored if present is None else [*stored, present], 2)


@implements("dequantize", "reference", lowering=EAGER)
def dequantize(call: DequantizeCall) -> Tensor:
    if call.spec.quantizer.adaptive is not None:
        return _read_adaptive(*call[:3])
    return read(dequantize_predicted, call)


def _read_adaptive(pack: Pack, n: int, spec: CodecSpec) -> Tensor:
    """`read` for codecs with per-token bit widths."""
    codes, scale, zero_point, levels, outliers, where = pack.pools
    packed, sinks = spec.retention.packed(n), min(n, spec.retention.sinks)
    pool, places = pack.planes
    planes = [codes[:, :, :packed], *carve(pool, places, codes.shape[:2])]
    classes = len(spec.quantizer.adaptive.widths)
    levels = unpack_levels(levels[:, :, : packed // spec.page_size], spec.page_size, classes)
    each = (tensor[:, :, :packed] for tensor in (scale, zero_point))
    tokens = Tokens(planes, levels, *each, *(tensor[:, 0, :packed] for tensor in (outliers, where)))
    values = dequantize_tokens(tokens, spec.quantizer.adaptive.widths).to(pack.ring.dtype)
    return torch.cat([pack.ring[:, :, :sinks], values, layout(spec.retention).read(pack.ring, n)], 2)


@implements("append_", "reference", lowering=EAGER)
def append_(call: AppendCall) -> None:
    append(quantize, call)


@implements("append_layers_", "reference", lowering=EAGER)
def append_layers_(call: AppendLayersCall) -> None:
    append_layers(quantize, call)


def causal_mask(queries: int, tokens: int, device: torch.device) -> Tensor:
    """Causal mask of the last ``queries`` of ``tokens`` tokens, ``[S, T]`` bool; True: may attend."""
    return torch.ones(queries, tokens, dtype=torch.bool, device=device).tril(tokens - queries)


def seen_from(starts: Tensor, queries: int, tokens: int) -> Tensor:
    """`causal_mask` that also hides left padding: ``[B, 1, S, T]`` bool. starts: ``[B]`` int64, the first token of each
    sample that is not padding."""
    behind = torch.arange(tokens, device=starts.device) >= starts[:, None, None, None]
    return causal_mask(queries, tokens, starts.device) & behind


def with_starts(call: AttendCall) -> AttendCall:
    """``call`` with ``starts`` replaced by an equivalent mask."""
    if call.starts is None:
        return call
    queries = call.q.shape[2]
    return call._replace(mask=seen_from(call.starts, queries, call.n + queries), causal=False, starts=None)


def with_past(call: AttendCall) -> AttendCall:
    """``call`` with a mask whose columns for the past match the stored tokens, if its cache evicts tokens."""
    if call.mask is None or call.importance is None or not call.k_spec.retention.evicts:
        return call
    return call._replace(mask=_mask_with_past(call.mask, call.importance, call.n, call.q.shape))


def attention(call: AttendCall, k: Tensor, v: Tensor) -> Tensor:
    """Grouped-query attention over dense keys and values: ``[B, H_q, S, D]``, contiguous.

    call: the queries, mask, scale, softcap and sinks.
    k, v: ``[B, H_k, T, D_k]`` and ``[B, H_v, T, D_v]``, the past and the tokens of the call.
    """
    if k.shape[1] != v.shape[1]:
        k, v = (x.repeat_interleave(call.q.shape[1] // x.shape[1], 1) for x in (k, v))
    q, mask, queries, tokens = call.q, call.mask, call.q.shape[2], k.shape[2]
    spelled_out = call.softcap or call.sinks is not None
    causal = call.causal and queries > 1
    if causal and (tokens > queries or spelled_out):
        mask, causal = causal_mask(queries, tokens, q.device), False
    if spelled_out:
        return _spelled_out_attention(call, k, v, mask)
    if queries == 1 and (mask is None or mask.shape[1] == 1):  # query heads of a KV head become rows
        rows = q.view(*k.shape[:2], -1, q.shape[3])
        out = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=call.scale)
        return out.reshape(*q.shape[:3], v.shape[3]).contiguous()
    gqa = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=call.scale, enable_gqa=gqa)
    return out.contiguous()


def _spelled_out_attention(call: AttendCall, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """`attention` with a softcap or sinks, which SDPA does not support."""
    repeats = call.q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = call.q.float() @ k.float().mT * call.scale
    weights = attention_weights(scores, mask, call.softcap, call.sinks)
    return (weights[..., : v.shape[2]] @ v.float()).to(call.q.dtype).contiguous()


def attention_weights(scores: Tensor, mask: Tensor | None, softcap: float, sinks: Tensor | None) -> Tensor:
    """Softmax of ``scores`` ``[B, H_q, S, T]``. With ``sinks``, the weight of the sinks is appended as a last
    column."""
    logits = _logits(scores, mask, softcap, sinks)
    return logits.softmax(-1).nan_to_num(0)  # a fully masked query gets zeros, as in SDPA


def _logits(scores: Tensor, mask: Tensor | None, softcap: float, sinks: Tensor | None) -> Tensor:
    """What the softmax is taken of. With ``sinks``, they are appended as a last column."""
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    return scores


def _log_sum_exp(call: AttendCall, k: Tensor) -> Tensor:
    """The log-sum-exp of the logits of each query, ``[B, H_q, S]`` float32."""
    mask, (queries, tokens) = call.mask, (call.q.shape[2], k.shape[2])
    if call.causal and queries > 1:
        mask = causal_mask(queries, tokens, k.device)
    keys = k.float().repeat_interleave(call.q.shape[1] // k.shape[1], 1)
    return _logits(call.q.float() @ keys.mT * call.scale, mask, call.softcap, call.sinks).logsumexp(-1)


@implements("attend", "reference", lowering=EAGER)
def attend(call: AttendCall, dequantize_fn=dequantize_predicted) -> list[Tensor]:
    """Attend to the past and to the tokens of the call. ``dequantize_fn`` dequantizes a past that is packed."""
    call = with_starts(call)
    k, v = call.k_new, call.v_new
    if call.n:
        v = _behind(call.value, dequantize_fn, call.n, call.v_spec, v)
        k = _behind(call.key, dequantize_fn, call.n, call.k_spec, k, call.rotary)
    if call.latent:
        k, v = torch.cat([k, v], -1), k
    call = with_past(call)
    mass = [attention_mass(call, k)] if call.statistic else []
    lse = [_log_sum_exp(call, k)] if call.with_lse else []
    return [attention(call, k, v), *mass, *lse]


def _behind(past: Pack | Tensor, dequantize_fn, n: int, spec: CodecSpec, present: Tensor, rotary=None) -> Tensor:
    """The past, dequantized and rotated, followed by ``present``: ``[B, H_kv, n + S, D]``."""
    if isinstance(past, Pack):
        stored = DequantizeCall(past, n, spec)
        if rotary is None:
            return read(dequantize_fn, stored, present)
        past = read(dequantize_fn, stored)
    return torch.cat([past if rotary is None else rotate(past, *rotary), present], 2)


def _mask_with_past(mask: Tensor, importance: Tensor, n: int, queries: tuple[int, ...]) -> Tensor:
    """``mask`` ``[B or 1, H_q or 1, S, n + S]`` with new columns for the past: tokens whose ``importance`` is -inf are
    padding and masked."""
    batch, heads, new, _ = queries
    valid = importance[..., :n] > -torch.inf
    if valid.shape[1] > 1:
        valid = valid.repeat_interleave(heads // valid.shape[1], 1)
    if mask.dtype != torch.bool:
        valid = torch.zeros(valid.shape, dtype=mask.dtype, device=mask.device).masked_fill(~valid, -torch.inf)
    rows = max(valid.shape[1], mask.shape[1])
    past, present = valid[:, :, None].expand(batch, rows, new, -1), mask[..., n:].expand(batch, rows, -1, -1)
    return torch.cat([past, present], -1)


_ROWS, _WEIGHTS = 256, 1 << 21  # queries, and weights per head, at a time: avoids T x T memory


def attention_mass(call: AttendCall, k: Tensor) -> Tensor:
    """The attention mass of each key ``[B, H_kv, T, D]``: ``[B, H_kv, T]`` float32.

    It is summed, or maximized, as ``call.statistic`` says, over the queries of ``call`` that are not padding and over
    the query heads of the KV head. Only some rows of weights are in memory at a time.
    """
    q, mask, statistic = call.q, call.mask, call.statistic
    queries, tokens, heads = q.shape[2], k.shape[2], k.shape[1]
    own = None if mask is None else not_padding(mask, q.shape[0], queries)
    total, k = torch.zeros(*k.shape[:3], device=k.device), k.float()
    behind, (kind, last) = torch.arange(tokens, device=q.device), parse_statistic(statistic)
    step = max(16, min(_ROWS, _WEIGHTS // tokens))
    for first in range(max(0, queries - (last or queries)), queries, step):
        rows, seen = slice(first, min(first + step, queries)), tokens
        part = None if mask is None else mask[:, :, rows]
        if call.causal:
            seen = tokens - queries + rows.stop  # no query of these rows sees later tokens
            part = behind[:seen] <= torch.arange(rows.start, rows.stop, device=q.device)[:, None] + tokens - queries
        chunk = q[:, :, rows].float().unflatten(1, (heads, -1))
        scores = (chunk @ k[:, :, :seen].unsqueeze(2).mT).flatten(1, 2) * call.scale
        weights = attention_weights(scores, part, call.softcap, call.sinks)[..., :seen]
        if own is not None:
            weights = weights * own[:, None, rows, None]
        weights, mass = weights.unflatten(1, (heads, -1)), total[..., :seen]
        mass.copy_(mass + weights.sum((2, 3)) if kind == "sum" else torch.maximum(mass, weights.amax((2, 3))))
    return total

"""Fits a state's tensors to a sequence: to the prompt's queries, and to the first tokens that are packed."""

import math

import torch
from torch import Tensor

from kvpass.codec.center import fit_center
from kvpass.codec.page_rope import before_rotation, mean_of_tokens, middle, seen_from, to_page_rope
from kvpass.codec.probes import sampled
from kvpass.codec.quantizer import Subspace
from kvpass.codec.rope import parse_rope
from kvpass.codec.spec import CodecSpec
from kvpass.codec.subspace import compensation_matrix, precision_matrix
from kvpass.codec.tensors import Pack, of_sequence
from kvpass.layout.retention import Retention
from kvpass.layout.window import layout

_GOLDEN = 0.6180339887  # fractional parts of its multiples are evenly spread
_HIDDEN = -1e3  # what is added to the scores of tokens that are not seen; biases of position are larger
_QUANTILE = 0.9
_SAMPLES = 64  # queries


def not_padding(mask: Tensor, batch: int, tokens: int) -> Tensor:
    """Which of the last ``tokens`` tokens are not padding, ``[B, tokens]`` bool. Padding is masked even for itself."""
    own = mask[:, 0].diagonal(mask.shape[-1] - tokens, -2, -1)
    return (own if own.dtype == torch.bool else own > _HIDDEN).expand(batch, -1)


def _by_kv_head(q: Tensor, mask: Tensor | None, num_key_value_heads: int) -> tuple[Tensor, Tensor | None]:
    """Group queries ``[B, H_q, S, D]`` by KV head, ``[B, H_kv, N, D]``. Also returns which are not padding,
    ``[B, N]`` bool, or None without a mask."""
    stacked = q.unflatten(1, (num_key_value_heads, -1))
    valid = None if mask is None else not_padding(mask, q.shape[0], q.shape[2]).repeat(1, stacked.shape[2])
    return stacked.flatten(2, 3), valid


def fit_compensation(q: Tensor, mask: Tensor | None, num_key_value_heads: int, subspace: Subspace) -> Tensor:
    """The compensation matrix for the prompt's queries ``[B, H_q, S, D]``, without padding."""
    stacked, valid = _by_kv_head(q, mask, num_key_value_heads)
    precision = precision_matrix(stacked, subspace, valid)
    return compensation_matrix(precision, subspace.block_size)


def fit_to_queries(pack: Pack, q: Tensor | None, mask: Tensor | None, x: Tensor, spec: CodecSpec) -> None:
    """Fit the tensors of ``pack`` to the prompt's queries ``[B, H_q, S, D]``, without padding. x: its keys."""
    fitted, quantizer, heads = pack.fitted, spec.quantizer, x.shape[1]
    if quantizer.subspace is not None:
        fitted["compensation"].copy_(fit_compensation(q, mask, heads, quantizer.subspace))
    if quantizer.adaptive is not None and quantizer.adaptive.fits_energy:
        fitted["energy"].copy_(query_energy(q, mask, heads))
    if spec.codec.takes_queries and q is not None:
        spec.codec.fit_queries(fitted, *_by_kv_head(_seen(q, pack, spec), mask, heads), spec)
    else:
        spec.codec.fit_queries(fitted, None, None, spec)
    if spec.codec.needs_concentration and q is not None:
        fitted["concentration"].copy_(concentration(q, x, mask, spec.retention))


def _seen(q: Tensor, pack: Pack, spec: CodecSpec) -> Tensor:
    """The prompt's queries ``[B, H, S, D]`` as they are multiplied with stored keys.

    With page-relative RoPE, each query is rotated back by its own page or by an earlier one. All distances are equally
    frequent.
    """
    size, sinks, tokens = spec.page_size, spec.retention.sinks, torch.arange(q.shape[2])
    known = (q.shape[2] - 1 - sinks - middle(size)) // size  # the last page whose middle is known
    if pack.page_tables is None or known < 0:
        return q
    pages = ((tokens - sinks) // size).clamp(0, known) + 1
    return seen_from(q, pack.page_tables, (pages * (tokens * _GOLDEN % 1)).long(), size)


def concentration(q: Tensor, k: Tensor, mask: Tensor | None, retention: Retention) -> Tensor:
    """How concentrated the attention of a prompt is on tokens that are packed: the sum of their squared weights under
    an average query, and the mean squared entry of a query, ``[B, H_kv, 1, 2]`` float32.

    A sample of the queries is taken, at even distances and without padding. They see what ``mask`` shows them, or the
    tokens up to their own. Tokens count that are neither sinks nor in the window of the query.

    q, k: ``[B, H_q, S, D]`` and ``[B, H_kv, T, D]``, as in attention; the queries are those of the last S tokens. mask:
        as in `AppendCall`.
    """
    (batch, _, asking, head_dim), (_, heads, tokens, _) = q.shape, k.shape
    every = torch.ones(batch, asking, dtype=torch.bool, device=q.device)
    index = sampled(every if mask is None else not_padding(mask, batch, asking), _SAMPLES)[:, None, :, None]
    bias = _bias_of(index, mask, tokens - asking, tokens)
    bias = bias.unflatten(1, (heads, -1)) if len(bias[0]) > 1 else bias.unsqueeze(1).expand(-1, heads, -1, -1, -1)
    q = q.gather(2, index.expand(-1, q.shape[1], -1, head_dim)).unflatten(1, (heads, -1))
    at = torch.arange(tokens, device=q.device)
    packed = (at >= retention.sinks) & (at < tokens - asking + index - retention.residual)
    found = []
    for of_head, keys, own in zip(q.unbind(1), k.split(1, 1), bias.unbind(1), strict=True):
        scores = of_head.float() @ keys.float().mT / math.sqrt(head_dim) + own  # [B, H_q / H_kv, Q, T]
        found.append((scores.softmax(-1).nan_to_num() * packed).square().sum(-1).mean((1, 2)))
    energy = q.float().square().mean((2, 3, 4))
    return torch.stack([torch.stack(found, 1), energy], -1).unsqueeze(2)


def _bias_of(index: Tensor, mask: Tensor | None, before: int, tokens: int) -> Tensor:
    """What is added to the scores of some queries: ``[B, H_q or 1, Q, T]`` for queries ``index`` ``[B, 1, Q, 1]`` of a
    call after ``before`` tokens, and for ``tokens`` keys."""
    if mask is None:
        seen = torch.arange(tokens, device=index.device) <= before + index
    else:
        mask = mask[..., -tokens:].expand(len(index), -1, -1, -1)
        seen = mask.gather(2, index.expand(-1, mask.shape[1], -1, tokens))
    if seen.dtype != torch.bool:
        return seen
    return torch.zeros(seen.shape, device=seen.device).masked_fill(~seen, -torch.inf)


def query_energy(q: Tensor, mask: Tensor | None, num_key_value_heads: int) -> Tensor:
    """The 90 % quantile of the squared norms of queries ``[B, H_q, S, D]``, per KV head and without padding:
    ``[B, H_kv, 1, 1]`` float32."""
    energy = q.float().square().sum(-1).unflatten(1, (num_key_value_heads, -1))
    if mask is not None:
        padding = ~not_padding(mask, q.shape[0], q.shape[2])
        energy = energy.masked_fill(padding[:, None, None], torch.nan)
    return energy.flatten(2).nanquantile(_QUANTILE, -1, keepdim=True).unsqueeze(-1)


def fits_tokens(spec: CodecSpec) -> bool:
    """Whether a mean or the codec is fitted to the first packed tokens."""
    return "center" in of_sequence(spec) or any(not kept.calibrated for kept in spec.codec.sequence(spec).values())


def fit_to_tokens(pack: Pack, x: Tensor, spec: CodecSpec, valid: Tensor | None) -> None:
    """Fit mean and codec to ``x``, the first packed tokens. valid: which tokens of the call are not padding."""
    size, center = spec.page_size, pack.fitted.get("center")
    x = to_page_rope(x, pack.page_tables, 0, size)
    if center is not None:
        if "center" in of_sequence(spec):
            center.copy_(fit_center(before_rotation(x, pack.page_tables, size), center.dtype))
        x = x.float() - mean_of_tokens(center, pack.page_tables, size, x.shape[2])
    if valid is not None:
        valid = valid.index_select(1, layout(spec.retention).page_tokens(0, x.shape[2] // size).to(x.device))
    spec.codec.fit_tokens({**pack.fitted, **pack.from_keys}, x, valid, spec)


def keep_pairs(pack: Pack) -> None:
    """Store which channels rotary embedding pairs, if the state has a tensor for it."""
    if (pairs := pack.fitted.get("pairs")) is not None:
        pairs.copy_(torch.tensor((0, False) if pack.page_tables is None else parse_rope(pack.page_tables.rope)))

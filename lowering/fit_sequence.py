"""What a codec keeps of a sequence: fitted to the prompt's queries, and to the tokens that are packed first."""

import torch
from torch import Tensor

from kvpass.codec.allocation import fit_basis, second_moment, some_queries
from kvpass.codec.center import fit_center
from kvpass.codec.frame import before_rotation, into_frames, mean_of_tokens, middle, seen_from
from kvpass.codec.kept import Pack
from kvpass.codec.quantizer import Subspace
from kvpass.codec.rope import parse_rope
from kvpass.codec.shares import fit
from kvpass.codec.spec import CodecSpec
from kvpass.codec.subspace import compensation_matrix, precision_matrix
from kvpass.layout.window import layout

_GOLDEN = 0.6180339887  # its multiples are spread evenly between whole numbers
_QUANTILE = 0.9


def not_padding(mask: Tensor, batch: int, tokens: int) -> Tensor:
    """Which of the last ``tokens`` tokens may attend to themselves, ``[B, tokens]`` bool: padding may not."""
    own = mask[:, 0].diagonal(mask.shape[-1] - tokens, -2, -1)
    return (own if own.dtype == torch.bool else own == 0).expand(batch, -1)


def _by_kv_head(q: Tensor, mask: Tensor | None, num_key_value_heads: int) -> tuple[Tensor, Tensor | None]:
    """Queries ``[B, H_q, S, D]`` of a KV head in a row, ``[B, H_kv, N, D]``, and which are no padding, ``[B, N]``."""
    stacked = q.unflatten(1, (num_key_value_heads, -1))
    valid = None if mask is None else not_padding(mask, q.shape[0], q.shape[2]).repeat(1, stacked.shape[2])
    return stacked.flatten(2, 3), valid


def fit_compensation(q: Tensor, mask: Tensor | None, num_key_value_heads: int, subspace: Subspace) -> Tensor:
    """The compensation matrix of the prompt's queries ``[B, H_q, S, D]``; those of padding tokens are left out."""
    stacked, valid = _by_kv_head(q, mask, num_key_value_heads)
    precision = precision_matrix(stacked, subspace, valid)
    return compensation_matrix(precision, subspace.block_size)


def fit_to_queries(pack: Pack, q: Tensor | None, mask: Tensor | None, heads: int, spec: CodecSpec) -> None:
    """Fit to the prompt's queries ``[B, H_q, S, D]`` what the codec keeps of them; those of padding are left out."""
    if spec.quantizer.subspace is not None:
        pack.compensation.copy_(fit_compensation(q, mask, heads, spec.quantizer.subspace))
    _keep_queries(pack, q, mask, heads, spec)
    if pack.energy is not None:
        pack.energy.copy_(query_energy(q, mask, heads))


def _seen(q: Tensor, pack: Pack, spec: CodecSpec) -> Tensor:
    """The prompt's queries ``[B, H, S, D]`` as pages see them: if those have frames, each from that of its own page or
    of one before, all distances alike."""
    size, sinks, tokens = spec.page_size, spec.retention.sinks, torch.arange(q.shape[2])
    known = (q.shape[2] - 1 - sinks - middle(size)) // size  # the last page whose middle there is
    if pack.frames is None or known < 0:
        return q
    pages = ((tokens - sinks) // size).clamp(0, known) + 1
    return seen_from(q, pack.frames, (pages * (tokens * _GOLDEN % 1)).long(), size)


def look(q: Tensor, mask: Tensor | None, num_key_value_heads: int, size: int) -> Tensor:
    """Where the prompt's queries ``[B, H_q, S, D]`` look that are no padding, by blocks of ``size`` channels: their
    second moment ``[B, H_kv, D, size]``, as if ``size`` more of them had looked everywhere."""
    stacked, valid = _by_kv_head(q, mask, num_key_value_heads)
    seen = second_moment(stacked, size, valid)
    queries = stacked.shape[2] if valid is None else valid.sum(-1).clamp_min(1)[:, None, None, None, None]
    each = seen.diagonal(dim1=-2, dim2=-1).mean((-1, -2), keepdim=True).unsqueeze(-1) / queries
    return (seen + size * each * torch.eye(size, dtype=seen.dtype, device=q.device)).flatten(2, 3)


def _keep_queries(pack: Pack, q: Tensor | None, mask: Tensor | None, heads: int, spec: CodecSpec) -> None:
    """Keep what the codec needs of the prompt's queries: what errors cost, where the basis will be, 0 if all cost the
    same; and some that choose."""
    if spec.quantizer.shares is not None:
        return
    allocation = spec.quantizer.allocation
    weighted = allocation is not None and allocation.weighted
    if allocation is not None and not weighted:
        pack.basis.zero_()
    if not weighted and pack.queries is None:
        return
    seen = _seen(q, pack, spec)
    if weighted:
        pack.basis.copy_(_metric(look(seen, mask, heads, allocation.block_size)))
    if pack.queries is not None:
        pack.queries.copy_(some_queries(*_by_kv_head(seen, mask, heads), pack.queries.dtype))


def _metric(moment: Tensor) -> Tensor:
    """A second moment ``[B, H_kv, D, b]`` in units of its mean, 0 if that is 0."""
    mean = moment.unflatten(2, (-1, moment.shape[-1])).diagonal(dim1=-2, dim2=-1).mean((-1, -2))[..., None, None]
    return torch.where(mean > 0, moment / mean, 0.0)


def query_energy(q: Tensor, mask: Tensor | None, num_key_value_heads: int) -> Tensor:
    """What 90 % of the squared norms of queries ``[B, H_q, S, D]`` are below, over those of a KV head that are not
    padding: ``[B, H_kv, 1, 1]`` float32."""
    energy = q.float().square().sum(-1).unflatten(1, (num_key_value_heads, -1))
    if mask is not None:
        padding = ~not_padding(mask, q.shape[0], q.shape[2])
        energy = energy.masked_fill(padding[:, None, None], torch.nan)
    return energy.flatten(2).nanquantile(_QUANTILE, -1, keepdim=True).unsqueeze(-1)


def fits_tokens(pack: Pack, spec: CodecSpec) -> bool:
    """Whether something is fitted to the tokens packed first."""
    if spec.quantizer.shares is not None and pack.metric is None:
        return False
    return pack.center is not None or pack.basis is not None


def fit_to_tokens(pack: Pack, x: Tensor, spec: CodecSpec, valid: Tensor | None) -> None:
    """Fit mean and basis to ``x``, the tokens packed first, of those of the call that are ``valid``."""
    allocation, size = spec.quantizer.allocation, spec.page_size
    x = into_frames(x, pack.frames, 0, size)
    if pack.center is not None:
        pack.center.copy_(fit_center(before_rotation(x, pack.frames, size), pack.center.dtype))
    if pack.basis is None:
        return
    if pack.center is not None:
        x = x.float() - mean_of_tokens(pack.center, pack.frames, size, x.shape[2])
    if valid is not None:
        valid = valid.index_select(1, layout(spec.retention).page_tokens(0, x.shape[2] // size).to(x.device))
    if pack.widths is not None:
        basis, widths = fit(x, pack.metric, pack.share, spec, valid)
        pack.basis.copy_(basis)
        pack.widths.copy_(widths)
        return
    basis, places = fit_basis(x, pack.basis.unflatten(2, (-1, allocation.block_size)), allocation, valid)
    pack.basis.copy_(basis)
    pack.fields.copy_(places)


def keep_pairs(pack: Pack) -> None:
    """Keep which channels RoPE turns together, if a state has a place for that."""
    if pack.pairs is not None:
        pack.pairs.copy_(torch.tensor((0, False) if pack.frames is None else parse_rope(pack.frames.rope)))

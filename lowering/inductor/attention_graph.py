"""Attention of one query token over packed keys and values, written to be fused by Inductor: K and V never reach
memory.

Each plane of a page is unpacked and dequantized pointwise. Then there is a separate reduction for every query head of
the KV head, because the same computation with a broadcast dimension is twice as slow. Pools are sliced, so the cost
depends on the number of stored tokens only.
"""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from kvpass.codec.allocation import Allocation
from kvpass.codec.page_rope import PageTables
from kvpass.codec.rope import parse_rope, rotate_pairs, split_pairs
from kvpass.codec.spec import CodecSpec
from kvpass.codec.tensors import of_pages, read_shapes
from kvpass.layout.pool import of_capacity
from kvpass.layout.retention import Retention

from ..cpp import allocated
from .page_view import Pages, page_values, view_pages
from .planes import Planes, in_storage_order, mean_scores
from .terms import KeyRotation

Inputs = dict[str, Tensor | None]
"""The tensors that `attend` takes, by name; None for those that a call does not have."""


class KeyTransform(NamedTuple):
    """How stored keys become the keys that queries are multiplied with.

    tables: function from token ids of any shape to cos and sin; None if keys are stored after rotary embedding.
    rope: text of the rotation that is applied to keys when they are read; "" for none.
    basis: the rotation of the keys, which is applied to queries instead.
    center: the mean that was subtracted from keys before rotary embedding.
    """

    tables: Callable[[Tensor], tuple[Tensor, Tensor] | None] = lambda _: None
    rope: str = ""
    basis: Tensor | None = None
    center: Tensor | None = None


class Signature(NamedTuple):
    """The properties that all calls of one kernel share, besides the specs.

    batched: whether there is more than one sample.
    mask: whether the mask has more than one sample, its number of heads and its dtype; None without a mask.
    columns: columns of the rotary tables.
    sinks: dtype of the sinks; None without sinks.
    new_token: whether the call has a token of its own (self-attention) or none (cross-attention).
    mass: whether attention mass is returned.
    """

    batched: bool
    q_heads: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    mask: tuple[bool, int, torch.dtype] | None
    rope: str
    columns: int
    sinks: torch.dtype | None
    new_token: bool
    scale: float
    softcap: float
    mass: bool


@cache
def pool_names(side: str, spec: CodecSpec) -> dict[str, str]:
    """Names of the pools of a side, "k" or "v", and of the tensors whose sizes are their capacities, as inputs of
    `attend`."""
    return {f"{side}_pool_{name}": f"{side}_pool_{name}_room" for name in of_pages(spec)}


def sequence_shapes(
    spec: CodecSpec, head_dim: int, dtype: torch.dtype
) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of the sequence tensors that the page view of ``spec`` takes, by name."""
    return {} if isinstance(spec.codec, Allocation) else read_shapes(spec, head_dim, dtype)


def attend(inputs: Inputs, signature: Signature, k_spec: CodecSpec, v_spec: CodecSpec) -> tuple[Tensor, ...]:
    """Attend with one query token ``[B, H_q, 1, D]`` to packed keys and values: ``[B, H_q, 1, D]``.

    With ``signature.mass``, also returns the weights summed over the query heads of each KV head,
    ``[B * H_kv, slots]``: for the pages, the ring and the token of the call. Without ``signature.new_token``, the last
    one is masked.

    inputs: the tensors that `kvpass.lowering.inductor.attend` lists. The sizes of ``k_pages`` and ``v_pages`` are page
        counts. The sizes of the tensors that `pool_names` names are capacities of pools, which are passed as handles.
        ``lengths`` has the numbers of stored tokens, packed keys and packed values. For log-sparse windows,
        ``slot_tokens`` is the token in each slot of the ring, and ``page_tokens`` ``[N, P]`` the tokens in pages.
    """
    q, lengths, mask, slot_tokens, page_tokens, sinks = (
        inputs[name] for name in ("q", "lengths", "mask", "slot_tokens", "page_tokens", "sinks")
    )
    count, size = inputs["k_pages"].shape[0], k_spec.page_size
    k_ring, k_new = (inputs[name].flatten(0, 1) for name in ("k_ring", "k_new"))
    shape, batch, groups = q.shape, q.shape[0], inputs["k_ring"].shape[1]
    q = (q.float() * signature.scale).view(batch * groups, shape[1] // groups, -1)  # [BH, R, D]
    index = torch.arange(count * size, device=q.device)  # packed tokens, in storage order
    in_pages = index + k_spec.retention.sinks if page_tokens is None else page_tokens.flatten()
    n, k_packed, _ = lengths.split(1)
    ring_tokens, ring_valid = _ring_tokens(n, k_packed, k_spec.retention, slot_tokens)

    on_pages = _scores_of_pages(q, inputs, k_spec, in_pages.view(count, size), signature.rope)
    rope = "" if k_spec.transform.page_rope else signature.rope  # exact keys have normal rotary embedding
    ring_tables = _tables(inputs, rope, ring_tokens.clamp_min(0))
    on_ring = torch.stack(_products(q, k_ring.float(), ring_tables, rope), 1)
    new, new_valid = (
        (q * k_new.float()).sum(-1, keepdim=True),
        torch.full_like(n, signature.new_token, dtype=torch.bool),
    )
    parts = (on_pages, index < k_packed), (on_ring, ring_valid), (new, new_valid)
    scores = torch.cat([_masked(part, valid, signature.softcap) for part, valid in parts], -1)
    if mask is not None:
        token = torch.cat([in_pages, ring_tokens, n])
        scores = _biased(scores, mask, token.clamp(0, mask.shape[-1] - 1), groups)
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        logits = sinks.float().view(1, groups, -1, 1).expand(batch, -1, -1, 1)
        weights = torch.cat([scores, logits.flatten(0, 1)], -1).softmax(-1)[..., :-1]
    if mask is not None:
        weights = weights.nan_to_num(0)  # a fully masked query gets zeros, as in SDPA
    out = _weighted_values(weights, inputs, k_spec, v_spec, index)
    out = out.view(*shape[:3], -1).to(signature.dtype)
    return (out, weights.sum(1)) if signature.mass else (out,)


def _weighted_values(weights: Tensor, inputs: Inputs, k_spec: CodecSpec, v_spec: CodecSpec, index: Tensor) -> Tensor:
    """Sum of all values, weighted by ``weights`` ``[BH, R, slots]``: ``[BH, R, D]``. index: that of packed keys.

    Values leave their window no earlier than keys, so the weight of a packed value is that of a packed key.
    """
    lengths, count = inputs["lengths"], inputs["v_pages"].shape[0]
    v_ring, v_new = (inputs[name].flatten(0, 1) for name in ("v_ring", "v_new"))
    packed, slots = count * k_spec.page_size, v_ring.shape[1]
    on_pages = torch.where(index[:packed] < lengths.split(1)[2], weights[..., :packed], 0.0)
    on_ring = _ring_weights(weights, lengths, index.shape[0], k_spec.retention, v_spec.retention, inputs["slot_tokens"])
    if inputs["v_fields"] is not None:
        from_pages = allocated.page_values(on_pages, _allocated(inputs, "v", v_spec))
    # concatenated, they are computed once, not once per channel
    on_pages, on_ring, new = torch.cat([on_pages, on_ring, weights[..., -1:]], -1).split([packed, slots, 1], -1)
    out = (on_ring[..., None] * v_ring[:, None].float()).sum(2) + new * v_new.float()
    if inputs["v_fields"] is None:
        pages = view_pages(_pools(inputs, "v", v_spec), v_spec, inputs["v_points"], v_ring.shape[-1])
        from_pages = page_values(on_pages.unflatten(-1, (count, -1)), pages, inputs["v_basis"])
    return out + from_pages


def _scores_of_pages(q: Tensor, inputs: Inputs, spec: CodecSpec, tokens: Tensor, rope: str) -> Tensor:
    """Scores of ``q`` ``[BH, R, D]`` with the keys in pages: ``[BH, R, N * P]``. tokens: ``[N, P]``, token ids."""
    cos, sin, center = (inputs[name] for name in ("cos", "sin", "center"))
    if inputs["k_fields"] is not None:
        page_tables = PageTables(cos, sin, rope) if spec.transform.page_rope and rope else None
        return allocated.page_scores(q, page_tables, center, _allocated(inputs, "k", spec))
    if spec.transform.page_rope:
        rope = ""
    pages = view_pages(_pools(inputs, "k", spec), spec, inputs["k_points"], q.shape[-1])
    rotation = KeyRotation(cos, sin, rope, tokens) if rope else None
    transform = KeyTransform(partial(_tables, inputs, rope), rope, inputs["k_basis"], center)
    scores = page_scores(q, pages, tokens, transform)
    for term in pages.terms:
        scores = scores + term.scores(q, rotation).flatten(2)
    return scores


def _tables(inputs: Inputs, rope: str, tokens: Tensor) -> tuple[Tensor, Tensor] | None:
    """cos and sin of ``tokens`` of any shape; None if ``rope`` is "": keys are stored after rotary embedding."""
    if not rope:
        return None
    pairs = parse_rope(rope)[0]
    rows = [inputs[name].index_select(1, tokens.flatten())[..., :pairs] for name in ("cos", "sin")]
    return tuple(table.unflatten(1, tokens.shape) for table in rows)


def _pools(inputs: Inputs, side: str, spec: CodecSpec) -> list[Tensor]:
    """The page tensors of a side, each ``[BH, N, ...]``, followed by the sequence tensors that its page view takes."""
    q, count = inputs["q"], inputs[f"{side}_pages"].shape[0]
    pools = [_first_pages(inputs[name], inputs[room], count) for name, room in pool_names(side, spec).items()]
    return [*pools, *(inputs[f"{side}_{name}"].flatten(0, 1) for name in sequence_shapes(spec, q.shape[-1], q.dtype))]


def _masked(scores: Tensor, valid: Tensor, softcap: float) -> Tensor:
    """``scores`` with softcap, and -inf where they are not ``valid``."""
    scores = torch.tanh(scores / softcap) * softcap if softcap else scores
    return torch.where(valid, scores, -torch.inf)


def _ring_tokens(n: Tensor, packed: Tensor, retention: Retention, slot_tokens: Tensor | None) -> tuple[Tensor, Tensor]:
    """The token in each slot of the ring, and whether the slot is valid. For log-sparse windows, ``slot_tokens`` holds
    the tokens."""
    if slot_tokens is not None:
        return slot_tokens, slot_tokens >= 0
    sinks, size = retention.sinks, retention.ring_size
    slots, newest = torch.arange(sinks + size, device=n.device) - sinks, n - 1 - sinks
    tokens = torch.where(slots < 0, slots, newest - torch.remainder(newest - slots, size)) + sinks
    return tokens, torch.where(slots < 0, tokens < n, tokens >= packed + sinks)


def _products(q: Tensor, k: Tensor, tables: tuple[Tensor, Tensor] | None, rope: str) -> list[Tensor]:
    """Products of ``q`` ``[BH, R, D]`` with keys ``[BH, ..., D]``, rotated by tables ``[B, ..., p]``: R tensors
    ``[BH, ...]``.

    Keys are unpacked and rotated once. Every query head has a reduction of its own.
    """
    lead = (slice(None), *(None for _ in range(k.ndim - 2)))
    if tables is None:
        return [(k * q[:, r][lead]).sum(-1) for r in range(q.shape[1])]
    batch = tables[0].shape[0]
    first, second, rest = (part.unflatten(0, (batch, -1)) for part in split_pairs(k, rope))
    rotated = rotate_pairs(first, second, *(table.unsqueeze(1).float() for table in tables))
    k1, k2, rest = (part.flatten(0, 1) for part in (*rotated, rest))
    q1, q2, q_rest = split_pairs(q, rope)
    out = []
    for r in range(q.shape[1]):
        dot = (k1 * q1[:, r][lead] + k2 * q2[:, r][lead]).sum(-1)
        out.append(dot + (rest * q_rest[:, r][lead]).sum(-1) if rest.shape[-1] else dot)
    return out


def _first_pages(handle: Tensor, room: Tensor, count: int) -> Tensor:
    """The first ``count`` pages of the pool of ``handle``: ``[BH, count, ...]``. The size of ``room`` is the pool's
    capacity."""
    return of_capacity(handle, room.shape[0]).narrow(2, 0, count).flatten(0, 1)


def _allocated(inputs: Inputs, side: str, spec: CodecSpec) -> allocated.Pages:
    """The pages of a side, "k" or "v", for the ops of `cpp.allocated`."""
    names = "pool_codes", "pages", "pool_codes_room", "basis", "fields", "points"
    codes, pages, room, basis, places, table = (inputs[f"{side}_{name}"] for name in names)
    return allocated.Pages(codes, pages.shape[0], room.shape[0], basis, places, table, spec)


def plane_scores(q: Tensor, planes: Planes, tokens: Tensor, transform: KeyTransform) -> list[list[Tensor]]:
    """Scores of ``q`` ``[BH, R, D]`` with keys in pages: ``[BH, N, T]`` for each query head and plane. tokens:
    ``[N, P]``, token ids."""
    tables, rope, basis, center = transform
    scores, rotated = [], q if basis is None else q @ basis
    by_plane = tokens.unflatten(-1, (planes.runs, -1))
    for j in range(planes.runs):
        k = planes.values(j)
        if center is not None and rope:  # the mean is rotated with the keys
            k = k + center.flatten(0, 1)[:, None].float()
        scores.append(_products(rotated, k, tables(by_plane[:, j]), rope))
    return [[of_plane[r] for of_plane in scores] for r in range(q.shape[1])]


def page_scores(q: Tensor, pages: Pages, tokens: Tensor, transform: KeyTransform) -> Tensor:
    """`plane_scores` as one tensor ``[BH, R, N * P]`` in token order, including a mean that was subtracted."""
    parts = []
    for kind in pages.kinds:
        by_head = plane_scores(q, kind, tokens, transform)
        parts.append(in_storage_order([scores for of_head in by_head for scores in of_head], kind.runs))
    out = parts[0]
    if pages.slots is not None:
        by_page = torch.cat([part.unflatten(-1, (tokens.shape[0], -1)) for part in parts], -1)
        out = by_page.gather(-1, pages.slots[:, None].expand_as(by_page)).flatten(2)
    if transform.center is not None and not transform.rope:
        out = out + mean_scores(q, transform.center)
    return out


def _ring_weights(weights, lengths, packed_slots: int, of_keys: Retention, of_values: Retention, slot_tokens) -> Tensor:
    """The weights of the values in each slot of their ring. In ``weights``, ``packed_slots`` packed tokens come
    first."""
    n, k_packed, v_packed = lengths.split(1)
    tokens, valid = _ring_tokens(n, v_packed, of_values, slot_tokens)
    on_ring = weights[..., packed_slots:-1]
    if slot_tokens is None:
        position = tokens - of_keys.sinks  # after the sinks
        in_window = packed_slots + torch.where(position < 0, tokens, of_keys.sinks + position % of_keys.ring_size)
        source = torch.where((position >= 0) & (position < k_packed), position, in_window)
        on_ring = weights.index_select(-1, torch.where(valid, source, 0))
    return torch.where(valid, on_ring, 0.0)


def _biased(scores: Tensor, mask: Tensor, token: Tensor, groups: int) -> Tensor:
    """Apply a bool or additive ``mask`` ``[B or 1, H_q or 1, 1, T]``, at columns ``token`` ``[N]``, to ``scores``
    ``[B * H_kv, R, N]``."""
    bias = mask[:, :, 0].index_select(-1, token)
    bias = torch.where(bias, 0.0, -torch.inf) if mask.dtype == torch.bool else bias.float()
    bias = bias[:, None] if mask.shape[1] == 1 else bias.unflatten(1, (groups, -1))
    return (scores.unflatten(0, (-1, groups)) + bias).flatten(0, 1)

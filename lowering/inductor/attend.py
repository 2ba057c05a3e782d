"""Attention of one query token over codes, written so that Inductor fuses it: K and V never reach memory.

Per plane of a page: unpack and dequantize pointwise, then one separate reduction for every query head of the KV head,
because as a broadcast dimension the same algebra is twice as slow. Pools are sliced, so the cost is that of the tokens
there are.
"""

from dataclasses import replace
from functools import lru_cache, partial, reduce

import torch
from torch import Tensor

from kvpass.codec.affine import params_dtype
from kvpass.codec.bitpack import num_planes, unpack_plane, unpack_plane_unshifted
from kvpass.codec.codebook import grid, look_up
from kvpass.codec.hadamard import basis
from kvpass.codec.predictor import looks_below
from kvpass.codec.rope import parse_rope, rotate_pairs, split_pairs
from kvpass.codec.spec import CodecSpec, parse
from kvpass.layout.pool import capacity, handle, of_capacity
from kvpass.layout.window import layout, ring_tokens

from .. import reference
from ..reference import with_past
from ..session import compiled_once
from ..table import Site, implements
from . import drafts
from .aot import compile_ahead
from .pages import decode_all, refuses_decode

_MIN_PAGES = 2  # sizes 0 and 1 would be specialised; what is beyond the packed tokens is masked


def plane_values(codes: Tensor, scale: Tensor, zero_point: Tensor, spec: CodecSpec, plane: int, points=None) -> Tensor:
    """Dequantized tokens ``[plane * T, (plane + 1) * T)`` of every page, ``[..., N, T, D]`` float32, still rotated.

    points: those of the spec's grid, if it has one.
    """
    if spec.grid:
        codes = unpack_plane(codes, spec.bits, plane)
        tokens = codes.shape[-2]
        scale = scale.narrow(-2, plane * tokens, tokens).float().unsqueeze(-1)
        return (look_up(codes, points).unflatten(-1, (-1, spec.group_size)) * scale).flatten(-2)
    codes, unit = unpack_plane_unshifted(codes, spec.bits, plane)
    values, tokens = codes.float(), codes.shape[-2]
    if spec.per == "token":
        scale, zero_point = (p.narrow(-2, plane * tokens, tokens).float().unsqueeze(-1) for p in (scale, zero_point))
        return (values.unflatten(-1, (-1, spec.group_size)) * (scale * unit) + zero_point).flatten(-2)
    first, count = plane * tokens // spec.group_size, max(1, tokens // spec.group_size)
    if (first + count) * spec.group_size < (plane + 1) * tokens:  # groups that straddle planes
        index = torch.arange(plane * tokens, (plane + 1) * tokens, device=codes.device) // spec.group_size
        return values * (scale.index_select(-2, index).float() * unit) + zero_point.index_select(-2, index).float()
    scale, zero_point = (p.narrow(-2, first, count).float().unsqueeze(-2) for p in (scale, zero_point))
    return (values.unflatten(-2, (count, -1)) * (scale * unit) + zero_point).flatten(-3, -2)


def _places(n: Tensor, packed: Tensor, spec: CodecSpec, held: Tensor | None) -> tuple[Tensor, Tensor]:
    """Per slot of the ring: its token, and whether it counts. ``held`` says so for log-sparse windows."""
    if held is not None:
        return held, held >= 0
    slots = torch.arange(spec.sinks + spec.window, device=n.device) - spec.sinks
    newest = n - 1 - spec.sinks
    tokens = torch.where(slots < 0, slots, newest - torch.remainder(newest - slots, spec.window)) + spec.sinks
    return tokens, torch.where(slots < 0, tokens < n, tokens >= packed + spec.sinks)


def _dots(q: Tensor, k: Tensor, tables: tuple[Tensor, Tensor] | None, rope: str) -> list[Tensor]:
    """``q`` ``[BH, R, D]`` with keys ``[BH, ..., D]``, rotated by tables ``[B, ..., p]`` -> R times ``[BH, ...]``.

    One separate reduction for every query head over keys that are unpacked, and rotated, once.
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
    """The first ``count`` pages of the pool of ``handle``, whose capacity ``room`` carries: ``[BH, count, ...]``."""
    return of_capacity(handle, room.shape[0]).narrow(2, 0, count).flatten(0, 1)


def _attend(k_pages, v_pages, *inputs, scale, softcap, k_spec, v_spec, rope, paid, present):
    """One query token ``[B, H_q, 1, D]`` over packed keys and values; inputs as in `attend`. With ``paid``, the weights
    summed over the query heads of a KV head come second: ``[B * H_kv, slots]``, pages, ring, and the token itself.
    Without ``present``, that of cross-attention, the token itself does not count.

    ``k_pages`` and ``v_pages`` carry page counts as their shape, ``rooms`` the capacities of pools that are handed over
    as handles, ``lengths`` those of `_lengths` as its values. For log-sparse windows ``held`` is the token in each slot
    of the ring, ``page_tokens`` ``[N, P]`` those in the pages.
    """
    *rooms, q, kc, ks, kz, k_ring, vc, vs, vz, v_ring, lengths, k_new, v_new, mask, held = inputs[:-9]
    page_tokens, cos, sin, k_points, v_points, k_basis, v_basis, sinks, center = inputs[-9:]
    shape, dtype, batch, groups = q.shape, q.dtype, q.shape[0], k_ring.shape[1]
    count, v_count, size = k_pages.shape[0], v_pages.shape[0], k_spec.page_size
    counts = [count] * 3 + [v_count] * 3
    *k_pools, vc, vs, vz = map(_first_pages, (kc, ks, kz, vc, vs, vz), rooms, counts)
    k_ring, v_ring, k_new, v_new = (tensor.flatten(0, 1) for tensor in (k_ring, v_ring, k_new, v_new))
    q = (q.float() * scale).view(batch * groups, shape[1] // groups, -1)  # [BH, R, D]
    index = torch.arange(count * size, device=q.device)  # of packed tokens, in storage order
    in_page = index + k_spec.sinks if page_tokens is None else page_tokens.flatten()
    n, k_packed, v_packed = lengths.split(1)
    k_tokens, k_counts = _places(n, k_packed, k_spec, held)

    def tables(tokens):
        """cos and sin of ``tokens``, any shape; None where keys are stored rotated."""
        if not rope:
            return None
        rows = [table.index_select(1, tokens.flatten())[..., : parse_rope(rope)[0]] for table in (cos, sin)]
        return tuple(table.unflatten(1, tokens.shape) for table in rows)

    def seen(scores, counts):
        scores = torch.tanh(scores / softcap) * softcap if softcap else scores
        return torch.where(counts, scores, -torch.inf)

    on_pages = _page_scores(q, k_pools, in_page.view(count, size), tables, rope, k_spec, k_points, k_basis, center)
    on_ring = torch.stack(_dots(q, k_ring.float(), tables(k_tokens.clamp_min(0)), rope), 1)
    own, counts = (q * k_new.float()).sum(-1, keepdim=True), torch.full_like(n, present, dtype=torch.bool)
    scores = torch.cat([seen(on_pages, index < k_packed), seen(on_ring, k_counts), seen(own, counts)], -1)
    if mask is not None:
        token = torch.cat([in_page, k_tokens, n])
        scores = _biased(scores, mask, token.clamp(0, mask.shape[-1] - 1), groups)
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        logits = sinks.float().view(1, groups, -1, 1).expand(batch, -1, -1, 1)
        weights = torch.cat([scores, logits.flatten(0, 1)], -1).softmax(-1)[..., :-1]
    if mask is not None:
        weights = weights.nan_to_num(0)  # a query that may see nothing gets zeros, as in SDPA

    # values leave their window no earlier than keys, so a packed value's weight is that of a packed key
    packed, slots = v_count * size, v_ring.shape[1]
    on_pages = torch.where(index[:packed] < v_packed, weights[..., :packed], 0.0)
    on_ring = _ring_weights(weights, lengths, count * size, k_spec, v_spec, held)
    # concatenated, they are computed once: otherwise anew for every channel
    on_pages, on_ring, own = torch.cat([on_pages, on_ring, weights[..., -1:]], -1).split([packed, slots, 1], -1)
    out = (on_ring[..., None] * v_ring[:, None].float()).sum(2) + own * v_new.float()
    out = out + _page_values(on_pages.unflatten(-1, (v_count, -1)), (vc, vs, vz), v_spec, v_points, v_basis)
    out = out.view(*shape[:3], -1).to(dtype)
    return (out, weights.sum(1)) if paid else (out,)


def _page_scores(q, pools, tokens, tables, rope: str, spec: CodecSpec, points, basis, center) -> Tensor:
    """``q`` ``[BH, R, D]`` with the keys of ``tokens`` ``[N, P]`` in pages: ``[BH, R, N * P]``, in storage order.

    tables: token ids -> rotary tables. basis: the rotation of the keys, which the queries take instead of them. center:
    the mean that was subtracted from them.
    """
    (count, size), planes, scores = tokens.shape, num_planes(spec.bits), []
    rotated = q if basis is None else q @ basis
    by_plane = tokens.view(count, planes, size // planes)
    for j in range(planes):
        k = plane_values(*pools, spec, j, points)
        if center is not None and rope:  # the mean is turned with the keys
            k = k + center.flatten(0, 1)[:, None].float()
        scores.append(_dots(rotated, k, tables(by_plane[:, j]), rope))
    by_head = [scores[j][r] for r in range(q.shape[1]) for j in range(planes)]  # [BH, N, T] each
    out = torch.stack(by_head, 1).unflatten(1, (-1, planes)).transpose(2, 3).flatten(2)
    if center is not None and not rope:
        out = out + (q * center.flatten(0, 1).float()).sum(-1, keepdim=True)
    return out


def _ring_weights(weights, lengths, packed_slots: int, k_spec: CodecSpec, v_spec: CodecSpec, held) -> Tensor:
    """The weights of the values in each slot of their ring; ``packed_slots`` come first in ``weights``."""
    n, k_packed, v_packed = lengths.split(1)
    tokens, counts = _places(n, v_packed, v_spec, held)
    on_ring = weights[..., packed_slots:-1]
    if held is None:
        behind = tokens - k_spec.sinks
        in_window = packed_slots + torch.where(behind < 0, tokens, k_spec.sinks + behind % k_spec.window)
        source = torch.where((behind >= 0) & (behind < k_packed), behind, in_window)
        on_ring = weights.index_select(-1, torch.where(counts, source, 0))
    return torch.where(counts, on_ring, 0.0)


def _page_values(weights, pools, spec: CodecSpec, points, basis) -> Tensor:
    """Values in pages, weighted by ``[BH, R, N, P]``: ``[BH, R, D]``."""
    by_plane, products = weights.unflatten(-1, (num_planes(spec.bits), -1)), []
    for j in range(num_planes(spec.bits)):
        v = plane_values(*pools, spec, j, points)
        products.append([by_plane[:, r, :, j, :, None] * v for r in range(weights.shape[1])])
    out = torch.stack([reduce(torch.add, of_head).sum((1, 2)) for of_head in zip(*products, strict=True)], 1)
    return out if basis is None else out @ basis.mT


def _biased(scores: Tensor, mask: Tensor, token: Tensor, groups: int) -> Tensor:
    """``scores`` ``[B * H_kv, R, N]`` plus a bool or additive mask ``[B or 1, H_q or 1, 1, T]`` at ``token``."""
    bias = mask[:, :, 0].index_select(-1, token)
    bias = torch.where(bias, 0.0, -torch.inf) if mask.dtype == torch.bool else bias.float()
    bias = bias[:, None] if mask.shape[1] == 1 else bias.unflatten(1, (groups, -1))
    return (scores.unflatten(0, (-1, groups)) + bias).flatten(0, 1)


# Sizes to trace with, where sizes vary from call to call: different for what is unrelated, and none of them 0 or 1.
_BATCH, _K_PAGES, _V_PAGES, _TOKENS, _TABLES = 5, 53, 47, 1733, 1811
_ROOMS = 61, 67, 71, 59, 73, 79


# Keys and values in pages are used by every query head of a KV head and are never to be stored for that, however many
# reads they take. Sums of products may be rounded once.
_OPTIONS = {
    "realize_reads_threshold": 256,
    "realize_acc_reads_threshold": 256,
    "realize_opcount_threshold": 4096,
    "cpp.enable_floating_point_contract_flag": "fast",
}


@compiled_once
def _attend_kernel(key: tuple, k_spec: CodecSpec, v_spec: CodecSpec, scale: float, softcap: float, paid: bool):
    """Compile `_attend` for what `attend` found in common with other calls (see there)."""
    many, q_heads, heads, head_dim, dtype, device, mask_layout, rope, columns, sinks, present = key
    batch = _BATCH if many else 1

    def example(*shape, dtype=dtype, batch=batch):
        return torch.empty(batch, *shape, dtype=dtype, device=device)

    def state(spec):
        codes = example(heads, spec.rows, spec.columns(head_dim), dtype=torch.uint8)
        shapes = spec.params_shape(head_dim), spec.zero_shape(head_dim)
        scale, zero_point = (example(heads, *shape, dtype=params_dtype(dtype)) for shape in shapes)
        return codes, scale, zero_point, example(heads, spec.sinks + spec.window, head_dim)

    mask = None
    if mask_layout is not None:
        mask_batch, mask_heads, mask_dtype = mask_layout
        mask = example(mask_heads, 1, _TOKENS, dtype=mask_dtype, batch=batch if mask_batch else 1)

    def points(spec):
        return torch.empty_like(grid(spec.grid, device)) if spec.grid else None

    def rotation(spec):
        return None if spec.rotation is None else torch.empty(head_dim, head_dim, device=device)

    log = k_spec.keep == "log"
    ids = partial(torch.empty, dtype=torch.int64, device=device)
    new, table = example(heads, 1, head_dim), example(_TABLES, columns) if rope else None
    examples = [
        *(torch.empty(pages, dtype=torch.uint8, device=device) for pages in (_K_PAGES, _V_PAGES, *_ROOMS)),
        example(q_heads, 1, head_dim),
        *state(k_spec),
        *state(v_spec),
        ids(3),
        *(new, new),
        mask,
        *((ids(k_spec.sinks + k_spec.window), ids(_K_PAGES, k_spec.page_size)) if log else (None, None)),
        *(table, table),
        *map(points, (k_spec, v_spec)),
        *map(rotation, (k_spec, v_spec)),
        None if sinks is None else torch.empty(q_heads, dtype=sinks, device=device),
        example(heads, 1, head_dim, dtype=params_dtype(dtype)) if k_spec.predictor else None,
    ]
    first = [0] if many else []
    of_mask = [0, 3] if many and mask_layout is not None and mask_layout[0] else [3]
    tables = [[*first, 1]] * 2
    carriers = [[0]] * (2 + len(_ROOMS))
    dynamic = [*carriers, *[first] * 9, [], first, first, of_mask, [], [0], *tables, [], [], [], [], [], first]
    how = dict(scale=scale, softcap=softcap, k_spec=k_spec, v_spec=v_spec, rope=rope, paid=paid, present=present)
    fn = partial(_attend, **how)
    return compile_ahead(fn, examples, dynamic, _OPTIONS)


@lru_cache(maxsize=16)
def _carriers(pages: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
    """Tensors whose shapes are page counts: the same for all layers of a step."""
    return tuple(torch.empty(count, dtype=torch.uint8, device=device) for count in pages)


@lru_cache(maxsize=16)
def _lengths(n: int, k_packed: int, v_packed: int, device: torch.device) -> Tensor:
    """All tokens, packed keys and packed values as a tensor: one for all layers of a step."""
    return torch.tensor([n, k_packed, v_packed], device=device)


@lru_cache(maxsize=16)
def _page_tokens(spec: CodecSpec, used: int, pages: int, device: torch.device) -> Tensor:
    """The tokens in the first ``used`` of ``pages`` pages, ``[pages, P]``; 0 in the others."""
    tokens = torch.zeros(pages, spec.page_size, dtype=torch.int64)
    tokens[:used] = layout(spec).page_tokens(0, used).view(-1, spec.page_size)
    return tokens.to(device)


def _refuses_attend(site: Site) -> str | None:
    if not site.specs:
        return "the past is decoded already."
    if site.queries != 1:
        return next(filter(None, (refuses_decode(replace(site, specs=(spec,))) for spec in site.specs)), None)
    key, value = map(parse, site.specs)
    if key.adaptive is not None or value.adaptive is not None:
        return "widths that differ from token to token have to be decoded."
    if key.raw or value.raw:
        return "floats stored as they are need no kernel."
    if (key.page_size, key.sinks, key.keep) != (value.page_size, value.sinks, value.keep):
        return "keys and values must share page size, sinks and the choice of exact tokens."
    if key.pre_rope and key.rotation is not None:
        return "keys rotated by a Hadamard matrix before rotary embedding have to be decoded."
    if looks_below(key.predictor) or value.predictor:
        return "what predictors left over has to be decoded."
    if value.residual < key.residual or (key.keep == "log" and key.window != value.window):
        return "values must not leave the window before keys."
    return None


def _run(
    q, key, value, n, k_new, v_new, mask, causal, scale, softcap, k_spec, v_spec, rotary=None, sinks=None, paid=False
) -> tuple[Tensor, ...]:
    batch, heads, _, head_dim = k_new.shape
    device = q.device
    pages = [max(_MIN_PAGES, spec.pages(n)) for spec in (k_spec, v_spec)]
    rooms = [capacity(pool, used) for used, state in zip(pages, (key, value), strict=True) for pool in state.pools]
    center = key.center
    key, value = ((*(handle(pool.contiguous()) for pool in state.pools), state.ring) for state in (key, value))
    if mask is not None:
        mask = mask.contiguous()
    lengths = _lengths(n, k_spec.packed(n), v_spec.packed(n), device)
    k_spec, v_spec = k_spec.stored_as, v_spec.stored_as
    cos, sin, rope = rotary or (None, None, "")
    held = tokens = None
    if k_spec.keep == "log":
        held, tokens = ring_tokens(k_spec, n, device), _page_tokens(k_spec, k_spec.pages(n), pages[0], device)
    layout_of_mask = None if mask is None else (mask.shape[0] > 1, mask.shape[1], mask.dtype)
    columns = cos.shape[2] if rope else 0
    logits = None if sinks is None else sinks.dtype
    present = k_new.shape[2] > 0
    shared = (batch > 1, q.shape[1], heads, head_dim, q.dtype, device, layout_of_mask, rope, columns, logits, present)
    kernel = _attend_kernel(shared, k_spec, v_spec, scale, softcap, paid)
    if not present:  # a token that does not count
        k_new = v_new = k_new.new_zeros(batch, heads, 1, head_dim)
    new = q.contiguous(), k_new.contiguous(), v_new.contiguous()
    points = (grid(spec.grid, device) if spec.grid else None for spec in (k_spec, v_spec))
    bases = (None if s.rotation is None else basis(head_dim, s.rotation, device) for s in (k_spec, v_spec))
    return kernel(
        *_carriers((*pages, *rooms), device), new[0], *key, *value, lengths, *new[1:], mask, held, tokens, cos, sin,
        *points, *bases, sinks, center,
    )  # fmt: skip


@implements("attend", "inductor", refuses=_refuses_attend)
def attend(
    q, key, value, n, k_new, v_new, mask, causal, scale, softcap, k_spec, v_spec, rotary=None, sinks=None,
    statistic="", importance=None,
) -> list[Tensor]:  # fmt: skip
    how = causal, scale, softcap, k_spec, v_spec, rotary, sinks
    if q.shape[2] > 1:
        if not statistic and importance is None and drafts.serves(q, key.ring, n, (k_spec, v_spec)):
            return [drafts.attend(q, key, value, n, k_new, v_new, mask, *how)]
        return reference.attend(q, key, value, n, k_new, v_new, mask, *how, statistic, importance, decode_all)
    if mask is not None and importance is not None and k_spec.budget is not None:
        mask = with_past(mask, importance, n, q.shape)
    out, *paid = _run(q, key, value, n, k_new, v_new, mask, *how, bool(statistic))
    return [out, *(_in_token_order(of_slots.unflatten(0, k_new.shape[:2]), n, k_spec) for of_slots in paid)]


def _in_token_order(paid: Tensor, n: int, spec: CodecSpec) -> Tensor:
    """What each slot was paid, as `kvpass.layout.eviction` orders the tokens."""
    packed, ring = spec.packed(n), slice(-1 - spec.sinks - spec.window, -1)
    slots = layout(spec).slots(torch.arange(spec.sinks + packed, n)).to(paid.device)
    first = min(n, spec.sinks)
    parts = paid[..., ring][..., :first], paid[..., :packed], paid[..., ring].index_select(-1, slots), paid[..., -1:]
    return torch.cat(parts, -1)

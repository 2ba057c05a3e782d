"""Attention of one query token over packed keys and values, written to be fused by Inductor: K and V never reach
memory.

Each plane of a page is unpacked and dequantized pointwise. Then there is a separate reduction for every query head of
the KV head, because the same computation with a broadcast dimension is twice as slow. Pools are sliced, so the cost
depends on the number of stored tokens only.
"""

from collections.abc import Mapping
from functools import cache, lru_cache
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from kvpass.codec.affine import params_dtype
from kvpass.codec.allocation import Allocation
from kvpass.codec.hadamard import basis
from kvpass.codec.page_rope import PageTables
from kvpass.codec.rope import parse_rope, rotate_pairs, split_pairs
from kvpass.codec.shares import Shares
from kvpass.codec.spec import CodecSpec, parse
from kvpass.codec.tensors import Pack, of_pages, page_shapes, read_shapes
from kvpass.layout.pool import capacity, handle, of_capacity
from kvpass.layout.retention import Retention
from kvpass.layout.window import layout, ring_tokens

from ..call_types import AttendCall
from ..cpp import allocated
from ..reference import with_past, with_starts
from ..table import DispatchKey, implements, refuses_shapes
from .aot import Input, Kernel, Program
from .page_view import ATTENDED, Pages, page_values, points_of, view_pages
from .planes import Planes, in_storage_order, mean_scores
from .terms import Turns

_BEHIND_ROPE = {"boosted": "boosted channels", "error-term": "low-rank error terms"}
_MIN_PAGES = 2  # sizes 0 and 1 would be specialized; pages beyond the packed tokens are masked


class Common(NamedTuple):
    """The properties that all calls of one kernel share, besides the specs.

    many: whether there is more than one sample.
    mask: whether the mask has more than one sample, its number of heads and its dtype; None without a mask.
    columns: columns of the rotary tables.
    sinks: dtype of the sinks; None without sinks.
    present: whether the call has a token of its own (self-attention) or none (cross-attention).
    mass: whether attention mass is returned.
    """

    many: bool
    q_heads: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    mask: tuple[bool, int, torch.dtype] | None
    rope: str
    columns: int
    sinks: torch.dtype | None
    present: bool
    scale: float
    softcap: float
    mass: bool


def _places(n: Tensor, packed: Tensor, retention: Retention, held: Tensor | None) -> tuple[Tensor, Tensor]:
    """The token in each slot of the ring, and whether it is to be attended to. For log-sparse windows, ``held`` holds
    the tokens."""
    if held is not None:
        return held, held >= 0
    sinks, size = retention.sinks, retention.ring_size
    slots, newest = torch.arange(sinks + size, device=n.device) - sinks, n - 1 - sinks
    tokens = torch.where(slots < 0, slots, newest - torch.remainder(newest - slots, size)) + sinks
    return tokens, torch.where(slots < 0, tokens < n, tokens >= packed + sinks)


def _dots(q: Tensor, k: Tensor, tables: tuple[Tensor, Tensor] | None, rope: str) -> list[Tensor]:
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


def _allocated(given: dict[str, Tensor | None], side: str, spec: CodecSpec) -> tuple:
    """The arguments of `cpp.allocated` for the pages of a side, "k" or "v"."""
    names = "pool_codes", "pages", "pool_codes_room", "basis", "fields", "points"
    codes, pages, room, *fitted = (given[f"{side}_{name}"] for name in names)
    return codes, pages.shape[0], room.shape[0], *fitted, spec


def _attend(
    given: dict[str, Tensor | None], common: Common, k_spec: CodecSpec, v_spec: CodecSpec
) -> tuple[Tensor, ...]:
    """Attend with one query token ``[B, H_q, 1, D]`` to packed keys and values: ``[B, H_q, 1, D]``.

    With ``common.mass``, also returns the weights summed over the query heads of each KV head, ``[B * H_kv, slots]``:
    for the pages, the ring and the token of the call. Without ``common.present``, the last one is masked.

    given: the tensors that `_inputs` lists, by name. The sizes of ``k_pages`` and ``v_pages`` are page counts. The
        sizes of the tensors that `_pools` names are capacities of pools, which are passed as handles. The values of
        ``lengths`` come from `_lengths`. For log-sparse windows, ``held`` is the token in each slot of the ring, and
        ``page_tokens`` ``[N, P]`` the tokens in pages.
    """
    rope, softcap = common.rope, common.softcap
    q, lengths, mask, held, page_tokens, sinks, center = (
        given[name] for name in ("q", "lengths", "mask", "held", "page_tokens", "sinks", "center")
    )
    count, v_count, size = given["k_pages"].shape[0], given["v_pages"].shape[0], k_spec.page_size
    k_pools, v_pools = (
        [
            *(_first_pages(given[name], given[room], pages) for name, room in _pools(side, spec).items()),
            *(given[f"{side}_{name}"].flatten(0, 1) for name in _read(spec, given["q"].shape[-1], given["q"].dtype)),
        ]
        for side, pages, spec in (("k", count, k_spec), ("v", v_count, v_spec))
    )
    k_ring, v_ring, k_new, v_new = (given[name].flatten(0, 1) for name in ("k_ring", "v_ring", "k_new", "v_new"))
    shape, dtype, batch, groups = q.shape, q.dtype, q.shape[0], given["k_ring"].shape[1]
    q = (q.float() * common.scale).view(batch * groups, shape[1] // groups, -1)  # [BH, R, D]
    index = torch.arange(count * size, device=q.device)  # packed tokens, in storage order
    in_page = index + k_spec.retention.sinks if page_tokens is None else page_tokens.flatten()
    n, k_packed, v_packed = lengths.split(1)
    k_tokens, k_counts = _places(n, k_packed, k_spec.retention, held)

    def tables(tokens):
        """cos and sin of ``tokens`` of any shape; None if keys are stored after rotary embedding."""
        if not rope:
            return None
        rows = [
            table.index_select(1, tokens.flatten())[..., : parse_rope(rope)[0]]
            for table in (given["cos"], given["sin"])
        ]
        return tuple(table.unflatten(1, tokens.shape) for table in rows)

    def seen(scores, counts):
        scores = torch.tanh(scores / softcap) * softcap if softcap else scores
        return torch.where(counts, scores, -torch.inf)

    page_rope = k_spec.transform.page_rope
    page_tables = PageTables(given["cos"], given["sin"], rope) if page_rope and rope else None
    if page_rope:  # exact keys have normal rotary embedding
        rope = ""
    if given["k_fields"] is not None:
        on_pages = allocated.page_scores(q, page_tables, center, *_allocated(given, "k", k_spec))
    else:
        pages = view_pages(k_pools, k_spec, given["k_points"], shape[-1])
        turns = Turns(given["cos"], given["sin"], rope, in_page.view(count, size)) if rope else None
        on_pages = page_scores(q, pages, in_page.view(count, size), tables, rope, given["k_basis"], center)
        for term in pages.beside:
            on_pages = on_pages + term.scores(q, turns).flatten(2)
    on_ring = torch.stack(_dots(q, k_ring.float(), tables(k_tokens.clamp_min(0)), rope), 1)
    own, counts = (q * k_new.float()).sum(-1, keepdim=True), torch.full_like(n, common.present, dtype=torch.bool)
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
        weights = weights.nan_to_num(0)  # a fully masked query gets zeros, as in SDPA

    # values leave their window no earlier than keys, so the weight of a packed value is that of a packed key
    packed, slots = v_count * size, v_ring.shape[1]
    on_pages = torch.where(index[:packed] < v_packed, weights[..., :packed], 0.0)
    on_ring = _ring_weights(weights, lengths, count * size, k_spec.retention, v_spec.retention, held)
    if given["v_fields"] is not None:
        from_pages = allocated.page_values(on_pages, *_allocated(given, "v", v_spec))
    # concatenated, they are computed once, not once per channel
    on_pages, on_ring, own = torch.cat([on_pages, on_ring, weights[..., -1:]], -1).split([packed, slots, 1], -1)
    out = (on_ring[..., None] * v_ring[:, None].float()).sum(2) + own * v_new.float()
    if given["v_fields"] is None:
        pages, by_page = (
            view_pages(v_pools, v_spec, given["v_points"], shape[-1]),
            on_pages.unflatten(-1, (v_count, -1)),
        )
        from_pages = page_values(by_page, pages, given["v_basis"])
    out = out + from_pages
    out = out.view(*shape[:3], -1).to(dtype)
    return (out, weights.sum(1)) if common.mass else (out,)


def plane_scores(q, planes: Planes, tokens, tables, rope: str, basis, center) -> list[list[Tensor]]:
    """Scores of ``q`` ``[BH, R, D]`` with keys in pages: ``[BH, N, T]`` for each query head and plane.

    tokens: ``[N, P]``, token ids.
    tables: function from token ids to rotary tables.
    basis: the rotation of the keys, which is applied to queries instead.
    center: the mean that was subtracted from keys before rotary embedding.
    """
    scores, rotated = [], q if basis is None else q @ basis
    by_plane = tokens.unflatten(-1, (planes.runs, -1))
    for j in range(planes.runs):
        k = planes.values(j)
        if center is not None and rope:  # the mean is rotated with the keys
            k = k + center.flatten(0, 1)[:, None].float()
        scores.append(_dots(rotated, k, tables(by_plane[:, j]), rope))
    return [[of_plane[r] for of_plane in scores] for r in range(q.shape[1])]


def page_scores(q, pages: Pages, tokens, tables, rope: str, basis, center) -> Tensor:
    """`plane_scores` as one tensor ``[BH, R, N * P]`` in token order, including a mean that was subtracted."""
    parts = []
    for kind in pages.kinds:
        by_head = plane_scores(q, kind, tokens, tables, rope, basis, center)
        parts.append(in_storage_order([one for of_head in by_head for one in of_head], kind.runs))
    out = parts[0]
    if pages.slots is not None:
        by_page = torch.cat([part.unflatten(-1, (tokens.shape[0], -1)) for part in parts], -1)
        out = by_page.gather(-1, pages.slots[:, None].expand_as(by_page)).flatten(2)
    if center is not None and not rope:
        out = out + mean_scores(q, center)
    return out


def _ring_weights(weights, lengths, packed_slots: int, of_keys: Retention, of_values: Retention, held) -> Tensor:
    """The weights of the values in each slot of their ring. In ``weights``, ``packed_slots`` packed tokens come
    first."""
    n, k_packed, v_packed = lengths.split(1)
    tokens, counts = _places(n, v_packed, of_values, held)
    on_ring = weights[..., packed_slots:-1]
    if held is None:
        behind = tokens - of_keys.sinks
        in_window = packed_slots + torch.where(behind < 0, tokens, of_keys.sinks + behind % of_keys.ring_size)
        source = torch.where((behind >= 0) & (behind < k_packed), behind, in_window)
        on_ring = weights.index_select(-1, torch.where(counts, source, 0))
    return torch.where(counts, on_ring, 0.0)


def _biased(scores: Tensor, mask: Tensor, token: Tensor, groups: int) -> Tensor:
    """Apply a bool or additive ``mask`` ``[B or 1, H_q or 1, 1, T]``, at columns ``token`` ``[N]``, to ``scores``
    ``[B * H_kv, R, N]``."""
    bias = mask[:, :, 0].index_select(-1, token)
    bias = torch.where(bias, 0.0, -torch.inf) if mask.dtype == torch.bool else bias.float()
    bias = bias[:, None] if mask.shape[1] == 1 else bias.unflatten(1, (groups, -1))
    return (scores.unflatten(0, (-1, groups)) + bias).flatten(0, 1)


@cache
def _pools(side: str, spec: CodecSpec) -> dict[str, str]:
    """Names of the pools of a side, "k" or "v", and of the tensors whose sizes are their capacities, as inputs of
    `_attend`."""
    return {f"{side}_pool_{name}": f"{side}_pool_{name}_room" for name in of_pages(spec)}


def _read(spec: CodecSpec, head_dim: int, dtype: torch.dtype) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of the sequence tensors that the page view of ``spec`` takes, by name."""
    return {} if isinstance(spec.codec, Allocation) else read_shapes(spec, head_dim, dtype)


# Sizes for tracing dynamic dims. Unrelated dims have different sizes; none is 0 or 1.
_BATCH, _TOKENS, _TABLES = 5, 1733, 1811
_COUNTS = {"k_pages": 53, "v_pages": 47}
_CAPACITY = 59  # of the first pool; each further pool has one more


# Every query head of a KV head uses the dequantized keys and values. The thresholds keep Inductor from storing them in
# memory for that. Contraction may round sums of products once. Precompiling torch's headers with this flag, which only
# this kernel uses, takes longer than compiling the kernel.
OPTIONS = {
    "cpp_cache_precompile_headers": False,
    "realize_reads_threshold": 256,
    "realize_acc_reads_threshold": 256,
    "realize_opcount_threshold": 4096,
    "cpp.enable_floating_point_contract_flag": "fast",
}


def _inputs(common: Common, k_spec: CodecSpec, v_spec: CodecSpec) -> list[Input]:
    """The inputs of `_attend`."""
    many, q_heads, heads, head_dim, dtype, device, mask, rope, columns, sinks = common[:10]

    def tensor(name: str, *shape: int, dtype=dtype, dynamic=(), there=True) -> Input:
        return Input(name, torch.empty(shape, dtype=dtype, device=device) if there else None, dynamic)

    def sample(name: str, *shape: int, dtype=dtype, dynamic=(), there=True, many=many) -> Input:
        lead, varying = (_BATCH, (0,)) if many else (1, ())
        return tensor(name, lead, *shape, dtype=dtype, dynamic=(*varying, *dynamic), there=there)

    rooms = chain(_pools("k", k_spec).values(), _pools("v", v_spec).values())
    counts = _COUNTS | {room: _CAPACITY + i for i, room in enumerate(rooms)}
    inputs = [tensor(name, count, dtype=torch.uint8, dynamic=(0,)) for name, count in counts.items()]
    inputs += [sample("q", q_heads, 1, head_dim), tensor("lengths", 3, dtype=torch.int64)]
    for side, spec in (("k", k_spec), ("v", v_spec)):
        kept = page_shapes(spec, head_dim, dtype).values()
        inputs += [sample(n, heads, *s, dtype=d) for n, (s, d) in zip(_pools(side, spec), kept, strict=True)]
        inputs += [sample(f"{side}_ring", heads, spec.retention.sinks + spec.retention.ring_size, head_dim)]
        inputs += [sample(f"{side}_new", heads, 1, head_dim)]
        inputs += [Input(f"{side}_points", _points(spec, device))]
        read = _read(spec, head_dim, dtype).items()
        inputs += [sample(f"{side}_{name}", heads, *s, dtype=d) for name, (s, d) in read]
        rotated, codec = spec.transform.rotation is not None, spec.codec
        if not isinstance(codec, Allocation):
            inputs += [tensor(f"{side}_basis", head_dim, head_dim, dtype=torch.float32, there=rotated)]
            inputs += [Input(f"{side}_fields", None)]
        else:
            inputs += [sample(f"{side}_basis", heads, head_dim, codec.block_size, dtype=params_dtype(dtype))]
            fields = sum(codec.fields(head_dim))
            inputs += [sample(f"{side}_fields", heads, 1, fields, dtype=torch.int32)]
    of_samples, mask_heads, kind = mask or (False, 1, dtype)
    retention, ids = k_spec.retention, torch.int64
    log = retention.keep == "log"
    return [
        *inputs,
        sample(
            "mask", mask_heads, 1, _TOKENS, dtype=kind, dynamic=(3,), there=mask is not None, many=many and of_samples
        ),
        tensor("held", retention.sinks + retention.ring_size, dtype=ids, there=log),
        tensor("page_tokens", _COUNTS["k_pages"], retention.page_size, dtype=ids, dynamic=(0,), there=log),
        *(sample(name, _TABLES, columns, dynamic=(1,), there=bool(rope)) for name in ("cos", "sin")),
        tensor("sinks", q_heads, dtype=sinks or dtype, there=sinks is not None),
        sample("center", heads, 1, head_dim, dtype=params_dtype(dtype), there=k_spec.transform.center),
    ]


def _points(spec: CodecSpec, device: torch.device) -> Tensor | None:
    """The look-up table of codes or gains; None if the codec has none."""
    if isinstance(spec.codec, Allocation):
        return allocated.look_up_table(device)
    return points_of(spec, device)


@Kernel
def attend_kernel(common: Common, k_spec: CodecSpec, v_spec: CodecSpec) -> Program:
    """`_attend` for all calls that share ``common``. It takes the tensors that `_inputs` lists, by name."""
    inputs = _inputs(common, k_spec, v_spec)
    names = [one.name for one in inputs]

    def attend(*tensors):
        return _attend(dict(zip(names, tensors, strict=True)), common, k_spec, v_spec)

    return Program(attend, inputs, OPTIONS, by_name=True)


@lru_cache(maxsize=16)
def _as_shapes(pages: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
    """Tensors whose sizes are page counts; shared by all layers of a step."""
    return tuple(torch.empty(count, dtype=torch.uint8, device=device) for count in pages)


@lru_cache(maxsize=16)
def _lengths(n: int, k_packed: int, v_packed: int, device: torch.device) -> Tensor:
    """Numbers of tokens, packed keys and packed values as a tensor ``[3]`` int64; shared by all layers of a step."""
    return torch.tensor([n, k_packed, v_packed], device=device)


@lru_cache(maxsize=16)
def _page_tokens(retention: Retention, used: int, pages: int, device: torch.device) -> Tensor:
    """The token ids in the first ``used`` of ``pages`` pages, ``[pages, P]`` int64; 0 in the others."""
    tokens = torch.zeros(pages, retention.page_size, dtype=torch.int64)
    tokens[:used] = layout(retention).page_tokens(0, used).view(-1, retention.page_size)
    return tokens.to(device)


def _refuses_attend(dispatch: DispatchKey) -> str | None:
    if not dispatch.specs:
        return "the past is already dequantized."
    if dispatch.queries != 1:
        return "it attends with one query token."
    if why := refuses_shapes(dispatch):
        return why
    specs = [parse(text) for text in dispatch.specs]
    (key, value), of_keys = (spec.retention for spec in specs), specs[0].transform
    if dispatch.device != "cpu" and any(isinstance(spec.codec, (Allocation, Shares)) for spec in specs):
        return "only CPU kernels read per-channel bit widths."
    if any(isinstance(spec.codec, Shares) for spec in specs):
        return "only C++ kernels read calibrated bit widths."
    if (key.page_size, key.sinks, key.keep) != (value.page_size, value.sinks, value.keep):
        return "keys and values must share page_size, sinks and the choice of exact tokens."
    if of_keys.pre_rope and isinstance(specs[0].codec, Allocation):
        return (
            "keys stored before rotary embedding in a fitted basis have to be dequantized first: queries cannot be "
            "projected onto it."
        )
    if of_keys.page_rope and not isinstance(specs[0].codec, (Allocation, Shares)):
        return "keys with page-relative RoPE and one bit width for all channels have to be dequantized first."
    if of_keys.pre_rope and of_keys.rotation is not None:
        return "keys rotated by a Hadamard matrix before rotary embedding have to be dequantized first."
    if of_keys.pre_rope and (what := _BEHIND_ROPE.get(specs[0].codec.name)):
        return f"{what} before rotary embedding have to be dequantized first."
    if value.window < key.window or (key.keep == "log" and key.ring_size != value.ring_size):
        return "values must not leave the residual window before their keys."
    return None


def _run(call: AttendCall[Pack]) -> tuple[Tensor, ...]:
    """Run the kernel of `_attend` for ``call``."""
    q, key, value, n, k_new, v_new, mask = call[:7]
    k_spec, v_spec = call.specs
    batch, heads, _, head_dim = k_new.shape
    device, present, sides = q.device, k_new.shape[2] > 0, (("k", key, k_spec), ("v", value, v_spec))
    retention = k_spec.retention
    cos, sin, rope = call.rotary or key.page_tables or (None, None, "")
    if not present:  # a masked token
        k_new = v_new = k_new.new_zeros(batch, heads, 1, head_dim)
    given = dict(
        q=q.contiguous(), k_new=k_new.contiguous(), v_new=v_new.contiguous(), mask=mask, cos=cos, sin=sin,
        sinks=call.sinks, lengths=_lengths(n, retention.packed(n), v_spec.retention.packed(n), device), held=None,
        page_tokens=None, center=key.fitted.get("center"),
    )  # fmt: skip
    counts = {}
    for side, pack, spec in sides:
        counts[f"{side}_pages"] = pages = max(_MIN_PAGES, spec.retention.pages(n))
        rotation = spec.transform.rotation
        for (name, room), pool in zip(_pools(side, spec).items(), pack.pools, strict=True):
            counts[room], given[name] = capacity(pool, pages), handle(pool.contiguous())
        given[f"{side}_ring"] = pack.ring
        given[f"{side}_points"] = _points(spec, device)
        given |= {f"{side}_{name}": pack.fitted[name] for name in _read(spec, head_dim, q.dtype)}
        given[f"{side}_basis"] = pack.fitted.get("basis") if rotation is None else basis(head_dim, rotation, device)
        given[f"{side}_fields"] = pack.fitted.get("fields")
    given.update(zip(counts, _as_shapes(tuple(counts.values()), device), strict=True))
    layout_of_mask = None
    if mask is not None:
        given["mask"] = mask = mask.contiguous()
        layout_of_mask = mask.shape[0] > 1, mask.shape[1], mask.dtype
    if retention.keep == "log":
        given["held"] = ring_tokens(retention, n, device)
        given["page_tokens"] = _page_tokens(retention, retention.pages(n), counts["k_pages"], device)
    common = Common(
        batch > 1, q.shape[1], heads, head_dim, q.dtype, device, layout_of_mask, rope, cos.shape[2] if rope else 0,
        None if call.sinks is None else call.sinks.dtype, present, call.scale, call.softcap, bool(call.statistic),
    )  # fmt: skip
    return attend_kernel(common, k_spec.stored_as, v_spec.stored_as)(given)


@implements("attend", "inductor", has=ATTENDED, refuses=_refuses_attend)
def attend(call: AttendCall[Pack]) -> list[Tensor]:
    out, *mass = _run(with_past(with_starts(call)))
    shape, retention = call.k_new.shape[:2], call.k_spec.retention
    return [out, *(_in_token_order(of_slots.unflatten(0, shape), call.n, retention) for of_slots in mass)]


def _in_token_order(mass: Tensor, n: int, retention: Retention) -> Tensor:
    """Reorder the attention mass of slots to the token order of `kvpass.layout.eviction`."""
    packed, ring = retention.packed(n), slice(-1 - retention.sinks - retention.ring_size, -1)
    slots = layout(retention).slots(torch.arange(retention.sinks + packed, n)).to(mass.device)
    first = min(n, retention.sinks)
    parts = mass[..., ring][..., :first], mass[..., :packed], mass[..., ring].index_select(-1, slots), mass[..., -1:]
    return torch.cat(parts, -1)

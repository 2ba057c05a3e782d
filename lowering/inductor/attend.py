"""Runs `attention_graph` as a kernel of Inductor: lists its inputs, compiles it once per signature, and decides which
calls it serves."""

from functools import lru_cache
from itertools import chain

import torch
from torch import Tensor

from kvpass.codec.affine import params_dtype
from kvpass.codec.allocation import Allocation
from kvpass.codec.hadamard import basis
from kvpass.codec.layer_pages import LayerPages
from kvpass.codec.spec import CodecSpec, parse
from kvpass.codec.tensors import Pack, page_shapes
from kvpass.codec.token_ranks import Ranked
from kvpass.layout.pool import capacity, handle
from kvpass.layout.retention import Retention
from kvpass.layout.window import layout, ring_tokens

from ..call_types import AttendCall
from ..cpp import allocated
from ..reference import with_past, with_starts
from ..table import LATENT, LSE, UNEQUAL, DispatchKey, implements, refuses_extras
from . import attention_graph
from .aot import Input, Kernel, Program
from .attention_graph import Signature, pool_names, sequence_shapes
from .page_view import ATTENDED, points_of

_NOT_BEFORE_ROPE = {"boosted": "boosted channels", "error-term": "low-rank error terms"}
_MIN_PAGES = 2  # sizes 0 and 1 would be specialized; pages beyond the packed tokens are masked

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


def _inputs(signature: Signature, k_spec: CodecSpec, v_spec: CodecSpec) -> list[Input]:
    """The inputs of `attention_graph.attend`."""
    batched, q_heads, heads, head_dim, dtype, device, mask, rope, columns, sinks = signature[:10]

    def tensor(name: str, *shape: int, dtype=dtype, dynamic=(), present=True) -> Input:
        return Input(name, torch.empty(shape, dtype=dtype, device=device) if present else None, dynamic)

    def sample(name: str, *shape: int, dtype=dtype, dynamic=(), present=True, batched=batched) -> Input:
        lead, varying = (_BATCH, (0,)) if batched else (1, ())
        return tensor(name, lead, *shape, dtype=dtype, dynamic=(*varying, *dynamic), present=present)

    rooms = chain(pool_names("k", k_spec).values(), pool_names("v", v_spec).values())
    counts = _COUNTS | {room: _CAPACITY + i for i, room in enumerate(rooms)}
    inputs = [tensor(name, count, dtype=torch.uint8, dynamic=(0,)) for name, count in counts.items()]
    inputs += [sample("q", q_heads, 1, head_dim), tensor("lengths", 3, dtype=torch.int64)]
    for side, spec in (("k", k_spec), ("v", v_spec)):
        kept = page_shapes(spec, head_dim, dtype).values()
        inputs += [sample(n, heads, *s, dtype=d) for n, (s, d) in zip(pool_names(side, spec), kept, strict=True)]
        inputs += [sample(f"{side}_ring", heads, spec.retention.sinks + spec.retention.ring_size, head_dim)]
        inputs += [sample(f"{side}_new", heads, 1, head_dim)]
        inputs += [Input(f"{side}_points", _points(spec, device))]
        read = sequence_shapes(spec, head_dim, dtype).items()
        inputs += [sample(f"{side}_{name}", heads, *s, dtype=d) for name, (s, d) in read]
        rotated, codec = spec.transform.rotation is not None, spec.codec
        if not isinstance(codec, Allocation):
            inputs += [tensor(f"{side}_basis", head_dim, head_dim, dtype=torch.float32, present=rotated)]
            inputs += [Input(f"{side}_fields", None)]
        else:
            inputs += [sample(f"{side}_basis", heads, head_dim, codec.block_size, dtype=params_dtype(dtype))]
            fields = sum(codec.fields(head_dim))
            inputs += [sample(f"{side}_fields", heads, 1, fields, dtype=torch.int32)]
    mask_per_sample, mask_heads, kind = mask or (False, 1, dtype)
    mask_batched, has_mask = batched and mask_per_sample, mask is not None
    mask_input = sample(
        "mask", mask_heads, 1, _TOKENS, dtype=kind, dynamic=(3,), present=has_mask, batched=mask_batched
    )
    retention, ids = k_spec.retention, torch.int64
    log = retention.keep == "log"
    return [
        *inputs,
        mask_input,
        tensor("slot_tokens", retention.sinks + retention.ring_size, dtype=ids, present=log),
        tensor("page_tokens", _COUNTS["k_pages"], retention.page_size, dtype=ids, dynamic=(0,), present=log),
        *(sample(name, _TABLES, columns, dynamic=(1,), present=bool(rope)) for name in ("cos", "sin")),
        tensor("sinks", q_heads, dtype=sinks or dtype, present=sinks is not None),
        sample("center", heads, 1, head_dim, dtype=params_dtype(dtype), present=k_spec.transform.center),
    ]


def _points(spec: CodecSpec, device: torch.device) -> Tensor | None:
    """The look-up table of codes or gains; None if the codec has none."""
    if isinstance(spec.codec, Allocation):
        return allocated.look_up_table(device)
    return points_of(spec, device)


@Kernel
def attend_kernel(signature: Signature, k_spec: CodecSpec, v_spec: CodecSpec) -> Program:
    """`attention_graph.attend` for all calls with ``signature``. It takes the tensors that `_inputs` lists, by name."""
    inputs = _inputs(signature, k_spec, v_spec)
    names = [one.name for one in inputs]

    def attend(*tensors):
        return attention_graph.attend(dict(zip(names, tensors, strict=True)), signature, k_spec, v_spec)

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
    if why := refuses_extras(dispatch, UNEQUAL, LATENT, LSE):
        return why
    specs = [parse(text) for text in dispatch.specs]
    (key, value), of_keys = (spec.retention for spec in specs), specs[0].transform
    if dispatch.device != "cpu" and any(isinstance(spec.codec, Ranked) for spec in specs):
        return "only CPU kernels read per-channel bit widths."
    if any(isinstance(spec.codec, LayerPages) for spec in specs):
        return "only C++ kernels read pages that hold all heads of a layer."
    if (key.page_size, key.sinks, key.keep) != (value.page_size, value.sinks, value.keep):
        return "keys and values must share page_size, sinks and the choice of exact tokens."
    if of_keys.pre_rope and isinstance(specs[0].codec, Allocation):
        return (
            "keys stored before rotary embedding in a fitted basis have to be dequantized first: queries cannot be "
            "projected onto it."
        )
    if of_keys.page_rope and not isinstance(specs[0].codec, Ranked):
        return "keys with page-relative RoPE and one bit width for all channels have to be dequantized first."
    if of_keys.pre_rope and of_keys.rotation is not None:
        return "keys rotated by a Hadamard matrix before rotary embedding have to be dequantized first."
    if of_keys.pre_rope and (what := _NOT_BEFORE_ROPE.get(specs[0].codec.name)):
        return f"{what} before rotary embedding have to be dequantized first."
    if value.window < key.window or (key.keep == "log" and key.ring_size != value.ring_size):
        return "values must not leave the residual window before their keys."
    return None


def _run(call: AttendCall[Pack]) -> tuple[Tensor, ...]:
    """Run the kernel for ``call``."""
    q, key, value, n, k_new, v_new, mask = call[:7]
    k_spec, v_spec = call.specs
    batch, heads, _, head_dim = k_new.shape
    device, new_token, sides = q.device, k_new.shape[2] > 0, (("k", key, k_spec), ("v", value, v_spec))
    retention = k_spec.retention
    cos, sin, rope = call.rotary or key.page_tables or (None, None, "")
    if not new_token:  # a masked token
        k_new = v_new = k_new.new_zeros(batch, heads, 1, head_dim)
    inputs = dict(
        q=q.contiguous(), k_new=k_new.contiguous(), v_new=v_new.contiguous(), mask=mask, cos=cos, sin=sin,
        sinks=call.sinks, lengths=_lengths(n, retention.packed(n), v_spec.retention.packed(n), device),
        slot_tokens=None, page_tokens=None, center=key.fitted.get("center"),
    )  # fmt: skip
    counts = {}
    for side, pack, spec in sides:
        counts[f"{side}_pages"] = pages = max(_MIN_PAGES, spec.retention.pages(n))
        rotation = spec.transform.rotation
        for (name, room), pool in zip(pool_names(side, spec).items(), pack.pools, strict=True):
            counts[room], inputs[name] = capacity(pool, pages), handle(pool.contiguous())
        inputs[f"{side}_ring"] = pack.ring
        inputs[f"{side}_points"] = _points(spec, device)
        inputs |= {f"{side}_{name}": pack.fitted[name] for name in sequence_shapes(spec, head_dim, q.dtype)}
        inputs[f"{side}_basis"] = pack.fitted.get("basis") if rotation is None else basis(head_dim, rotation, device)
        inputs[f"{side}_fields"] = pack.fitted.get("fields")
    inputs.update(zip(counts, _as_shapes(tuple(counts.values()), device), strict=True))
    layout_of_mask = None
    if mask is not None:
        inputs["mask"] = mask = mask.contiguous()
        layout_of_mask = mask.shape[0] > 1, mask.shape[1], mask.dtype
    if retention.keep == "log":
        inputs["slot_tokens"] = ring_tokens(retention, n, device)
        inputs["page_tokens"] = _page_tokens(retention, retention.pages(n), counts["k_pages"], device)
    signature = Signature(
        batch > 1, q.shape[1], heads, head_dim, q.dtype, device, layout_of_mask, rope, cos.shape[2] if rope else 0,
        None if call.sinks is None else call.sinks.dtype, new_token, call.scale, call.softcap, bool(call.statistic),
    )  # fmt: skip
    return attend_kernel(signature, k_spec.stored_as, v_spec.stored_as)(inputs)


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

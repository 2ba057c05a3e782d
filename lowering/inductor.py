"""Formulations written so that Inductor fuses them: one kernel per codec and head shape, for every length.

Pages are independent, so `encode` and `decode` run on one merged dim of pages: the kernel of a prompt is that of a
flush. `attend` for one query token reads each packed byte once and keeps K and V out of memory: per plane of a page,
unpack and dequantize pointwise, then one separate reduction for every query head of the KV head (as a broadcast
dimension the same algebra is twice as slow). Pools are sliced, so the cost is that of the tokens there are.
"""

from functools import cache, partial

import torch
from torch import Tensor

from kvpass.codec.pack import num_planes, unpack_plane
from kvpass.codec.pages import decode_pages, encode_pages
from kvpass.codec.spec import CodecSpec, parse
from kvpass.errors import KVPassError

from . import reference
from .aot import compile_ahead
from .table import Site, implements

_MIN_PAGES = 2  # sizes 0 and 1 would be specialised; what is beyond the packed tokens is masked
_BATCH_HEADS, _K_PAGES, _V_PAGES, _K_CAPACITY, _V_CAPACITY, _TOKENS = 6, 53, 47, 61, 59, 1733  # sizes to trace with


_PAGES = 7  # pages to trace `encode` and `decode` with


def _page_kernel(fn, spec: CodecSpec, *inputs: Tensor | None):
    """Run ``fn(*inputs, spec)``, compiled for any number of pages, on inputs ``[M, ...]``; M = 1 is run as 2."""
    pages = next(tensor.shape[0] for tensor in inputs if tensor is not None)
    if pages == 1:
        inputs = tuple(None if tensor is None else tensor.expand(2, *tensor.shape[1:]) for tensor in inputs)
    inputs = tuple(None if tensor is None else tensor.contiguous() for tensor in inputs)
    described = tuple(None if t is None else (t.shape[1:], t.dtype, t.device) for t in inputs)
    return [tensor[:pages] for tensor in _compiled_page_kernel(fn, spec, described)(*inputs)]


@cache
def _compiled_page_kernel(fn, spec: CodecSpec, described: tuple):
    examples = [d and torch.empty((_PAGES, *d[0]), dtype=d[1], device=d[2]) for d in described]
    return compile_ahead(lambda *inputs: fn(*inputs, spec), examples, [(0,)] * len(examples))


def _encode(pages: Tensor, compensation: Tensor | None, spec: CodecSpec) -> tuple[Tensor, ...]:
    return encode_pages(pages, spec, compensation)


def _decode(codes: Tensor, scale: Tensor, zero_point: Tensor, spec: CodecSpec) -> tuple[Tensor]:
    return (decode_pages(codes.unsqueeze(1), scale.unsqueeze(1), zero_point.unsqueeze(1), spec),)


@implements("encode", "inductor")
def encode(x: Tensor, compensation: Tensor | None, spec: CodecSpec) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, tokens, head_dim = x.shape
    pages = tokens // spec.page_size
    if compensation is not None:
        compensation = compensation[:, :, None].expand(-1, -1, pages, -1, -1).flatten(0, 2)
    new = _page_kernel(_encode, spec, x.reshape(-1, spec.page_size, head_dim), compensation)
    return tuple(tensor.view(batch, heads, pages, *tensor.shape[2:]) for tensor in new)


@implements("append_", "inductor")
def append_(*args) -> None:
    reference.append(encode, *args)


@implements("decode", "inductor")
def decode(codes: Tensor, scale: Tensor, zero_point: Tensor, ring: Tensor, n: int, spec: CodecSpec) -> Tensor:
    return reference.read(_decode_all, codes, scale, zero_point, ring, n, spec)


def _decode_all(codes: Tensor, scale: Tensor, zero_point: Tensor, spec: CodecSpec) -> Tensor:
    batch, heads, pages = codes.shape[:3]
    if not pages:
        return decode_pages(codes, scale, zero_point, spec)
    (out,) = _page_kernel(_decode, spec, codes.flatten(0, 2), scale.flatten(0, 2), zero_point.flatten(0, 2))
    return out.view(batch, heads, pages * spec.page_size, -1)


def plane_values(codes: Tensor, scale: Tensor, zero_point: Tensor, spec: CodecSpec, plane: int) -> Tensor:
    """Dequantized tokens ``[plane * T, (plane + 1) * T)`` of every page, ``[..., N, T, D]`` float32."""
    values = unpack_plane(codes, spec.bits, plane).float()
    tokens = values.shape[-2]
    if spec.per == "token":
        scale, zero_point = (p.narrow(-2, plane * tokens, tokens).float().unsqueeze(-1) for p in (scale, zero_point))
        return (values.unflatten(-1, (-1, spec.group_size)) * scale + zero_point).flatten(-2)
    first, count = plane * tokens // spec.group_size, max(1, tokens // spec.group_size)
    if (first + count) * spec.group_size < (plane + 1) * tokens:  # groups that straddle planes
        index = torch.arange(plane * tokens, (plane + 1) * tokens, device=codes.device) // spec.group_size
        return values * scale.index_select(-2, index).float() + zero_point.index_select(-2, index).float()
    scale, zero_point = (p.narrow(-2, first, count).float().unsqueeze(-2) for p in (scale, zero_point))
    return (values.unflatten(-2, (count, -1)) * scale + zero_point).flatten(-3, -2)


def _packed(n: Tensor, spec: CodecSpec) -> Tensor:
    return (n - spec.sinks - spec.residual).clamp_min(0) // spec.page_size * spec.page_size


def _slot_tokens(n: Tensor, spec: CodecSpec) -> tuple[Tensor, Tensor]:
    """Per slot of the ring: its token counted from the end of the sinks (negative for sinks), and whether it counts."""
    slots = torch.arange(spec.sinks + spec.window, device=n.device) - spec.sinks
    newest = n - 1 - spec.sinks
    tokens = torch.where(slots < 0, slots, newest - torch.remainder(newest - slots, spec.window))
    return tokens, torch.where(slots < 0, slots + spec.sinks < n, tokens >= _packed(n, spec))


def _attend(k_pages, v_pages, q, kc, ks, kz, kr, vc, vs, vz, vr, n, k_new, v_new, bias, *, k_spec, v_spec, softcap):
    """One query token of each of ``[BH, R, D]`` heads. ``k_pages`` and ``v_pages`` carry page counts as their shape,
    ``n`` the length as its value; ``bias`` is ``[BH, R or 1, n + 1]`` or None."""
    count, v_count, size = k_pages.shape[0], v_pages.shape[0], k_spec.page_size
    kc, ks, kz = (pool.narrow(1, 0, count) for pool in (kc, ks, kz))
    vc, vs, vz = (pool.narrow(1, 0, v_count) for pool in (vc, vs, vz))
    heads = range(q.shape[1])

    planes = []
    for j in range(num_planes(k_spec.bits)):
        k = plane_values(kc, ks, kz, k_spec, j)
        planes.append(torch.stack([(k * q[:, r, None, None]).sum(-1) for r in heads], 1))
    in_pages = torch.stack(planes, 3).flatten(2)  # [BH, R, N * P], tokens in order
    in_ring = (q[:, :, None] * kr[:, None].float()).sum(-1)
    present = (q * k_new.float()).sum(-1, keepdim=True)

    packed_k, packed_v = _packed(n, k_spec), _packed(n, v_spec)
    page_tokens = torch.arange(count * size, device=q.device)
    k_tokens, k_counts = _slot_tokens(n, k_spec)
    v_tokens, v_counts = _slot_tokens(n, v_spec)

    scores = torch.cat([in_pages, in_ring, present], -1)
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        token = torch.cat([page_tokens + k_spec.sinks, k_tokens + k_spec.sinks, n])
        scores = scores + bias.index_select(-1, token.clamp(0, bias.shape[-1] - 1))
    counts = torch.cat([page_tokens < packed_k, k_counts, torch.ones_like(k_counts[:1])])
    weights = torch.where(counts, scores, -torch.inf).softmax(-1)
    if bias is not None:
        weights = weights.nan_to_num(0)  # a query that may see nothing gets zeros, as in SDPA

    # values leave their window no earlier than keys, so a packed value's weight is that of a packed key
    on_pages = weights[..., : v_count * size]
    on_pages = torch.where(page_tokens[: v_count * size] < packed_v, on_pages, 0.0)
    on_pages = on_pages.unflatten(-1, (v_count, num_planes(v_spec.bits), -1))
    first_slot = count * size + k_spec.sinks
    in_window = torch.where(v_tokens < 0, v_tokens, v_tokens % k_spec.window) + first_slot
    source = torch.where((v_tokens >= 0) & (v_tokens < packed_k), v_tokens, in_window)
    on_ring = torch.where(v_counts, weights.index_select(-1, torch.where(v_counts, source, 0)), 0.0)
    out = (on_ring[..., None] * vr[:, None].float()).sum(2) + weights[..., -1:] * v_new.float()
    for j in range(num_planes(v_spec.bits)):
        v = plane_values(vc, vs, vz, v_spec, j).flatten(1, 2)
        out = out + torch.stack([(on_pages[:, r, :, j].flatten(1)[..., None] * v).sum(1) for r in heads], 1)
    return (out,)


# Per input of `_attend`: the dims whose size varies from call to call, and the size to trace each with.
_VARYING = (
    {0: _K_PAGES}, {0: _V_PAGES}, {0: _BATCH_HEADS},
    *[{0: _BATCH_HEADS, 1: _K_CAPACITY}] * 3, {0: _BATCH_HEADS},
    *[{0: _BATCH_HEADS, 1: _V_CAPACITY}] * 3, {0: _BATCH_HEADS},
    {}, {0: _BATCH_HEADS}, {0: _BATCH_HEADS}, {0: _BATCH_HEADS, 2: _TOKENS},
)  # fmt: skip


def _varying(position: int, many: bool) -> dict[int, int]:
    """Varying dims of one input; a single head of a single sample is static, being of size 1."""
    return {d: size for d, size in _VARYING[position].items() if many or d or position < 2}


def _signature(inputs) -> tuple:
    """(shape, dtype, device) of each input with every varying size replaced: equal signatures share a kernel."""
    many = inputs[2].shape[0] > 1
    return tuple(
        None
        if tensor is None
        else (
            tuple(_varying(i, many).get(d, size) for d, size in enumerate(tensor.shape)),
            tensor.dtype,
            tensor.device,
        )
        for i, tensor in enumerate(inputs)
    )


@cache
def _attend_kernel(signature: tuple, k_spec: CodecSpec, v_spec: CodecSpec, softcap: float):
    """Compile `_attend` for inputs of ``signature``."""
    examples = [s and torch.empty(s[0], dtype=s[1], device=s[2]) for s in signature]
    many = examples[2].shape[0] > 1
    dynamic = [tuple(_varying(i, many)) for i in range(len(examples))]
    return compile_ahead(partial(_attend, k_spec=k_spec, v_spec=v_spec, softcap=softcap), examples, dynamic)


def _refuses_attend(site: Site) -> str | None:
    if not site.single_query:
        return "it is written for one query token."
    key, value = map(parse, site.specs)
    if (key.page_size, key.sinks) != (value.page_size, value.sinks) or value.residual < key.residual:
        return "keys and values must share page size and sinks, and values must not leave the window before keys."
    return None


@implements("attend", "inductor", refuses=_refuses_attend)
def attend(q, key, value, n, k_new, v_new, mask, causal, scale, softcap, k_spec, v_spec) -> Tensor:
    batch, heads = k_new.shape[:2]
    queries = q.shape[1] // heads
    carriers = []
    for spec, pool in ((k_spec, key[0]), (v_spec, value[0])):
        pages = max(_MIN_PAGES, spec.pages(n))
        if pages > pool.shape[2]:
            raise KVPassError(f"{n} tokens need {pages} pages, and the pool has {pool.shape[2]}.")
        carriers.append(torch.empty(1, device=q.device).expand(pages))
    inputs = (
        *carriers,
        (q.float() * scale).reshape(batch * heads, queries, -1).contiguous(),
        *(tensor.flatten(0, 1).contiguous() for tensor in (*key, *value)),
        torch.tensor([n], device=q.device),
        k_new.flatten(0, 1).contiguous(),
        v_new.flatten(0, 1).contiguous(),
        None if mask is None else _bias(mask, heads, queries, batch),
    )
    (out,) = _attend_kernel(_signature(inputs), k_spec, v_spec, softcap)(*inputs)
    return out.view(batch, heads * queries, 1, -1).to(q.dtype)


def _bias(mask: Tensor, heads: int, queries: int, batch: int) -> Tensor:
    """A bool or additive mask ``[B or 1, H_q or 1, 1, T]`` as float32 ``[B * H_kv, R or 1, T]``."""
    bias = mask[:, :, 0]
    if mask.dtype == torch.bool:
        bias = torch.zeros(bias.shape, device=mask.device).masked_fill_(~bias, -torch.inf)
    rows = queries if bias.shape[1] == heads * queries else 1
    return bias.float().expand(batch, heads * rows, -1).reshape(batch * heads, rows, -1).contiguous()

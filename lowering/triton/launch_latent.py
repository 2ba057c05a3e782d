"""Launches attention over a packed latent (MLA), and decides which calls it supports.

"auto" does not choose it: no GPU has run it.
"""

import torch
from torch import Tensor

from kvpass.codec.bitpack import num_planes
from kvpass.codec.spec import parse
from kvpass.codec.tensors import Pack
from kvpass.layout.window import on_device

from ..call_types import AttendCall
from ..reference import with_past
from ..table import LATENT, DispatchKey, implements, refuses_extras
from .attend import merge_splits
from .attend_latent import attend_latent
from .configs import INTERPRETED, WIDTHS, AttendConfig, cdiv, power_of_two, refuses_device, splits_of
from .kernel_arguments import MERGED_AT_ONCE, check_values, mask_and_strides, rules_of
from .launch import Side, layout_of, returned_lse

_WIDEST = 640  # channels of a latent and its rotary part
_CONFIG = AttendConfig(queries=16, rows=16, together=1, exact=16, warps=8)


def _refuses(dispatch: DispatchKey) -> str | None:
    if reason := refuses_device(dispatch):
        return reason
    if not dispatch.specs:
        return "the past is already dequantized."
    if LATENT not in dispatch.extras:
        return "it attends to a latent."
    if why := refuses_extras(dispatch, "attention mass", "RoPE"):
        return why
    if dispatch.dtype is None:
        return "the dtypes of queries and cache differ."
    if dispatch.dtype == torch.float32 and not INTERPRETED:
        return "a tile of a float32 latent does not fit into registers."
    if dispatch.head_dim > _WIDEST:
        return f"a latent and its rotary part must have at most {_WIDEST} channels, not {dispatch.head_dim}."
    latent, rotary = (parse(text).retention for text in dispatch.specs)
    if (latent.page_size, latent.sinks) != (rotary.page_size, rotary.sinks) or not power_of_two(latent.page_size):
        return "the latent and its rotary part must share sinks and a page_size that is a power of two."
    if rotary.window < latent.window:
        return "the rotary part must not leave the residual window before its latent."
    return None


_READ = WIDTHS | {"per=channel", "per=token"}


@implements("attend", "triton-latent", has=(_READ, _READ), refuses=_refuses, by_name_only=True, lowering="triton")
def attend(call: AttendCall[Pack]) -> list[Tensor]:
    call = with_past(call)
    q, n, (batch, heads, queries, channels), groups = call.q.contiguous(), call.n, call.q.shape, call.k_new.shape[1]
    check_values(n + queries, channels, f"{channels} channels")
    rows, new = heads // groups * queries, [x.contiguous() for x in (call.k_new, call.v_new)]
    sides = [Side.of(pack, n, spec).tensors for pack, spec in zip((call.key, call.value), call.specs, strict=True)]
    planes = max(num_planes(spec.bits) for spec in call.specs)
    L, R = (layout_of(spec, planes, x.shape[3]) for spec, x in zip(call.specs, new, strict=True))
    mask, of_mask = mask_and_strides(call.mask)
    rules = rules_of(call, mask, _CONFIG.queries)
    tiles = cdiv(rows, _CONFIG.queries)
    packed = call.v_spec.retention.packed(n) // planes
    splits = splits_of(packed, _CONFIG, batch * groups * tiles, q.device) + 1
    partial = q.new_empty((batch * groups, splits, rows, L.dim), dtype=torch.float32)
    partial_lse, out = partial.new_empty(partial.shape[:3]), q.new_empty((batch, heads, queries, L.dim))
    lse = partial.new_empty(q.shape[:3]) if call.with_lse else None
    strides = [tensor.stride(1) for side in sides for tensor in side[:2]]
    with torch.cuda.device_of(q):
        attend_latent[batch * groups, splits, tiles](
            q, *sides[0], *sides[1], *new, mask, call.starts, partial, partial_lse, on_device(call.length, n, q.device),
            queries, call.k_new.shape[2], call.scale, *strides, *of_mask, rules, L, R, _CONFIG.rows, _CONFIG.exact,
            _CONFIG.stages, num_warps=_CONFIG.warps, enable_fp_fusion=True,
        )  # fmt: skip
        merge_splits[batch * heads * queries,](
            partial, partial_lse, call.sinks, out, lse, rows, splits, queries, heads, L.dim, MERGED_AT_ONCE,
            enable_fp_fusion=True,
        )  # fmt: skip
    return [out] if lse is None else [out, returned_lse(lse)]

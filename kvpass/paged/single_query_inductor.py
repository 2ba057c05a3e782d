"""Attention over a server's blocks for requests with one token each, as one Inductor kernel.

Pages are looked up in the block table as they are read, and never copied. Queries are multiplied with quantized values
as in `lowering.inductor.attention_graph`. The units of parallel work are a few pages each, whichever request they
belong to, so that all threads share a long context and a short one is not padded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..codec.bitpack import num_planes, unpack_plane_unshifted
from ..codec.codebook import grid
from ..codec.hadamard import basis
from ..codec.quantizer import Quantizer
from ..codec.spec import CodecSpec, parse
from ..lowering.inductor.aot import Input, Kernel, Program
from ..lowering.inductor.attend import OPTIONS
from ..lowering.inductor.attention_graph import KeyTransform, plane_scores
from ..lowering.inductor.page_view import Pages, page_values, plain
from ..lowering.inductor.pages import WIDTHS, one_level
from ..lowering.table import DispatchKey
from .batch import Batch, Rows, Tiles, at_least_two

if TYPE_CHECKING:
    from .paged_attention import Layer

UNIT = 4
"""Pages per unit."""
_SERVED = WIDTHS | {"per=channel", "per=token", "keep=recent", "rotation", "grid", "center", "codec=second-level"}
_SERVED |= {"codec=", "evict=attention", "fit=minmax", "predictor="}
_BLOCKS, _WINDOWS, _ROWS, _UNITS, _MOST, _TOKENS = 61, 67, 5, 53, 11, 71  # example sizes to trace with, all different


HAS = _SERVED, _SERVED
"""Features of keys, and of values, that are supported."""


def refuses(dispatch: DispatchKey) -> str | None:
    """Why there is no kernel for ``dispatch``, whose features are supported, or None."""
    if dispatch.device != "cpu":
        return "it runs on CPUs."
    key, value = map(parse, dispatch.specs)
    if key.quantizer.raw or value.quantizer.raw:
        return "keys and values are not quantized."
    if value.retention.residual < key.retention.residual:
        return "values must not leave the residual window before their keys."
    return None


def _gathered(pools: Sequence[Tensor], block: Tensor, slot: Tensor, spec: CodecSpec) -> list[Tensor]:
    """Pages ``[A, C]`` of pools, as ``[A * H, C, ...]`` each, with scales as numbers."""
    return one_level([pool[block, :, slot].transpose(1, 2).flatten(0, 1) for pool in pools], spec)


def _scores_by_channel(q: Tensor, pools: Sequence[Tensor], quantizer: Quantizer) -> Tensor:
    """`plane_scores` for pages with a scale per channel, page by page: scales are multiplied into the queries, so that
    each quantized value is multiplied once."""
    codes, scale, zero_point = pools
    repeats = range(q.shape[1])
    scaled_q = torch.stack([q[:, r, None] * scale[:, :, 0].float() for r in repeats], 1)  # computed once
    zeros = [(q[:, r, None] * zero_point[:, :, 0].float()).sum(-1) for r in repeats]
    planes = [unpack_plane_unshifted(codes, quantizer.bits, j) for j in range(num_planes(quantizer.bits))]
    planes = [(plane.float(), unit) for plane, unit in planes]
    found = [
        (plane * scaled_q[:, r, :, None]).sum(-1) * unit + zeros[r].unsqueeze(-1)
        for r in repeats
        for plane, unit in planes
    ]
    return torch.cat(found, -1)


def _attend(given: dict[str, Any], scale: float, softcap: float, key: CodecSpec, value: CodecSpec) -> tuple[Tensor]:
    """Attention of the queries ``[B, H_q, D]`` of `Rows`: ``[B, H_q, D]`` float32."""
    window, rows = given["window"], Rows(*(given[name] for name in Rows._fields))
    heads, dim = window.shape[1], window.shape[3] // 2
    size, sinks = key.page_size, key.retention.sinks
    q = (given["q"].index_select(0, rows.row).float() * scale).unflatten(1, (heads, -1))  # [B, H, R, D]
    repeats, device = q.shape[2], q.device
    rotated_q = q if given["key_basis"] is None else q @ given["key_basis"]

    def on_pages(of_rows: Tensor, block: Tensor, slot: Tensor) -> Tensor:
        """``[A, H, C, R, P]``, of queries ``[A, H, R, D]`` with pages ``[A, C]``: in the order of their planes."""
        pools, count = _gathered(given["key_pools"], block, slot, key), block.shape[1]
        tokens = torch.arange(count * size, device=device).view(count, size)
        spec = key.plain.quantizer
        if spec.per == "channel" and not spec.grid and pools[1].shape[-2] == 1:
            by_page = _scores_by_channel(of_rows.flatten(0, 1), pools, spec)
        else:
            planes = plain(pools, spec, given["key_points"])
            by_head = plane_scores(of_rows.flatten(0, 1), planes, tokens, KeyTransform())
            by_page = torch.cat([scores for of_head in by_head for scores in of_head], -1)
        return by_page.view(-1, heads, count, repeats, size)

    def masked(scores: Tensor, valid: Tensor) -> Tensor:
        scores = torch.tanh(scores / softcap) * softcap if softcap else scores
        return torch.where(valid, scores, -torch.inf)

    unit = on_pages(rotated_q.index_select(0, rows.owner), rows.block, rows.slot)
    half = on_pages(rotated_q, rows.half_block, rows.half_slot).transpose(2, 3).flatten(3)
    if key.transform.center:
        mean = (q * given["key_center"].index_select(0, rows.first).float()).sum(-1, keepdim=True)
        unit, half = unit + mean.index_select(0, rows.owner).unsqueeze(2), half + mean
    unit = masked(unit, (torch.arange(UNIT, device=device) < rows.pages[:, None])[:, None, :, None, None])
    exact = window[rows.tail_block, :, rows.tail_place].permute(1, 2, 0, 3).float()  # [B, H, E, 2 * D]
    tail = torch.stack([(exact[..., :dim] * q[:, :, r, None]).sum(-1) for r in range(repeats)], 2)
    index = torch.arange(tail.shape[-1], device=device)
    if half.shape[-1] < tail.shape[-1]:
        half = torch.nn.functional.pad(half, (0, tail.shape[-1] - half.shape[-1]))
    packed = index < rows.half[:, None] * size
    tail = torch.where(packed[:, None, None], half[..., : tail.shape[-1]], tail)
    tail = masked(tail, (index < rows.tail[:, None])[:, None, None])
    parts, values = [tail], [exact[..., dim:]]
    if sinks:
        k, v = (given[f"{side}_sinks"].index_select(0, rows.first).float() for side in ("key", "value"))
        valid = torch.arange(sinks, device=device) < rows.length[:, None]
        on_sinks = torch.stack([(k * q[:, :, r, None]).sum(-1) for r in range(repeats)], 2)
        parts.append(masked(on_sinks, valid[:, None, None]))
        values.append(torch.where(valid[:, None, :, None], v, 0.0))
    of_unit = unit.amax((2, 4))
    valid_units = (torch.arange(rows.units.shape[0], device=device)[:, None] < rows.counts)[:, :, None, None]
    peak = torch.where(valid_units, of_unit[rows.units], -torch.inf).amax(0)
    for part in parts:
        peak = torch.maximum(peak, part.amax(-1))
    weights = (unit - peak.index_select(0, rows.owner)[:, :, None, :, None]).exp()
    pools = _gathered(given["value_pools"], rows.block, rows.slot, value)
    if not value.quantizer.grid:
        pools[1:] = torch.stack([one.float() for one in pools[1:]]).unbind()  # once, not for each run of channels
    by_page = weights.flatten(0, 1).transpose(1, 2)  # [M * H, R, G, P]
    codes = plain(pools, value.plain.quantizer, given["value_points"])
    packed_values = page_values(by_page, Pages([codes]), None).unflatten(0, (-1, heads))
    total = torch.where(valid_units, weights.sum((2, 4))[rows.units], 0.0).sum(0)
    out = torch.where(valid_units.unsqueeze(-1), packed_values[rows.units], 0.0).sum(0)
    if given["value_basis"] is not None:
        out = out @ given["value_basis"].mT
    if value.transform.center:
        mean = given["value_center"].index_select(0, rows.first).float()
        out = out + total.unsqueeze(-1) * mean
    for part, v in zip(parts, values, strict=True):
        weights = (part - peak.unsqueeze(-1)).exp()
        total = total + weights.sum(-1)
        out = out + (weights.unsqueeze(-1) * v.unsqueeze(2)).sum(3)
    return ((out / total.unsqueeze(-1)).flatten(1, 2),)


def _described(q: Tensor, rows: Rows, named: dict[str, Tensor | None]) -> tuple[Any, ...]:
    """Name, shape, strides, dtype, device and varying dims of every argument of `_attend`, with sizes to trace with;
    None for absent ones."""

    def like(tensor: Tensor | None, *sizes: int | None) -> tuple[Any, ...] | None:
        """``sizes`` replace the first, varying dims; None keeps a fixed one."""
        if tensor is None:
            return None
        shape = *(size or own for size, own in zip(sizes, tensor.shape, strict=False)), *tensor.shape[len(sizes) :]
        stride = tensor.stride() if sizes[:1] in ((_BLOCKS,), (_WINDOWS,)) else None
        return shape, stride, tensor.dtype, tensor.device, tuple(d for d, size in enumerate(sizes) if size)

    varying: dict[str, tuple[int | None, ...]] = dict.fromkeys(("block", "slot", "owner", "pages"), (_UNITS,)) | {
        "units": (_MOST, _ROWS)
    }
    varying |= dict.fromkeys(("tail_block", "tail_place"), (None, _ROWS))
    found = [("q", like(q, _TOKENS))]
    found += [(name, like(tensor, *varying.get(name, (_ROWS,)))) for name, tensor in rows._asdict().items()]
    for name, tensor in named.items():
        fixed, windows = name.endswith(("points", "basis")), name == "window"
        found.append((name, like(tensor, *(() if fixed else (_WINDOWS if windows else _BLOCKS,)))))
    return tuple(found)


def _input(name: str, described: tuple[Any, ...] | None) -> Input:
    if described is None:
        return Input(name, None)
    shape, stride, dtype, device, dynamic = described
    if stride is None:
        stride = torch.empty(shape, device="meta").stride()
    return Input(name, torch.empty_strided(shape, stride, dtype=dtype, device=device), dynamic)


@Kernel
def blocks_kernel(
    described: tuple[Any, ...], scale: float, softcap: float, key: CodecSpec, value: CodecSpec
) -> Program:
    """`_attend` compiled for what `_described` returns; the kernel takes arguments by name."""
    names = [name for name, _ in described]
    pools = {side: sum(name.startswith(f"{side}_pool_") for name in names) for side in ("key", "value")}

    def attend(*tensors: Tensor) -> tuple[Tensor]:
        given: dict[str, Any] = dict(zip(names, tensors, strict=True))
        for side, count in pools.items():
            given[f"{side}_pools"] = [given[f"{side}_pool_{i}"] for i in range(count)]
        return _attend(given, scale, softcap, key, value)

    return Program(attend, [_input(*one) for one in described], OPTIONS, by_name=True)


class SingleQueryAttention:
    """Attention over the blocks of one layer; what all steps share is looked up once."""

    def __init__(self, layer: Layer) -> None:
        head_dim, device = layer.window.shape[-1] // 2, layer.window.device
        self._named: dict[str, Tensor | None] = {"window": layer.window}
        for side, spec, pools, _ in layer.sides:
            rotation, points = spec.transform.rotation, spec.quantizer.grid
            self._named |= {f"{side}_pool_{i}": pool for i, pool in enumerate(pools)}
            self._named |= {f"{side}_{name}": layer.blocks.head.get(f"{side}.{name}") for name in ("sinks", "center")}
            self._named[f"{side}_points"] = grid(points, device) if points else None
            self._named[f"{side}_basis"] = None if rotation is None else basis(head_dim, rotation, device)
        self._retentions = layer.key.retention, layer.value.retention
        self._how = layer.scale, layer.softcap, layer.key.stored_as, layer.value.stored_as
        self._kernels: dict[tuple[torch.dtype, int], Callable[..., tuple[Tensor]]] = {}

    def __call__(self, q: Tensor, batch: Batch, tiles: Tiles) -> Tensor:
        """Attention of ``tiles`` of one token each, among ``q`` ``[T, H_q, D]``: ``[N, H_q, D]`` float32."""
        rows = batch.rows(tiles, *self._retentions, UNIT)
        q = at_least_two(q).contiguous()
        kind = q.dtype, q.shape[1]
        if kind not in self._kernels:
            self._kernels[kind] = blocks_kernel(_described(q, rows, self._named), *self._how)
        (out,) = self._kernels[kind]({"q": q, **self._named, **rows._asdict()})
        return out[: len(tiles.owner)]

"""Launches the attention kernels, and decides which calls they support."""

from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from kvpass.codec.bitpack import num_planes
from kvpass.codec.boost import Boosted, boosted
from kvpass.codec.codebook import grid
from kvpass.codec.hadamard import basis
from kvpass.codec.rope import parse_rope
from kvpass.codec.second_level import SecondLevel
from kvpass.codec.spec import CodecSpec, parse
from kvpass.codec.tensors import Pack
from kvpass.codec.token_ranks import Ranked
from kvpass.errors import KVPassError
from kvpass.layout.pool import whole
from kvpass.layout.window import on_device

from ..append import PER_CHANNEL_BITS
from ..call_types import AttendCall, parse_statistic
from ..fit_sequence import not_padding
from ..reference import with_past, with_starts
from ..table import FEW, LATENT, UNEQUAL, DispatchKey, implements, refuses_extras
from .allocated import attend_allocated, refuses_fields
from .attend import attend_split, merge_splits
from .attention_mass import sum_attention
from .configs import (
    GRID_ROWS,
    INTERPRETED,
    MASS_WARPS,
    WIDTHS,
    cdiv,
    power_of_two,
    refuses_device,
    splits_of,
)
from .kernel_arguments import MERGED_AT_ONCE, check_values, mask_and_strides, rules_of
from .tuned import Case, configured
from .unpacking import Layout

_VALUES = WIDTHS | PER_CHANNEL_BITS | {"per=channel", "per=token", "rotation", "grid", "codec=second-level"}
_ATTENDED = _VALUES | {"pre_rope", "center", "page_rope", "numbered", "codec=boosted"}, _VALUES
_PRODUCT = 16  # minimum rows and columns of a product


def _refuses(dispatch: DispatchKey) -> str | None:
    if dispatch.specs and not dispatch.queries:
        return f"it supports 1 to {FEW} query tokens."
    return _refuses_any(dispatch)


def _refuses_prompts(dispatch: DispatchKey) -> str | None:
    if dispatch.queries:
        return f"it attends with more than {FEW} query tokens."
    if any(isinstance(parse(text).codec, Ranked) for text in dispatch.specs):
        return "each page would store many queries as it sees them, which takes more memory than to dequantize it."
    return _refuses_any(dispatch)


def _refuses_any(dispatch: DispatchKey) -> str | None:
    """Why no number of query tokens can be served, or None."""
    if reason := refuses_device(dispatch):
        return reason
    if not dispatch.specs:
        return "the past is already dequantized."
    if why := refuses_extras(dispatch, UNEQUAL, LATENT):
        return why
    specs = [parse(text) for text in dispatch.specs]
    if why := refuses_pages(specs, dispatch.head_dim):
        return why
    if any(isinstance(spec.codec, Ranked) for spec in specs):
        return refuses_fields(specs)
    if specs[0].transform.page_rope:
        return "keys with page-relative RoPE and one bit width for all channels have to be dequantized first."
    return None


def refuses_pages(specs: list[CodecSpec], head_dim: int) -> str | None:
    """Why the kernels cannot read pages of keys and values with supported features, or None."""
    if not 16 <= head_dim <= 256:
        return f"head_dim must be from 16 to 256, not {head_dim}."
    key, _ = specs
    of_keys, (k_retention, v_retention) = key.transform, (spec.retention for spec in specs)
    if of_keys.pre_rope and (of_keys.rotation is not None or key.quantizer.grid):
        return "keys on grids, or rotated by a Hadamard matrix, before rotary embedding have to be dequantized first."
    if any(spec.quantizer.dim > 2 for spec in specs):
        return "grids must have at most 2 dimensions."
    if any(spec.quantizer.dim > 1 for spec in specs) and head_dim < GRID_ROWS:
        return f"grids of 2 dimensions need a head_dim of at least {GRID_ROWS}, not {head_dim}."
    if (k_retention.page_size, k_retention.sinks) != (v_retention.page_size, v_retention.sinks):
        return "keys and values must share page_size and sinks."
    if not power_of_two(key.page_size):
        return f"page_size must be a power of two, not {key.page_size}."
    if v_retention.window < k_retention.window:
        return "values must not leave the residual window before their keys."
    if isinstance(key.codec, Boosted) and key.page_size // max(num_planes(spec.bits) for spec in specs) < _PRODUCT:
        return f"boosted channels need {_PRODUCT} tokens per page for each bit plane, not {key.page_size} in all."
    return None


def layout_of(spec: CodecSpec, planes: int, head_dim: int, rope: str = "") -> Layout:
    """The layout of pages with ``planes`` tokens per row."""
    codes, retention = spec.quantizer, spec.retention
    return Layout(
        codes.bits, codes.dim, codes.per == "channel", codes.group_size, retention.page_size, planes, retention.sinks,
        retention.residual, retention.ring_size, head_dim, *(parse_rope(rope) if rope else (0, False)),
        isinstance(spec.codec, SecondLevel), boosted(spec, head_dim) if isinstance(spec.codec, Boosted) else 0,
    )  # fmt: skip


@cache
def case_of(
    specs: tuple[CodecSpec, CodecSpec], rope: str, head_dim: int, rows: int, dtype: torch.dtype, masked: bool
) -> Case:
    """The `Case` that selects the configuration of a launch with ``rows`` query rows per KV head."""
    planes = max(num_planes(spec.bits) for spec in specs)
    codebook = any(spec.quantizer.grid or spec.quantizer.codec for spec in specs)  # similar register use
    channelwise = specs[0].quantizer.per == "channel"
    return Case(planes, head_dim, dtype.itemsize, rows, codebook, bool(rope), masked, channelwise)


@cache
def layouts_of(specs: tuple[CodecSpec, CodecSpec], rope: str, head_dim: int) -> tuple[Layout, Layout]:
    """The layouts of pages of keys and of values."""
    planes = max(num_planes(spec.bits) for spec in specs)
    return layout_of(specs[0], planes, head_dim, rope), layout_of(specs[1], planes, head_dim)


def points_of(spec: CodecSpec, device: torch.device) -> Tensor | None:
    """The points of the grid of ``spec``; None if its codes are uniform."""
    return grid(spec.quantizer.grid, device) if spec.quantizer.grid else None


class Side(NamedTuple):
    """Keys or values of a call, as kernels take them.

    tensors: codes, scales and zero points of pages, each ``[B, H_kv, pages, ...]``, and the ring.
    boosted: the lower codes and channel indices of boosted channels (`kvpass.codec.boost`); empty without them.
    """

    tensors: tuple[Tensor, ...]
    boosted: tuple[Tensor, ...]

    @classmethod
    def of(cls, pack: Pack, n: int, spec: CodecSpec) -> "Side":
        pools = [whole(pool, spec.retention.pages(n)) for pool in pack.pools]
        return cls((*pools[:3], pack.ring), tuple(pools[3:]))


@dataclass
class _Launch:
    """Prepares ``call`` for the two kernels that compute scores. ``call.length`` and ``call.n`` have to agree."""

    call: AttendCall[Pack]

    def __post_init__(self):
        call = self.call
        self.q, self.k_new, rope, mask = call.q.contiguous(), call.k_new.contiguous(), "", call.mask
        self.length, self.specs, self.rotary = on_device(call.length, call.n, call.q.device), call.specs, None
        if call.rotary is not None:
            cos, sin, rope = call.rotary
            self.rotary = tuple(table.contiguous().expand(len(self.q), -1, -1) for table in (cos, sin))
        self.batch, self.heads, self.queries, self.head_dim = self.q.shape
        self.groups = self.k_new.shape[1]
        self.rows = self.heads // self.groups * self.queries
        check_values(call.n + self.queries, self.head_dim, f"{self.head_dim} channels")
        self.mask, self.mask_strides = mask_and_strides(mask)
        masked = mask is not None or call.starts is not None
        case = case_of(self.specs, rope, self.head_dim, self.rows, self.q.dtype, masked)
        self.config = configured(case, self.q.device)
        if isinstance(self.specs[0].codec, Boosted):  # rows of a tile must be of one page
            of_page = self.specs[0].page_size // case.planes
            self.config = replace(self.config, rows=min(self.config.rows, of_page))
        self.key, self.value = (Side.of(pack, call.n, spec) for pack, spec in zip(call[1:3], self.specs, strict=True))
        self.boosted = self.key.boosted or (None, None)
        self.layouts = layouts_of(self.specs, rope, self.head_dim)
        self.rules = rules_of(call, self.mask, self.config.queries)
        self.planes = self.layouts[0].planes
        # rows of packed pages of keys and of values (see `unpacking`)
        self.packed_rows = tuple(spec.retention.packed(call.n) // self.planes for spec in self.specs)

    @cached_property
    def packed_queries(self) -> Tensor:
        """The queries for keys in pages: they are rotated instead of the keys."""
        rotation = self.specs[0].transform.rotation
        if rotation is None:
            return self.q
        return (self.q.float() @ basis(self.head_dim, rotation, self.q.device)).to(self.q.dtype)

    @cached_property
    def shift(self) -> Tensor | None:
        """The products of queries with the mean of the keys; None if the mean has to be rotated with the keys."""
        center = self.call.key.fitted.get("center")
        if center is None or self.rotary is not None:
            return None
        rows = self.q.float().view(self.batch, self.groups, -1, self.head_dim)
        return (rows * center.float()).sum(-1)

    @property
    def rotary_tables(self) -> tuple[Tensor | None, ...]:
        """Rotary tables, and the mean that is rotated with the keys."""
        if self.rotary is None:
            return None, None, None
        center = self.call.key.fitted.get("center")
        return *self.rotary, None if center is None else center.contiguous()

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of the rotary tables and of the mask."""
        tables = (0, 0) if self.rotary is None else self.rotary[0].stride()[:2]
        return *tables, *self.mask_strides

    def attend(self, lse: Tensor | None) -> Tensor:
        """The output ``[B, H_q, S, D]``. Writes the log-sum-exp of each query row to ``lse`` ``[B, H_q, S]``
        float32."""
        q, call, config, device = self.q, self.call, self.config, self.q.device
        key, value = self.key.tensors, self.value.tensors
        tiles = cdiv(self.rows, config.queries)
        splits = splits_of(self.packed_rows[1], config, self.batch * self.groups * tiles, device) + 1
        partial = q.new_empty((self.batch * self.groups, splits, self.rows, self.head_dim), dtype=torch.float32)
        partial_lse, out, (K, V) = partial.new_empty(partial.shape[:3]), torch.empty_like(q), self.layouts
        with torch.cuda.device_of(q):
            attend_split[self.batch * self.groups, splits, tiles](
                q, *key, *value, self.k_new, call.v_new.contiguous(), self.packed_queries, self.shift,
                *(points_of(spec, device) for spec in self.specs), *self.boosted, *self.rotary_tables, self.mask,
                call.starts, partial, partial_lse, self.length, self.queries, call.k_new.shape[2], call.scale,
                key[0].stride(1), key[1].stride(1), value[0].stride(1), value[1].stride(1), *self.strides, self.rules,
                K, V, config.rows, config.together, config.exact, config.stages, num_warps=config.warps,
                maxnreg=config.registers, enable_fp_fusion=True,
            )  # fmt: skip
            if (rotation := self.specs[1].transform.rotation) is not None:
                partial[:, :-1] = partial[:, :-1] @ basis(self.head_dim, rotation, device).mT
            merge_splits[self.batch * self.heads * self.queries,](
                partial, partial_lse, call.sinks, out, lse, self.rows, splits, self.queries, self.heads, self.head_dim,
                MERGED_AT_ONCE, enable_fp_fusion=True,
            )  # fmt: skip
        return out

    def attention_mass(self, lse: Tensor) -> Tensor:
        """The attention mass of each token, ``[B, H_kv, n + S]`` float32, given the log-sum-exp ``lse`` of query
        rows."""
        largest = parse_statistic(self.call.statistic)[0] == "max"
        config, K, stop, key = self.config, self.layouts[0], self.call.n + self.queries, self.key.tensors
        k_rows, _ = self.packed_rows
        mass = lse.new_empty((self.batch, self.groups, stop))
        tiles = cdiv(k_rows, config.rows) + cdiv(stop - k_rows * self.planes, config.exact)
        with torch.cuda.device_of(self.q):
            sum_attention[tiles * self.batch * self.groups,](
                self.q, *key, self.k_new, self.packed_queries, self.shift, points_of(self.specs[0], self.q.device),
                *self.boosted,
                *self.rotary_tables, self.mask, lse, mass, self.call.n, self.queries, self.call.scale, k_rows, tiles,
                key[0].stride(1), key[1].stride(1), *self.strides, largest, self.rules, K, config.rows, config.exact,
                num_warps=MASS_WARPS, maxnreg=config.registers, enable_fp_fusion=True,
            )  # fmt: skip
        return mass


def _count(lse: Tensor, mask: Tensor | None, statistic: str) -> None:
    """Set the log-sum-exp ``lse`` ``[B, H_q, S]`` to infinity for query rows that ``statistic`` excludes."""
    batch, _, queries = lse.shape
    if mask is not None:
        lse.masked_fill_(~not_padding(mask, batch, queries)[:, None], torch.inf)
    _, last = parse_statistic(statistic)
    lse[..., : max(0, queries - (last or queries))] = torch.inf


def returned_lse(lse: Tensor) -> Tensor:
    """The log-sum-exp of `merge_splits` as ``kvpass::attend`` returns it: -inf for a query that sees no token, and the
    lowest finite number for one whose tokens all have that as their bias."""
    lowest = lse < -2e38  # kernels do not convert such scores to units of log2
    return lse.masked_fill(lse == torch.inf, -torch.inf).masked_fill(lowest, torch.finfo(lse.dtype).min)


@implements("attend", "triton-prompt", has=_ATTENDED, refuses=_refuses_prompts, by_name_only=True, lowering="triton")
@implements("attend", "triton", has=_ATTENDED, refuses=_refuses, by_name_only=INTERPRETED)
def attend(call: AttendCall[Pack]) -> list[Tensor]:
    call = with_past(call)
    if isinstance(call.k_spec.codec, Ranked):
        if call.statistic:  # no spec with per-channel bit widths needs it
            raise KVPassError(
                "The Triton kernels return no attention mass for per-channel bit widths: use lowering='reference'."
            )
        return attend_allocated(with_starts(call))
    launch = _Launch(call)
    if not call.statistic and not call.with_lse:
        return [launch.attend(None)]
    lse = call.q.new_empty(call.q.shape[:3], dtype=torch.float32)
    found = [launch.attend(lse)]
    returned = returned_lse(lse) if call.with_lse else None
    if call.statistic:
        _count(lse, call.mask, call.statistic)
        found.append(launch.attention_mass(lse))
    return found if returned is None else [*found, returned]

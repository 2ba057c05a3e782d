"""Storage of tokens with per-token bit widths (`kvpass.codec.adaptive`): written between forwards, read during them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..codec.adaptive import (
    Tokens,
    allowed_deviation,
    assign_cells,
    fit_range,
    from_planes,
    level_bits,
    levels_for,
    pack_levels,
    plane_bits,
    split_outliers,
    to_planes,
    unpack_levels,
    where_dtype,
)
from ..codec.affine import check_finite, params_dtype
from ..codec.spec import CodecSpec
from ..codec.tensors import of_state
from .state import GROWTH, KVState, attribute, grown

_TABLES = ("_codes", "scale", "zero_point", "outliers", "where")


class PlanePool:
    """The bit planes of all adaptive states of a cache, except the first plane of each, concatenated in one tensor.

    Plane sizes depend on the data and differ between states, so a graph takes this one byte tensor instead of the
    planes.
    """

    def __init__(self) -> None:
        self.states: list[AdaptiveState] = []
        self.data = torch.empty(0, dtype=torch.uint8)
        self.stale = False  # planes were replaced since the last `refresh`

    def add(self, state: AdaptiveState) -> None:
        """Register ``state``. The next `refresh` copies its planes into the pool."""
        self.states.append(state)
        self.stale = True

    @torch.inference_mode(False)
    def refresh(self) -> None:
        """Concatenate the planes of all states and turn them into views of the result. Does nothing unless a plane is
        new."""
        if not self.stale:
            return
        planes = [plane for state in self.states for plane in state.planes]
        spare = torch.zeros(64, dtype=torch.uint8, device=self.states[0].ring.device)  # never empty
        data, start = torch.cat([*(plane.reshape(-1) for plane in planes), spare]), 0
        torch._dynamo.mark_dynamic(data, 0)
        self.data = data
        for state in self.states:
            for i, plane in enumerate(state.planes):
                state.places[i] = torch.tensor([start, plane.shape[2], plane.shape[3]])
                state.planes[i] = data[start : start + plane.numel()].view(plane.shape)
                start += plane.numel()
        self.stale = False  # last, so that an interrupted refresh is repeated

    def __getstate__(self) -> dict[str, Any]:
        return {"states": self.states, "data": torch.empty(0, dtype=torch.uint8), "stale": bool(self.states)}


class HostTokens:
    """Full-precision tokens in host memory, ``[B, H_kv, capacity, D]``, and the number of bytes fetched from there so
    far."""

    def __init__(self, tokens: Tensor, moved_nbytes: int = 0):
        self.tokens, self.moved_nbytes = tokens, moved_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes held on the host."""
        return self.tokens.nbytes

    def replaced(self, tokens: Tensor) -> HostTokens:
        """A new object with ``tokens`` and the same count of fetched bytes."""
        torch._dynamo.mark_dynamic(tokens, 2)
        return HostTokens(tokens, self.moved_nbytes)


class AdaptiveState(KVState):
    """A `KVState` in which each token has its own bit width.

    codes: ``[B, H_kv, capacity, D * b / 8]`` uint8, the first bit plane. The other planes are ``planes``, in a
        `PlanePool`.
    scale, zero_point: ``[B, H_kv, capacity, 1]``: the step of the widest class, and the minimum.
    levels: ``[B, H_kv, capacity / P, P * b / 8]`` uint8, with b of `level_bits`; outliers, where: ``[B, 1, capacity,
        k]``: see `Tokens`.
    energy: ``[B, H_kv, 1, 1]`` float32, measured on the prompt's queries, for keys; absent if it was measured before.
    host: the original tokens, or the tokens that wait for their bit width.
    """

    levels: Tensor
    outliers: Tensor
    where: Tensor

    def __init__(self, spec: CodecSpec, ring: Tensor, pool: PlanePool):
        batch, heads, _, head_dim = ring.shape
        adaptive, params, device = spec.quantizer.adaptive, params_dtype(ring.dtype), ring.device
        first, *others = plane_bits(adaptive.widths)
        count = round(adaptive.outliers * heads * head_dim)

        def empty(*shape, dtype, device=device):
            return torch.zeros(*shape, dtype=dtype, device=device)

        kept = {
            "codes": empty(batch, heads, 0, head_dim * first // 8, dtype=torch.uint8),
            "scale": empty(batch, heads, 0, 1, dtype=params),
            "zero_point": empty(batch, heads, 0, 1, dtype=params),
            "levels": empty(batch, heads, 0, self._level_bytes(spec), dtype=torch.uint8),
            "outliers": empty(batch, 1, 0, count, dtype=ring.dtype),
            "where": empty(batch, 1, 0, count, dtype=where_dtype(heads * head_dim)),
            "ring": ring,
        }
        if adaptive.fits_energy:
            kept["energy"] = empty(batch, heads, 1, 1, dtype=torch.float32)
        self.pool, self.count = pool, 0
        self.planes = [empty(batch, heads, 0, head_dim * bits // 8, dtype=torch.uint8) for bits in others]
        self.places = torch.zeros(len(others), 3, dtype=torch.int64)
        self.host = HostTokens(empty(batch, heads, 0, head_dim, dtype=ring.dtype, device="cpu"))
        super().__init__(spec, kept)
        pool.add(self)

    @staticmethod
    def _level_bytes(spec: CodecSpec) -> int:
        """Bytes that the classes of one page take."""
        return spec.page_size * level_bits(len(spec.quantizer.adaptive.widths), spec.page_size) // 8

    @classmethod
    @torch.inference_mode(False)
    def allocate_in(
        cls, pool: PlanePool, spec: CodecSpec, batch: int, heads: int, head_dim: int, dtype: torch.dtype,
        device: torch.device, tokens: int,
    ) -> AdaptiveState:  # fmt: skip
        """An empty state with room for ``tokens`` tokens. Raises `KVPassError` if the spec does not fit the head."""
        spec.check(head_dim)
        slots = spec.retention.sinks + spec.retention.ring_size
        state = cls(spec, torch.zeros(batch, heads, slots, head_dim, dtype=dtype, device=device), pool)
        state.reserve(tokens)
        return state

    @property
    def pooled_planes(self) -> Sequence[Tensor]:
        """The pool with the other planes of all states, and the positions of this state's planes in it."""
        if not torch.compiler.is_dynamo_compiling():
            self.pool.refresh()
        return [self.pool.data, self.places]

    def _follows(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        for name in self._pools:
            torch._dynamo.mark_dynamic(tensors[name], 2)
        return {"_handles": tuple(tensors[attribute(name)] for name in of_state(self.spec))}

    @property
    def nbytes(self) -> int:
        """Bytes of this state, slack included, without the originals in host memory."""
        return sum(tensor.nbytes for _, tensor in self.tensors()) + sum(plane.nbytes for plane in self.planes)

    def __getstate__(self) -> dict[str, Any]:
        own = [plane.clone() for plane in self.planes]  # views would copy the pool of all states
        return super().__getstate__() | {"planes": own}

    def contents(self, n: int) -> dict[str, Tensor]:
        packed, pages = slice(self.spec.retention.packed(n)), slice(self.spec.retention.pages(n))
        used = dict.fromkeys(_TABLES, packed) | {"levels": pages}
        own = {name: tensor[:, :, used[name]] if name in used else tensor for name, tensor in self.tensors()}
        if self.spec.quantizer.adaptive.keep_originals:
            own["originals"] = self.host.tokens[:, :, packed]
        return own | {f"planes.{i}": plane for i, plane in enumerate(self.planes)}

    def fill(self, n: int, contents: Mapping[str, Tensor]) -> None:
        rows = [contents.get(f"planes.{i}", plane) for i, plane in enumerate(self.planes)]  # contents set the sizes
        planes = [torch.zeros_like(plane) for plane in rows]
        self.put(planes=[plane.to(self.ring.device) for plane in planes], count=self.spec.retention.packed(n))
        super().fill(n, contents)

    @torch.inference_mode(False)
    def mapped(self, fn: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        replaced = {"planes": [fn(plane) for plane in self.planes], "host": self.host.replaced(fn(self.host.tokens))}
        return super().mapped(fn) | replaced

    def put(self, **changed: Any) -> None:
        if "planes" in changed:
            self.pool.stale = True
        super().put(**changed)

    @torch.inference_mode(False)
    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` tokens. Memory grows geometrically; contents are preserved."""
        size, packed, have = self.spec.page_size, self.spec.retention.packed(tokens), self.scale.shape[2]
        keeps, room = self.spec.quantizer.adaptive.keep_originals, have
        new: dict[str, Any] = {}
        if packed > have or not have:
            room = max(packed, have + have // GROWTH, 4 * size) // size * size
            new = {name: grown(getattr(self, name), room) for name in _TABLES}
            new["levels"] = grown(self.levels, room // size)
        wanted = room if keeps else max(size, packed - self.count)
        old = self.host.tokens
        if wanted != old.shape[2]:
            originals = old.new_zeros(*old.shape[:2], wanted, old.shape[3], pin_memory=self.ring.is_cuda)
            if keeps:
                originals[:, :, : old.shape[2]] = old
            new["host"] = self.host.replaced(originals)
        if new:
            self.put(**new)

    def crop(self, old: int, new: int, lowering: str = "auto") -> None:
        super().crop(old, new, lowering)
        self.count = min(self.count, self.spec.retention.packed(new))

    def reset(self) -> None:
        super().reset()
        self.count, self.pool.stale = 0, True

    def due(self, n: int) -> bool:
        """Whether bit widths are chosen at length ``n``."""
        packed = self.spec.retention.packed(n)
        return packed > self.count or (packed > 0 and self.spec.quantizer.adaptive.every == "token")

    @torch.inference_mode(False)
    def requantize(self, n: int, importance: Tensor) -> None:
        """Quantize the tokens that are due at length ``n``, and give every packed token the bit width that it needs
        now.

        importance: ``[B, H_kv, n]``, the largest attention weight that each token received from the last queries.

        The pool is stale until the next `PlanePool.refresh`.
        """
        adaptive, sinks, packed = self.spec.quantizer.adaptive, self.spec.retention.sinks, self.spec.retention.packed(n)
        widths, known, old = adaptive.widths, self._tokens(self.count), self.count
        start = old if adaptive.keep_originals else 0
        new = self.host.tokens[:, :, start : start + packed - old].to(self.ring.device)
        self._add(new, slice(old, packed))
        step, zero_point = (table[:, :, :packed] for table in (self.scale, self.zero_point))
        cells = assign_cells(new, step[:, :, old:], zero_point[:, :, old:], widths[-1])
        codes = torch.cat([from_planes(known.planes, known.levels, widths), cells], 2)
        energy = self.energy[..., 0] if adaptive.fits_energy else adaptive.energy
        worth = importance[..., sinks : sinks + packed]
        levels = levels_for(step, allowed_deviation(adaptive, n, worth, energy), widths)
        if adaptive.keep_originals:
            self._restore(codes[:, :, :old], levels[:, :, :old] > known.levels)
        else:
            levels[:, :, :old] = torch.minimum(levels[:, :, :old], known.levels)
        first, *planes = to_planes(codes, levels, widths)
        self._codes[:, :, :packed] = first
        size = self.spec.page_size
        self.levels[:, :, : packed // size] = pack_levels(levels, size, len(widths))
        self.put(planes=planes, count=packed)

    def _tokens(self, count: int) -> Tokens:
        """The first ``count`` packed tokens."""
        tables = (getattr(self, name)[:, :, :count] for name in _TABLES)
        codes, step, zero_point, outliers, where = tables
        size, classes = self.spec.page_size, len(self.spec.quantizer.adaptive.widths)
        levels = unpack_levels(self.levels[:, :, : count // size], size, classes)
        return Tokens([codes, *self.planes], levels, step, zero_point, outliers[:, 0], where[:, 0])

    def _add(self, x: Tensor, part: slice) -> None:
        """Store the ranges and outliers of ``x``, the newly packed tokens ``part``."""
        outliers, where, is_outlier = split_outliers(x, self.spec.quantizer.adaptive.outliers)
        step, zero_point = fit_range(x, is_outlier, self.spec.quantizer.adaptive.widths[-1], self.scale.dtype)
        if x.device.type == "cpu":
            check_finite(step, zero_point)
        self.scale[:, :, part], self.zero_point[:, :, part] = step, zero_point
        self.outliers[:, 0, part], self.where[:, 0, part] = outliers, where

    def _restore(self, codes: Tensor, promoted: Tensor) -> None:
        """Restore all bits of the ``promoted`` tokens in ``codes`` from the originals on the host."""
        where = promoted.nonzero(as_tuple=True)
        originals = self.host.tokens[tuple(index.cpu() for index in where)].to(self.ring.device)
        self.host.moved_nbytes += originals.nbytes
        step, zero_point = (table[:, :, : codes.shape[2]][where] for table in (self.scale, self.zero_point))
        codes[where] = assign_cells(originals, step, zero_point, self.spec.quantizer.adaptive.widths[-1])

"""`EntropyChunkCodec`: chunks of a calibrated model, whose codes are entropy coded.

Outside of attention, a page does not need a fixed size. So the coordinates of the calibrated form of `waterfill` get
uniform steps here, instead of bit widths and gains, and zstd takes the redundancy out of their codes
(`kvpass.codec.entropy_coding`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..codec.bitpack import byte_rows
from ..codec.calibrated_layer import CalibratedLayer
from ..codec.entropy_coding import OVERHEAD, EntropyCoder, Streams, entropy, quantize
from ..codec.page_rope import middle
from ..codec.shares import Shares
from ..codec.spec import CodecSpec
from ..codec.token_ranks import choose
from ..codec.transform_coding import inverse_of, times_blocks
from ..lowering.cpp import dequantize_streams
from .chunks import ANY, Chunk, LayerShape, Shapes, check_chunk_size, random_tokens

_ROLES = "key", "value"


@dataclass(frozen=True, eq=False)
class _Stack:
    """Layers that are stored alike, by their places in a group, and their tensors ``[L, ...]``."""

    shape: LayerShape
    places: tuple[int, ...]
    tensors: CalibratedLayer

    @property
    def sides(self) -> tuple[tuple[CodecSpec, dict[str, Tensor]], tuple[CodecSpec, dict[str, Tensor]]]:
        return (self.tensors.key_spec, self.tensors.key), (self.tensors.value_spec, self.tensors.value)

    @property
    def shares(self) -> Shares:
        return Shares.of(self.tensors.key_spec)

    def rows(self, codes: Tensor) -> Tensor:
        """Codes of one rank ``[L, H, N, T, D]`` as rows ``[L * H * D, N * T]``: one for each coordinate."""
        return codes.permute(0, 1, 4, 2, 3).flatten(3).flatten(0, 2)

    def codes(self, rows: Tensor, pages: int) -> Tensor:
        """Inverse of `rows`."""
        lead = len(self.places), self.shape.heads, self.shape.head_dim
        return rows.view(*lead, pages, -1).permute(0, 1, 3, 4, 2)


class EntropyChunkCodec:
    """Quantizes and dequantizes chunks of ``tokens`` tokens, as `ChunkCodec` does.

    layers: the layer of the model that each cache layer belongs to, and its shape.
    calibrated: the tensors of each of ``layers``.
    lowering: "reference" for plain PyTorch. Otherwise there is a C++ kernel for CPUs, if it supports the pages.

    The size of a chunk depends on its tokens: `nbytes` is the expected one.

    Raises `KVPassError` if the pages do not fit the chunk, or without the package zstandard.
    """

    def __init__(
        self,
        layers: Mapping[int, LayerShape],
        calibrated: Mapping[int, CalibratedLayer],
        tokens: int,
        device: torch.device | str = "cpu",
        lowering: str = "auto",
    ) -> None:
        self.tokens, self.device = tokens, torch.device(device)
        alike: dict[tuple[Any, ...], list[int]] = {}
        for place, (index, shape) in enumerate(layers.items()):
            one = calibrated[index]
            angles = None if one.angles is None else tuple(one.angles.tolist())
            alike.setdefault((shape, one.key_spec, one.value_spec, angles), []).append(place)
        each = [calibrated[index] for index in layers]
        self._stacks = [
            _Stack(shape, tuple(places), _stacked([each[place] for place in places]))
            for (shape, *_), places in alike.items()
        ]
        for stack in self._stacks:
            for spec, _ in stack.sides:
                check_chunk_size(tokens, spec.page_size, spec.retention.sinks)
        std = torch.cat([1 / steps.flatten() for steps in self._steps()]).cpu()
        self._coder, self._bits = EntropyCoder(std), float(entropy(std).mean())
        specs = [spec for stack in self._stacks for spec, _ in stack.sides]
        fused = lowering != "reference" and self.device.type == "cpu" and all(map(dequantize_streams.serves, specs))
        self._sources = list(self._rows_and_bases()) if fused else None

    def _steps(self) -> Iterable[Tensor]:
        """The steps of each rank of tokens, ``[L, H, D]``, in the order of rows."""
        for stack in self._stacks:
            for _, tensors in stack.sides:
                yield from tensors["steps"].unbind(2)

    def _rows_and_bases(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """What `dequantize_streams.dequantize` needs of the keys, and of the values, of each stack: their rows
        ``[n, 2]`` and basis ``[ranks, L, H, D, b]``."""
        rows = torch.stack([self._coder.place, self._coder.stream], 1)
        for stack in self._stacks:
            found = []
            for _, tensors in stack.sides:
                steps = tensors["steps"].movedim(2, 0)
                own, rows = rows.split([steps.numel(), len(rows) - steps.numel()])
                found.append((own.contiguous(), (tensors["basis"] * steps.unsqueeze(-1)).contiguous()))
            yield found

    def shapes(self, first: bool) -> Shapes:
        """Shape and dtype of the tensors of a chunk, with `ANY` for sizes that depend on its tokens. first: whether it
        is the first of its prompt."""
        found: Shapes = {
            "codes": ((ANY,), torch.uint8),
            "streams": ((len(self._coder.rows), 2), torch.int32),
            "exceptions": ((ANY, 2), torch.int32),
        }
        for number, stack in enumerate(self._stacks):
            lead = len(stack.places), stack.shape.heads
            for role, (spec, _) in zip(_ROLES, stack.sides, strict=True):
                if first and spec.retention.sinks:
                    found[f"{number}.{role}.sinks"] = (
                        (*lead, spec.retention.sinks, stack.shape.head_dim), stack.shape.dtype
                    )  # fmt: skip
            if stack.shares.ranked:
                size = stack.tensors.key_spec.page_size
                found[f"{number}.ranks"] = (*lead, self.tokens // size, byte_rows(size, 1), 1), torch.uint8
        return found

    def nbytes(self, first: bool) -> int:
        """Bytes to expect of a chunk."""
        fixed = sum(prod(shape) * dtype.itemsize for shape, dtype in self.shapes(first).values() if ANY not in shape)
        values = sum(2 * len(stack.places) * stack.shape.heads * stack.shape.head_dim for stack in self._stacks)
        return fixed + round(OVERHEAD * self._bits * self.tokens * values / 8)

    @property
    def full_nbytes(self) -> int:
        """Bytes of the tokens of a chunk as they were given."""
        each = (len(stack.places) * stack.shape.heads * stack.shape.head_dim * stack.shape.dtype.itemsize
                for stack in self._stacks)  # fmt: skip
        return 2 * self.tokens * sum(each)

    def quantize(self, numbers: Sequence[int], keys: Sequence[Tensor], values: Sequence[Tensor]) -> list[Chunk]:
        """Quantize N chunks.

        numbers: the number of each in its prompt, in ascending order.
        keys, values: of each layer: ``[H, N * tokens, D]``.

        Raises `KVPassError` for NaN and infinity.
        """
        spans = (slice(i * self.tokens, (i + 1) * self.tokens) for i in range(len(numbers)))
        return [
            self._quantize(number, [x[:, span] for x in keys], [x[:, span] for x in values])
            for number, span in zip(numbers, spans, strict=True)
        ]

    def _quantize(self, number: int, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Chunk:
        chunk: Chunk = {}
        rows = []
        for i, stack in enumerate(self._stacks):
            ranks = None
            for role, given, (spec, tensors) in zip(_ROLES, (keys, values), stack.sides, strict=True):
                x, sinks = torch.stack([given[place] for place in stack.places]), spec.retention.sinks
                if number == 0 and sinks:
                    chunk[f"{i}.{role}.sinks"] = x[..., :sinks, :].to("cpu", copy=True)
                    x[..., :sinks, :] = x[..., sinks : sinks + 1, :]  # so that pages begin where chunks do
                x = x.float()
                if role == "key":
                    x = stack.tensors.to_pages(x, self._middles(number, stack))
                shares = Shares.of(spec)
                if shares.chooses:
                    ranks = choose(x, spec, tensors["queries"])
                by_rank = shares.to_ranks(times_blocks(x, tensors["inverse"]), ranks, spec)
                for units, steps in zip(by_rank, tensors["steps"].unbind(2), strict=True):
                    rows.append(stack.rows(quantize(units / steps[:, :, None, None])))
            if ranks is not None:
                chunk[f"{i}.ranks"] = ranks.cpu()
        return chunk | self._coder.compress(torch.cat(rows))

    def dequantize(
        self, numbers: Sequence[int], chunks: Sequence[Mapping[str, Tensor]]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Inverse of `quantize` up to rounding: keys and values of each layer, ``[H, N * tokens, D]``."""
        found = []  # keys and values of each stack
        for stack in self._stacks:
            size = len(stack.places), stack.shape.heads, len(chunks) * self.tokens, stack.shape.head_dim
            found.append(torch.empty(len(_ROLES), *size, dtype=stack.shape.dtype, device=self.device))
        for i, (number, chunk) in enumerate(zip(numbers, chunks, strict=True)):
            self._dequantize(number, chunk, [x[..., i * self.tokens : (i + 1) * self.tokens, :] for x in found])
        by_place = {
            place: x[:, i] for stack, x in zip(self._stacks, found, strict=True) for i, place in enumerate(stack.places)
        }
        keys, values = ([by_place[place][role] for place in sorted(by_place)] for role in range(len(_ROLES)))
        return keys, values

    def _dequantize(self, number: int, chunk: Mapping[str, Tensor], into: Sequence[Tensor]) -> None:
        """Dequantize a chunk into the keys and values of each stack, ``[2, L, H, tokens, D]``."""
        in_row = self.tokens // self._stacks[0].shares.ranks
        if self._sources is None:
            self._from_codes(number, chunk, self._coder.decompress(chunk, in_row).to(self.device), into)
        else:
            self._from_streams(number, chunk, self._coder.streams(chunk, in_row), into)
        if number:
            return
        for i, (stack, sides) in enumerate(zip(self._stacks, into, strict=True)):
            for role, (spec, _), x in zip(_ROLES, stack.sides, sides, strict=True):
                if spec.retention.sinks:
                    x[..., : spec.retention.sinks, :] = chunk[f"{i}.{role}.sinks"].to(x)

    def _from_codes(self, number: int, chunk: Mapping[str, Tensor], left: Tensor, into: Sequence[Tensor]) -> None:
        """`_dequantize`, but for the sinks, in plain PyTorch."""
        for i, (stack, sides) in enumerate(zip(self._stacks, into, strict=True)):
            ranks = chunk[f"{i}.ranks"].to(self.device) if stack.shares.ranked else None
            for role, (spec, tensors), side in zip(_ROLES, stack.sides, sides, strict=True):
                by_rank = []
                for steps in tensors["steps"].unbind(2):
                    rows, left = left.split([steps.numel(), len(left) - steps.numel()])
                    by_rank.append(stack.codes(rows, self.tokens // spec.page_size) * steps[:, :, None, None])
                x = Shares.of(spec).from_ranks(by_rank, ranks, tensors["basis"])
                side.copy_(stack.tensors.from_pages(x, self._middles(number, stack)) if role == "key" else x)

    def _from_streams(self, number: int, chunk: Mapping[str, Tensor], streams: Streams, into: Sequence[Tensor]) -> None:
        """The same by a kernel."""
        assert self._sources is not None
        for i, (stack, sources, sides) in enumerate(zip(self._stacks, self._sources, into, strict=True)):
            ranks, layers = chunk[f"{i}.ranks"] if stack.shares.ranked else None, stack.tensors
            middles = None if layers.angles is None else layers.turned(self._middles(number, stack)[0])
            for role, (spec, _), (rows, basis), x in zip(_ROLES, stack.sides, sources, sides, strict=True):
                mean, turned = (layers.mean, middles) if role == "key" else (None, None)
                exact = x if x.dtype == torch.float32 else torch.empty_like(x, dtype=torch.float32)
                dequantize_streams.dequantize(streams, rows, basis, ranks, mean, turned, spec, exact)
                if exact is not x:
                    x.copy_(exact)

    def _middles(self, number: int, stack: _Stack) -> Tensor:
        """The numbers of the middle tokens of a chunk's pages: ``[L, pages]``."""
        size, start = stack.tensors.key_spec.page_size, number * self.tokens
        each = torch.arange(start, start + self.tokens, size, device=self.device) + middle(size)
        return each.expand(len(stack.places), -1)

    def warm(self) -> None:
        """Compile what `dequantize` compiles."""
        shapes = {place: stack.shape for stack in self._stacks for place in stack.places}
        x = random_tokens(shapes, self.tokens, self.device)
        self.dequantize([0], self.quantize([0], x, x))


def _stacked(layers: Sequence[CalibratedLayer]) -> CalibratedLayer:
    """The tensors of several layers, ``[L, ...]`` float32, and the ``inverse`` of each basis. Bit widths are left
    out."""

    def stacked(sides: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        names = [name for name, tensor in sides[0].items() if tensor.is_floating_point()]
        found = {name: torch.cat([side[name] for side in sides]).float() for name in names}
        return found | {"inverse": inverse_of(found["basis"]).float()}

    keys, values = stacked([one.key for one in layers]), stacked([one.value for one in layers])
    return CalibratedLayer(layers[0].key_spec, layers[0].value_spec, keys, values, layers[0].angles)

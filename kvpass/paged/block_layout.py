"""Packed pages in blocks of a server's memory, which knows nothing of codecs: how many bytes a block takes, and where
in it everything is.

A block has a slot for each page of its tokens. A server may reuse a block for another request that begins with the same
tokens, so a page is stored in the block of its *last* token. After S sinks, which are in no page, that is one slot
further: the first slot of a request's first block has no page, and holds the *head* instead. That is the sinks and what
the codec was fitted to, such as the mean of the keys. If the head is too large for a slot, the rest lies before the
slots, in every block.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..codec.spec import CodecSpec
from ..codec.tensors import fitted_shapes, page_shapes
from ..errors import KVPassError

_ALIGNMENT = 16  # bytes; fits tensors of any dtype


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class Part(NamedTuple):
    """One tensor in the part of a block for one attention head: its shape, dtype and first byte."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int


def _placed(tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> tuple[dict[str, Part], int]:
    """Offsets of those tensors one after the other, and their total size in bytes."""
    parts, end = {}, 0
    for name, (shape, dtype) in tensors.items():
        size = dtype.itemsize
        end = -(-end // size) * size
        parts[name] = Part(shape, dtype, end)
        end += prod(shape) * size
    return parts, _aligned(end)


class Blocks(NamedTuple):
    """The blocks of one layer as tensors.

    key, value: the tensors of pages, in order: ``[blocks, H, slots, *page]`` each.
    head: the tensors stored once per request, in its first block: ``[blocks, H, *shape]``, by side and name
        ("key.sinks").
    """

    key: tuple[Tensor, ...]
    value: tuple[Tensor, ...]
    head: dict[str, Tensor]

    def fitted(self, side: str, names: tuple[str, ...], block: Tensor) -> list[Tensor]:
        """Those of the tensors ``names`` that a side keeps, of the requests whose first blocks are ``block``."""
        return [self.head[f"{side}.{name}"][block] for name in names if f"{side}.{name}" in self.head]


@dataclass(frozen=True)
class BlockLayout:
    """The layout of a block of ``block_size`` tokens, the same for each attention head.

    key, value: the specs of both. dtype: that of the tokens.

    Raises `KVPassError` if pages do not fit the block.
    """

    key: CodecSpec
    value: CodecSpec
    head_dim: int
    dtype: torch.dtype
    block_size: int

    def __post_init__(self) -> None:
        key, value, size = self.key.retention, self.value.retention, self.key.page_size
        if (key.page_size, key.sinks) != (value.page_size, value.sinks):
            raise KVPassError(
                f"Keys have pages of {key.page_size} tokens after {key.sinks} sinks, values of {value.page_size} after "
                f"{value.sinks}. Paged serving needs the same for both: set retention, which applies to both."
            )
        if self.block_size % size or self.slots < self.lead + 1:
            least = size * (self.lead + 1)
            raise KVPassError(
                f"Blocks of {self.block_size} tokens do not hold whole pages of {size}: use a multiple of {size}, at "
                f"least {least}."
            )
        if self._fitted and (
            late := [side for side, spec in self._fitted if not spec.retention.pages(self.block_size)]
        ):
            raise KVPassError(
                f"The {late[0]}s of a request are fitted to its first pages, which must lie in its first block. Blocks "
                f"of {self.block_size} tokens are too small: use {self.block_size * 2} or more."
            )

    @cached_property
    def _fitted(self) -> list[tuple[str, CodecSpec]]:
        return [(side, spec) for side, spec in self.sides if fitted_shapes(spec, self.head_dim, self.dtype)]

    @property
    def sides(self) -> tuple[tuple[str, CodecSpec], tuple[str, CodecSpec]]:
        return ("key", self.key), ("value", self.value)

    @property
    def slots(self) -> int:
        """Slots per block."""
        return self.block_size // self.key.page_size

    @property
    def lead(self) -> int:
        """Slots of a request's first block that hold no page."""
        return -(-self.key.retention.sinks // self.key.page_size)

    @cached_property
    def _page(self) -> tuple[dict[str, Part], int]:
        return _placed(
            {
                f"{side}.{name}": one
                for side, spec in self.sides
                for name, one in page_shapes(spec, self.head_dim, self.dtype).items()
            }
        )

    @cached_property
    def _head(self) -> tuple[dict[str, Part], int]:
        kept: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for side, spec in self.sides:
            if spec.retention.sinks:
                kept[f"{side}.sinks"] = (spec.retention.sinks, self.head_dim), self.dtype
            kept |= {f"{side}.{name}": one for name, one in fitted_shapes(spec, self.head_dim, self.dtype).items()}
        return _placed(kept)

    @cached_property
    def first_slot(self) -> int:
        """The first byte of the slots."""
        return max(0, self._head[1] - self.lead * self._page[1])

    @cached_property
    def bytes_per_token(self) -> int:
        """Bytes of one attention head in a block, divided by its tokens."""
        return -(-(self.first_slot + self.slots * self._page[1]) // self.block_size)

    def views(self, cache: Tensor) -> Blocks:
        """The tensors in ``cache``, ``[blocks, H, block_size, bytes_per_token]`` uint8. The bytes of a block and head
        are contiguous."""
        if cache.shape[2:] != (self.block_size, self.bytes_per_token) or cache.dtype != torch.uint8:
            raise KVPassError(
                f"Blocks are [blocks, H, {self.block_size}, {self.bytes_per_token}] bytes, not {tuple(cache.shape)} of "
                f"{cache.dtype}."
            )
        flat, (parts, size) = cache.flatten(2), self._page

        def view(part: Part, first: int, repeats: int | None = None) -> Tensor:
            typed, item = flat.view(part.dtype), part.dtype.itemsize
            inner = torch.empty(part.shape, device="meta").stride()
            slots = () if repeats is None else (repeats,)
            strides = (*typed.stride()[:2], *(size // item for _ in slots), *inner)
            start = typed.storage_offset() + (first + part.offset) // item
            return typed.as_strided((*typed.shape[:2], *slots, *part.shape), strides, start)

        pages = {name: view(part, self.first_slot, self.slots) for name, part in parts.items()}
        key, value = (tuple(pool for name, pool in pages.items() if name.startswith(side)) for side, _ in self.sides)
        return Blocks(key, value, {name: view(part, 0) for name, part in self._head[0].items()})

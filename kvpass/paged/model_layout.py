"""Blocks that hold the pages of all layers of a model, for layers whose pages differ in size.

A server's block belongs to as many tokens in all layers, so layers with larger pages take the room that others leave.
A slot of a block has one page of keys and one of values of each layer, side by side. As in `block_layout`, a page is in
the block of its last token, and the first slots of a request's first block hold its sinks instead.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from ..errors import KVPassError
from ..layout.retention import Retention
from .block_layout import Blocks

SPARE = 64
"""Bytes after the last page of a block, because kernels read a vector at a time."""


@dataclass(frozen=True)
class ModelLayout:
    """The layout of a block of ``block_size`` tokens in all layers.

    pages: bytes per page of keys and of values of each layer, all its heads together.
    heads: KV heads of a layer. dtype: that of the tokens.

    Raises `KVPassError` if pages do not fit the block.
    """

    pages: tuple[tuple[int, int], ...]
    retention: Retention
    heads: int
    head_dim: int
    dtype: torch.dtype
    block_size: int

    def __post_init__(self) -> None:
        size = self.retention.page_size
        if self.block_size % size or self.slots < self.lead + 1:
            raise KVPassError(
                f"Blocks of {self.block_size} tokens do not hold whole pages of {size}: use a multiple of {size}, at "
                f"least {size * (self.lead + 1)}."
            )

    @property
    def slots(self) -> int:
        """Slots per block."""
        return self.block_size // self.retention.page_size

    @property
    def lead(self) -> int:
        """Slots of a request's first block that hold no page."""
        return -(-self.retention.sinks // self.retention.page_size)

    @cached_property
    def _offsets(self) -> list[int]:
        """The first byte in a slot of each page: of keys and values of each layer. The end of the slot comes last."""
        return [0, *accumulate(size for both in self.pages for size in both)]

    @property
    def slot_bytes(self) -> int:
        """Bytes from one slot to the next."""
        return self._offsets[-1]

    @property
    def _sink_bytes(self) -> int:
        """Bytes of the sinks of a layer's keys, or values."""
        return self.retention.sinks * self.heads * self.head_dim * self.dtype.itemsize

    @cached_property
    def first_slot(self) -> int:
        """The first byte of the slots."""
        return max(0, 2 * len(self.pages) * self._sink_bytes - self.lead * self.slot_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return self.first_slot + self.slots * self.slot_bytes + SPARE

    def views(self, cache: Tensor) -> list[Blocks]:
        """The tensors of each layer in ``cache``, ``[blocks, bytes]`` uint8: pages ``[blocks, 1, slots, 1, bytes]``,
        and sinks ``[blocks, H, sinks, D]``. Raises `KVPassError` if blocks are too small, or not aligned for sinks."""
        if cache.dtype != torch.uint8 or cache.stride(1) != 1 or cache.shape[1] < self.nbytes:
            raise KVPassError(f"Blocks are [blocks, {self.nbytes}] bytes, not {tuple(cache.shape)} of {cache.dtype}.")
        count, stride, start = len(cache), cache.stride(0), cache.storage_offset()
        item = self.dtype.itemsize
        if self._sink_bytes and (stride % item or start % item):
            raise KVPassError(f"Blocks {stride} bytes apart cannot hold {self.dtype} sinks: use another block size.")

        def pages(which: int) -> Tensor:
            size = self._offsets[which + 1] - self._offsets[which]
            at = start + self.first_slot + self._offsets[which]
            return cache.as_strided(
                (count, 1, self.slots, 1, size), (stride, self.slot_bytes, self.slot_bytes, size, 1), at
            )

        def sinks(which: int) -> Tensor:
            shape = self.heads, self.retention.sinks, self.head_dim
            inner = torch.empty(shape, device="meta").stride()
            at = (start + which * self._sink_bytes) // item
            whole = torch.empty(0, dtype=self.dtype, device=cache.device).set_(cache.untyped_storage())
            return whole.as_strided((count, *shape), (stride // item, *inner), at)

        found = []
        for layer in range(len(self.pages)):
            key, value = 2 * layer, 2 * layer + 1
            heads = {"key.sinks": sinks(key), "value.sinks": sinks(value)} if self.retention.sinks else {}
            found.append(Blocks((pages(key),), (pages(value),), heads))
        return found

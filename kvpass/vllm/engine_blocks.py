"""Reads and writes keys and values in an engine's own blocks, whatever its attention backend keeps where.

A backend defines `do_kv_cache_update`, which writes keys and values into blocks. Where it puts them is found by having
it write numbers into a block of its own.
"""

from typing import Any

import torch
from torch import Tensor

from ..errors import KVPassError

_BASE = 128  # digits that each dtype of a cache represents


class EngineBlocks:
    """The blocks of one layer.

    layer: vLLM's attention layer. cache: what vLLM calls its KV cache, ``[blocks, ...]``.
    heads, head_dim: of keys and values. block_size: tokens per block of vLLM's block tables.
    num_blocks: their number; a backend may divide each into several blocks of its own.

    Raises `KVPassError` if the backend does not store keys and values unchanged.
    """

    def __init__(self, layer: Any, cache: Tensor, heads: int, head_dim: int, block_size: int, num_blocks: int):
        self.layer, self.cache = layer, cache
        self.parts = cache.shape[0] // num_blocks
        self.block_size, self.heads, self.head_dim = block_size // self.parts, heads, head_dim
        if not hasattr(layer.impl, "do_kv_cache_update"):
            raise KVPassError(f"{type(layer.impl).__name__} does not say how it stores keys and values. {_INSTEAD}")
        self.order = self._found_order()
        self._check()

    @property
    def device(self) -> torch.device:
        return self.cache.device

    def read(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of ``blocks`` ``[N]``: ``[H, N * block_size, D]`` each."""
        return self._read(self.cache, self._parts_of(blocks))

    def write(self, blocks: Tensor, keys: Tensor, values: Tensor) -> None:
        """Inverse of `read`."""
        self._write(self.cache, self._parts_of(blocks), keys, values)

    def _parts_of(self, blocks: Tensor) -> Tensor:
        if self.parts == 1:
            return blocks
        return (blocks.unsqueeze(1) * self.parts + torch.arange(self.parts, device=blocks.device)).flatten()

    def _read(self, cache: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        flat = cache[blocks].flatten(1)[:, self.order]
        keys, values = flat.view(len(blocks), 2, self.heads, self.block_size, self.head_dim).unbind(1)
        return keys.transpose(0, 1).flatten(1, 2), values.transpose(0, 1).flatten(1, 2)

    def _write(self, cache: Tensor, blocks: Tensor, keys: Tensor, values: Tensor) -> None:
        inside = torch.arange(self.block_size, device=blocks.device)
        slots = (blocks.unsqueeze(1) * self.block_size + inside).flatten()
        both = (x.transpose(0, 1).contiguous() for x in (keys, values))
        self.layer.impl.do_kv_cache_update(self.layer, *both, cache, slots)

    def _scratch(self) -> Tensor:
        """A block with the strides of the real ones."""
        shape, cache = (1, *self.cache.shape[1:]), self.cache
        return torch.empty_strided(shape, cache.stride(), dtype=cache.dtype, device=cache.device).fill_(-1)

    def _found_order(self) -> Tensor:
        """Where in a block each channel of keys, then of values, is: ``[2 * H * block_size * D]``."""
        count = 2 * self.heads * self.block_size * self.head_dim
        number = torch.arange(count, device=self.device).view(2, self.heads, self.block_size, self.head_dim)
        block, scale = torch.zeros(1, dtype=torch.long, device=self.device), 1
        found = block.new_zeros(self._scratch().numel())
        while scale < count:
            scratch = self._scratch()
            keys, values = (number // scale % _BASE).to(scratch.dtype).unbind(0)
            self._write(scratch, block, keys, values)
            digits = scratch.flatten().long()
            found = torch.where((digits < 0) | (found < 0), -1, found + digits * scale)
            scale *= _BASE
        places = found.new_full((count,), -1)
        there = ((found >= 0) & (found < count)).nonzero().flatten()
        places[found[there]] = there
        if len(there) != count or (places < 0).any():
            self._refuse()
        return places

    def _check(self) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = 2, self.heads, self.block_size, self.head_dim
        given = torch.randn(shape, generator=generator).to(self.device, self.cache.dtype)
        scratch, block = self._scratch(), torch.zeros(1, dtype=torch.long, device=self.device)
        self._write(scratch, block, *given)
        if not all(torch.equal(a, b) for a, b in zip(self._read(scratch, block), given, strict=True)):
            self._refuse()

    def _refuse(self) -> None:
        raise KVPassError(
            f"{type(self.layer.impl).__name__} does not store keys and values unchanged, channel by channel. {_INSTEAD}"
        )


_INSTEAD = "Choose another attention backend, or serve without KVPassConnector."

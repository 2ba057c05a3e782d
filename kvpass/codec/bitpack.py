"""Packs codes into bytes and back, in planes along the token axis.

A page of P tokens at b bits is ``P * b / 8`` byte rows of ``head_dim`` bytes. At 2 bits, byte row i holds tokens
i, i + P/4, i + P/2 and i + 3P/4, so unpacking one *plane* is a shift and a mask over contiguous memory, with no
shuffle. 3 bits are a 2-bit field followed by a 1-bit field, 6 bits a 4-bit field followed by a 2-bit field.
"""

import torch
from torch import Tensor

FIELDS: dict[int, tuple[int, ...]] = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 6: (4, 2), 8: (8,)}
"""Bit width of a code -> widths of the bit fields that hold it, low bits first."""


def byte_rows(page_size: int, bits: int) -> int:
    """Byte rows of a page of ``page_size`` tokens at ``bits`` bits."""
    return page_size * bits // 8


def smallest_page(bits: int) -> int:
    """The smallest number of tokens that fills whole byte rows. Page sizes are multiples of it."""
    return 8 // min(FIELDS[bits])


def pack(codes: Tensor, bits: int) -> Tensor:
    """``[..., P, D]`` uint8 codes in ``[0, 2**bits)`` -> ``[..., P * bits / 8, D]`` bytes."""
    tokens, shift, rows = codes.shape[-2], 0, []
    for width in FIELDS[bits]:
        planes = 8 // width
        field = ((codes >> shift) & (2**width - 1)).unflatten(-2, (planes, tokens // planes))
        packed = field.select(-3, 0)
        for j in range(1, planes):
            packed = packed | (field.select(-3, j) << (j * width))
        rows.append(packed)
        shift += width
    return torch.cat(rows, -2) if len(rows) > 1 else rows[0].contiguous()


def num_planes(bits: int) -> int:
    """Number of planes of a page: runs of consecutive tokens that a single shift and mask unpacks."""
    return 8 // min(FIELDS[bits])


def unpack_plane(packed: Tensor, bits: int, plane: int) -> Tensor:
    """Plane ``plane`` of ``[..., rows, D]`` bytes: the codes of tokens ``[plane * T, (plane + 1) * T)`` of the page,
    ``[..., T, D]`` uint8 with ``T = P / num_planes(bits)``."""
    page_size, tokens = packed.shape[-2] * 8 // bits, packed.shape[-2] * 8 // bits // num_planes(bits)
    start, shift = 0, 0
    codes: Tensor | None = None
    for width in FIELDS[bits]:
        rows = byte_rows(page_size, width)
        first = plane * tokens
        row, offset = first % rows, first // rows * width
        field = (packed.narrow(-2, start + row, tokens) >> offset) & (2**width - 1)
        codes = field if codes is None else codes | (field << shift)
        start, shift = start + rows, shift + width
    return codes


def unpack_plane_unshifted(packed: Tensor, bits: int, plane: int) -> tuple[Tensor, float]:
    """Plane ``plane`` masked but not shifted, and the power of two that converts it to codes.

    CPUs have no instruction that shifts vectors of bytes.
    """
    if len(FIELDS[bits]) > 1:
        return unpack_plane(packed, bits, plane), 1.0
    offset = plane * bits
    return packed & ((2**bits - 1) << offset), 2.0**-offset


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Inverse of `pack`: ``[..., rows, D]`` bytes -> ``[..., P, D]`` uint8 codes in token order."""
    return torch.cat([unpack_plane(packed, bits, j) for j in range(num_planes(bits))], -2)

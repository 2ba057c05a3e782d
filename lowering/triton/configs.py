"""Launch configurations of the kernels: sizes of tiles, warps, stages and splits.

For sm80 and sm90, the cases of ``tests/test_triton_compiles.py`` fit into the shared memory of the device and
spill few registers. Float32 heads with more than 128 channels spill. The instructions per value of the split
kernel are counted in its machine code (``benchmarks/instructions.py``). Configurations for up to 16 unmasked query rows
were measured on an H100 and an H200 with Triton 3.6 (docs/gpu.md); the others were not.
"""

from dataclasses import dataclass
from functools import cache, lru_cache

import torch
import triton

from kvpass.codec.spec import CodecSpec
from kvpass.layout.pool import bucket

from ..table import DispatchKey

WIDTHS = frozenset(f"bits={bits}" for bits in (1, 2, 3, 4, 6, 8))
"""Features of the bit widths that the kernels pack and unpack."""
INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter, on the CPU. "auto" does not select them then."""

GRID_ROWS = 32
"""Minimum number of tokens, and of channels, of 16-bit products with codes on grids of two dimensions. Triton 3.6 gives
each thread 8 adjacent operands of them, 32 for its 4 threads; products of fewer are wrong (measured on an H100)."""
_WARPS = 8  # resident warps per multiprocessor if threads use the maximum of registers
_INTERPRETED_PROGRAMS = 6
_WAVES = 8  # maximum waves of splits: the second kernel has to read the result of each split
_BEGINNING = 2  # startup time of a split, in tiles: queries and prefetching


def power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def cdiv(number: int, by: int) -> int:
    """``number / by``, rounded up. On the host, Triton's version takes microseconds."""
    return -(-number // by)


def refuses_device(dispatch: DispatchKey) -> str | None:
    if dispatch.device == "cuda" or (INTERPRETED and dispatch.device == "cpu"):
        return None
    return (
        f"Triton kernels run on CUDA devices, not on {dispatch.device} (except in the interpreter: TRITON_INTERPRET=1)."
    )


@dataclass(frozen=True)
class AttendConfig:
    """Launch configuration of attention.

    queries: query rows per tile.
    rows: rows of packed pages per tile; a row has one token of each plane.
    together: number of planes that share one step of the softmax.
    exact: exact tokens per tile.
    registers: maximum registers per thread, set where the assembler would otherwise spill instead of using them.
    resident: programs per multiprocessor, given their registers. None assumes the maximum of registers per thread.
    """

    queries: int
    rows: int
    together: int
    exact: int
    warps: int
    stages: int = 2
    registers: int | None = None
    resident: int | None = None


def attend_config(
    planes: int, head_dim: int, itemsize: int, queries: int, codebook: bool, rotary: bool, masked: bool,
    channelwise: bool = True,
) -> AttendConfig:  # fmt: skip
    """The shipped configuration for ``queries`` query rows per KV head.

    All planes share a step if that does not spill registers. Spilling starts with more rows, and earlier with masks.
    Up to 16 unmasked query rows over uniform codes take 2 warps and 3 stages, which were fastest of 1 to 8 warps on an
    H100 and an H200: each iteration has a dozen barriers. With more rows, 2 warps spill; 4 warps do some work twice,
    because products of 16 tokens occupy only 2 warps. Codes on grids need `GRID_ROWS`.
    """
    registers = 255 if rotary or masked or (codebook and itemsize == 2) else None
    if itemsize == 4:
        return AttendConfig(16, rows=16, together=1, exact=16, warps=8, registers=registers)
    if head_dim <= 128 and queries <= 16 and not masked and not codebook:
        together = 1 if rotary else planes
        rows = 16 if rotary or together == 8 or (together == 4 and channelwise) else 32
        return AttendConfig(16, rows, together, exact=32, warps=2, stages=3, registers=255, resident=4)
    if head_dim > 128 or codebook or rotary:
        together = 1 if codebook or rotary else min(planes, 2)
        warps = 8 if head_dim > 128 else 2 if queries <= 16 and not codebook else 4
        rows = 16
        if codebook:
            rows = 64 if head_dim <= 128 and queries <= 16 and not masked else GRID_ROWS
        return AttendConfig(16, rows=rows, together=together, exact=32, warps=warps, registers=registers)
    if planes == 8:
        if masked:
            return AttendConfig(16, rows=16, together=4, exact=32, warps=4, registers=registers)
        return AttendConfig(16, rows=32, together=8, exact=32, warps=8)
    tile = 16 if masked else 32
    rows = 64
    if planes == 4:
        rows = 16 if masked and queries > 16 else 32
    return AttendConfig(tile, rows=rows, together=planes, exact=32, warps=4, registers=registers, resident=2)


MASS_WARPS = 4  # of the attention-mass kernel, which uses attention's tiles


@dataclass(frozen=True)
class QuantizeConfig:
    """Launch configuration of quantization.

    rows: rows of a page per tile; a row has one token of each plane.
    span, spans: codes of one token per tile: ``spans`` runs of ``span`` codes. With per-token scales, a run is a group.
    """

    rows: int
    span: int
    spans: int


QUANTIZING_WARPS, COMPENSATING_WARPS, ROTATING_WARPS = 4, 8, 4
COMPENSATED = 8192  # largest number of values of a page that is compensated without spills
ROTATED = 4096  # values to rotate at a time
_QUANTIZED = 4096  # values per tile, if the groups allow it


def quantize_config(spec: CodecSpec, planes: int, head_dim: int) -> QuantizeConfig:
    rows = spec.page_size // planes
    codes = spec.quantizer
    if codes.subspace is not None:
        return QuantizeConfig(rows, span=codes.subspace.block_size, spans=1)
    if codes.per == "channel":
        span = max(16, min(triton.next_power_of_2(head_dim), _QUANTIZED // spec.page_size))
        return QuantizeConfig(rows, span=span, spans=1)
    span, groups = codes.group_size // codes.dim, head_dim // codes.group_size
    padded = triton.next_power_of_2(span)
    spans = min(triton.next_power_of_2(groups), max(1, 128 // padded))
    fitting = max(1, _QUANTIZED // (planes * spans * padded * codes.dim))
    return QuantizeConfig(min(fitting, rows), span=span, spans=spans)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache(1024)
def tiles_of_split(tiles: int, others: int, at_once: int) -> int:
    """Number of ``tiles`` per split that minimizes the total time.

    A few long splits leave most of the last wave idle; many short ones have too much startup time.

    others: number of programs per split. at_once: number of programs that run at a time.
    """

    def duration(splits: int) -> int:
        return cdiv(splits * others, at_once) * (cdiv(tiles, splits) + _BEGINNING)

    most = max(1, min(tiles, _WAVES * at_once // others))
    return cdiv(tiles, min(range(1, most + 1), key=duration))


def splits_of(rows: int, config: AttendConfig, others: int, device: torch.device) -> int:
    """Number of splits for ``rows``, the same for all numbers of rows in a `bucket`.

    There is at least one split, so that a captured grid is valid for any number of packed tokens.

    others: number of programs per split.
    """
    resident = config.resident or max(1, _WARPS // config.warps)
    at_once = _INTERPRETED_PROGRAMS if INTERPRETED else resident * _multiprocessors(device)
    tiles = max(1, bucket(cdiv(rows, config.rows)))
    return cdiv(tiles, tiles_of_split(tiles, others, at_once))

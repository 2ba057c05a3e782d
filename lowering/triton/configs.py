"""How the kernels are launched: sizes of tiles, warps, stages and splits.

Evidence: compile-only. For sm80 and sm90 the cases of ``tests/test_triton_compiles.py`` compile without spilled
registers and within the shared memory of the device. Float32 heads of more than 128 channels spill. What the split
kernel issues for each value is counted in its machine code (``benchmarks/instructions.py``). None has been measured on
a device.
"""

from dataclasses import dataclass
from functools import cache, lru_cache

import torch
import triton

from kvpass.codec.spec import CodecSpec
from kvpass.layout.pool import bucket

from ..table import DispatchKey

WIDTHS = frozenset(f"bits={bits}" for bits in (1, 2, 3, 4, 6, 8))
"""Widths that kernels pack and unpack."""
INTERPRETED = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter, on the CPU: never chosen by "auto"."""

_WARPS = 8  # of a multiprocessor where a thread has all the registers it may have
_INTERPRETED_PROGRAMS = 6
_WAVES = 8  # of splits at most: the second kernel reads what each of them leaves
_BEGINNING = 2  # tiles that a split takes the time of before its first: queries, and words read ahead


def power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def cdiv(number: int, by: int) -> int:
    """``number / by``, rounded up. Triton's takes microseconds where it is called on the host."""
    return -(-number // by)


def refuses_device(dispatch: DispatchKey) -> str | None:
    if dispatch.device == "cuda" or (INTERPRETED and dispatch.device == "cpu"):
        return None
    return (
        f"Triton kernels run on CUDA devices, not on {dispatch.device} (except in the interpreter: TRITON_INTERPRET=1)."
    )


@dataclass(frozen=True)
class AttendConfig:
    """queries: query rows of a tile. rows: rows of packed pages of a tile, each a token of every plane. together:
    planes that share one step of the softmax. exact: exact tokens of a tile. registers: how many a thread may have,
    where the assembler would rather spill than take them. resident: programs of a multiprocessor, by their registers;
    None: as if a thread had all it may have.
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
    planes: int, head_dim: int, itemsize: int, queries: int, codebook: bool, rotary: bool, masked: bool
) -> AttendConfig:
    """For ``queries`` query rows a KV head. All planes are taken together where that does not spill registers, as it
    does with more rows, and under masks sooner. 2 warps spill with more queries, where 4 do the same work twice,
    because 16 tokens are products for 2."""
    registers = 255 if rotary or masked or (codebook and itemsize == 2) else None
    if itemsize == 4:
        return AttendConfig(16, rows=16, together=1, exact=16, warps=8, registers=registers)
    if head_dim > 128 or codebook or rotary:
        together = 1 if codebook or rotary else min(planes, 2)
        warps = 8 if head_dim > 128 else 2 if queries <= 16 else 4
        return AttendConfig(16, rows=16, together=together, exact=32, warps=warps, registers=registers)
    if planes == 8:
        if masked:
            return AttendConfig(16, rows=16, together=4, exact=32, warps=4, registers=registers)
        return AttendConfig(16, rows=32, together=8, exact=32, warps=8)
    tile = 32 if queries > 16 and not masked else 16
    resident = 3 if planes in (1, 4) and tile == 16 and not masked else 2
    registers = 168 if resident == 3 else registers  # of 65,536, for 3 programs of 4 warps
    rows = 64
    if planes == 4:
        rows = 16 if masked and queries > 16 else 32
    return AttendConfig(tile, rows=rows, together=planes, exact=32, warps=4, registers=registers, resident=resident)


MASS_WARPS = 4  # of the kernel that says what was paid, in tiles as attention's


@dataclass(frozen=True)
class QuantizeConfig:
    """rows: rows of a page in a tile, each a token of every plane. span, spans: its codes of one token, in runs that
    share scales if tokens have their own."""

    rows: int
    span: int
    spans: int


QUANTIZING_WARPS, COMPENSATING_WARPS, ROTATING_WARPS = 4, 8, 4
COMPENSATED = 8192  # values of a page that does not spill while it is compensated
ROTATED = 4096  # values that are rotated at a time
_QUANTIZED = 4096  # values of a tile, if its groups allow


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
    """How many of ``tiles`` one split takes so that all are done soonest, where ``others`` programs run for each split
    and ``at_once`` at a time: a few long ones leave most of the last wave idle, many short ones begin too often."""

    def duration(splits: int) -> int:
        return cdiv(splits * others, at_once) * (cdiv(tiles, splits) + _BEGINNING)

    most = max(1, min(tiles, _WAVES * at_once // others))
    return cdiv(tiles, min(range(1, most + 1), key=duration))


def splits_of(rows: int, config: AttendConfig, others: int, device: torch.device) -> int:
    """How many splits share ``rows``, the same for all of a `bucket`, where ``others`` programs run for each. One at
    least, so that a grid is right whatever is packed by the time it runs."""
    resident = config.resident or max(1, _WARPS // config.warps)
    at_once = _INTERPRETED_PROGRAMS if INTERPRETED else resident * _multiprocessors(device)
    tiles = max(1, bucket(cdiv(rows, config.rows)))
    return cdiv(tiles, tiles_of_split(tiles, others, at_once))

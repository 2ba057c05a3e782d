"""Stores launch configurations that were measured on a device, which replace the shipped ones.

They are stored on disk by device and Triton version. ``benchmarks/gpu.py --stages tune`` measures them; nothing is
measured while a model runs.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import torch
import triton

from kvpass.errors import KVPassError

from .configs import GRID_ROWS, AttendConfig, attend_config

_WORTH = 0.97  # of the shipped configuration's time: smaller gains are noise
_RESIDENT = 65536 // 32 // 8  # registers of a multiprocessor, in blocks of 8 per thread of a warp


@dataclass(frozen=True)
class Case:
    """The arguments of `attend_config`."""

    planes: int
    head_dim: int
    itemsize: int
    queries: int
    codebook: bool
    rotary: bool
    masked: bool
    channelwise: bool = True


@cache
def name_of(device: torch.device) -> str:
    """The name under which the table of ``device`` is stored."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{where}, Triton {triton.__version__}"


def _file(name: str) -> Path:
    folder = Path(os.environ.get("KVPASS_CACHE") or "~/.cache/kvpass").expanduser()
    return folder / "launches" / f"{name.replace('/', '-')}.json"


@cache
def table(name: str) -> dict[Case, AttendConfig]:
    """The configurations stored for ``name``; empty if there are none. Raises `KVPassError` for an invalid file."""
    file = _file(name)
    if not file.exists():
        return {}
    try:
        return {Case(**row["case"]): AttendConfig(**row["config"]) for row in json.loads(file.read_text())}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise KVPassError(
            f"{file} is not a valid table of launch configurations ({error}): delete it, or tune again."
        ) from None


def store(name: str, found: dict[Case, AttendConfig]) -> Path:
    """Add ``found`` to the table of ``name``. Returns the path of its file."""
    file, rows = _file(name), table(name) | found
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps([dict(case=asdict(case), config=asdict(config)) for case, config in rows.items()]))
    new.replace(file)
    table.cache_clear()
    return file


def configured(case: Case, device: torch.device) -> AttendConfig:
    """The configuration stored for ``case`` on ``device``, or the shipped one."""
    return table(name_of(device)).get(case) or _shipped(case)


@cache
def _shipped(case: Case) -> AttendConfig:
    return attend_config(**asdict(case))


@contextmanager
def trying(case: Case, config: AttendConfig, device: torch.device) -> Iterator[None]:
    """Context manager: launches of ``case`` use ``config``, in this process only."""
    known, before = table(name_of(device)), dict(table(name_of(device)))
    known[case] = config
    try:
        yield
    finally:
        known.clear()
        known.update(before)


def candidates(case: Case) -> Iterator[AttendConfig]:
    """Configurations to try: the shipped one first, then others with different rows, warps, stages or registers."""
    first, least = _shipped(case), GRID_ROWS if case.codebook else 16
    yield first
    for rows in sorted({max(least, first.rows // 2), first.rows, min(64, 2 * first.rows)}):
        for warps in sorted({max(2, first.warps // 2), first.warps, min(8, 2 * first.warps)}):
            for stages in (2, 3):
                for registers in sorted({first.registers or 255, 255, 168, 128}):
                    resident = max(1, _RESIDENT // (registers // 8 * warps))
                    other = replace(first, rows=rows, warps=warps, stages=stages, registers=registers)
                    if replace(other, resident=first.resident) != first:
                        yield replace(other, resident=resident)


def tune(case: Case, seconds: Callable[[AttendConfig], float]) -> tuple[AttendConfig, dict[AttendConfig, float]]:
    """The fastest of the `candidates`, and the time of each.

    seconds: measures a configuration; infinite if it fails or its results are wrong.
    """
    took = {config: seconds(config) for config in candidates(case)}
    ships, *_ = took
    best = min(took, key=took.__getitem__)
    return (best if took[best] < _WORTH * took[ships] else ships), took

"""Launch configurations that were measured on a device: kept on disk, by device and Triton's version, and taken instead
of those that ship. ``benchmarks/gpu.py --stages tune`` finds them; nothing is measured while a model runs."""

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

from .configs import AttendConfig, attend_config

_WORTH = 0.97  # of the time: what is no faster than that is noise
_RESIDENT = 65536 // 32 // 8  # registers of a multiprocessor, by warps and blocks of registers


@dataclass(frozen=True)
class Case:
    """What `attend_config` chooses by."""

    planes: int
    head_dim: int
    itemsize: int
    queries: int
    codebook: bool
    rotary: bool
    masked: bool


@cache
def name_of(device: torch.device) -> str:
    """What tables are kept by."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{where}, Triton {triton.__version__}"


def _file(name: str) -> Path:
    folder = Path(os.environ.get("KVPASS_CACHE") or "~/.cache/kvpass").expanduser()
    return folder / "launches" / f"{name.replace('/', '-')}.json"


@cache
def table(name: str) -> dict[Case, AttendConfig]:
    """What was stored for ``name``; empty if nothing was. Raises `KVPassError` for a file that cannot be read."""
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
    """Keep ``found`` beside what is stored for ``name``. Returns where."""
    file, rows = _file(name), table(name) | found
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps([dict(case=asdict(case), config=asdict(config)) for case, config in rows.items()]))
    new.replace(file)
    table.cache_clear()
    return file


def configured(case: Case, device: torch.device) -> AttendConfig:
    """The configuration stored for ``case`` on ``device``, or the one that ships."""
    return table(name_of(device)).get(case) or _shipped(case)


@cache
def _shipped(case: Case) -> AttendConfig:
    return attend_config(**asdict(case))


@contextmanager
def trying(case: Case, config: AttendConfig, device: torch.device) -> Iterator[None]:
    """Launch with ``config`` within it, in this process alone."""
    known, before = table(name_of(device)), dict(table(name_of(device)))
    known[case] = config
    try:
        yield
    finally:
        known.clear()
        known.update(before)


def candidates(case: Case) -> Iterator[AttendConfig]:
    """What is worth trying: the one that ships first, then others that differ from it in one or two sizes."""
    first = _shipped(case)
    yield first
    for rows in sorted({max(16, first.rows // 2), first.rows, min(64, 2 * first.rows)}):
        for warps in sorted({max(2, first.warps // 2), first.warps, min(8, 2 * first.warps)}):
            for stages in (2, 3):
                for registers in sorted({first.registers or 255, 255, 168, 128}):
                    resident = max(1, _RESIDENT // (registers // 8 * warps))
                    other = replace(first, rows=rows, warps=warps, stages=stages, registers=registers)
                    if replace(other, resident=first.resident) != first:
                        yield replace(other, resident=resident)


def tune(case: Case, seconds: Callable[[AttendConfig], float]) -> tuple[AttendConfig, dict[AttendConfig, float]]:
    """The fastest of the `candidates`, and what each took. ``seconds`` is infinite for one that is wrong, or fails."""
    took = {config: seconds(config) for config in candidates(case)}
    ships, *_ = took
    best = min(took, key=took.__getitem__)
    return (best if took[best] < _WORTH * took[ships] else ships), took

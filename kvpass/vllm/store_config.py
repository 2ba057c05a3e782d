"""What a vLLM user sets for the prefix store, and which weights its files belong to. This module does not import
vLLM."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd, lcm
from pathlib import Path
from typing import Any

from .. import schemes
from ..errors import KVPassError
from ..fields import check_integers, check_types, shown
from ..schemes import SchemeConfig
from .calibrated_scheme import CalibratedScheme

_TOKENS = 128  # of a chunk, at least: fewer files than blocks of 16 tokens would make
_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json", ".model"}


@dataclass(frozen=True)
class StoreConfig:
    """The ``kv_connector_extra_config`` of `KVPassConnector`.

    scheme: as for ``additional_config``: a name, a dict of a name and options, or the folder of a calibration.
    cpu_bytes: bytes of memory for chunks, of all ranks together; 0 keeps them on disk only.
    path: a folder for chunks on disk, which servers share and restarts find again; None keeps them in memory only.
    disk_bytes: bytes that the folder may take; None is half of the free space.
    blocks_per_chunk: vLLM's blocks per chunk; None is at least 128 tokens. Hits are whole chunks.
    offload_prompt_only: whether tokens that were generated are left out.
    recompute: tokens at the end of a hit that the engine computes again, because errors of the newest tokens matter
        most.
    bits: bits per value of a calibration's codes, on average; None is what it was calibrated for.
    """

    scheme: SchemeConfig | CalibratedScheme
    cpu_bytes: int = 0
    path: str | None = None
    disk_bytes: int | None = None
    blocks_per_chunk: int | None = None
    offload_prompt_only: bool = False
    recompute: int = 64
    bits: float | None = None

    def __post_init__(self) -> None:
        check_types(self)
        _check_not_negative(cpu_bytes=self.cpu_bytes, disk_bytes=self.disk_bytes, recompute=self.recompute)
        if self.blocks_per_chunk is not None:
            check_integers(self, blocks_per_chunk=1)
        if not self.cpu_bytes and self.path is None:
            raise KVPassError(
                "The prefix store has no place: set cpu_bytes, path or both in kv_connector_extra_config."
            )
        if self.bits is not None and not isinstance(self.scheme, CalibratedScheme):
            raise KVPassError("bits is for calibrations: pass a scheme's own options in a dict with its name.")
        if self.disk_bytes is not None and self.path is None:
            raise KVPassError("disk_bytes limits what is in path: set path, too.")

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> "StoreConfig":
        """The config that ``extra`` sets. Raises `KVPassError` for anything else."""
        known = [*cls.__dataclass_fields__]
        if unknown := sorted(set(extra) - set(known)):
            raise KVPassError(f"kv_connector_extra_config has no {shown(unknown)}; it takes {', '.join(known)}.")
        scheme = extra.get("scheme")
        if not isinstance(scheme, (str, dict)):
            raise KVPassError(
                'kv_connector_extra_config needs a scheme: {"scheme": "kivi-4", "cpu_bytes": 4000000000}.'
            )
        if isinstance(scheme, str) and os.path.isdir(os.path.expanduser(scheme)):
            return cls(**{**extra, "scheme": CalibratedScheme.of(scheme).storing(extra.get("bits"))})
        return cls(**{**extra, "scheme": schemes.get(scheme)})

    def chunk_of(self, tokens_per_block: list[int], page_sizes: list[int]) -> int:
        """Blocks per chunk, so that chunks of each group's blocks hold whole pages.

        Raises `KVPassError` if ``blocks_per_chunk`` does not.
        """
        pages = lcm(*page_sizes)
        least = lcm(*(pages // gcd(pages, block) for block in tokens_per_block))
        if self.blocks_per_chunk is None:
            return least * -(-_TOKENS // (least * min(tokens_per_block)))
        if self.blocks_per_chunk % least:
            raise KVPassError(
                f"Chunks of {self.blocks_per_chunk} blocks do not hold whole pages of {pages} tokens: set "
                f"blocks_per_chunk to a multiple of {least}."
            )
        return self.blocks_per_chunk


def _check_not_negative(**values: int | None) -> None:
    """Raise `KVPassError` unless each value is None or not negative."""
    for name, value in values.items():
        if value is not None and value < 0:
            raise KVPassError(f"{name}={value} must not be negative.")


def weights_of(model: str, revision: str | None = None) -> list[list[Any]]:
    """What identifies the weights of ``model``, a folder, a file or the name of a repository in Hugging Face's cache:
    name, bytes and time of its files, or the name of what they link to, which is a hash there.

    Raises `KVPassError` if no weights are found.
    """
    place = folder_of(model, revision)
    files = [place] if place.is_file() else sorted(place.glob("*")) if place.is_dir() else []
    files = [file for file in files if file.suffix in _SUFFIXES and file.is_file()]
    if not files:
        raise KVPassError(
            f"The weights of {model!r} are not on this machine's disk, so files of the prefix store could be taken for "
            "those of other weights: leave path out, or serve a downloaded folder."
        )
    return [
        [file.name, os.path.basename(os.path.realpath(file))]
        if file.is_symlink()
        else [file.name, file.stat().st_size, file.stat().st_mtime_ns]
        for file in files
    ]


def folder_of(model: str, revision: str | None = None) -> Path:
    """The folder or file of ``model``, which may be the name of a repository in Hugging Face's cache."""
    place = Path(model)
    if not place.exists():
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, "config.json", revision=revision)
        place = Path(found).parent if isinstance(found, str) else place
    return place

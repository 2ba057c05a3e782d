"""`ChunkFiles`: chunks on disk, shared by processes and kept over restarts.

One safetensors file per chunk and rank, with a SHA-256 over its tensors and over what they belong to. A file appears
under its name only when it is complete. A reader takes nothing on trust: a file that is damaged, truncated, renamed,
or of another store is deleted, and the chunk is computed again.
"""

import hashlib
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..digest import digest
from ..errors import KVPassError
from .chunks import ANY, Shapes

logger = logging.getLogger(__name__)

_FORMAT = 1
_ENDING = ".safetensors"
_SPARE = 0.9  # of the limit: what is left after files were deleted
_STALE = 3600  # seconds after which an incomplete file is that of a dead process


class DamagedFileError(KVPassError):
    """A file of the store that cannot be used."""


class ChunkFiles:
    """The files of one store.

    path: a folder; stores of several models, schemes and ranks share it.
    belongs_to: JSON of everything that determines the meaning of a chunk. Stores for which it differs do not see each
        other's files.
    rank: whose attention heads the files hold.
    limit: bytes that all stores in ``path`` may take; None is what they take now and half of the free space. The files
        used least recently are deleted first.

    Raises `KVPassError` if the folder cannot be made.
    """

    def __init__(self, path: str | Path, belongs_to: Any, rank: int = 0, limit: int | None = None) -> None:
        self.root, self.rank = Path(path), rank
        text = json.dumps([_FORMAT, belongs_to], sort_keys=True)
        self._facts = {"belongs_to": json.loads(text), "rank": rank}  # as it is read again
        self.folder = self.root / hashlib.sha256(text.encode()).hexdigest()[:24]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._nbytes = sum(size for _, size, _ in self._all(clean=True))
            self.limit = self._nbytes + shutil.disk_usage(self.root).free // 2 if limit is None else limit
        except OSError as error:
            raise KVPassError(f"path={str(path)!r} cannot be used: {error}. Choose a writable folder.") from error

    def file(self, key: bytes, rank: int | None = None) -> Path:
        """The file of a chunk."""
        text = key.hex()
        return self.folder / text[:2] / f"{text}.{self.rank if rank is None else rank}{_ENDING}"

    def has(self, key: bytes, ranks: int = 1) -> bool:
        """Whether there are files of this chunk for all of ``ranks``; what is in them is not looked at."""
        return all(self.file(key, rank).is_file() for rank in range(ranks))

    def write(self, key: bytes, tensors: Mapping[str, Tensor]) -> int:
        """Write a chunk, and return its bytes. Raises `OSError`, for instance if the disk is full."""
        path = self.file(key)
        facts = {**self._facts, "key": key.hex()}
        metadata = {"kvpass": json.dumps({"facts": facts, "sha256": digest(facts, tensors)})}
        path.parent.mkdir(exist_ok=True)
        partial = path.with_name(f"{uuid.uuid4().hex}.partial")
        try:
            try:
                save_file(dict(tensors), partial, metadata)
            except SafetensorError as error:  # what safetensors raises for an error of the system
                raise OSError(str(error)) from error
            nbytes = partial.stat().st_size
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        self._nbytes += nbytes
        if self._nbytes > self.limit:
            self._make_room()
        return nbytes

    def read(self, key: bytes, shapes: Shapes) -> dict[str, Tensor]:
        """The tensors of a chunk, which must have these ``shapes``. Raises `DamagedFileError` if the file is gone or is
        not exactly what `write` wrote for this key, and deletes it."""
        path = self.file(key)
        try:
            with safe_open(path, "pt") as file:
                metadata = json.loads((file.metadata() or {})["kvpass"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no dict)
            facts, sha256 = metadata["facts"], metadata["sha256"]
            if facts != {**self._facts, "key": key.hex()}:
                raise DamagedFileError("It is the file of another chunk.")
            if not _fit(tensors, shapes):
                raise DamagedFileError("Its tensors have other shapes.")
            if digest(facts, tensors) != sha256:
                raise DamagedFileError("Its SHA-256 differs.")
        except FileNotFoundError as error:
            raise DamagedFileError(f"{path} is gone.") from error
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
            self.drop(key)  # KVPassError is a ValueError
            raise DamagedFileError(f"{path} is damaged and was deleted: {error}") from error
        try:
            os.utime(path)  # used now
        except OSError:  # deleted by another process, or not ours: it was read all the same
            logger.debug("The time of %s cannot be set.", path)
        return tensors

    def drop(self, key: bytes) -> None:
        """Delete the file of a chunk, if it is there."""
        self.file(key).unlink(missing_ok=True)

    def _all(self, clean: bool = False) -> list[tuple[float, int, Path]]:
        """Time of last use, bytes and path of each file of all stores. clean: delete what dead processes left."""
        found = []
        for path in self.root.glob("*/*/*"):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            if path.suffix == _ENDING:
                found.append((status.st_mtime, status.st_size, path))
            elif clean and path.suffix == ".partial" and status.st_mtime < time.time() - _STALE:
                path.unlink(missing_ok=True)
        return found

    def _make_room(self) -> None:
        """Delete the files used least recently, of any store, until some space is spare."""
        files = sorted(self._all())
        self._nbytes = sum(size for _, size, _ in files)
        for _, size, path in files:
            if self._nbytes <= _SPARE * self.limit:
                return
            path.unlink(missing_ok=True)
            self._nbytes -= size


def _fit(tensors: Mapping[str, Tensor], shapes: Shapes) -> bool:
    return tensors.keys() == shapes.keys() and all(
        x.dtype == shapes[name][1] and x.dim() == len(shapes[name][0])
        and all(wanted in (size, ANY) for size, wanted in zip(x.shape, shapes[name][0], strict=True))
        for name, x in tensors.items()
    )  # fmt: skip

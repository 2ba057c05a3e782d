"""The workers' side of the prefix store: threads that quantize blocks into chunks, and dequantize chunks into blocks.

vLLM does not write to the blocks of a job before it has waited for it, so threads read them beside the steps.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker, TransferResult

from ..errors import KVPassError
from ..prefix_store import ChunkCodec, ChunkFiles, EntropyChunkCodec
from .engine_blocks import EngineBlocks
from .store_manager import ChunkJob

logger = init_logger("vllm.kvpass.store")

_TOKENS = 2048  # quantized at a time, after they were copied out of blocks
_PAUSE = 0.002  # seconds to wait for a thread when the engine has nothing else to do
_QUIET = 60  # seconds between warnings about a disk


class Group(NamedTuple):
    """One cache group: how its chunks are stored, the blocks of its layers, and blocks per chunk."""

    codec: ChunkCodec | EntropyChunkCodec
    layers: list[EngineBlocks]
    per: int


class Part(NamedTuple):
    """One chunk of a job: its number in the prompt, its blocks, and how many of its blocks come before them."""

    key: bytes
    number: int
    blocks: list[int]
    skip: int


@dataclass
class _Job:
    """A job in progress. read: whether its blocks have been copied, so that vLLM may write to them."""

    read: threading.Event
    done: threading.Event


class StoreWorker(OffloadingWorker):
    """Runs stores in one thread and loads in another, in order.

    groups: by the index of the cache group.
    """

    def __init__(self, groups: dict[int, Group], files: ChunkFiles | None) -> None:
        self.groups, self.files = groups, files
        self.idle = False
        """Whether the engine has nothing to do but wait for jobs."""
        self.lost: set[bytes] = set()
        """Chunks of finished jobs that could not be stored or loaded."""
        self.grown: dict[bytes, int] = {}
        """Chunks that came to memory, and by how many bytes they are larger than expected."""
        self.failed: set[int] = set()
        """Finished loads whose blocks are not all written."""
        self._memory: dict[bytes, tuple[int, dict[str, Tensor]]] = {}
        self._first_generation = 0
        self._jobs: dict[int, _Job] = {}
        self._finished: list[tuple[TransferResult, set[bytes]]] = []
        self._lock, self._progress = threading.Lock(), threading.Event()
        device = next(iter(groups.values())).layers[0].device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._storing, self._loading = (
            ThreadPoolExecutor(1, thread_name_prefix=f"kvpass-{name}", initializer=_any_core)
            for name in ("store", "load")
        )
        self._warned = 0.0

    # ------------------------------------------------------------ vLLM's side

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        assert isinstance(dst_spec, ChunkJob)
        return self._submit(self._storing, self._store, job_id, src_spec, dst_spec)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        assert isinstance(src_spec, ChunkJob)
        return self._submit(self._loading, self._load, job_id, dst_spec, src_spec)

    def get_finished(self) -> list[TransferResult]:
        if self.idle and self._jobs and not self._finished:
            self._progress.wait(_PAUSE)  # otherwise threads would compete with steps that do nothing
        with self._lock:
            finished, self._finished = self._finished, []
            self._progress.clear()
        for result, lost in finished:
            del self._jobs[result.job_id]
            self.lost |= lost
        return [result for result, _ in finished]

    def wait(self, job_ids: set[int]) -> None:
        for job_id in job_ids:
            if (job := self._jobs.get(job_id)) is not None:
                job.read.wait()

    def shutdown(self) -> None:
        for threads in (self._storing, self._loading):
            threads.shutdown(wait=True, cancel_futures=True)
        self._memory.clear()

    # ------------------------------------------------------------ threads

    def _submit(self, threads: ThreadPoolExecutor, run: Callable, job_id: int, blocks, job: ChunkJob) -> bool:
        with self._lock:
            self._drop(job)
        self._jobs[job_id] = state = _Job(threading.Event(), threading.Event())
        event = torch.cuda.current_stream().record_event() if self._stream is not None else None
        threads.submit(self._run, run, job_id, state, event, blocks, job)
        return True

    def _drop(self, job: ChunkJob) -> None:
        for key, generation in job.dropped.items():
            if key in self._memory and self._memory[key][0] <= generation:
                del self._memory[key]
        if job.first_generation > self._first_generation:
            self._first_generation = job.first_generation
            self._memory = {key: one for key, one in self._memory.items() if one[0] >= job.first_generation}

    @torch.inference_mode()
    def _run(self, run: Callable, job_id: int, state: _Job, event, blocks: GPULoadStoreSpec, job: ChunkJob) -> None:
        start, nbytes, lost = time.perf_counter(), 0, set(job.keys)
        try:
            with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
                if self._stream is not None:
                    self._stream.wait_event(event)
                nbytes, lost = run(state, blocks, job)
                if self._stream is not None:
                    self._stream.synchronize()
        except Exception:  # a bug must not stop the engine: these chunks are computed again
            logger.exception("The prefix store could not move %d chunks.", len(job.keys))
        took = time.perf_counter() - start
        with self._lock:
            if lost and run == self._load:
                self.failed.add(job_id)
            self._finished.append((TransferResult(job_id, True, nbytes, took), lost))
            state.read.set()
            state.done.set()
            self._progress.set()

    def _store(self, state: _Job, blocks: GPULoadStoreSpec, job: ChunkJob) -> tuple[int, set[bytes]]:
        """Bytes stored, and the chunks that are kept nowhere."""
        nbytes, lost = 0, set()
        for group, parts in self._parts(blocks, job):
            whole = [part for part in parts if len(part.blocks) == group.per]
            lost |= {part.key for part in parts} - {part.key for part in whole}  # freed by a sliding window
            for some in _batches(whole, _TOKENS // group.codec.tokens):
                keys, values = _read(group, [block for part in some for block in part.blocks])
                if some[-1].key == job.keys[-1]:
                    self._synchronize()
                    state.read.set()
                try:
                    chunks = group.codec.quantize([part.number for part in some], keys, values)
                except KVPassError as error:  # NaN, for instance
                    logger.warning("%d chunks are not stored: %s", len(some), error)
                    lost |= {part.key for part in some}
                    continue
                for part, chunk in zip(some, chunks, strict=True):
                    nbytes += sum(x.nbytes for x in chunk.values())
                    written = job.on_disk and self._write(part.key, chunk)
                    if not self._keep(part, chunk, group, job) and not written:
                        lost.add(part.key)
        return nbytes, lost

    def _load(self, state: _Job, blocks: GPULoadStoreSpec, job: ChunkJob) -> tuple[int, set[bytes]]:
        """Bytes loaded, and the chunks that cannot be used."""
        nbytes, lost = 0, set()
        for group, parts in self._parts(blocks, job):
            for some in _batches(parts, _TOKENS // group.codec.tokens):
                found = {part.key: chunk for part in some if (chunk := self._fetch(part, group, job)) is not None}
                lost |= {part.key for part in some} - found.keys()
                if len(found) < len(some):
                    return nbytes, lost  # all of the request's tokens are looked up again
                nbytes += sum(x.nbytes for chunk in found.values() for x in chunk.values())
                numbers = [part.number for part in some]
                _write(group, some, *group.codec.dequantize(numbers, list(found.values())))
        return nbytes, lost

    def _parts(self, blocks: GPULoadStoreSpec, job: ChunkJob) -> Iterator[tuple[Group, list[Part]]]:
        """The chunks of each group and their blocks. Blocks of a job are in order; those that a prompt does not need
        are missing at the beginning of its first chunk, and at the end of its last one."""
        ids, numbers, start = blocks.block_ids.tolist(), dict(zip(job.keys, job.numbers, strict=True)), 0
        for place, (index, size) in enumerate(zip(self.groups, blocks.group_sizes, strict=True)):
            group, theirs = self.groups[index], ids[start : start + size]
            keys = [key for key in job.keys if int.from_bytes(key[-4:], "big") == index]
            start += size
            parts, skip = [], blocks.block_indices[place] % group.per
            for key in keys:
                parts.append(Part(key, numbers[key], theirs[: group.per - skip], skip))
                theirs, skip = theirs[group.per - skip :], 0
            yield group, parts

    def _fetch(self, part: Part, group: Group, job: ChunkJob) -> dict[str, Tensor] | None:
        """A chunk from memory, else from its file."""
        with self._lock:
            kept = self._memory.get(part.key)
        if kept is not None:
            return kept[1]
        if self.files is None or not job.on_disk:
            return None
        try:
            chunk = self.files.read(part.key, group.codec.shapes(part.number == 0))
        except KVPassError as error:
            logger.warning("A prefix is computed again: %s", error)
            return None
        self._keep(part, chunk, group, job)
        return chunk

    def _keep(self, part: Part, chunk: dict[str, Tensor], group: Group, job: ChunkJob) -> bool:
        """Keep a chunk in memory, if the scheduler has made room for it."""
        grown = sum(x.nbytes for x in chunk.values()) - group.codec.nbytes(part.number == 0)
        with self._lock:
            if part.key not in job.in_memory or job.generation < self._first_generation:
                return False
            self._memory[part.key] = job.generation, chunk
            if grown:
                self.grown[part.key] = grown
            return True

    def take_grown(self) -> dict[bytes, int]:
        """`grown`, which is empty afterwards."""
        with self._lock:
            grown, self.grown = self.grown, {}
        return grown

    def _write(self, key: bytes, chunk: dict[str, Tensor]) -> bool:
        """Write the file of a chunk; False if that is not possible now."""
        if self.files is None:
            return False
        try:
            self.files.write(key, chunk)
        except OSError as error:
            if time.monotonic() - self._warned > _QUIET:
                self._warned = time.monotonic()
                logger.warning("The prefix store cannot write to %s: %s", self.files.folder, error)
            return False
        return True

    def _synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def _read(group: Group, blocks: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    at = torch.tensor(blocks, device=group.layers[0].device)
    keys, values = zip(*(layer.read(at) for layer in group.layers), strict=True)
    return list(keys), list(values)


def _write(group: Group, parts: Sequence[Part], keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Write those tokens of whole chunks whose blocks are wanted."""
    size, tokens, device = group.codec.tokens // group.per, [], group.layers[0].device
    for number, part in enumerate(parts):
        start = number * group.codec.tokens + part.skip * size
        tokens.append(torch.arange(start, start + len(part.blocks) * size, device=device))
    wanted = torch.cat(tokens)
    at = torch.tensor([block for part in parts for block in part.blocks], device=device)
    for layer, k, v in zip(group.layers, keys, values, strict=True):
        layer.write(at, k.index_select(1, wanted), v.index_select(1, wanted))


def _batches(parts: list[Part], size: int) -> Iterator[list[Part]]:
    size = max(1, size)
    for start in range(0, len(parts), size):
        yield parts[start : start + size]


def _any_core() -> None:
    """Let a thread run where the engine's parent may: vLLM binds a worker on CPUs to cores that its steps need."""
    try:
        os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
    except (AttributeError, OSError):  # not Linux, or not allowed
        logging.getLogger(__name__).debug("Threads of the prefix store run on the cores of this process.")

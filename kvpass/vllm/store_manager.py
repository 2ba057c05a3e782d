"""The scheduler's side of the prefix store: which chunks there are, which to load, store and drop."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    get_offload_group_idx,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from ..prefix_store import ChunkFiles, ChunkIndex


@dataclass
class ChunkJob(LoadStoreSpec):
    """What workers do with the chunks of one job.

    keys: the chunks, in the order of their blocks. numbers: the number of each in its prompt.
    in_memory: those to keep in memory, which have this ``generation``.
    on_disk: whether files may be read or written.
    dropped: chunks to drop from memory first, unless they are of a later generation than here.
    first_generation: what is older was dropped by a reset.
    """

    keys: list[bytes]
    numbers: list[int]
    in_memory: set[bytes]
    generation: int
    on_disk: bool
    dropped: dict[bytes, int] = field(default_factory=dict)
    first_generation: int = 0


@dataclass(frozen=True)
class GroupSizes:
    """Tokens per chunk of a cache group, and expected bytes per chunk of all ranks: of the first of a prompt, and of
    others."""

    tokens: int
    first: int
    others: int


class StoreManager(OffloadingManager):
    """The index of a store: memory, then files.

    groups: by the index of the cache group. ranks: the workers, each with its own files.
    """

    def __init__(self, limit: int, files: ChunkFiles | None, groups: Mapping[int, GroupSizes], ranks: int) -> None:
        self.index, self.files, self.groups, self.ranks = ChunkIndex(limit), files, groups, ranks
        self.private: set[str] = set()
        """Requests whose chunks stay in memory, because their key does not identify what they depend on."""
        self._first_generation = 0
        self._dropped: dict[bytes, int] = {}  # in the next job
        self._writing: set[bytes] = set()  # to disk only
        self._loading: dict[str, list[bytes]] = {}  # from or to memory, by request

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self.private.discard(req_context.req_id)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if (entry := self.index.get(key)) is not None:
            return LookupResult.HIT if entry.ready else LookupResult.HIT_PENDING
        if key in self._writing:
            return LookupResult.HIT_PENDING
        return LookupResult.HIT if self._in_file(key, req_context) else LookupResult.MISS

    def _in_file(self, key: bytes, req_context: ReqContext) -> bool:
        return self._on_disk(req_context) and self.files is not None and self.files.has(key, self.ranks)

    def _on_disk(self, req_context: ReqContext) -> bool:
        return self.files is not None and req_context.req_id not in self.private

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        return CacheHitSource.HOST if key in self.index else CacheHitSource.DISK

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self.index.touch(keys)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> ChunkJob:
        keys = list(keys)
        in_files = [key for key in keys if key not in self.index]
        dropped = self.index.reserve([(key, self._nbytes(key, req_context)) for key in in_files], keep=keys)
        new = {key for key in in_files if key in self.index}
        for key in keys:
            if key not in new and (entry := self.index.get(key)) is not None:
                entry.readers += 1
        self._loading[req_context.req_id] = [key for key in keys if key in self.index]
        self.index.touch(keys)
        return self._job(keys, new, dropped, req_context)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        for key in self._loading.pop(req_context.req_id, ()):
            if (entry := self.index.get(key)) is None:
                continue
            if entry.ready:
                entry.readers -= 1
            entry.ready = True

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput:
        new = [
            key for key in keys
            if key not in self.index and key not in self._writing and not self._in_file(key, req_context)
        ]  # fmt: skip
        dropped = self.index.reserve([(key, self._nbytes(key, req_context)) for key in new], keep=set(keys))
        in_memory = {key for key in new if key in self.index}
        if self._on_disk(req_context):
            self._writing.update(key for key in new if key not in in_memory)
        else:
            new = [key for key in new if key in in_memory]
        return PrepareStoreOutput(new, self._job(new, in_memory, dropped, req_context), list(map(OffloadKey, dropped)))

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        for key in keys:
            self._writing.discard(key)
            if (entry := self.index.get(key)) is not None and success:
                entry.ready = True

    def forget(self, keys: Collection[bytes]) -> None:
        """Chunks that a worker could not load or store."""
        for key in keys:
            if (entry := self.index.get(key)) is not None:
                self._dropped[key] = entry.generation
                self.index.drop(key)

    def grow(self, sizes: Mapping[bytes, int]) -> None:
        """By how many bytes chunks turned out larger than was reserved, or smaller."""
        for key, nbytes in sizes.items():
            self._dropped |= self.index.grow(key, nbytes)

    def reset_cache(self) -> None:
        """Forget everything. Files are not used from now on: weights may have changed, which vLLM does not say."""
        self.index.clear()
        self._first_generation = self.index.generation
        self._writing.clear()
        self._loading.clear()
        self.files = None

    def _job(self, keys: list, in_memory: set, dropped: dict[bytes, int], req_context: ReqContext) -> ChunkJob:
        dropped, self._dropped = {**self._dropped, **dropped}, {}
        numbers = [self._end(key, req_context) // self.groups[get_offload_group_idx(key)].tokens - 1 for key in keys]
        on_disk, generation = self._on_disk(req_context), self.index.generation
        return ChunkJob(keys, numbers, in_memory, generation, on_disk, dropped, self._first_generation)

    def _nbytes(self, key: OffloadKey, req_context: ReqContext) -> int:
        sizes = self.groups[get_offload_group_idx(key)]
        return sizes.first if self._end(key, req_context) == sizes.tokens else sizes.others

    @staticmethod
    def _end(key: OffloadKey, req_context: ReqContext) -> int:
        """Tokens of the prompt up to the end of a chunk."""
        found = req_context.get_offload_key_position(key)
        assert found is not None, "vLLM sets the position of each key that it passes"
        return found

"""`ChunkIndex`: which chunks are in memory, within a limit in bytes, and which of them to drop next."""

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass
class Entry:
    """A chunk in memory.

    generation: number of the store that brought it here. A chunk that is dropped and stored again has another.
    ready: whether its bytes have arrived. readers: loads in progress.
    """

    nbytes: int
    generation: int
    ready: bool = False
    readers: int = 0


class ChunkIndex:
    """Chunks by key, at most ``limit`` bytes; the one used least recently is dropped first.

    A chunk that is being stored or loaded is not dropped.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.nbytes, self.generation = limit, 0, 0
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def get(self, key: bytes) -> Entry | None:
        """The chunk of ``key``, without marking it as used."""
        return self._entries.get(key)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Mark chunks as used, given in the order of a prompt, so that the end of the prompt is dropped first."""
        for key in reversed(list(keys)):
            if key in self._entries:
                self._entries.move_to_end(key)

    def reserve(self, sizes: Iterable[tuple[bytes, int]], keep: Collection[bytes] = ()) -> dict[bytes, int]:
        """Make room for chunks of these keys and bytes, in order, until one does not fit.

        keep: chunks that must not be dropped. Returns the chunks dropped for them, with their generations. The new ones
        are in the index afterwards, and not ready.
        """
        dropped: dict[bytes, int] = {}
        self.generation += 1
        for key, nbytes in sizes:
            if key in self._entries:
                continue
            for other in self._to_drop(nbytes, {*keep, key}):
                dropped[other] = self._entries[other].generation
                self.drop(other)
            if self.nbytes + nbytes > self.limit:
                break
            self._entries[key] = Entry(nbytes, self.generation)
            self.nbytes += nbytes
        return dropped

    def _to_drop(self, nbytes: int, keep: Collection[bytes]) -> list[bytes]:
        """The chunks to drop so that ``nbytes`` fit; none if that cannot be reached."""
        found, freed = [], 0
        for key, entry in self._entries.items():
            if self.nbytes - freed + nbytes <= self.limit:
                break
            if entry.ready and not entry.readers and key not in keep and entry.generation < self.generation:
                found.append(key)
                freed += entry.nbytes
        return found if self.nbytes - freed + nbytes <= self.limit else []

    def grow(self, key: bytes, nbytes: int) -> dict[bytes, int]:
        """A chunk turned out ``nbytes`` larger than was reserved, or smaller. Returns chunks that were dropped for it,
        with their generations; what is in use stays, even if the limit is exceeded until it can be dropped."""
        if (entry := self._entries.get(key)) is not None:
            entry.nbytes += nbytes
            self.nbytes += nbytes
        dropped: dict[bytes, int] = {}
        for other, one in list(self._entries.items()):
            if self.nbytes <= self.limit:
                break
            if one.ready and not one.readers:
                dropped[other] = one.generation
                self.drop(other)
        return dropped

    def drop(self, key: bytes) -> None:
        """Forget a chunk, if it is there."""
        if (entry := self._entries.pop(key, None)) is not None:
            self.nbytes -= entry.nbytes

    def clear(self) -> None:
        """Forget all chunks. Those stored from now on have a later generation."""
        self._entries.clear()
        self.nbytes = 0
        self.generation += 1

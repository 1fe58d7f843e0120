"""Shard indices that this process has read, kept until the shard changes."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import NamedTuple

from scgpu_tasks.io.layout import ArrayLayout, ChunkTable

MAX_BYTES = 64 * 2**20
"""Most bytes of the tables that are kept."""

SETTLED_NS = 2_000_000_000
"""Age of a file's last change from which its stamp tells it from every later version."""


class Stamp(NamedTuple):
    """What tells one version of a file from the next."""

    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


_Key = tuple[str, tuple[int, ...], int, bool, bool, bool]


class IndexCache:
    """Tables by path; the ones not used for longest go first."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._known: OrderedDict[_Key, tuple[Stamp, ChunkTable]] = OrderedDict()
        self._lock = threading.Lock()
        self._max_bytes = max_bytes
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all tables."""
        return self._nbytes

    def find(self, path: str, stamp: Stamp, layout: ArrayLayout) -> ChunkTable | None:
        """Return the table of this version of a file, where it is known."""
        key = _key(path, layout)
        with self._lock:
            known = self._known.get(key)
            if known is None or known[0] != stamp:
                return None
            self._known.move_to_end(key)
            return known[1]

    def keep(self, path: str, stamp: Stamp, layout: ArrayLayout, table: ChunkTable) -> None:
        """Keep the table of a file that did not change while it was read.

        File systems count time in steps of milliseconds: a file that has just been written may
        be written again without a new stamp, so its table is not kept.
        """
        if time.time_ns() - max(stamp.mtime_ns, stamp.ctime_ns) < SETTLED_NS:
            return
        key = _key(path, layout)
        with self._lock:
            before = self._known.pop(key, None)
            self._nbytes += _nbytes(table) - (0 if before is None else _nbytes(before[1]))
            self._known[key] = stamp, table
            while self._nbytes > self._max_bytes:
                _, (_, oldest) = self._known.popitem(last=False)
                self._nbytes -= _nbytes(oldest)

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._known.clear()
            self._nbytes = 0


def _key(path: str, layout: ArrayLayout) -> _Key:
    # All of a layout that a table depends on.
    kind = layout.index_at_end, layout.zstd, layout.crc32c
    return path, layout.grid, layout.chunk_nbytes, *kind


def _nbytes(table: ChunkTable) -> int:
    return int(table.offset.nbytes + table.size.nbytes + table.damage.nbytes)


indices = IndexCache()
"""The shard indices of this process."""

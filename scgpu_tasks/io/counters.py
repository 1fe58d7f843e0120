"""How many chunks and bytes took which path, for every array of this process."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field, fields


@dataclass
class ArrayCounts:
    """What was read of one array.

    Parameters
    ----------
    gpu_chunks, gpu_bytes
        Chunks that the GPU decoded, and their decoded bytes.
    gpu_stored_bytes
        Bytes of files that were read for them.
    absent_chunks
        Chunks that are not stored: the fill value was written.
    small_chunks
        Chunks of small requests, which the host decodes because that is sooner done.
    refused_chunks
        Chunks that the GPU refused and the host decoded, by reason.
    host_requests, host_bytes
        Requests that the fallback pipeline served, by reason, and the bytes of their outputs.
    """

    gpu_chunks: int = 0
    gpu_bytes: int = 0
    gpu_stored_bytes: int = 0
    absent_chunks: int = 0
    small_chunks: int = 0
    refused_chunks: Counter[str] = field(default_factory=Counter)
    host_requests: Counter[str] = field(default_factory=Counter)
    host_bytes: int = 0

    def add(self, other: ArrayCounts) -> None:
        """Add what another request read."""
        self.gpu_chunks += other.gpu_chunks
        self.gpu_bytes += other.gpu_bytes
        self.gpu_stored_bytes += other.gpu_stored_bytes
        self.absent_chunks += other.absent_chunks
        self.small_chunks += other.small_chunks
        self.refused_chunks.update(other.refused_chunks)
        self.host_requests.update(other.host_requests)
        self.host_bytes += other.host_bytes


_lock = threading.Lock()
_counts: dict[str, ArrayCounts] = {}


def count(array: str, counts: ArrayCounts) -> None:
    """Add the counts of one request to those of an array.

    Parameters
    ----------
    array
        Path of the store and the array.
    """
    with _lock:
        _counts.setdefault(array, ArrayCounts()).add(counts)


def read_statistics() -> dict[str, dict[str, object]]:
    """Return the counts of every array that a GPU buffer was read from in this process.

    Returns
    -------
    By path of the array, the fields of :class:`ArrayCounts`; a copy.
    """
    with _lock:
        return {array: _as_dict(counts) for array, counts in sorted(_counts.items())}


def _as_dict(counts: ArrayCounts) -> dict[str, object]:
    values = {f.name: getattr(counts, f.name) for f in fields(counts)}
    return {k: dict(v) if isinstance(v, Counter) else v for k, v in values.items()}


def reset_statistics() -> None:
    """Start counting anew."""
    with _lock:
        _counts.clear()

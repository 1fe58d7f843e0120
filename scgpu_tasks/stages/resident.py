"""Blocks that stay on a GPU from one stage to the next, so that the disk is read once.

A worker keeps the rows it has read, whole numbers in their smallest type, under the matrix they
come from. Another stage that visits the same matrix on the same worker finds them there; where
they are not, it reads. One matrix at a time is kept: rows of another make room.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from scgpu_tasks.kernels.arrays import is_on_gpu
from scgpu_tasks.kernels.rows import Rows
from scgpu_tasks.kernels.select import pack

# Share of a GPU's memory that kept rows may take: the rest is for blocks under way.
SHARE = 0.5


@dataclass(frozen=True)
class Place:
    """Where rows come from: the matrix, and the first row."""

    matrix: str
    start: int
    stop: int


class _Store:
    def __init__(self) -> None:
        self.budget: int | None = None
        self._matrix = ""
        self._rows: dict[Place, list[Rows]] = {}
        self._size = 0
        self._lock = threading.Lock()

    def put(self, place: Place, rows: list[Rows]) -> bool:
        size = sum(sum(int(part.nbytes) for part in r[:3]) for r in rows)
        with self._lock:
            if place.matrix != self._matrix:
                self._rows.clear()
                self._matrix, self._size = place.matrix, 0
            if self.budget is None:
                self.budget = int(SHARE * gpu_bytes())
            if place in self._rows:
                return True
            if self._size + size > self.budget:
                return False
            self._rows[place] = rows
            self._size += size
            return True

    def get(self, place: Place) -> list[Rows] | None:
        with self._lock:
            return self._rows.get(place)

    def starts(self, matrix: str) -> list[int]:
        with self._lock:
            return sorted(place.start for place in self._rows if place.matrix == matrix)

    def drop(self, matrix: str | None) -> None:
        with self._lock:
            if matrix is None or matrix == self._matrix:
                self._rows.clear()
                self._matrix, self._size = "", 0

    @property
    def size(self) -> int:
        return self._size


_store = _Store()


def keep(place: Place, rows: list[Rows]) -> bool:
    """Keep rows on this process's GPU, if they are on it and there is room."""
    if not all(is_on_gpu(r.data) for r in rows):
        return False
    return _store.put(place, [_own(pack(r)) for r in rows])


def _own(rows: Rows) -> Rows:
    """Copy what is a part of a larger buffer: it would be kept too, or be written to again."""
    indptr, indices, data = (p if p.base is None else p.copy() for p in rows[:3])
    return Rows(indptr, indices, data, rows.n_cols)


def find(place: Place) -> list[Rows] | None:
    """Give rows that are kept; they must not be changed."""
    return _store.get(place)


def starts(matrix: str) -> list[int]:
    """First rows of what is kept of a matrix."""
    return _store.starts(matrix)


def drop(matrix: str | None = None) -> None:
    """Forget what is kept of a matrix, or everything."""
    _store.drop(matrix)


def kept_bytes() -> int:
    """Bytes that are kept."""
    return _store.size


def identity(source: Any) -> str | None:
    """Name a source's content; None where it has no fingerprint."""
    fingerprint = getattr(source, "fingerprint", None)
    if not fingerprint:
        return None
    return f"{source.store}|{source.element}|{fingerprint}"


def gpu_bytes() -> int:
    """Memory of its GPU that this process may take."""
    from scgpu_tasks.kernels._gpu.module import memory_limit

    return memory_limit()


def fits(source: Any, n_bytes: int) -> bool:
    """Tell whether all rows of a sparse matrix are likely to fit on GPUs of so many bytes.

    Counts take two bytes at most in nearly every store, and column numbers their stored type;
    of a store that turns out larger, a part is kept.
    """
    nnz = getattr(source, "nnz", None)
    if not nnz:
        return False
    column = 2 if source.shape[1] <= 1 << 16 else 4
    return nnz * (column + 2) <= SHARE * n_bytes

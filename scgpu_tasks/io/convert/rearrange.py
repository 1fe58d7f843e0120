"""Rows of a sparse matrix with their entries sorted, and those of one place summed."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from scgpu_tasks.io.convert import sorting

BLOCK = 1 << 20
Rows = Callable[[int, int], np.ndarray]


class SortedRows:
    """A sparse matrix as it is to be stored, computed from rows as they are stored now.

    Parameters
    ----------
    indptr
        Row borders of the stored matrix, int64.
    indices, data
        Functions that return entries start:stop of the stored matrix.
    new_indptr
        Row borders after entries of the same place are summed; None: they are not.
    """

    def __init__(
        self,
        indptr: np.ndarray,
        indices: Rows,
        data: Rows,
        *,
        new_indptr: np.ndarray | None = None,
    ) -> None:
        self._from, self._indices, self._data = indptr, indices, data
        self.indptr = indptr if new_indptr is None else new_indptr
        self._dedupe = new_indptr is not None

    def indices(self, start: int, stop: int) -> np.ndarray:
        """Column numbers of entries start:stop of the result."""
        return self._collect(start, stop, with_data=False)

    def data(self, start: int, stop: int) -> np.ndarray:
        """Values of entries start:stop of the result; sums are in a wider type."""
        return self._collect(start, stop, with_data=True)

    def _collect(self, start: int, stop: int, *, with_data: bool) -> np.ndarray:
        first = int(np.searchsorted(self.indptr, start, "right")) - 1
        last = int(np.searchsorted(self.indptr, stop, "left"))
        parts = [
            self._rows(a, b, with_data=with_data)
            for a, b in row_blocks(self._from, first, last)
        ]
        values = np.concatenate(parts) if len(parts) > 1 else parts[0]
        skip = start - int(self.indptr[first])
        return values[skip : skip + stop - start]

    def _rows(self, a: int, b: int, *, with_data: bool) -> np.ndarray:
        low, high = int(self._from[a]), int(self._from[b])
        indptr = np.asarray(self._from[a : b + 1]) - low
        indices = self._indices(low, high)
        order = sorting.order_rows(indptr, indices)
        values = self._data(low, high)[order] if with_data else indices[order]
        if not self._dedupe:
            return values
        first = sorting.first_of_each(indptr, indices[order])
        if not with_data:
            return values[first]
        return sorting.sum_groups(values, first)


def row_blocks(
    indptr: np.ndarray, first: int, last: int, most: int = BLOCK
) -> Iterator[tuple[int, int]]:
    """Cut rows first:last into ranges of at most `most` entries; a longer row stays whole."""
    a = first
    while a < last:
        room = int(indptr[a]) + most
        b = int(np.searchsorted(indptr, room, "right")) - 1
        b = min(max(b, a + 1), last)
        yield a, b
        a = b


def save_array(path: Path, values: np.ndarray) -> None:
    """Write an array under a name that only ever holds a complete one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{uuid.uuid4().hex}.part.npy")
    np.save(part, values)
    part.replace(path)


def load_array(path: Path) -> np.ndarray:
    """Map an array that `save_array` wrote."""
    values: np.ndarray = np.load(path, mmap_mode="r")
    return values

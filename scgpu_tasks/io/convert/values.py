"""The values of a destination array, computed from the source a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from scgpu_tasks.errors import DataError, FormatError
from scgpu_tasks.io.convert.plan import ArrayItem, Plan, SparseItem, sparse_arrays
from scgpu_tasks.io.convert.prepared import Prepared
from scgpu_tasks.io.convert.readers import ArrayReader
from scgpu_tasks.io.convert.rearrange import SortedRows
from scgpu_tasks.io.convert.transpose import Transposition
from scgpu_tasks.io.source import Source

Rows = Callable[[int, int], np.ndarray]
_INDPTR_ROWS = 1 << 20


@dataclass(frozen=True)
class StoredRows:
    """Rows of a sparse matrix before they are sorted: borders, and functions that read."""

    indptr: np.ndarray
    indices: Rows
    data: Rows


class Values:
    """Computes rows of the arrays of a plan; threads may share it.

    Parameters
    ----------
    source
        The open source.
    plan
        What is to be written.
    prepared
        What is known of rearranged matrices.
    scratch
        Folder for what has to be decoded to disk first.
    """

    def __init__(self, source: Source, plan: Plan, prepared: Prepared, scratch: Path) -> None:
        self.source, self.plan, self.prepared = source, plan, prepared
        self.scratch = scratch
        self._readers: dict[str, ArrayReader] = {}
        self._transpositions: dict[str, Transposition] = {}

    def update_plan(self) -> None:
        """Put the number of entries left without duplicates into the plan, if known."""
        for item in self.plan.sparse:
            new = self.prepared.load(item.path, "distinct") if item.dedupe else None
            if new is not None:
                node = self.source.node(item.source)
                arrays = sparse_arrays(self.plan.spec, item, node, int(new[-1]))
                self.plan.replace(arrays)

    def reader(self, path: str) -> ArrayReader:
        """Reader of an array of the source; opened once."""
        if path not in self._readers:
            self._readers[path] = ArrayReader(self.source, path, self.scratch)
        return self._readers[path]

    def release(self) -> None:
        """Give back what reading keeps for this thread; it goes on with another file."""
        for reader in list(self._readers.values()):
            reader.release()

    def rows(self, path: str) -> Rows:
        """Return the function that computes rows of the array that goes to `path`."""
        item = self.plan.array(path)
        read = self.reader(item.source) if item.kind == "copy" else self._rearranged(item)
        dtype = np.dtype(item.layout.dtype)

        def stored(start: int, stop: int) -> np.ndarray:
            values = read(start, stop)
            if item.limit is not None:
                self._check_range(item, values, start)
            return self._cast(item, values, dtype, start)

        return stored

    def _rearranged(self, item: ArrayItem) -> Rows:
        """Return the function that computes entries of a matrix whose rows are sorted."""
        path, _, part = item.path.rpartition("/")
        matrix = self.plan.matrix(path)
        stored = self.stored_rows(path)
        new = self.prepared.load(path, "distinct") if matrix.dedupe else None
        if part == "indptr":
            borders = stored.indptr if new is None else new
            return lambda start, stop: np.asarray(borders[start:stop])
        if matrix.transpose and not matrix.dedupe:
            return stored.indices if part == "indices" else stored.data
        rows = SortedRows(stored.indptr, stored.indices, stored.data, new_indptr=new)
        return rows.indices if part == "indices" else rows.data

    def stored_rows(self, path: str) -> StoredRows:
        """Rows of a matrix as they are before sorting: in the source, or transposed."""
        matrix = self.plan.matrix(path)
        if matrix.transpose:
            turned = self.transposition(path)
            return StoredRows(turned.rows, turned.indices, turned.data)
        return self._source_rows(matrix)

    def _source_rows(self, matrix: SparseItem) -> StoredRows:
        at = matrix.source
        indptr = self.prepared.load(matrix.path, "indptr")
        if indptr is None:
            msg = f"{matrix.path} has not been prepared"
            raise FormatError(msg)
        indices = self.reader(f"{at}/indices")
        return StoredRows(indptr, indices, self.reader(f"{at}/data"))

    def transposition(self, path: str) -> Transposition:
        """Return the transposition of a CSC matrix whose rows have been counted."""
        if path not in self._transpositions:
            stored = self._source_rows(self.plan.matrix(path))
            rows = self.prepared.load(path, "rows")
            if rows is None:
                msg = f"the rows of {path} have not been counted"
                raise FormatError(msg)
            dtype = self.reader(f"{self.plan.matrix(path).source}/data").dtype
            self._transpositions[path] = Transposition(
                self.prepared.folder(path),
                stored.indptr,
                rows,
                stored.indices,
                stored.data,
                dtype,
            )
        return self._transpositions[path]

    def _check_range(self, item: ArrayItem, values: np.ndarray, start: int) -> None:
        if not values.size or _within(values, item.limit or 0):
            return
        at = int(np.flatnonzero((values < 0) | (values >= (item.limit or 0)))[0])
        msg = (
            f"{self.source.path}: {item.source}[{start + at}] is {values[at]}, and must be "
            f"from 0 to {(item.limit or 0) - 1}; the source is damaged"
        )
        raise FormatError(msg)

    def _cast(
        self, item: ArrayItem, values: np.ndarray, dtype: np.dtype, start: int
    ) -> np.ndarray:
        if values.dtype == dtype:
            return values
        with np.errstate(invalid="ignore", over="ignore"):
            cast = values.astype(dtype)
            if item.limit is not None:
                return cast
            if item.exact:
                bad = cast.astype(values.dtype) != values
                # −1 as uint64 and back is −1 again.
                bad |= (cast < 0) != (values < 0)
            else:
                bad = np.isinf(cast) & np.isfinite(values)
        if bad.any():
            place = np.argwhere(bad)[0]
            where = ", ".join(map(str, (start + int(place[0]), *map(int, place[1:]))))
            msg = (
                f"{self.source.path}: {item.source}[{where}] is {values[tuple(place)]}, which "
                f"{dtype.name} cannot hold; choose another data dtype"
            )
            raise DataError(msg)
        return cast


def _within(values: np.ndarray, limit: int) -> bool:
    """Whether all values are from 0 to below `limit`."""
    if values.dtype.kind == "i":
        # Seen without its sign a negative number is larger than any limit.
        return bool(values.view(f"u{values.itemsize}").max() < limit)
    return bool(values.min() >= 0 and values.max() < limit)


def check_sparse(values: Values, item: SparseItem) -> None:
    """Check that indptr describes rows that follow each other and end with the last value.

    Raises
    ------
    FormatError
        It does not; names the first wrong row.
    """
    source, path = values.source, item.source
    node = source.node(path)
    lengths = {name: int(node[name].shape[0]) for name in ("data", "indices", "indptr")}
    expected = {"data": item.nnz, "indices": item.nnz, "indptr": item.major + 1}
    for name, length in lengths.items():
        if length != expected[name]:
            msg = (
                f"{source.path}: {path}/{name} holds {length} values instead of "
                f"{expected[name]} (shape {item.shape}, {item.nnz} stored values)"
            )
            raise FormatError(msg)
    read = values.reader(f"{path}/indptr")
    previous = 0
    for start in range(0, lengths["indptr"], _INDPTR_ROWS):
        part = read(start, min(start + _INDPTR_ROWS, lengths["indptr"])).astype(np.int64)
        steps = np.diff(part, prepend=previous)
        if (start == 0 and part[0] != 0) or (steps < 0).any():
            at = start + (0 if start == 0 and part[0] else int(np.argmax(steps < 0)))
            msg = f"{source.path}: {path}/indptr goes wrong at {at} ({int(part[at - start])})"
            raise FormatError(msg)
        previous = int(part[-1])
    if previous != item.nnz:
        msg = (
            f"{source.path}: {path}/indptr ends with {previous}, but {item.nnz} values "
            "are stored"
        )
        raise FormatError(msg)

"""CSR and dense matrices of a store, open for reading in ranges of rows."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scgpu_tasks.errors import FormatError
from scgpu_tasks.io.arrays import REWRITE, RowArray, Visit
from scgpu_tasks.io.elements import (
    Files,
    Node,
    find_matrix,
    matrix_shape,
    open_files,
    read_node,
)
from scgpu_tasks.kernels.arrays import to_host

_KEPT_OPEN = 32
_INDPTR_STEP = 4_000_000


class DenseElement:
    """A dense matrix.

    Raises
    ------
    FormatError
        Its values are not numbers.
    """

    encoding = "array"

    def __init__(self, files: Files, node: Node, device: str) -> None:
        self.shape = matrix_shape(files, node)
        self._values = RowArray(files, node, device=device)
        self.dtype = _value_dtype(self._values)
        self.gpu_decodes = self._values.layout is not None
        self.bytes_per_value = self.dtype.itemsize
        self.documents = node.documents

    def row_offsets(self) -> NDArray[Any]:
        """Values before each row, shape (rows + 1,)."""
        return np.arange(self.shape[0] + 1, dtype=np.int64) * self.shape[1]

    def read(self, start: int, stop: int) -> tuple[Any, int]:
        """Read rows ``start:stop`` and the number of stored bytes visited.

        A chunk file that does not exist means fill values here, as zarr has it.
        """
        stored = self._values.visit(start, stop).stored_bytes
        return self._values.read(start, stop).astype(self.dtype, copy=False), stored


class CSRElement:
    """A CSR matrix.

    Raises
    ------
    FormatError
        Its arrays are missing, or do not fit each other.
    """

    encoding = "csr_matrix"

    def __init__(self, files: Files, node: Node, device: str) -> None:
        self.shape = matrix_shape(files, node)
        self._where = f"{node.name} of {files.path}"
        nodes = {}
        for part in ("data", "indices", "indptr"):
            found = read_node(files, f"{node.name}/{part}")
            if found is None or not found.is_array:
                msg = f"{self._where} is CSR but has no array {part}; {REWRITE}"
                raise FormatError(msg)
            nodes[part] = found
        self._data = RowArray(files, nodes["data"], device=device)
        self._indices = RowArray(files, nodes["indices"], device=device)
        # Host code needs the row bounds first; they are a thousandth of the matrix.
        self._indptr = RowArray(files, nodes["indptr"])
        self.dtype = _value_dtype(self._data)
        self.bytes_per_value = self.dtype.itemsize + self._indices.dtype.itemsize
        self.gpu_decodes = not (self._data.layout is None or self._indices.layout is None)
        self.documents = (
            *node.documents,
            *(name for found in nodes.values() for name in found.documents),
        )
        self._check_shapes()

    def _check_shapes(self) -> None:
        for array in (self._data, self._indices, self._indptr):
            if len(array.shape) != 1:
                msg = f"{array.name} of {self._where} has shape {array.shape}, not one axis"
                raise FormatError(msg)
        for array in (self._indices, self._indptr):
            if array.dtype.kind not in "iu":
                msg = f"{array.name} of {self._where} is {array.dtype}, not a whole-number type"
                raise FormatError(msg)
        n_data, n_indices = self._data.shape[0], self._indices.shape[0]
        if n_data != n_indices:
            msg = f"{self._where} has {n_data} values but {n_indices} column indices; {REWRITE}"
            raise FormatError(msg)
        if self._indptr.shape[0] != self.shape[0] + 1:
            msg = (
                f"{self._where} has {self.shape[0]} rows but indptr has "
                f"{self._indptr.shape[0]} entries, not {self.shape[0] + 1}; {REWRITE}"
            )
            raise FormatError(msg)

    def row_offsets(self) -> NDArray[Any]:
        """Check all of ``indptr`` and return it in its stored type, shape (rows + 1,)."""
        nnz = self._data.shape[0]
        n = self.shape[0] + 1
        offsets = np.empty(n, self._indptr.dtype.newbyteorder("="))
        for start in range(0, n, _INDPTR_STEP):
            stop = min(start + _INDPTR_STEP, n)
            offsets[start:stop] = self._read_indptr(start, stop)[0]
            if start:
                self._check_indptr(offsets[start - 1 : start + 1], start - 1)
        if int(offsets[0]) != 0 or int(offsets[-1]) != nnz:
            msg = (
                f"indptr of {self._where} runs from {offsets[0]} to {offsets[-1]}, but there "
                f"are {nnz} values; {REWRITE}"
            )
            raise FormatError(msg)
        return offsets

    def _read_indptr(self, start: int, stop: int) -> tuple[NDArray[Any], int]:
        visit = self._indptr.visit(start, stop)
        if visit.missing and self._data.shape[0]:
            lost = self._lost_file(visit)
            if lost is not None:
                msg = f"the file is missing, so rows have lost their place; {REWRITE}"
                raise self._indptr.corrupt(msg, lost)
        indptr = self._indptr.read(start, stop)
        self._check_indptr(indptr, start)
        return indptr, visit.stored_bytes

    def _lost_file(self, visit: Visit) -> str | None:
        """Key of a missing file of ``indptr`` that was not zeros, which zarr may leave out.

        Only the first files can be zeros: the first cells are empty. Had they held values,
        these would now all seem to be the next cell's, with genes twice.
        """
        zeros = self._indptr.missing_rows()
        for key, first, _ in visit.missing:
            if first >= zeros:
                return key
        if zeros == 1:
            return None
        last = visit.missing[-1][0]
        if zeros == self._indptr.shape[0]:
            return last
        n_values = int(self._indptr.read(zeros, zeros + 1)[0])
        if not 0 <= n_values <= min(self._data.shape[0], self.shape[1]):
            return last
        columns = to_host(self._indices.read(0, n_values))
        return last if len(np.unique(columns)) < n_values else None

    def _check_indptr(self, indptr: NDArray[Any], first: int) -> None:
        """See that `indptr`, which belongs to rows from `first` on, goes up within the data."""
        nnz = self._data.shape[0]
        bad = np.flatnonzero(indptr[1:] < indptr[:-1])
        if len(bad):
            row = int(bad[0])
            msg = (
                f"indptr of {self._where} falls from {indptr[row]} to {indptr[row + 1]} at row "
                f"{first + row}; {REWRITE}"
            )
            raise FormatError(msg)
        if len(indptr) and not (int(indptr[0]) >= 0 and int(indptr[-1]) <= nnz):
            msg = (
                f"indptr of {self._where} puts rows {first} to {first + len(indptr) - 2} at "
                f"values {indptr[0]} to {indptr[-1]}, but there are {nnz}; {REWRITE}"
            )
            raise FormatError(msg)

    def read(self, start: int, stop: int) -> tuple[Any, Any, Any, int]:
        """Read rows ``start:stop``: data, indices, indptr from 0, stored bytes visited."""
        stored_indptr, stored = self._read_indptr(start, stop + 1)
        indptr = stored_indptr.astype(np.int64)
        low, high = int(indptr[0]), int(indptr[-1])
        indptr -= low
        data_visit, index_visit = self._data.visit(low, high), self._indices.visit(low, high)
        for key, _, _ in data_visit.missing:
            msg = (
                "the file is missing, and its values would read as zeros; if they truly are, "
                f"remove them (eliminate_zeros) and write again; else {REWRITE}"
            )
            raise self._data.corrupt(msg, key)
        for key, a, b in index_visit.missing:
            # zarr may leave out a chunk of zeros. Zero is the first gene, which a row has once.
            if np.diff(np.clip(indptr, a - low, b - low)).max() > 1:
                msg = f"the file is missing; {REWRITE}"
                raise self._indices.corrupt(msg, key)
        data, indices = self._data.read_with(self._indices, low, high)
        data = data.astype(self.dtype, copy=False)
        self._check_indices(indices, indptr, start)
        stored += data_visit.stored_bytes + index_visit.stored_bytes
        if self._data.device == "gpu":
            import cupy

            indptr = cupy.asarray(indptr)
        return data, indices, indptr, stored

    def _check_indices(self, indices: Any, indptr: NDArray[np.int64], first: int) -> None:
        n_vars = self.shape[1]
        if not len(indices):
            return
        low = int(indices.min()) if indices.dtype.kind == "i" else 0
        high = int(indices.max())
        if low >= 0 and high < n_vars:
            return
        wrong = (indices >= n_vars) | (indices < 0)
        place = int(wrong.argmax())
        row = first + int(np.searchsorted(indptr, place, side="right")) - 1
        msg = (
            f"indices of {self._where} has column {int(indices[place])} in row {row}, but the "
            f"matrix has {n_vars} columns; {REWRITE}"
        )
        raise FormatError(msg)


def _value_dtype(array: RowArray) -> np.dtype[Any]:
    """Type of the values in memory: as stored, but half precision becomes float32."""
    dtype = array.dtype.newbyteorder("=")
    if dtype.kind not in "biuf":
        msg = f"{array.name} of {array.files.path} holds {dtype}, not numbers"
        raise FormatError(msg)
    return np.dtype(np.float32) if dtype == np.float16 else dtype


def open_matrix(files: Files, node: Node, device: str) -> CSRElement | DenseElement:
    """Open a matrix that `find_matrix` found."""
    kind = DenseElement if node.is_array else CSRElement
    return kind(files, node, device)


_open: OrderedDict[tuple[str, str, str], tuple[Any, Files, CSRElement | DenseElement]]
_open = OrderedDict()
_lock = threading.Lock()


def opened(store: str, element: str, device: str) -> CSRElement | DenseElement:
    """Return the matrix as this process has it open, opened anew where its metadata changed.

    Raises
    ------
    StoreError, FormatError
        The matrix cannot be opened any more.
    """
    key = (store, element, device)
    with _lock:
        known = _open.get(key)
    if known is not None:
        stamp, files, matrix = known
        if stamp == _stamp(files, matrix.documents):
            with _lock:
                if key in _open:
                    _open.move_to_end(key)
            return matrix
    files = open_files(store)
    layer = None if element == "X" else element.removeprefix("layers/")
    node = find_matrix(files, layer)
    matrix = open_matrix(files, node, device)
    with _lock:
        _open[key] = (_stamp(files, matrix.documents), files, matrix)
        _open.move_to_end(key)
        while len(_open) > _KEPT_OPEN:
            _open.popitem(last=False)
    return matrix


def _stamp(files: Files, documents: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(files.stat(name) for name in documents)

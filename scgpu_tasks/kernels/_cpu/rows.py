"""Order, duplicates and dense blocks on the CPU."""

from __future__ import annotations

import numpy as np
from numba import njit

from scgpu_tasks.kernels.rows import RowOrder, Rows


@njit(nogil=True, cache=True)
def _row_order(indptr, indices, n_cols):
    top = 0
    low = 0
    falls = 0
    for row in range(len(indptr) - 1):
        first, last = indptr[row], indptr[row + 1]
        for k in range(first, last):
            top = max(top, np.int64(indices[k]))
            low = min(low, np.int64(indices[k]))
        for k in range(first + 1, last):
            falls += indices[k] <= indices[k - 1]
    return low >= 0 and (top < n_cols or len(indices) == 0), falls == 0


def row_order(rows: Rows) -> RowOrder:
    """See `scgpu_tasks.kernels.rows.row_order`."""
    return RowOrder(*_row_order(rows.indptr, rows.indices, rows.n_cols))


@njit(nogil=True, cache=True)
def _sum_duplicates(indptr, indices, data, out_indptr, out_indices, out):
    end = 0
    for row in range(len(indptr) - 1):
        first, last = indptr[row], indptr[row + 1]
        # Mergesort is stable: floats are added in stored order.
        order = np.argsort(indices[first:last], kind="mergesort")
        start = end
        for k in order:
            column = indices[first + k]
            if end > start and out_indices[end - 1] == column:
                out[end - 1] += data[first + k]
            else:
                out_indices[end] = column
                out[end] = data[first + k]
                end += 1
        out_indptr[row + 1] = end
    return end


def canonical_rows(rows: Rows) -> Rows:
    """See `scgpu_tasks.kernels.rows.canonical_rows`."""
    wide = np.float64 if rows.data.dtype.kind == "f" else np.int64
    indptr = np.zeros_like(rows.indptr)
    indices = np.empty_like(rows.indices)
    data = np.empty(len(rows.data), wide)
    end = _sum_duplicates(rows.indptr, rows.indices, rows.data, indptr, indices, data)
    return Rows(indptr, indices[:end], data[:end], rows.n_cols)


def dense_rows(values: np.ndarray) -> Rows:
    """See `scgpu_tasks.kernels.rows.dense_rows`."""
    row, column = np.nonzero(values)
    indptr = np.zeros(len(values) + 1, np.int64)
    np.cumsum(np.bincount(row, minlength=len(values)), out=indptr[1:])
    kind = np.uint16 if values.shape[1] <= 1 << 16 else np.int32
    return Rows(indptr, column.astype(kind), values[row, column], values.shape[1])

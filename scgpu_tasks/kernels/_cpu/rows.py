"""Order, duplicates and dense blocks on the CPU.

Loops run over slices from 0: Numba then needs no test for negative positions, and the compiler
makes vector code of them.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from scgpu_tasks.kernels.rows import RowOrder, Rows, sum_type


@njit(nogil=True, cache=True)
def _row_order(indptr, indices, largest, zero):
    outside = 0
    falls = 0
    for row in range(len(indptr) - 1):
        part = indices[indptr[row] : indptr[row + 1]]
        after = part[1:]
        for k in range(len(after)):
            falls += after[k] <= part[k]
        for k in range(len(part)):
            outside += part[k] > largest
        for k in range(len(part)):
            outside += part[k] < zero
    return outside == 0, falls == 0


def row_order(rows: Rows) -> RowOrder:
    """See `scgpu_tasks.kernels.rows.row_order`."""
    # Compared in the type of the indices, which is what makes the loop fast.
    kind = rows.indices.dtype.type
    largest = kind(min(rows.n_cols - 1, np.iinfo(rows.indices.dtype).max))
    in_range, canonical = _row_order(rows.indptr, rows.indices, largest, kind(0))
    return RowOrder(bool(in_range) and (rows.n_cols > 0 or len(rows.indices) == 0), canonical)


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
    wide = sum_type(rows.data.dtype)
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

"""Column selection on the CPU."""

from __future__ import annotations

import numpy as np
from numba import njit

from scgpu_tasks.kernels.rows import Rows


@njit(nogil=True, cache=True)
def _select(indptr, indices, data, keep, position, out_indptr, out_indices, out):
    end = 0
    kept = 0
    for row in range(len(indptr) - 1):
        if not keep[row]:
            continue
        columns = indices[indptr[row] : indptr[row + 1]]
        values = data[indptr[row] : indptr[row + 1]]
        row_indices = out_indices[end:]
        row_values = out[end:]
        n = np.uint64(0)
        for k in range(len(columns)):
            # Written always, kept sometimes: a branch here would be mispredicted.
            column = position[columns[k]]
            row_indices[n] = column
            row_values[n] = values[k]
            n += np.uint64(column >= 0) & np.uint64(values[k] != 0)
        end += np.int64(n)
        kept += 1
        out_indptr[kept] = end
    return end


def select(rows: Rows, keep: np.ndarray, position: np.ndarray, n_selected: int) -> Rows:
    """See `scgpu_tasks.kernels.select.select`."""
    kind = np.uint16 if n_selected <= 1 << 16 else np.int32
    indptr = np.zeros(int(keep.sum()) + 1, np.int64)
    # One more: the value after the last is written before it is dropped. Untouched pages of
    # these buffers cost no memory.
    indices = np.empty(len(rows.indices) + 1, kind)
    data = np.empty(len(rows.data) + 1, rows.data.dtype)
    end = _select(*rows[:3], keep, position, indptr, indices, data)
    return Rows(indptr, indices[:end].copy(), data[:end].copy(), n_selected)


@njit(nogil=True, cache=True)
def _whole_below(data, limit):
    misfits = 0
    for value in data:
        misfits += not (value >= 0 and value <= limit and value == np.floor(value))
    return misfits == 0


def pack(rows: Rows) -> Rows:
    """See `scgpu_tasks.kernels.select.pack`."""
    for kind in (np.uint8, np.uint16):
        if rows.data.dtype.itemsize > np.dtype(kind).itemsize and _whole_below(
            rows.data, np.iinfo(kind).max
        ):
            return rows._replace(data=rows.data.astype(kind))
    return rows

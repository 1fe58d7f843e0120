"""Gram matrix on the CPU.

Rows are taken in tiles. The leading, dense columns of a tile are a small dense matrix, whose
product with itself BLAS makes. The other entries are put in order of their columns: then one
row of the Gram matrix after the other is filled, and stays in the nearest cache meanwhile.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from scgpu_tasks.kernels._cpu.transform import MEMO, longest_row, transform_row
from scgpu_tasks.kernels.rows import Rows
from scgpu_tasks.kernels.transform import Transform

# Bytes of a tile's entries and of its dense part: about what the second cache holds.
_TILE_BYTES = 3 << 19
_HEIGHTS = (512, 8192)


@njit(nogil=True, cache=True)
def _split(indptr, indices, data, factor, transform, n_dense, tile, entries, sums):
    """Transform a tile's rows; dense columns go to `tile`, the others to `entries`."""
    columns, values, stops, starts = entries
    memo = np.empty(MEMO)
    row_values = np.empty(longest_row(indptr))
    starts[:] = 0
    n = np.uint64(0)
    for row in range(len(indptr) - 1):
        row_columns = indices[indptr[row] : indptr[row + 1]]
        counts = data[indptr[row] : indptr[row + 1]]
        transform_row(counts, factor[row], transform, memo, row_values)
        dense = tile[row]
        dense[:] = 0.0
        for k in range(len(row_columns)):
            column = np.uint64(row_columns[k])
            value = row_values[k]
            sums[column] += value
            if column < n_dense:
                dense[column] = value
            else:
                columns[n] = column
                values[n] = value
                n += np.uint64(1)
                starts[column + np.uint64(1)] += 1
        stops[row] = n


@njit(nogil=True, cache=True)
def _by_column(columns, stops, starts, entry, row_of):
    """Order the entries by column; `starts` becomes where each column ends."""
    for column in range(len(starts) - 1):
        starts[column + 1] += starts[column]
    k = 0
    for row in range(len(stops)):
        while k < stops[row]:
            column = columns[k]
            at = starts[column]
            starts[column] += 1
            entry[at] = k
            row_of[at] = row
            k += 1


@njit(nogil=True, cache=True, fastmath={"contract"})
def _accumulate(columns, values, stops, ends, entry, row_of, tile, n_dense, gram):
    first = 0
    for column in range(n_dense, len(gram)):
        target = gram[column]
        for at in range(first, ends[column]):
            start = entry[at]
            row = row_of[at]
            value = values[start]
            dense = tile[row]
            for j in range(n_dense):
                target[j] += value * dense[j]
            # The entry with itself, and with those stored after it in its row. Which triangle
            # a pair falls into depends on the pair only: see `finish`.
            others = columns[start : stops[row]]
            factors = values[start : stops[row]]
            for j in range(len(others)):
                target[others[j]] += value * factors[j]
        first = ends[column]


def gram_add(
    rows: Rows,
    factor: np.ndarray,
    transform: Transform,
    n_dense: int,
    gram: np.ndarray,
    sums: np.ndarray,
) -> None:
    """See `scgpu_tasks.kernels.gram.gram_add`."""
    per_row = 10 * len(rows.data) / max(rows.n_rows, 1) + 8 * n_dense
    height = int(np.clip(_TILE_BYTES / max(per_row, 1), *_HEIGHTS))
    tile = np.empty((min(height, rows.n_rows), n_dense))
    for start in range(0, rows.n_rows, height):
        stop = min(start + height, rows.n_rows)
        first, last = rows.indptr[start], rows.indptr[stop]
        columns = np.empty(last - first, rows.indices.dtype)
        values = np.empty(last - first)
        stops = np.empty(stop - start, np.int64)
        starts = np.empty(len(gram) + 1, np.int64)
        part = tile[: stop - start]
        _split(
            rows.indptr[start : stop + 1] - first,
            rows.indices[first:last],
            rows.data[first:last],
            factor[start:stop],
            int(transform),
            n_dense,
            part,
            (columns, values, stops, starts),
            sums,
        )
        n = int(stops[-1])
        entry, row_of = np.empty(n, np.int64), np.empty(n, np.int32)
        _by_column(columns, stops, starts, entry, row_of)
        _accumulate(columns, values, stops, starts, entry, row_of, part, n_dense, gram)
        if n_dense:
            gram[:n_dense, :n_dense] += part.T @ part


def finish(gram: np.ndarray, n_dense: int) -> np.ndarray:
    """See `scgpu_tasks.kernels.gram.finish`."""
    sparse = gram[n_dense:, n_dense:]
    diagonal = sparse.diagonal().copy()
    sparse += sparse.T.copy()
    np.fill_diagonal(sparse, diagonal)
    gram[:n_dense, n_dense:] = gram[n_dense:, :n_dense].T
    return gram

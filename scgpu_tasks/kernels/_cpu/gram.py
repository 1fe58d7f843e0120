"""Gram matrix on the CPU."""

from __future__ import annotations

import numpy as np
from numba import njit

from scgpu_tasks.kernels._cpu.transform import MEMO, longest_row, transform_row
from scgpu_tasks.kernels.rows import Rows
from scgpu_tasks.kernels.transform import Transform

FAST = {"contract"}
_TILE = 1 << 18


@njit(nogil=True, cache=True, fastmath=FAST)
def _gram_tile(
    indptr, indices, data, factor, transform, start, stop, n_dense, tile, gram, sums
):
    memo = np.empty(MEMO)
    longest = longest_row(indptr[start : stop + 1])
    values = np.empty(longest)
    column = np.empty(longest, np.int64)
    for row in range(start, stop):
        first, last = indptr[row], indptr[row + 1]
        transform_row(data[first:last], factor[row], transform, memo, values)
        dense = tile[row - start]
        dense[:] = 0.0
        n = 0
        for k in range(last - first):
            at = np.int64(indices[first + k])
            value = values[k]
            sums[at] += value
            if at < n_dense:
                dense[at] = value
            else:
                column[n] = at
                values[n] = value
                n += 1
        for i in range(n):
            value = values[i]
            target = gram[column[i]]
            for j in range(n_dense):
                target[j] += value * dense[j]
            # Which triangle an entry falls into depends on the pair only: see `finish`.
            for j in range(i, n):
                target[column[j]] += value * values[j]


def gram_add(
    rows: Rows,
    factor: np.ndarray,
    transform: Transform,
    n_dense: int,
    gram: np.ndarray,
    sums: np.ndarray,
) -> None:
    """See `scgpu_tasks.kernels.gram.gram_add`."""
    # Tall enough that adding the product to the Gram matrix costs little beside making it.
    height = max(_TILE // max(n_dense, 1), n_dense, 1) if n_dense else rows.n_rows
    tile = np.empty((min(height, rows.n_rows), n_dense))
    for start in range(0, rows.n_rows, max(height, 1)):
        stop = min(start + height, rows.n_rows)
        part = tile[: stop - start]
        _gram_tile(*rows[:3], factor, int(transform), start, stop, n_dense, part, gram, sums)
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

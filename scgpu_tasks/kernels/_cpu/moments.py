"""Sums over the cells for each gene on the CPU."""

from __future__ import annotations

import numpy as np
from numba import njit

from scgpu_tasks.kernels._cpu.transform import MEMO, longest_row, transform_row
from scgpu_tasks.kernels.rows import Rows
from scgpu_tasks.kernels.transform import Transform


@njit(nogil=True, cache=True)
def _gene_moments(indptr, indices, data, group, factor, transform, kept, left_out):
    memo = np.empty(MEMO)
    values = np.empty(longest_row(indptr))
    for row in range(len(indptr) - 1):
        columns = indices[indptr[row] : indptr[row + 1]]
        counts = data[indptr[row] : indptr[row + 1]]
        if group[row] < 0:
            for k in range(len(columns)):
                sums = left_out[columns[k]]
                sums[0] += counts[k]
                sums[1] += counts[k] != 0
            continue
        transform_row(counts, factor[row], transform, memo, values)
        table = kept[group[row]]
        for k in range(len(columns)):
            # One gene's four sums share a cache line.
            sums = table[columns[k]]
            value = values[k]
            sums[0] += counts[k]
            sums[1] += counts[k] != 0
            sums[2] += value
            sums[3] += value * value


def gene_moments(
    rows: Rows, group: np.ndarray, factor: np.ndarray, transform: Transform, n_groups: int
) -> tuple[np.ndarray, np.ndarray]:
    """See `scgpu_tasks.kernels.moments.gene_moments`."""
    kept = np.zeros((n_groups, rows.n_cols, 4))
    left_out = np.zeros((rows.n_cols, 2))
    _gene_moments(*rows[:3], group, factor, int(transform), kept, left_out)
    return kept, left_out


@njit(nogil=True, cache=True)
def _clipped_moments(indptr, indices, data, group, limit, out):
    for row in range(len(indptr) - 1):
        g = group[row]
        if g < 0:
            continue
        columns = indices[indptr[row] : indptr[row + 1]]
        counts = data[indptr[row] : indptr[row + 1]]
        for k in range(len(columns)):
            value = min(np.float64(counts[k]), limit[g, columns[k]])
            out[g, columns[k], 0] += value
            out[g, columns[k], 1] += value * value


def clipped_moments(rows: Rows, group: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """See `scgpu_tasks.kernels.moments.clipped_moments`."""
    out = np.zeros((*limit.shape, 2))
    _clipped_moments(*rows[:3], group, limit, out)
    return out

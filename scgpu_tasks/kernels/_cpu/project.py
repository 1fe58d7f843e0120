"""Scores on principal components on the CPU."""

from __future__ import annotations

import numpy as np
from numba import njit

from scgpu_tasks.kernels._cpu.transform import MEMO, longest_row, transform_row
from scgpu_tasks.kernels.rows import Rows
from scgpu_tasks.kernels.transform import Transform


@njit(nogil=True, cache=True, fastmath={"contract"})
def _project(indptr, indices, data, factor, transform, components, offset, out):
    memo = np.empty(MEMO)
    values = np.empty(longest_row(indptr))
    score = np.empty(len(offset))
    for row in range(len(indptr) - 1):
        columns = indices[indptr[row] : indptr[row + 1]]
        counts = data[indptr[row] : indptr[row + 1]]
        transform_row(counts, factor[row], transform, memo, values)
        score[:] = -offset
        for k in range(len(columns)):
            value = values[k]
            loading = components[columns[k]]
            for j in range(len(score)):
                score[j] += value * loading[j]
        out[row] = score


def project(
    rows: Rows,
    factor: np.ndarray,
    transform: Transform,
    components: np.ndarray,
    offset: np.ndarray,
    out: np.ndarray,
) -> None:
    """See `scgpu_tasks.kernels.project.project`."""
    components = np.ascontiguousarray(components, np.float64)
    _project(*rows[:3], factor, int(transform), components, offset, out)

"""Metrics of each cell on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit

from scgpu_tasks.kernels.qc import CellMetrics
from scgpu_tasks.kernels.rows import Rows

# Lets sums run in vector registers; whole numbers come out exact in any order. NaN and infinity
# keep their meaning.
FAST = {"reassoc", "contract", "nsz"}
_HISTOGRAM = 4096


@njit(nogil=True, cache=True, fastmath=FAST)
def _row_sums(indptr, data, n_genes, total):
    invalid_row = -1
    fractional_row = -1
    for row in range(len(indptr) - 1):
        summed = 0.0
        found = 0
        invalid = 0
        fractional = 0
        for k in range(indptr[row], indptr[row + 1]):
            value = np.float64(data[k])
            summed += value
            found += value != 0.0
            invalid += not (value >= 0.0 and value < np.inf)
            fractional += value != np.floor(value)
        n_genes[row] = found
        total[row] = summed
        if invalid and invalid_row < 0:
            invalid_row = row
        if fractional and fractional_row < 0:
            fractional_row = row
    return invalid_row, fractional_row


@njit(nogil=True, cache=True)
def _set_totals(indptr, indices, data, gene_sets, totals):
    for row in range(len(indptr) - 1):
        for k in range(indptr[row], indptr[row + 1]):
            member = gene_sets[indices[k]]
            if member:
                for s in range(totals.shape[1]):
                    if member >> np.uint64(s) & np.uint64(1):
                        totals[row, s] += data[k]


@njit(nogil=True, cache=True)
def _top_by_count(values, counted, tops, out):
    """Largest first from a histogram; False where a value is not a small whole number."""
    top = 0
    for value in values:
        number = np.int64(value)
        if number < 0 or number >= len(counted) or number != value:
            for other in range(top + 1):
                counted[other] = 0
            return False
        counted[number] += 1
        top = max(top, number)
    taken = 0
    summed = 0.0
    at = 0
    for number in range(top, -1, -1):
        left = counted[number]
        counted[number] = 0
        while at < len(tops) and taken + left >= tops[at]:
            step = tops[at] - taken
            summed += step * number
            left -= step
            taken = tops[at]
            out[at] = summed
            at += 1
        summed += left * number
        taken += left
    for rest in range(at, len(tops)):
        out[rest] = summed
    return True


@njit(nogil=True, cache=True)
def _top_totals(indptr, data, tops, counted, out):
    for row in range(len(indptr) - 1):
        values = data[indptr[row] : indptr[row + 1]]
        if not _top_by_count(values, counted, tops, out[row]):
            largest = np.sort(values)[::-1]
            summed = 0.0
            taken = 0
            for at in range(len(tops)):
                stop = min(tops[at], len(largest))
                while taken < stop:
                    summed += largest[taken]
                    taken += 1
                out[row, at] = summed


def cell_metrics(
    rows: Rows, gene_sets: np.ndarray, n_sets: int, tops: Sequence[int]
) -> CellMetrics:
    """See `scgpu_tasks.kernels.qc.cell_metrics`."""
    n_genes = np.empty(rows.n_rows, np.int64)
    total = np.empty(rows.n_rows, np.float64)
    invalid, fractional = _row_sums(rows.indptr, rows.data, n_genes, total)
    set_totals = np.zeros((rows.n_rows, n_sets))
    if n_sets:
        _set_totals(rows.indptr, rows.indices, rows.data, gene_sets, set_totals)
    top_totals = np.zeros((rows.n_rows, len(tops)))
    if len(tops):
        counted = np.zeros(_HISTOGRAM, np.int64)
        _top_totals(rows.indptr, rows.data, np.asarray(tops, np.int64), counted, top_totals)
    return CellMetrics(n_genes, total, set_totals, top_totals, invalid, fractional)

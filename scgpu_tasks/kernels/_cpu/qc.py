"""Metrics of each cell on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit

from scgpu_tasks.kernels.qc import WHOLE_TOLERANCE, CellMetrics
from scgpu_tasks.kernels.rows import Rows, sum_type

# Lets sums run in vector registers; whole numbers come out exact in any order. NaN and infinity
# keep their meaning.
FAST = {"reassoc", "contract", "nsz"}
_HISTOGRAM = 4096


@njit(nogil=True, cache=True, fastmath=FAST)
def _row_sums(indptr, data, n_genes, total, tolerance):
    invalid_row = -1
    fractional_row = -1
    for row in range(len(indptr) - 1):
        values = data[indptr[row] : indptr[row + 1]]
        summed = 0.0
        found = np.int32(0)
        invalid = np.int32(0)
        fractional = np.int32(0)
        for k in range(len(values)):
            value = values[k]
            summed += np.float64(value)
            found += np.int32(value != 0)
            invalid += np.int32(not (value >= 0 and value < np.inf))
            fractional += np.int32(np.abs(value - np.rint(value)) > tolerance)
        n_genes[row] = found
        total[row] = summed
        if invalid and invalid_row < 0:
            invalid_row = row
        if fractional and fractional_row < 0:
            fractional_row = row
    return invalid_row, fractional_row


@njit(nogil=True, cache=True)
def _whole_row_sums(indptr, data, n_genes, total, zero):
    """`_row_sums` of whole numbers, summed in the type of `zero`."""
    invalid_row = -1
    for row in range(len(indptr) - 1):
        values = data[indptr[row] : indptr[row + 1]]
        summed = zero
        found = np.int32(0)
        negative = np.int32(0)
        for k in range(len(values)):
            summed += values[k]
            found += np.int32(values[k] != 0)
            negative += np.int32(values[k] < 0)
        n_genes[row] = found
        total[row] = summed
        if negative and invalid_row < 0:
            invalid_row = row
    return invalid_row, -1


@njit(nogil=True, cache=True)
def _set_totals(indptr, indices, data, gene_sets, any_set, totals):
    longest = 0
    for row in range(len(indptr) - 1):
        longest = max(longest, indptr[row + 1] - indptr[row])
    members = np.empty(longest + 1, np.int64)
    for row in range(len(indptr) - 1):
        columns = indices[indptr[row] : indptr[row + 1]]
        values = data[indptr[row] : indptr[row + 1]]
        # Written always, kept sometimes: a branch here would be mispredicted.
        n = np.uint64(0)
        for k in range(len(columns)):
            members[n] = k
            n += np.uint64(any_set[columns[k]])
        for k in members[:n]:
            member = gene_sets[columns[k]]
            for s in range(totals.shape[1]):
                if member >> np.uint64(s) & np.uint64(1):
                    totals[row, s] += values[k]


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
    kind = rows.data.dtype
    out = (rows.indptr, rows.data, n_genes, total)
    if kind.kind == "f":
        invalid, fractional = _row_sums(*out, kind.type(WHOLE_TOLERANCE))
    else:
        invalid, fractional = _whole_row_sums(*out, sum_type(kind)(0))
    set_totals = np.zeros((rows.n_rows, n_sets))
    if n_sets:
        any_set = (gene_sets != 0).astype(np.uint8)
        _set_totals(*rows[:3], gene_sets, any_set, set_totals)
    top_totals = np.zeros((rows.n_rows, len(tops)))
    if len(tops):
        counted = np.zeros(_HISTOGRAM, np.int64)
        _top_totals(rows.indptr, rows.data, np.asarray(tops, np.int64), counted, top_totals)
    return CellMetrics(n_genes, total, set_totals, top_totals, invalid, fractional)

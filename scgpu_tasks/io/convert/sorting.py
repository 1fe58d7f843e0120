"""Sort and sum the entries of sparse rows; compiled, and free of the interpreter's lock."""

from __future__ import annotations

import numba
import numpy as np

_ints = numba.njit(nogil=True, cache=True)


@_ints
def order_rows(indptr: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Return positions of the entries, sorted by index in each row.

    Entries with the same index keep their order.

    Parameters
    ----------
    indptr
        Row borders, n + 1 values that start at 0.
    indices
        Column of each entry.
    """
    order = np.arange(len(indices))
    for row in range(len(indptr) - 1):
        start, stop = indptr[row], indptr[row + 1]
        for i in range(start + 1, stop):
            if indices[i] < indices[i - 1]:
                found = np.argsort(indices[start:stop], kind="mergesort")
                order[start:stop] = found + start
                break
    return order


@_ints
def first_of_each(indptr: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Return for each entry of sorted rows whether it is the first of its row and index."""
    first = np.ones(len(indices), np.bool_)
    for row in range(len(indptr) - 1):
        for i in range(indptr[row] + 1, indptr[row + 1]):
            first[i] = indices[i] != indices[i - 1]
    return first


@_ints
def count_distinct(indptr: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Count the distinct indices of each row; rows need not be sorted."""
    counts = np.zeros(len(indptr) - 1, np.int64)
    for row in range(len(indptr) - 1):
        found = np.sort(indices[indptr[row] : indptr[row + 1]])
        if len(found):
            counts[row] = 1 + np.sum(found[1:] != found[:-1])
    return counts


@_ints
def count_indices(indices: np.ndarray, counts: np.ndarray) -> int:
    """Add the number of times each index occurs.

    Returns
    -------
    The first position whose index is out of range, or −1.
    """
    for i in range(len(indices)):
        if indices[i] < 0 or indices[i] >= len(counts):
            return i
        counts[indices[i]] += 1
    return -1


@_ints
def order_by_row(rows: np.ndarray, low: int, n_rows: int) -> np.ndarray:
    """Return positions of entries sorted by row, stable, by counting.

    Parameters
    ----------
    rows
        Row of each entry, from `low` to below ``low + n_rows``.
    """
    starts = np.zeros(n_rows + 1, np.int64)
    for i in range(len(rows)):
        starts[rows[i] - low + 1] += 1
    for row in range(n_rows):
        starts[row + 1] += starts[row]
    order = np.empty(len(rows), np.int64)
    for i in range(len(rows)):
        row = rows[i] - low
        order[starts[row]] = i
        starts[row] += 1
    return order


def sum_groups(values: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Sum the values that belong together, exactly or in float64.

    Parameters
    ----------
    values
        In the order of the sorted rows.
    first
        Where each group begins.

    Returns
    -------
    One sum a group: int64, uint64, float64, complex128, or bool (any of them).
    """
    starts = np.flatnonzero(first)
    if not len(starts):
        return values[:0]
    if values.dtype.kind == "b":
        return np.logical_or.reduceat(values, starts)
    wide = {"i": np.int64, "u": np.uint64, "f": np.float64, "c": np.complex128}
    return np.add.reduceat(values, starts, dtype=wide[values.dtype.kind])

"""Transformed values of one row, in the innermost loops of the CPU kernels."""

from __future__ import annotations

import numpy as np
from numba import njit

IDENTITY, SCALE, LOG1P, EXPM1 = 0, 1, 2, 3
# Counts below this are looked up: most values of a cell are one of a few small numbers.
MEMO = 64


@njit(nogil=True, cache=True)
def transform_row(values, factor, transform, memo, out):
    """Write the transform of each of `values` to `out`; `memo` is scratch of length MEMO."""
    n = len(values)
    if transform == LOG1P:
        memo[:] = -1.0
        for k in range(n):
            value = np.float64(values[k])
            if 0.0 <= value < MEMO:
                number = np.uint64(value)
                if np.float64(number) == value:
                    if memo[number] < 0.0:
                        memo[number] = np.log1p(value * factor)
                    out[k] = memo[number]
                    continue
            out[k] = np.log1p(value * factor)
    elif transform == SCALE:
        for k in range(n):
            out[k] = values[k] * factor
    elif transform == EXPM1:
        for k in range(n):
            out[k] = np.expm1(np.float64(values[k]))
    else:
        for k in range(n):
            out[k] = values[k]


@njit(nogil=True, cache=True)
def longest_row(indptr):
    """Length of the longest row."""
    longest = 0
    for row in range(len(indptr) - 1):
        longest = max(longest, indptr[row + 1] - indptr[row])
    return longest

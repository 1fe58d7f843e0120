"""Work on long arrays, row by row, on several threads: for tables of millions of cells."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

# Rows of one piece: what a core's cache holds of a few columns.
_ROWS = 1 << 17
# More threads than this wait for memory, not for a core.
_THREADS = 8


def by_rows(function: Callable[[slice], object], n_rows: int, rows: int = _ROWS) -> None:
    """Call a function with slices that make up ``0:n_rows``, on threads where there are many.

    Parameters
    ----------
    function
        Works on the rows of its slice alone, in NumPy calls that let other threads run.
    n_rows
        Number of rows.
    rows
        Rows of one slice.
    """
    pieces = [slice(i, min(i + rows, n_rows)) for i in range(0, n_rows, rows)]
    n_threads = min(_THREADS, len(os.sched_getaffinity(0)), len(pieces))
    if n_threads < 2:
        for piece in pieces:
            function(piece)
        return
    with ThreadPoolExecutor(n_threads, thread_name_prefix="scgpu-rowwise") as pool:
        for _ in pool.map(function, pieces):
            pass

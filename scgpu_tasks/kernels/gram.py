"""Gram matrix of transformed values, from blocks of rows.

The columns come in an order of the caller's making: the first `n_dense` of them are worked on
as a dense tile (BLAS), the rest entry by entry. A partial is one square array, of which
`finish` makes the symmetric matrix once all blocks are in.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from scgpu_tasks.kernels._dispatch import form
from scgpu_tasks.kernels.rows import Rows
from scgpu_tasks.kernels.transform import Transform

# Nanoseconds of one multiply-add on one core: between two stored entries, between a stored
# entry and a dense row, and in a dense tile. Only their ratios matter.
SCATTER_NS, AXPY_NS, BLAS_NS = 0.6, 0.2, 0.07


def dense_columns(density: np.ndarray) -> int:
    """How many of the densest columns to work on as dense, by counted operations.

    Parameters
    ----------
    density
        Share of rows in which each column is stored, falling.
    """
    n = np.arange(len(density) + 1.0)
    left = np.concatenate([[0.0], np.cumsum(density)])
    stored = left[-1] - left
    cost = BLAS_NS * n * n / 2 + AXPY_NS * n * stored + SCATTER_NS * stored * stored / 2
    return int(np.argmin(cost))


def gram_add(
    rows: Rows, factor: Any, transform: Transform, n_dense: int, gram: Any, sums: Any
) -> None:
    """Add a block to a partial Gram matrix, in place.

    Parameters
    ----------
    rows
        Cells by columns; no (cell, column) twice. All rows count.
    factor
        float64, shape (cells,).
    transform
        Applied to each value.
    n_dense
        Number of leading columns that are dense.
    gram
        float64, shape (columns, columns); zeros to begin with.
    sums
        float64, shape (columns,): sums of transformed values.
    """
    form(rows.data, "gram").gram_add(rows, factor, transform, n_dense, gram, sums)


def upper(gram: Any) -> Any:
    """Copy the upper triangle, in panels of whole rows from the diagonal on, of a partial.

    For partials on a GPU, in which it is complete.

    Returns
    -------
    One dimension; such copies can be added up.
    """
    return form(gram, "gram").upper(gram)


def from_upper(flat: np.ndarray, n: int) -> np.ndarray:
    """Symmetric matrix of `n` columns, on the host, from the sum of what `upper` gave."""
    # Plain NumPy: the form that made the panels knows their shape.
    from scgpu_tasks.kernels._gpu import gram

    return gram.from_upper(flat, n)


def finish(gram: Any, n_dense: int) -> Any:
    """Symmetric Gram matrix from the sum of all partials; works in place."""
    return form(gram, "gram").finish(gram, n_dense)

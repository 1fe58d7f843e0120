"""The columns that PCA looks at, from a block of rows."""

from __future__ import annotations

from typing import Any

from scgpu_tasks.kernels._dispatch import form
from scgpu_tasks.kernels.rows import Rows


def select(rows: Rows, keep: Any, position: Any, n_selected: int) -> Rows:
    """Kept rows over selected columns, explicit zeros dropped.

    Parameters
    ----------
    rows
        Cells by genes; no (cell, gene) twice.
    keep
        bool, shape (cells,).
    position
        int32, shape (genes,): column of each gene in the result; -1 where it is left out.
    n_selected
        Number of columns of the result.

    Returns
    -------
    New arrays; indices in the smallest type, values in the type of `rows`. Indices of a row
    follow the order of `rows`, so they rise only where `position` does.
    """
    return form(rows.data, "select").select(rows, keep, position, n_selected)


def pack(rows: Rows) -> Rows:
    """Put values in the smallest type that holds them all exactly."""
    return form(rows.data, "select").pack(rows)

"""Sums over the cells for each gene, from a block of rows."""

from __future__ import annotations

from typing import Any

from scgpu_tasks.kernels._dispatch import form
from scgpu_tasks.kernels.rows import Rows
from scgpu_tasks.kernels.transform import Transform

# Columns of the table that `gene_moments` fills.
TOTAL, N_CELLS, SUM, SQUARES = 0, 1, 2, 3


def gene_moments(
    rows: Rows, group: Any, factor: Any, transform: Transform, n_groups: int
) -> tuple[Any, Any]:
    """Add up counts, values and their squares of each gene, for each group of cells.

    Parameters
    ----------
    rows
        Cells by genes; no (cell, gene) twice.
    group
        int32, shape (cells,): group of each cell, from 0; -1 where it is left out.
    factor
        float64, shape (cells,): what the transform multiplies the cell's values by.
    transform
        Applied to each value before SUM and SQUARES.
    n_groups
        Number of groups.

    Returns
    -------
    kept : float64, shape (groups, genes, 4)
        Sum of values, number of non-zero values, sum of transformed values, of their squares.
    left_out : float64, shape (genes, 2)
        Sum of values and number of non-zero values of the cells that are left out.

    Sums of whole numbers are exact up to 2**53, and rounded beyond.
    """
    return form(rows.data, "moments").gene_moments(rows, group, factor, transform, n_groups)


def clipped_moments(rows: Rows, group: Any, limit: Any) -> Any:
    """Add up values clipped from above and their squares, for each group of cells.

    Parameters
    ----------
    rows
        Cells by genes; no (cell, gene) twice.
    group
        int32, shape (cells,): group of each cell, from 0; -1 where it is left out.
    limit
        float64, shape (groups, genes): largest value of each gene in each group.

    Returns
    -------
    float64, shape (groups, genes, 2): sum, sum of squares.
    """
    return form(rows.data, "moments").clipped_moments(rows, group, limit)

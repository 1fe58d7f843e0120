"""Metrics of each cell from a block of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scgpu_tasks.kernels._dispatch import form
from scgpu_tasks.kernels.rows import Rows

# Counts that were exported and read again may be 0.999999999999999.
WHOLE_TOLERANCE = 1e-6


@dataclass
class CellMetrics:
    """Sums over the genes of each cell of a block.

    Attributes
    ----------
    n_genes
        Genes with a value other than zero, int64, shape (cells,).
    total
        Sum of values, float64, shape (cells,); exact where a row's absolute values, all whole
        numbers, add up to 2**53 at most; rounded beyond, never wrapped.
    set_totals
        Sum over each gene set, float64, shape (cells, sets); exact as `total`.
    top_totals
        Sum of the n largest values for each n asked for, float64, shape (cells, ns); exact as
        `total`.
    invalid_row, fractional_row
        First row with a negative, NaN or infinite value; first with one that is not within
        `WHOLE_TOLERANCE` of a whole number; -1 where there is none.
    """

    n_genes: Any
    total: Any
    set_totals: Any
    top_totals: Any
    invalid_row: int
    fractional_row: int


def cell_metrics(rows: Rows, gene_sets: Any, n_sets: int, tops: Sequence[int]) -> CellMetrics:
    """Metrics of each cell.

    Parameters
    ----------
    rows
        Cells by genes; no (cell, gene) twice.
    gene_sets
        uint64, shape (genes,): bit s is set where the gene belongs to set s.
    n_sets
        Number of sets, 64 at most.
    tops
        Numbers of highest genes to sum over, rising.

    Returns
    -------
    The metrics, in arrays of the same library as `rows`.
    """
    return form(rows.data, "qc").cell_metrics(rows, gene_sets, n_sets, tops)

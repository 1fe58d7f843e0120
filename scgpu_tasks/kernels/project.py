"""Scores of cells on principal components, from a block of rows."""

from __future__ import annotations

from typing import Any

from scgpu_tasks.kernels._dispatch import form
from scgpu_tasks.kernels.rows import Rows
from scgpu_tasks.kernels.transform import Transform


def project(
    rows: Rows, factor: Any, transform: Transform, components: Any, offset: Any, out: Any
) -> None:
    """Write (transformed values) @ components - offset to `out`.

    Parameters
    ----------
    rows
        Cells by columns; entries of one (cell, column) add up after the transform.
    factor
        float64, shape (cells,).
    transform
        Applied to each value.
    components
        float64, shape (columns, components).
    offset
        float64, shape (components,): the mean cell's scores.
    out
        float32, shape (cells, components); sums are made in float64.
    """
    form(rows.data, "project").project(rows, factor, transform, components, offset, out)

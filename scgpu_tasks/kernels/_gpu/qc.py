"""Metrics of each cell on the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from scgpu_tasks.kernels._gpu.module import (
    define,
    kernel,
    launch,
    launch_rows,
    on_device,
    processors,
)
from scgpu_tasks.kernels.qc import CellMetrics
from scgpu_tasks.kernels.rows import Rows

# Gene sets that one launch counts: SETS in qc.cu.
_SETS = 4
_NONE = np.iinfo(np.uint64).max


def cell_metrics(rows: Rows, gene_sets: Any, n_sets: int, tops: Sequence[int]) -> CellMetrics:
    """See `scgpu_tasks.kernels.qc.cell_metrics`. Waits for the current stream."""
    import cupy

    n_genes = cupy.empty(rows.n_rows, np.int64)
    total = cupy.empty(rows.n_rows, np.float64)
    set_totals = cupy.empty((rows.n_rows, n_sets), np.float64)
    firsts = cupy.asarray(np.full(2, _NONE, np.uint64))
    members = on_device(gene_sets, np.uint64)
    defines = define(rows.data.dtype, rows.indices.dtype)
    function = kernel("qc", "cell_metrics", defines)
    bits = 4 * -(-rows.n_cols // 32)
    for first in range(0, max(n_sets, 1), _SETS):
        sets = min(_SETS, n_sets - first)
        plan = (np.int32(first), np.int32(sets), np.int32(n_sets), np.int32(first == 0))
        launch_rows(
            function,
            rows.n_rows,
            (
                *rows[:3],
                rows.n_rows,
                np.int32(rows.n_cols),
                members,
                *plan,
                n_genes,
                total,
                set_totals,
                firsts,
            ),
            shared=bits if sets else 0,
        )
    top_totals = _top_totals(rows, tops, defines)
    invalid, fractional = (-1 if row == _NONE else int(row) for row in firsts.get())
    return CellMetrics(n_genes, total, set_totals, top_totals, invalid, fractional)


def _top_totals(rows: Rows, tops: Sequence[int], defines: tuple[tuple[str, str], ...]) -> Any:
    import cupy

    totals = cupy.zeros((rows.n_rows, len(tops)), np.float64)
    if len(tops):
        launch(
            kernel("qc", "top_totals", defines),
            (min(rows.n_rows, 16 * processors()),),
            (128,),
            (
                rows.indptr,
                rows.data,
                rows.n_rows,
                on_device(tops, np.int32),
                np.int32(len(tops)),
                totals,
            ),
        )
    return totals

"""Order, duplicates and dense blocks on the GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from scgpu_tasks.errors import FormatError
from scgpu_tasks.kernels._gpu.module import define, kernel, launch_items, launch_rows
from scgpu_tasks.kernels.rows import RowOrder, Rows, sum_type


def row_order(rows: Rows) -> RowOrder:
    """See `scgpu_tasks.kernels.rows.row_order`. Waits for the current stream."""
    import cupy

    nnz = len(rows.data)
    flags = cupy.zeros(3, np.int32)
    launch_rows(
        kernel("rows", "row_order", _defines(rows)),
        rows.n_rows,
        (rows.indptr, rows.indices, rows.n_rows, rows.n_cols, nnz, flags),
    )
    outside, falls, broken = flags.get()
    if broken:
        msg = f"indptr does not rise from 0 to {nnz}, the number of stored values"
        raise FormatError(msg)
    return RowOrder(not outside, not falls)


def canonical_rows(rows: Rows) -> Rows:
    """See `scgpu_tasks.kernels.rows.canonical_rows`. Waits for the current stream."""
    import cupy

    nnz = len(rows.data)
    wide = sum_type(rows.data.dtype)
    defines = _defines(rows)
    keys = cupy.empty(nnz, np.int64)
    launch_rows(
        kernel("rows", "row_keys", defines),
        rows.n_rows,
        (rows.indptr, rows.indices, rows.n_rows, rows.n_cols, keys),
    )
    # CuPy's argsort is stable: floats are added in stored order.
    order = cupy.argsort(keys)
    keys = keys[order]
    first = cupy.ones(nnz, bool)
    if nnz:
        first[1:] = keys[1:] != keys[:-1]
    starts = cupy.flatnonzero(first).astype(np.int64, copy=False)
    n_runs = len(starts)
    indices = cupy.empty(n_runs, rows.indices.dtype)
    data = cupy.empty(n_runs, wide)
    order = order.astype(np.int64, copy=False)
    launch_items(
        kernel("rows", "sum_runs", defines),
        n_runs,
        (starts, n_runs, nnz, order, keys, rows.data, rows.n_cols, indices, data),
    )
    edges = cupy.arange(rows.n_rows + 1, dtype=np.int64) * rows.n_cols
    indptr = cupy.searchsorted(keys[starts], edges).astype(np.int64, copy=False)
    return Rows(indptr, indices, data, rows.n_cols)


def dense_rows(values: Any) -> Rows:
    """See `scgpu_tasks.kernels.rows.dense_rows`. Waits for the current stream."""
    import cupy

    n_rows, n_cols = values.shape
    if values.dtype.name not in ("uint8", "uint16", "int32", "int64", "float32", "float64"):
        values = values.astype(np.promote_types(values.dtype, np.float32))
    values = cupy.ascontiguousarray(values)
    kind = np.uint16 if n_cols <= 1 << 16 else np.int32
    defines = define(values.dtype, kind, WIDE=sum_type(values.dtype))
    indptr = cupy.zeros(n_rows + 1, np.int64)
    counts = indptr[1:]
    launch_rows(
        kernel("rows", "dense_count", defines), n_rows, (values, n_rows, n_cols, counts)
    )
    indptr[1:] = cupy.cumsum(counts)
    nnz = int(indptr[-1])
    indices = cupy.empty(nnz, kind)
    data = cupy.empty(nnz, values.dtype)
    launch_rows(
        kernel("rows", "dense_fill", defines),
        n_rows,
        (values, n_rows, n_cols, indptr, indices, data),
    )
    return Rows(indptr, indices, data, n_cols)


def _defines(rows: Rows) -> tuple[tuple[str, str], ...]:
    return define(rows.data.dtype, rows.indices.dtype, WIDE=sum_type(rows.data.dtype))

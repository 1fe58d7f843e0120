"""Column selection on the GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from scgpu_tasks.kernels._gpu.module import (
    define,
    kernel,
    launch_items,
    launch_rows,
    on_device,
)
from scgpu_tasks.kernels.rows import Rows


def select(rows: Rows, keep: Any, position: Any, n_selected: int) -> Rows:
    """See `scgpu_tasks.kernels.select.select`. Waits for the current stream."""
    import cupy

    kind = np.uint16 if n_selected <= 1 << 16 else np.int32
    defines = define(rows.data.dtype, rows.indices.dtype, OUT_INDEX=kind)
    library = np if isinstance(keep, np.ndarray) else cupy
    kept = on_device(library.flatnonzero(keep), np.int64)
    place = on_device(position, np.int32)
    n_kept = len(kept)
    bits = 4 * -(-rows.n_cols // 32)
    head = (*rows[:3], kept, n_kept, np.int32(rows.n_cols), place)
    counts = cupy.empty(n_kept, np.int64)
    launch_rows(kernel("select", "select_count", defines), n_kept, (*head, counts), shared=bits)
    indptr = cupy.zeros(n_kept + 1, np.int64)
    indptr[1:] = cupy.cumsum(counts)
    nnz = int(indptr[-1])
    indices = cupy.empty(nnz, kind)
    data = cupy.empty(nnz, rows.data.dtype)
    launch_rows(
        kernel("select", "select_fill", defines),
        n_kept,
        (*head, indptr, indices, data),
        shared=bits,
    )
    return Rows(indptr, indices, data, n_selected)


def pack(rows: Rows) -> Rows:
    """See `scgpu_tasks.kernels.select.pack`. Waits for the current stream."""
    import cupy

    misfits = cupy.zeros(2, np.int32)
    defines = define(rows.data.dtype, rows.indices.dtype, OUT_INDEX=rows.indices.dtype)
    launch_items(
        kernel("select", "whole_numbers", defines),
        len(rows.data),
        (rows.data, len(rows.data), misfits),
    )
    for kind, misfit in zip((np.uint8, np.uint16), misfits.get(), strict=True):
        if rows.data.dtype.itemsize > np.dtype(kind).itemsize and not misfit:
            return rows._replace(data=rows.data.astype(kind))
    return rows

"""Scores on principal components on the GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from scgpu_tasks.kernels._gpu.module import (
    define,
    kernel,
    launch,
    on_device,
    processors,
)
from scgpu_tasks.kernels.rows import Rows
from scgpu_tasks.kernels.transform import Transform

# Components of one warp: two for each lane.
_WIDTH = 64


def project(
    rows: Rows, factor: Any, transform: Transform, components: Any, offset: Any, out: Any
) -> None:
    """See `scgpu_tasks.kernels.project.project`.

    Components are rounded to float32, sums are float64: scores are within 1e-7 of the largest
    product that goes into them.
    """
    import cupy

    n_columns, n_comps = components.shape
    stride = -(-n_comps // _WIDTH) * _WIDTH
    loadings = cupy.zeros((n_columns, stride), np.float32)
    loadings[:, :n_comps] = on_device(components, np.float32)
    launch(
        kernel("project", "project", define(rows.data.dtype, rows.indices.dtype)),
        (min(-(-rows.n_rows // 8), 32 * processors()), stride // _WIDTH),
        (256,),
        (
            *rows[:3],
            on_device(factor, np.float64),
            np.int32(transform),
            rows.n_rows,
            loadings,
            np.int32(n_comps),
            np.int32(stride),
            on_device(offset, np.float64),
            out,
        ),
    )

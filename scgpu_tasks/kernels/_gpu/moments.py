"""Sums over the cells for each gene on the GPU.

Counts and sums of whole numbers are integer atomics in shared memory: exact in any order. Sums
of transformed values are float64 additions in the order of the rows, part by part: each part is
a run of rows that one thread block adds up in shared memory, and parts are combined in order.
Against exact arithmetic the relative error is that of float64 summation, below 1e-12.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from scgpu_tasks.kernels._gpu.module import define, kernel, launch, on_device, shared_bytes
from scgpu_tasks.kernels.rows import Rows
from scgpu_tasks.kernels.transform import Transform

# Rows of a part: many enough that setting up and writing out its sums costs little. A count of
# rows must fit the 12 bits that gene_counts in moments.cu has for it.
_PART_ROWS, _MAX_PART_ROWS, _PARTS = 256, 4095, 512
# Shared memory that gene_sums needs beside its sums: BATCH rows' places and factors.
_BATCH_BYTES = 256 * 24 + 1024
# The code after those of Transform in common.cuh.
_CLIP = 4


@dataclass(frozen=True)
class _Parts:
    """Runs of rows of one group each, on the device; the cells that are left out come first."""

    order: Any
    first: Any
    stop: Any
    group: Any
    group_first: Any
    n_left_out: int
    n_parts: int


def gene_moments(
    rows: Rows, group: Any, factor: Any, transform: Transform, n_groups: int
) -> tuple[Any, Any]:
    """See `scgpu_tasks.kernels.moments.gene_moments`. Waits for the current stream."""
    import cupy

    parts = _cut(group, n_groups)
    counts, totals, odd = _counts(rows, parts, n_groups)
    kept = cupy.empty((n_groups, rows.n_cols, 4), np.float64)
    kept[:, :, 2:] = _sums(rows, parts, factor, None, int(transform), n_groups)
    left_out = cupy.empty((rows.n_cols, 2), np.float64)
    if int(odd.get()[0]):
        # Not counts: the totals are float64 sums in the order of the rows.
        everyone = _cut(np.where(_host(group) < 0, n_groups, _host(group)), n_groups + 1)
        totals = _sums(rows, everyone, None, None, Transform.IDENTITY, n_groups + 1)[:, :, 0]
    kept[:, :, 0], left_out[:, 0] = totals[:n_groups], totals[n_groups]
    kept[:, :, 1], left_out[:, 1] = counts[:n_groups], counts[n_groups]
    return kept, left_out


def clipped_moments(rows: Rows, group: Any, limit: Any) -> Any:
    """See `scgpu_tasks.kernels.moments.clipped_moments`."""
    n_groups = len(limit)
    return _sums(rows, _cut(group, n_groups), None, limit, _CLIP, n_groups)


def column_sums(rows: Rows, factor: Any, transform: Transform) -> Any:
    """Sum and sum of squares of each column's transformed values, float64, (columns, 2)."""
    parts = _cut(np.zeros(rows.n_rows, np.int32), 1)
    return _sums(rows, parts, factor, None, int(transform), 1)[0]


def _host(array: Any) -> np.ndarray:
    return array.get() if hasattr(array, "get") else np.asarray(array)


def _cut(group: Any, n_groups: int) -> _Parts:
    codes = _host(group)
    # NumPy sorts 16-bit integers by radix.
    small = codes.astype(np.int16) if n_groups < 1 << 15 else codes
    order = np.argsort(small, kind="stable").astype(np.int32)
    sizes = np.bincount(codes + 1, minlength=n_groups + 1)
    ends = np.cumsum(sizes)
    height = min(max(_PART_ROWS, -(-len(codes) // _PARTS)), _MAX_PART_ROWS)
    n_parts = -(-sizes // height)
    owner = np.repeat(np.arange(n_groups + 1), n_parts)
    ordinal = np.arange(len(owner)) - np.repeat(np.cumsum(n_parts) - n_parts, n_parts)
    first = (ends - sizes)[owner] + ordinal * height
    stop = np.minimum(first + height, ends[owner])
    # Left-out cells count in the last slot.
    slot = np.where(owner == 0, n_groups, owner - 1)
    table = np.stack([first, stop, slot]).astype(np.int32)
    starts, stops, slots = on_device(table, np.int32)
    edges = np.cumsum(n_parts) - n_parts[0]
    return _Parts(
        on_device(order, np.int32),
        starts,
        stops,
        slots,
        on_device(edges, np.int32),
        int(n_parts[0]),
        len(owner),
    )


def _tile(n_genes: int, gene_bytes: int, spare: int) -> tuple[int, int]:
    """Genes whose sums fit into shared memory, and into how many such tiles all genes fall."""
    most = (shared_bytes() - spare) // gene_bytes
    n_tiles = max(-(-n_genes // most), 1)
    return -(-n_genes // n_tiles), n_tiles


def _counts(rows: Rows, parts: _Parts, n_groups: int) -> tuple[Any, Any, Any]:
    """Non-zero values and totals, uint64, (groups + 1, genes); a flag for odd values."""
    import cupy

    n_genes = rows.n_cols
    counts = cupy.zeros((n_groups + 1, n_genes), np.uint64)
    totals = cupy.zeros((n_groups + 1, n_genes), np.uint64)
    odd = cupy.zeros(1, np.int32)
    tile, n_tiles = _tile(n_genes, 4, 1024)
    launch(
        kernel("moments", "gene_counts", define(rows.data.dtype, rows.indices.dtype)),
        (parts.n_parts, n_tiles),
        (1024,),
        (
            *rows[:3],
            parts.order,
            parts.first,
            parts.stop,
            parts.group,
            np.int32(n_genes),
            np.int32(tile),
            counts,
            totals,
            odd,
        ),
        shared=4 * tile,
    )
    return counts, totals, odd


def _sums(
    rows: Rows, parts: _Parts, factor: Any, limit: Any, transform: int, n_groups: int
) -> Any:
    """Add up values and squares: float64, (groups, genes, 2)."""
    import cupy

    n_genes = rows.n_cols
    out = cupy.empty((n_groups, n_genes, 2), np.float64)
    n_parts = parts.n_parts - parts.n_left_out
    partial = cupy.empty((n_parts, n_genes, 2), np.float64)
    unused = partial.reshape(-1)[:0]
    factor = unused if factor is None else on_device(factor, np.float64)
    limit = unused if limit is None else on_device(limit, np.float64)
    tile, n_tiles = _tile(n_genes, 16, _BATCH_BYTES)
    per_row = len(rows.data) / max(rows.n_rows, 1)
    kept = slice(parts.n_left_out, None)
    launch(
        kernel("moments", "gene_sums", define(rows.data.dtype, rows.indices.dtype)),
        (n_parts, n_tiles),
        (1024 if per_row > 512 else 256,),
        (
            *rows[:3],
            parts.order,
            parts.first[kept],
            parts.stop[kept],
            parts.group[kept],
            factor,
            limit,
            np.int32(n_genes),
            np.int32(tile),
            np.int32(transform),
            partial,
        ),
        shared=16 * tile,
    )
    launch(
        kernel("moments", "combine_parts", define(rows.data.dtype, rows.indices.dtype)),
        (-(-n_genes // 32), n_groups),
        (32, 8),
        (partial, parts.group_first, np.int32(n_genes), out),
    )
    return out

"""Gram matrix on the GPU: tiles of dense rows, matrix products, float64 across tiles.

The column mean of a block is taken off its values before the product and put back after it, in
float64, so that the product's rounding errors are relative to the covariance and not to the
means. The diagonal comes from float64 sums. Only the upper triangle is multiplied, in panels of
rows.

Products are float64 by default: a GPU for data centres makes them on its tensor cores, as fast
as float32. The other precisions are for comparison, and for cards that are slow in float64. A
tensor core's float32 accumulator truncates, which makes all variances a little too small; so
rows are multiplied in short stretches, whose products are added up in float64.

Errors are given in docs/benchmarks.md, against float64, relative to the square root of the
product of the two genes' sums of squares around their means.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from threading import local
from typing import Any

import numpy as np

from scgpu_tasks.errors import ParameterError
from scgpu_tasks.kernels._gpu.module import (
    define,
    kernel,
    launch,
    memory_limit,
    on_device,
    shared_bytes,
)
from scgpu_tasks.kernels._gpu.moments import column_sums
from scgpu_tasks.kernels.rows import Rows
from scgpu_tasks.kernels.transform import Transform

# From cublas_api.h and library_types.h.
_OP_N, _OP_T, _DEFAULT_ALGORITHM = 0, 1, -1
_R_32F, _R_64F, _R_16F = 0, 1, 2
_COMPUTE_32F, _COMPUTE_64F, _COMPUTE_TF32 = 68, 70, 77
_FILL_LOWER = 0


@dataclass(frozen=True)
class Precision:
    """How tiles are stored and multiplied; `form` is FORM in gram.cu.

    Attributes
    ----------
    low_weight
        Unit of the second part of a pair; 0 where numbers are not pairs.
    stretch
        Rows of one product.
    symmetric
        Whether cuBLAS's product of a matrix with itself (syrk) is used.
    """

    form: int
    stored: str
    work: str
    product: str
    stored_type: int
    product_type: int
    compute: int
    low_weight: float
    stretch: int
    symmetric: bool = False


PRECISIONS: dict[str, Precision] = {
    "float64": Precision(
        3, "float64", "float64", "float64", _R_64F, _R_64F, _COMPUTE_64F, 0.0, 4096
    ),
    "float64 syrk": Precision(
        3, "float64", "float64", "float64", _R_64F, _R_64F, _COMPUTE_64F, 0.0, 4096, True
    ),
    "float32": Precision(
        1, "float32", "float32", "float32", _R_32F, _R_32F, _COMPUTE_32F, 0.0, 4096
    ),
    # Pairs of half-precision numbers, 22 bits together, on tensor cores.
    "float16x2": Precision(
        0, "float16", "float32", "float32", _R_16F, _R_32F, _COMPUTE_32F, 2.0**-11, 1024
    ),
    "tf32x2": Precision(
        2, "float32", "float32", "float32", _R_32F, _R_32F, _COMPUTE_TF32, 1.0, 1024
    ),
    "tf32": Precision(
        1, "float32", "float32", "float32", _R_32F, _R_32F, _COMPUTE_TF32, 0.0, 1024
    ),
}
PRECISION = "float64"
# Bytes of products, and of a tile, that wait on the device at a time; and their share of it.
_SCRATCH, _SCRATCH_SHARE = 1 << 29, 1 / 32
# Rows of a panel: many keep a product efficient, few multiply less below the diagonal.
PANEL = 512
# Rows of a panel of a Gram matrix on its way to the host, without most of the lower triangle.
_UPPER_ROWS = 256
# Columns are a multiple of this: tensor cores want aligned rows.
_ALIGN = 16
# The square root of a column's sum of squares becomes at most this, so that every number is
# well inside half precision's range.
_TOP = 2.0**13

_handles = local()


def gram_add(
    rows: Rows,
    factor: Any,
    transform: Transform,
    n_dense: int,
    gram: Any,
    sums: Any,
    *,
    precision: str | None = None,
    stretch: int | None = None,
    panel: int | None = None,
) -> None:
    """See `scgpu_tasks.kernels.gram.gram_add`.

    Parameters
    ----------
    n_dense
        Says only which triangle `finish` expects to be filled: all columns are dense here.
    precision
        One of `PRECISIONS`. Default: `PRECISION`.
    stretch
        Rows of one product. Default: the precision's.
    panel
        Rows of the Gram matrix that one product fills. Default: `PANEL`.

    Raises
    ------
    ParameterError
        There is no such precision.
    """
    how = PRECISIONS.get(precision or PRECISION)
    if how is None:
        msg = f"gram precision {precision!r} is not one of {', '.join(PRECISIONS)}"
        raise ParameterError(msg)
    if rows.n_rows == 0 or rows.n_cols == 0:
        return
    factor = on_device(factor, np.float64)
    moments = column_sums(rows, factor, transform)
    block = _Block(
        rows, factor, transform, how, moments, stretch or how.stretch, panel or PANEL
    )
    # What needs memory comes first: a block that runs out of it leaves no trace.
    block.add(n_dense, gram)
    sums += block.totals


def finish(gram: Any, n_dense: int) -> Any:
    """See `scgpu_tasks.kernels.gram.finish`."""
    import cupy

    sparse = gram[n_dense:, n_dense:]
    diagonal = cupy.arange(len(sparse))
    values = sparse[diagonal, diagonal]
    sparse += sparse.T.copy()
    sparse[diagonal, diagonal] = values
    gram[:n_dense, n_dense:] = gram[n_dense:, :n_dense].T
    return gram


def upper(gram: Any) -> Any:
    """See `scgpu_tasks.kernels.gram.upper`."""
    import cupy

    n = len(gram)
    flat = cupy.empty(sum(h * (n - low) for low, h in _panels(n)), gram.dtype)
    for part, out in zip(_panels(n), _cut_panels(flat, n), strict=True):
        out[...] = gram[part[0] : part[0] + part[1], part[0] :]
    return flat


def from_upper(flat: np.ndarray, n: int) -> np.ndarray:
    """See `scgpu_tasks.kernels.gram.from_upper`."""
    gram = np.empty((n, n))
    for (low, height), panel in zip(_panels(n), _cut_panels(flat, n), strict=True):
        rows = slice(low, low + height)
        gram[rows, low:] = panel
        gram[low + height :, rows] = panel[:, height:].T
        corner = gram[rows, rows]
        below = np.tril_indices(height, -1)
        corner[below] = corner.T[below]
    return gram


def _panels(n: int) -> list[tuple[int, int]]:
    """First row and height of each panel of an upper triangle."""
    return [(low, min(_UPPER_ROWS, n - low)) for low in range(0, n, _UPPER_ROWS)]


def _cut_panels(flat: Any, n: int) -> list[Any]:
    panels, at = [], 0
    for low, height in _panels(n):
        size = height * (n - low)
        panels.append(flat[at : at + size].reshape(height, n - low))
        at += size
    return panels


class _Block:
    """One block of rows on its way to the Gram matrix."""

    def __init__(
        self,
        rows: Rows,
        factor: Any,
        transform: Transform,
        how: Precision,
        moments: Any,
        stretch: int,
        panel: int,
    ) -> None:
        import cupy

        self.rows, self.factor, self.transform, self.how = rows, factor, transform, how
        self.padded = -(-rows.n_cols // _ALIGN) * _ALIGN
        self.width = self.padded * (2 if how.low_weight else 1)
        self.stretch = min(stretch, -(-rows.n_rows // _ALIGN) * _ALIGN)
        item = np.dtype(how.product).itemsize
        self.scratch = min(_SCRATCH, int(_SCRATCH_SHARE * memory_limit()))
        most = max(_ALIGN, self.scratch // (item * self.width) // _ALIGN * _ALIGN)
        self.panel = min(-(-panel // _ALIGN) * _ALIGN, most, self.padded)
        self.totals, self.squares = moments[:, 0].copy(), moments[:, 1].copy()
        self.shift = self.totals / rows.n_rows
        # |value - mean| is at most twice the root of the sum of squares.
        reach = cupy.maximum(2.0 * cupy.sqrt(self.squares), 1e-300)
        self.scale = cupy.exp2(cupy.floor(cupy.log2(_TOP / reach)))
        self.scale[self.squares == 0.0] = 1.0
        self.base = cupy.zeros(self.padded, how.work)
        self.base[: rows.n_cols] = -self.shift * self.scale
        self.defines = define(
            rows.data.dtype, rows.indices.dtype, FORM=how.form, PRODUCT=how.product
        )

    def add(self, n_dense: int, gram: Any) -> None:
        """Add the block to `gram`."""
        import cupy

        n_columns = self.rows.n_cols
        sums = cupy.zeros((self.padded, self.width), np.float64)
        self._products(sums)
        launch(
            kernel("gram", "add_gram", self.defines),
            (-(-n_columns // 32), -(-n_columns // 8)),
            (32, 8),
            (
                sums,
                self.width,
                np.int32(self.padded),
                np.float64(self.how.low_weight),
                np.int32(n_columns),
                np.int32(n_dense),
                np.float64(self.rows.n_rows),
                self.shift,
                self.scale,
                self.totals,
                self.squares,
                gram,
            ),
        )

    def _products(self, sums: Any) -> None:
        """Add the products of all stretches to `sums`, float64, (padded, width)."""
        import cupy

        n_stretches = -(-self.rows.n_rows // self.stretch)
        one = self.stretch * self.width * np.dtype(self.how.stored).itemsize
        waiting = self.panel * self.width * np.dtype(self.how.product).itemsize
        at_once = max(1, min(n_stretches, self.scratch // max(one, waiting)))
        tile = cupy.empty((at_once * self.stretch, self.width), self.how.stored)
        products = None
        if not self.how.symmetric:
            products = cupy.empty(at_once * self.panel * self.width, self.how.product)
        for first in range(0, n_stretches, at_once):
            n = min(at_once, n_stretches - first)
            self._fill(tile, first * self.stretch, n * self.stretch)
            if products is None:
                self._multiply_symmetric(tile, n * self.stretch, sums)
                continue
            for low in range(0, self.padded, self.panel):
                self._add_panel(tile, products, low, n, sums)

    def _fill(self, tile: Any, first_row: int, n_rows: int) -> None:
        item = np.dtype(self.how.work).itemsize
        # As many pieces of columns as shared memory asks for, of about the same width.
        n_pieces = -(-self.padded * item // (shared_bytes() - 1024))
        piece = -(-self.padded // (n_pieces * _ALIGN)) * _ALIGN
        launch(
            kernel("gram", "fill_tile", self.defines),
            (n_rows, -(-self.padded // piece)),
            (256,),
            (
                *self.rows[:3],
                self.factor,
                np.int32(self.transform),
                first_row,
                self.rows.n_rows,
                np.int32(self.padded),
                np.int32(piece),
                self.shift,
                self.scale,
                self.base,
                tile,
            ),
            shared=piece * item,
        )

    def _add_panel(self, tile: Any, products: Any, low: int, n: int, sums: Any) -> None:
        """Add a panel of columns from `low` on, transposed, times all columns from `low` on."""
        from cupy_backends.cuda.libs import cublas

        how, width, step = self.how, self.width, self.stretch * self.width
        height, left = min(self.panel, self.padded - low), width - low
        one, zero = _scalars(how.work)
        start = tile.data.ptr + low * tile.dtype.itemsize
        corner = sums.reshape(-1)[low * width + low :]
        # cuBLAS counts columns first: its matrix (width x rows) is the tile as it lies.
        cublas.gemmStridedBatchedEx(
            *(_handle(), _OP_N, _OP_T, left, height, self.stretch),
            *(one.ctypes.data, start, how.stored_type, width, step),
            *(start, how.stored_type, width, step),
            *(zero.ctypes.data, products.data.ptr, how.product_type, left),
            *(height * left, n, how.compute, _DEFAULT_ALGORITHM),
        )
        launch(
            kernel("gram", "add_products", self.defines),
            (-(-left // 256), height),
            (256,),
            (products, left, height * left, np.int32(n), width, corner),
        )

    def _multiply_symmetric(self, tile: Any, n_rows: int, sums: Any) -> None:
        """Add the tile's product with itself to the upper triangle of `sums`."""
        from cupy_backends.cuda.libs import cublas

        one, _ = _scalars(self.how.work)
        scalar = one.ctypes.data
        # Columns first, as cuBLAS has it, the upper triangle is the lower one.
        cublas.dsyrk(
            *(_handle(), _FILL_LOWER, _OP_N, self.width, n_rows),
            *(scalar, tile.data.ptr, self.width, scalar, sums.data.ptr, self.width),
        )


@cache
def _scalars(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    return np.ones(1, dtype), np.zeros(1, dtype)


def _handle() -> int:
    """Give this thread's cuBLAS handle, set to its stream: others do not change its results."""
    import cupy
    from cupy_backends.cuda.libs import cublas

    device = int(cupy.cuda.runtime.getDevice())
    mine = _handles.__dict__.setdefault("handles", {})
    if device not in mine:
        mine[device] = cublas.create()
    cublas.setStream(mine[device], cupy.cuda.get_current_stream().ptr)
    return int(mine[device])

"""Matrices as row blocks: stores, arrays in memory and Dask arrays behind one face."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import scipy.sparse as sp

from scgpu_tasks.errors import FormatError
from scgpu_tasks.kernels.rows import Rows, canonical_rows, dense_rows, make_rows, row_order

_CELLS = 20_000
_VALUES = 1 << 25
# A dense block becomes CSR piece by piece.
_DENSE_VALUES = 1 << 23


class BlockSource(Protocol):
    """Row blocks of a matrix, such as `scgpu_tasks.io.rows.RowBlocks`.

    `bounds` are the n_blocks + 1 row numbers at which blocks begin and end.
    """

    @property
    def shape(self) -> tuple[int, int]:
        """Cells and genes."""

    @property
    def bounds(self) -> Any:
        """Row boundaries of the blocks."""

    def read(self, start: int, stop: int) -> Any:
        """Rows start:stop, with indptr, indices and data, or with values."""


class MemoryBlocks:
    """Row blocks of a SciPy CSR matrix or a NumPy array; blocks are views."""

    def __init__(self, matrix: Any) -> None:
        self.matrix = matrix
        self.shape: tuple[int, int] = matrix.shape
        self.bounds = _cut(matrix)

    def read(self, start: int, stop: int) -> Any:
        """Rows start:stop."""
        return (
            self.matrix[start:stop]
            if isinstance(self.matrix, np.ndarray)
            else _SparseBlock(self.matrix, start, stop)
        )


class _SparseBlock:
    def __init__(self, matrix: Any, start: int, stop: int) -> None:
        indptr = matrix.indptr[start : stop + 1].astype(np.int64)
        self.indices = matrix.indices[indptr[0] : indptr[-1]]
        self.data = matrix.data[indptr[0] : indptr[-1]]
        self.indptr = indptr - indptr[0]
        self.shape = (stop - start, matrix.shape[1])


class DaskBlocks:
    """Row blocks of a Dask array, one for each of its chunks that has rows."""

    any_rows = False

    def __init__(self, array: Any) -> None:
        if array.ndim != 2 or array.numblocks[1] != 1:
            msg = (
                f"the Dask array has chunks {array.chunks}: rows must be whole. "
                "Use x.rechunk((20_000, -1))"
            )
            raise FormatError(msg)
        if any(np.isnan(n) for n in array.chunks[0]):
            msg = (
                "the Dask array has chunks of unknown length: call compute_chunk_sizes() first"
            )
            raise FormatError(msg)
        self.shape: tuple[int, int] = array.shape
        heights = np.array(array.chunks[0], np.int64)
        # A block is known by its rows: one without any has none to be known by.
        filled = heights > 0
        self.bounds = np.concatenate([[0], np.cumsum(heights[filled])]).astype(np.int64)
        self.blocks = array.to_delayed().ravel()[filled]

    def read(self, start: int, stop: int) -> Any:
        """Rows start:stop, which must be one block."""
        return self.blocks[self._number(start, stop)].compute(scheduler="synchronous")

    def block(self, start: int, stop: int) -> Any:
        """Give the Delayed of rows start:stop, which must be one block."""
        return self.blocks[self._number(start, stop)]

    def _number(self, start: int, stop: int) -> int:
        number = int(np.searchsorted(self.bounds, start, side="right")) - 1
        if self.bounds[number] != start or self.bounds[number + 1] != stop:
            msg = f"rows {start}:{stop} are not one block of the Dask array"
            raise FormatError(msg)
        return number


def as_source(matrix: Any) -> BlockSource:
    """Row blocks of whatever holds a matrix.

    Parameters
    ----------
    matrix
        `RowBlocks`, a Dask array with whole rows in each chunk, a SciPy sparse matrix or array,
        or a NumPy array.

    Raises
    ------
    FormatError
        The matrix has another form.
    """
    if hasattr(matrix, "bounds") and hasattr(matrix, "read"):
        return matrix
    if hasattr(matrix, "to_delayed") and hasattr(matrix, "numblocks"):
        return DaskBlocks(matrix)
    if sp.issparse(matrix) and matrix.ndim == 2:
        return MemoryBlocks(matrix.tocsr())
    if isinstance(matrix, np.ndarray) and matrix.ndim == 2:
        return MemoryBlocks(matrix)
    kind = f"{type(matrix).__module__}.{type(matrix).__qualname__}"
    msg = (
        f"X is a {kind}; it must be a Dask array, a SciPy sparse matrix or a NumPy array. "
        "Open a store with scgpu_tasks.io.read_lazy"
    )
    raise FormatError(msg)


def block_rows(block: Any, n_cols: int) -> list[Rows]:
    """Rows of a block that kernels can take: in range, no (row, column) twice.

    Parameters
    ----------
    block
        Something with indptr, indices and data, or with values, or a dense array.
    n_cols
        Number of columns that the matrix has.

    Returns
    -------
    Pieces of consecutive rows; one, unless the block is dense.

    Raises
    ------
    FormatError
        The block has another width, or indices that are not columns.
    """
    if block.shape[1] != n_cols:
        msg = f"a block of {block.shape[1]} columns in a matrix of {n_cols}"
        raise FormatError(msg)
    if getattr(block, "format", "csr") != "csr":
        block = block.tocsr()
    # A dense block of a store has an indptr too: None.
    if getattr(block, "indptr", None) is None:
        values = getattr(block, "values", block)
        height = max(1, _DENSE_VALUES // max(n_cols, 1))
        pieces = [values[i : i + height] for i in range(0, len(values), height)]
        return [_cast(dense_rows(piece)) for piece in pieces]
    rows = make_rows(block.indptr, block.indices, block.data, n_cols)
    order = row_order(rows)
    if not order.in_range:
        msg = f"column indices run outside 0..{n_cols - 1}: the matrix is damaged"
        raise FormatError(msg)
    return [rows if order.canonical else canonical_rows(rows)]


def _cast(rows: Rows) -> Rows:
    return make_rows(*rows)


def _cut(matrix: Any) -> np.ndarray:
    """Blocks of 20,000 rows, fewer where they would hold more than 2**25 values."""
    n_rows = matrix.shape[0]
    if n_rows == 0:
        return np.zeros(1, np.int64)
    stored = matrix.size if isinstance(matrix, np.ndarray) else matrix.nnz
    per_row = max(1.0, stored / n_rows)
    height = int(np.clip(_VALUES / per_row, 1, _CELLS))
    return np.append(np.arange(0, n_rows, height), n_rows).astype(np.int64)

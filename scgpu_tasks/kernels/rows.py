"""CSR rows as bare arrays: what every kernel takes, and how other forms become it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from scgpu_tasks.errors import FormatError
from scgpu_tasks.kernels._dispatch import form
from scgpu_tasks.kernels.arrays import is_on_gpu


class Rows(NamedTuple):
    """Some rows of a matrix in CSR form.

    `indices` and `data` keep their stored types; `indptr` starts at 0. Indices may be unsorted,
    repeated within a row, or point to explicit zeros, unless a function says otherwise.
    """

    indptr: Any
    indices: Any
    data: Any
    n_cols: int

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return len(self.indptr) - 1


class RowOrder(NamedTuple):
    """What one look at the indices tells."""

    in_range: bool
    canonical: bool


# Types that kernels are compiled for; others are cast to the next that holds all their values.
_INDEX_TYPES = (np.uint16, np.int32, np.int64)
_DATA_TYPES = (np.uint8, np.uint16, np.int32, np.int64, np.float32, np.float64)


def make_rows(indptr: Any, indices: Any, data: Any, n_cols: int) -> Rows:
    """Rows in types that the kernels are compiled for; no copy where they already are.

    Raises
    ------
    FormatError
        The parts do not make a CSR matrix.
    """
    indptr = indptr.astype(np.int64, copy=False)
    nnz = len(data)
    # On a GPU `row_order` looks at indptr with the indices: each look here would wait for it.
    rises = (len(indptr) > 1 or nnz == 0) if is_on_gpu(indptr) else _rises(indptr, nnz)
    if len(indices) != nnz or not rises:
        msg = (
            f"indptr must rise from 0 to the number of stored values, but it goes from "
            f"{indptr[0]} to {indptr[-1]} over {len(indices)} indices and {nnz} values"
        )
        raise FormatError(msg)
    indices = _as_kernel_type(indices, _INDEX_TYPES)
    # A reader may know indptr on the host while the values are on a GPU.
    indptr = np.asarray(indptr, like=data)
    return Rows(indptr, indices, _as_kernel_type(data, _DATA_TYPES), int(n_cols))


def _rises(indptr: np.ndarray, nnz: int) -> bool:
    """Tell whether indptr rises from 0 to the number of values."""
    return bool(indptr[0] == 0 and indptr[-1] == nnz and not (np.diff(indptr) < 0).any())


def row_order(rows: Rows) -> RowOrder:
    """Whether all indices are columns, and whether they strictly rise within each row.

    Raises
    ------
    FormatError
        The rows are on a GPU, and their indptr does not rise from 0 to the number of values.
    """
    return form(rows.data, "rows").row_order(rows)


def canonical_rows(rows: Rows) -> Rows:
    """Make indices rise strictly within each row; repeated entries are summed.

    Sums are in `sum_type`. The input is not changed.
    """
    return form(rows.data, "rows").canonical_rows(rows)


def sum_type(dtype: np.dtype[Any]) -> type[np.int64] | type[np.float64]:
    """Type in which values of a row are added up: int64 only where no row can overflow it.

    That many values of 32 bits fit no memory. float64 keeps whole numbers up to 2**53, and
    rounds above, where int64 values could wrap.
    """
    return np.int64 if dtype.kind != "f" and dtype.itemsize <= 4 else np.float64


def dense_rows(values: Any) -> Rows:
    """Non-zero values (NaN included) of a dense block, in CSR form."""
    return form(values, "rows").dense_rows(values)


def _as_kernel_type(array: Any, types: tuple[type, ...]) -> Any:
    if array.dtype.newbyteorder("=") in [np.dtype(kind) for kind in types]:
        return array.astype(array.dtype.newbyteorder("="), copy=False)
    for kind in types:
        if np.can_cast(array.dtype, kind, "safe"):
            return array.astype(kind)
    # Left: uint64 and extended floats. Values beyond the last type come out as invalid.
    return array.astype(types[-1])

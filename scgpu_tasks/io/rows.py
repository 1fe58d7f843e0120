"""A matrix of cells in a store, read in blocks of rows.

`RowBlocks` says where the matrix is and how it is cut; it is small, holds no open file, and
opens what it needs in whichever process reads. What a process has opened it keeps, until the
store's metadata change.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from scgpu_tasks.errors import DataError, ParameterError, StoreError
from scgpu_tasks.io.arrays import REWRITE
from scgpu_tasks.io.elements import FolderFiles, find_matrix, open_files
from scgpu_tasks.io.fingerprint import scan_element
from scgpu_tasks.io.matrices import CSRElement, DenseElement, open_matrix, opened
from scgpu_tasks.io.memory import memory_limit
from scgpu_tasks.io.presence import require_written

if TYPE_CHECKING:
    import dask.array as da

ROWS_PER_BLOCK = 20_000
GPU_BLOCKS_PER_DEVICE = 55
"""Most blocks of a GPU."""

LEAST_GPU_BLOCKS = 8
"""Fewest blocks of a GPU, so that all threads of a worker have some."""

GPU_BLOCK_VALUES = 2**27
"""Values that fill a decoder call: 2,048 chunks of 256 KiB as float32. Fewer take as long."""

MAX_BLOCK_NNZ = 2**31 - 1
_MAX_EXACT_FLOAT32 = 2**24


@dataclass
class Block:
    """Rows of a matrix, in memory.

    Attributes
    ----------
    data
        Stored values, CSR only.
    indices
        Column of each value, in the stored integer type, CSR only. Neither sorted nor unique
        unless the store has them so.
    indptr
        int64, from 0, one entry more than there are rows, CSR only.
    values
        The matrix, dense only.
    shape
        Rows and columns.
    stored_bytes
        Bytes of the stored chunks that the read visited.
    """

    shape: tuple[int, int]
    stored_bytes: int
    data: Any = None
    indices: Any = None
    indptr: Any = None
    values: Any = None

    def to_matrix(self) -> Any:
        """Give the rows a matrix type that other packages know.

        Returns
        -------
        ``scipy.sparse.csr_matrix`` or ``numpy.ndarray``; of a block on a GPU,
        ``cupyx.scipy.sparse.csr_matrix`` or ``cupy.ndarray``. CSR has int32 index arrays where
        they suffice. CuPy's sparse matrices hold no integers, so there whole numbers become
        float32, or float64 where float32 would round one.

        Raises
        ------
        DataError
            A whole number does not fit float64 exactly.
        """
        if self.values is not None:
            return self.values
        wide = max(len(self.data), self.shape[1]) > np.iinfo(np.int32).max
        index_dtype = np.dtype(np.int64 if wide else np.int32)
        indices = self.indices.astype(index_dtype, copy=False)
        indptr = self.indptr.astype(index_dtype, copy=False)
        if isinstance(self.data, np.ndarray):
            return sp.csr_matrix((self.data, indices, indptr), shape=self.shape, copy=False)
        import cupy
        from cupyx.scipy.sparse import csr_matrix

        data = _as_gpu_float(self.data)
        return csr_matrix((data, indices, cupy.asarray(indptr)), shape=self.shape, copy=False)


def _as_gpu_float(data: Any) -> Any:
    """Cast to a type that CuPy's sparse matrices take, without changing a value."""
    if data.dtype.kind in "bfc":
        return data
    if data.dtype.itemsize <= 2 or not data.size:
        return data.astype(np.float32)
    largest = max(int(data.max()), -int(data.min()))
    if largest <= _MAX_EXACT_FLOAT32:
        return data.astype(np.float32)
    if largest > 2**53:
        msg = f"values up to {largest} in X cannot be held exactly in float64"
        raise DataError(msg)
    return data.astype(np.float64)


@dataclass(frozen=True, eq=False)
class RowBlocks:
    """A matrix of cells in a store, cut into blocks of rows.

    Attributes
    ----------
    store
        Absolute path of the store.
    element
        Where the matrix is in it: ``X`` or ``layers/…``.
    encoding
        ``csr_matrix`` or ``array``.
    shape
        Cells and genes.
    dtype
        Type of the values that blocks hold.
    bounds
        First row of each block and the number of rows, int64.
    offsets
        Stored values before each bound, int64; for a dense matrix all cells × genes count.
    nnz
        Stored values of a CSR matrix; None for a dense one.
    stored_bytes
        Size of the matrix's files.
    fingerprint
        Changes when the matrix's files change.
    device
        Where blocks go: ``cpu`` or ``gpu``.
    """

    store: str
    element: str
    encoding: str
    shape: tuple[int, int]
    dtype: np.dtype[Any]
    bounds: NDArray[np.int64] = field(repr=False)
    offsets: NDArray[np.int64] = field(repr=False)
    nnz: int | None
    stored_bytes: int
    fingerprint: str = field(repr=False)
    device: str = "cpu"

    @property
    def n_blocks(self) -> int:
        """Number of blocks; at least one, which may be empty."""
        return len(self.bounds) - 1

    @property
    def block_nnz(self) -> NDArray[np.int64]:
        """Stored values of each block."""
        return np.diff(self.offsets)

    def __dask_tokenize__(self) -> tuple[Any, ...]:
        """Token for Dask: the content, the cut, the device."""
        cut = (self.bounds.tobytes(), self.device)
        return ("RowBlocks", self.store, self.element, self.fingerprint, *cut)

    def read(self, start: int, stop: int) -> Block:
        """Read rows ``start:stop``, which need not be a block.

        Raises
        ------
        IndexError
            There are no such rows.
        CorruptChunkError
            A chunk is missing or cannot be decoded.
        FormatError
            ``indptr`` or ``indices`` make no CSR matrix; names the rows.
        StoreError
            The store is gone, or is not the one that was opened.
        """
        if not 0 <= start <= stop <= self.shape[0]:
            msg = f"rows {start} to {stop} asked of {self.shape[0]}"
            raise IndexError(msg)
        matrix = opened(self.store, self.element, self.device)
        if matrix.shape != self.shape or matrix.encoding != self.encoding:
            msg = (
                f"{self.element} of {self.store} was {self.encoding} {self.shape} and is now "
                f"{matrix.encoding} {matrix.shape}: the store was changed; open it again"
            )
            raise StoreError(msg)
        shape = (stop - start, self.shape[1])
        if isinstance(matrix, DenseElement):
            values, stored = matrix.read(start, stop)
            return Block(shape, stored, values=values)
        data, indices, indptr, stored = matrix.read(start, stop)
        return Block(shape, stored, data=data, indices=indices, indptr=indptr)

    def read_block(self, i: int) -> Block:
        """Read block `i`."""
        return self.read(int(self.bounds[i]), int(self.bounds[i + 1]))

    def to_dask(self) -> da.Array:
        """Make a Dask array whose blocks are `Block.to_matrix`, read when computed.

        Returns
        -------
        Array of shape (cells, genes), one column of blocks; its ``_meta`` is of the blocks'
        type. On a GPU blocks of int32 or wider whole numbers are promised as float32 and come
        as float64 where that is needed to keep a value.
        """
        import dask.array as da
        from dask._task_spec import Task
        from dask.base import tokenize
        from dask.highlevelgraph import HighLevelGraph

        name = f"rows-{tokenize(self)}"
        # Tasks travel one by one; the cut of all blocks need not come along with each.
        nothing = np.empty(0, np.int64)
        light = replace(self, bounds=nothing, offsets=nothing)
        bounds = self.bounds.tolist()
        graph: dict[Any, Any] = {}
        for i in range(self.n_blocks):
            key = (name, i, 0)
            graph[key] = Task(key, _read_matrix, light, bounds[i], bounds[i + 1])
        chunks = (tuple(np.diff(self.bounds).tolist()), (self.shape[1],))
        layers = HighLevelGraph.from_collections(name, graph, dependencies=[])
        return da.Array(layers, name, chunks, meta=self._meta())

    def _meta(self) -> Any:
        if self.device == "cpu":
            if self.encoding == "array":
                return np.empty((0, 0), self.dtype)
            return sp.csr_matrix((0, 0), dtype=self.dtype)
        import cupy
        from cupyx.scipy.sparse import csr_matrix

        if self.encoding == "array":
            return cupy.empty((0, 0), self.dtype)
        kept = self.dtype.kind in "bfc"
        return csr_matrix((0, 0), dtype=self.dtype if kept else np.float32)


def _read_matrix(rows: RowBlocks, start: int, stop: int) -> Any:
    return rows.read(start, stop).to_matrix()


def open_rows(
    store: str | os.PathLike[str],
    *,
    layer: str | None = None,
    chunks: int | str | Sequence[int] = "auto",
    device: str = "cpu",
    max_bytes: int | None = None,
) -> RowBlocks:
    """Find the matrix of cells in a store and cut it into blocks; read no values yet.

    Parameters
    ----------
    store
        An AnnData zarr store: a folder of zarr format 2 or 3, or a zip file of one.
    layer
        A layer's name; None for X.
    chunks
        Rows of a block; or the rows of each block; or ``"auto"``: 20,000, and on a GPU that
        decodes the chunks itself blocks of about 2²⁷ values, 8 to 55 a GPU; but fewer rows
        where a block would hold more than 2³¹ − 1 values or `max_bytes`.
    device
        Where blocks go: ``"cpu"`` or ``"gpu"``.
    max_bytes
        Most bytes of a block's decoded values and column numbers, with ``chunks="auto"``.
        Default: an eighth of the memory that one core has, or a 32nd of the GPU's that is
        free or that RMM may take.

    Returns
    -------
    The blocks; each is read when it is asked for.

    Raises
    ------
    StoreError
        There is no such store.
    FormatError
        It is not an AnnData zarr store, or has no such matrix, or not in rows.
    CorruptChunkError
        ``indptr`` cannot be decoded.
    ParameterError
        `chunks`, `device` or `max_bytes` is out of range.
    MissingPackageError
        `device` is a GPU, and a package or the GPU is missing.
    """
    if device not in ("cpu", "gpu"):
        msg = f"device must be 'cpu' or 'gpu', not {device!r}"
        raise ParameterError(msg)
    if device == "gpu":
        from scgpu_tasks.io.gpu_packages import require_gpu

        require_gpu()
    if max_bytes is not None and max_bytes < 1:
        msg = f"max_bytes must be at least 1, not {max_bytes}"
        raise ParameterError(msg)
    files = open_files(store)
    node = find_matrix(files, layer)
    if isinstance(files, FolderFiles):
        require_written(files.path, f"{node.name}/", remedy=REWRITE)
    matrix = open_matrix(files, node, device)
    offsets = matrix.row_offsets()
    bounds = _cut(matrix, offsets, chunks, device, max_bytes)
    stored_bytes, fingerprint = scan_element(files.path, node.name)
    return RowBlocks(
        store=files.path,
        element=node.name,
        encoding=matrix.encoding,
        shape=matrix.shape,
        dtype=matrix.dtype,
        bounds=bounds,
        offsets=np.asarray(offsets[bounds], np.int64),
        nnz=int(offsets[-1]) if isinstance(matrix, CSRElement) else None,
        stored_bytes=stored_bytes,
        fingerprint=fingerprint,
        device=device,
    )


def _cut(
    matrix: CSRElement | DenseElement,
    offsets: NDArray[Any],
    chunks: int | str | Sequence[int],
    device: str,
    max_bytes: int | None,
) -> NDArray[np.int64]:
    n_obs = matrix.shape[0]
    if isinstance(chunks, str):
        if chunks != "auto":
            msg = f"chunks must be 'auto', a number of rows or a list of them, not {chunks!r}"
            raise ParameterError(msg)
        rows = ROWS_PER_BLOCK
        if device == "gpu" and matrix.gpu_decodes:
            full = int(offsets[-1]) // (GPU_BLOCK_VALUES * _count_gpus())
            blocks = max(LEAST_GPU_BLOCKS, min(GPU_BLOCKS_PER_DEVICE, full)) * _count_gpus()
            rows = max(rows, -(-n_obs // blocks))
        if max_bytes is None:
            max_bytes = _default_max_bytes(device)
        most = max(1, min(MAX_BLOCK_NNZ, max_bytes // matrix.bytes_per_value))
        return _even_cut(n_obs, rows, offsets, most)
    if isinstance(chunks, int | np.integer):
        if chunks < 1:
            msg = f"chunks must be at least 1 row, not {chunks}"
            raise ParameterError(msg)
        return _even_cut(n_obs, int(chunks), offsets, MAX_BLOCK_NNZ)
    sizes = np.asarray(list(chunks), np.int64)
    if not len(sizes) or (sizes < 0).any() or sizes.sum() != n_obs:
        msg = f"chunks {list(chunks)} must be row counts that add up to {n_obs} cells"
        raise ParameterError(msg)
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _even_cut(n_obs: int, rows: int, offsets: NDArray[Any], most: int) -> NDArray[np.int64]:
    """Blocks of `rows` rows; those with more than `most` values are halved until they fit."""
    if n_obs == 0:
        return np.zeros(2, np.int64)
    todo = [(a, min(a + rows, n_obs)) for a in range(0, n_obs, rows)][::-1]
    bounds = [0]
    while todo:
        a, b = todo.pop()
        if b - a > 1 and int(offsets[b]) - int(offsets[a]) > most:
            middle = (a + b) // 2
            todo += [(middle, b), (a, middle)]
        else:
            bounds.append(b)
    return np.asarray(bounds, np.int64)


def _default_max_bytes(device: str) -> int:
    if device == "gpu":
        from scgpu_tasks.io.gpu_memory import memory_available

        return memory_available() // 32
    from dask.system import CPU_COUNT

    return min(2**30, memory_limit() // (8 * CPU_COUNT))


def _count_gpus() -> int:
    """GPUs that will read: one a worker of the current Dask client, or all of this machine."""
    from distributed import get_client

    try:
        return max(1, len(get_client().scheduler_info(n_workers=-1)["workers"]))
    except ValueError:
        import cupy

        return max(1, int(cupy.cuda.runtime.getDeviceCount()))

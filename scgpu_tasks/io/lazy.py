"""A store as an AnnData whose matrices are read when they are computed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import zarr
from anndata._io.specs.registry import IORegistryError

from scgpu_tasks.errors import (
    CorruptChunkError,
    FormatError,
    MissingPackageError,
    ParameterError,
)
from scgpu_tasks.io.arrays import DECODE_ERRORS, REWRITE
from scgpu_tasks.io.elements import Files, FolderFiles, open_files, require_documents
from scgpu_tasks.io.presence import require_names, require_written
from scgpu_tasks.io.rows import open_rows
from scgpu_tasks.io.strings import read_element

_HOST_BUFFERS = {"buffer": "zarr.buffer.cpu.Buffer", "ndbuffer": "zarr.buffer.cpu.NDBuffer"}


def read_lazy(
    path: str | os.PathLike[str],
    chunks: int | str | Sequence[int] = "auto",
    *,
    device: str = "auto",
    layers: Sequence[str] = (),
    max_bytes: int | None = None,
) -> ad.AnnData:
    """Open a store as an AnnData with obs and var in memory and X as a Dask array.

    The result is an ordinary Dask-backed AnnData, such as scanpy and rapids-singlecell work on.
    Its blocks are whole rows, and are read each time they are computed, by whatever process
    computes them; zarr's configuration plays no part in that.

    Parameters
    ----------
    path
        An AnnData zarr store: a folder of zarr format 2 or 3, or a zip file of one.
    chunks
        Rows of a block; or the rows of each block; or ``"auto"``: 20,000, and on a GPU that
        decodes the chunks itself blocks of about 2²⁷ values, 8 to 55 a GPU; but fewer rows
        where a block would hold more than 2³¹ − 1 values or `max_bytes`.
    device
        ``"cpu"``: blocks are SciPy CSR matrices or NumPy arrays. ``"gpu"``: blocks are CuPy's,
        on the device that is current in the thread that computes them. ``"auto"``: on a GPU
        where there is one and the packages to read by it are installed.
    layers
        Layers to open as well, by name, cut into the same blocks.
    max_bytes
        As for `scgpu_tasks.io.rows.open_rows`.

    Returns
    -------
    AnnData of X, obs, var and the chosen layers. Other elements stay in the store, for
    ``anndata.io.read_elem``.

    Raises
    ------
    StoreError
        There is no such store.
    FormatError
        It is not an AnnData zarr store; X is missing, CSC, or does not fit obs and var.
    CorruptChunkError
        ``indptr`` of a matrix cannot be decoded; a file of the names, or one of obs or var that
        `convert_zarr` wrote, is missing.
    ParameterError
        A parameter is out of range.
    MissingPackageError
        `device` is ``"gpu"``, and a package or the GPU is missing.

    Examples
    --------
    >>> adata = read_lazy("atlas.zarr")  # doctest: +SKIP
    >>> adata.X[:100].compute()  # doctest: +SKIP
    """
    if device not in ("auto", "cpu", "gpu"):
        msg = f"device must be 'auto', 'cpu' or 'gpu', not {device!r}"
        raise ParameterError(msg)
    if isinstance(layers, str):
        msg = f"layers must be a list of names; for one layer, [{layers!r}]"
        raise ParameterError(msg)
    if device == "auto":
        device = "gpu" if can_use_gpu() else "cpu"
    x = open_rows(path, chunks=chunks, device=device, max_bytes=max_bytes)
    cut = np.diff(x.bounds).tolist()
    matrices = {"X": x}
    for name in layers:
        matrices[name] = open_rows(path, layer=name, chunks=cut, device=device)
    obs, var = read_tables(path)
    for matrix in matrices.values():
        if matrix.shape != (len(obs), len(var)):
            msg = (
                f"{matrix.element} of {matrix.store} has shape {matrix.shape}, but there are "
                f"{len(obs)} cells in obs and {len(var)} genes in var; {REWRITE}"
            )
            raise FormatError(msg)
    lazy = {name: matrix.to_dask() for name, matrix in matrices.items()}
    return ad.AnnData(X=lazy.pop("X"), obs=obs, var=var, layers=lazy)


def can_use_gpu() -> bool:
    """Whether this process sees a GPU and has the packages to read to it."""
    from scgpu_tasks.io.gpu_packages import require_gpu

    try:
        require_gpu()
    except MissingPackageError:
        return False
    return True


def read_tables(path: str | os.PathLike[str]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Read obs and var of a store into memory, on the host.

    Raises
    ------
    StoreError
        There is no such store.
    FormatError
        One of them is missing, is no table, or cannot be read.
    CorruptChunkError
        A file of the names, or one that `convert_zarr` wrote, is missing.
    """
    return read_table(path, "obs"), read_table(path, "var")


def read_table(path: str | os.PathLike[str], name: str) -> pd.DataFrame:
    """Read obs or var of a store into memory; as `read_tables`."""
    files = open_files(path)
    with _host_buffers():
        try:
            root = zarr.open_group(files.zarr_store(), mode="r", use_consolidated=False)
        except DECODE_ERRORS as error:
            require_documents(files, "")
            msg = f"{files.path} is not a zarr store: {error}"
            raise FormatError(msg) from error
        return _table(root, name, files)


def _table(root: zarr.Group, name: str, files: Files) -> pd.DataFrame:
    try:
        if isinstance(files, FolderFiles):
            require_written(files.path, f"{name}/", remedy=REWRITE)
            require_names(root, name, remedy=REWRITE)
        table = _read(root, name)
    except CorruptChunkError:
        raise
    except (*DECODE_ERRORS, AttributeError, IORegistryError) as error:
        require_documents(files, name)
        why = "; ".join([str(error), *getattr(error, "__notes__", ())])
        msg = f"{name} of {files.path} cannot be read ({why}); {REWRITE}"
        raise FormatError(msg) from error
    if table is None:
        msg = f"{files.path} has no {name}: it is not a complete AnnData store"
        raise FormatError(msg)
    if not isinstance(table, pd.DataFrame):
        msg = f"{name} of {files.path} is a {type(table).__name__}, not a table"
        raise FormatError(msg)
    return table


def _read(root: zarr.Group, name: str) -> Any:
    if name not in root:
        return None
    _require_encodings(root[name], name)
    with warnings.catch_warnings():
        # Old stores are welcome.
        warnings.filterwarnings("ignore", message=".* was written without encoding")
        table = read_element(root[name])
    if isinstance(table, np.ndarray) and table.dtype.names:
        return _from_records(table, root)
    return table


def _require_encodings(table: Any, name: str) -> None:
    """Refuse a column of several arrays that has lost what says how to read it."""
    if not isinstance(table, zarr.Group):
        return
    columns: Any = table.attrs.get("column-order", ())
    for column in columns:
        node = table.get(column)
        if isinstance(node, zarr.Group) and "encoding-type" not in node.attrs:
            msg = f"{name}/{column} is a group without encoding-type"
            raise ValueError(msg)


def _from_records(records: np.ndarray, root: zarr.Group) -> pd.DataFrame:
    """Make a table of the structured array that anndata before 0.7 wrote.

    Names come first. Categories of a column lie in uns, under the column's name.
    """
    columns: dict[str, Any] = {}
    for field in records.dtype.names or ():
        values = records[field]
        categories = f"uns/{field}_categories"
        if categories in root:
            names = _text(np.atleast_1d(np.asarray(root[categories][...])))  # type: ignore[index]
            columns[field] = pd.Categorical.from_codes(values.tolist(), pd.Index(names))
        else:
            columns[field] = _text(values)
    table = pd.DataFrame(columns)
    table.index = pd.Index(table.pop(table.columns[0]).astype(str), name=None)
    return table


def _text(values: np.ndarray) -> np.ndarray:
    return np.char.decode(values, "utf-8") if values.dtype.kind == "S" else values


@contextmanager
def _host_buffers() -> Iterator[None]:
    """Read metadata and tables on the host also while zarr is set up for GPU buffers."""
    if all(zarr.config.get(key) == value for key, value in _HOST_BUFFERS.items()):
        yield
        return
    with zarr.config.set(_HOST_BUFFERS):
        yield

"""What can be refused before any long work: the load stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import zarr

from scgpu_tasks.errors import DataError, FormatError, ParameterError
from scgpu_tasks.io.elements import open_files
from scgpu_tasks.io.lazy import read_table
from scgpu_tasks.io.rows import RowBlocks, open_rows
from scgpu_tasks.specs import HVGSpec, PCASpec, QCSpec

if TYPE_CHECKING:
    import pandas as pd

SAMPLE_CELLS = 1000


def probe(
    store: str,
    qc: QCSpec,
    hvg: HVGSpec,
    pca: PCASpec,
    *,
    chunks: int | str = "auto",
    device: str = "cpu",
) -> dict[str, Any]:
    """Open a store and refuse what the later stages could not do with it.

    Reads metadata, var and the values of the first cells; obs may be large and is left alone.

    Parameters
    ----------
    store
        Path of an AnnData zarr store.
    qc, hvg, pca
        Parameters of the later stages.
    chunks
        Cells per block, or ``"auto"``.
    device
        ``"cpu"`` or ``"gpu"``.

    Returns
    -------
    Shape, non-zeros, stored bytes and blocks of the matrix, JSON-able.

    Raises
    ------
    FormatError
        Not an AnnData store, no such matrix, or a form that cannot be read by rows.
    ParameterError
        Unknown batch key, or more components than cells or genes.
    DataError
        The first cells hold negative values, NaN, or no counts.
    CorruptChunkError
        The first cells do not decode.
    """
    rows = open_rows(store, layer=qc.layer, chunks=chunks, device=device)
    length, columns = _obs_facts(store)
    var = read_table(store, "var")
    n_obs, n_vars = rows.shape
    if (length, len(var)) != (n_obs, n_vars):
        msg = (
            f"{rows.element} of {store} is {n_obs} by {n_vars}, but obs has {length} rows and "
            f"var {len(var)}; the store is damaged or half written"
        )
        raise FormatError(msg)
    _require_parameters(rows, columns, hvg, pca)
    if qc.expect_counts:
        _require_counts(rows, var)
    return {
        "element": rows.element,
        "encoding": rows.encoding,
        "shape": [int(n) for n in rows.shape],
        "dtype": str(rows.dtype),
        "nnz": None if rows.nnz is None else int(rows.nnz),
        "stored_bytes": int(rows.stored_bytes),
        "n_blocks": len(rows.bounds) - 1,
        "obs_columns": columns,
    }


def _obs_facts(store: str) -> tuple[int, list[str]]:
    """Count the cells and name the columns of obs, without reading it."""
    root = zarr.open_group(open_files(store).zarr_store(), mode="r")
    node = root.get("obs")
    order = node.attrs.get("column-order") if isinstance(node, zarr.Group) else None
    if isinstance(node, zarr.Group) and isinstance(order, list | tuple):
        index = node.get(str(node.attrs.get("_index", "_index")))
        # Nullable strings are a group of values and a mask.
        values = index.get("values") if isinstance(index, zarr.Group) else index
        if isinstance(values, zarr.Array):
            return values.shape[0], [str(name) for name in order]
    table = read_table(store, "obs")
    return len(table), [str(name) for name in table.columns]


def _require_parameters(
    rows: RowBlocks, columns: list[str], hvg: HVGSpec, pca: PCASpec
) -> None:
    n_obs, n_vars = rows.shape
    if hvg.batch_key is not None and hvg.batch_key not in columns:
        msg = (
            f"batch_key {hvg.batch_key!r} is not a column of obs of {rows.store}; "
            f"its columns are: {', '.join(columns) or 'none'}"
        )
        raise ParameterError(msg)
    genes = n_vars if hvg.n_top_genes is None else min(n_vars, hvg.n_top_genes)
    if pca.n_comps >= min(n_obs, genes):
        msg = (
            f"n_comps={pca.n_comps} is not below the {n_obs} cells and {genes} highly variable "
            f"genes at most of {rows.store}; ask for fewer components with --n-comps"
        )
        raise ParameterError(msg)


def _require_counts(rows: RowBlocks, var: pd.DataFrame) -> None:
    stop = min(SAMPLE_CELLS, rows.shape[0])
    if stop == 0:
        return
    matrix = rows.read(0, stop).to_matrix()
    values = matrix.data if hasattr(matrix, "indptr") else matrix
    bad = ~np.isfinite(values) | (values < 0)
    what = "a negative or missing value"
    advice = "counts are whole numbers, 0 or more; --not-counts lets other values pass"
    if not bad.any():
        bad = values != np.floor(values)
        what = "a value that is not a whole number"
        advice = (
            "it looks normalised or log-transformed; give the layer with raw counts with "
            "--layer, or let it pass as it is with --not-counts"
        )
    if not bad.any():
        return
    position = np.unravel_index(np.argmax(bad), bad.shape)
    if hasattr(matrix, "indptr"):
        cell = int(np.searchsorted(matrix.indptr, position[0], side="right")) - 1
        gene = int(matrix.indices[position[0]])
    else:
        cell, gene = (int(p) for p in position)
    obs = read_table(rows.store, "obs")
    msg = (
        f"{rows.element} of {rows.store} has {what}: {values[position]} at cell "
        f"{obs.index[cell]!r}, gene {var.index[gene]!r}; {advice}"
    )
    raise DataError(msg)

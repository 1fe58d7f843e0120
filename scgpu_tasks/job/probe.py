"""What can be refused before any long work: the load stage."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr
from numpy.typing import NDArray

from scgpu_tasks.errors import DataError, FormatError, ParameterError
from scgpu_tasks.io.convert.readers import ArrayReader
from scgpu_tasks.io.elements import open_files
from scgpu_tasks.io.lazy import read_table
from scgpu_tasks.io.rows import RowBlocks, open_rows
from scgpu_tasks.io.source import Source, encoding, open_source
from scgpu_tasks.kernels.qc import WHOLE_TOLERANCE
from scgpu_tasks.specs import HVGSpec, PCASpec, QCSpec
from scgpu_tasks.stages.gene_sets import find_gene_sets
from scgpu_tasks.stages.qc_errors import fraction_words

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
        Unknown batch key or gene set, more components than cells or genes, or more top genes
        than genes.
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
    _require_parameters(store, rows.shape, columns, qc, hvg, pca)
    find_gene_sets(var, qc.qc_vars)
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


def probe_source(source: str, qc: QCSpec, hvg: HVGSpec, pca: PCASpec) -> None:
    """Refuse before its conversion, which may take hours, a source that `probe` would refuse.

    Looks at what can be had within moments: shapes, columns of obs, and the first cells of
    counts that are stored by rows.

    Parameters
    ----------
    source
        h5ad file or zarr store: path or URL.
    qc, hvg, pca
        Parameters of the later stages.

    Raises
    ------
    StoreError, FormatError, ParameterError, DataError, CorruptChunkError
        As `probe`.
    """
    with open_source(source) as opened:
        root: Any = opened.root
        element = f"layers/{qc.layer}" if qc.layer else "X"
        if element not in root:
            found = ", ".join(root["layers"]) if "layers" in root else ""
            msg = f"{source} has no {element}; its layers are: {found or 'none'}"
            raise FormatError(msg)
        node = root[element]
        sparse = hasattr(node, "keys")
        shape = node.attrs.get("shape", node.attrs.get("h5sparse_shape", ()))
        n_obs, n_vars = (int(n) for n in (shape if sparse else node.shape))
        order = root["obs"].attrs.get("column-order")
        columns = None if order is None else [str(name) for name in order]
        _require_parameters(source, (n_obs, n_vars), columns, qc, hvg, pca)
        stop = min(SAMPLE_CELLS, n_obs)
        if not qc.expect_counts or not stop or encoding(node) == "csc_matrix":
            return
        if isinstance(root, zarr.Group) and "://" not in source:
            # As `probe` reads a store: damage is told with array, shard and chunk.
            _require_counts(open_rows(source, layer=qc.layer), read_table(source, "var"))
            return
        if sparse:
            indptr = _first_rows(opened, f"{element}/indptr", stop + 1)
            end = int(indptr[-1])
            values, indices = _first_rows(opened, f"{element}/data", end), node["indices"]
        else:
            values, indptr, indices = _first_rows(opened, element, stop), None, None
        _require_whole(
            values,
            indptr,
            indices,
            f"{element} of {source}",
            lambda cell: _name(root["obs"], cell),
            lambda gene: _name(root["var"], gene),
        )


def _first_rows(source: Source, path: str, stop: int) -> NDArray[Any]:
    """Read the first rows of an array; damage of an HDF5 file is told with array and chunk."""
    with tempfile.TemporaryDirectory(prefix="scgpu-probe-") as scratch:
        read = ArrayReader(source, path, Path(scratch))
        # Of a giant chunk the conversion makes a scratch file; a look is not worth one.
        return np.asarray(source.node(path)[:stop]) if read.spills else read(0, stop)


def _name(table: Any, position: int) -> str:
    index: Any = (
        table.get(str(table.attrs.get("_index", "_index"))) if hasattr(table, "get") else None
    )
    values = index.get("values") if hasattr(index, "get") else index
    if values is None:
        return str(position)
    value = values[position]
    return value.decode() if isinstance(value, bytes) else str(np.asarray(value)[()])


def _require_parameters(
    store: str,
    shape: tuple[int, int],
    columns: list[str] | None,
    qc: QCSpec,
    hvg: HVGSpec,
    pca: PCASpec,
) -> None:
    n_obs, n_vars = shape
    top = max(qc.percent_top, default=0)
    if top > n_vars:
        msg = (
            f"percent_top={top} is more than the {n_vars:,} genes of {store}; ask for the "
            "share of fewer with --percent-top"
        )
        raise ParameterError(msg)
    if columns is not None and hvg.batch_key is not None and hvg.batch_key not in columns:
        msg = (
            f"batch_key {hvg.batch_key!r} is not a column of obs of {store}; "
            f"its columns are: {', '.join(columns) or 'none'}"
        )
        raise ParameterError(msg)
    genes = n_vars if hvg.n_top_genes is None else min(n_vars, hvg.n_top_genes)
    if pca.n_comps >= min(n_obs, genes):
        kind = "genes" if hvg.n_top_genes is None else "highly variable genes"
        msg = (
            f"n_comps={pca.n_comps} must be below the smaller of {n_obs:,} cells and "
            f"{genes:,} {kind} of {store}; ask for fewer with --n-comps"
        )
        raise ParameterError(msg)


def _require_counts(rows: RowBlocks, var: pd.DataFrame) -> None:
    stop = min(SAMPLE_CELLS, rows.shape[0])
    if stop == 0:
        return
    # A few cells: no GPU is needed for them, and host arrays serve the messages.
    matrix = replace(rows, device="cpu").read(0, stop).to_matrix()
    sparse = hasattr(matrix, "indptr")
    _require_whole(
        matrix.data if sparse else matrix,
        matrix.indptr if sparse else None,
        matrix.indices if sparse else None,
        f"{rows.element} of {rows.store}",
        lambda cell: str(read_table(rows.store, "obs").index[cell]),
        lambda gene: str(var.index[gene]),
    )


def _require_whole(
    values: Any,
    indptr: Any,
    indices: Any,
    where: str,
    cell_name: Callable[[int], str],
    gene_name: Callable[[int], str],
) -> None:
    """Refuse values that are not counts, as QC would, and name the first cell and gene."""
    bad = ~np.isfinite(values) | (values < 0)
    what = "a negative or missing value"
    advice = "counts are whole numbers, 0 or more; --not-counts lets other values pass"
    if not bad.any():
        off = np.abs(values - np.rint(values))
        bad = off > WHOLE_TOLERANCE
        what = "a value that is not a whole number"
        advice = (
            f"{fraction_words(float(off.max(initial=0)))}. Give the layer with raw counts "
            "with --layer, or let values pass as they are with --not-counts"
        )
    if not bad.any():
        return
    position = np.unravel_index(np.argmax(bad), bad.shape)
    if indptr is not None:
        cell = int(np.searchsorted(indptr, position[0], side="right")) - 1
        gene = int(indices[int(position[0])])
    else:
        cell, gene = (int(p) for p in position)
    msg = (
        f"{where} has {what}: {values[position]} at cell {cell_name(cell)!r}, gene "
        f"{gene_name(gene)!r}; {advice}"
    )
    raise DataError(msg)

"""results.zarr: an AnnData without X over the kept cells and genes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
import zarr
import zarr.errors
from numpy.typing import NDArray
from zarr.codecs import ZstdCodec

from scgpu_tasks.records.files import in_one_step
from scgpu_tasks.stages.tables import name_apart

if TYPE_CHECKING:
    from scgpu_tasks.stages.pca import PCAResult
    from scgpu_tasks.stages.qc import QCResult

ROWS_PER_CHUNK = 50_000
CHUNKS_PER_SHARD = 20


def join_columns(names: pd.DataFrame, metrics: pd.DataFrame) -> pd.DataFrame:
    """Return obs or var of the kept rows: the store's columns, then the metrics.

    Parameters
    ----------
    names
        The store's obs or var.
    metrics
        The stage's table of the same rows in the same order, with ``passed_qc``. Its columns
        replace those of the same name; an index with the name of a column is renamed.
    """
    kept = metrics["passed_qc"].to_numpy(dtype=bool)
    old = names.loc[kept, [c for c in names.columns if c not in metrics.columns]]
    # By position: the names of millions of cells are looked up and copied once.
    fresh = pd.DataFrame({c: metrics[c].array[kept] for c in metrics}, index=old.index)
    joined = pd.concat([old, fresh], axis=1)
    for column in joined.columns:
        if isinstance(joined[column].dtype, pd.CategoricalDtype):
            joined[column] = _used_categories(joined[column])
    return name_apart(joined)


def _used_categories(column: pd.Series) -> pd.Series:
    """Drop categories that no row has; pandas sorts all rows to find them."""
    codes = column.cat.codes.to_numpy()
    counts = np.bincount(codes[codes >= 0], minlength=len(column.cat.categories))
    # remove_categories would sort those that stay.
    return column.cat.set_categories(column.cat.categories[counts > 0])


def write_results(
    path: str | Path,
    obs: pd.DataFrame,
    var: pd.DataFrame,
    qc: QCResult,
    pca: PCAResult | None = None,
    *,
    hvg_flavor: str = "seurat",
    zero_center: bool = True,
) -> Path:
    """Write the results as an AnnData store that anndata and scanpy open.

    Parameters
    ----------
    path
        Store to write; replaced if there.
    obs, var
        The store's tables, all cells and genes, in the order of the metrics.
    qc, pca
        What the stages returned.
    hvg_flavor
        Written to ``uns["hvg"]``, where scanpy keeps it.
    zero_center
        Written to ``uns["pca"]["params"]``.

    Returns
    -------
    The path.
    """
    path = Path(path)
    with in_one_step(path) as partial:
        _write_store(partial, obs, var, qc, pca, hvg_flavor=hvg_flavor, zero_center=zero_center)
    return path


def _write_store(
    path: Path,
    obs: pd.DataFrame,
    var: pd.DataFrame,
    qc: QCResult,
    pca: PCAResult | None,
    *,
    hvg_flavor: str,
    zero_center: bool,
) -> None:
    root = zarr.create_group(
        path, attributes={"encoding-type": "anndata", "encoding-version": "0.1.0"}
    )
    _write(root, "obs", join_columns(obs, qc.cells))
    kept_var = join_columns(var, qc.genes)
    _write(root, "var", kept_var)
    uns: dict[str, Any] = {"hvg": {"flavor": hvg_flavor}}
    obsm: dict[str, Any] = {}
    varm: dict[str, Any] = {}
    if pca is not None:
        obsm["X_pca"] = pca.X_pca
        varm["PCs"] = _all_kept_genes(kept_var, pca.PCs)
        uns["pca"] = {
            "params": {
                "zero_center": zero_center,
                "use_highly_variable": True,
                "mask_var": "highly_variable",
            },
            "variance": pca.variance,
            "variance_ratio": pca.variance_ratio,
        }
    for name, values in (("obsm", obsm), ("varm", varm), ("uns", uns)):
        _write(root, name, values)
    for name in ("layers", "obsp", "varp"):
        _write(root, name, {})
    with warnings.catch_warnings():
        # anndata reads consolidated metadata of format 3, and it saves a request per array.
        warnings.simplefilter("ignore", zarr.errors.ZarrUserWarning)
        zarr.consolidate_metadata(root.store)


def _all_kept_genes(var: pd.DataFrame, loadings: NDArray[np.float64]) -> NDArray[np.float64]:
    """Put the loadings of the HVGs into rows for all kept genes; zeros elsewhere."""
    chosen = var["highly_variable"].to_numpy(dtype=bool)
    rows = np.zeros((len(var), loadings.shape[1]), dtype=np.float64)
    rows[chosen] = loadings
    return rows


def _write(root: zarr.Group, name: str, value: Any) -> None:
    ad.experimental.write_dispatched(root, name, value, _write_one)


def _write_one(
    write: Any, group: Any, key: str, elem: Any, /, *, dataset_kwargs: Any, **_: Any
) -> None:
    """Write an element as anndata does, but long arrays shard by shard."""
    dtype = getattr(elem, "dtype", None)
    if isinstance(dtype, pd.StringDtype) and not elem.isna().any():
        # The plain encoding of strings, which every AnnData reader knows.
        _write_rows(group, key, elem, "string-array")
    elif isinstance(elem, np.ndarray) and elem.ndim > 0 and elem.dtype.kind in "biuf":
        _write_rows(group, key, elem, "array")
    else:
        write(group, key, elem, dataset_kwargs=dataset_kwargs)


def _write_rows(group: zarr.Group, key: str, rows: Any, encoding: str) -> None:
    # zarr encodes all shards of one assignment at once, which would double the memory.
    text = encoding == "string-array"
    long = len(rows) > ROWS_PER_CHUNK
    # Scores of components are noise to a compressor, which would win a tenth; as they are,
    # each chunk goes to its file without a copy.
    plain = rows.ndim > 1
    array = group.create_array(
        key,
        shape=rows.shape,
        dtype=str if text else rows.dtype,
        chunks=(ROWS_PER_CHUNK, *rows.shape[1:]) if long else "auto",
        shards=(ROWS_PER_CHUNK * CHUNKS_PER_SHARD,) if long and not plain else None,
        compressors=None if plain else ZstdCodec(level=1),
        attributes={"encoding-type": encoding, "encoding-version": "0.2.0"},
        overwrite=True,
    )
    step = ROWS_PER_CHUNK * CHUNKS_PER_SHARD
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        array[start : start + step] = np.asarray(part, dtype=object) if text else part

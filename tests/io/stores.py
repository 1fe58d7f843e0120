"""Stores in every form that a test may want."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import scipy.sparse as sp
import zarr

from scgpu_tasks.io.csr_writer import consolidate
from scgpu_tasks.io.rows import RowBlocks


def write(path: Path, x: Any, **kwargs: Any) -> Path:
    """Write X as anndata does."""
    zarr_format = kwargs.pop("zarr_format", 3)
    adata = ad.AnnData(x, **kwargs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with ad.settings.override(zarr_write_format=zarr_format):
            adata.write_zarr(path)
    return path


def write_csr(
    path: Path,
    x: sp.csr_matrix,
    *,
    chunks: int = 1000,
    shard_of: int | None = None,
    compressors: Any = "auto",
    zarr_format: int = 3,
    index_dtype: str = "int32",
    indptr_dtype: str = "int64",
    dtype: Any = None,
    attributes: dict[str, Any] | None = None,
) -> Path:
    """Write X array by array, so that every choice that zarr leaves can be made."""
    write(path, sp.csr_matrix(x.shape, dtype=np.float32), zarr_format=zarr_format)
    root = zarr.open_group(path, mode="r+", use_consolidated=False)
    del root["X"]
    group = root.create_group("X")
    group.attrs.update(
        attributes
        or {"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": list(x.shape)}
    )
    parts = {
        "data": x.data.astype(dtype or x.dtype),
        "indices": x.indices.astype(index_dtype),
        "indptr": x.indptr.astype(indptr_dtype),
    }
    for name, values in parts.items():
        group.create_array(
            name,
            shape=values.shape,
            dtype=values.dtype,
            chunks=(chunks,),
            shards=None if shard_of is None else (chunks * shard_of,),
            compressors=compressors,
            config={"write_empty_chunks": True},
        )[:] = values
    consolidate(path)
    return path


def sample(n_obs: int = 200, n_vars: int = 60, density: float = 0.3, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    x = sp.random(n_obs, n_vars, density, format="csr", random_state=rng, dtype=np.float32)
    x.data = rng.integers(1, 100, x.nnz).astype(np.float32)
    return x


def all_rows(rows: RowBlocks) -> Any:
    parts = [rows.read_block(i).to_matrix() for i in range(rows.n_blocks)]
    return sp.vstack(parts, format="csr") if sp.issparse(parts[0]) else np.concatenate(parts)


def assert_same(found: Any, expected: Any) -> None:
    assert found.shape == expected.shape
    assert sp.issparse(found) == sp.issparse(expected)
    if sp.issparse(found):
        np.testing.assert_array_equal(found.indptr, expected.indptr)
        np.testing.assert_array_equal(found.indices, expected.indices)
        np.testing.assert_array_equal(found.data, expected.data)
    else:
        np.testing.assert_array_equal(found, expected)

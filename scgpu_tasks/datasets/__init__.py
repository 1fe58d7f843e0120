"""Synthetic single-cell counts: made on the spot, written as a store that a GPU reads well.

The counts look enough like a real atlas for every step to have something to find; `atlas` says
what they follow.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import scipy.sparse as sp

from scgpu_tasks.datasets.atlas import (
    CELLS_PER_TASK,
    DTYPES,
    MT_GENES,
    SyntheticAtlas,
    at_least,
)
from scgpu_tasks.errors import OutputError
from scgpu_tasks.io.csr_writer import CSRWriter, consolidate, create_store

__all__ = ["DTYPES", "MT_GENES", "SyntheticAtlas", "synthetic_counts", "write_synthetic"]


def synthetic_counts(
    n_obs: int,
    n_vars: int,
    *,
    nnz_per_cell: float | None = None,
    n_types: int = 8,
    n_batches: int = 1,
    seed: int = 0,
    dtype: str = "float32",
    cells_per_block: int = 20_000,
) -> Iterator[sp.csr_matrix]:
    """Whole-numbered counts of a synthetic atlas, one block of rows at a time.

    Parameters
    ----------
    n_obs, n_vars
        Number of cells and genes.
    nnz_per_cell, n_types, n_batches, seed, dtype
        As in `SyntheticAtlas`.
    cells_per_block
        Rows of each block; the counts do not depend on it.

    Returns
    -------
    Iterator over CSR matrices of shape (cells_per_block or fewer, n_vars), sorted indices.

    Raises
    ------
    ParameterError
        A parameter is out of range; raised at the call, before the first block.
    """
    atlas = SyntheticAtlas(
        n_vars,
        nnz_per_cell=nnz_per_cell,
        n_types=n_types,
        n_batches=n_batches,
        seed=seed,
        dtype=dtype,
    )
    at_least("n_obs", n_obs, 0)
    at_least("cells_per_block", cells_per_block, 1)
    # SciPy wants both index arrays in one type.
    return (
        sp.csr_matrix(
            (data, indices.astype(np.int64), indptr),
            shape=(len(indptr) - 1, n_vars),
            copy=False,
        )
        for data, indices, indptr in atlas.blocks(n_obs, cells_per_block)
    )


def write_synthetic(
    path: str | os.PathLike[str],
    n_obs: int,
    n_vars: int,
    *,
    nnz_per_cell: float | None = None,
    n_types: int = 8,
    n_batches: int = 1,
    seed: int = 0,
    dtype: str = "float32",
    chunk_bytes: int = 256 * 1024,
    shard_bytes: int = 128 * 1024**2,
    level: int = 3,
    overwrite: bool = False,
) -> Path:
    """Write a synthetic atlas as an AnnData zarr v3 store in the layout that a GPU reads best.

    X is CSR; its arrays are zstd chunks of `chunk_bytes` in shards, `indices` in uint16 where
    the genes allow it. The counts stream through: memory holds about two shards.

    Parameters
    ----------
    path
        The store to write; appears when it is complete.
    n_obs, n_vars
        Number of cells and genes.
    nnz_per_cell, n_types, n_batches, seed, dtype
        As in `SyntheticAtlas`.
    chunk_bytes, shard_bytes
        Decoded size of a chunk and of a shard in bytes; shards hold whole chunks.
    level
        zstd level.
    overwrite
        Replace what is at `path`.

    Returns
    -------
    The path.

    Raises
    ------
    ParameterError
        A parameter is out of range.
    OutputError
        `path` exists, or cannot be written.
    """
    at_least("n_obs", n_obs, 0)
    at_least("chunk_bytes", chunk_bytes, 8)
    at_least("shard_bytes", shard_bytes, chunk_bytes)
    atlas = SyntheticAtlas(
        n_vars,
        nnz_per_cell=nnz_per_cell,
        n_types=n_types,
        n_batches=n_batches,
        seed=seed,
        dtype=dtype,
    )
    path = Path(path)
    if path.exists() and not overwrite:
        msg = f"{path} exists: choose another path, or pass overwrite=True"
        raise OutputError(msg)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        root = create_store(unfinished, obs=atlas.obs(n_obs), var=atlas.var())
        writer = CSRWriter(
            root,
            "X",
            shape=(n_obs, n_vars),
            dtype=atlas.dtype,
            index_dtype=atlas.index_dtype,
            expected_nnz=int(n_obs * atlas.nnz_per_cell),
            chunk_bytes=chunk_bytes,
            shard_bytes=shard_bytes,
            level=level,
        )
        for data, indices, indptr in atlas.blocks(n_obs, 4 * CELLS_PER_TASK):
            writer.append(data, indices, indptr)
        writer.close()
        consolidate(unfinished)
        if path.exists():
            shutil.rmtree(path)
        unfinished.rename(path)
    except OSError as error:
        msg = f"cannot write {path}: {error}"
        raise OutputError(msg) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return path

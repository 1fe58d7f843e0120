"""Results of the stages as files: what a finished stage folder holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from scgpu_tasks.job.workdir import StageFolder
from scgpu_tasks.stages.pca import PCAResult
from scgpu_tasks.stages.qc import QCResult

SCORES = "X_pca.npy"
_PCA_ARRAYS = ("X_pca", "PCs", "variance", "variance_ratio", "mean")


def save_qc(result: QCResult, folder: Path) -> None:
    """Write the tables of every cell and every gene as parquet; the summary is the caller's.

    Parameters
    ----------
    result
        From `scgpu_tasks.stages.qc.run_qc`.
    folder
        An existing, empty folder.
    """
    # Dictionaries and Snappy, pandas' default, cost a quarter more time than plain values, and
    # make tables of counts a quarter of the size.
    result.cells.to_parquet(folder / "cells.parquet")
    result.genes.to_parquet(folder / "genes.parquet")


def read_qc(folder: StageFolder) -> QCResult:
    """Read back what `save_qc` wrote."""
    return QCResult(
        cells=pd.read_parquet(folder.path / "cells.parquet"),
        genes=pd.read_parquet(folder.path / "genes.parquet"),
        summary=folder.summary,
    )


def save_pca(result: PCAResult, folder: Path) -> None:
    """Write the arrays of a PCA as ``.npy``, but for those there; the summary is the caller's.

    Parameters
    ----------
    result
        From `scgpu_tasks.stages.pca.run_pca`.
    folder
        An existing folder, empty but for the scores if `run_pca` wrote them to `SCORES`.
    """
    for name in _PCA_ARRAYS:
        path = folder / f"{name}.npy"
        if not path.exists():
            np.save(path, getattr(result, name), allow_pickle=False)


def read_pca(folder: StageFolder) -> PCAResult:
    """Read back what `save_pca` wrote."""
    arrays = {
        name: np.load(folder.path / f"{name}.npy", allow_pickle=False) for name in _PCA_ARRAYS
    }
    return PCAResult(**arrays, summary=folder.summary)


def read_metrics(folder: Path, summary: dict[str, Any]) -> QCResult:
    """Read what `save_qc` wrote, of the cells only what figures show, without their names."""
    wanted = ("n_genes_by_counts", "total_counts", "passed_qc")
    file = pq.ParquetFile(folder / "cells.parquet")
    names = [n for n in file.schema.names if n in wanted or n.startswith("pct_counts_")]
    cells = file.read(columns=names, use_pandas_metadata=False).to_pandas()
    genes = pd.read_parquet(folder / "genes.parquet")
    return QCResult(cells=cells, genes=genes, summary=summary)


def map_pca(folder: Path, summary: dict[str, Any]) -> PCAResult:
    """Open what `save_pca` wrote; rows of cells are read when they are looked at."""
    arrays = {
        name: np.load(folder / f"{name}.npy", allow_pickle=False, mmap_mode="r")
        for name in _PCA_ARRAYS
    }
    return PCAResult(**arrays, summary=summary)

"""QC metrics and filters of an AnnData whose X is a Dask, SciPy or NumPy matrix.

X holds counts and is never changed: filters mark cells and genes, they do not remove them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pandas as pd

from scgpu_tasks.specs import HVGSpec, QCSpec
from scgpu_tasks.stages.anndatas import obs_and_var, source_of, write_columns
from scgpu_tasks.stages.engine import Progress
from scgpu_tasks.stages.qc import QCResult, run_qc

if TYPE_CHECKING:
    from anndata import AnnData

__all__ = ["calculate_qc_metrics", "filter_masks", "quality_control"]

_NO_FILTER = QCSpec(min_genes=None, max_pct_mt=None, min_cells=None, qc_vars=())
_MARKS = ("n_cells_kept", "passed_qc")


def calculate_qc_metrics(
    adata: AnnData,
    *,
    qc_vars: Sequence[str] | str = (),
    gene_lists: Mapping[str, Iterable[str]] | None = None,
    percent_top: Sequence[int] | None = (50, 100, 200, 500),
    layer: str | None = None,
    log1p: bool = True,
    inplace: bool = False,
    expect_counts: bool = True,
    progress: Progress | None = None,
    workers: int | None = None,
) -> tuple[pd.DataFrame, pd.DataFrame] | None:
    """Measure cells and genes, as ``scanpy.pp.calculate_qc_metrics`` does, in one read of X.

    Sums are exact, in float64, whatever the type of X.

    Parameters
    ----------
    adata
        Counts, cells by genes.
    qc_vars
        Gene sets: boolean columns of ``adata.var``, or ``"mt"``, ``"ribo"``, ``"hb"``, which
        are found by gene symbol where there is no such column.
    gene_lists
        Further gene sets: lists of gene names.
    percent_top
        Report the share of counts in this many highest genes.
    layer
        Measure this layer instead of X.
    log1p
        Add columns of log1p(metric).
    inplace
        Write to ``adata.obs`` and ``adata.var`` instead of returning tables.
    expect_counts
        Refuse values that are not whole numbers of 0 or more.
    progress
        Called with blocks done and blocks to do.
    workers
        Number of threads where no Dask client is in use. Default: one for each CPU.

    Returns
    -------
    Tables of the cells and of the genes, with scanpy's column names; None if `inplace`.

    Raises
    ------
    ParameterError
        A gene set, layer or number does not fit.
    DataError
        X holds values that are not counts; the message names the first cell and gene.
    """
    spec = replace(
        _NO_FILTER,
        qc_vars=(qc_vars,) if isinstance(qc_vars, str) else tuple(qc_vars),
        percent_top=tuple(percent_top or ()),
        expect_counts=expect_counts,
    )
    result = _run(adata, spec, None, layer, gene_lists, progress, workers)
    obs = result.cells.drop(columns="passed_qc")
    var = result.genes.drop(columns=list(_MARKS))
    if not log1p:
        obs, var = (t[[c for c in t if not str(c).startswith("log1p_")]] for t in (obs, var))
    if not inplace:
        return obs, var
    _write(adata, obs, var)
    return None


def filter_masks(
    adata: AnnData,
    spec: QCSpec | None = None,
    *,
    layer: str | None = None,
    progress: Progress | None = None,
    workers: int | None = None,
) -> dict[str, Any]:
    """Mark the cells and genes that pass QC, in one read of X (two with ``mad``).

    Writes the metric columns and ``passed_qc`` to ``adata.obs`` and ``adata.var``, and
    ``n_cells_kept``, the number of kept cells that express a gene, to ``adata.var``. To remove
    the rest: ``adata[adata.obs["passed_qc"], adata.var["passed_qc"]]``.

    Parameters
    ----------
    adata
        Counts, cells by genes.
    spec
        Gene sets and filters. Default: `QCSpec()`.
    layer
        Use this layer instead of X.
    progress, workers
        As in `calculate_qc_metrics`.

    Returns
    -------
    What was used and what was lost: the summary of `QCResult`, less its highly variable genes.

    Raises
    ------
    ParameterError
        No cell or no gene passes, or a parameter does not fit.
    DataError
        X holds values that are not counts.
    """
    result = _run(adata, spec or QCSpec(), None, layer, None, progress, workers)
    _write(adata, result.cells, result.genes)
    return {name: value for name, value in result.summary.items() if name != "n_hvg"}


def quality_control(
    adata: AnnData,
    qc: QCSpec | None = None,
    hvg: HVGSpec | None = None,
    *,
    layer: str | None = None,
    progress: Progress | None = None,
    workers: int | None = None,
) -> dict[str, Any]:
    """Measure, filter and choose highly variable genes together, in one read of X.

    Does the work of `filter_masks` and `scgpu_tasks.hvg.highly_variable_genes`, and writes the
    columns of both.

    Parameters
    ----------
    adata
        Counts, cells by genes.
    qc, hvg
        What to do. Default: `QCSpec()` and `HVGSpec()`.
    layer
        Use this layer instead of X.
    progress, workers
        As in `calculate_qc_metrics`.

    Returns
    -------
    The summary of `QCResult`.

    Raises
    ------
    ParameterError
        No cell or no gene passes, or a parameter does not fit.
    DataError
        X holds values that are not counts.
    """
    hvg = hvg or HVGSpec()
    result = _run(adata, qc or QCSpec(), hvg, layer, None, progress, workers)
    _write(adata, result.cells, result.genes)
    adata.uns["hvg"] = {"flavor": hvg.flavor}
    return result.summary


def _write(adata: AnnData, cells: pd.DataFrame, genes: pd.DataFrame) -> None:
    for table, columns in zip(obs_and_var(adata), (cells, genes), strict=True):
        write_columns(table, columns)


def _run(
    adata: AnnData,
    qc: QCSpec,
    hvg: HVGSpec | None,
    layer: str | None,
    gene_lists: Mapping[str, Iterable[str]] | None,
    progress: Progress | None,
    workers: int | None,
) -> QCResult:
    obs, var = obs_and_var(adata)
    return run_qc(
        source_of(adata, layer),
        obs,
        var,
        qc,
        hvg,
        gene_lists=gene_lists,
        progress=progress,
        workers=workers,
    )

"""Highly variable genes of an AnnData whose X is a Dask, SciPy or NumPy matrix of counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from scgpu_tasks.specs import HVGFlavor, HVGSpec, QCSpec
from scgpu_tasks.stages.anndatas import mask_of, obs_and_var, source_of, write_columns
from scgpu_tasks.stages.engine import Progress
from scgpu_tasks.stages.qc import Among, run_qc

if TYPE_CHECKING:
    from anndata import AnnData

__all__ = ["highly_variable_genes"]

_COLUMNS = (
    "highly_variable",
    "means",
    "dispersions",
    "dispersions_norm",
    "variances",
    "variances_norm",
    "highly_variable_rank",
    "highly_variable_nbatches",
    "highly_variable_intersection",
)


def highly_variable_genes(
    adata: AnnData,
    *,
    layer: str | None = None,
    n_top_genes: int | None = 2000,
    min_disp: float = 0.5,
    max_disp: float | None = None,
    min_mean: float = 0.0125,
    max_mean: float = 3.0,
    span: float = 0.3,
    n_bins: int = 20,
    flavor: HVGFlavor = "seurat",
    target_sum: float | None = 1e4,
    batch_key: str | None = None,
    expect_counts: bool = True,
    inplace: bool = True,
    progress: Progress | None = None,
    workers: int | None = None,
) -> pd.DataFrame | None:
    """Choose highly variable genes, as ``scanpy.pp.highly_variable_genes`` does, from counts.

    scanpy's function takes log-normalised values (but for ``seurat_v3``); this one takes counts
    and normalises on the way, by each cell's total over all genes of `adata`. Cells and genes
    whose ``passed_qc`` is False are left out.

    Parameters
    ----------
    adata
        Counts, cells by genes.
    layer
        Use this layer instead of X.
    n_top_genes
        Number of genes. None: choose by the cutoffs of means and dispersions instead.
    min_disp, max_disp, min_mean, max_mean
        Cutoffs, in force if `n_top_genes` is None.
    span
        Of the loess regression of ``seurat_v3``, which needs scikit-misc.
    n_bins
        Number of bins of mean expression, flavour ``seurat``.
    flavor
        ``seurat``, ``cell_ranger`` or ``seurat_v3``.
    target_sum
        Total of each cell after normalisation; None: the median total (one more read of X).
    batch_key
        Column of ``adata.obs``: choose within each batch, then combine as scanpy does.
    expect_counts
        Refuse values that are not whole numbers of 0 or more.
    inplace
        Write to ``adata.var`` and ``adata.uns["hvg"]`` instead of returning a table.
    progress
        Called with blocks done and blocks to do.
    workers
        Number of threads where no Dask client is in use. Default: one for each CPU.

    Returns
    -------
    Table of the genes with scanpy's columns; None if `inplace`.

    Raises
    ------
    ParameterError
        A parameter does not fit.
    DataError
        X holds values that are not counts.
    MissingPackageError
        ``seurat_v3`` without scikit-misc.
    """
    spec = HVGSpec(
        target_sum=target_sum,
        flavor=flavor,
        n_top_genes=n_top_genes,
        batch_key=batch_key,
        min_mean=min_mean,
        max_mean=max_mean,
        min_disp=min_disp,
        max_disp=max_disp,
        n_bins=n_bins,
        span=span,
    )
    obs, var = obs_and_var(adata)
    result = run_qc(
        source_of(adata, layer),
        obs,
        var,
        QCSpec(
            min_genes=None,
            max_pct_mt=None,
            min_cells=None,
            qc_vars=(),
            expect_counts=expect_counts,
        ),
        spec,
        among=Among(mask_of(obs, "passed_qc"), mask_of(var, "passed_qc")),
        progress=progress,
        workers=workers,
    )
    table = result.genes[[name for name in _COLUMNS if name in result.genes]]
    if not inplace:
        return table
    write_columns(var, table)
    adata.uns["hvg"] = {"flavor": flavor}
    return None

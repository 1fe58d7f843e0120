"""Principal components of an AnnData whose X is a Dask, SciPy or NumPy matrix."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scgpu_tasks.errors import ParameterError
from scgpu_tasks.kernels.transform import Transform
from scgpu_tasks.specs import PCASpec
from scgpu_tasks.stages.anndatas import mask_of, obs_and_var, source_of
from scgpu_tasks.stages.engine import Progress
from scgpu_tasks.stages.pca import masked_pca
from scgpu_tasks.stages.qc import cell_totals
from scgpu_tasks.stages.qc_visits import cell_factors

if TYPE_CHECKING:
    from anndata import AnnData

__all__ = ["pca"]

_DEFAULT_COMPS = 50


def pca(
    adata: AnnData,
    n_comps: int | None = None,
    *,
    layer: str | None = None,
    mask_var: np.ndarray | str | None = "highly_variable",
    zero_center: bool = True,
    normalize: bool = True,
    target_sum: float = 1e4,
    key_added: str | None = None,
    scratch: str | Path | None = None,
    progress: Progress | None = None,
    workers: int | None = None,
) -> None:
    """Find principal components, as ``scanpy.pp.pca`` does, from counts or from X as it is.

    Writes ``obsm["X_pca"]`` (float32, NaN for cells left out), ``varm["PCs"]`` (0 for genes
    left out) and ``uns["pca"]`` (``variance``, ``variance_ratio``, ``params``). The loading of
    largest absolute value in each component is positive. Cells whose ``obs["passed_qc"]`` is
    False are left out.

    Parameters
    ----------
    adata
        Cells by genes.
    n_comps
        Number of components. Default: 50, or one less than there are cells or genes.
    layer
        Use this layer instead of X.
    mask_var
        Genes to use: a boolean column of ``adata.var`` or an array. None: all that
        ``passed_qc``. Unlike in scanpy, a missing column ``highly_variable`` is an error.
    zero_center
        Centre the genes. If not, the components are those of scikit-learn's TruncatedSVD, as
        in scanpy.
    normalize
        X holds counts: take log1p(x * target_sum / total), total over all genes of the store.
        If not, X is taken as it is.
    target_sum
        Total of each cell after normalisation.
    key_added
        Name for obsm, varm and uns instead of ``X_pca``, ``PCs`` and ``pca``.
    scratch
        Folder for temporary files; see `scgpu_tasks.stages.pca.run_pca`.
    progress
        Called with blocks done and blocks to do.
    workers
        Number of threads where no Dask client is in use. Default: one for each CPU.

    Notes
    -----
    Totals are taken from ``adata.obs["total_counts"]`` if it is there, so that they stay those
    of the whole store when genes were removed; else X is read once more to find them.

    Raises
    ------
    ParameterError
        Fewer cells or genes than components, a parameter does not fit, or so many genes that
        their Gram matrix does not fit into memory.
    DataError
        X has NaN or infinite values, or negative ones that have no log1p.
    """
    source = source_of(adata, layer)
    obs, var = obs_and_var(adata)
    mask, name = _gene_mask(var, mask_var)
    kept = mask_of(obs, "passed_qc")
    keep = np.ones(adata.n_obs, bool) if kept is None else kept
    smallest = min(int(keep.sum()), int(mask.sum()))
    if n_comps is None:
        n_comps = _DEFAULT_COMPS if smallest > _DEFAULT_COMPS else max(smallest - 1, 1)
    factors = np.ones(adata.n_obs)
    if normalize:
        if "total_counts" in obs:
            total = obs["total_counts"].to_numpy(dtype=np.float64)
        else:
            total = cell_totals(source, workers=workers)
        factors = cell_factors(total, target_sum)
    found = "n_cells_kept" if "n_cells_kept" in var else "n_cells_by_counts"
    result = masked_pca(
        source,
        keep,
        mask,
        factors,
        Transform.LOG1P if normalize else Transform.IDENTITY,
        PCASpec(n_comps=n_comps, zero_center=zero_center),
        n_found=var[found].to_numpy() if found in var else None,
        progress=progress,
        scratch=scratch,
        workers=workers,
    )
    scores = np.full((adata.n_obs, n_comps), np.nan, np.float32)
    scores[keep] = result.X_pca
    loadings = np.zeros((adata.n_vars, n_comps))
    loadings[mask] = result.PCs
    adata.obsm[key_added or "X_pca"] = scores
    adata.varm[key_added or "PCs"] = loadings
    params = {
        "zero_center": zero_center,
        "use_highly_variable": name == "highly_variable",
        "mask_var": name,
    }
    if layer is not None:
        params["layer"] = layer
    adata.uns[key_added or "pca"] = {
        "params": params,
        "variance": result.variance,
        "variance_ratio": result.variance_ratio,
    }


def _gene_mask(
    var: pd.DataFrame, mask_var: np.ndarray | str | None
) -> tuple[np.ndarray, str | None]:
    """Genes to use, and the name of the column that says so."""
    if isinstance(mask_var, str):
        mask = mask_of(var, mask_var)
        if mask is not None:
            return mask, mask_var
        msg = f"mask_var {mask_var!r} is not a column of var"
        if mask_var == "highly_variable":
            # All genes instead, as in scanpy, would be a Gram matrix of gigabytes in an atlas.
            msg = (
                "var has no column 'highly_variable': call qc.quality_control or "
                "hvg.highly_variable_genes first, or pass mask_var=None for all genes"
            )
        raise ParameterError(msg)
    if mask_var is not None:
        mask = np.asarray(mask_var)
        if mask.dtype != bool or mask.shape != (len(var),):
            msg = (
                f"mask_var must be {len(var)} booleans, one for each gene, not "
                f"{mask.dtype} of shape {mask.shape}"
            )
            raise ParameterError(msg)
        return mask, None
    passed = mask_of(var, "passed_qc")
    return (np.ones(len(var), bool) if passed is None else passed), None

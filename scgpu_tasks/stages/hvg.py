"""Highly variable genes from sums over the cells, as scanpy chooses them.

The arithmetic follows scanpy 1.12 (``scanpy/preprocessing/_highly_variable_genes.py``) step by
step, in float64, so that the same genes are chosen from the same cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import pandas as pd

from scgpu_tasks.errors import DataError, MissingPackageError
from scgpu_tasks.specs import HVGSpec

# A normal distribution's standard deviation in median absolute deviations.
_MAD_SCALE = 0.6744897501960817
# The local regression of scikit-misc ends the process where it is given a gene or two.
_LOESS_GENES = 10


@dataclass(frozen=True)
class BatchMoments:
    """Sums over the kept cells of one batch, for each gene.

    Attributes
    ----------
    n_cells
        Number of cells.
    sums, squares
        Sum of the transformed values and of their squares, float64, shape (genes,).
    """

    n_cells: int
    sums: np.ndarray
    squares: np.ndarray

    def mean_var(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean, and variance that divides by n - 1; NaN variance for one cell."""
        n = self.n_cells
        mean = self.sums / n
        if n < 2:
            return mean, np.full(len(mean), np.nan)
        var = (self.squares / n - mean**2) * (n / (n - 1))
        return mean, np.maximum(var, 0.0)


def dispersion_table(
    batches: Sequence[BatchMoments], names: pd.Index, spec: HVGSpec, *, batched: bool
) -> pd.DataFrame:
    """Dispersions and highly variable genes, flavours ``seurat`` and ``cell_ranger``.

    Parameters
    ----------
    batches
        Moments of each batch that has cells; one if there are no batches. Of normalised counts
        for ``seurat``, of log-normalised ones for ``cell_ranger``.
    names
        Gene names, in the order of the moments.
    spec
        Flavour and cutoffs.
    batched
        Whether to combine batches as scanpy does with ``batch_key``, even if there is one.

    Returns
    -------
    Indexed by `names`: ``means``, ``dispersions``, ``dispersions_norm``, ``highly_variable``
    and, for batches, ``highly_variable_nbatches`` and ``highly_variable_intersection``.
    """
    if not batched:
        table = _one_batch(batches[0], spec)
        table.index = names
        return table.drop(columns="mean_bin")
    tables = [_expressed_only(batch, spec) for batch in batches]
    columns = ("means", "dispersions", "dispersions_norm", "highly_variable")
    stacked = {c: np.stack([t[c].to_numpy(np.float64) for t in tables]) for c in columns}
    n_batches = stacked["highly_variable"].sum(axis=0).astype(np.int64)
    table = pd.DataFrame({c: _nan_mean(stacked[c]) for c in columns[:3]}, index=names)
    if spec.n_top_genes is not None:
        table["highly_variable"] = _most_often(n_batches, table, spec.n_top_genes)
    else:
        table["dispersions_norm"] = table["dispersions_norm"].fillna(0.0)
        table["highly_variable"] = _in_bounds(table["means"], table["dispersions_norm"], spec)
    table["highly_variable_nbatches"] = n_batches
    table["highly_variable_intersection"] = n_batches == len(batches)
    return table


def _nan_mean(stacked: np.ndarray) -> np.ndarray:
    known = ~np.isnan(stacked)
    count = known.sum(axis=0)
    with np.errstate(invalid="ignore"):
        return np.where(known, stacked, 0.0).sum(axis=0) / count


def _most_often(n_batches: np.ndarray, table: pd.DataFrame, n_top: int) -> np.ndarray:
    """Take the genes chosen in most batches; then by normalised dispersion, by name."""
    norm = table["dispersions_norm"].to_numpy()
    by_name = np.argsort(table.index.to_numpy(dtype=object).astype(str), kind="stable")
    last = np.isnan(norm)[by_name]
    order = np.lexsort((-np.where(last, 0.0, norm[by_name]), last, -n_batches[by_name]))
    chosen = np.zeros(len(norm), bool)
    chosen[by_name[order[:n_top]]] = True
    return chosen


def _expressed_only(batch: BatchMoments, spec: HVGSpec) -> pd.DataFrame:
    """One batch's table, with zeros for genes that it does not express."""
    expressed = batch.sums > 0
    part = BatchMoments(batch.n_cells, batch.sums[expressed], batch.squares[expressed])
    columns = ["means", "dispersions", "dispersions_norm", "highly_variable"]
    table = pd.DataFrame(0.0, index=range(len(expressed)), columns=columns)
    if expressed.any():
        table.loc[expressed, columns] = _one_batch(part, spec)[columns].to_numpy(np.float64)
    return table


def _one_batch(batch: BatchMoments, spec: HVGSpec) -> pd.DataFrame:
    mean, var = batch.mean_var()
    mean[mean == 0] = 1e-12
    dispersion = var / mean
    if spec.flavor == "seurat":
        dispersion[dispersion == 0] = np.nan
        dispersion = np.log(dispersion)
        mean = np.log1p(mean)
    table = pd.DataFrame({"means": mean, "dispersions": dispersion})
    table["mean_bin"] = _mean_bins(table["means"], spec, batch.n_cells)
    average, deviation = _bin_statistics(table, spec)
    with np.errstate(divide="ignore", invalid="ignore"):
        table["dispersions_norm"] = (dispersion - average) / deviation
    norm = table["dispersions_norm"].to_numpy()
    if spec.n_top_genes is None:
        table["highly_variable"] = _in_bounds(table["means"], np.nan_to_num(norm), spec)
    else:
        table["highly_variable"] = _highest(norm, spec.n_top_genes)
    return table


def _mean_bins(means: pd.Series, spec: HVGSpec, n_cells: int) -> np.ndarray:
    """Give each gene the number of its bin of mean expression, or -1."""
    if spec.flavor == "seurat":
        return pd.cut(means, bins=spec.n_bins).cat.codes.to_numpy()
    inner = np.percentile(means, np.arange(10, 105, 5))
    edges = np.r_[-np.inf, inner, np.inf]
    if len(np.unique(edges)) < len(edges):
        msg = (
            "cell_ranger bins genes by percentiles of their mean, and several percentiles are "
            f"equal (of {len(means)} genes, {means.nunique()} have different means over the "
            f"{n_cells:,} cells of this batch, or of all): filter genes by min_cells first, "
            "leave out batches of few cells, or use flavor='seurat'"
        )
        raise DataError(msg)
    return pd.cut(means, bins=edges).cat.codes.to_numpy()


def _bin_statistics(table: pd.DataFrame, spec: HVGSpec) -> tuple[np.ndarray, np.ndarray]:
    """Centre and spread of the dispersions in each gene's bin."""
    grouped = table[table["mean_bin"] >= 0].groupby("mean_bin")["dispersions"]
    if spec.flavor == "seurat":
        stats = grouped.agg(avg="mean", dev="std")
        # Genes alone in their bin get a normalised dispersion of 1.
        alone = stats["dev"].isna()
        stats.loc[alone, "dev"] = stats.loc[alone, "avg"]
        stats.loc[alone, "avg"] = 0.0
    else:
        stats = grouped.agg(avg="median", dev=_mad)
    stats = stats.reindex(table["mean_bin"])
    return stats["avg"].to_numpy(), stats["dev"].to_numpy()


def _mad(values: pd.Series) -> float:
    array = values.to_numpy()
    return float(np.median(np.abs(array - np.median(array))) / _MAD_SCALE)


def _in_bounds(
    mean: pd.Series | np.ndarray, norm: pd.Series | np.ndarray, spec: HVGSpec
) -> np.ndarray:
    max_disp = np.inf if spec.max_disp is None else spec.max_disp
    return np.asarray(
        (mean > spec.min_mean)
        & (mean < spec.max_mean)
        & (norm > spec.min_disp)
        & (norm < max_disp)
    )


def _highest(norm: np.ndarray, n_top: int) -> np.ndarray:
    """Genes with at least the n-th highest value; all with a value where there are fewer."""
    known = np.sort(norm[~np.isnan(norm)])[::-1]
    if not len(known):
        return np.zeros(len(norm), bool)
    cutoff = known[min(n_top, len(known)) - 1]
    return np.nan_to_num(norm, nan=-np.inf) >= cutoff


def require_loess() -> None:
    """Refuse ``seurat_v3`` where the package with its regression is missing.

    Raises
    ------
    MissingPackageError
        scikit-misc is not installed.
    """
    if find_spec("skmisc") is None:
        msg = "hvg flavor seurat_v3 needs scikit-misc: pip install scikit-misc"
        raise MissingPackageError(msg)


def clip_limits(batch: BatchMoments, span: float) -> tuple[np.ndarray, np.ndarray]:
    """Largest value that ``seurat_v3`` lets each gene have, and its expected deviation.

    Parameters
    ----------
    batch
        Moments of counts.
    span
        Share of the genes that each local regression looks at.

    Returns
    -------
    limit, deviation : float64, shape (genes,)

    Raises
    ------
    MissingPackageError
        scikit-misc, which has the loess regression, is not installed.
    DataError
        The regression fails.
    """
    require_loess()
    from skmisc.loess import loess

    mean, var = batch.mean_var()
    expected = np.zeros(len(mean))
    varying = var > 0
    if 0 < np.count_nonzero(varying) < _LOESS_GENES:
        msg = (
            f"seurat_v3 needs {_LOESS_GENES} genes that vary for its regression, not "
            f"{np.count_nonzero(varying)}; use another flavor"
        )
        raise DataError(msg)
    if varying.any():
        model = loess(np.log10(mean[varying]), np.log10(var[varying]), span=span, degree=2)
        try:
            model.fit()
        except ValueError as error:
            msg = f"the loess regression of seurat_v3 failed (span={span}): {error}"
            raise DataError(msg) from error
        expected[varying] = model.outputs.fitted_values
    deviation = np.sqrt(10**expected)
    return deviation * np.sqrt(batch.n_cells) + mean, deviation


def seurat_v3_table(
    batches: Sequence[BatchMoments],
    clipped: Sequence[np.ndarray],
    deviations: Sequence[np.ndarray],
    total: BatchMoments,
    names: pd.Index,
    n_top: int,
) -> pd.DataFrame:
    """Highly variable genes of flavour ``seurat_v3``.

    Parameters
    ----------
    batches
        Moments of counts of each batch.
    clipped
        Of each batch, sums and sums of squares of clipped counts, shape (genes, 2).
    deviations
        Of each batch, what `clip_limits` expects.
    total
        Moments over all batches.
    names
        Gene names.
    n_top
        Number of genes to choose.

    Returns
    -------
    Indexed by `names`: ``means``, ``variances``, ``variances_norm``, ``highly_variable``,
    ``highly_variable_rank`` and ``highly_variable_nbatches``.
    """
    rows = []
    for batch, sums, deviation in zip(batches, clipped, deviations, strict=True):
        n, mean = batch.n_cells, batch.sums / batch.n_cells
        spread = n * mean**2 + sums[:, 1] - 2 * sums[:, 0] * mean
        with np.errstate(divide="ignore", invalid="ignore"):
            rows.append(spread / ((n - 1) * deviation**2))
    norm = np.stack(rows)
    rank = np.argsort(np.argsort(-norm, axis=1), axis=1).astype(np.float32)
    n_batches = (rank < n_top).sum(axis=0)
    rank[rank >= n_top] = np.nan
    middle = np.ma.median(np.ma.masked_invalid(rank), axis=0).filled(np.nan)
    order = np.lexsort((-n_batches, np.nan_to_num(middle, nan=np.inf)))
    chosen = np.zeros(len(names), bool)
    chosen[order[:n_top]] = True
    mean, var = total.mean_var()
    columns = {
        "means": mean,
        "variances": var,
        "variances_norm": norm.mean(axis=0),
        "highly_variable": chosen,
        "highly_variable_rank": middle,
        "highly_variable_nbatches": n_batches,
    }
    return pd.DataFrame(columns, index=names)

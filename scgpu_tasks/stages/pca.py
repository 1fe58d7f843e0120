"""Principal components of log-normalised counts by their Gram matrix.

One visit of each block adds up the Gram matrix of the chosen genes; normalisation, log1p and
masks are applied on the way. The scores come from the chosen genes' counts, which are kept from
that visit as far as a small memory budget or a scratch folder allows; the other blocks are
visited once more.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy.linalg

from scgpu_tasks.errors import DataError, FormatError, OutputError, ParameterError
from scgpu_tasks.kernels import gram as gram_kernel
from scgpu_tasks.kernels.blas import one_thread
from scgpu_tasks.kernels.transform import Transform
from scgpu_tasks.specs import PCASpec
from scgpu_tasks.stages import held
from scgpu_tasks.stages.engine import Engine, Progress, Span, on_gpu
from scgpu_tasks.stages.gram_room import tasks_at_once
from scgpu_tasks.stages.parcels import RowTarget
from scgpu_tasks.stages.pca_visits import Chosen, GramPart, ProjectRows, SumGram
from scgpu_tasks.stages.qc_visits import cell_factors
from scgpu_tasks.stages.rowwise import by_rows
from scgpu_tasks.stages.sources import BlockSource, as_source
from scgpu_tasks.stages.timing import timed


@dataclass
class PCAResult:
    """What PCA leaves; n_kept cells, n_hvg genes, n_comps components.

    Attributes
    ----------
    X_pca
        Scores of the kept cells, float32, shape (n_kept, n_comps); read-only where they are in
        a file.
    PCs
        Loadings, float64, shape (n_hvg, n_comps); the largest absolute one of each component is
        positive.
    variance, variance_ratio
        Variance of the scores, which divides by n - 1, and its share of the total variance of
        the chosen genes; float64, shape (n_comps,).
    mean
        Mean log-normalised value of each chosen gene over the kept cells, float64, (n_hvg,).
    summary
        Numbers of cells and genes, passes over X, stored bytes read; JSON-serialisable.
    """

    X_pca: np.ndarray
    PCs: np.ndarray
    variance: np.ndarray
    variance_ratio: np.ndarray
    mean: np.ndarray
    summary: dict[str, Any] = field(default_factory=dict)


def run_pca(
    source: Any,
    cells: pd.DataFrame,
    genes: pd.DataFrame,
    target_sum: float,
    pca: PCASpec,
    *,
    progress: Progress | None = None,
    scratch: str | Path | None = None,
    scores: str | Path | None = None,
    workers: int | None = None,
) -> PCAResult:
    """Principal components of the cells and genes that QC chose.

    Parameters
    ----------
    source
        The counts that QC saw.
    cells
        ``passed_qc`` and ``total_counts`` of every cell, as in `QCResult`.
    genes
        ``highly_variable`` of every gene and, if known, ``passed_qc`` and ``n_cells_kept``.
    target_sum
        Total of each cell after normalisation.
    pca
        Number of components; whether to centre.
    progress
        Called with blocks done and blocks to do.
    scratch
        Folder for temporary files, about 3 bytes for each count of a chosen gene. With a
        cluster, all workers must see it. Default: no files; X is read once more instead.
    scores
        ``.npy`` file to write the scores to, which then take no memory: `PCAResult.X_pca` maps
        it. Default: they are in memory.
    workers
        Number of threads where no Dask client is in use. Default: one for each CPU.

    Raises
    ------
    ParameterError
        Fewer cells or genes than components; or so many genes that their Gram matrix does not
        fit into memory.
    DataError
        The Gram matrix is not finite.
    OutputError
        A file cannot be written.
    """
    mask = genes["highly_variable"].to_numpy(dtype=bool)
    if "passed_qc" in genes:
        mask = mask & genes["passed_qc"].to_numpy(dtype=bool)
    keep = cells["passed_qc"].to_numpy(dtype=bool)
    with timed("factors of the cells"):
        factors = cell_factors(cells["total_counts"].to_numpy(dtype=np.float64), target_sum)
    found = genes["n_cells_kept"].to_numpy() if "n_cells_kept" in genes else None
    return masked_pca(
        as_source(source),
        keep,
        mask,
        factors,
        Transform.LOG1P,
        pca,
        n_found=found,
        progress=progress,
        scratch=scratch,
        scores=scores,
        workers=workers,
    )


def masked_pca(
    source: BlockSource,
    keep: np.ndarray,
    mask: np.ndarray,
    factors: np.ndarray,
    transform: Transform,
    pca: PCASpec,
    *,
    n_found: np.ndarray | None = None,
    progress: Progress | None = None,
    scratch: str | Path | None = None,
    scores: str | Path | None = None,
    workers: int | None = None,
) -> PCAResult:
    """Principal components of transformed values of some cells and genes.

    Parameters
    ----------
    keep
        bool, shape (cells,).
    mask
        bool, shape (genes,).
    factors
        float64, shape (cells,): what the transform multiplies each cell by.
    transform
        Applied to each value.
    n_found
        Number of kept cells with a value other than zero, for each gene; steers how the work is
        done, not its result. Default: all of them.
    """
    n_kept, n_genes = int(keep.sum()), int(mask.sum())
    _check(source, keep, mask, pca)
    chosen = np.flatnonzero(mask)
    density = np.ones(n_genes) if n_found is None else n_found[chosen] / max(n_kept, 1)
    # Densest first: they make a dense tile, and what is often touched lies close together.
    order = np.argsort(-density, kind="stable")
    position = np.full(len(mask), -1, np.int32)
    position[chosen[order]] = np.arange(n_genes)
    n_dense = gram_kernel.dense_columns(density[order])
    folder = None if scratch is None else _scratch_folder(scratch)
    run = _Run(source, keep, factors, position, n_genes, transform, folder)
    with Engine(source, workers=workers, progress=progress, passes=2) as engine:
        engine.on_exit(held.drop, run.name, run.scratch)
        engine.drop_blocks_on_exit()
        at_once = tasks_at_once(engine, n_genes)
        room = engine.rows_result((n_kept, pca.n_comps), np.float32, scores)
        solve = _solver(engine, n_genes)
        sums = _GramSums(n_genes, n_dense)
        gram_task = partial(run.gram_task, n_dense, engine.can_hold)
        engine.fold(gram_task, sums.add, at_once=at_once)
        with timed("Gram matrix made whole"):
            gram, mean = sums.finish(n_kept, np.argsort(order, kind="stable"))
        with timed("eigenvectors"):
            PCs, variance, ratio = components(gram, mean, n_kept, pca, solve)
        del gram
        offset = mean @ PCs if pca.zero_center else np.zeros(pca.n_comps)
        first = _first_kept(engine.spans, keep)
        with timed("room for the scores"):
            home, target = room.result()

        def take(span: Span, part: np.ndarray | None, _: str | None) -> None:
            if part is not None:
                home.write(first[span.start], part)

        permuted = np.ascontiguousarray(PCs[order])
        where = _Scores(permuted, offset, sums.holders, target, first)
        engine.fold(partial(run.score_task, where), take)
        summary = {
            "n_cells": n_kept,
            "n_genes": n_genes,
            "n_comps": pca.n_comps,
            "zero_center": pca.zero_center,
            "passes": engine.passes,
            "stored_bytes_read": engine.stored_bytes_read,
            **engine.mishaps(),
        }
        found = home.map()
    return PCAResult(found, PCs, variance, ratio, mean, summary)


@dataclass
class _Run:
    """Makes the tasks of both visits."""

    source: BlockSource
    keep: np.ndarray
    factors: np.ndarray
    position: np.ndarray
    n_genes: int
    transform: Transform
    scratch: str | None
    name: str = field(default_factory=lambda: uuid.uuid4().hex)

    def chosen(self, span: Span) -> Chosen:
        part = slice(span.start, span.stop)
        return Chosen(
            span.start,
            self.keep[part],
            self.factors[part],
            self.position,
            self.n_genes,
            self.transform,
            (self.name, span.number),
            self.scratch,
            len(self.keep),
        )

    def gram_task(self, n_dense: int, hold: bool, span: Span) -> SumGram:
        return SumGram(self.chosen(span), n_dense, hold=hold)

    def score_task(self, scores: _Scores, span: Span) -> ProjectRows:
        return ProjectRows(
            self.chosen(span),
            scores.components,
            scores.offset,
            scores.holders.get(span.number),
            scores.target,
            scores.first[span.start],
        )


@dataclass
class _Scores:
    """What tells tasks how to make scores, who holds the rows, and where scores go."""

    components: np.ndarray
    offset: np.ndarray
    holders: dict[int, str | None]
    target: RowTarget | None
    first: dict[int, int]


def _first_kept(spans: Sequence[Span], keep: np.ndarray) -> dict[int, int]:
    """Count the cells that are kept before each span; by the first row of the span."""
    first, n = {}, 0
    for span in spans:
        first[span.start] = n
        n += int(np.count_nonzero(keep[span.start : span.stop]))
    return first


class _GramSums:
    """Gram matrix and column sums, folded span by span."""

    def __init__(self, n_genes: int, n_dense: int) -> None:
        self.n_dense = n_dense
        self.gram: np.ndarray | None = None
        self.sums = np.zeros(n_genes)
        self.holders: dict[int, str | None] = {}

    def add(self, span: Span, part: GramPart, where: str | None) -> None:
        if part.held:
            self.holders[span.number] = where
        self.sums += part.sums
        if self.gram is None:
            self.gram = part.gram
        else:
            total = self.gram
            n = 256 if total.ndim == 2 else 1 << 18
            by_rows(
                lambda rows: np.add(total[rows], part.gram[rows], total[rows]), len(total), n
            )

    def finish(self, n: int, back: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Symmetric matrix and means, in the order of the genes."""
        if self.gram is None:
            msg = "X has no rows"
            raise DataError(msg)
        if self.gram.ndim == 1:
            gram = gram_kernel.from_upper(self.gram, len(self.sums))
        else:
            gram = gram_kernel.finish(self.gram, self.n_dense)
        if not np.isfinite(gram).all():
            msg = (
                "the Gram matrix holds NaN or infinite values: X has such values, or values "
                "of -1 or less after scaling, which have no log1p"
            )
            raise DataError(msg)
        return gram[np.ix_(back, back)], self.sums[back] / n


Solver = Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]


def _solver(engine: Engine, n_genes: int) -> Solver:
    """Choose where eigenvectors are found; a GPU's library loads while X is read."""
    if not on_gpu(engine.source):
        return largest_eigenpairs
    from scgpu_tasks.kernels._gpu import eigen

    engine.once(eigen.warm_up, n_genes)
    return partial(engine.once, eigen.largest_eigenpairs)


def largest_eigenpairs(matrix: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Find the `n` largest eigenvalues of a symmetric matrix, rising, and their vectors.

    Works in the matrix's memory.
    """
    k = len(matrix)
    with one_thread():
        values, vectors = scipy.linalg.eigh(
            matrix, subset_by_index=[k - n, k - 1], overwrite_a=True, check_finite=False
        )
    return values, vectors


def components(
    gram: np.ndarray,
    mean: np.ndarray,
    n: int,
    pca: PCASpec,
    solve: Solver = largest_eigenpairs,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Find loadings, variances and their share from a Gram matrix; works in its memory.

    Parameters
    ----------
    gram
        float64, shape (genes, genes).
    mean
        float64, shape (genes,).
    n
        Number of cells.
    pca
        With `zero_center`, eigenvectors of the covariance. Without, those of the Gram matrix
        itself, as in scikit-learn's TruncatedSVD: variances are then those of the scores around
        their own mean and divide by n, and components are sorted by the size of their scores.
    solve
        Finds the largest eigenvalues, rising, and their vectors.

    Returns
    -------
    PCs : shape (genes, n_comps)
    variance, ratio : shape (n_comps,)
    """
    if pca.zero_center:
        gram -= n * np.outer(mean, mean)
        gram /= n - 1
        total = float(np.trace(gram))
    else:
        total = float(np.trace(gram)) / n - float(mean @ mean)
    values, vectors = solve(gram, pca.n_comps)
    values, vectors = np.maximum(values[::-1], 0.0), vectors[:, ::-1]
    largest = np.abs(vectors).argmax(axis=0)
    signs = np.where(vectors[largest, np.arange(vectors.shape[1])] < 0, -1.0, 1.0)
    PCs = np.ascontiguousarray(vectors * signs)
    variance = values
    if not pca.zero_center:
        variance = np.maximum(values / n - (mean @ PCs) ** 2, 0.0)
    ratio = variance / total if total > 0 else np.zeros_like(variance)
    return PCs, variance, ratio


def _check(source: BlockSource, keep: np.ndarray, mask: np.ndarray, pca: PCASpec) -> None:
    n_cells, n_genes = source.shape
    if len(keep) != n_cells or len(mask) != n_genes:
        msg = f"{len(keep)} cells and {len(mask)} genes do not fit X of {n_cells} x {n_genes}"
        raise FormatError(msg)
    n_kept, n_chosen = int(keep.sum()), int(mask.sum())
    if n_kept < pca.n_comps:
        msg = f"n_comps={pca.n_comps} components need as many cells, but {n_kept} passed QC"
        raise ParameterError(msg)
    if n_chosen < pca.n_comps:
        msg = (
            f"n_comps={pca.n_comps} components need as many genes, but {n_chosen} are highly "
            "variable"
        )
        raise ParameterError(msg)
    if n_kept < 2:
        msg = f"PCA needs two cells or more, but {n_kept} passed QC"
        raise ParameterError(msg)


def _scratch_folder(path: str | Path) -> str:
    folder = Path(path).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        msg = f"cannot make the scratch folder {folder}: {error}"
        raise OutputError(msg) from error
    return str(folder)

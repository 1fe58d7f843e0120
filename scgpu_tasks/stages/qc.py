"""QC metrics, filters and highly variable genes of counts, in as few reads as can be.

With fixed thresholds and a fixed target sum, one visit of each block finds everything. Filters
by median absolute deviations and a median target sum need all cells before any gene moment, so
they take one visit more; so does ``seurat_v3``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from scgpu_tasks.errors import DataError, FormatError, ParameterError
from scgpu_tasks.kernels.transform import Transform
from scgpu_tasks.specs import HVGSpec, QCSpec
from scgpu_tasks.stages import filters, hvg, seurat_v3, tables
from scgpu_tasks.stages.batches import DeferredTable, batch_groups
from scgpu_tasks.stages.engine import Engine, Progress, Span
from scgpu_tasks.stages.gene_sets import GeneSets, find_gene_sets
from scgpu_tasks.stages.qc_errors import not_counts, nothing_passes
from scgpu_tasks.stages.qc_visits import (
    CellPart,
    CellPlan,
    GenePart,
    MeasureCells,
    QCPart,
    SumGenes,
    cell_factors,
)
from scgpu_tasks.stages.sources import BlockSource, as_source
from scgpu_tasks.stages.timing import timed


@dataclass
class QCResult:
    """What QC leaves.

    Attributes
    ----------
    cells
        Every cell, by name: scanpy's obs metrics and ``passed_qc``.
    genes
        Every gene, by name: scanpy's var metrics, ``n_cells_kept`` (kept cells that express
        it), ``passed_qc``, ``highly_variable`` and the columns of the HVG flavour; the latter
        are NaN for genes that did not pass.
    summary
        Counts, thresholds used, what each filter removed, target sum, passes over X, stored
        bytes read, notes; JSON-serialisable.
    """

    cells: pd.DataFrame
    genes: pd.DataFrame
    summary: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Among:
    """Cells and genes that may pass, bool; None: all of them."""

    cells: np.ndarray | None = None
    genes: np.ndarray | None = None


def run_qc(
    source: Any,
    obs: pd.DataFrame | Callable[[], pd.DataFrame],
    var: pd.DataFrame,
    qc: QCSpec,
    hvg: HVGSpec | None,
    *,
    gene_lists: Mapping[str, Iterable[str]] | None = None,
    among: Among | None = None,
    progress: Progress | None = None,
    workers: int | None = None,
    keep_blocks: bool | None = False,
) -> QCResult:
    """Measure cells and genes, filter them, and choose the highly variable genes.

    Parameters
    ----------
    source
        Counts, cells by genes: `RowBlocks`, a Dask array, a SciPy sparse matrix or a NumPy
        array. Never changed.
    obs, var
        Names and annotations of the cells and genes. `obs` may be a function that reads it:
        it is called in a thread, while X is read.
    qc
        Metrics and filters.
    hvg
        Normalisation and choice of genes; None: choose none.
    gene_lists
        Further gene sets to measure, as lists of gene names.
    among
        Cells and genes that may pass; the others are measured, and left out. Default: all.
    progress
        Called with blocks done and blocks to do.
    workers
        Number of threads where no Dask client is in use. Default: one for each CPU.
    keep_blocks
        Whether counts stay on the GPUs for `run_pca`, which then reads nothing and frees them;
        None: if they are likely to fit. Nothing is kept on a CPU.

    Raises
    ------
    ParameterError
        A parameter does not fit this matrix, or no cell passes.
    DataError
        X holds values that are not counts.
    FormatError
        The parts do not belong together.
    """
    run = _Run(as_source(source), obs, var, qc, hvg, gene_lists or {}, among or Among())
    with Engine(
        run.source,
        workers=workers,
        progress=progress,
        passes=run.passes,
        keep_blocks=keep_blocks,
    ) as engine:
        run.measure(engine)
        with timed("filters of the cells"):
            run.choose_cells()
        if not run.fused:
            run.sum_genes(engine)
        with timed("genes"):
            run.choose_genes()
            run.choose_variable(engine)
        with timed("tables"):
            return run.result(engine)


class _Run:
    """One run of QC: each method is a step, in order."""

    def __init__(
        self,
        source: BlockSource,
        obs: pd.DataFrame | Callable[[], pd.DataFrame],
        var: pd.DataFrame,
        qc: QCSpec,
        hvg_spec: HVGSpec | None,
        gene_lists: Mapping[str, Iterable[str]],
        among: Among,
    ) -> None:
        self.among = among
        self.source, self.var = source, var
        self._obs = DeferredTable(obs, source.shape)
        self.choosing = hvg_spec is not None
        self.qc, self.hvg = qc, hvg_spec or HVGSpec()
        self._check()
        self.sets: GeneSets = find_gene_sets(var, qc.qc_vars, gene_lists)
        self.notes = list(self.sets.notes)
        self.mt_set = self.sets.names.index("mt") if "mt" in self.sets.names else None
        if qc.max_pct_mt is not None and self.mt_set is None and not qc.mad:
            self.notes.append("max_pct_mt was not applied: 'mt' is not among qc_vars")
        if qc.mad:
            self.notes.append("mad: limits from medians replace the fixed cell thresholds")
        tops = {*qc.percent_top, *((filters.MAD_TOP,) if qc.mad else ())}
        self.tops = tuple(sorted(top for top in tops if top <= len(var)))
        self.groups, self.categories = self._groups()
        self.fused = not qc.mad and self.hvg.target_sum is not None
        self.passes = 1 + (not self.fused) + (self.hvg.flavor == "seurat_v3")
        self.moments = GenePart()
        self.transform = {
            "seurat": Transform.SCALE,
            "cell_ranger": Transform.LOG1P,
            "seurat_v3": Transform.IDENTITY,
        }[self.hvg.flavor]

    def _check(self) -> None:
        n_cells, n_genes = self.source.shape
        if len(self.var) != n_genes:
            msg = f"var has {len(self.var)} rows, but X is {n_cells} x {n_genes}"
            raise FormatError(msg)
        if n_cells == 0 or n_genes == 0:
            msg = f"X is {n_cells} x {n_genes}: there is nothing to measure"
            raise DataError(msg)
        too_many = [top for top in self.qc.percent_top if top > n_genes]
        if too_many:
            msg = f"percent_top {too_many[0]} is more than the {n_genes} genes of this store"
            raise ParameterError(msg)

    @property
    def obs(self) -> pd.DataFrame:
        """Annotations of the cells; waits for them."""
        return self._obs.result()

    def _groups(self) -> tuple[np.ndarray, list[Any]]:
        if self.hvg.batch_key is None:
            return np.zeros(self.source.shape[0], np.int32), ["all"]
        groups, categories = batch_groups(self.obs, self.hvg.batch_key)
        without = int(np.count_nonzero(groups == len(categories)))
        if without:
            self.notes.append(
                f"{without:,} cells have no {self.hvg.batch_key}: the choice of highly "
                "variable genes leaves them out; all else counts them"
            )
        return groups, categories

    def measure(self, engine: Engine) -> None:
        """First visit: cell metrics, and gene moments if the filters are fixed."""
        n = self.source.shape[0]
        self.measured = CellPart(
            np.zeros(n, np.int64),
            np.zeros(n),
            # Column after column, as the tables hold them.
            np.zeros((n, len(self.sets.names)), order="F"),
            np.zeros((n, len(self.tops)), order="F"),
        )
        plan = CellPlan(
            self.sets.bits(),
            len(self.sets.names),
            self.tops,
            self.qc.expect_counts,
            self.mt_set,
            partial(_passes, self.qc) if self.fused else None,
        )
        target = self.hvg.target_sum if self.hvg.target_sum is not None else 1.0

        def task(span: Span) -> MeasureCells:
            part = slice(span.start, span.stop)
            groups = self.groups[part]
            among = None if self.among.cells is None else self.among.cells[part]
            return MeasureCells(plan, span.start, groups, target, self.transform, among)

        engine.fold(task, self._take_cells)

    def _take_cells(self, span: Span, part: QCPart, _: str | None) -> None:
        if part.problem is not None or part.cells is None:
            raise not_counts(part.problem, self.obs, self.var)
        rows = slice(span.start, span.stop)
        for name, values in vars(part.cells).items():
            getattr(self.measured, name)[rows] = values
        self.moments.add(part.genes)

    def choose_cells(self) -> None:
        """Apply the cell filters; fix the target sum."""
        self.metrics = tables.cell_metrics(self.measured, self.sets.names, self.tops)
        if self.qc.mad:
            self.failures, limits = filters.mad_failures(self.metrics)
            self.thresholds: dict[str, Any] = {"mad": limits}
        else:
            self.failures = filters.fixed_failures(self.qc, self.metrics)
            self.thresholds = {name: getattr(self.qc, name) for name in self.failures}
        self.keep = ~_any(self.failures, self.source.shape[0])
        if self.among.cells is not None:
            self.keep &= self.among.cells
        if not self.keep.any():
            raise nothing_passes(self.failures, self.metrics)
        self.target_sum = self.hvg.target_sum
        if self.target_sum is None:
            counted = self.measured.total[self.keep & (self.measured.total > 0)]
            if not len(counted):
                msg = "target_sum=None takes the median total, but no kept cell has counts"
                raise ParameterError(msg)
            self.target_sum = float(np.median(counted))
        if self.qc.min_cells is not None:
            self.thresholds["min_cells"] = self.qc.min_cells

    def sum_genes(self, engine: Engine) -> None:
        """Second visit, where the filters or the target sum came from the data."""
        factors = cell_factors(self.measured.total, self.target_sum or 1.0)
        # The first visit counted everybody as left out.
        self.moments = GenePart()

        def task(span: Span) -> SumGenes:
            part = slice(span.start, span.stop)
            return SumGenes(
                span.start, self.keep[part], self.groups[part], factors[part], self.transform
            )

        engine.fold(task, lambda _, genes, __: self.moments.add(genes))

    def choose_genes(self) -> None:
        """Apply the gene filter."""
        kept = np.sum(list(self.moments.groups.values()), axis=0)
        left_out = self.moments.left_out
        self.n_cells_kept = kept[:, 1].astype(np.int64)
        everywhere = kept[:, :2] if left_out is None else kept[:, :2] + left_out
        self.gene_totals = everywhere[:, 0]
        self.gene_counts = everywhere[:, 1].astype(np.int64)
        self.passed = np.ones(len(self.var), bool)
        if self.qc.min_cells is not None:
            self.passed = self.n_cells_kept >= self.qc.min_cells
        if self.among.genes is not None:
            self.passed = self.passed & self.among.genes
        if not self.passed.any():
            msg = (
                f"no gene is expressed by min_cells={self.qc.min_cells} of the "
                f"{int(self.keep.sum())} kept cells: lower min_cells"
            )
            raise ParameterError(msg)

    def choose_variable(self, engine: Engine) -> None:
        """Choose the highly variable genes among those that passed."""
        # Without its name, which may be that of a column.
        names = self.var.index[self.passed].rename(None)
        if not self.choosing:
            self.variable = pd.DataFrame(index=names)
            return
        batches = self._batches()
        if not batches:
            msg = f"no kept cell has a value in obs[{self.hvg.batch_key!r}]"
            raise ParameterError(msg)
        if self.hvg.flavor == "seurat_v3":
            table = seurat_v3.choose(
                engine,
                batches,
                names,
                self.hvg,
                passed=self.passed,
                groups=np.where(self.keep, self.groups, len(self.categories)),
                n_groups=len(self.categories),
            )
        else:
            table = hvg.dispersion_table(
                list(batches.values()),
                names,
                self.hvg,
                batched=self.hvg.batch_key is not None,
            )
        n_hvg = int(table["highly_variable"].sum())
        wanted = self.hvg.n_top_genes
        if wanted is not None and n_hvg < wanted:
            self.notes.append(f"{n_hvg} highly variable genes, not n_top_genes={wanted}")
        self.variable = table

    def _batches(self) -> dict[int, hvg.BatchMoments]:
        """Moments of the genes that passed, of each batch that has kept cells."""
        if self.hvg.batch_key is None:
            sizes = np.array([np.count_nonzero(self.keep), 0])
        else:
            sizes = np.bincount(self.groups[self.keep], minlength=len(self.categories) + 1)
        return {
            group: hvg.BatchMoments(
                int(sizes[group]), table[self.passed, 2], table[self.passed, 3]
            )
            for group, table in sorted(self.moments.groups.items())
            if group < len(self.categories)
        }

    def result(self, engine: Engine) -> QCResult:
        """Tables and summary."""
        cells = tables.cells(self.metrics, self.keep, self.obs.index)
        genes = tables.genes(
            self.gene_counts, self.gene_totals, self.source.shape[0], self.var.index
        )
        genes["n_cells_kept"] = self.n_cells_kept
        genes["passed_qc"] = self.passed
        genes = tables.with_variable(genes, self.variable, self.passed)
        lost = {name: int(mask.sum()) for name, mask in self.failures.items()}
        summary = {
            "n_cells": self.source.shape[0],
            "n_genes": len(self.var),
            "n_cells_kept": int(self.keep.sum()),
            "n_genes_kept": int(self.passed.sum()),
            "n_hvg": int(genes["highly_variable"].sum()) if self.choosing else 0,
            "thresholds": tables.json_numbers(self.thresholds),
            "lost": {"cells": lost, "genes": {"min_cells": int((~self.passed).sum())}},
            "target_sum": float(self.target_sum or 0.0),
            "gene_sets": {
                name: int(mask.sum())
                for name, mask in zip(self.sets.names, self.sets.masks, strict=True)
            },
            "batches": [str(category) for category in self.categories]
            if self.hvg.batch_key
            else [],
            "passes": engine.passes,
            "stored_bytes_read": engine.stored_bytes_read,
            **engine.mishaps(),
            "notes": self.notes,
        }
        return QCResult(tables.name_apart(cells), tables.name_apart(genes), summary)


def cell_totals(source: BlockSource, *, workers: int | None = None) -> np.ndarray:
    """Sum of the values of each cell, in one visit.

    Parameters
    ----------
    source
        Cells by genes.
    workers
        As in `run_qc`.

    Returns
    -------
    float64, shape (cells,)
    """
    n_cells, n_genes = source.shape
    totals = np.zeros(n_cells)
    plan = CellPlan(np.zeros(n_genes, np.uint64), 0, (), False, None, None)

    def task(span: Span) -> MeasureCells:
        groups = np.zeros(span.stop - span.start, np.int32)
        return MeasureCells(plan, span.start, groups, 1.0, Transform.IDENTITY)

    def take(span: Span, part: QCPart, _: str | None) -> None:
        if part.cells is not None:
            totals[span.start : span.stop] = part.cells.total

    with Engine(source, workers=workers) as engine:
        engine.fold(task, take)
    return totals


def _passes(spec: QCSpec, metrics: dict[str, np.ndarray]) -> np.ndarray:
    return ~_any(filters.fixed_failures(spec, metrics), len(metrics["total_counts"]))


def _any(failures: Mapping[str, np.ndarray], n: int) -> np.ndarray:
    failed = np.zeros(n, bool)
    for mask in failures.values():
        failed |= mask
    return failed

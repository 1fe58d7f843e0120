"""What QC does to each block: cell metrics, filters and gene moments in one visit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from scgpu_tasks.kernels.arrays import to_host
from scgpu_tasks.kernels.moments import clipped_moments, gene_moments
from scgpu_tasks.kernels.qc import WHOLE_TOLERANCE, cell_metrics
from scgpu_tasks.kernels.rows import Rows
from scgpu_tasks.kernels.transform import Transform
from scgpu_tasks.stages.rowwise import by_rows

CellRule = Callable[[dict[str, np.ndarray]], np.ndarray]


@dataclass(frozen=True)
class Problem:
    """The first value of a span that is not a count."""

    kind: str
    """``invalid`` (negative, NaN or infinite) or ``fractional``."""
    cell: int
    gene: int
    value: float


@dataclass
class CellPart:
    """Metrics of the cells of a span."""

    n_genes: np.ndarray
    total: np.ndarray
    set_totals: np.ndarray
    top_totals: np.ndarray


@dataclass
class GenePart:
    """Sums over the cells of a span, by group; and over the cells left out.

    On a GPU they stay there until `on_host`.
    """

    groups: dict[int, Any] = field(default_factory=dict)
    left_out: Any = None

    def add(self, other: GenePart) -> None:
        """Add another span's sums."""
        for group, table in other.groups.items():
            if group in self.groups:
                self.groups[group] += table
            else:
                self.groups[group] = table
        if self.left_out is None:
            self.left_out = other.left_out
        elif other.left_out is not None:
            self.left_out += other.left_out

    def on_host(self) -> GenePart:
        """Copy the sums to the host."""
        left_out = None if self.left_out is None else to_host(self.left_out)
        return GenePart({g: to_host(t) for g, t in self.groups.items()}, left_out)


@dataclass
class QCPart:
    """All that one visit of a span finds out."""

    cells: CellPart | None
    genes: GenePart
    problem: Problem | None = None


@dataclass(frozen=True)
class CellPlan:
    """What to measure of each cell, and who is kept.

    `rule` takes the metrics ``n_genes_by_counts``, ``total_counts`` and, if set number
    `mt_set` is counted, ``pct_counts_mt``; it returns which cells pass. None: nobody yet.
    """

    gene_sets: np.ndarray
    n_sets: int
    tops: tuple[int, ...]
    expect_counts: bool
    mt_set: int | None
    rule: CellRule | None


class _Reads:
    """A task that needs its rows read, wherever that is done."""

    prefer: str | None = None

    def recall(self) -> bool:
        """See `SpanTask`."""
        return False


class MeasureCells(_Reads):
    """Cell metrics and, where the plan has a rule, gene moments of the cells that pass it.

    Parameters
    ----------
    plan
        What to measure.
    start
        First row of the span.
    groups
        int32, shape (cells of the span,): group of each cell.
    target_sum
        Total of a cell after normalisation.
    transform
        For the gene moments.
    among
        bool, shape (cells of the span,): cells that may be kept. Default: all.
    """

    def __init__(
        self,
        plan: CellPlan,
        start: int,
        groups: np.ndarray,
        target_sum: float,
        transform: Transform,
        among: np.ndarray | None = None,
    ) -> None:
        self.plan = plan
        self.among = among
        self.start = start
        self.groups = groups
        self.target_sum = target_sum
        self.transform = transform
        self._cells: list[CellPart] = []
        self._genes = GenePart()
        self._problem: Problem | None = None

    def visit(self, rows: Rows, start: int) -> None:
        """See `SpanTask`."""
        if self._problem is not None:
            return
        plan = self.plan
        metrics = cell_metrics(rows, plan.gene_sets, plan.n_sets, plan.tops)
        cells = CellPart(
            to_host(metrics.n_genes),
            to_host(metrics.total),
            to_host(metrics.set_totals),
            to_host(metrics.top_totals),
        )
        if plan.expect_counts:
            self._problem = _first_problem(
                rows, start, metrics.invalid_row, metrics.fractional_row
            )
            if self._problem is not None:
                return
        keep = np.zeros(rows.n_rows, bool)
        if plan.rule is not None:
            named = {"n_genes_by_counts": cells.n_genes, "total_counts": cells.total}
            if plan.mt_set is not None:
                named["pct_counts_mt"] = percentage(
                    cells.set_totals[:, plan.mt_set], cells.total
                )
            keep = plan.rule(named)
        part = slice(start - self.start, start - self.start + rows.n_rows)
        if self.among is not None:
            keep = keep & self.among[part]
        group = self.groups[part]
        factor = cell_factors(cells.total, self.target_sum)
        self._genes.add(grouped_moments(rows, keep, group, factor, self.transform))
        # Last: a block that runs out of memory leaves no trace.
        self._cells.append(cells)

    def result(self) -> QCPart:
        """See `SpanTask`."""
        if self._problem is not None:
            return QCPart(None, GenePart(), self._problem)
        names = ("n_genes", "total", "set_totals", "top_totals")
        joined = {n: np.concatenate([getattr(c, n) for c in self._cells]) for n in names}
        return QCPart(CellPart(**joined), self._genes.on_host())


class SumGenes(_Reads):
    """Gene moments of cells that are known to be kept.

    Parameters
    ----------
    start
        First row of the span.
    keep, groups, factors
        Of the cells of the span.
    transform
        For the moments.
    """

    def __init__(
        self,
        start: int,
        keep: np.ndarray,
        groups: np.ndarray,
        factors: np.ndarray,
        transform: Transform,
    ) -> None:
        self.start = start
        self.keep = keep
        self.groups = groups
        self.factors = factors
        self.transform = transform
        self._genes = GenePart()

    def visit(self, rows: Rows, start: int) -> None:
        """See `SpanTask`."""
        part = slice(start - self.start, start - self.start + rows.n_rows)
        self._genes.add(
            grouped_moments(
                rows, self.keep[part], self.groups[part], self.factors[part], self.transform
            )
        )

    def result(self) -> GenePart:
        """See `SpanTask`."""
        return self._genes.on_host()


class ClipGenes(_Reads):
    """Sums of clipped counts, for ``seurat_v3``.

    Parameters
    ----------
    start
        First row of the span.
    groups
        int32, shape (cells of the span,): group of each cell; -1 where it is left out.
    limit
        float64, shape (groups, genes).
    """

    def __init__(self, start: int, groups: np.ndarray, limit: np.ndarray) -> None:
        self.start = start
        self.groups = groups
        self.limit = limit
        self._sums: Any = 0.0

    def visit(self, rows: Rows, start: int) -> None:
        """See `SpanTask`."""
        part = self.groups[start - self.start : start - self.start + rows.n_rows]
        self._sums = self._sums + clipped_moments(rows, part, self.limit)

    def result(self) -> np.ndarray:
        """See `SpanTask`."""
        return to_host(self._sums)


def grouped_moments(
    rows: Rows,
    keep: np.ndarray,
    group: np.ndarray,
    factor: np.ndarray,
    transform: Transform,
) -> GenePart:
    """Moments of the groups that occur among the kept cells of a block."""
    present = np.flatnonzero(np.bincount(group[keep]))
    local = np.full(int(group.max(initial=0)) + 1, -1, np.int32)
    local[present] = np.arange(len(present))
    code = np.where(keep, local[group], np.int32(-1))
    kept, left_out = gene_moments(rows, code, factor, transform, len(present))
    return GenePart({int(g): kept[i] for i, g in enumerate(present)}, left_out)


def cell_factors(total: np.ndarray, target_sum: float) -> np.ndarray:
    """Find what normalisation multiplies each cell by; 1 for cells without counts."""
    factors = np.ones(len(total))
    by_rows(
        lambda rows: np.divide(target_sum, total[rows], factors[rows], where=total[rows] != 0),
        len(total),
    )
    return factors


def percentage(part: np.ndarray, total: np.ndarray) -> np.ndarray:
    """100 * part / total; NaN where the total is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return part / total * 100


def _first_problem(
    rows: Rows, start: int, invalid_row: int, fractional_row: int
) -> Problem | None:
    found = [row for row in (invalid_row, fractional_row) if row >= 0]
    if not found:
        return None
    row = min(found)
    part = slice(int(rows.indptr[row]), int(rows.indptr[row + 1]))
    values = to_host(rows.data[part]).astype(np.float64)
    invalid = ~((values >= 0) & (values < np.inf))
    with np.errstate(invalid="ignore"):
        # Infinity less infinity; such a value is invalid already.
        finite = np.where(invalid, 0.0, values)
    wrong = invalid | (np.abs(finite - np.rint(finite)) > WHOLE_TOLERANCE)
    at = int(np.flatnonzero(wrong)[0])
    kind = "invalid" if invalid[at] else "fractional"
    return Problem(kind, start + row, int(to_host(rows.indices[part])[at]), float(values[at]))

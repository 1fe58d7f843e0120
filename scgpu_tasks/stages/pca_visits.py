"""What PCA does to each block: its share of the Gram matrix, and its cells' scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from scgpu_tasks.kernels.arrays import is_on_gpu, to_host, to_host_quickly
from scgpu_tasks.kernels.gram import gram_add, upper
from scgpu_tasks.kernels.project import project
from scgpu_tasks.kernels.rows import Rows
from scgpu_tasks.kernels.select import pack, select
from scgpu_tasks.kernels.transform import Transform
from scgpu_tasks.stages import held
from scgpu_tasks.stages.parcels import RowTarget


@dataclass
class Chosen:
    """The chosen genes of the kept cells of a span.

    Attributes
    ----------
    start
        First row of the span.
    keep, factors
        Of the cells of the span: whether it is kept, what the transform multiplies it by.
    position
        int32, shape (genes,): column of each gene in the Gram matrix, or -1.
    n_genes
        Number of columns of the Gram matrix.
    transform
        Applied to each value.
    key
        Run and span, under which rows are held from one visit to the next.
    scratch
        Folder for rows that do not fit into memory.
    n_cells
        Of the whole matrix.
    """

    start: int
    keep: np.ndarray
    factors: np.ndarray
    position: np.ndarray
    n_genes: int
    transform: Transform
    key: held.Key
    scratch: str | None
    n_cells: int

    def of(self, rows: Rows, start: int) -> tuple[Rows, np.ndarray]:
        """Kept rows over the chosen genes, and their factors."""
        part = slice(start - self.start, start - self.start + rows.n_rows)
        keep = self.keep[part]
        return select(rows, keep, self.position, self.n_genes), self.factors[part][keep]


@dataclass
class GramPart:
    """A span's share of the Gram matrix, in the form that `kernels.gram` works in.

    What comes from a GPU is its upper triangle alone, as `kernels.gram.upper` gives it.
    `held` says whether the process that made it holds the span's chosen genes.
    """

    gram: Any
    sums: Any
    held: bool


class SumGram:
    """Gram matrix of the chosen genes over the kept cells of a span.

    Parameters
    ----------
    chosen
        Cells and genes.
    n_dense
        Number of leading columns that are worked on as dense.
    hold
        Whether to hold the chosen genes for `ProjectRows`, if there is room.
    """

    prefer: str | None = None

    def __init__(self, chosen: Chosen, n_dense: int, *, hold: bool) -> None:
        self.chosen = chosen
        self.n_dense = n_dense
        self.hold = hold
        self._packed: list[Rows] = []
        self._part: GramPart | None = None

    def recall(self) -> bool:
        """See `SpanTask`."""
        return False

    def visit(self, rows: Rows, start: int) -> None:
        """See `SpanTask`."""
        if self._part is None:
            self._part = self._zeros(rows.data)
        some, factors = self.chosen.of(rows, start)
        part = self._part
        packed = [pack(some)] if self.hold else []
        gram_add(some, factors, self.chosen.transform, self.n_dense, part.gram, part.sums)
        self._packed += packed

    def result(self) -> GramPart:
        """See `SpanTask`."""
        part = self._part or self._zeros(np.empty(0))
        if self.hold:
            part.held = held.hold(
                self.chosen.key, self._packed, self.chosen.scratch, self.chosen.n_cells
            )
        gram = to_host_quickly(upper(part.gram)) if is_on_gpu(part.gram) else part.gram
        return GramPart(gram, to_host(part.sums), part.held)

    def _zeros(self, like: Any) -> GramPart:
        n = self.chosen.n_genes
        return GramPart(np.zeros((n, n), like=like), np.zeros(n, like=like), held=False)


class ProjectRows:
    """Scores of the kept cells of a span.

    Parameters
    ----------
    chosen
        Cells and genes.
    components
        float64, shape (columns, components), in the order of the Gram matrix.
    offset
        float64, shape (components,): scores of the mean cell.
    prefer
        Address of the worker that holds the chosen genes.
    target
        Where scores may be left, from row `first` on; `result` has them if they are not.
    """

    def __init__(
        self,
        chosen: Chosen,
        components: np.ndarray,
        offset: np.ndarray,
        prefer: str | None,
        target: RowTarget | None,
        first: int,
    ) -> None:
        self.chosen = chosen
        self.components = components
        self.offset = offset
        self.prefer = prefer
        self.target = target
        self.first = first
        self._scores: list[np.ndarray] = []

    def recall(self) -> bool:
        """See `SpanTask`."""
        pieces = held.recall(self.chosen.key, self.chosen.scratch)
        if pieces is None:
            return False
        factors = self.chosen.factors[self.chosen.keep]
        at = 0
        for rows in pieces:
            self._project(rows, factors[at : at + rows.n_rows])
            at += rows.n_rows
        return True

    def visit(self, rows: Rows, start: int) -> None:
        """See `SpanTask`."""
        self._project(*self.chosen.of(rows, start))

    def _project(self, rows: Rows, factors: np.ndarray) -> None:
        shape = (rows.n_rows, len(self.offset))
        scores: Any = np.empty(shape, np.float32, like=rows.data)
        project(rows, factors, self.chosen.transform, self.components, self.offset, scores)
        on_host = to_host_quickly(scores)
        if self.target is not None and self.target.write(self.first, on_host):
            self.first += len(on_host)
        else:
            self._scores.append(on_host)

    def result(self) -> np.ndarray | None:
        """See `SpanTask`."""
        return np.concatenate(self._scores) if self._scores else None

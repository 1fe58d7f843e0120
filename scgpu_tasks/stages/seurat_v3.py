"""Highly variable genes of ``seurat_v3``: one more visit, of counts that are clipped."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from scgpu_tasks.specs import HVGSpec
from scgpu_tasks.stages import hvg
from scgpu_tasks.stages.engine import Engine, Span
from scgpu_tasks.stages.qc_visits import ClipGenes


def choose(
    engine: Engine,
    batches: Mapping[int, hvg.BatchMoments],
    names: pd.Index,
    spec: HVGSpec,
    *,
    passed: np.ndarray,
    groups: np.ndarray,
    n_groups: int,
) -> pd.DataFrame:
    """Choose genes by their variance after clipping, within each batch.

    Parameters
    ----------
    engine
        Runs over the counts.
    batches
        Moments of the genes that passed, by the number of the batch.
    names
        Of the genes that passed.
    spec
        Number of genes, span of the fit.
    passed
        bool, shape (genes,).
    groups
        Shape (cells,): number of each cell's batch; `n_groups` of cells that are left out.
    n_groups
        Number of batches, those without cells included.

    Returns
    -------
    scanpy's columns, for the genes that passed.
    """
    found = [hvg.clip_limits(batch, spec.span) for batch in batches.values()]
    limit = np.full((len(batches), len(passed)), np.inf)
    limit[:, passed] = [clip for clip, _ in found]
    local = np.full(n_groups + 1, -1, np.int32)
    local[list(batches)] = np.arange(len(batches))
    of_cells = local[groups]
    sums = np.zeros((*limit.shape, 2))

    def task(span: Span) -> ClipGenes:
        return ClipGenes(span.start, of_cells[span.start : span.stop], limit)

    def merge(_: Span, part: np.ndarray, __: str | None) -> None:
        sums.__iadd__(part)

    engine.fold(task, merge)
    every = list(batches.values())
    total = hvg.BatchMoments(
        sum(b.n_cells for b in every),
        np.sum([b.sums for b in every], axis=0),
        np.sum([b.squares for b in every], axis=0),
    )
    table = hvg.seurat_v3_table(
        every,
        list(sums[:, passed]),
        [deviation for _, deviation in found],
        total,
        names,
        spec.n_top_genes or 2000,
    )
    return (
        table if spec.batch_key is not None else table.drop(columns="highly_variable_nbatches")
    )

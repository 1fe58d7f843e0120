"""What a report shows of what the stages found, as plain values that can be kept as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from scgpu_tasks.records import words
from scgpu_tasks.records.cells_view import cells_view
from scgpu_tasks.records.pca_view import pca_view

if TYPE_CHECKING:
    import pandas as pd

    from scgpu_tasks.stages.pca import PCAResult
    from scgpu_tasks.stages.qc import QCResult


def report_view(
    obs: pd.DataFrame,
    qc: QCResult,
    pca: PCAResult | None = None,
    *,
    batch_key: str | None = None,
) -> dict[str, Any]:
    """Draw the figures of a report and gather its tables.

    Parameters
    ----------
    obs
        The store's columns, all cells.
    qc, pca
        What the stages returned; without ``pca`` the report is of a run that did not reach it.
    batch_key
        Column to colour cells by first.

    Returns
    -------
    The parts of `scgpu_tasks.records.report.render` that come from the data.
    """
    kept = qc.cells["passed_qc"].to_numpy(dtype=bool)
    shown = None
    if pca is not None:
        chosen = qc.genes["highly_variable"].to_numpy(dtype=bool)
        shown = pca_view(obs, kept, qc.genes.index[chosen], pca, batch_key=batch_key)
    return {
        "tiles": _tiles(qc, pca, kept),
        "notes": _notes(qc, pca),
        "qc": cells_view(qc),
        "pca": shown,
        "snippet": _snippet(pca),
    }


def _tiles(qc: QCResult, pca: PCAResult | None, kept: Any) -> list[dict[str, str]]:
    summary = qc.summary
    tiles = [
        _kept_tile(summary["n_cells_kept"], summary["n_cells"], "cells"),
        _kept_tile(summary["n_genes_kept"], summary["n_genes"], "genes"),
        {"value": words.count(summary["n_hvg"]), "label": "highly variable genes"},
    ]
    if pca is not None:
        ratio = words.percent(float(pca.variance_ratio.sum()))
        label = f"components, {ratio} of variance"
        tiles.append({"value": words.count(pca.X_pca.shape[1]), "label": label})
    for column, label in (("n_genes_by_counts", "genes"), ("total_counts", "counts")):
        middle = float(np.nanmedian(qc.cells[column].to_numpy()[kept]))
        tiles.append(
            {"value": words.count(round(middle)), "label": f"{label} in a median cell"}
        )
    return tiles


def _kept_tile(kept: int, total: int, what: str) -> dict[str, str]:
    label = f"{what} kept of {words.count(total)} ({words.percent(kept, total)})"
    return {"value": words.count(kept), "label": label}


def _notes(qc: QCResult, pca: PCAResult | None) -> list[str]:
    found = [qc.summary] if pca is None else [qc.summary, pca.summary]
    return [str(note) for summary in found for note in summary.get("notes", [])]


def _snippet(pca: PCAResult | None) -> str:
    lines = ["import anndata, scanpy", 'adata = anndata.read_zarr("results.zarr")']
    if pca is not None:
        lines += [
            'scanpy.pp.neighbors(adata, use_rep="X_pca")',
            "scanpy.tl.umap(adata)",
            'scanpy.pl.umap(adata, color="total_counts")',
        ]
    return "\n".join(lines)

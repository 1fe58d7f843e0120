"""What the report shows of the PCA stage: maps of the cells, variance, loadings."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from scgpu_tasks.records import pca_figures, words

if TYPE_CHECKING:
    from scgpu_tasks.stages.pca import PCAResult

COMPONENTS_LISTED = 12
GENES_LISTED = 8
_TYPES = re.compile(r"type|cluster|leiden|louvain|annot", re.IGNORECASE)
_BATCHES = re.compile(r"batch|donor|sample|patient", re.IGNORECASE)


def pca_view(
    obs: pd.DataFrame,
    kept: NDArray[np.bool_],
    hvg_names: pd.Index,
    pca: PCAResult,
    *,
    batch_key: str | None,
) -> dict[str, Any]:
    """Return the figures and tables of the PCA stage for the template.

    Parameters
    ----------
    obs
        The store's columns, all cells.
    kept
        Which of them were kept; those are the rows of ``pca.X_pca``.
    hvg_names
        Names of the highly variable genes, in the order of ``pca.PCs``.
    pca
        What the stage returned.
    batch_key
        Column to colour cells by first.
    """
    share = np.asarray(pca.variance_ratio, dtype=np.float64)
    total = words.percent(float(share.sum()))
    maps = _maps(obs, kept, pca, batch_key)
    columns = {m["colouring"].column for m in maps if m["colouring"] is not None}
    return {
        "maps": [m | {"colouring": _legend(m["colouring"], m["marked"])} for m in maps],
        "has_types": any(_TYPES.search(column) for column in columns),
        "has_batches": any(c == batch_key or _BATCHES.search(c) for c in columns),
        "scree": {
            "svg": pca_figures.scree(share),
            "caption": (
                f"{len(share)} components explain {total} of the variance of "
                f"{words.count(len(hvg_names))} genes."
            ),
        },
        "loadings": _loadings(hvg_names, pca),
    }


def _legend(colouring: pca_figures.Colouring | None, marked: bool) -> dict[str, Any] | None:
    if colouring is None:
        return None
    entries = [asdict(category) for category in colouring.categories]
    for entry in entries:
        # A name that marks itself is not printed twice.
        if not marked or entry["mark"] == entry["name"]:
            entry["mark"] = ""
    return {"categories": entries}


def _maps(
    obs: pd.DataFrame, kept: NDArray[np.bool_], pca: PCAResult, batch_key: str | None
) -> list[dict[str, Any]]:
    n_comps = pca.X_pca.shape[1]
    if n_comps < 2:
        return []
    colourings: list[pca_figures.Colouring | None] = [
        *pca_figures.choose_colourings(obs, kept, batch_key)
    ]
    shown = [(c, (0, 1)) for c in colourings or [None]]
    if n_comps >= 4 and len(shown) < 3:
        # Types tell more of further components than batches do.
        further = sorted(colourings, key=lambda c: not (c and _TYPES.search(c.column)))
        shown += [(c, (2, 3)) for c in (further or [None])[: 3 - len(shown)]]
    n_drawn = min(len(pca.X_pca), pca_figures.POINTS)
    caption = f"{words.count(n_drawn)} of {words.count(len(pca.X_pca))} cells drawn"
    if n_drawn == len(pca.X_pca):
        caption = f"All {words.count(n_drawn)} kept cells"
    maps = []
    for number, (colouring, pair) in enumerate(shown):
        title = f"PC{pair[0] + 1} and PC{pair[1] + 1}"
        if colouring is not None:
            title += f" by {colouring.column}"
        svg, marked = pca_figures.components(
            pca.X_pca, pair, colouring, name=f"map{number}", variance_ratio=pca.variance_ratio
        )
        entry = {"title": title, "svg": svg, "colouring": colouring, "marked": marked}
        maps.append(entry | {"caption": caption})
    return maps


def _loadings(names: pd.Index, pca: PCAResult) -> list[dict[str, Any]]:
    rows = []
    n_genes = min(GENES_LISTED, len(names) // 2 or 1)
    for i in range(min(COMPONENTS_LISTED, pca.PCs.shape[1])):
        order = np.argsort(pca.PCs[:, i], kind="stable")
        rows.append(
            {
                "number": i + 1,
                "share": float(pca.variance_ratio[i]),
                "high": [str(name) for name in names[order[::-1][:n_genes]]],
                "low": [str(name) for name in names[order[:n_genes]]],
            }
        )
    return rows

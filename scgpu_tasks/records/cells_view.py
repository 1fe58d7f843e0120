"""What the report shows of the QC stage: figures, filters, genes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from scgpu_tasks.records import qc_figures, words

if TYPE_CHECKING:
    from scgpu_tasks.stages.qc import QCResult

TOP_GENES = 15
NAMED_VARIABLE_GENES = 40

_RULES = {
    "min_genes": ("Few genes", "at least {} genes"),
    "max_genes": ("Many genes", "at most {} genes"),
    "min_counts": ("Few counts", "at least {} counts"),
    "max_counts": ("Many counts", "at most {} counts"),
    "max_pct_mt": ("Mitochondrial share", "at most {} % of counts"),
    "min_cells": ("Seen in few cells", "in at least {} kept cells"),
}
_METRICS = {
    "log1p_total_counts": "Counts far from the median",
    "log1p_n_genes_by_counts": "Genes far from the median",
    "pct_counts_in_top_20_genes": "Share of the top 20 genes far from the median",
    "pct_counts_mt": "Mitochondrial share far from the median",
}


def cells_view(qc: QCResult) -> dict[str, Any]:
    """Return the figures and tables of the QC stage for the template."""
    histograms, grids = _distributions(qc)
    return {
        "histograms": histograms,
        "grids": grids,
        "filters": filters_view(qc.summary),
        "variable": variable_view(qc.genes),
        "top_genes": _top_genes(qc.genes),
    }


def metrics_view(qc: QCResult) -> list[dict[str, str]]:
    """Return the figures of the cells' metrics: title, svg and caption of each."""
    histograms, grids = _distributions(qc)
    return histograms + grids


def _distributions(qc: QCResult) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    limits = Limits(qc.summary.get("thresholds", {}))
    sets = [name for name, n_genes in qc.summary.get("gene_sets", {}).items() if n_genes]
    return _histograms(qc.cells, limits, sets), _grids(qc.cells, limits, sets)


class Limits:
    """The thresholds that a run used, whether it was given them or took them from the data.

    Parameters
    ----------
    thresholds
        The QC summary's: fixed ones by name, and under ``mad`` a pair for each metric.
    """

    def __init__(self, thresholds: dict[str, Any]) -> None:
        self.fixed = {k: v for k, v in thresholds.items() if k != "mad"}
        mad = thresholds.get("mad") or {}
        # Limits that differ from batch to batch are no single line in a figure.
        self.mad = {k: v for k, v in mad.items() if isinstance(v, list | tuple)}
        self.counts = self._pair("min_counts", "max_counts", "log1p_total_counts")
        self.genes = self._pair("min_genes", "max_genes", "log1p_n_genes_by_counts")
        low, high = self.mad.get("pct_counts_mt", (None, self.fixed.get("max_pct_mt")))
        self.pct_mt = (low if low is not None and low > 0 else None, high)

    def _pair(self, low: str, high: str, metric: str) -> tuple[float | None, float | None]:
        if metric in self.mad:
            a, b = (None if v is None else math.expm1(v) for v in self.mad[metric])
            return a if a is not None and a > 0 else None, b
        return self.fixed.get(low), self.fixed.get(high)

    def rule(self, name: str) -> tuple[str, str]:
        """Return a filter's title and its rule in words."""
        if name in _RULES:
            title, rule = _RULES[name]
            value = self.fixed.get(name)
            return title, rule.format(words.count(value)) if value is not None else "set"
        metric = name.removeprefix("mad_")
        title = _METRICS.get(metric, name)
        if metric not in self.mad:
            return title, "by median absolute deviations"
        bounds: tuple[float | None, float | None] = tuple(self.mad[metric])
        unit = " %" if metric.startswith("pct") else ""
        if metric == "log1p_total_counts":
            bounds = self.counts
        elif metric == "log1p_n_genes_by_counts":
            bounds = self.genes
        low, high = _bound_words(bounds, whole="genes" in metric and "pct" not in metric)
        if low is None or bounds[0] is None or bounds[0] <= 0:
            return title, f"at most {high}{unit}"
        return title, f"{low} to {high}{unit}"


def _middle(values: pd.Series, kept: pd.Series, *, whole: bool) -> str:
    middle = values[kept.to_numpy(dtype=bool)].median()
    if not np.isfinite(middle):
        return "–"
    return words.count(round(middle) if whole else float(f"{middle:.4g}"))


def _bound_words(bounds: qc_figures.Bounds, *, whole: bool) -> tuple[str | None, str | None]:
    """Thresholds in words; ``whole``: of whole numbers, which pass at or within them."""
    low, high = bounds
    if whole:
        low = None if low is None else math.ceil(low)
        high = None if high is None or math.isinf(high) else math.floor(high)
    texts = [
        None if b is None else words.count(b if whole else float(f"{b:.4g}"))
        for b in (low, high)
    ]
    return texts[0], texts[1]


def _outside(bound: float | None, values: pd.Series, *, log: bool) -> str:
    hidden = bound is not None and qc_figures.is_outside(bound, values.to_numpy(), log=log)
    return " (which is outside the plot)" if hidden else ""


def _kept_range(low: str | None, high: str | None) -> str:
    if low and high:
        return f"Threshold: {low} to {high}. "
    if low:
        return f"Threshold: at least {low}. "
    return f"Threshold: at most {high}. " if high else ""


def _histograms(cells: pd.DataFrame, limits: Limits, sets: list[str]) -> list[dict[str, str]]:
    kept = cells["passed_qc"].to_numpy(dtype=bool)
    shown: list[tuple[str, str, str, qc_figures.Bounds, bool]] = [
        ("n_genes_by_counts", "Genes per cell", "genes found", limits.genes, True),
        ("total_counts", "Counts per cell", "total counts", limits.counts, True),
    ]
    for name in sets:
        title = "Mitochondrial share" if name == "mt" else f"Share of {name}"
        bounds = limits.pct_mt if name == "mt" else (None, None)
        shown.append((f"pct_counts_{name}", title, "% of counts", bounds, False))
    figures = []
    for number, (column, title, label, bounds, log) in enumerate(shown):
        values = cells[column]
        if not np.isfinite(values.to_numpy(dtype=np.float64)).any():
            continue
        svg = qc_figures.histogram(
            values.to_numpy(), kept, name=f"hist{number}", label=label, bounds=bounds, log=log
        )
        unit = " %" if label.startswith("%") else ""
        whole = column == "n_genes_by_counts"
        middle = _middle(values, cells["passed_qc"], whole=whole)
        low, high = (
            text and text + unit + _outside(bound, values, log=log)
            for text, bound in zip(_bound_words(bounds, whole=whole), bounds, strict=True)
        )
        caption = f"{_kept_range(low, high)}Median of the kept cells: {middle}{unit}."
        figures.append({"title": title, "svg": svg, "caption": caption})
    return figures


def _grids(cells: pd.DataFrame, limits: Limits, sets: list[str]) -> list[dict[str, str]]:
    some = (cells["total_counts"] > 0) & (cells["n_genes_by_counts"] > 0)
    if not some.any():
        return []
    empty = int((~some).sum())
    left_out = f" {words.count(empty)} cells without counts are not shown." if empty else ""
    grid = qc_figures.CellGrid(cells, counts=limits.counts, genes=limits.genes)
    figures = [
        {
            "title": "Counts against genes",
            "svg": grid.density(),
            "caption": f"All cells, both axes logarithmic.{left_out}",
        }
    ]
    if "mt" in sets:
        svg = grid.percentage("pct_counts_mt")
        caption = "The same cells; colour is the mean mitochondrial share of a bin."
        figures.append({"title": "Where damaged cells lie", "svg": svg, "caption": caption})
    return figures


def filters_view(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what each filter of cells and of genes asked for and removed."""
    limits = Limits(summary.get("thresholds", {}))
    tables = []
    for what, title in (("cells", "Cells"), ("genes", "Genes")):
        total, kept = summary[f"n_{what}"], summary[f"n_{what}_kept"]
        rows = []
        for name, lost in summary.get("lost", {}).get(what, {}).items():
            heading, rule = limits.rule(name)
            if name.endswith("_mt") and not summary.get("gene_sets", {}).get("mt"):
                rule = "not applied: no mitochondrial gene was found"
            width = _width(lost, total)
            rows.append({"name": heading, "rule": rule, "lost": lost, "width": width})
        tables.append(
            {
                "title": title,
                "total": total,
                "kept": kept,
                "kept_width": _width(kept, total),
                "rows": rows,
            }
        )
    return tables


def _width(part: float, whole: float) -> str:
    return f"{100 * part / whole:.2f}" if whole and part > 0 else "0"


def variable_view(genes: pd.DataFrame) -> dict[str, Any] | None:
    """Return figure, caption and names of the highly variable genes, if there are any."""
    kept = genes[genes["passed_qc"].to_numpy(dtype=bool)]
    if "highly_variable" not in kept or not kept["highly_variable"].any():
        return None
    svg = qc_figures.variable_genes(kept)
    if svg is None:
        return None
    chosen = kept[kept["highly_variable"].to_numpy(dtype=bool)]
    by = next(c for c in ("dispersions_norm", "variances_norm") if c in chosen)
    names = chosen[by].nlargest(NAMED_VARIABLE_GENES).index
    caption = (
        f"The {words.count(len(chosen))} of {words.count(len(kept))} kept genes that vary most "
        "between cells, among genes of like mean; the components are made from them."
    )
    if len(chosen) == len(kept):
        caption = (
            f"All {words.count(len(kept))} kept genes were chosen, as no more were asked for: "
            "the components are made from every one, also those that vary little."
        )
    return {"svg": svg, "caption": caption, "names": [str(name) for name in names]}


def _top_genes(genes: pd.DataFrame) -> list[dict[str, Any]]:
    totals = genes["total_counts"]
    whole = float(totals.sum())
    if not whole > 0:
        return []
    top = totals.nlargest(TOP_GENES)
    most = float(top.iloc[0])
    return [
        {"name": str(name), "share": value / whole, "width": _width(value, most)}
        for name, value in top.items()
    ]

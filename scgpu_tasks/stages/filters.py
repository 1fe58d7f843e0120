"""Which cells pass: fixed thresholds, or distances from the median."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from scgpu_tasks.specs import QCSpec

# The rule of the single-cell best practices: metric, number of median absolute deviations.
MAD_RULES: tuple[tuple[str, float], ...] = (
    ("log1p_total_counts", 5.0),
    ("log1p_n_genes_by_counts", 5.0),
    ("pct_counts_in_top_20_genes", 5.0),
    ("pct_counts_mt", 3.0),
)
MAD_MAX_PCT_MT = 8.0
MAD_TOP = 20

Metrics = Mapping[str, np.ndarray]


def fixed_failures(spec: QCSpec, metrics: Metrics) -> dict[str, np.ndarray]:
    """Cells that each fixed threshold removes.

    Parameters
    ----------
    spec
        Thresholds; inclusive.
    metrics
        ``n_genes_by_counts``, ``total_counts`` and, if known, ``pct_counts_mt``, each of shape
        (cells,). A percentage that is NaN removes no cell.

    Returns
    -------
    One mask of shape (cells,) for each threshold that is set.
    """
    n_genes, total = metrics["n_genes_by_counts"], metrics["total_counts"]
    failures: dict[str, np.ndarray] = {}
    if spec.min_genes is not None:
        failures["min_genes"] = n_genes < spec.min_genes
    if spec.max_genes is not None:
        failures["max_genes"] = n_genes > spec.max_genes
    if spec.min_counts is not None:
        failures["min_counts"] = total < spec.min_counts
    if spec.max_counts is not None:
        failures["max_counts"] = total > spec.max_counts
    if spec.max_pct_mt is not None and "pct_counts_mt" in metrics:
        failures["max_pct_mt"] = metrics["pct_counts_mt"] > spec.max_pct_mt
    return failures


def mad_failures(
    metrics: Metrics, groups: np.ndarray | None = None
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Cells far from the median of their group.

    Parameters
    ----------
    metrics
        The metrics of `MAD_RULES`, each of shape (cells,); those that are missing are skipped.
    groups
        int, shape (cells,): group of each cell, with medians of its own. Default: one group.

    Returns
    -------
    failures
        One mask of shape (cells,) for each metric, under ``mad_<metric>``.
    limits
        Lower and upper limit of each metric, by group number where there are several.
    """
    failures: dict[str, np.ndarray] = {}
    limits: dict[str, Any] = {}
    n_cells = len(metrics["total_counts"])
    codes = np.zeros(n_cells, np.int64) if groups is None else groups
    for metric, n_mads in MAD_RULES:
        if metric not in metrics:
            continue
        values = metrics[metric]
        failed = np.zeros(n_cells, bool)
        by_group: dict[str, list[float]] = {}
        for code in np.unique(codes):
            chosen = codes == code
            low, high = _limits(values[chosen], n_mads)
            if metric == "pct_counts_mt":
                high = min(high, MAD_MAX_PCT_MT)
            failed[chosen] = (values[chosen] < low) | (values[chosen] > high)
            by_group[str(code)] = [low, high]
        failures[f"mad_{metric}"] = failed
        limits[metric] = by_group["0"] if groups is None and by_group else by_group
    return failures, limits


def _limits(values: np.ndarray, n_mads: float) -> tuple[float, float]:
    known = values[~np.isnan(values)]
    if not len(known):
        return -np.inf, np.inf
    middle = float(np.median(known))
    reach = n_mads * float(np.median(np.abs(known - middle)))
    return middle - reach, middle + reach

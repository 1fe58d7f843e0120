"""scanpy's metric columns from exact sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from scgpu_tasks.stages.qc_visits import CellPart, percentage
from scgpu_tasks.stages.rowwise import by_rows


def cell_metrics(
    part: CellPart, set_names: Sequence[str], tops: Sequence[int]
) -> dict[str, np.ndarray]:
    """Columns of obs that scanpy's ``calculate_qc_metrics`` writes, in its order."""
    total = part.total
    n_cells = len(total)
    columns: dict[str, np.ndarray] = {}
    # What fills the columns that are made here, for some rows.
    steps: list[Callable[[slice], object]] = []

    def add(name: str, fill: Callable[[slice, np.ndarray], object]) -> None:
        column = columns[name] = np.empty(n_cells)
        steps.append(lambda rows: fill(rows, column[rows]))

    def add_with_log1p(name: str, values: np.ndarray) -> None:
        columns[name] = values
        add(f"log1p_{name}", lambda rows, out: _log1p(values[rows], out))

    add_with_log1p("n_genes_by_counts", part.n_genes)
    add_with_log1p("total_counts", total)
    for i, top in enumerate(tops):
        of_top = part.top_totals[:, i]
        add(f"pct_counts_in_top_{top}_genes", partial(_percentage, of_top, total))
    for i, name in enumerate(set_names):
        of_set = np.ascontiguousarray(part.set_totals[:, i])
        add_with_log1p(f"total_counts_{name}", of_set)
        add(f"pct_counts_{name}", partial(_percentage, of_set, total))
    by_rows(lambda rows: [step(rows) for step in steps], n_cells)
    return columns


def _percentage(part: np.ndarray, total: np.ndarray, rows: slice, out: np.ndarray) -> None:
    out[:] = percentage(part[rows], total[rows])


def cells(metrics: Mapping[str, np.ndarray], keep: np.ndarray, names: pd.Index) -> pd.DataFrame:
    """Table of all cells."""
    return pd.DataFrame({**metrics, "passed_qc": keep}, index=names, copy=False)


def genes(n_cells: np.ndarray, total: np.ndarray, n_obs: int, names: pd.Index) -> pd.DataFrame:
    """Columns of var that scanpy's ``calculate_qc_metrics`` writes, in its order."""
    mean = total / n_obs
    columns = {
        "n_cells_by_counts": n_cells,
        "mean_counts": mean,
        "log1p_mean_counts": _log1p(mean),
        "pct_dropout_by_counts": (1 - n_cells / n_obs) * 100,
        "total_counts": total,
        "log1p_total_counts": _log1p(total),
    }
    return pd.DataFrame(columns, index=names)


def with_variable(
    table: pd.DataFrame, variable: pd.DataFrame, passed: np.ndarray
) -> pd.DataFrame:
    """All genes, with the HVG columns of those that passed; NaN or False for the others."""
    for name in variable.columns:
        values = variable[name].to_numpy()
        empty: Any = {"b": False, "i": 0}.get(values.dtype.kind, np.nan)
        column = np.full(len(table), empty, values.dtype)
        column[passed] = values
        table[name] = column
    return table


def name_apart(table: pd.DataFrame) -> pd.DataFrame:
    """Rename the index where a column has its name, which anndata and Parquet refuse."""
    name: Any = table.index.name
    if name is None or name not in table.columns:
        return table
    while name in table.columns:
        name = f"{name}_index"
    return table.rename_axis(index=name)


def json_numbers(value: Any) -> Any:
    """Turn numbers into types that JSON has; infinite limits become None."""
    if isinstance(value, Mapping):
        return {str(key): json_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_numbers(item) for item in value]
    if isinstance(value, float | np.floating):
        return float(value) if np.isfinite(value) else None
    return int(value) if isinstance(value, np.integer) else value


def _log1p(values: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    # Values that are not counts may lie below -1.
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.log1p(values, out=out))

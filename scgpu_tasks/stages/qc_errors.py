"""What QC says when X does not hold counts, or when nothing passes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from scgpu_tasks.errors import DataError, ParameterError
from scgpu_tasks.kernels.qc import WHOLE_TOLERANCE
from scgpu_tasks.stages.qc_visits import Problem

_NEARLY_WHOLE = 0.01


def not_counts(problem: Problem | None, obs: pd.DataFrame, var: pd.DataFrame) -> DataError:
    """Name the first cell and gene whose value is not a count."""
    if problem is None:
        return DataError("a block came back without metrics")
    where = (
        f"cell {str(obs.index[problem.cell])!r} (row {problem.cell}), "
        f"gene {str(var.index[problem.gene])!r}"
    )
    if problem.kind == "invalid":
        return DataError(
            f"X holds {problem.value} at {where}; counts are 0 or more. Point to raw counts, "
            "such as a layer, or pass expect_counts=False if X is not meant to hold counts"
        )
    off = abs(problem.value - round(problem.value))
    return DataError(
        f"X holds {problem.value} at {where}, not a whole number: {fraction_words(off)}. Point "
        "to raw counts, such as layer='counts', or pass expect_counts=False if fractions are "
        "meant (corrected counts)"
    )


def fraction_words(off: float) -> str:
    """Say what values are likely to be that lie up to this far off whole numbers."""
    if off < _NEARLY_WHOLE:
        return (
            f"it is nearly whole, off by more than the {WHOLE_TOLERANCE:g} that rounding "
            "explains; round X if these are counts"
        )
    return "it looks normalised or log-transformed"


def nothing_passes(
    failures: Mapping[str, np.ndarray], metrics: Mapping[str, np.ndarray]
) -> ParameterError:
    """Say how many cells each filter removes, and what the median cell has."""
    lost = ", ".join(f"{name} removes {int(mask.sum())}" for name, mask in failures.items())
    n_genes, total = metrics["n_genes_by_counts"], metrics["total_counts"]
    return ParameterError(
        f"no cell of {len(total)} passes the filters ({lost}). The median cell has "
        f"{np.median(n_genes):g} genes and {np.median(total):g} counts: relax the thresholds"
    )

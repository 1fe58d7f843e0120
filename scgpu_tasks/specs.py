"""Parameters of each stage, as frozen values whose digest keys the cache.

A spec holds what changes a stage's numbers and nothing else: no paths, no worker counts, no
block sizes. Two runs with equal specs on equal stores have equal results.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from scgpu_tasks.errors import ParameterError

HVGFlavor = Literal["seurat", "cell_ranger", "seurat_v3"]
HVG_FLAVORS: tuple[str, ...] = ("seurat", "cell_ranger", "seurat_v3")
TARGET_SUMS = (1e-6, 1e12)
"""Least and greatest; squares of values far beyond them overflow, or vanish."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """Base of all specs."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not math.isfinite(value):
                msg = f"{field.name} must be a finite number, or None for no limit, not {value}"
                raise ParameterError(msg)

    def digest(self) -> str:
        """Hex SHA-256 of the kind of spec and its values; equal across processes."""
        text = json.dumps([type(self).__name__, asdict(self)], sort_keys=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Field names and values, JSON-serialisable."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True, kw_only=True)
class QCSpec(Spec):
    """Which QC metrics, and which cells and genes pass.

    Thresholds are inclusive. ``None`` switches a filter off.

    Parameters
    ----------
    layer
        Layer that holds the counts; None: X.
    qc_vars
        Gene sets to report on: ``"mt"``, ``"ribo"``, ``"hb"``, or boolean columns of var.
    percent_top
        Report the percentage of a cell's counts in this many highest genes.
    min_genes, max_genes
        Number of genes with counts in a cell.
    min_counts, max_counts
        Total counts of a cell.
    max_pct_mt
        Greatest percentage, 0 to 100, of mitochondrial counts of a cell.
    min_cells
        Least number of kept cells that have a gene.
    mad
        Remove cells by median absolute deviations; the fixed thresholds of cells above are then
        not used.
    expect_counts
        Refuse values that are not whole numbers (log-normalised input, most likely).
    """

    layer: str | None = None
    qc_vars: tuple[str, ...] = ("mt",)
    percent_top: tuple[int, ...] = ()
    min_genes: int | None = 200
    max_genes: int | None = None
    min_counts: float | None = None
    max_counts: float | None = None
    max_pct_mt: float | None = 20.0
    min_cells: int | None = 3
    mad: bool = False
    expect_counts: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layer is not None and set(self.layer.split("/")) & {"", ".", ".."}:
            msg = f"layer names one of the store's layers, which {self.layer!r} cannot be"
            raise ParameterError(msg)
        for name in ("min_genes", "max_genes", "min_counts", "max_counts", "min_cells"):
            value = getattr(self, name)
            if value is not None and value < 0:
                msg = f"{name} must be at least 0, not {value}"
                raise ParameterError(msg)
        if self.max_pct_mt is not None and not 0 <= self.max_pct_mt <= 100:
            msg = f"max_pct_mt is a percentage, 0 to 100, not {self.max_pct_mt}"
            raise ParameterError(msg)
        for low, high in (("min_genes", "max_genes"), ("min_counts", "max_counts")):
            a, b = getattr(self, low), getattr(self, high)
            if a is not None and b is not None and a > b:
                msg = f"{low}={a} is above {high}={b}: no cell can pass"
                raise ParameterError(msg)
        if any(n < 1 for n in self.percent_top):
            msg = f"percent_top holds numbers of genes, 1 or more, not {self.percent_top}"
            raise ParameterError(msg)


@dataclass(frozen=True, kw_only=True)
class HVGSpec(Spec):
    """Normalisation and the choice of highly variable genes; scanpy's names and defaults.

    Parameters
    ----------
    target_sum
        Counts per cell after normalisation, 1e-6 to 1e12; None: the median over the kept
        cells.
    flavor
        ``seurat``, ``cell_ranger`` or ``seurat_v3``.
    n_top_genes
        Number of genes; None: choose by the means and dispersions below instead.
    batch_key
        Column of obs: choose within each batch, then combine.
    min_mean, max_mean, min_disp, max_disp
        Cutoffs of means and of normalised dispersions, in force if `n_top_genes` is None.
    n_bins
        Number of bins of mean expression, flavour ``seurat``.
    span
        Of the loess regression of ``seurat_v3``.
    """

    target_sum: float | None = 1e4
    flavor: HVGFlavor = "seurat"
    n_top_genes: int | None = 2000
    batch_key: str | None = None
    min_mean: float = 0.0125
    max_mean: float = 3.0
    min_disp: float = 0.5
    max_disp: float | None = None
    n_bins: int = 20
    span: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.flavor not in HVG_FLAVORS:
            msg = f"hvg flavor {self.flavor!r} is not one of {', '.join(HVG_FLAVORS)}"
            raise ParameterError(msg)
        low, high = TARGET_SUMS
        if self.target_sum is not None and not low <= self.target_sum <= high:
            msg = (
                f"target_sum is the counts of a cell after normalisation, {low:g} to {high:g}, "
                f"not {self.target_sum}; 10000 is usual"
            )
            raise ParameterError(msg)
        if self.n_top_genes is not None and self.n_top_genes < 1:
            msg = f"n_top_genes must be at least 1, not {self.n_top_genes}"
            raise ParameterError(msg)
        if self.n_bins < 2:
            msg = f"n_bins must be at least 2, not {self.n_bins}"
            raise ParameterError(msg)


@dataclass(frozen=True, kw_only=True)
class PCASpec(Spec):
    """Principal components of the highly variable genes.

    Parameters
    ----------
    n_comps
        Number of components.
    zero_center
        Centre the genes; if not, the components are those of a truncated SVD.
    """

    n_comps: int = 50
    zero_center: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_comps < 1:
            msg = f"n_comps must be at least 1, not {self.n_comps}"
            raise ParameterError(msg)

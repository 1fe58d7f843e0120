"""Figures of the QC stage: what the cells and genes look like and where the filters cut."""

from __future__ import annotations

from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.colors import ListedColormap, LogNorm, Normalize
from numpy.typing import NDArray

from scgpu_tasks.records import draw, words

BINS = 60
GRID_BINS = 110
# With fewer cells, smaller bins would only show single cells.
CELLS_FOR_FULL_GRID = 50_000
Bounds = tuple[float | None, float | None]


def histogram(
    values: NDArray[Any],
    kept: NDArray[np.bool_],
    *,
    name: str,
    label: str,
    bounds: Bounds = (None, None),
    log: bool = False,
) -> str:
    """Draw the distribution of a metric, kept cells on removed ones, thresholds dashed.

    Parameters
    ----------
    values
        One number per cell; NaN is left out.
    kept
        Whether the cell passed all filters.
    name
        Unique in the page.
    label
        Axis label; text of ours.
    bounds
        Lower and upper threshold, either may be missing.
    log
        Bins of equal width in log10(1 + value).
    """
    values = np.asarray(values, dtype=np.float64)
    finite = np.isfinite(values)
    if not finite.all():
        values, kept = values[finite], kept[finite]
    scale = np.log10(values + 1) if log else values
    low, high = _axis(scale)
    cuts = [float(b) for b in bounds if b is not None and np.isfinite(b)]
    shown = [float(np.log10(b + 1)) if log else b for b in cuts]
    shown = [mark for mark in shown if low <= mark <= high]
    bins = draw.Bins(scale, low, high, BINS)
    edges, all_cells, kept_cells = bins.edges, bins.count(), bins.count(kept)
    # Three stand side by side: drawn smaller, their text stays as large as other text.
    with draw.panel(3.2, 2.4) as (figure, ax):
        ax.stairs(all_cells, edges, fill=True, color=draw.REMOVED, label="removed")
        ax.stairs(kept_cells, edges, fill=True, color=draw.KEPT, label="kept")
        draw.threshold_lines(ax, shown)
        ax.set(xlabel=label, ylabel="cells", xlim=(low, high))
        ax.set_ylim(0, max(1, int(all_cells.max())) * 1.08)
        ax.grid(visible=False, axis="x")
        if log:
            _one_plus_ticks(ax, low, high)
        else:
            draw.number_axis(ax.xaxis)
        draw.number_axis(ax.yaxis)
        text = f"Histogram of {label}; {words.count(len(values))} cells"
        return draw.to_svg(figure, name, text)


def is_outside(bound: float, values: NDArray[Any], *, log: bool) -> bool:
    """Whether a threshold lies outside the axis of the values' `histogram`."""
    values = np.asarray(values, dtype=np.float64)
    values = values[np.isfinite(values)]
    low, high = _axis(np.log10(values + 1) if log else values)
    return not low <= (np.log10(bound + 1) if log else bound) <= high


def _axis(scale: NDArray[np.float64]) -> tuple[float, float]:
    low, high = draw.span(scale, pad=0.02)
    return (0.0 if low < 0 <= scale.min(initial=0) else low), high


def _one_plus_ticks(ax: Any, low: float, high: float) -> None:
    top = 10**high
    ticks = [0.0] if low <= 0 else []
    for steps in ((1,), (1, 3), (1, 2, 5), range(1, 10)):
        new = [s * 10.0**d for d in range(12) for s in steps if low < np.log10(s * 10**d + 1)]
        new = [t for t in new if t <= top]
        if len(new) >= 3:
            break
    positions = ticks + new
    if len(positions) > 7:
        positions = positions[:1] + positions[2::2] if positions[0] == 0 else positions[::2]
    ax.xaxis.set_ticks(np.log10(np.array(positions) + 1))
    ax.xaxis.set_ticklabels([words.short(t) for t in positions])


class CellGrid:
    """Where the cells lie by total counts and genes found, both axes logarithmic.

    Parameters
    ----------
    cells
        Metrics; empty cells have no place on such axes, and the table of filters counts them.
    counts, genes
        Thresholds of either axis.
    """

    def __init__(
        self,
        cells: pd.DataFrame,
        *,
        counts: Bounds = (None, None),
        genes: Bounds = (None, None),
    ) -> None:
        self._cells = cells
        self._bounds = (counts, genes)
        self._some = _has_counts(cells)
        x, y = (self._logarithm(name) for name in ("total_counts", "n_genes_by_counts"))
        self._limits = (*draw.span(x), *draw.span(y))
        bins = GRID_BINS if len(x) >= CELLS_FOR_FULL_GRID else GRID_BINS * 3 // 4
        self._grid = draw.Grid(
            draw.Bins(x, *self._limits[:2], bins), draw.Bins(y, *self._limits[2:], bins)
        )

    def density(self) -> str:
        """Draw how many cells lie where."""
        image = self._grid.counts()
        top = max(float(np.nanmax(image)), 2.0) if np.isfinite(image).any() else 2.0
        return _grid_figure(
            image,
            LogNorm(1, top),
            self._limits,
            name="counts-genes",
            bar="cells per bin",
            bounds=self._bounds,
            description="Density of cells by total counts and number of genes",
        )

    def percentage(self, column: str) -> str:
        """Draw the mean of a percentage, which is known of exactly the cells with counts."""
        image = self._grid.means(self._chosen(column))
        top = float(np.nanmax(image)) if np.isfinite(image).any() else 1.0
        return _grid_figure(
            image,
            Normalize(0, max(top, 1e-9)),
            self._limits,
            name="percentage-grid",
            bar="mean % of counts",
            bounds=self._bounds,
            description="Mean percentage by total counts and number of genes",
        )

    def _chosen(self, column: str) -> NDArray[np.float64]:
        values = self._cells[column].to_numpy(dtype=np.float64)
        return values if self._some.all() else values[self._some]

    def _logarithm(self, column: str) -> NDArray[np.float64]:
        return np.log10(self._chosen(column))


def _has_counts(cells: pd.DataFrame) -> NDArray[np.bool_]:
    found = (cells["total_counts"] > 0) & (cells["n_genes_by_counts"] > 0)
    return found.to_numpy(dtype=bool)


def _powers(bounds: Bounds) -> list[float]:
    return [float(np.log10(b)) for b in bounds if b is not None and 0 < b < np.inf]


def _grid_figure(
    image: NDArray[np.float64],
    norm: Normalize,
    limits: tuple[float, float, float, float],
    *,
    name: str,
    bar: str,
    bounds: tuple[Bounds, Bounds],
    description: str,
) -> str:
    # Without the ends, which a dark or a white page would swallow.
    middle = matplotlib.colormaps["viridis"](np.linspace(0.12, 0.97, 256))
    colours = ListedColormap(middle)
    with draw.panel(height=3.3) as (figure, ax):
        shown = ax.imshow(
            np.ma.masked_invalid(image),
            origin="lower",
            extent=limits,
            aspect="auto",
            interpolation="none",
            cmap=colours,
            norm=norm,
        )
        draw.threshold_lines(ax, _powers(bounds[0]))
        draw.threshold_lines(ax, _powers(bounds[1]), horizontal=True)
        ax.set(xlim=limits[:2], ylim=limits[2:])
        draw.number_axis(ax.xaxis, power=True)
        draw.number_axis(ax.yaxis, power=True)
        ax.set(xlabel="total counts", ylabel="genes found")
        scale = figure.colorbar(shown, ax=ax, label=bar, pad=0.02, aspect=28)
        scale.outline.set_visible(False)
        scale.ax.minorticks_off()
        scale.ax.yaxis.set_major_formatter(lambda v, _: words.short(v))
        return draw.to_svg(figure, name, description)


def variable_genes(genes: pd.DataFrame) -> str | None:
    """Draw mean against dispersion of the kept genes, the chosen ones in colour."""
    found = next((c for c in ("dispersions_norm", "variances_norm") if c in genes), None)
    if found is None or "means" not in genes:
        return None
    x = genes["means"].to_numpy(dtype=np.float64)
    y = genes[found].to_numpy(dtype=np.float64)
    chosen = genes["highly_variable"].to_numpy(dtype=bool)
    shown = np.isfinite(x) & np.isfinite(y)
    # seurat_v3 has means of counts, over several decades; the others', of logarithms.
    log = found == "variances_norm"
    if log:
        shown &= x > 0
        x = np.log10(np.where(x > 0, x, 1))
    label = (
        "dispersion, normalised" if found == "dispersions_norm" else "variance, standardised"
    )
    with draw.panel(height=3.3) as (figure, ax):
        for rows, colour, text in (
            (shown & ~chosen, draw.OTHER, "other genes"),
            (shown & chosen, draw.CATEGORICAL[0], "highly variable"),
        ):
            ax.scatter(
                x[rows], y[rows], s=5, c=colour, linewidths=0, alpha=0.75, rasterized=True,
                label=f"{text} ({words.count(int(rows.sum()))})",
            )  # fmt: skip
        draw.number_axis(ax.xaxis, power=log)
        draw.number_axis(ax.yaxis)
        ax.set(xlabel="mean counts" if log else "mean expression (log)", ylabel=label)
        figure.legend(loc="outside upper left", ncols=2, markerscale=2.5, handletextpad=0.2)
        return draw.to_svg(figure, "variable-genes", "Genes by mean and dispersion")

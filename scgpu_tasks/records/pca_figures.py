"""Figures of the PCA stage: how much each component explains, and where the cells lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.colors import to_rgba_array
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from scgpu_tasks.records import draw, words

POINTS = 40_000
SHOWN_CATEGORIES = 16
LABEL_DISTANCE = 0.07
SHORT = 3
_OTHERS = "other categories"


@dataclass(frozen=True)
class Category:
    """One entry of a legend that stands beside its figure as text.

    Attributes
    ----------
    mark
        What stands for it in the figure; empty for "other".
    name, colour, cells
        Its name, colour and number of kept cells.
    """

    mark: str
    name: str
    colour: str
    cells: int


@dataclass(frozen=True)
class Colouring:
    """Categories of an obs column, and the cells' codes in that order.

    They are in the column's own order; where there are too many, the most frequent.
    """

    column: str
    categories: list[Category]
    codes: NDArray[np.int64]
    """One per kept cell, -1 where there is no value, which is the last category then."""


def scree(variance_ratio: NDArray[Any]) -> str:
    """Draw the share of variance of each component and the running total."""
    share = 100 * np.asarray(variance_ratio, dtype=np.float64)
    number = np.arange(1, len(share) + 1)
    with draw.panel() as (figure, ax):
        ax.bar(number, share, color=draw.KEPT, width=0.75, label="each")
        ax.set(xlabel="component", ylabel="% of variance", xlim=(0.2, len(share) + 0.8))
        ax.set_ylim(0, max(float(share.max(initial=0)) * 1.08, 1e-9))
        ax.grid(visible=False, axis="x")
        draw.number_axis(ax.yaxis)
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        total = ax.twinx()
        total.plot(number, np.cumsum(share), color=draw.REMOVED, linewidth=1.8, label="total")
        total.set(ylabel="% in total")
        total.set_ylim(0, max(float(share.sum()) * 1.08, 1e-9))
        total.spines["right"].set_visible(True)
        total.grid(visible=False)
        draw.number_axis(total.yaxis)
        figure.legend(loc="outside upper left", ncols=2, handlelength=1.2)
        return draw.to_svg(figure, "scree", "Variance explained by each component")


def choose_colourings(
    obs: pd.DataFrame,
    kept: NDArray[np.bool_],
    first: str | None = None,
    limit: int = 3,
) -> list[Colouring]:
    """Pick the obs columns worth colouring cells by.

    Parameters
    ----------
    obs
        All cells.
    kept
        Which of them were kept.
    first
        A column to begin with, such as the batch key.
    limit
        How many at most.

    Returns
    -------
    Categorical, string or boolean columns of 2 or more categories, those with few enough to
    tell apart first, in obs's order.
    """
    names = [first] if first in obs else []
    names += [c for c in obs.columns if c != first and c != "passed_qc"]
    candidates: list[tuple[bool, int, Colouring]] = []
    for place, column in enumerate(names):
        colouring = _colouring(obs[column], kept, str(column), wanted=column == first)
        if colouring is not None:
            many = any(c.name.endswith(_OTHERS) for c in colouring.categories)
            many = many and column != first
            candidates.append((many, place, colouring))
    candidates.sort(key=lambda item: item[:2])
    return [colouring for _, _, colouring in candidates[:limit]]


def _colouring(
    values: pd.Series, kept: NDArray[np.bool_], column: str, *, wanted: bool
) -> Colouring | None:
    categorical = isinstance(values.dtype, pd.CategoricalDtype)
    plain = pd.api.types.is_bool_dtype(values) or pd.api.types.is_string_dtype(values)
    if not categorical:
        # A name for every cell is no category; a look at some rows spares 11M of them.
        sampled = values.iloc[: 10 * POINTS]
        if not wanted and (not plain or sampled.nunique() > min(200, len(values) // 2)):
            return None
        values = values.astype("category")
    codes = values.cat.codes.to_numpy()[kept].astype(np.int64)
    cells = np.bincount(codes[codes >= 0], minlength=len(values.cat.categories))
    order = np.argsort(-cells, kind="stable")
    order = order[cells[order] > 0]
    if len(order) < 2 or len(order) > max(2, len(codes) // 3):
        return None
    n_shown = len(order) if len(order) <= SHOWN_CATEGORIES else SHOWN_CATEGORIES - 1
    names = [str(name) for name in values.cat.categories]
    chosen = np.sort(order[:n_shown])
    marks = _marks([names[code] for code in chosen])
    categories = [
        Category(mark, names[code], draw.CATEGORICAL[i], int(cells[code]))
        for i, (mark, code) in enumerate(zip(marks, chosen, strict=True))
    ]
    place = np.full(len(names) + 1, -1, dtype=np.int64)
    place[chosen] = np.arange(n_shown)
    if len(order) > n_shown:
        rest = order[n_shown:]
        place[rest] = n_shown
        text = f"{len(rest)} {_OTHERS}"
        categories.append(Category("", text, draw.OTHER, int(cells[rest].sum())))
    missing = int((codes < 0).sum())
    if missing:
        # Drawn in the same grey, which stands for no category either.
        categories.append(Category("", "no value", draw.OTHER, missing))
    return Colouring(column, categories, place[codes])


def _marks(names: list[str]) -> list[str]:
    """Return what stands for each name in a figure: itself, a number, or a letter.

    A number beside names such as "cluster 3" would be read as one of them.
    """
    if all(len(name) <= SHORT and name.isascii() and name.isalnum() for name in names):
        return names
    if any(character.isdigit() for name in names for character in name):
        return [chr(ord("A") + i) for i in range(len(names))]
    return [str(i + 1) for i in range(len(names))]


def components(
    X_pca: NDArray[Any],
    pair: tuple[int, int],
    colouring: Colouring | None,
    *,
    name: str,
    variance_ratio: NDArray[Any] | None = None,
) -> tuple[str, bool]:
    """Draw the cells along two components, coloured by category.

    Parameters
    ----------
    X_pca
        Kept cells × components. At most 40,000 cells are drawn, the same ones every time.
    pair
        Numbers of the components, from 0.
    colouring
        None: one colour.
    name
        Unique in the page.
    variance_ratio
        Share of each component, for the names of the axes.

    Returns
    -------
    The figure, and whether the categories' marks stand in it: only where they lie apart.
    """
    rows = draw.sample(len(X_pca), POINTS)
    points = np.asarray(X_pca[rows][:, list(pair)], dtype=np.float64)
    with draw.panel(height=3.6) as (figure, ax):
        colours: Any = draw.CATEGORICAL[0]
        if colouring is not None:
            palette = [c.colour for c in colouring.categories] + [draw.OTHER]
            # As numbers: each colour's name is read once, not once for each cell.
            colours = to_rgba_array(palette)[colouring.codes[rows]]
        size = float(np.clip(40_000 / max(len(rows), 1), 1.5, 14))
        ax.scatter(
            points[:, 0], points[:, 1], s=size, c=colours, linewidths=0, alpha=0.65,
            rasterized=True,
        )  # fmt: skip
        marked = colouring is not None and _mark_groups(
            ax, points, colouring.codes[rows], colouring.categories
        )
        names = [f"PC{i + 1}" for i in pair]
        if variance_ratio is not None:
            names = [f"PC{i + 1} ({words.percent(float(variance_ratio[i]))})" for i in pair]
        ax.set(xlabel=names[0], ylabel=names[1])
        draw.number_axis(ax.xaxis)
        draw.number_axis(ax.yaxis)
        ax.grid(visible=False)
        text = f"{words.count(len(rows))} cells by components {pair[0] + 1} and {pair[1] + 1}"
        return draw.to_svg(figure, name, text), marked


def _mark_groups(
    ax: Any, points: NDArray[Any], codes: NDArray[np.int64], categories: list[Category]
) -> bool:
    """Put each category's mark at its median, or beside it; tell whether that was done."""
    named = [(code, c) for code, c in enumerate(categories) if c.mark]
    if not _lie_apart(points, codes, len(named)):
        return False
    extent = np.maximum(np.ptp(points, axis=0), 1e-12)
    taken: list[NDArray[Any]] = []
    # The largest have their middle to themselves.
    for code, category in sorted(named, key=lambda item: -item[1].cells):
        mine = points[codes == code]
        if not len(mine):
            continue
        middle = np.median(mine, axis=0)
        place = _free_place(middle / extent, taken)
        taken.append(place)
        ax.annotate(
            category.mark, middle, place * extent, ha="center", va="center", fontsize=8,
            fontweight="bold",
            bbox={"boxstyle": "circle,pad=0.25", "fc": draw.SURFACE, "ec": category.colour,
                  "lw": 1.6},
            arrowprops={"arrowstyle": "-", "color": category.colour, "lw": 1.2},
        )  # fmt: skip
    return True


def _free_place(middle: NDArray[Any], taken: list[NDArray[Any]]) -> NDArray[Any]:
    """Return a place for a mark: in the middle, or the nearest one around it that is free."""
    around = np.linspace(0, 2 * np.pi, 12, endpoint=False)
    rings = [
        middle + LABEL_DISTANCE * radius * np.array([np.cos(angle), np.sin(angle)])
        for radius in (1.1, 1.6, 2.2, 3.0)
        for angle in around
    ]
    for place in (middle, *rings):
        if all(np.hypot(*(place - other)) > LABEL_DISTANCE for other in taken):
            return np.asarray(place)
    return middle


def _lie_apart(points: NDArray[Any], codes: NDArray[np.int64], n: int) -> bool:
    """Tell whether the categories explain a good part of where the cells lie."""
    inside = 0.0
    for code in range(n):
        mine = points[codes == code]
        if len(mine):
            inside += float(((mine - mine.mean(axis=0)) ** 2).sum())
    shown = points[(codes >= 0) & (codes < n)]
    total = float(((shown - shown.mean(axis=0)) ** 2).sum()) if len(shown) else 0.0
    return total > 0 and inside < 0.7 * total

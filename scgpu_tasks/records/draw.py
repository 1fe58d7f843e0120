"""One look for all figures, and SVG that takes its colours from the page it stands in.

Figures are matplotlib's, made without pyplot. Text in them is ours alone: names of genes,
batches and cell types stand in the HTML beside a figure, where any character is safe.
"""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from scgpu_tasks.records import words

# Stand-ins that `to_svg` turns into the page's CSS variables: figures follow light and dark.
INK = "#010203"
MUTED = "#020304"
GRID = "#030405"
SURFACE = "#040506"
KEPT = "#050607"
REMOVED = "#060708"
_VARIABLES = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    GRID: "var(--grid)",
    SURFACE: "var(--surface)",
    KEPT: "var(--kept)",
    REMOVED: "var(--removed)",
}

# Points drawn as pixels keep their colour; these are told apart with any colour vision (after
# Okabe and Ito, then Tol), and stand out from white and from near-black.
CATEGORICAL = (
    "#2a86c8", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b5a300", "#7a5fc0",
    "#999933", "#44aa99", "#aa4499", "#882255", "#88ccee", "#bb8866", "#117733", "#ddcc77",
)  # fmt: skip
OTHER = "#8f959e"

_STYLE: dict[str, Any] = {
    "axes.edgecolor": MUTED,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.labelcolor": INK,
    "axes.labelsize": 10,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "legend.fontsize": 9.5,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "savefig.facecolor": "none",
    "svg.fonttype": "none",
    "svg.image_inline": True,
    "text.color": INK,
    "text.usetex": False,
    "xtick.color": MUTED,
    "xtick.labelcolor": INK,
    "xtick.labelsize": 9.5,
    "ytick.color": MUTED,
    "ytick.labelcolor": INK,
    "ytick.labelsize": 9.5,
}
# matplotlib's settings are global to the process: one figure at a time, settings put back.
_LOCK = threading.Lock()


@contextmanager
def panel(width: float = 4.2, height: float = 3.0) -> Iterator[tuple[Figure, Axes]]:
    """Give a figure with one pair of axes in the report's style; sizes in inches."""
    with _LOCK, matplotlib.rc_context(_settings()):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, figure.add_subplot()


def _settings() -> Any:
    # The user's own style file must not change the report; the backend is none of ours.
    defaults = {k: v for k, v in matplotlib.rcParamsDefault.items() if k != "backend"}
    return defaults | _STYLE


def to_svg(figure: Figure, name: str, description: str) -> str:
    """Return a figure as an SVG element to put into an HTML page.

    Parameters
    ----------
    figure
        A figure from `panel`, inside its block.
    name
        Unique in the page; keeps the identifiers of two figures apart.
    description
        What the figure shows, for readers who do not see it. Plain text of ours.
    """
    with matplotlib.rc_context({"svg.hashsalt": name}):
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", dpi=200, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].strip()
    # The style sheet would apply to the whole page; the report's own has the same rule.
    svg = re.sub(r"\s*<(metadata|style)\b.*?</\1>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(xlink:href="|\bhref="|url\()#', rf"\1#{name}-", svg)
    for stand_in, variable in _VARIABLES.items():
        svg = svg.replace(stand_in, variable)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    return svg.replace("<svg", f'<svg role="img" aria-label="{description}"', 1)


def number_axis(axis: Any, *, power: bool = False, ticks: int = 5) -> None:
    """Label an axis with short numbers; ``power``: positions are decimal logarithms."""
    if power:
        low, high = axis.get_view_interval()
        positions = _log_ticks(low, high)
        axis.set_ticks(positions)
        axis.set_major_formatter(FuncFormatter(lambda x, _: words.short(round(10**x, 6))))
        return
    axis.set_major_locator(MaxNLocator(ticks, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(FuncFormatter(words.short))


def _log_ticks(low: float, high: float) -> list[float]:
    for steps in ((1,), (1, 3), (1, 2, 5)):
        decades = range(int(np.floor(low)), int(np.ceil(high)) + 1)
        ticks = [d + float(np.log10(s)) for d in decades for s in steps]
        ticks = [t for t in ticks if low <= t <= high]
        if len(ticks) >= 3:
            return ticks
    return ticks or [low, high]


class Bins:
    """Which of some bins of equal width each value lies in.

    Parameters
    ----------
    values
        Finite numbers.
    low, high
        Ends of the axis, which the values do not exceed.
    n
        Number of bins.
    """

    def __init__(self, values: NDArray[Any], low: float, high: float, n: int) -> None:
        self.n = n
        self.edges = np.linspace(low, high, n + 1)
        place = np.subtract(values, low, dtype=np.float64)
        place *= n / (high - low)
        self.numbers = np.clip(place, 0, n - 1).astype(np.int32)

    def count(self, chosen: NDArray[np.bool_] | None = None) -> NDArray[np.int64]:
        """Count the values of each bin, or only the chosen ones."""
        numbers = self.numbers if chosen is None else self.numbers[chosen]
        return np.bincount(numbers, minlength=self.n)


class Grid:
    """Points in a square grid of bins.

    Parameters
    ----------
    x, y
        Bins of each point; equally many in both directions.
    """

    def __init__(self, x: Bins, y: Bins) -> None:
        self._n = x.n
        self._cells = y.numbers * np.int32(self._n) + x.numbers
        self._counts = np.bincount(self._cells, minlength=self._n**2)

    def counts(self) -> NDArray[np.float64]:
        """Points per bin, first row at the lowest y; NaN where there is none."""
        return self._square(self._counts.astype(np.float64))

    def means(self, weights: NDArray[Any]) -> NDArray[np.float64]:
        """Mean of a weight per bin; NaN where there is no point."""
        sums = np.bincount(self._cells, weights=weights, minlength=self._n**2)
        return self._square(np.divide(sums, self._counts, out=sums, where=self._counts > 0))

    def _square(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.where(self._counts > 0, values, np.nan).reshape(self._n, self._n)


def sample(n: int, limit: int, seed: int = 0) -> NDArray[np.int64]:
    """Return at most ``limit`` row numbers below n in random order, the same every time."""
    rng = np.random.default_rng(seed)
    if n <= limit:
        return rng.permutation(n).astype(np.int64)
    return rng.choice(n, size=limit, replace=False).astype(np.int64)


def span(values: NDArray[Any], pad: float = 0.03) -> tuple[float, float]:
    """Lowest and highest finite value with a margin; a unit span around a single value."""
    finite = values[np.isfinite(values)]
    if len(finite) == 0:
        return 0.0, 1.0
    low, high = float(finite.min()), float(finite.max())
    if low == high:
        low, high = low - 0.5, high + 0.5
    margin = pad * (high - low)
    return low - margin, high + margin


def threshold_lines(ax: Axes, marks: Sequence[float], *, horizontal: bool = False) -> None:
    """Draw thresholds as dashed lines; the caller sets the limits of the axes."""
    for mark in marks:
        line = ax.axhline if horizontal else ax.axvline
        line(mark, color=INK, linestyle=(0, (4, 2)), linewidth=1.2)

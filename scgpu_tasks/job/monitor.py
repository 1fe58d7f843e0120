"""Shows where a run is and what it found on the page of a server, while the run goes on.

What is shown goes through threads of its own: neither the stages nor the flow wait for the
server. Without somebody to look there is no page, and nothing of this is done.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from scgpu_tasks.job.progress import ProgressBars
from scgpu_tasks.records import words
from scgpu_tasks.records.pages import Part

SECONDS_BETWEEN_UPDATES = 2.0

logger = logging.getLogger(__name__)


class Page(Protocol):
    """Where a run shows itself; each call may take as long as a request."""

    def progress(self, name: str, percent: float, text: str) -> None:
        """Show how far something is; again under the same name to bring it up to date."""

    def markdown(self, name: str, text: str, title: str) -> None:
        """Show a text."""

    def table(self, name: str, rows: list[dict[str, Any]], title: str) -> None:
        """Show a table."""

    def log(self, text: str) -> None:
        """Add a line to the run's log."""


class Steps:
    """How many blocks of a stage are done, how fast, and how long the rest will take."""

    def __init__(self, stage: str, cells_per_block: float | None) -> None:
        self.stage = stage
        self.done = self.total = 0
        self._cells = cells_per_block
        self._begun = time.monotonic()
        self._first: tuple[float, int] | None = None

    def take(self, done: int, total: int) -> None:
        """Note blocks done and blocks in all."""
        self.done, self.total = done, total
        if self._first is None:
            # Reading begins when the first blocks are done: before, a stage starts up.
            self._first = (time.monotonic(), done)

    @property
    def percent(self) -> float:
        """Share of the blocks, 0 to 100."""
        return 100 * self.done / self.total if self.total else 0.0

    @property
    def unit(self) -> str:
        """What is counted."""
        return "shards" if self.stage == "convert" else "blocks"

    def text(self) -> str:
        """Return blocks, rate and time left in one line."""
        if not self.total:
            return f"{self.stage}: starting"
        line = f"{self.stage}: {self.done:,} of {self.total:,} {self.unit}"
        start, before = self._first or (self._begun, 0)
        seconds = time.monotonic() - start
        if self.done == self.total or seconds < 0.5 or self.done <= before:
            return line
        rate = (self.done - before) / seconds
        line += f", {self._rate(rate)}"
        return f"{line}, {words.duration((self.total - self.done) / rate)} left"

    def _rate(self, blocks: float) -> str:
        if self._cells is None or self.stage == "convert":
            return f"{blocks:,.1f} {self.unit}/s"
        return f"{words.count(round(blocks * self._cells))} cells/s"


class Monitor:
    """Follows the stages of a run: bars in a terminal, and a page where there is one.

    Use it as a context manager.

    Parameters
    ----------
    page
        Where to show; None shows nothing.
    bars
        The terminal's bars.
    """

    def __init__(self, page: Page | None, bars: ProgressBars) -> None:
        self.page = page
        self.cells_per_block: float | None = None
        self._bars = bars
        self._steps: Steps | None = None
        self._lock = threading.Lock()
        self._next = 0.0
        self._posting: Future[None] | None = None
        # Figures take seconds; how far a stage is must not wait for them.
        self._poster = ThreadPoolExecutor(1, thread_name_prefix="scgpu-progress")
        self._artist = ThreadPoolExecutor(1, thread_name_prefix="scgpu-figures")
        self._shown: list[tuple[str, Future[None]]] = []

    def __enter__(self) -> Monitor:
        self._bars.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._bars.__exit__(kind, None, None)
        if kind is not None and self._steps is not None and self._steps.total:
            self._post(self._steps)
        # A run that failed ends at once; its page then lacks what was still being drawn.
        self._artist.shutdown(wait=kind is None, cancel_futures=kind is not None)
        self._poster.shutdown(wait=True)
        for name, future in self._shown:
            error = None if future.cancelled() or not future.done() else future.exception()
            if error is not None:
                logger.warning("%s could not be shown on the run's page: %r", name, error)

    def begin(self, stage: str) -> None:
        """Note that a stage begins."""
        self._bars.begin(stage)
        self._steps = Steps(stage, self.cells_per_block)

    def on_event(self, event: tuple[float, Any]) -> None:
        """Take an event of `worker_progress`, as ``Client.subscribe_topic`` hands it over."""
        self._bars.on_event(event)
        _, message = event
        steps = self._steps
        if steps is None or message["stage"] != steps.stage:
            return
        with self._lock:
            steps.take(message["done"], message["total"])
        now = time.monotonic()
        if self.page is None or now < self._next:
            return
        if self._posting is None or self._posting.done():
            self._next = now + SECONDS_BETWEEN_UPDATES
            self._posting = self._post(steps)

    def end(self, stage: str, state: str, text: str) -> None:
        """Note how a stage ended; the text goes to the log."""
        self._bars.end(stage, state)
        steps, self._steps = self._steps, None
        if self.page is None:
            return
        self.page.log(f"{stage}: {text}")
        if steps is not None and steps.total:
            self._post(steps)

    def where(self) -> str:
        """How far the stage that runs came, such as ``after 3 of 8 blocks``; may be empty."""
        steps = self._steps
        if steps is None or not steps.total:
            return ""
        return f"after {steps.done:,} of {steps.total:,} {steps.unit}"

    def show(self, name: str, draw: Callable[[Page], None]) -> None:
        """Have something drawn and shown while the run goes on."""
        if self.page is not None:
            self._shown.append((name, self._artist.submit(draw, self.page)))

    def _post(self, steps: Steps) -> Future[None] | None:
        if self.page is None:
            return None
        future = self._poster.submit(
            self.page.progress, steps.stage, steps.percent, steps.text()
        )
        self._shown = [s for s in self._shown if not s[1].done() or s[1].exception()]
        self._shown.append((f"progress of {steps.stage}", future))
        return future


def stage_words(stage: str, summary: Mapping[str, Any]) -> str:
    """Say in one line what a finished stage did."""
    if stage == "convert":
        how = "verified" if summary.get("verified") else "not verified"
        return f"{words.size(summary.get('stored_bytes'))} stored, {how}"
    if stage == "check":
        slow = [f["what"] for f in summary["findings"] if f["slow"]]
        return f"reading is slowed by {'; '.join(slow)}" if slow else "reads fast"
    if stage == "load":
        cells, genes = summary["shape"]
        return (
            f"{cells:,} cells, {genes:,} genes, {words.size(summary['stored_bytes'])} in "
            f"{summary['n_blocks']:,} block{'s' * (summary['n_blocks'] != 1)}"
        )
    if stage == "qc":
        lost = ", ".join(
            f"{name} {n:,}" for name, n in summary.get("lost", {}).get("cells", {}).items()
        )
        return (
            f"kept {summary['n_cells_kept']:,} of {summary['n_cells']:,} cells (lost to "
            f"{lost or 'no filter'}) and {summary['n_genes_kept']:,} of "
            f"{summary['n_genes']:,} genes; {summary['n_hvg']:,} highly variable"
        )
    explained = summary.get("variance_explained")
    of = "" if explained is None else f", {words.percent(explained)} of the variance"
    return f"{summary['n_comps']} components of {summary['n_genes']:,} genes{of}"


def shows(
    stage: str,
    folder: Path,
    summary: Mapping[str, Any],
    kept: Callable[[str], list[Part]] | None = None,
) -> Iterator[Shown]:
    """Give what a finished stage puts on the page: names, and functions that draw.

    Parameters
    ----------
    stage
        One of check, qc, pca; others put nothing.
    folder
        The stage's output.
    summary
        What the stage left.
    kept
        Returns what a stage put on the page of an earlier run; without it figures are drawn.
    """
    if stage == "check":
        yield "check", lambda page: _show_check(page, summary)
    elif stage in ("qc", "pca"):
        draw = kept or (lambda stage: _drawn(stage, folder, dict(summary)))
        yield stage, lambda page: _put(page, draw(stage))


Shown = tuple[str, Callable[[Page], None]]


def _show_check(page: Page, summary: Mapping[str, Any]) -> None:
    from scgpu_tasks.records.pages import check_page

    page.markdown("check", check_page(summary), "How fast the store can be read")


def _drawn(stage: str, folder: Path, summary: dict[str, Any]) -> list[Part]:
    from scgpu_tasks.job.saved import map_pca, read_metrics
    from scgpu_tasks.records.pages import pca_parts, qc_parts

    if stage == "qc":
        return qc_parts(read_metrics(folder, summary))
    return pca_parts(map_pca(folder, summary))


def _put(page: Page, parts: list[Part]) -> None:
    for part in parts:
        content = part["content"]
        if isinstance(content, str):
            page.markdown(part["name"], content, part["title"])
        else:
            page.table(part["name"], content, part["title"])

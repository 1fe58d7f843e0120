"""How far a stage is: sent from the Dask worker that runs it, shown where the flow runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

SECONDS_BETWEEN_REPORTS = 0.2

Progress = Callable[[int, int], None]


def worker_progress(topic: str, stage: str) -> Progress | None:
    """Progress callback of a stage that runs on a Dask worker.

    Parameters
    ----------
    topic
        Name of the Dask event topic; the flow's process subscribes to it.
    stage
        Name of the stage.

    Returns
    -------
    A function of blocks done and blocks in all, or None outside a worker. It raises
    `ClusterError` once the flow has given the stage up.
    """
    from distributed import get_worker

    from scgpu_tasks.errors import ClusterError
    from scgpu_tasks.stages.dask_pool import OwnTask

    try:
        worker = get_worker()
    except ValueError:
        return None
    own = OwnTask()
    last = 0.0

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done < total and now - last < SECONDS_BETWEEN_REPORTS:
            return
        last = now
        if own.dropped():
            msg = f"nobody waits for stage {stage} any more: its run was cancelled"
            raise ClusterError(msg)
        worker.log_event(topic, {"stage": stage, "done": int(done), "total": int(total)})

    return report


class ProgressBars:
    """One line per stage in a terminal; nothing where the output is not a terminal.

    Parameters
    ----------
    enabled
        By default: whether standard error is a terminal.
    """

    def __init__(self, *, enabled: bool | None = None) -> None:
        self._enabled = sys.stderr.isatty() if enabled is None else enabled
        self._bars: Any = None
        self._lines: dict[str, Any] = {}

    def __enter__(self) -> ProgressBars:
        if self._enabled:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeElapsedColumn,
                TimeRemainingColumn,
            )

            self._bars = Progress(
                TextColumn("{task.description:<8}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def begin(self, stage: str) -> None:
        """Show a stage as running."""
        if self._bars is not None:
            self._lines[stage] = self._bars.add_task(stage, total=None, note="")

    def update(self, stage: str, done: int, total: int) -> None:
        """Show how many blocks of a stage are done."""
        if self._bars is not None and stage in self._lines:
            self._bars.update(self._lines[stage], completed=done, total=total, note="blocks")

    def end(self, stage: str, note: str) -> None:
        """Show a stage as finished."""
        if self._bars is not None and stage in self._lines:
            line = self._lines[stage]
            total = self._bars.tasks[self._bars.task_ids.index(line)].total or 1
            self._bars.update(line, completed=total, total=total, note=note)

    def on_event(self, event: tuple[float, Any]) -> None:
        """Take an event of `worker_progress`, as ``Client.subscribe_topic`` hands it over."""
        _, message = event
        self.update(message["stage"], message["done"], message["total"])

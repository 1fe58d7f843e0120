"""Where tasks run: on threads of this process, or on the workers of a Dask client."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from scgpu_tasks.stages import parcels
from scgpu_tasks.stages.sources import BlockSource
from scgpu_tasks.stages.spans import Span, SpanTask, Visit, run_span


class Pool(Protocol):
    """What the engine asks of the place where tasks run."""

    size: int
    """Number of tasks that run at the same time."""
    can_reread: bool
    """Whether a task can compute a block of a Dask array again by itself."""

    def submit(self, source: BlockSource, span: Span, task: SpanTask, keep: bool) -> Any:
        """Start `run_span`; returns a future."""

    def result(self, future: Any) -> Visit:
        """Wait for a visit."""

    def forget(self, future: Any) -> None:
        """Let go of a future: cancel it, or free its result."""

    def array(self, shape: tuple[int, ...], dtype: Any) -> parcels.RowTarget:
        """Make an array in memory, which tasks can fill where that is possible."""

    def reach(self, home: parcels.RowTarget) -> parcels.RowTarget | None:
        """Make the target through which tasks fill this process's array or file, if any."""

    def everywhere(
        self, function: Callable[..., Any], *arguments: Any
    ) -> dict[str | None, Any]:
        """Call a function in every process that runs tasks; results by address."""

    def once(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in one process that runs tasks."""

    def lost_workers(self) -> list[dict[str, Any]]:
        """Name workers that died, and the rows that others had to do again."""

    def close(self) -> None:
        """Free what the pool holds."""


class Threads:
    """Threads of this process."""

    can_reread = True

    def __init__(self, size: int) -> None:
        self.size = size
        self._pool = ThreadPoolExecutor(size, thread_name_prefix="scgpu-blocks")

    def submit(
        self, source: BlockSource, span: Span, task: SpanTask, keep: bool
    ) -> Future[Visit]:
        """See `Pool`."""
        return self._pool.submit(run_span, source, span, task, keep=keep)

    def result(self, future: Future[Visit]) -> Visit:
        """See `Pool`."""
        return future.result()

    def forget(self, future: Future[Visit]) -> None:
        """See `Pool`."""
        future.cancel()

    def array(self, shape: tuple[int, ...], dtype: Any) -> parcels.RowTarget:
        """See `Pool`."""
        return parcels.LocalArray(np.empty(shape, dtype))

    def reach(self, home: parcels.RowTarget) -> parcels.RowTarget | None:
        """See `Pool`."""
        return home

    def everywhere(
        self, function: Callable[..., Any], *arguments: Any
    ) -> dict[str | None, Any]:
        """See `Pool`."""
        return {None: function(*arguments)}

    def once(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """See `Pool`."""
        return self._pool.submit(function, *arguments).result()

    def lost_workers(self) -> list[dict[str, Any]]:
        """See `Pool`."""
        return []

    def close(self) -> None:
        """See `Pool`."""
        self._pool.shutdown(wait=True, cancel_futures=True)

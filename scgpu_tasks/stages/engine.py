"""Visits every row block of a matrix and folds what the visits return, in a fixed order.

Blocks are grouped into spans, by their number alone; one task makes the partial of one span,
and partials are folded in the order of the spans. So the result has the same bytes for any
number of threads and workers. Only a few spans are under way or waiting to be folded at a time,
which bounds the memory.

Tasks run on the current Dask client, if there is one, else on threads of this process. A matrix
in this process's memory is always visited by threads.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from scgpu_tasks.io.clients import current_client
from scgpu_tasks.kernels.blas import one_thread
from scgpu_tasks.stages import resident
from scgpu_tasks.stages.dask_pool import Cluster
from scgpu_tasks.stages.parcels import FileArray, RowTarget
from scgpu_tasks.stages.pools import Pool, Threads
from scgpu_tasks.stages.short_memory import give_back
from scgpu_tasks.stages.sources import BlockSource, DaskBlocks, MemoryBlocks
from scgpu_tasks.stages.spans import Span, SpanTask, Visit, on_gpu, run_span, spans_of
from scgpu_tasks.stages.timing import Watch

logger = logging.getLogger(__name__)

__all__ = ["Engine", "Progress", "Span", "SpanTask", "Visit", "on_gpu", "run_span", "spans_of"]

Progress = Callable[[int, int], None]
# Spans that may be under way or wait their turn, beyond one for each thread.
_AHEAD = 1
# Threads that feed one GPU: enough that reading, decoding and computing overlap.
_GPU_THREADS = 4


class Engine:
    """Runs tasks over the spans of one matrix. Use it as a context manager.

    Parameters
    ----------
    source
        The matrix.
    workers
        Number of threads where there is no Dask client. Default: one for each CPU that this
        process may use.
    progress
        Called with the number of blocks visited and the number to visit.
    passes
        How many times the matrix will be visited, for `progress`.
    keep_blocks
        Whether blocks stay on the GPUs that read them, for a later engine on the same matrix.
        None: if all are likely to fit.
    """

    def __init__(
        self,
        source: BlockSource,
        *,
        workers: int | None = None,
        progress: Progress | None = None,
        passes: int = 1,
        keep_blocks: bool | None = False,
    ) -> None:
        self.source = source
        self.spans = spans_of(source)
        self.workers = workers
        self.keep_blocks = keep_blocks
        self.stored_bytes = 0
        self._homes: dict[int, str | None] = {}
        self.n_blocks = sum(span.n_blocks for span in self.spans)
        self._counts = not isinstance(source, DaskBlocks | MemoryBlocks)
        self._progress = progress
        self._total = self.n_blocks * passes
        self._done = 0
        self._read = self._cut = 0
        self._stack = contextlib.ExitStack()
        self._pool: Pool

    def __enter__(self) -> Engine:
        self._stack.enter_context(one_thread())
        client = None if isinstance(self.source, MemoryBlocks) else current_client(self._stack)
        if client is not None and self.workers is None:
            self._pool = Cluster(client)
            self._stack.callback(self._pool.close)
        else:
            threads = _GPU_THREADS if on_gpu(self.source) else len(os.sched_getaffinity(0))
            self._pool = Threads(self.workers or threads)
            self._stack.callback(self._pool.close)
        matrix = resident.identity(self.source) if on_gpu(self.source) else None
        if matrix is None:
            self.keep_blocks = False
            return self
        for where, found in self._pool.everywhere(resident.starts, matrix).items():
            self._homes.update(dict.fromkeys(found, where))
        if self.keep_blocks is None:
            room = self._pool.everywhere(resident.gpu_bytes).values()
            self.keep_blocks = resident.fits(self.source, sum(room))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        # The blocks' memory, which malloc keeps, is not for the next stage alone.
        give_back()

    def fold(
        self,
        task_of: Callable[[Span], SpanTask],
        merge: Callable[[Span, Any, str | None], None],
        spans: Sequence[Span] | None = None,
        at_once: int | None = None,
    ) -> None:
        """Visit all spans, or some, and hand each one's result to `merge`, in order.

        Parameters
        ----------
        task_of
            Makes the task of a span, just before it starts.
        merge
            Takes a span, its task's result and the address of the worker that ran it (None for
            a thread); runs in the calling thread.
        spans
            Default: all.
        at_once
            Most tasks that may be under way or wait for `merge`. Default: as many as keep all
            threads busy.
        """
        waiting: list[tuple[Span, Any]] = []
        queue = iter(self.spans if spans is None else spans)
        # Tasks on GPUs, which are few, wait at their workers: these must not be idle while
        # results are merged.
        ahead = len(self.spans) if self.on_gpu else _AHEAD
        threads, watch = Watch(), Watch()
        room = min(self._pool.size + ahead, at_once or self.n_blocks)
        try:
            while True:
                while len(waiting) < room and (span := next(queue, None)) is not None:
                    task = task_of(span)
                    task.prefer = task.prefer or self._homes.get(span.start)
                    keep = bool(self.keep_blocks)
                    future = self._pool.submit(self.source, span, task, keep)
                    waiting.append((span, future))
                watch.lap("submitting")
                if not waiting:
                    logger.debug(
                        "visits of %d spans: %s; threads: %s", len(self.spans), watch, threads
                    )
                    return
                span, future = waiting.pop(0)
                try:
                    visit: Visit = self._pool.result(future)
                finally:
                    self._pool.forget(future)
                del future
                watch.lap("waiting")
                threads.add(visit.seconds)
                self._count(span, visit)
                merge(span, visit.value, visit.where)
                del visit
                watch.lap("merging")
        finally:
            for _, future in waiting:
                self._pool.forget(future)

    @property
    def stored_bytes_read(self) -> int | None:
        """Bytes read from disk; None where somebody else reads: Dask's arrays, memory."""
        return self.stored_bytes if self._counts else None

    @property
    def passes(self) -> float:
        """How many times the matrix was read so far."""
        return self._read / max(self.source.shape[0], 1)

    def mishaps(self) -> dict[str, Any]:
        """Tell what went wrong and was mended, for a record; nothing on a good day.

        Returns
        -------
        ``workers_lost``, with the rows that others did again, and ``blocks_cut``, the number of
        blocks that fitted into memory in parts only; each where there is any.
        """
        lost = self._pool.lost_workers()
        if lost:
            logger.warning("lost %d workers; others did their work again", len(lost))
        found = {"workers_lost": lost, "blocks_cut": self._cut}
        return {name: value for name, value in found.items() if value}

    @property
    def can_hold(self) -> bool:
        """Whether a task may leave rows in its process for a later task of the same span."""
        return self._pool.can_reread or not isinstance(self.source, DaskBlocks)

    def rows_result(
        self, shape: tuple[int, ...], dtype: Any, path: str | Path | None = None
    ) -> Future[tuple[RowTarget, RowTarget | None]]:
        """Make an array for rows that tasks find: in memory, or in a ``.npy`` file.

        Returns
        -------
        What takes rows in this process, and what takes them in tasks (None where these must
        hand them over); soon: it takes a while to find the memory of a large array.

        Raises
        ------
        OutputError
            The file cannot be written.
        """
        helper = ThreadPoolExecutor(1, thread_name_prefix="scgpu-rows")
        self._stack.callback(helper.shutdown)
        file = None if path is None else FileArray.create(path, shape, dtype)
        if file is not None:
            self._stack.callback(file.discard)

        def make() -> tuple[RowTarget, RowTarget | None]:
            home = self._pool.array(shape, dtype) if file is None else file
            return home, self._pool.reach(home)

        return helper.submit(make)

    def on_exit(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function in every process that runs tasks, when the engine stops."""
        self._stack.callback(self._pool.everywhere, function, *arguments)

    def drop_blocks_on_exit(self) -> None:
        """Free what is kept of the matrix on GPUs, when the engine stops."""
        matrix = resident.identity(self.source) if on_gpu(self.source) else None
        if matrix is not None:
            self.on_exit(resident.drop, matrix)

    @property
    def on_gpu(self) -> bool:
        """Whether tasks work on GPUs."""
        return on_gpu(self.source)

    def everywhere(
        self, function: Callable[..., Any], *arguments: Any
    ) -> dict[str | None, Any]:
        """Call a function in every process that runs tasks; results by address."""
        return self._pool.everywhere(function, *arguments)

    def once(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function where tasks run, in one process, and wait for what it returns."""
        return self._pool.once(function, *arguments)

    def _count(self, span: Span, visit: Visit) -> None:
        self.stored_bytes += visit.stored_bytes
        self._read += visit.rows_read
        self._cut += visit.cut
        self._done += span.n_blocks
        if self._progress is not None:
            self._progress(self._done, self._total)

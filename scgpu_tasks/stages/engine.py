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
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from threadpoolctl import threadpool_limits

from scgpu_tasks.kernels.rows import Rows
from scgpu_tasks.stages import parcels, resident
from scgpu_tasks.stages.sources import BlockSource, DaskBlocks, MemoryBlocks, block_rows

Progress = Callable[[int, int], None]
# At most about twice as many spans, however long the matrix.
_SPANS = 64
# Spans that may be under way or wait their turn, beyond one for each thread.
_AHEAD = 2
# Threads that feed one GPU: enough that reading, decoding and computing overlap.
_GPU_THREADS = 4


@dataclass(frozen=True)
class Span:
    """Consecutive blocks that one task visits."""

    number: int
    bounds: tuple[int, ...]

    @property
    def start(self) -> int:
        """First row."""
        return self.bounds[0]

    @property
    def stop(self) -> int:
        """Row after the last."""
        return self.bounds[-1]

    @property
    def n_blocks(self) -> int:
        """Number of blocks."""
        return len(self.bounds) - 1


class SpanTask(Protocol):
    """Work on the blocks of one span; picklable, with no more data than the span needs."""

    prefer: str | None
    """Address of the worker that had better run it, if any."""

    def recall(self) -> bool:
        """Do the work on rows that an earlier task held; False if they must be read."""

    def visit(self, rows: Rows, start: int) -> None:
        """Take in rows that begin at row `start` of the matrix."""

    def result(self) -> Any:
        """Hand over what was made of the rows, once all were visited."""


@dataclass
class Visit:
    """What a task hands back: its result, what it read, and which worker ran it."""

    value: Any
    blocks_read: int
    stored_bytes: int
    where: str | None = None


def spans_of(source: BlockSource) -> list[Span]:
    """Spans of a matrix; they depend on its blocks only."""
    bounds = [int(bound) for bound in source.bounds]
    n_blocks = len(bounds) - 1
    length = max(1, n_blocks // _SPANS)
    firsts = range(0, n_blocks, length)
    return [
        Span(number, tuple(bounds[first : min(first + length, n_blocks) + 1]))
        for number, first in enumerate(firsts)
    ]


def run_span(
    source: BlockSource, span: Span, task: SpanTask, *blocks: Any, keep: bool = False
) -> Visit:
    """Visit the blocks of a span; on a worker, or in a thread.

    Parameters
    ----------
    blocks
        The span's blocks, where they are computed already; else `source` reads them, unless
        they are kept on this process's GPU.
    keep
        Whether to keep blocks on the GPU, as far as there is room.
    """
    stored = 0
    with _stream(source):
        if task.recall():
            return Visit(task.result(), 0, 0)
        matrix = resident.identity(source) if on_gpu(source) else None
        n_read = 0
        for i in range(span.n_blocks):
            start, stop = span.bounds[i], span.bounds[i + 1]
            place = resident.Place(matrix, start, stop) if matrix else None
            with _naming_rows(start, stop):
                pieces = resident.find(place) if place else None
                if pieces is None:
                    block = blocks[i] if blocks else source.read(start, stop)
                    n_read += 1
                    stored += int(getattr(block, "stored_bytes", 0))
                    pieces = block_rows(block, source.shape[1])
                    del block
                    if keep and place:
                        resident.keep(place, pieces)
                _visit(task, pieces, start)
                del pieces
        return Visit(task.result(), n_read, stored)


def _visit(task: SpanTask, pieces: Sequence[Rows], start: int) -> None:
    for rows in pieces:
        task.visit(rows, start)
        start += rows.n_rows


def on_gpu(source: BlockSource) -> bool:
    """Tell whether a source reads its blocks to a GPU."""
    return getattr(source, "device", "cpu") == "gpu"


def _stream(source: BlockSource) -> contextlib.AbstractContextManager[Any]:
    """Give the thread a stream of its own, where blocks are read to a GPU."""
    if not on_gpu(source):
        return contextlib.nullcontext()
    from scgpu_tasks.kernels._gpu.streams import own_stream

    return own_stream()


@contextlib.contextmanager
def _naming_rows(start: int, stop: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"in rows {start}:{stop} of the matrix")
        raise


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
        self._progress = progress
        self._total = self.n_blocks * passes
        self._done = 0
        self._read = 0
        self._stack = contextlib.ExitStack()
        self._pool: _Threads | _Cluster

    def __enter__(self) -> Engine:
        client = None if isinstance(self.source, MemoryBlocks) else _current_client(self._stack)
        if client is not None and self.workers is None:
            self._pool = _Cluster(client)
            self._stack.callback(self._pool.close)
        else:
            threads = _GPU_THREADS if on_gpu(self.source) else len(os.sched_getaffinity(0))
            self._pool = _Threads(self.workers or threads)
            # A product's bytes depend on how many threads BLAS cuts it for.
            self._stack.enter_context(threadpool_limits(1))
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

    def fold(
        self,
        task_of: Callable[[Span], SpanTask],
        merge: Callable[[Span, Any, str | None], None],
        spans: Sequence[Span] | None = None,
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
        """
        waiting: list[tuple[Span, Any]] = []
        queue = iter(self.spans if spans is None else spans)
        room = self._pool.size + _AHEAD
        try:
            while True:
                while len(waiting) < room and (span := next(queue, None)) is not None:
                    task = task_of(span)
                    task.prefer = task.prefer or self._homes.get(span.start)
                    keep = bool(self.keep_blocks)
                    future = self._pool.submit(self.source, span, task, keep)
                    waiting.append((span, future))
                if not waiting:
                    return
                span, future = waiting.pop(0)
                try:
                    visit: Visit = self._pool.result(future)
                finally:
                    self._pool.forget(future)
                del future
                self._count(span, visit)
                merge(span, visit.value, visit.where)
                del visit
        finally:
            for _, future in waiting:
                self._pool.forget(future)

    @property
    def passes(self) -> float:
        """How many times the matrix was read so far."""
        return self._read / max(self.n_blocks, 1)

    @property
    def can_hold(self) -> bool:
        """Whether a task may leave rows in its process for a later task of the same span."""
        return self._pool.can_reread or not isinstance(self.source, DaskBlocks)

    def rows_result(self, shape: tuple[int, ...], dtype: Any) -> Future[Any]:
        """Make an array for rows that tasks find, and the `RowTarget` that takes them to it.

        Returns
        -------
        Both, soon: it takes a while to find the memory of a large array.
        """
        helper = ThreadPoolExecutor(1, thread_name_prefix="scgpu-rows")
        self._stack.callback(helper.shutdown)
        return helper.submit(self._pool.rows_result, shape, dtype)

    def on_exit(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function in every process that runs tasks, when the engine stops."""
        self._stack.callback(self._pool.everywhere, function, *arguments)

    def drop_blocks_on_exit(self) -> None:
        """Free what is kept of the matrix on GPUs, when the engine stops."""
        matrix = resident.identity(self.source) if on_gpu(self.source) else None
        if matrix is not None:
            self.on_exit(resident.drop, matrix)

    def once(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function where tasks run, in one process, and wait for what it returns."""
        return self._pool.once(function, *arguments)

    def _count(self, span: Span, visit: Visit) -> None:
        self.stored_bytes += visit.stored_bytes
        self._read += visit.blocks_read
        self._done += span.n_blocks
        if self._progress is not None:
            self._progress(self._done, self._total)


class _Threads:
    can_reread = True

    def __init__(self, size: int) -> None:
        self.size = size
        self._pool = ThreadPoolExecutor(size, thread_name_prefix="scgpu-blocks")

    def submit(
        self, source: BlockSource, span: Span, task: SpanTask, keep: bool
    ) -> Future[Visit]:
        return self._pool.submit(run_span, source, span, task, keep=keep)

    def result(self, future: Future[Visit]) -> Visit:
        return future.result()

    def forget(self, future: Future[Visit]) -> None:
        future.cancel()

    def rows_result(self, shape: tuple[int, ...], dtype: Any) -> Any:
        array = np.empty(shape, dtype)
        return array, parcels.LocalArray(array)

    def everywhere(
        self, function: Callable[..., Any], *arguments: Any
    ) -> dict[str | None, Any]:
        return {None: function(*arguments)}

    def once(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self._pool.submit(function, *arguments).result()

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


class _Cluster:
    # A worker cannot compute another block of a Dask array by itself.
    can_reread = False

    def __init__(self, client: Any) -> None:
        self._client = client
        self.size = max(1, sum(client.nthreads().values()))
        self._mailbox = parcels.Mailbox()

    def close(self) -> None:
        self._mailbox.close()

    def result(self, future: Any) -> Visit:
        visit: Visit = future.result()
        visit.value = self._mailbox.open(visit.value)
        return visit

    def rows_result(self, shape: tuple[int, ...], dtype: Any) -> Any:
        shared = self._mailbox.array(shape, dtype)
        if shared is None:
            return np.empty(shape, dtype), None
        return shared.map(), shared

    def submit(self, source: BlockSource, span: Span, task: SpanTask, keep: bool) -> Any:
        blocks: list[Any] = []
        light: Any = source
        if isinstance(source, DaskBlocks):
            bounds = span.bounds
            blocks = self._client.compute(
                [source.block(bounds[i], bounds[i + 1]) for i in range(span.n_blocks)]
            )
            light = _Shape(source.shape)
        return self._client.submit(
            run_span_alone,
            self._mailbox.address,
            keep,
            light,
            span,
            task,
            *blocks,
            pure=False,
            workers=[task.prefer] if task.prefer else None,
            allow_other_workers=task.prefer is not None,
        )

    def everywhere(
        self, function: Callable[..., Any], *arguments: Any
    ) -> dict[str | None, Any]:
        found: dict[str | None, Any] = self._client.run(function, *arguments)
        return found

    def once(self, function: Callable[..., Any], *arguments: Any) -> Any:
        # Always the same worker: what the first call loads, the second finds.
        worker = min(self._client.nthreads())
        future = self._client.submit(
            function, *arguments, pure=False, workers=[worker], allow_other_workers=True
        )
        return future.result()

    def forget(self, future: Any) -> None:
        if not future.done():
            future.cancel()
        future.release()


@dataclass(frozen=True)
class _Shape:
    shape: tuple[int, int]


def run_span_alone(
    mailbox: str | None, keep: bool, source: Any, span: Span, task: SpanTask, *blocks: Any
) -> Visit:
    """`run_span` in a worker process, with BLAS on one thread."""
    from distributed import get_worker

    with threadpool_limits(1):
        visit = run_span(source, span, task, *blocks, keep=keep)
    visit.value = parcels.pack(visit.value, mailbox)
    visit.where = get_worker().address
    return visit


def _current_client(stack: contextlib.ExitStack) -> Any:
    """Find the Dask client to use; inside a worker's task, one that gives its thread free."""
    if "distributed" not in sys.modules:
        # Nobody can have made a client.
        return None
    from distributed import Client, get_worker, worker_client

    try:
        get_worker()
    except ValueError:
        try:
            return Client.current()
        except ValueError:
            return None
    return stack.enter_context(worker_client())

"""Where tasks run: on threads of this process, or on the workers of a Dask cluster."""

from __future__ import annotations

import contextlib
import contextvars
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from threadpoolctl import threadpool_limits

from scgpu_tasks.stages import parcels
from scgpu_tasks.stages.sources import BlockSource, DaskBlocks
from scgpu_tasks.stages.spans import Span, SpanTask, Visit, on_gpu, run_span
from scgpu_tasks.stages.timing import Watch

_SWITCH_SECONDS = 2e-4


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

    def rows_result(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Make an array and the `RowTarget` through which tasks fill it, or None."""

    def everywhere(
        self, function: Callable[..., Any], *arguments: Any
    ) -> dict[str | None, Any]:
        """Call a function in every process that runs tasks; results by address."""

    def once(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in one process that runs tasks."""

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

    def rows_result(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """See `Pool`."""
        array = np.empty(shape, dtype)
        return array, parcels.LocalArray(array)

    def everywhere(
        self, function: Callable[..., Any], *arguments: Any
    ) -> dict[str | None, Any]:
        """See `Pool`."""
        return {None: function(*arguments)}

    def once(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """See `Pool`."""
        return self._pool.submit(function, *arguments).result()

    def close(self) -> None:
        """See `Pool`."""
        self._pool.shutdown(wait=True, cancel_futures=True)


class Cluster:
    """Workers of a Dask cluster."""

    # A worker cannot compute another block of a Dask array by itself.
    can_reread = False

    def __init__(self, client: Any) -> None:
        self._client = client
        self.size = max(1, sum(client.nthreads().values()))
        self._mailbox = parcels.Mailbox()
        # Whether workers see this process's shared memory, as far as is known.
        self._shares = True
        self._sent: dict[str, _Sent] = {}

    def close(self) -> None:
        """See `Pool`."""
        self._mailbox.close()

    def result(self, future: Any) -> Visit:
        """See `Pool`."""
        visit: Visit | None = future.result()
        if visit is None:
            visit = self._submit_again(self._sent[future.key])
        visit.value = self._mailbox.open(visit.value)
        return visit

    def rows_result(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """See `Pool`."""
        shared = self._mailbox.array(shape, dtype)
        if shared is None:
            return np.empty(shape, dtype), None
        return shared.map(), shared

    def submit(self, source: BlockSource, span: Span, task: SpanTask, keep: bool) -> Any:
        """See `Pool`."""
        blocks: list[Any] = []
        light: Any = source
        if isinstance(source, DaskBlocks):
            bounds = span.bounds
            blocks = self._client.compute(
                [source.block(bounds[i], bounds[i + 1]) for i in range(span.n_blocks)]
            )
            light = _Shape(source.shape)
        sent = _Sent(keep, light, span, task, blocks)
        if self._shares:
            sent.parcel = self._mailbox.send(task)
        future = self._submit(sent)
        self._sent[future.key] = sent
        return future

    def _submit(self, sent: _Sent) -> Any:
        task = sent.task
        return self._client.submit(
            run_span_alone,
            self._mailbox.address,
            sent.keep,
            sent.source,
            sent.span,
            task if sent.parcel is None else sent.parcel,
            *sent.blocks,
            pure=False,
            workers=[task.prefer] if task.prefer else None,
            allow_other_workers=task.prefer is not None,
        )

    def _submit_again(self, sent: _Sent) -> Visit:
        """Run a task whose worker is on another machine than this process."""
        self._shares = False
        self._mailbox.discard(sent.parcel)
        sent.parcel = None
        future = self._submit(sent)
        visit: Visit = future.result()
        return visit

    def everywhere(
        self, function: Callable[..., Any], *arguments: Any
    ) -> dict[str | None, Any]:
        """See `Pool`."""
        found: dict[str | None, Any] = self._client.run(function, *arguments)
        return found

    def once(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """See `Pool`."""
        # Always the same worker: what the first call loads, the second finds.
        worker = min(self._client.nthreads())
        options = {"pure": False, "workers": [worker], "allow_other_workers": True}
        sent = self._mailbox.send(arguments)
        done, value = self._client.submit(call, function, sent, **options).result()
        self._mailbox.discard(sent)
        if not done:
            done, value = self._client.submit(call, function, arguments, **options).result()
        return value

    def forget(self, future: Any) -> None:
        """See `Pool`."""
        sent = self._sent.pop(future.key, None)
        if not future.done():
            future.cancel()
        future.release()
        if sent is not None:
            self._mailbox.discard(sent.parcel)


@dataclass(frozen=True)
class _Shape:
    """Stands in for a Dask array, whose blocks come with the task."""

    shape: tuple[int, int]
    any_rows: bool = False


@dataclass
class _Sent:
    """What a task is made of, and the parcel that went to its worker."""

    keep: bool
    source: Any
    span: Span
    task: SpanTask
    blocks: list[Any]
    parcel: Any = None


def run_span_alone(
    mailbox: str | None, keep: bool, source: Any, span: Span, sent: Any, *blocks: Any
) -> Visit | None:
    """`run_span` in a worker process; None where the task's parcel is on another machine."""
    from distributed import get_worker

    try:
        task: SpanTask = parcels.unpack_sent(sent)
    except FileNotFoundError:
        return None
    with _settled(on_gpu(source)):
        visit = run_span(source, span, task, *blocks, keep=keep)
    watch = Watch()
    visit.value = parcels.pack(visit.value, mailbox)
    watch.lap("packing")
    visit.seconds |= watch.seconds
    visit.where = get_worker().address
    return visit


def call(function: Callable[..., Any], sent: Any) -> tuple[bool, Any]:
    """Call a function with what was sent; whether that was there, and what it returned."""
    try:
        arguments = parcels.unpack_sent(sent)
    except FileNotFoundError:
        return False, None
    return True, function(*arguments)


def _settled(gpu: bool) -> contextlib.AbstractContextManager[Any]:
    """Make this process fit for a task."""
    if not gpu:
        return threadpool_limits(1)
    # Threads that feed a GPU give the GIL back all the time, and want it back soon.
    sys.setswitchinterval(_SWITCH_SECONDS)
    return contextlib.nullcontext()


def current_client(stack: contextlib.ExitStack) -> Any:
    """Find the Dask client to use; inside a worker's task, one that gives its thread free.

    A client within whose ``with`` block we are comes first, then the latest one made; one that
    is closed, or not connected, never.
    """
    if "distributed" not in sys.modules:
        # Nobody can have made a client.
        return None
    from distributed import Client, get_worker, worker_client

    try:
        get_worker()
    except ValueError:
        return _running(Client.current) or contextvars.Context().run(_running, Client.current)
    return stack.enter_context(worker_client())


def _running(find: Callable[[], Any]) -> Any:
    """Find a client, if there is one that can run tasks: one that was closed may be current."""
    try:
        client = find()
    except ValueError:
        return None
    return client if client.status == "running" else None

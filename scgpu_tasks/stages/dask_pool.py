"""Tasks on the workers of a Dask cluster, and what is done where workers fail.

Dask runs a task again elsewhere when its worker dies, a few times. Beyond that a block is tried
once more in small parts, in case it was too large for every worker; then the run ends with an
error that names it. A cluster on which nothing can run any more is an error too, so that nobody
waits for ever; and a stage that nobody waits for stops.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from scgpu_tasks.errors import ClusterError, ScgpuError
from scgpu_tasks.kernels.blas import one_thread
from scgpu_tasks.stages import parcels
from scgpu_tasks.stages.host_memory import current_worker
from scgpu_tasks.stages.short_memory import trim
from scgpu_tasks.stages.sources import BlockSource, DaskBlocks
from scgpu_tasks.stages.spans import Span, SpanTask, Visit, on_gpu, run_span
from scgpu_tasks.stages.timing import Watch

logger = logging.getLogger(__name__)

_SWITCH_SECONDS = 2e-4
# How often a wait for a result is interrupted to see whether it still makes sense, and how
# often the workers are asked for.
_LOOK_SECONDS, _ASK_SECONDS = 1.0, 5.0
# How long all workers may be gone, or paused for lack of memory, before a run is given up.
_PATIENCE_SECONDS = 60.0
# Parts into which blocks are cut that every worker died of.
_PARTS = 8


class Cluster:
    """Workers of a Dask cluster; a `scgpu_tasks.stages.pools.Pool`."""

    # A worker cannot compute another block of a Dask array by itself.
    can_reread = False

    def __init__(self, client: Any) -> None:
        self._client = client
        self._own = OwnTask()
        threads = client.nthreads()
        self.size = max(1, sum(threads.values()))
        self._seen = set(threads)
        self._mailbox = parcels.Mailbox()
        # Whether workers see this process's shared memory, as far as is known.
        self._shares = True
        self._sent: dict[str, _Sent] = {}
        self._rows: dict[str, str] = {}
        self._ask_at = 0.0
        self._stuck_since: float | None = None

    def close(self) -> None:
        """See `Pool`."""
        self._mailbox.close()

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
        sent.future = self._client.submit(
            run_span_alone,
            self._mailbox.address,
            sent.keep,
            sent.parts,
            sent.source,
            sent.span,
            task if sent.parcel is None else sent.parcel,
            *sent.blocks,
            pure=False,
            workers=[task.prefer] if task.prefer else None,
            allow_other_workers=task.prefer is not None,
        )
        self._rows[sent.future.key] = f"{sent.span.start}:{sent.span.stop}"
        return sent.future

    def result(self, future: Any) -> Visit:
        """See `Pool`."""
        sent = self._sent[future.key]
        visit = self._visit(sent)
        if visit is None:
            # Its worker is on another machine than this process.
            self._shares = False
            self._mailbox.discard(sent.parcel)
            sent.parcel = None
            self._submit(sent)
            visit = self._visit(sent)
        if visit is None:
            msg = f"rows {sent.span.start}:{sent.span.stop} came back without a result"
            raise ClusterError(msg)
        visit.value = self._mailbox.open(visit.value)
        return visit

    def _visit(self, sent: _Sent) -> Visit | None:
        from distributed import KilledWorker

        visit: Visit | None
        try:
            visit = self._wait(sent.future)
        except KilledWorker as error:
            rows = f"rows {sent.span.start}:{sent.span.stop} of the matrix"
            if sent.parts > 1:
                msg = (
                    f"every worker that worked on {rows} died, also on small parts of them. "
                    "Most often that is the memory: run fewer workers, which have more each "
                    "(workers=), or raise memory_limit=; the logs of the workers say more. "
                    f"Dask says: {error}"
                )
                raise ClusterError(msg) from error
            logger.warning("workers died over %s; trying small parts of them", rows)
            sent.parts = _PARTS
            self._submit(sent)
            visit = self._visit(sent)
        return visit

    def _wait(self, future: Any) -> Any:
        """Wait for a result for as long as somebody wants it, and somebody can make it."""
        while True:
            try:
                found = future.result(timeout=_LOOK_SECONDS)
            except TimeoutError:
                if future.done():
                    # It may be the task's own error.
                    return future.result()
                self._look()
            except CancelledError as error:
                msg = (
                    "the Dask scheduler dropped the work of this run: somebody cancelled it "
                    f"or restarted the cluster, or the connection was lost ({error})"
                )
                raise ClusterError(msg) from error
            else:
                self._stuck_since = None
                return found

    def _look(self) -> None:
        if self._own.dropped():
            msg = "nobody waits for this stage any more: its run was cancelled"
            raise ClusterError(msg)
        now = time.monotonic()
        if now < self._ask_at:
            return
        self._ask_at = now + _ASK_SECONDS
        try:
            workers = self._client.scheduler_info(n_workers=-1)["workers"]
        except OSError as error:
            msg = f"the connection to the Dask scheduler is lost: {error}"
            raise ClusterError(msg) from error
        self._seen |= set(workers)
        if any(worker["status"] != "paused" for worker in workers.values()):
            self._stuck_since = None
        elif self._stuck_since is None:
            self._stuck_since = now
            self.everywhere(trim)
        elif now - self._stuck_since > _PATIENCE_SECONDS:
            raise ClusterError(_why_stuck(workers))

    def lost_workers(self) -> list[dict[str, Any]]:
        """See `Pool`."""
        gone = self._seen - set(self._client.nthreads())
        if not gone:
            return []
        lost = []
        for _, event in self._client.get_events("all"):
            if (
                isinstance(event, dict)
                and event.get("action") == "remove-worker"
                and event.get("worker") in gone
                and not event.get("expected")
            ):
                keys = event.get("processing-tasks", ())
                rows = sorted(self._rows[key] for key in keys if key in self._rows)
                lost.append({"worker": event["worker"], "rows_again": rows})
        return lost

    def array(self, shape: tuple[int, ...], dtype: Any) -> parcels.RowTarget:
        """See `Pool`."""
        shared = self._mailbox.array(shape, dtype)
        return parcels.LocalArray(np.empty(shape, dtype)) if shared is None else shared

    def reach(self, home: parcels.RowTarget) -> parcels.RowTarget | None:
        """See `Pool`."""
        return self._mailbox.reach(home)

    def everywhere(
        self, function: Callable[..., Any], *arguments: Any
    ) -> dict[str | None, Any]:
        """See `Pool`."""
        answers: dict[str | None, Any] = self._client.run(
            function, *arguments, on_error="return"
        )
        found = {}
        for where, answer in answers.items():
            if isinstance(answer, OSError) and not isinstance(answer, ScgpuError):
                # Died, or out of reach; its blocks go to others.
                logger.warning("the worker at %s does not answer: %s", where, answer)
            elif isinstance(answer, Exception):
                raise answer
            else:
                found[where] = answer
        return found

    def once(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """See `Pool`."""
        # Always the same worker: what the first call loads, the second finds.
        worker = min(self._client.nthreads(), default=None)
        where = {} if worker is None else {"workers": [worker], "allow_other_workers": True}
        sent = self._mailbox.send(arguments)
        done, value = self._wait(self._client.submit(call, function, sent, pure=False, **where))
        self._mailbox.discard(sent)
        if not done:
            done, value = self._wait(
                self._client.submit(call, function, arguments, pure=False, **where)
            )
        return value

    def forget(self, future: Any) -> None:
        """See `Pool`."""
        sent = self._sent.pop(future.key, None)
        for one in {id(f): f for f in (future, sent.future if sent else future)}.values():
            if not one.done():
                one.cancel()
            one.release()
        if sent is not None:
            self._mailbox.discard(sent.parcel)


class OwnTask:
    """The Dask task that this thread runs, if it runs one."""

    def __init__(self) -> None:
        self._worker = current_worker()
        self._key: Any = None
        if self._worker is not None:
            self._key = self._worker.get_current_task()

    def dropped(self) -> bool:
        """Tell whether nobody waits for the task any more; its thread runs on all the same."""
        if self._worker is None:
            return False
        task = self._worker.state.tasks.get(self._key)
        return task is None or task.state in ("cancelled", "released", "forgotten")

    def require(self) -> None:
        """Stop where nobody waits any more.

        Raises
        ------
        ClusterError
            Nobody does.
        """
        if self.dropped():
            msg = "nobody waits for this task any more"
            raise ClusterError(msg)


@dataclass(frozen=True)
class _Shape:
    """Stands in for a Dask array, whose blocks come with the task."""

    shape: tuple[int, int]
    any_rows: bool = False


@dataclass
class _Sent:
    """What a task is made of, its future, and the parcel that went to its worker."""

    keep: bool
    source: Any
    span: Span
    task: SpanTask
    blocks: list[Any]
    parcel: Any = None
    parts: int = 1
    future: Any = None


def run_span_alone(
    mailbox: str | None,
    keep: bool,
    parts: int,
    source: Any,
    span: Span,
    sent: Any,
    *blocks: Any,
) -> Visit | None:
    """`run_span` in a worker process; None where the task's parcel is on another machine."""
    try:
        task: SpanTask = parcels.unpack_sent(sent)
    except FileNotFoundError:
        return None
    own, where = OwnTask(), current_worker().address
    try:
        with _settled(on_gpu(source)):
            visit = run_span(
                source, span, task, *blocks, keep=keep, parts=parts, check=own.require
            )
    except Exception as error:
        error.add_note(f"on the worker at {where}")
        raise
    watch = Watch()
    visit.value = parcels.pack(visit.value, mailbox)
    watch.lap("packing")
    visit.seconds |= watch.seconds
    visit.where = where
    return visit


def call(function: Callable[..., Any], sent: Any) -> tuple[bool, Any]:
    """Call a function with what was sent; whether that was there, and what it returned."""
    try:
        arguments = parcels.unpack_sent(sent)
    except FileNotFoundError:
        return False, None
    return True, function(*arguments)


def _settled(gpu: bool) -> AbstractContextManager[Any]:
    """Make this process fit for a task."""
    if not gpu:
        return one_thread()
    # Threads that feed a GPU give the GIL back all the time, and want it back soon.
    sys.setswitchinterval(_SWITCH_SECONDS)
    return nullcontext()


def _why_stuck(workers: dict[str, Any]) -> str:
    if not workers:
        return (
            f"the Dask cluster has had no worker for {_PATIENCE_SECONDS:.0f} s: they died and "
            "nobody starts them again; the logs of the workers say why"
        )
    used = ", ".join(
        f"{address} ({worker['metrics'].get('memory', 0) / 2**30:.1f} of "
        f"{(worker['memory_limit'] or 0) / 2**30:.1f} GiB)"
        for address, worker in workers.items()
    )
    return (
        f"all Dask workers have been paused for {_PATIENCE_SECONDS:.0f} s because their memory "
        f"is nearly full: {used}. Run fewer workers, which have more each (workers=), raise "
        "memory_limit=, or free what else the workers hold"
    )

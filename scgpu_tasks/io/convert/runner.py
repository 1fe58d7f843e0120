"""Run the parts of a conversion on threads of this process, or on a Dask cluster."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

from scgpu_tasks.errors import ClusterError
from scgpu_tasks.io.clients import current_client
from scgpu_tasks.io.convert.gpu_compress import SLABS
from scgpu_tasks.io.convert.memory import threads_within
from scgpu_tasks.io.convert.progress import Job
from scgpu_tasks.io.convert.team import Team, Written
from scgpu_tasks.io.convert.worker import Worker, forget, remote


class Runner:
    """Applies a method of `Worker` to many jobs; use it in a ``with`` statement.

    Parameters
    ----------
    worker
        This process's worker.
    threads
        Number of threads, or fewer where so many would take too much memory; None: the current
        Dask client if there is one, else a thread for each processor.
    """

    def __init__(self, worker: Worker, threads: int | None) -> None:
        self.worker = worker
        self._threads = threads or default_threads()
        self._ask_client = threads is None
        self._client: Any = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Runner:
        if self._ask_client and worker_can_travel(self.worker):
            self._client = current_client(self._stack)
            if self._client is not None:
                self._stack.callback(self._close_sources)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
        self.worker.free()

    def _close_sources(self) -> None:
        """Have the Dask workers close what they opened for this conversion."""
        # A cluster that has gone has nothing open, and must not hide why.
        with contextlib.suppress(OSError, TimeoutError):
            self._client.run(forget, self.worker.task, on_error="ignore")

    def map(self, method: str, jobs: Sequence[Any], stage: str) -> Iterator[tuple[Any, Any]]:
        """Yield each job and what the method made of it, as they end.

        The first error stops the rest. `stage` names what has been prepared so far.
        """
        if self._client is not None:
            return self._on_cluster(method, jobs, stage)
        threads = threads_within(self.worker.values, method, self._threads)
        return self._on_threads(method, jobs, threads)

    @property
    def on_cluster(self) -> bool:
        """Whether other processes do the work."""
        return self._client is not None

    @contextmanager
    def writing(self, jobs: Sequence[Job], stage: str) -> Iterator[Written]:
        """Have files written from here on; yields an iterator of what is complete.

        Leaving the block stops what is not.
        """
        if self._client is not None:
            yield self._on_cluster("write", jobs, stage)
            return
        threads = threads_within(self.worker.values, "write", self._threads)
        files = SLABS if self.worker.slabs is not None else None
        worker = self.worker
        with Team(worker.begin, threads, worker.described.set, files).running(jobs) as written:
            yield written

    def _on_threads(
        self, method: str, jobs: Sequence[Any], threads: int
    ) -> Iterator[tuple[Any, Any]]:
        stop = threading.Event()
        function = getattr(self.worker, method)

        def guarded(job: Any) -> tuple[bool, Any]:
            return (False, None) if stop.is_set() else (True, function(job))

        with ThreadPoolExecutor(threads, thread_name_prefix="convert") as pool:
            pending: dict[Future[tuple[bool, Any]], Any] = {}
            queue = iter(jobs)
            try:
                while True:
                    while len(pending) < 2 * threads:
                        job = next(queue, None)
                        if job is None:
                            break
                        pending[pool.submit(guarded, job)] = job
                    if not pending:
                        return
                    done, _ = wait(pending, return_when=FIRST_COMPLETED)
                    for future in done:
                        job = pending.pop(future)
                        ran, result = future.result()
                        if ran:
                            yield job, result
            finally:
                stop.set()

    def _on_cluster(
        self, method: str, jobs: Sequence[Any], stage: str
    ) -> Iterator[tuple[Any, Any]]:
        from distributed import as_completed
        from distributed.scheduler import KilledWorker

        task = self.worker.task
        futures = {
            self._client.submit(remote, task, stage, method, job, pure=False): job
            for job in jobs
        }
        try:
            for future in as_completed(list(futures)):
                try:
                    result = future.result()
                except KilledWorker as error:
                    msg = (
                        f"a Dask worker died several times over {futures[future]}; give the "
                        "workers more memory, and run the same command again"
                    )
                    raise ClusterError(msg) from error
                yield futures.pop(future), result
        finally:
            if futures:
                self._client.cancel(list(futures))


def worker_can_travel(worker: Worker) -> bool:
    """Whether other processes can open the same source and work folder."""
    return not worker.source.path.startswith("memory://")


def default_threads() -> int:
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

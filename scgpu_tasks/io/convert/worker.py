"""One process's share of a conversion: rearrange rows, write files, compare them."""

from __future__ import annotations

import threading
import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from scgpu_tasks.errors import ClusterError
from scgpu_tasks.io.convert import sorting
from scgpu_tasks.io.convert.filework import FileWork
from scgpu_tasks.io.convert.gpu_compress import Slabs
from scgpu_tasks.io.convert.options import ConvertSpec
from scgpu_tasks.io.convert.plan import Plan, make_plan
from scgpu_tasks.io.convert.prepared import Prepared
from scgpu_tasks.io.convert.progress import Job
from scgpu_tasks.io.convert.rearrange import row_blocks
from scgpu_tasks.io.convert.values import Values
from scgpu_tasks.io.source import Source, open_source


@dataclass(frozen=True)
class Task:
    """All that a process must know to take part; picklable.

    Attributes
    ----------
    source
        Path or URL of the source.
    root
        The work folder.
    spec
        Options.
    verify
        Compare each file with the source.
    stamp
        Of the source's content when the conversion began.
    gpu
        Compress large files on the process's GPU.
    run
        Differs between any two conversions.
    """

    source: str
    root: str
    spec: ConvertSpec
    verify: bool
    stamp: str
    gpu: bool = False
    run: str = field(default_factory=lambda: uuid.uuid4().hex)


class Worker:
    """Does parts of a conversion; threads share it.

    Parameters
    ----------
    task
        What is converted into what.
    source, plan
        The open source, and what it becomes; by default it is opened and planned here.
    """

    def __init__(
        self, task: Task, source: Source | None = None, plan: Plan | None = None
    ) -> None:
        self.task = task
        self.source = open_source(task.source) if source is None else source
        root = Path(task.root)
        self.store, self.scratch = root / "store", root / "scratch"
        plan = make_plan(self.source, task.spec) if plan is None else plan
        self.values = Values(self.source, plan, Prepared(root / "prepared"), self.scratch)
        self.values.update_plan()
        self.slabs = Slabs() if task.gpu else None
        # Whether the metadata of all arrays are in the store, so that they can be read back.
        self.described = threading.Event()
        self.described.set()

    def begin(self, job: Job) -> FileWork:
        """Open the work on one file."""
        task = self.task
        described = self.described if task.verify else None
        return FileWork(
            self.values, self.store, self.scratch, job, task.spec.level, self.slabs, described
        )

    def free(self) -> None:
        """Give back what is kept for one file after another; no job may be running."""
        if self.slabs is not None:
            self.slabs.free()

    def write(self, job: Job) -> dict[str, Any]:
        """Write one file, read it back and compare it.

        Returns
        -------
        The line for the journal.
        """
        return self.begin(job).run()

    def make_run(self, job: tuple[str, int]) -> None:
        """Sort one run of columns by row."""
        self.values.transposition(job[0]).make_run(job[1])

    def make_band(self, job: tuple[str, int]) -> None:
        """Gather one band of rows."""
        self.values.transposition(job[0]).make_band(job[1])

    def count_distinct(self, job: tuple[str, int]) -> np.ndarray:
        """Count the distinct entries of each row of one block of rows."""
        stored = self.values.stored_rows(job[0])
        a, b = list(row_blocks(stored.indptr, 0, len(stored.indptr) - 1))[job[1]]
        low, high = int(stored.indptr[a]), int(stored.indptr[b])
        indptr = np.asarray(stored.indptr[a : b + 1]) - low
        return sorting.count_distinct(indptr, stored.indices(low, high))


@dataclass
class _Held:
    """A worker that this process keeps open, and how many jobs are using it now."""

    worker: Worker
    stage: str
    users: int = 0
    retired: bool = False


class _Workers:
    """Workers of the conversions that this process takes part in.

    A source stays open from one job to the next, but not beyond its conversion, and is closed
    when no job reads it any more.
    """

    # More than one: conversions on one cluster may take turns. A driver that died forgets none.
    LIMIT = 4
    # Conversions that have ended, by their run; jobs of older ones have long left every queue.
    ENDED = 1000

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[Task, _Held] = {}
        self._ended: deque[str] = deque(maxlen=self.ENDED)

    def sources(self) -> list[str]:
        """Paths of the sources that are kept open."""
        with self._lock:
            return [task.source for task in self._held]

    @contextmanager
    def use(self, task: Task, stage: str) -> Iterator[Worker]:
        """Worker of a conversion at a stage, opened where it is not.

        Raises
        ------
        ClusterError
            The conversion has ended. A job that was queued then must neither keep the source
            open nor write into a folder that may be the next conversion's.
        """
        with self._lock:
            if task.run in self._ended:
                msg = f"the conversion of {task.source} has ended; there is nothing left to do"
                raise ClusterError(msg)
            held = self._held.get(task)
            if held is None or held.stage != stage:
                opened = _Held(Worker(task), stage)
                self._retire(task)
                self._held[task] = held = opened
                for oldest in list(self._held)[: -self.LIMIT]:
                    self._retire(oldest)
            held.users += 1
        try:
            yield held.worker
        finally:
            with self._lock:
                held.users -= 1
                _close_unused(held)

    def forget(self, task: Task) -> None:
        """Close what a conversion that has ended opened here; its jobs are refused now."""
        with self._lock:
            self._ended.append(task.run)
            self._retire(task)

    def _retire(self, task: Task) -> None:
        held = self._held.pop(task, None)
        if held is not None:
            held.retired = True
            _close_unused(held)


def _close_unused(held: _Held) -> None:
    if held.retired and not held.users:
        held.worker.source.close()
        held.worker.free()


workers = _Workers()


def remote(task: Task, stage: str, method: str, job: Any) -> Any:
    """Run a method of this process's worker; called on a Dask worker.

    `stage` changes when what was prepared has changed, so that the worker looks again.
    """
    with workers.use(task, stage) as worker:
        return getattr(worker, method)(job)


def forget(task: Task) -> None:
    """Close what a conversion opened in this process; called on each Dask worker at its end."""
    workers.forget(task)

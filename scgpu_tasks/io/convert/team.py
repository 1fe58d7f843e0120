"""Threads that write files together: those with none left to begin help with the others'."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

from scgpu_tasks.io.convert.filework import FileWork
from scgpu_tasks.io.convert.progress import Job

Written = Iterator[tuple[Job, dict[str, Any]]]
"""Files and their lines for the journal."""


class Team:
    """Writes files on threads of this process.

    Parameters
    ----------
    begin
        Opens the work on a file; called in the thread that begins with it.
    threads
        Number of them.
    release
        Ends what the threads may wait for outside of here; called when they are to stop.
    files
        Most files to write at the same time; None: one for each thread.
    """

    def __init__(
        self,
        begin: Callable[[Job], FileWork],
        threads: int,
        release: Callable[[], None],
        files: int | None = None,
    ) -> None:
        self._begin, self._threads, self._files = begin, threads, files or threads
        self._release = release
        self._beginning = 0
        self._changed = threading.Condition()
        self._queue: deque[Job] = deque()
        self._active: list[FileWork] = []
        self._unfinished = 0
        self._stopped = False
        self._ended: SimpleQueue[FileWork | BaseException] = SimpleQueue()

    @contextmanager
    def running(self, jobs: Sequence[Job]) -> Iterator[Written]:
        """Have the files written from here on; the threads end with the block.

        Yields
        ------
        An iterator of each file and its line for the journal, as they are complete. It raises
        the first error.
        """
        self._queue, self._unfinished = deque(jobs), len(jobs)
        try:
            with ThreadPoolExecutor(self._threads, thread_name_prefix="convert") as pool:
                try:
                    for _ in range(self._threads):
                        pool.submit(self._work)
                    yield self._results(len(jobs))
                finally:
                    self._stop()
        finally:
            for work in self._active:
                work.abort()

    def _results(self, n: int) -> Written:
        for _ in range(n):
            ended = self._ended.get()
            if isinstance(ended, BaseException):
                raise ended
            yield ended.job, ended.line

    def _stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._release()

    def _work(self) -> None:
        mine: FileWork | None = None
        try:
            while (found := self._next(mine)) is not None:
                work, portion = found
                if work is not mine:
                    work.enter()
                    mine = work
                complete = mine.do(portion)
                with self._changed:
                    if complete:
                        self._active.remove(mine)
                        self._unfinished -= 1
                        self._ended.put(mine)
                    self._changed.notify_all()
        # Whatever it is, the thread that waits for this one has to hear of it.
        except BaseException as error:  # noqa: BLE001
            self._ended.put(error)
            self._stop()

    def _next(self, mine: FileWork | None) -> tuple[FileWork, range] | None:
        """Find something to do: on the file at hand, on a new one, on somebody else's."""
        while True:
            with self._changed:
                job = None
                while job is None:
                    if self._stopped or not self._unfinished:
                        return None
                    writing = self._beginning + sum(w.is_writing for w in self._active)
                    may_begin = bool(self._queue) and writing < self._files
                    others = [] if may_begin else self._active
                    for work in ([mine] if mine else []) + others:
                        if (portion := work.claim()) is not None:
                            return work, portion
                    if may_begin:
                        job = self._queue.popleft()
                        self._beginning += 1
                    else:
                        self._changed.wait()
            mine = self._begin(job)
            with self._changed:
                self._beginning -= 1
                self._active.append(mine)
                self._changed.notify_all()

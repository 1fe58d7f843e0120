"""One file of a conversion: its pieces are written, then compared, by one thread or several."""

from __future__ import annotations

import dataclasses
import threading
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from scgpu_tasks.errors import ScgpuError
from scgpu_tasks.io.convert.encode import FileWriter, GpuFileWriter
from scgpu_tasks.io.convert.gpu_compress import Slabs, suits
from scgpu_tasks.io.convert.progress import Job
from scgpu_tasks.io.convert.values import Values
from scgpu_tasks.io.convert.verify import FileCheck
from scgpu_tasks.io.output import write_error

# Pieces that a thread takes at a time. Two threads that take turns decode the source's chunk at
# the border of what they took twice.
_PORTION = 4


class FileWork:
    """One file to write, read back and compare.

    Parameters
    ----------
    values
        Where its rows come from.
    store, scratch
        Folder of the store, and for files that are not complete.
    level
        Of zstd.
    slabs
        For files that a GPU compresses; None: it compresses none.
    described
        Set once the file can be read back, to be compared with the source; None: it is not.
    """

    def __init__(
        self,
        values: Values,
        store: Path,
        scratch: Path,
        job: Job,
        level: int,
        slabs: Slabs | None,
        described: threading.Event | None,
    ) -> None:
        self.job = job
        self._values, self._store, self._described = values, store, described
        self._target = store / job.key
        item, rows = values.plan.array(job.path), values.rows(job.path)
        try:
            scratch.mkdir(exist_ok=True)
            make: Callable[..., FileWriter] = FileWriter
            if slabs is not None and suits(item.layout):
                make = partial(GpuFileWriter, slabs)
            self._writer = make(
                self._target,
                scratch / uuid.uuid4().hex,
                item.layout,
                job.coords,
                level,
                rows,
                numbers=item.numbers,
            )
        except OSError as error:
            raise write_error(error, self._target) from error
        self._pieces = self._writer.pieces
        self._lock = threading.Lock()
        self._check: FileCheck | None = None
        self._next = 0
        self._left = len(self._pieces)
        self._line: dict[str, Any] = {}

    @property
    def line(self) -> dict[str, Any]:
        """What the journal is to say of the complete file."""
        return {"key": self.job.key, "verified": self._described is not None} | self._line

    @property
    def is_writing(self) -> bool:
        """Whether it is not written yet."""
        return not self._line

    def claim(self) -> range | None:
        """Take the next pieces that nobody works on; None where there are none now."""
        with self._lock:
            start, n = self._next, len(self._pieces)
            waiting = 0 if self._check else start - self._writer.written
            if start == n or waiting > self._writer.most_waiting:
                return None
            self._next = min(start + _PORTION, n)
            return range(start, self._next)

    def enter(self) -> None:
        """Tell that this thread goes over to this file, so that it keeps nothing of another."""
        self._values.release()

    def do(self, portion: range) -> bool:
        """Write or compare pieces that were claimed.

        Returns
        -------
        Whether the file is complete, and compared, now.
        """
        check = self._check
        if check is not None:
            for number in portion:
                check(*self._pieces[number])
            with self._lock:
                self._left -= len(portion)
                return not self._left
        try:
            last = False
            for number in portion:
                last = self._writer.write(number)
            if not last:
                return False
            self._line = dataclasses.asdict(self._writer.finish())
        except ScgpuError:
            raise
        except OSError as error:
            raise write_error(error, self._target) from error
        if self._described is None:
            return True
        self._described.wait()
        check = FileCheck(self._values, self._store, self.job)
        with self._lock:
            self._check, self._next = check, 0
        return False

    def run(self) -> dict[str, Any]:
        """Do all of it in this thread.

        Returns
        -------
        The line for the journal.
        """
        self.enter()
        try:
            while not self.do(self.claim() or range(0)):
                pass
        except BaseException:
            self.abort()
            raise
        return self.line

    def abort(self) -> None:
        """Remove what is not complete."""
        self._writer.abort()

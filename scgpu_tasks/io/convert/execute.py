"""Write and verify the files of a store, on threads or on a Dask cluster."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from scgpu_tasks.errors import CorruptChunkError, OutputError, ScgpuError
from scgpu_tasks.io.arrays import attach_pipeline, host_pipeline
from scgpu_tasks.io.convert.encode import pieces, write_file
from scgpu_tasks.io.convert.layout import Layout
from scgpu_tasks.io.convert.values import Values

Coords = tuple[int, ...]


@dataclass(frozen=True)
class Progress:
    """How far a conversion is.

    Attributes
    ----------
    done_bytes, total_bytes
        Decoded bytes of the arrays written (and verified) so far, and of all.
    done_shards, total_shards
        Files likewise.
    rate
        Bytes per second of this run; 0 before the first shard.
    seconds_left
        Estimate; None before the first shard.
    """

    done_bytes: int
    total_bytes: int
    done_shards: int
    total_shards: int
    rate: float
    seconds_left: float | None


@dataclass(frozen=True)
class Job:
    """One file to write: array and place in its grid of files."""

    path: str
    coords: Coords
    nbytes: int

    @property
    def key(self) -> str:
        """Key of the file in the store."""
        return "/".join([self.path, "c", *map(str, self.coords)])


def all_jobs(values: Values) -> list[Job]:
    """Every file of every array, in the order of the plan."""
    return [
        Job(item.path, coords, item.layout.file_bytes(coords))
        for item in values.plan.arrays
        for coords in item.layout.files()
    ]


def do_job(
    values: Values, store: Path, scratch: Path, job: Job, *, level: int, verify: bool
) -> dict[str, Any]:
    """Write one file, read it back and compare it.

    Returns
    -------
    The line for the journal.
    """
    item = values.plan.array(job.path)
    rows = values.rows(job.path)
    try:
        written = write_file(store / job.key, scratch, item.layout, job.coords, level, rows)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        if isinstance(error, ScgpuError):
            raise
        raise write_error(error, store / job.key) from error
    if verify:
        verify_file(values, store, job)
    return {
        "key": job.key,
        "size": written.size,
        "crc32c": written.crc32c,
        "decoded": written.decoded,
        "verified": verify,
    }


def write_error(error: OSError, path: Path) -> OutputError:
    """Say why a file could not be written, and what to do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        why = "the disk is full; free some space"
    elif error.errno in (errno.EACCES, errno.EPERM):
        why = "permission denied; give yourself the right to write there"
    elif error.errno == errno.EROFS:
        why = "the file system is read-only; make it writable"
    else:
        why = f"{error.strerror or error}; remove the cause"
    msg = f"cannot write {path}: {why}, and run the same command again: it goes on from here"
    return OutputError(msg)


def verify_file(values: Values, store: Path, job: Job) -> None:
    """Read one file back through zarr and compare every byte with the source.

    Raises
    ------
    CorruptChunkError
        They differ: names the array, shard, chunk, position and both values.
    """
    item = values.plan.array(job.path)
    layout = item.layout
    array: zarr.Array[Any] = zarr.open_array(str(store / job.path), mode="r", zarr_format=3)
    attach_pipeline(array, host_pipeline(array))
    rows = values.rows(job.path)
    box = layout.box(job.coords)
    for start, stop in pieces(layout, box[0].start, box[0].stop):
        want = rows(start, stop)
        try:
            found = np.asarray(array[start:stop])
        except (RuntimeError, ValueError, OSError) as error:
            msg = f"rows {start}:{stop} cannot be read back ({error}); run the conversion again"
            raise CorruptChunkError(
                msg, store=str(store), array=job.path, shard=job.key
            ) from error
        if not same_bytes(want, found):
            raise _difference(want, found, start, layout, store, job)


def same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays are the same to the last bit, so that NaN equals NaN."""
    if a.shape != b.shape or a.dtype.newbyteorder("=") != b.dtype.newbyteorder("="):
        return False
    left, right = np.ascontiguousarray(a), np.ascontiguousarray(b)
    return bool((left.reshape(-1).view(np.uint8) == right.reshape(-1).view(np.uint8)).all())


def _difference(
    want: np.ndarray, found: np.ndarray, start: int, layout: Layout, store: Path, job: Job
) -> CorruptChunkError:
    raw = [np.ascontiguousarray(v).view(f"V{v.dtype.itemsize}") for v in (want, found)]
    place = np.argwhere(raw[0] != raw[1])[0]
    position = (start + int(place[0]), *(int(i) for i in place[1:]))
    chunk = tuple(p // c for p, c in zip(position, layout.chunk, strict=True))
    msg = (
        f"position {', '.join(map(str, position))} holds {found[tuple(place)]!r} instead of "
        f"the source's {want[tuple(place)]!r}; run the conversion again"
    )
    return CorruptChunkError(msg, store=str(store), array=job.path, shard=job.key, chunk=chunk)


class Meter:
    """Counts what is done and calls the caller's progress function."""

    def __init__(
        self, jobs: list[Job], report: Callable[[Progress], None] | None, reused: list[Job]
    ) -> None:
        self._total = sum(job.nbytes for job in jobs)
        self._shards = len(jobs)
        self._before = sum(job.nbytes for job in reused)
        self._done, self._done_shards = self._before, len(reused)
        self._start = time.monotonic()
        self._report = report
        self.tell()

    def add(self, job: Job) -> None:
        """Count a finished file."""
        self._done += job.nbytes
        self._done_shards += 1
        self.tell()

    def tell(self) -> None:
        """Report the current state."""
        if self._report is None:
            return
        new = self._done - self._before
        rate = new / max(time.monotonic() - self._start, 1e-9) if new else 0.0
        left = (self._total - self._done) / rate if rate else None
        self._report(
            Progress(self._done, self._total, self._done_shards, self._shards, rate, left)
        )


def run_threads(
    jobs: list[Job], work: Callable[[Job], dict[str, Any]], workers: int
) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Yield each job with its journal line as it ends; the first error stops the rest."""
    stop = threading.Event()

    def guarded(job: Job) -> dict[str, Any] | None:
        return None if stop.is_set() else work(job)

    with ThreadPoolExecutor(workers, thread_name_prefix="convert") as pool:
        pending: dict[Future[dict[str, Any] | None], Job] = {}
        queue = iter(jobs)
        try:
            while True:
                for job in queue:
                    pending[pool.submit(guarded, job)] = job
                    if len(pending) >= 2 * workers:
                        break
                if not pending:
                    return
                done, _ = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    job = pending.pop(future)
                    line = future.result()
                    if line is not None:
                        yield job, line
        finally:
            stop.set()


def default_workers() -> int:
    """Return the number of processors that this process may use."""
    return (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )

"""Files to write, and how far a conversion is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from scgpu_tasks.io.convert.plan import Plan


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
    coords: tuple[int, ...]
    nbytes: int

    @property
    def key(self) -> str:
        """Key of the file in the store."""
        return "/".join([self.path, "c", *map(str, self.coords)])


def all_jobs(plan: Plan) -> list[Job]:
    """Every file of every array, in the order of the plan."""
    return [
        Job(item.path, coords, item.layout.file_bytes(coords))
        for item in plan.arrays
        for coords in item.layout.files()
    ]


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
        self._tell = report
        self.tell()

    def add(self, job: Job) -> None:
        """Count a finished file."""
        self._done += job.nbytes
        self._done_shards += 1
        self.tell()

    def tell(self) -> None:
        """Report the current state."""
        if self._tell is None:
            return
        new = self._done - self._before
        rate = new / max(time.monotonic() - self._start, 1e-9) if new else 0.0
        left = (self._total - self._done) / rate if rate else None
        self._tell(
            Progress(self._done, self._total, self._done_shards, self._shards, rate, left)
        )

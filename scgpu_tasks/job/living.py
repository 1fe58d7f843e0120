"""Which runs still run: a mark in a record while its process lives, and what to do after.

The mark names the process and is touched again and again. A run whose mark is there but whose
process is gone was killed; of a run on another machine only the mark's age can tell.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from scgpu_tasks.errors import FormatError
from scgpu_tasks.job.owner import has_ended, owner
from scgpu_tasks.records import write_record
from scgpu_tasks.records.content import load_run
from scgpu_tasks.records.listing import Record
from scgpu_tasks.records.run import release_room, write_run

MARK = ".running"
SECONDS_BETWEEN_TOUCHES = 30.0
SILENT_FOR_S = 600.0
"""After so long without a touch a run of another machine counts as killed."""


@contextlib.contextmanager
def marked(folder: Path) -> Iterator[None]:
    """Mark a record as that of a run that goes on, until the block ends."""
    mark, ended = folder / MARK, threading.Event()
    mark.write_text(owner())

    def touch() -> None:
        while not ended.wait(SECONDS_BETWEEN_TOUCHES):
            with contextlib.suppress(OSError):
                os.utime(mark)

    threading.Thread(target=touch, name="scgpu-mark", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        mark.unlink(missing_ok=True)


def was_killed(folder: Path) -> bool:
    """Whether the record's run ended without a word."""
    mark = folder / MARK
    try:
        ended = has_ended(mark.read_text())
        silent = _now_there(folder) - mark.stat().st_mtime
    except FileNotFoundError:
        return False
    return silent > SILENT_FOR_S if ended is None else ended


def sweep(out: Path) -> list[dict[str, Any]]:
    """Bring the records of killed runs up to date.

    Returns
    -------
    The content of each such record's run.json, as it is now.
    """
    found = []
    for mark in out.glob(f"*/{MARK}"):
        folder = mark.parent
        # Somebody else may sweep, or remove records, at the same moment.
        with contextlib.suppress(OSError, FormatError):
            if was_killed(folder):
                found.append(_close(folder))
    return found


def killed_content(folder: Path) -> dict[str, Any]:
    """Content of a killed run's run.json, with how it ended."""
    run = load_run(folder)
    if run["state"] != "running":
        return run
    last = datetime.fromtimestamp((folder / MARK).stat().st_mtime, UTC).astimezone()
    stage = next((n for n, e in run["stages"].items() if e["state"] == "running"), "start")
    if stage != "start":
        run["stages"][stage]["state"] = "failed"
    seconds = last - datetime.fromisoformat(run["start"])
    run |= {
        "state": "killed",
        "end": last.isoformat(timespec="seconds"),
        "seconds": max(0.0, round(seconds.total_seconds(), 3)),
        "error": {
            "stage": stage,
            "type": "Killed",
            "message": "the process of this run ended without a word: it was killed, most "
            "often for lack of memory, or the machine stopped. The next run goes on after the "
            "last finished stage",
        },
    }
    return run


def as_it_is(record: Record) -> Record:
    """Return a record as `sweep` would leave it, without touching it."""
    if record.run["state"] != "running" or not was_killed(record.folder):
        return record
    with contextlib.suppress(OSError, FormatError):
        return replace(record, run=killed_content(record.folder))
    return record


def _close(folder: Path) -> dict[str, Any]:
    run = killed_content(folder)
    release_room(folder)
    # First the part that says so: the rest needs more room on the disk.
    write_run(folder, run)
    write_record(folder, run)
    (folder / MARK).unlink(missing_ok=True)
    return run


def _now_there(folder: Path) -> float:
    """Time by the clock of the file system, which need not be this machine's."""
    probe = folder / f"{MARK}-{os.getpid()}-{threading.get_ident()}-{time.monotonic_ns()}"
    try:
        probe.touch()
        return probe.stat().st_mtime
    except OSError:
        return time.time()
    finally:
        probe.unlink(missing_ok=True)

"""Who writes something: a process, by machine, number and start; and whether it still runs."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import socket
from pathlib import Path

import psutil

_SAME_START = 200  # hundredths of a second


@functools.cache
def machine() -> str:
    """Short name of this boot of this machine, or of this container."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
    with contextlib.suppress(OSError):
        parts.append(str(Path("/proc/self/ns/pid").stat().st_ino))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def owner() -> str:
    """Name of this process: machine, number, start in hundredths of a second."""
    process = psutil.Process()
    return f"{machine()}-{process.pid}-{int(process.create_time() * 100)}"


def has_ended(name: str) -> bool | None:
    """Whether the process that `owner` named has ended; None for one of another machine."""
    where, pid, started, *_ = (*name.split("-"), "", "", "")
    if where != machine() or not (pid.isdigit() and started.isdigit()):
        return None
    try:
        process = psutil.Process(int(pid))
        # A container's first process may never ask how its adopted children ended.
        if process.status() == psutil.STATUS_ZOMBIE:
            return True
        created = process.create_time()
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        return False
    return abs(created * 100 - int(started)) > _SAME_START

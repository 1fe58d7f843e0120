"""Programs that run until they are stopped, and end with this one in whatever way it ends."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None)
_AGAIN = 3.0


class Service:
    """A program, started at once.

    Parameters
    ----------
    name
        For messages.
    command
        Program and arguments.
    environment
        Its environment.
    folder
        Its working directory.
    quiet
        Whether to drop what it prints, save errors.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        *,
        quiet: bool = False,
    ) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if quiet else None,
            # Ctrl-C is for the program that starts the services and stops them in order.
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    def ended(self) -> int | None:
        """Return the exit code of a program that has ended."""
        return self._process.poll()

    def stop(self, patience: float) -> None:
        """End it and all processes that come of it: by SIGTERM, at last by SIGKILL.

        Parameters
        ----------
        patience
            Seconds before SIGKILL.
        """
        family = self._descendants()
        self._process.terminate()
        _end(family, patience)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        self._process.kill()
        self._process.wait()

    def stop_children(self, patience: float) -> None:
        """End the processes that it has started, so that it sees them end.

        Parameters
        ----------
        patience
            Seconds before SIGKILL.
        """
        _end(self._descendants(), patience)

    def _descendants(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []


def adopt_orphans() -> None:
    """Become the parent of what services leave behind when they are killed."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_orphans(services: Sequence[Service], patience: float) -> None:
    """End the processes that services which are gone have left to this one.

    Parameters
    ----------
    services
        Those whose processes are to stay.
    patience
        Seconds before SIGKILL.
    """
    own = {service.pid for service in services}
    orphans = [child for child in psutil.Process().children() if child.pid not in own]
    _end([p for orphan in orphans for p in _family(orphan)], patience)


def _family(process: psutil.Process) -> list[psutil.Process]:
    """Return a process and its descendants."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [process, *process.children(recursive=True)]
    return []


def _end(family: list[psutil.Process], patience: float) -> None:
    """End processes: the outermost are asked, and asked again, then all are killed."""
    deadline = time.monotonic() + patience
    pids = {process.pid for process in family}
    while family and time.monotonic() < deadline:
        # A flow stops its own Dask workers. The exception that SIGTERM raises in it may start
        # where Python drops exceptions, so it is sent again.
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.ppid() not in pids:
                    process.terminate()
        _, family = psutil.wait_procs(family, timeout=_AGAIN)
        pids = {process.pid for process in family}
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(family, timeout=_AGAIN)


def _end_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

"""A Dask cluster as somebody else runs it: a scheduler and workers from their command lines."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


class Theirs:
    """Scheduler and workers, each in a working directory of its own; a context manager.

    Parameters
    ----------
    folder
        Where their directories and logs go.
    options
        Of the scheduler and of all workers.
    environment
        Added to that of this process.
    """

    def __init__(
        self, folder: Path, *options: str, environment: dict[str, str] | None = None
    ) -> None:
        self.folder = folder
        self.options = options
        self.environment = {**os.environ, **(environment or {})}
        self.processes: list[subprocess.Popen[bytes]] = []
        self.workers: list[subprocess.Popen[bytes]] = []
        self._file = folder / "scheduler.json"
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Theirs:
        self._start("scheduler", "--port", "0", "--host", "127.0.0.1", "--no-dashboard")
        deadline = time.monotonic() + 60
        while not self._file.exists():
            assert time.monotonic() < deadline, self.log("scheduler")
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._stack.close()

    @property
    def address(self) -> str:
        """Of the scheduler."""
        return str(json.loads(self._file.read_text())["address"])

    def start_worker(self, *options: str) -> int:
        """Start a worker; returns its process id, which is its nanny's if it has one."""
        name = f"worker{len(self.workers)}"
        process = self._start(name, "--name", name, "--no-dashboard", *options)
        self.workers.append(process)
        return process.pid

    def log(self, name: str) -> str:
        """What a process printed."""
        return (self.folder / name / "log").read_text()

    def _start(self, name: str, *options: str) -> Any:
        folder = self.folder / name
        folder.mkdir()
        kind = "scheduler" if name == "scheduler" else "worker"
        command = [sys.executable, "-m", f"distributed.cli.dask_{kind}", *options]
        command += ["--scheduler-file", str(self._file), *self.options]
        log = self._stack.enter_context((folder / "log").open("wb"))
        process = subprocess.Popen(
            command, cwd=folder, env=self.environment, stdout=log, stderr=log
        )
        self.processes.append(process)
        return process

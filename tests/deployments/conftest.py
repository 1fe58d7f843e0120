"""What `make serve` starts, as a user has it, and every process that comes of it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

ROOT = Path(__file__).parents[2]
TOKEN = "SCGPU_TEST_OPERATOR"
PATIENCE = 240.0
"""Seconds for what takes a few on a machine that does nothing else."""
# So that a test need not wait as long as an operator may.
IMPATIENT = {
    "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "2",
    "PREFECT_SERVER_SERVICES_SCHEDULER_RECENT_DEPLOYMENTS_LOOP_SECONDS": "1",
    "PREFECT_SERVER_DEPLOYMENTS_CONCURRENCY_SLOT_WAIT_SECONDS": "1",
    "PREFECT_WORKER_QUERY_SECONDS": "1",
    "PREFECT_RUNNER_POLL_FREQUENCY": "1",
}

# Set by tests/deployments/postgres.sh, which also has the server ask who is there.
DATABASE = os.environ.get("SCGPU_TEST_DATABASE")
AUTH = ("operator", "secret") if DATABASE else None


def free_port() -> int:
    """Return a port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Operator:
    """Somebody who runs the flows on a server of their own.

    Parameters
    ----------
    folder
        For the server's database, records and stores.
    environment
        Variables to set.
    """

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder
        self.port = free_port()
        self.ui = f"http://127.0.0.1:{self.port}"
        self.token = uuid.uuid4().hex
        clean = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
        home = {"PREFECT_HOME": str(folder / "home"), TOKEN: self.token}
        self.environment = {**clean, **home, **IMPATIENT, **environment}
        if DATABASE and AUTH:
            self.environment["PREFECT_API_DATABASE_CONNECTION_URL"] = DATABASE
            for name in ("PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_AUTH_STRING"):
                self.environment[name] = ":".join(AUTH)
        self.said = folder / "serve.log"
        self._serve: subprocess.Popen[bytes] | None = None

    def serve(self) -> None:
        """Start everything and wait until it is ready."""
        serve = [sys.executable, "-m", "scgpu_tasks.operate.serve", f"--port={self.port}"]
        with self.said.open("wb") as log:
            self._serve = subprocess.Popen(
                [*serve, f"--env-file={self.folder / '.env'}"],
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        self.wait_for(lambda: "Ctrl-C here stops" in self.said.read_text(), PATIENCE, "serving")

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """Send a signal to `serve` and return its exit code."""
        assert self._serve is not None
        if self._serve.poll() is None:
            os.killpg(self._serve.pid, number)
        return self.ended(90)

    def ended(self, seconds: float) -> int:
        """Wait for the end of `serve`, and return its exit code."""
        assert self._serve is not None
        return self._serve.wait(seconds)

    def prefect(
        self, *arguments: str, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Give a command of Prefect in the repository's folder."""
        return subprocess.run(
            [Path(sys.executable).with_name("prefect"), *arguments],
            cwd=ROOT,
            env={**self.environment, "PREFECT_API_URL": f"{self.ui}/api", "COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )

    def api(self, path: str, body: Any) -> Any:
        """Ask the server."""
        for _ in range(10):
            answer = httpx.post(f"{self.ui}/api/{path}", json=body, auth=AUTH, timeout=30)
            # SQLite was busy with something else.
            if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                break
            time.sleep(1)
        answer.raise_for_status()
        return answer.json() if answer.content else None

    def deployment(self, name: str) -> dict[str, Any]:
        """Return what the server knows of FLOW/DEPLOYMENT."""
        answer = httpx.get(f"{self.ui}/api/deployments/name/{name}", auth=AUTH, timeout=30)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def runs(self, flow: str) -> list[dict[str, Any]]:
        """Return the runs of a flow, the latest first."""
        asked = {"flows": {"name": {"any_": [flow]}}, "sort": "EXPECTED_START_TIME_DESC"}
        found: list[dict[str, Any]] = self.api("flow_runs/filter", asked)
        return found

    def run(self, flow_run_id: str) -> dict[str, Any]:
        """Return one run."""
        (found,) = self.api("flow_runs/filter", {"flow_runs": {"id": {"any_": [flow_run_id]}}})
        return dict(found)

    def wait_for(self, happened: Any, seconds: float, what: str) -> Any:
        """Wait until something is true, and return it."""
        deadline = time.monotonic() + seconds
        while not (found := happened()):
            assert time.monotonic() < deadline, f"{what}: not in {seconds} s\n{self.log()}"
            assert self._serve is None or self._serve.poll() is None, self.log()
            time.sleep(0.2)
        return found

    def log(self) -> str:
        """Return the end of what `serve` printed."""
        return self.said.read_text()[-4000:]

    def records(self, out: Path) -> list[dict[str, Any]]:
        """Return all records in a folder."""
        return [json.loads(path.read_text()) for path in out.glob("*/run.json")]

    def processes(self) -> list[psutil.Process]:
        """Return all processes that have come of this object and still run."""
        found = []
        for process in psutil.process_iter():
            try:
                if (
                    process.environ().get(TOKEN) == self.token
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found


@pytest.fixture(scope="module")
def operator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """Somebody for whom everything is started."""
    someone = Operator(tmp_path_factory.mktemp("operator"))
    someone.serve()
    try:
        yield someone
    finally:
        someone.stop()
        for process in someone.processes():
            process.kill()

"""A Prefect server, and the flow on it and on a Dask cluster of one thread."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest

from scgpu_tasks.errors import ScgpuError

FLOW = Path(__file__).parents[2] / "flows" / "qc_pca.py"
TOKEN = "SCGPU_TEST_RUN"
SMALL = {"min_genes": 20, "n_top_genes": 200, "n_comps": 20}


@pytest.fixture(scope="session")
def prefect_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Home of the temporary servers of runs without a server; made once, as a user's is."""
    return tmp_path_factory.mktemp("prefect-home")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a Prefect server; results go to a temporary folder."""
    from prefect.settings import (
        PREFECT_API_URL,
        PREFECT_LOCAL_STORAGE_PATH,
        PREFECT_LOGGING_LEVEL,
        temporary_settings,
    )
    from prefect.testing.utilities import prefect_test_harness

    storage = tmp_path_factory.mktemp("prefect-results")
    with (
        prefect_test_harness(server_startup_timeout=120),
        temporary_settings(
            {PREFECT_LOCAL_STORAGE_PATH: storage, PREFECT_LOGGING_LEVEL: "CRITICAL"}
        ),
    ):
        yield PREFECT_API_URL.value()


class Runs:
    """Runs of the flow that share a folder of records and of finished stages."""

    def __init__(self, out: Path, scheduler: str) -> None:
        self.out = out
        self.scheduler = scheduler
        self.attended = False

    def run(self, store: Path, **parameters: Any) -> dict[str, Any]:
        """Run the flow in this process; return its record."""
        from prefect.flows import load_flow_from_entrypoint

        from scgpu_tasks.flowrun import unattended

        flow = load_flow_from_entrypoint(f"{FLOW}:atlas_qc")
        given = {"scheduler": self.scheduler, "device": "cpu", **SMALL, **parameters}
        # What a server's pages show is tested in test_monitoring.py; drawing it takes time.
        with nullcontext() if self.attended else unattended():
            return flow(store=str(store), out=str(self.out), **given)

    def states(self, store: Path, **parameters: Any) -> dict[str, str]:
        """State of each stage of a run."""
        stages = self.run(store, **parameters)["stages"]
        return {name: entry["state"] for name, entry in stages.items()}

    def failure(self, store: Path, **parameters: Any) -> tuple[ScgpuError, dict[str, Any]]:
        """Error and record of a run that must fail."""
        before = set(self.records())
        with pytest.raises(ScgpuError) as caught:
            self.run(store, **parameters)
        (new,) = set(self.records()) - before
        return caught.value, json.loads((new / "run.json").read_text())

    def records(self) -> list[Path]:
        """Folders of records."""
        return [path.parent for path in self.out.glob("*/run.json")]


@pytest.fixture
def runs(tmp_path: Path, server: str, scheduler: str) -> Runs:
    """Runs in a fresh folder."""
    return Runs(tmp_path / "runs", scheduler)


class CommandLine:
    """The flow as a user starts it from a shell, and every process that comes of it."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.out = folder / "runs"
        self.token = uuid.uuid4().hex
        clean = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
        self.environment = {**clean, TOKEN: self.token, **environment}

    def arguments(self, *options: str) -> list[str]:
        small = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
        return [sys.executable, str(FLOW), "--device=cpu", *small, *options]

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        """Run to the end."""
        return subprocess.run(
            self.arguments(*options),
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def start(self, *options: str) -> subprocess.Popen[str]:
        """Start in a process group of its own, as a shell does."""
        return subprocess.Popen(
            self.arguments(*options),
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )

    def record(self) -> dict[str, Any]:
        """Content of the newest record."""
        newest = max(self.out.glob("*/run.json"), key=lambda path: path.stat().st_mtime_ns)
        content: dict[str, Any] = json.loads(newest.read_text())
        return content

    def states(self) -> dict[str, str]:
        """State of each stage in the newest record."""
        return {name: entry["state"] for name, entry in self.record()["stages"].items()}

    def processes(self) -> list[psutil.Process]:
        """Processes that runs of this object have started, and their descendants."""
        found = []
        for process in psutil.process_iter():
            try:
                ours = process.environ().get(TOKEN) == self.token
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def left_over(self, seconds: float = 20.0) -> list[psutil.Process]:
        """Processes that are still there after a while."""
        deadline = time.monotonic() + seconds
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.1)
        return self.processes()


@pytest.fixture
def shell(tmp_path: Path, prefect_home: Path) -> CommandLine:
    """Command line without a Prefect server."""
    return CommandLine(tmp_path, {"PREFECT_HOME": str(prefect_home)})


@pytest.fixture
def shell_with_server(tmp_path: Path, prefect_home: Path, server: str) -> CommandLine:
    """Command line that finds a Prefect server."""
    return CommandLine(tmp_path, {"PREFECT_HOME": str(prefect_home), "PREFECT_API_URL": server})

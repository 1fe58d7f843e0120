"""The parts of `make serve`: its port, the file that leads to it, and how its services end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from scgpu_tasks.errors import ClusterError
from scgpu_tasks.operate.serve import main, pointed_to, require_free
from scgpu_tasks.operate.services import Service

API = "http://127.0.0.1:4200/api"
# Starts a child like itself, says so, and both wait; where asked to, they do not mind SIGTERM.
STUBBORN = """
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN if sys.argv[1] == "ignore" else signal.SIG_DFL)
if sys.argv[3] == "parent":
    child = subprocess.Popen([sys.executable, "-c", sys.argv[4], *sys.argv[1:3], "child"])
    pathlib.Path(sys.argv[2]).write_text(str(child.pid))
time.sleep(60)
"""


def test_a_taken_port_is_told_with_the_way_to_another(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ClusterError, match=rf"port {port} is taken .*PORT=4201"):
            require_free(port)
        assert main([f"--port={port}"]) == 1
    assert f"error: port {port} is taken" in capsys.readouterr().err


def test_the_file_leads_to_the_server_as_long_as_it_runs(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    for _ in range(2):
        with pointed_to(API, file) as found:
            assert found
            assert f"PREFECT_API_URL={API}" in file.read_text().splitlines()
            left_by_a_kill = file.read_text()
        assert not file.exists()
        file.write_text(left_by_a_kill)


def test_a_file_of_somebody_else_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    file.write_text("SECRET=1\n")
    with pointed_to(API, file) as found:
        assert not found
    assert file.read_text() == "SECRET=1\n"


@pytest.mark.parametrize("manner", ["obey", "ignore"])
def test_a_service_ends_with_all_that_came_of_it(manner: str, tmp_path: Path) -> None:
    told = tmp_path / "child"
    command = [sys.executable, "-c", STUBBORN, manner, str(told), "parent", STUBBORN]
    service = Service("sleeper", command, os.environ, tmp_path)
    deadline = time.monotonic() + 60
    while not (told.exists() and told.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert service.ended() is None
    child = int(told.read_text())
    service.stop(patience=0.5 if manner == "ignore" else 20)
    assert service.ended() is not None
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie"


KILLED = """
import signal, subprocess, sys, time
from pathlib import Path
from scgpu_tasks.operate.services import Service, adopt_orphans, end_orphans
command, told = sys.argv[1:-1], Path(sys.argv[-1])
adopt_orphans()
other = Service("other", ["sleep", "60"], None, told.parent)
service = Service("sleeper", command, None, told.parent)
while not (told.exists() and told.read_text()):
    time.sleep(0.05)
subprocess.run(["kill", "-KILL", str(service.pid)], check=True)
while service.ended() is None:
    time.sleep(0.05)
end_orphans([service, other], patience=5)
print(service.ended(), other.ended())
other.stop(5)
"""


def test_what_a_killed_service_leaves_behind_is_ended(tmp_path: Path) -> None:
    told = tmp_path / "child"
    command = [sys.executable, "-c", STUBBORN, "obey", str(told), "parent", STUBBORN]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, *command, str(told)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.split() == ["-9", "None"]
    assert not psutil.pid_exists(int(told.read_text()))

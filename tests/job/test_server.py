"""The temporary Prefect server of a run without one."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from scgpu_tasks.errors import ClusterError
from scgpu_tasks.job.server import TemporaryServer


def test_a_server_that_cannot_open_its_database_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = sqlite3.connect(tmp_path / "prefect.db")
    database.execute("create table alembic_version (version_num varchar(32) not null)")
    database.execute("insert into alembic_version values ('of-a-newer-one')")
    database.commit()
    database.close()
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    server = TemporaryServer()
    server.start()
    try:
        with pytest.raises(ClusterError) as caught:
            server.wait()
    finally:
        server.stop()
    message = str(caught.value)
    assert "ended with code 3" in message
    assert "of-a-newer-one" in message
    assert f"{tmp_path}/prefect.db" in message


def test_a_process_whose_server_has_gone_ends_at_once(tmp_path: Path) -> None:
    # As Prefect, whose exit handler waits for the server.
    script = """
import atexit, signal, time
from scgpu_tasks.job.server import end_without_server, prefect_api
with prefect_api() as server:
    server.wait()
    end_without_server(1)
    atexit.register(time.sleep, 60)
    server._process.send_signal(signal.SIGKILL)
    server._process.wait()
    print("the last words")
    end_without_server(7)
"""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    done = subprocess.run(
        [sys.executable, "-c", script],
        # The server is on this machine, which no proxy leads to.
        env={
            **environment,
            "PREFECT_HOME": str(tmp_path),
            "HTTP_PROXY": "http://127.0.0.1:9",
            "http_proxy": "http://127.0.0.1:9",
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stdout) == (7, "the last words\n"), done.stderr

"""The temporary Prefect server of a run without one."""

from __future__ import annotations

import sqlite3
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

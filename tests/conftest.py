"""Fixtures that every room's tests share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from scgpu_tasks.datasets import write_synthetic

# Numba compiles a kernel on its first call: no example has a deadline.
settings.register_profile("scgpu", deadline=None, derandomize=True)
settings.load_profile("scgpu")

# Processes inherit what is ignored, as these are where tests are started in the background.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.SIG_DFL)

# Tests start servers of their own; one of the user's is none of their business.
os.environ.pop("PREFECT_API_URL", None)


@pytest.fixture(autouse=True)
def _no_client_of_others(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Clusters of a session stay up: only a test that asks for a client finds it."""
    if "distributed" not in sys.modules or "client" in request.fixturenames:
        yield
        return
    import dask
    from distributed import client

    monkeypatch.setattr(client, "_global_clients", {})
    token = client._current_client.set(None)
    with dask.config.set(scheduler=None):
        yield
    client._current_client.reset(token)


# Somebody else's cluster: no event loop of the test's own process is part of it.
_SCHEDULER = """
import sys
from scgpu_tasks.cluster import make_cluster
with make_cluster("cpu", workers=1, threads=1) as cluster:
    print(cluster.scheduler_address, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="session")
def scheduler() -> Iterator[str]:
    """Address of a running cluster: one worker with one thread."""
    with subprocess.Popen(
        [sys.executable, "-c", _SCHEDULER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address.startswith("tcp://")
        yield address
        process.stdin.close()
        process.wait(60)


@pytest.fixture(scope="session")
def small_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,500 cells × 800 genes, 3 types, 2 batches; several chunks a shard, several shards."""
    path = tmp_path_factory.mktemp("stores") / "small.zarr"
    return write_synthetic(
        path,
        1_500,
        800,
        nnz_per_cell=150,
        n_types=3,
        n_batches=2,
        seed=7,
        chunk_bytes=16 * 1024,
        shard_bytes=128 * 1024,
    )


@pytest.fixture(scope="session")
def medium_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20,000 cells × 5,000 genes, 8 types, 2 batches, the default layout."""
    path = tmp_path_factory.mktemp("stores") / "medium.zarr"
    return write_synthetic(path, 20_000, 5_000, nnz_per_cell=500, n_batches=2, seed=11)

"""Clusters that somebody else runs: joined, fitted out, worked on, and left running."""

from __future__ import annotations

import http.server
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import anndata
import distributed
import pytest

from scgpu_tasks.cluster import (
    cluster_facts,
    connect,
    lost_workers,
    require_reach,
    start_cluster,
    stop_work,
)
from scgpu_tasks.errors import ClusterError, ParameterError
from scgpu_tasks.io.rows import open_rows
from scgpu_tasks.specs import HVGSpec, PCASpec, QCSpec
from scgpu_tasks.stages import dask_pool
from scgpu_tasks.stages.engine import Engine
from scgpu_tasks.stages.pca import run_pca
from scgpu_tasks.stages.qc import run_qc
from tests.stages.test_engine import Totals

from .theirs import Theirs

QC, HVG, PCA = QCSpec(min_genes=20), HVGSpec(n_top_genes=200), PCASpec(n_comps=20)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """One worker with a nanny and a limit, one with neither, in directories of their own."""
    with Theirs(tmp_path_factory.mktemp("theirs")) as cluster:
        cluster.start_worker("--nthreads", "1", "--memory-limit", "2GiB")
        cluster.start_worker("--nthreads", "2", "--memory-limit", "0", "--no-nanny")
        with distributed.Client(cluster.address, set_as_default=False) as client:
            client.wait_for_workers(2, timeout=60)
        yield cluster


def both(store):
    adata = anndata.read_zarr(store)
    source = open_rows(store, chunks=100)
    qc = run_qc(source, adata.obs, adata.var, QC, HVG)
    return qc, run_pca(source, qc.cells, qc.genes, qc.summary["target_sum"], PCA)


def bytes_of(results):
    qc, pca = results
    return qc.genes.to_csv(), qc.cells.to_csv(), pca.X_pca.tobytes(), pca.PCs.tobytes()


def test_workers_get_our_settings_and_what_cannot_be_set_is_said(theirs, caplog):
    with caplog.at_level(logging.INFO), connect(theirs.address) as client:
        found = cluster_facts(client)
    assert found["scheduler"] == theirs.address
    assert (found["device"], found["workers"], found["threads"]) == ("cpu", 2, 3)
    workers = sorted(found["each"].values(), key=lambda worker: worker["threads"])
    assert [worker["memory_limit"] for worker in workers] == [2 * 2**30, None]
    assert {worker["blas_threads"] for worker in workers} == {1}
    (bare,) = [where for where, w in found["each"].items() if w["threads"] == 2]
    assert found["amiss"] == [
        f"it has no memory limit: start it with --memory-limit ({bare})",
        f"no nanny starts it again if it dies: start it without --no-nanny ({bare})",
    ]
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warnings == [f"not set on a worker: {sentence}" for sentence in found["amiss"]]
    assert f"Dask cluster at {theirs.address}: 2 workers on 1 machine, 3 threads" in caplog.text


def test_a_worker_that_joins_later_gets_our_settings(theirs):
    with connect(theirs.address) as client:
        before = set(client.nthreads())
        theirs.start_worker("--nthreads", "3", "--memory-limit", "2GiB", "--no-nanny")
        client.wait_for_workers(len(before) + 1, timeout=60)
        (new,) = set(client.nthreads()) - before
        assert cluster_facts(client)["each"][new]["blas_threads"] == 1
        client.retire_workers([new])


def test_stages_give_the_same_bytes_from_this_process_and_from_a_task(theirs, small_store):
    alone = bytes_of(both(small_store))
    with connect(theirs.address) as client:
        assert bytes_of(both(small_store)) == alone
        inside = client.submit(both, small_store, pure=False).result(timeout=120)
    assert bytes_of(inside) == alone


def test_workers_that_do_not_reach_a_server_are_named(theirs, tmp_path):
    with connect(theirs.address) as client:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{closed.getsockname()[1]}/api/health"
        with pytest.raises(ClusterError, match=rf"workers at tcp://.* cannot reach .*{url}"):
            require_reach(client, url)
        server = http.server.ThreadingHTTPServer(
            ("127.0.0.1", 0), http.server.BaseHTTPRequestHandler
        )
        threading.Thread(target=server.serve_forever, daemon=True).start()
        # It answers, if only that it does not do this: that is enough.
        require_reach(client, f"http://127.0.0.1:{server.server_port}/api/health")
        server.shutdown()
        server.server_close()


class Slow(Totals):
    """Takes a while over each block."""

    def visit(self, rows, start):
        super().visit(rows, start)
        time.sleep(0.2)


def slow_stage(store):
    with Engine(open_rows(store, chunks=20)) as engine:
        engine.fold(lambda _: Slow(), lambda *_: None)


def busy(client):
    """Number of tasks under way, as the workers see it."""
    return sum(client.run(lambda dask_worker: len(dask_worker.active_threads)).values())


def wait_until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_stopped_work_ends_within_seconds_and_the_cluster_goes_on(theirs, small_store):
    with connect(theirs.address) as client:
        future = client.submit(slow_stage, small_store, pure=False)
        wait_until(lambda: busy(client) >= 3)
        start = time.monotonic()
        assert stop_work(client)
        assert time.monotonic() - start < 10
        assert busy(client) == 0
        assert future.cancelled()
        assert client.submit(sum, [1, 2]).result(timeout=20) == 3


def test_a_stage_that_nobody_waits_for_stops_by_itself(theirs, small_store):
    with connect(theirs.address, set_as_default=False) as watcher:
        with connect(theirs.address) as client:
            future = client.submit(slow_stage, small_store, pure=False)
            wait_until(lambda: busy(watcher) >= 3)
            assert not future.done()
        wait_until(lambda: busy(watcher) == 0)


def test_a_run_ends_when_no_worker_is_left_and_who_was_lost_is_known(
    tmp_path, small_store, monkeypatch
):
    monkeypatch.setattr(dask_pool, "_PATIENCE_SECONDS", 1.0)
    monkeypatch.setattr(dask_pool, "_ASK_SECONDS", 0.5)
    with Theirs(tmp_path) as cluster:
        pid = cluster.start_worker("--nthreads", "1", "--no-nanny", "--memory-limit", "1GiB")
        with connect(cluster.address, timeout=30) as client:
            since = time.time()
            (where,) = client.nthreads()
            assert lost_workers(client, since) == []

            def killing(*_):
                os.kill(pid, signal.SIGKILL)

            with (
                pytest.raises(ClusterError, match="has had no worker for 1 s"),
                Engine(open_rows(small_store, chunks=20)) as engine,
            ):
                engine.fold(lambda _: Slow(), killing)
            (lost,) = lost_workers(client, since)
            assert (lost["worker"], lost["tasks"] > 0) == (where, True)
            assert since <= lost["time"] <= time.time()
            assert lost_workers(client, time.time()) == []


def test_no_worker_and_workers_without_the_package_are_told_apart(tmp_path):
    # As in another environment: the package is there, and its import fails.
    blocker = tmp_path / "site" / "scgpu_tasks.py"
    blocker.parent.mkdir()
    blocker.write_text("raise ImportError('not in this environment')")
    with Theirs(tmp_path, environment={"PYTHONPATH": str(blocker.parent)}) as cluster:
        with pytest.raises(ClusterError, match="has no worker; start one with `dask worker`"):
            connect(cluster.address, timeout=1)
        cluster.start_worker("--nthreads", "1", "--no-nanny", "--memory-limit", "1GiB")
        with pytest.raises(ClusterError, match=r"workers at tcp://\S+ cannot import scgpu_t"):
            connect(cluster.address, timeout=30)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """Files of a certificate authority of its own, as Dask's environment variables."""
    folder, made = tmp_path_factory.mktemp("tls"), distributed.Security.temporary()
    for name, text in (
        ("ca", made.tls_ca_file),
        ("cert", made.tls_client_cert),
        ("key", made.tls_client_key),
    ):
        (folder / name).write_text(text)
    tls = "DASK_DISTRIBUTED__COMM__TLS__"
    names = {f"{tls}CA_FILE": "ca"}
    for role in ("CLIENT", "WORKER", "SCHEDULER"):
        names |= {f"{tls}{role}__CERT": "cert", f"{tls}{role}__KEY": "key"}
    return {name: str(folder / file) for name, file in names.items()}


def security_of(certificates):
    tls = "DASK_DISTRIBUTED__COMM__TLS__"
    return distributed.Security(
        tls_ca_file=certificates[f"{tls}CA_FILE"],
        tls_client_cert=certificates[f"{tls}CLIENT__CERT"],
        tls_client_key=certificates[f"{tls}CLIENT__KEY"],
    )


@pytest.fixture(scope="module")
def secure(tmp_path_factory, certificates):
    folder = tmp_path_factory.mktemp("secure")
    with Theirs(folder, "--protocol", "tls", environment=certificates) as cluster:
        cluster.start_worker("--nthreads", "1", "--no-nanny", "--memory-limit", "1GiB")
        yield cluster


def test_tls_takes_its_certificates_from_security(secure, certificates, small_store):
    assert secure.address.startswith("tls://127.0.0.1:")
    with connect(secure.address, security=security_of(certificates), timeout=30) as client:
        qc, _ = client.submit(both, small_store, pure=False).result(timeout=120)
    assert qc.summary["n_cells_kept"] > 0


def test_tls_takes_its_certificates_from_dasks_environment(secure, certificates):
    program = (
        "from scgpu_tasks.cluster import connect\n"
        f"with connect({secure.address!r}, timeout=30) as client:\n"
        "    print(client.submit(sum, [1, 2]).result(timeout=20))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **certificates},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "3\n", done.stderr


def test_tls_without_certificates_says_how_they_are_given(secure):
    with pytest.raises(ParameterError, match="DASK_DISTRIBUTED__COMM__TLS__CA_FILE"):
        connect(secure.address)


def test_tls_with_a_certificate_of_another_authority_is_refused(secure):
    with pytest.raises(ClusterError, match="signed by the same authority"):
        connect(secure.address, security=distributed.Security.temporary(), timeout=3)


def test_a_cluster_of_our_own_encrypts_when_asked_to():
    with start_cluster(device="cpu", workers=1, threads=1, security=True) as client:
        assert client.scheduler.address.startswith("tls://127.0.0.1:")
        assert all(where.startswith("tls://") for where in client.nthreads())
        assert client.submit(sum, [1, 2]).result(timeout=20) == 3
        with pytest.raises(ParameterError, match="tls:// needs certificates"):
            connect(client.scheduler.address)

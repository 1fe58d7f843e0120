"""What fails while a cluster works costs blocks, not the run; and what cannot go on says so."""

from __future__ import annotations

import os
import signal
import time

import anndata
import dask
import numpy as np
import pytest

from scgpu_tasks.cluster import start_cluster
from scgpu_tasks.errors import ClusterError, OutOfMemoryError
from scgpu_tasks.io.rows import open_rows
from scgpu_tasks.specs import HVGSpec, PCASpec, QCSpec
from scgpu_tasks.stages import dask_pool
from scgpu_tasks.stages.engine import Engine
from scgpu_tasks.stages.pca import run_pca
from scgpu_tasks.stages.qc import run_qc
from scgpu_tasks.stages.short_memory import Need, with_less
from scgpu_tasks.stages.sources import as_source
from tests.stages.atlases import Cut, atlas
from tests.stages.test_engine import Totals

QC, HVG, PCA = QCSpec(min_genes=20), HVGSpec(n_top_genes=200), PCASpec(n_comps=20)
MIB = 2**20


@pytest.fixture(scope="module")
def client():
    """Two small workers; a block may kill two of them before Dask gives it up."""
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 1}),
        start_cluster(device="cpu", workers=2, threads=1, memory_limit="700MiB") as client,
    ):
        yield client


@pytest.fixture(autouse=True)
def _both_workers(client):
    client.wait_for_workers(2, timeout=60)


@pytest.fixture(scope="module")
def parts(small_store):
    adata = anndata.read_zarr(small_store)
    return open_rows(small_store, chunks=50), adata.obs, adata.var


def kill_one(client):
    """Progress function that kills one worker, once, when something has been done."""
    pids = list(client.run(os.getpid).values())

    def progress(done, total):
        if pids and done >= 3:
            os.kill(pids.pop(), signal.SIGKILL)
            pids.clear()

    return progress


def test_a_worker_killed_in_the_middle_of_qc_and_of_pca_changes_nothing(client, parts):
    source, obs, var = parts
    calm = run_qc(source, obs, var, QC, HVG, workers=1)
    target = calm.summary["target_sum"]
    calm_pca = run_pca(source, calm.cells, calm.genes, target, PCA, workers=1)
    qc = run_qc(source, obs, var, QC, HVG, progress=kill_one(client))
    assert qc.genes.equals(calm.genes)
    assert qc.cells.equals(calm.cells)
    (lost,) = qc.summary["workers_lost"]
    assert lost["worker"].startswith("tcp://127.0.0.1:")
    client.wait_for_workers(2, timeout=60)
    pca = run_pca(source, calm.cells, calm.genes, target, PCA, progress=kill_one(client))
    assert pca.X_pca.tobytes() == calm_pca.X_pca.tobytes()
    assert pca.PCs.tobytes() == calm_pca.PCs.tobytes()
    assert len(pca.summary["workers_lost"]) == 1
    assert "workers_lost" not in calm_pca.summary


class Greedy(Totals):
    """Takes more memory than a worker may have, for more than some rows at a time."""

    def __init__(self, least_rows):
        super().__init__()
        self.least_rows = least_rows

    def visit(self, rows, start):
        if rows.n_rows >= self.least_rows:
            held = np.ones(1200 * MIB, np.uint8)
            time.sleep(5)
            del held
        super().visit(rows, start)


class Deadly(Totals):
    """Ends its worker."""

    def visit(self, rows, start):
        os.kill(os.getpid(), signal.SIGKILL)


def total(store, task):
    """Sum of X by such tasks, and the engine's mishaps; all of X is one block."""
    found = []
    with Engine(open_rows(store, chunks=1500)) as engine:
        engine.fold(lambda _: task, lambda _, value, __: found.append(value))
        return sum(found), engine.mishaps()


def test_a_block_that_kills_every_worker_is_worked_on_in_parts(client, small_store):
    source = open_rows(small_store)
    want = source.read(0, source.shape[0]).data.sum()
    found, mishaps = total(small_store, Greedy(1500))
    assert found == want
    assert mishaps["blocks_cut"] == 1
    assert [lost["rows_again"] for lost in mishaps["workers_lost"]] == [["0:1500"]] * 2


def test_a_block_whose_parts_kill_workers_too_is_named(client, small_store):
    with pytest.raises(ClusterError) as caught:
        total(small_store, Deadly())
    assert "rows 0:1500 of the matrix" in str(caught.value)
    assert "memory_limit=" in str(caught.value)


def fill_up(share, dask_worker):
    """Hold so much of a worker's limit."""
    limit, used = (
        dask_worker.memory_manager.memory_limit,
        dask_worker.monitor.get_process_memory(),
    )
    dask_worker.ballast = np.ones(int(share * limit) - used, np.uint8)


def let_go(dask_worker):
    dask_worker.ballast = None


def test_a_cluster_whose_workers_are_all_paused_is_no_endless_wait(
    client, small_store, monkeypatch
):
    monkeypatch.setattr(dask_pool, "_PATIENCE_SECONDS", 1.0)
    monkeypatch.setattr(dask_pool, "_ASK_SECONDS", 0.5)
    client.run(fill_up, 0.87)
    try:
        wait_until(lambda: set(statuses(client)) == {"paused"})
        with pytest.raises(ClusterError, match=r"all Dask workers .* paused .* of 0\.7 GiB"):
            total(small_store, Totals())
    finally:
        client.run(let_go)
    wait_until(lambda: set(statuses(client)) == {"running"})
    assert total(small_store, Totals())[0] > 0


def statuses(client):
    return [w["status"] for w in client.scheduler_info(n_workers=-1)["workers"].values()]


def wait_until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_qc_of_blocks_larger_than_a_worker_reads_them_in_pieces(client, medium_store):
    adata = anndata.read_zarr(medium_store)
    source = open_rows(medium_store, chunks=20_000)
    found = run_qc(source, adata.obs, adata.var, QC, HVG)
    alone = run_qc(source, adata.obs, adata.var, QC, HVG, workers=1)
    assert found.cells.equals(alone.cells)
    assert "workers_lost" not in found.summary


class Tight(Cut):
    """A source that cannot read many rows at a time."""

    def __init__(self, matrix, bounds, most):
        super().__init__(matrix, bounds)
        self.most = most

    def read(self, start, stop):
        if stop - start > self.most:
            raise MemoryError
        return super().read(start, stop)


def test_a_read_that_runs_out_of_memory_is_done_in_parts():
    matrix, *_ = atlas()
    with Engine(Tight(matrix, [0, 300, 600], 100), workers=2) as engine:
        found = []
        engine.fold(lambda _: Totals(), lambda _, value, __: found.append(value))
        assert engine.mishaps() == {"blocks_cut": 2}
    assert sum(found) == matrix.sum()


def test_a_read_that_always_runs_out_of_memory_names_the_block_and_what_to_change():
    matrix, *_ = atlas()
    with (
        pytest.raises(OutOfMemoryError, match=r"rows 0:300 .* stored values") as caught,
        Engine(Tight(matrix, [0, 300, 600], 0), workers=2) as engine,
    ):
        engine.fold(lambda _: Totals(), lambda *_: None)
    assert "max_bytes=" in str(caught.value)
    assert "workers=" in str(caught.value)


class Broken(Totals):
    """Runs out of memory when some of the rows may have been counted."""

    def visit(self, rows, start):
        raise MemoryError


def test_a_visit_on_a_cpu_that_runs_out_of_memory_is_not_repeated():
    matrix, *_ = atlas()
    source = as_source(matrix)
    with pytest.raises(OutOfMemoryError, match="rows 0:600"), Engine(source) as engine:
        engine.fold(lambda _: Broken(), lambda *_: None)


class StrangeError(MemoryError):
    """Does not survive a trip to another process, like some of an allocator's own."""

    def __init__(self, first, second):
        super().__init__(f"{first}, {second}")


class Stuck(Totals):
    """Says that rows do not fit, with an error that cannot travel as its cause."""

    def visit(self, rows, start):
        def work(first, last):
            raise StrangeError(first, last)

        with_less(work, Need(start, start + rows.n_rows, 7, 7, False), can_cut=True)


def test_a_block_that_does_not_fit_is_named_whatever_the_allocator_raised(client, small_store):
    with pytest.raises(OutOfMemoryError, match="rows 0:1500") as caught:
        total(small_store, Stuck())
    assert "on the worker at tcp://" in " ".join(caught.value.__notes__)

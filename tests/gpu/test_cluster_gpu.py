"""Clusters on GPUs: what workers are given, what they do when something fails, what they leave.

On a machine with one GPU or several; two at most are used. Takes about a minute and a half.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import psutil
import pytest
import zarr

from scgpu_tasks.cluster import cluster_facts, connect, gpus, make_cluster, start_cluster
from scgpu_tasks.cluster.plan import plan_cluster, resolve_device
from scgpu_tasks.errors import ClusterError, MissingPackageError, OutOfMemoryError
from scgpu_tasks.io.rows import open_rows
from scgpu_tasks.specs import HVGSpec, PCASpec, QCSpec
from scgpu_tasks.stages.pca import PCAResult, run_pca
from scgpu_tasks.stages.qc import QCResult, run_qc
from tests.gpu.read_helpers import gpu_missing

MISSING = gpu_missing() or ("" if find_spec("dask_cuda") else "dask-cuda is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(MISSING), reason=MISSING)]

MIB = 2**20
QC, HVG, PCA = (
    QCSpec(min_genes=30, max_pct_mt=30.0),
    HVGSpec(n_top_genes=200),
    PCASpec(n_comps=10),
)
# A worker takes more than this; the driver keeps a little.
SPARE = 200 * MIB
HOLDER = """
import sys, cupy
held = cupy.zeros(3 << 30, cupy.uint8)
cupy.cuda.Device().synchronize()
print("held", flush=True)
sys.stdin.read()
"""


def used() -> dict[str, int]:
    """Bytes taken of each GPU that tests use."""
    import pynvml

    pynvml.nvmlInit()
    handles = {name: pynvml.nvmlDeviceGetHandleByUUID(name) for name in devices()}
    return {name: pynvml.nvmlDeviceGetMemoryInfo(h).used for name, h in handles.items()}


def devices() -> tuple[str, ...]:
    return gpus.choose_devices(None, gpus.gpu_names())[:2]


def settles(before: dict[str, int], seconds: float = 20.0) -> bool:
    """Whether no more is taken of the GPUs than before, within a while."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if all(now <= before[name] + SPARE for name, now in used().items()):
            return True
        time.sleep(0.2)
    return False


@pytest.fixture(scope="module", autouse=True)
def before(medium_store: Path) -> Iterator[dict[str, int]]:
    """Memory taken before anything starts; as much as that must be taken at the end."""
    import cupy

    from scgpu_tasks.io.scratch import release_memory

    # What this process itself needs of the first GPU to read is none of a cluster's.
    open_rows(medium_store, chunks=2_500, device="gpu").read_block(0)
    for device in range(cupy.cuda.runtime.getDeviceCount()):
        with cupy.cuda.Device(device):
            cupy.zeros(1)
    release_memory()
    taken = used()
    yield taken
    release_memory()
    assert settles(taken), f"taken before: {taken}, after all clusters closed: {used()}"


class Lines(logging.Handler):
    """Log lines of the package, from INFO on."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    log, handler = logging.getLogger("scgpu_tasks"), Lines()
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield handler.lines
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


@pytest.fixture(scope="module")
def started(before: dict[str, int]) -> Iterator[tuple[Any, list[str]]]:
    """Client of a TCP cluster that started while another process held 3 GiB of a GPU."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": devices()[0]},
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with logged() as lines:
            client = start_cluster(device="gpu", workers=len(devices()), protocol="tcp")
        holder.communicate()
    with client:
        yield client, lines


@pytest.fixture
def client(started: tuple[Any, list[str]]) -> Any:
    return started[0]


@pytest.fixture(scope="module")
def atlas(medium_store: Path) -> tuple[Any, pd.DataFrame, pd.DataFrame]:
    """20,000 cells in 8 blocks that the GPU decodes, obs and var."""
    group = zarr.open_group(medium_store, mode="r")
    rows = open_rows(medium_store, chunks=2_500, device="gpu")
    return rows, ad.io.read_elem(group["obs"]), ad.io.read_elem(group["var"])


def both(atlas: Any, progress: Any = None) -> tuple[QCResult, PCAResult]:
    rows, obs, var = atlas
    qc = run_qc(rows, obs, var, QC, HVG)
    target = qc.summary["target_sum"]
    return qc, run_pca(rows, qc.cells, qc.genes, target, PCA, progress=progress)


@pytest.fixture(scope="module")
def calm(started: tuple[Any, list[str]], atlas: Any) -> tuple[QCResult, PCAResult]:
    """Results of the cluster while nothing goes wrong."""
    found = both(atlas)
    assert "workers_lost" not in found[0].summary | found[1].summary
    return found


def assert_close(found: tuple[QCResult, PCAResult], want: tuple[QCResult, PCAResult]) -> None:
    pd.testing.assert_frame_equal(found[0].cells, want[0].cells)
    pd.testing.assert_frame_equal(found[0].genes, want[0].genes, rtol=1e-9)
    np.testing.assert_allclose(found[1].variance, want[1].variance, rtol=1e-9)
    np.testing.assert_allclose(found[1].X_pca, want[1].X_pca, rtol=1e-3, atol=1e-4)


def assert_same_bytes(found: PCAResult, want: PCAResult) -> None:
    for name in ("X_pca", "PCs", "variance", "mean"):
        assert getattr(found, name).tobytes() == getattr(want, name).tobytes(), name


def first_visible() -> str:
    return os.environ["CUDA_VISIBLE_DEVICES"].split(",")[0]


def take(n_bytes: int) -> str:
    """Take memory through CuPy, in a worker; say how that went."""
    import cupy

    try:
        held = cupy.empty(n_bytes, cupy.uint8)
    except MemoryError:
        return "refused"
    del held
    return "taken"


def test_a_gpu_in_use_is_warned_of_with_its_memory(started: tuple[Any, list[str]]) -> None:
    found = [line for line in started[1] if line.startswith("WARNING GPU")]
    assert any(devices()[0] in line and "in use already" in line for line in found), started[1]
    share = next(line for line in found if devices()[0] in line)
    assert float(share.split("in use already: ")[1].split(" of ")[0]) >= 3.0


def test_the_log_line_tells_what_was_chosen(started: tuple[Any, list[str]]) -> None:
    (line,) = [line for line in started[1] if "Dask cluster at tcp://127.0.0.1:" in line]
    assert f"{len(devices())} worker" in line
    assert "4 threads" in line
    assert "RMM asynchronous, at most" in line
    assert all(name in line for name in devices())


def test_each_worker_has_a_gpu_of_its_own_rmm_a_limit_and_gpu_reads(client: Any) -> None:
    found = cluster_facts(client)
    assert found["device"] == "gpu"
    assert found["amiss"] == []
    assert len(found["each"]) == len(devices())
    for worker in found["each"].values():
        assert worker["gpu_reads"]
        assert worker["allocator"] == "LimitingResourceAdaptor on CudaAsyncMemoryResource"
        assert 0.7 < worker["gpu_memory_limit"] / worker["gpu_memory"] <= 0.7502
        assert worker["threads"] == 4
    visible = client.run(first_visible).values()
    assert sorted(visible) == sorted(devices())


def test_workers_stop_at_their_limit_and_work_on(client: Any) -> None:
    limit = next(iter(cluster_facts(client)["each"].values()))["gpu_memory_limit"]
    assert set(client.run(take, limit + MIB).values()) == {"refused"}
    assert set(client.run(take, 64 * MIB).values()) == {"taken"}


def test_blocks_are_decoded_by_the_workers_gpus(client: Any, calm: Any) -> None:
    from scgpu_tasks.io.counters import read_statistics

    found = list(client.run(read_statistics).values())
    assert len(found) == len(devices())
    for worker in found:
        assert sum(counts["gpu_chunks"] for counts in worker.values()) > 0


def kill_once(client: Any, at: int) -> Callable[[int, int], None]:
    """Progress function that kills one worker when so many blocks are done."""
    pids = list(client.run(os.getpid).values())

    def progress(done: int, total: int) -> None:
        if pids and done >= at:
            os.kill(pids.pop(), signal.SIGKILL)
            pids.clear()

    return progress


def test_a_worker_killed_in_the_middle_of_pca_costs_its_blocks_and_not_the_result(
    client: Any, atlas: Any, calm: Any
) -> None:
    rows = atlas[0]
    target = calm[0].summary["target_sum"]
    again = run_pca(
        rows, calm[0].cells, calm[0].genes, target, PCA, progress=kill_once(client, 2)
    )
    assert_same_bytes(again, calm[1])
    (lost,) = again.summary["workers_lost"]
    assert lost["worker"].startswith("tcp://")


def test_a_restarted_worker_is_set_up_like_the_first(client: Any) -> None:
    client.wait_for_workers(len(devices()), timeout=60)
    found = cluster_facts(client)
    assert found["amiss"] == []
    assert all(worker["gpu_reads"] for worker in found["each"].values())
    limits = {worker["gpu_memory_limit"] for worker in found["each"].values()}
    assert all(limits)


def limit_to(n_bytes: int) -> None:
    """Put a lower limit on what this worker takes of its GPU."""
    import rmm

    from scgpu_tasks.io.scratch import release_memory
    from scgpu_tasks.stages import resident

    resident.drop()
    release_memory()
    resource = rmm.mr.get_current_device_resource()
    while hasattr(resource, "get_allocation_limit"):
        resource = resource.get_upstream()
    rmm.mr.set_current_device_resource(rmm.mr.LimitingResourceAdaptor(resource, n_bytes))


def test_blocks_that_do_not_fit_are_split_and_give_the_same_numbers(
    client: Any, atlas: Any, calm: Any
) -> None:
    cut = {}
    try:
        for limit in (512, 256, 128, 96, 64, 48, 32):
            client.run(limit_to, limit * MIB)
            found = both(atlas)
            cut[limit] = found[0].summary.get("blocks_cut", 0) + found[1].summary.get(
                "blocks_cut", 0
            )
            assert_close(found, calm)
            if cut[limit]:
                return
    finally:
        client.restart()
    pytest.fail(f"blocks cut, by MiB of the limit: {cut}")


def test_a_block_that_never_fits_is_named_with_its_values_and_the_options(
    client: Any, atlas: Any
) -> None:
    rows, obs, var = atlas
    try:
        client.run(limit_to, MIB)
        with pytest.raises(OutOfMemoryError) as caught:
            run_qc(rows, obs, var, QC, HVG)
    finally:
        client.restart()
    text = f"{caught.value} {caught.value.__notes__}"
    assert "rows " in text
    assert "stored values" in text
    assert "gpu_share=" in text
    assert "on the worker at tcp://" in text
    run_qc(rows, obs, var, QC, HVG)


def test_managed_memory_has_its_pool_its_limit_and_gives_the_same_numbers(
    atlas: Any, calm: Any
) -> None:
    total = gpus.total_bytes(devices()[0])
    share = 4 * 2**30 / total
    with start_cluster(
        device="gpu", workers=1, managed_memory=True, gpu_share=share
    ) as managed:
        (worker,) = cluster_facts(managed)["each"].values()
        assert worker["allocator"] == "PoolMemoryResource on ManagedMemoryResource"
        assert worker["gpu_reads"]
        assert managed.scheduler.address.startswith("tcp://")
        assert list(managed.run(take, 5 * 2**30).values()) == ["refused"]
        assert list(managed.run(take, 2**30).values()) == ["taken"]
        assert_close(both(atlas), calm)


def test_ucx_gives_the_same_bytes_where_it_is_installed(atlas: Any, calm: Any) -> None:
    if not (find_spec("distributed_ucxx") and find_spec("ucxx")):
        assert "no UCX here" in plan_cluster("gpu").protocol_note
        with pytest.raises(MissingPackageError, match="distributed-ucxx"):
            plan_cluster("gpu", protocol="ucx")
        pytest.skip("distributed-ucxx is not installed; that this is said was tested")
    with start_cluster(device="gpu", workers=len(devices())) as fast:
        assert fast.scheduler.address.startswith("ucx")
        assert cluster_facts(fast)["amiss"] == []
        assert_same_bytes(both(atlas)[1], calm[1])
        n = fast.submit(_ones, 1 << 28, workers=[min(fast.nthreads())])
        other = max(fast.nthreads())
        assert fast.submit(_sum, n, workers=[other]).result(timeout=60) == 1 << 28


def _ones(n: int) -> Any:
    import cupy

    return cupy.ones(n, cupy.uint8)


def _sum(values: Any) -> int:
    return int(values.sum(dtype="int64"))


def test_a_mask_that_names_no_gpu_is_refused_and_one_that_hides_all_means_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "99")
    with pytest.raises(ClusterError, match="CUDA_VISIBLE_DEVICES='99' names no GPU"):
        make_cluster("gpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert resolve_device("auto") == "cpu"
    with pytest.raises(ClusterError, match="names no GPU"):
        make_cluster("gpu")


def test_packages_for_a_later_cuda_than_the_drivers_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus.gpu_names()
    gpus.require_driver()
    # As if the packages were made for it; the driver's own number is real.
    monkeypatch.setattr(gpus, "_CUPY", {99: "cupy-cuda99x"})
    monkeypatch.setattr(gpus, "_installed", lambda _: True)
    with pytest.raises(ClusterError, match=r"made for CUDA 99, and the driver .* CUDA 1\d"):
        make_cluster("gpu", workers=1)


def test_workers_of_others_get_gpu_reads_and_what_they_lack_is_said(
    tmp_path: Path, atlas: Any, calm: Any
) -> None:
    file = tmp_path / "scheduler.json"
    commands = [
        ["distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0"],
        ["dask_cuda.cli", "--nthreads", "2"],
    ]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": devices()[0]}
    with contextlib.ExitStack() as stack:
        for module, *options in commands:
            command = [sys.executable, "-m", module, *options, "--no-dashboard"]
            process = stack.enter_context(
                subprocess.Popen(
                    [*command, "--scheduler-file", str(file)], cwd=tmp_path, env=environment
                )
            )
            stack.callback(process.terminate)
            deadline = time.monotonic() + 30
            while not file.exists() and time.monotonic() < deadline:
                time.sleep(0.1)
        with logged() as lines, connect(_address(file), timeout=60) as theirs:
            (worker,) = cluster_facts(theirs)["each"].values()
            assert worker["gpu_reads"]
            assert worker["allocator"] == "CuPy's own pool"
            assert worker["gpu_memory_limit"] <= 0.75 * worker["gpu_memory"]
            assert any("RMM is not set up" in line and "--rmm-async" in line for line in lines)
            assert_close(both(atlas), calm)


def _address(file: Path) -> str:
    import json

    return str(json.loads(file.read_text())["address"])


def test_nothing_is_left_on_the_gpu_after_a_cluster_is_closed(
    client: Any, before: dict[str, int], atlas: Any
) -> None:
    """Last in this file: closes the cluster that the others share."""
    both(atlas)
    held = used()
    assert any(held[name] > before[name] + SPARE for name in held)
    client.close()
    assert settles(before), f"taken before: {before}, now: {used()}"
    assert not [p for p in psutil.Process().children(recursive=True) if is_worker(p)]


def is_worker(process: psutil.Process) -> bool:
    return "spawn_main" in " ".join(process.cmdline())

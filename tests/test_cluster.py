import os
import signal
import socket
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from scgpu_tasks.cluster import make_cluster, start_cluster
from scgpu_tasks.cluster_gpus import choose_devices
from scgpu_tasks.cluster_plan import plan_cluster, resolve_device
from scgpu_tasks.errors import ClusterError, MissingPackageError, ParameterError

GIB = 2**30


def run_script(path, body, **options):
    path.write_text(textwrap.dedent(body))
    return subprocess.run(
        [sys.executable, path], capture_output=True, text=True, timeout=120, **options
    )


def children_of(pid):
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def wait_until_gone(processes, seconds=15):
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return alive


@pytest.mark.parametrize(
    ("cores", "gib", "workers", "threads"), [(1, 4, 1, 1), (2, 24, 1, 2), (16, 128, 4, 4)]
)
def test_a_cpu_plan_shares_out_cores_and_memory(monkeypatch, cores, gib, workers, threads):
    monkeypatch.setattr("scgpu_tasks.cluster_plan._machine", lambda: (cores, gib * GIB))
    plan = plan_cluster("cpu")
    assert (plan.workers, plan.threads) == (workers, threads)
    assert plan.workers * plan.threads <= max(cores, 1)
    assert plan.workers * plan.memory_limit <= gib * GIB


def test_too_many_workers_for_the_memory_are_refused_with_both_numbers(monkeypatch):
    monkeypatch.setattr("scgpu_tasks.cluster_plan._machine", lambda: (64, 4 * GIB))
    with pytest.raises(ClusterError, match=r"16 workers would have 230 MiB .* 512 MiB"):
        plan_cluster("cpu")


def test_memory_limits_beyond_the_machine_are_refused(monkeypatch):
    monkeypatch.setattr("scgpu_tasks.cluster_plan._machine", lambda: (4, 4 * GIB))
    with pytest.raises(ClusterError, match=r"2 workers .* need 6\.0 GiB"):
        plan_cluster("cpu", workers=2, memory_limit="3GiB")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"device": "tpu"}, "auto, cpu or gpu"),
        ({"workers": 0}, "workers must be at least 1"),
        ({"threads": -1}, "threads must be at least 1"),
        ({"memory_limit": "lots"}, "memory_limit='lots'"),
    ],
)
def test_options_out_of_range_are_refused(options, match):
    with pytest.raises(ParameterError, match=match):
        plan_cluster(**{"device": "cpu", **options})


def test_gpu_without_a_gpu_or_its_packages_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "dask_cuda", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'scgpu-tasks\[cu13\]'"):
        resolve_device("gpu")
    assert resolve_device("auto") == "cpu"


def test_devices_are_indices_or_uuids_and_anything_else_is_refused(monkeypatch):
    found = ["GPU-aaa1", "GPU-bbb2"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert choose_devices(None, found) == ("GPU-aaa1", "GPU-bbb2")
    assert choose_devices("1,0", found) == ("GPU-bbb2", "GPU-aaa1")
    assert choose_devices(["GPU-b"], found) == ("GPU-bbb2",)
    for wrong in ("2", "GPU-c", "GPU-", "first", "-1"):
        with pytest.raises(ClusterError, match="names no GPU"):
            choose_devices(wrong, found)
    with pytest.raises(ClusterError, match="twice"):
        choose_devices("0,0", found)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(ClusterError, match="CUDA_VISIBLE_DEVICES='7'"):
        choose_devices(None, found)


def test_devices_on_a_cpu_cluster_are_refused():
    with pytest.raises(ClusterError, match="runs on the CPU"):
        plan_cluster("cpu", devices="0")


@pytest.fixture(scope="module")
def client():
    with start_cluster(device="cpu", workers=1, threads=2) as client:
        yield client


def test_a_cluster_computes_on_loopback_and_its_workers_ignore_ctrl_c(client):
    assert client.submit(sum, [1, 2]).result() == 3
    assert client.scheduler.address.startswith("tcp://127.0.0.1:")
    assert client.dashboard_link.startswith("http://127.0.0.1:")
    (handler,) = client.run(lambda: signal.getsignal(signal.SIGINT) is signal.SIG_IGN).values()
    assert handler


def page_faults_of_chunk_buffers():
    import resource

    import numpy as np

    for _ in range(20):
        np.ones(256 * 1024, np.uint8)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(100):
        np.ones(256 * 1024, np.uint8)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def test_a_worker_reuses_the_memory_of_freed_chunks(client):
    # 64 pages a chunk, if each were mapped anew.
    assert client.submit(page_faults_of_chunk_buffers, pure=False).result() < 100


def test_a_restarted_worker_is_set_up_like_the_first(client):
    (pid,) = client.run(os.getpid).values()
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    found = {}
    while not found or found.keys() == {pid}:
        assert time.monotonic() < deadline
        time.sleep(0.1)
        answers = client.run(pid_and_ctrl_c_is_ignored, on_error="ignore").values()
        found = dict(answer for answer in answers if answer is not None)
    assert list(found.values()) == [True]


def pid_and_ctrl_c_is_ignored():
    return os.getpid(), signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_an_adopted_scheduler_is_left_running(client):
    with start_cluster(scheduler=client.scheduler.address) as other:
        assert other.submit(sum, [2, 3]).result() == 5
    assert client.submit(sum, [3, 4]).result() == 7


def test_options_of_a_new_cluster_are_refused_for_an_adopted_one(client):
    with pytest.raises(ParameterError, match="workers cannot be set"):
        start_cluster(scheduler=client.scheduler.address, workers=2)


def test_an_address_where_nobody_answers_is_refused_quickly():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    start = time.monotonic()
    with pytest.raises(ClusterError, match=f"no Dask scheduler answers at {address}"):
        start_cluster(scheduler=address, timeout=2)
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("option", ["scheduler_port", "dashboard_address"])
def test_a_taken_port_is_refused_naming_the_option_and_leaves_no_process(option):
    before = set(children_of(os.getpid()))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        value = port if option == "scheduler_port" else f"127.0.0.1:{port}"
        with pytest.raises(ClusterError, match=rf"{option}: cannot listen on .*:{port}"):
            make_cluster("cpu", **{option: value})
    assert set(children_of(os.getpid())) <= before


def test_closing_the_client_ends_the_workers():
    client = start_cluster(device="cpu", workers=1, threads=1)
    workers = [psutil.Process(pid) for pid in client.run(os.getpid).values()]
    client.close()
    assert wait_until_gone(workers) == []


def test_a_script_without_a_main_guard_ends_with_advice_and_no_process(tmp_path):
    done = run_script(
        tmp_path / "unguarded.py",
        """
        from scgpu_tasks.cluster import start_cluster
        start_cluster(device="cpu", workers=1)
        """,
    )
    assert done.returncode == 1
    assert "ClusterError: the Dask cluster did not start" in done.stderr
    assert 'put the work under `if __name__ == "__main__":`' in done.stderr
    assert not [
        p
        for p in psutil.process_iter(["cmdline"])
        if str(tmp_path) in " ".join(p.info["cmdline"] or ())
    ]


def test_workers_end_when_the_process_that_started_them_is_killed(tmp_path):
    script = tmp_path / "guarded.py"
    script.write_text(
        textwrap.dedent("""
        import time
        from scgpu_tasks.cluster import start_cluster
        if __name__ == "__main__":
            client = start_cluster(device="cpu", workers=2, threads=1)
            print("up", flush=True)
            time.sleep(60)
        """)
    )
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout.readline() == "up\n"
        children = children_of(run.pid)
        assert len(children) >= 2
        run.kill()
    assert wait_until_gone(children) == []

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest

from scgpu_tasks.cluster import make_cluster, start_cluster
from scgpu_tasks.cluster.gpus import choose_devices
from scgpu_tasks.cluster.plan import plan_cluster, resolve_device
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
    monkeypatch.setattr("scgpu_tasks.cluster.plan._machine", lambda: (cores, gib * GIB))
    plan = plan_cluster("cpu")
    assert (plan.workers, plan.threads) == (workers, threads)
    assert plan.workers * plan.threads <= max(cores, 1)
    assert plan.workers * plan.memory_limit <= gib * GIB


def test_too_many_workers_for_the_memory_are_refused_with_both_numbers(monkeypatch):
    monkeypatch.setattr("scgpu_tasks.cluster.plan._machine", lambda: (64, 4 * GIB))
    with pytest.raises(ClusterError, match=r"16 workers would have 230 MiB .* 512 MiB"):
        plan_cluster("cpu")


def test_memory_limits_beyond_the_machine_are_refused(monkeypatch):
    monkeypatch.setattr("scgpu_tasks.cluster.plan._machine", lambda: (4, 4 * GIB))
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


def test_a_scheduler_that_lets_in_and_says_nothing_is_refused_in_time():
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        address = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(ClusterError, match=rf"answers at {address} \(no answer within 2 s"):
            start_cluster(scheduler=address, timeout=2)


@pytest.mark.parametrize(
    "banner", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-x\r\n", b"?"]
)
def test_what_is_no_scheduler_is_refused(banner):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"

        def answer():
            with contextlib.suppress(OSError):
                while True:
                    caller, _ = other.accept()
                    caller.sendall(banner)
                    caller.close()

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(ClusterError, match=f"no Dask scheduler answers at {address}"):
            start_cluster(scheduler=address, timeout=3)
        other.shutdown(socket.SHUT_RDWR)


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


def test_an_address_that_is_not_this_machines_is_refused():
    with pytest.raises(ClusterError, match=r"host: cannot listen on 203\.0\.113\.7:0"):
        make_cluster("cpu", host="203.0.113.7")


PERMISSION = """
import os, sys
import distributed  # before this user may read nothing more
from scgpu_tasks.cluster import make_cluster
from scgpu_tasks.errors import OutputError
if __name__ == "__main__":
    if os.getuid() == 0:
        os.setuid(65534)
    try:
        make_cluster("cpu", local_directory=sys.argv[1])
    except OutputError as error:
        print(error)
"""


def test_a_folder_that_workers_may_not_write_to_is_refused(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    done = subprocess.run(
        [sys.executable, "-c", PERMISSION, closed],
        capture_output=True,
        text=True,
        timeout=60,
    )
    expected = f"local_directory: workers cannot write to {closed} (Permission denied); name"
    assert done.stdout.startswith(expected), done.stderr


def new_children(before):
    """Processes that this one has started since, and that are still there after a while."""
    known = {process.pid for process in before}
    return wait_until_gone([p for p in children_of(os.getpid()) if p.pid not in known])


def test_workers_that_fail_as_they_start_are_an_error_and_leave_no_process(tmp_path):
    before = children_of(os.getpid())
    with pytest.raises(ClusterError, match=r"did not start .*No module named 'no_such_thing'"):
        make_cluster("cpu", workers=2, threads=1, preload=["no_such_thing"])
    assert new_children(before) == []


def test_workers_that_do_not_start_in_time_are_an_error_and_leave_no_process(tmp_path):
    slow = tmp_path / "slow.py"
    slow.write_text("import time\ndef dask_setup(worker):\n    time.sleep(600)\n")
    before = children_of(os.getpid())
    with pytest.raises(ClusterError, match="were not up within 3 s; timeout= gives them"):
        make_cluster("cpu", workers=1, threads=1, preload=[str(slow)], timeout=3)
    assert new_children(before) == []


def test_closing_the_client_ends_the_workers_and_the_event_loop():
    before = set(threading.enumerate())
    client = start_cluster(device="cpu", workers=1, threads=1)
    workers = [psutil.Process(pid) for pid in client.run(os.getpid).values()]
    client.close()
    assert wait_until_gone(workers) == []
    assert [t for t in set(threading.enumerate()) - before if t.name == "IO loop"] == []
    client.close()


def test_ctrl_c_while_a_cluster_starts_leaves_no_worker_behind(tmp_path):
    done = run_script(
        tmp_path / "interrupted.py",
        """
        import os, signal, threading
        import distributed, psutil
        from scgpu_tasks.cluster import start_cluster

        def started():
            return [" ".join(p.cmdline()) for p in psutil.Process().children()]

        def interrupt():
            while not any("spawn_main" in command for command in started()):
                pass
            os.kill(os.getpid(), signal.SIGINT)

        if __name__ == "__main__":
            threading.Thread(target=interrupt).start()
            try:
                start_cluster(device="cpu", workers=2, threads=1)
            except KeyboardInterrupt:
                print("left", [c for c in started() if "resource_tracker" not in c])
        """,
    )
    assert done.stdout == "left []\n", done.stderr
    assert done.stderr == ""
    assert done.returncode == 0


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


def test_a_spawned_process_that_may_have_no_children_is_told_so(tmp_path):
    done = run_script(
        tmp_path / "pool.py",
        """
        import multiprocessing
        from scgpu_tasks.cluster import start_cluster
        def start(_):
            start_cluster(device="cpu", workers=1)
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                pool.map(start, [0])
        """,
    )
    assert done.returncode == 1
    assert "ClusterError: this process is itself a worker of multiprocessing" in done.stderr
    assert "inside a Dask task, the stages find" in done.stderr


def test_a_spawned_process_that_imports_an_unguarded_script_is_told_so(tmp_path):
    done = run_script(
        tmp_path / "spawning.py",
        """
        import multiprocessing
        from scgpu_tasks.cluster import start_cluster
        def work():
            print("worked")
        if multiprocessing.current_process().name == "MainProcess":
            process = multiprocessing.get_context("spawn").Process(target=work)
            process.start()
            process.join()
        else:
            start_cluster(device="cpu", workers=1)
        """,
    )
    assert "ClusterError: a cluster is being started while a worker process" in done.stderr
    assert done.stdout == ""


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

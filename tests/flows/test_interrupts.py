import os
import signal
import subprocess
import time

import psutil
import pytest

from scgpu_tasks.datasets import write_synthetic

# Many small blocks, so that QC takes a while and can be caught in the middle.
SLOW = ("--chunks=20", "--workers=1")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("stores") / "long.zarr"
    return write_synthetic(path, 40_000, 800, nnz_per_cell=150, n_types=3, seed=7)


def wait_for_qc(shell, run):
    """Wait until the QC stage has begun to write."""
    deadline = time.monotonic() + 240
    while not list(shell.out.glob(".work/qc/.draft-*")):
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def words(process):
    """Command line of a process; nothing of one that has ended meanwhile."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def interrupt(shell, store, send, processes=3):
    """Stop a run of a flow, its server and a worker in the middle of QC."""
    run = shell.start("--store", str(store), *SLOW)
    try:
        wait_for_qc(shell, run)
        assert len(shell.processes()) >= processes
        send(run)
        output = run.communicate(timeout=60)
    finally:
        run.kill()
    return run.returncode, output


def send_ctrl_c(run):
    os.killpg(run.pid, signal.SIGINT)


def send_sigterm(run):
    run.terminate()


def send_hangup(run):
    run.send_signal(signal.SIGHUP)


@pytest.mark.parametrize(
    ("send", "code", "word"),
    [
        (send_ctrl_c, 130, "interrupted"),
        (send_sigterm, 143, "terminated"),
        (send_hangup, 129, "its terminal was closed"),
    ],
    ids=["ctrl-c", "sigterm", "hangup"],
)
def test_a_run_that_is_stopped_leaves_no_process_and_the_next_goes_on(
    shell, shell_with_server, store, send, code, word
):
    processes = 3
    if send is not send_ctrl_c:
        # Its own server ends as after Ctrl-C; without one a run starts sooner.
        shell, processes = shell_with_server, 2
    returncode, (out, err) = interrupt(shell, store, send, processes)
    assert returncode == code, err
    assert err.strip().splitlines()[-1].startswith(word)
    assert "Traceback" not in err
    assert out == ""
    assert shell.left_over() == []
    record = shell.record()
    assert record["state"] == "cancelled"
    assert record["stages"]["load"]["state"] == "computed"
    assert record["stages"]["qc"]["state"] == "failed"
    if send is send_ctrl_c:
        done = shell.run("--store", str(store), "--workers=1")
        assert done.returncode == 0, done.stderr
        assert shell.states() == {
            "convert": "skipped",
            "check": "cached",
            "load": "cached",
            "qc": "computed",
            "pca": "computed",
        }
        assert shell.left_over() == []


def test_an_early_ctrl_c_prints_no_traceback_of_workers_that_start(shell, store):
    run = shell.start("--store", str(store), "--workers=2")
    deadline = time.monotonic() + 120
    while not any("spawn_main" in words(p) for p in shell.processes()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    send_ctrl_c(run)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 130
    assert out == ""
    start, stopped = err.splitlines()
    assert start == "starting Prefect and Dask ..."
    assert stopped.startswith("interrupted")
    assert shell.left_over() == []


def test_a_killed_flow_leaves_no_process_and_the_next_run_clears_up_after_it(
    shell, store, runs
):
    returncode, _ = interrupt(shell, store, subprocess.Popen.kill)
    assert returncode == -signal.SIGKILL
    assert shell.left_over() == []
    assert shell.record()["state"] == "running"
    (draft,) = shell.out.glob(".work/qc/.draft-*")
    runs.out = shell.out
    assert runs.states(store) == {
        "convert": "skipped",
        "check": "cached",
        "load": "cached",
        "qc": "computed",
        "pca": "computed",
    }
    assert not draft.exists()


def test_a_worker_that_is_killed_in_the_middle_of_qc_costs_time_and_not_the_run(
    shell_with_server, store
):
    run = shell_with_server.start("--store", str(store), "--chunks=100", "--workers=2")
    wait_for_qc(shell_with_server, run)
    drafts = shell_with_server.out.glob(".work/qc/.draft-*")
    draft = max(drafts, key=lambda path: path.stat().st_mtime_ns)
    os.kill(int(draft.name.split("-")[2]), signal.SIGKILL)
    out, err = run.communicate(timeout=240)
    assert run.returncode == 0, err
    assert "report:" in out
    assert shell_with_server.states()["qc"] == "computed"
    (lost,) = shell_with_server.record()["stages"]["qc"]["workers_lost"]
    assert lost["worker"].startswith("tcp://127.0.0.1:")
    assert shell_with_server.left_over() == []

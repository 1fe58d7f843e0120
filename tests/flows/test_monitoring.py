"""What a Prefect server shows of a run, and what cancelling there does."""

import base64
import json
import re
import shutil
import signal
import time
import uuid

import pytest

from scgpu_tasks import errors
from scgpu_tasks.datasets import write_synthetic

from .test_interrupts import SLOW, wait_for_qc


@pytest.fixture(scope="module")
def api(server):
    import httpx

    with httpx.Client(base_url=server, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def long_store(tmp_path_factory):
    path = tmp_path_factory.mktemp("stores") / "long.zarr"
    return write_synthetic(path, 40_000, 800, nnz_per_cell=150, n_types=3, seed=7)


def artifacts(api, run_id):
    wanted = {"artifacts": {"flow_run_id": {"any_": [run_id]}}}
    return api.post("/artifacts/filter", json=wanted).json()


def test_a_server_shows_what_each_stage_found_and_how_far_it_is(runs, small_store, api):
    runs.attended = True
    record = runs.run(small_store, refresh="qc")
    shown = artifacts(api, record["run_id"])
    by_key = {a["key"]: a for a in shown if a["key"]}
    assert set(by_key) == {
        f"small-{name}" for name in ("check", "filters", "qc", "genes", "pca", "summary")
    }
    lost = json.loads(by_key["small-filters"]["data"])
    summary = record["summary"]["qc"]
    assert [row["lost"] for row in lost] == [
        *(f"{n:,} cells" for n in summary["lost"]["cells"].values()),
        f"{summary['n_cells'] - summary['n_cells_kept']:,} cells",
        *(f"{n:,} genes" for n in summary["lost"]["genes"].values()),
        f"{summary['n_genes'] - summary['n_genes_kept']:,} genes",
    ]
    for key, figures in (("qc", 5), ("genes", 1), ("pca", 2)):
        text = by_key[f"small-{key}"]["data"]
        pictures = re.findall(r"data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)", text)
        assert len(pictures) == figures, key
        assert all(b"<svg" in base64.b64decode(p) for p in pictures)
        assert all(b"var(--" not in base64.b64decode(p) for p in pictures)
    assert record["record"] in by_key["small-summary"]["data"]
    bars = {a["description"]: a["data"] for a in shown if a["type"] == "progress"}
    assert {text.split(":")[0]: percent for text, percent in bars.items()} == {
        "qc": 100,
        "pca": 100,
    }

    run = api.get(f"/flow_runs/{record['run_id']}").json()
    assert {"store:small", "device:cpu"} <= set(run["tags"])
    assert run["name"].startswith("small-")
    named = {"flow_runs": {"id": {"any_": [record["run_id"]]}}}
    names = {t["name"] for t in api.post("/task_runs/filter", json=named).json()}
    assert names == {"check small", "load small", "qc small", "pca small"}


def test_a_failed_run_names_stage_block_and_remedy_in_its_state(
    runs, small_store, tmp_path, api
):
    store = shutil.copytree(small_store, tmp_path / "cut.zarr")
    shard = sorted(p for p in (store / "X" / "data" / "c").rglob("*") if p.is_file())[-1]
    shard.write_bytes(shard.read_bytes()[:-8] + bytes(8))
    runs.attended = True
    error, record = runs.failure(store, chunks=100)
    assert isinstance(error, errors.CorruptChunkError)
    message = api.get(f"/flow_runs/{record['run_id']}").json()["state"]["message"]
    after = record["error"]["after"]
    assert re.fullmatch(r"after \d+ of 15 blocks", after)
    assert message.startswith(f"Stage qc failed {after}: ")
    assert "X/data" in message
    assert "Remedy: The file on disk is damaged." in message


def test_a_run_cancelled_on_the_server_stops_within_seconds_and_the_next_goes_on(
    shell_with_server, long_store, api
):
    run = shell_with_server.start("--store", str(long_store), *SLOW)
    wait_for_qc(shell_with_server, run)
    run_id = shell_with_server.record()["run_id"]
    state = {"state": {"type": "CANCELLING", "name": "Cancelling"}}
    assert api.post(f"/flow_runs/{run_id}/set_state", json=state).is_success
    began = time.monotonic()
    _, err = run.communicate(timeout=60)
    assert time.monotonic() - began < 20
    assert run.returncode == 128 + signal.SIGTERM
    assert "cancelled on the Prefect server" in err.splitlines()[-1]
    assert api.get(f"/flow_runs/{run_id}").json()["state"]["name"] == "Cancelled"
    assert shell_with_server.record()["state"] == "cancelled"
    assert shell_with_server.left_over() == []


def test_the_next_run_marks_a_killed_one_also_on_the_server(
    shell_with_server, runs, long_store, small_store, api
):
    run = shell_with_server.start("--store", str(long_store), *SLOW)
    wait_for_qc(shell_with_server, run)
    run.kill()
    run.communicate(timeout=60)
    (killed,) = shell_with_server.out.glob("long-*")
    before = json.loads((killed / "run.json").read_text())
    assert (before["state"], before["stages"]["qc"]["state"]) == ("running", "running")
    assert api.get(f"/flow_runs/{before['run_id']}").json()["state"]["name"] == "Running"

    runs.out = shell_with_server.out
    assert runs.run(small_store)["state"] == "completed"
    after = json.loads((killed / "run.json").read_text())
    assert after["state"] == "killed"
    assert after["error"]["stage"] == "qc"
    assert after["stages"]["qc"]["state"] == "failed"
    assert {p.name for p in killed.iterdir()} == {"run.json", "report.html"}
    assert "This run was killed" in (killed / "report.html").read_text()
    state = api.get(f"/flow_runs/{before['run_id']}").json()["state"]
    assert (state["name"], state["message"]) == ("Crashed", after["error"]["message"])
    assert uuid.UUID(before["run_id"])

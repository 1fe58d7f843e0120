"""The whole of it on loopback: server, pool, worker; runs by name, on schedule, cancelled."""

from __future__ import annotations

import datetime as dt
import re
import signal
import warnings
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp

from scgpu_tasks.io.checks import check
from tests.deployments.conftest import PATIENCE, Operator

SMALL = ("-p", "device=cpu", "-p", "min_genes=20", "-p", "n_top_genes=200")
FINAL = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


def write_source(path: Path) -> None:
    """Write a small h5ad."""
    X = sp.random(50, 40, 0.3, "csr", dtype=np.float32, rng=np.random.default_rng(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ad.AnnData(X).write_h5ad(path)


def identity(answer: Any) -> str:
    """Return the ID of the run that a command made."""
    assert answer.returncode == 0, answer.stdout + answer.stderr
    (found,) = re.findall(r"UUID: ([0-9a-f-]{36})", answer.stdout)
    return str(found)


@pytest.fixture(scope="module")
def incoming(operator: Operator) -> Path:
    """Two sources and a damaged one; their conversion is scheduled, and due at once."""
    folder = operator.folder / "incoming"
    folder.mkdir()
    for name in ("a", "b"):
        write_source(folder / f"{name}.h5ad")
    (folder / "cut.h5ad").write_bytes(b"\x89HDF\r\n\x1a\n cut short")
    due = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=3)
    schedule = {
        "active": True,
        "schedule": {"interval": 3600, "anchor_date": due.isoformat()},
        "parameters": {"src": str(folder), "dst": str(operator.folder / "stores")},
    }
    deployment = operator.deployment("atlas-convert/atlas-convert")
    operator.api(f"deployments/{deployment['id']}/schedules", [schedule])
    return folder


@pytest.fixture(scope="module")
def out(operator: Operator) -> Path:
    """Folder of the records."""
    return operator.folder / "runs"


def states(operator: Operator, out: Path, store: Path, *options: str) -> dict[str, str]:
    """Run atlas-qc by its bare name to its end; return the state of each stage."""
    given = ("-p", f"store={store}", "-p", f"out={out}", *SMALL, *options)
    answer = operator.prefect("deployment", "run", "atlas-qc", *given, "--watch")
    run = operator.run(identity(answer))
    assert run["state_type"] == "COMPLETED", operator.log()
    (record,) = [r for r in operator.records(out) if r["run_id"] == run["id"]]
    return {name: entry["state"] for name, entry in record["stages"].items()}


@pytest.mark.slow
def test_a_bare_name_runs_and_a_second_run_repeats_only_what_changed(
    operator: Operator, incoming: Path, out: Path, small_store: Path, scheduler: str
) -> None:
    def run(n_comps: int) -> dict[str, str]:
        given = ("-p", f"n_comps={n_comps}", "-p", f"scheduler={scheduler}")
        return states(operator, out, small_store, *given)

    first = run(20)
    assert first == dict.fromkeys(first, "computed") | {"convert": "skipped"}
    # `load` refuses more components than there are cells, so it depends on their number.
    again = {"check": "cached", "load": "computed", "qc": "cached", "pca": "computed"}
    assert run(9) == {"convert": "skipped", **again}


@pytest.mark.slow
def test_the_schedule_fires_and_a_damaged_source_fails_alone(
    operator: Operator, incoming: Path
) -> None:
    def ended() -> list[dict[str, Any]]:
        return [r for r in operator.runs("atlas-convert") if r["state_type"] in FINAL]

    (run,) = operator.wait_for(ended, PATIENCE, "scheduled conversion")
    assert run["auto_scheduled"]
    assert run["state_type"] == "FAILED"
    assert "1 of 3 sources failed" in run["state"]["message"]
    assert "cut.h5ad" in run["state"]["message"]
    stores = operator.folder / "stores"
    assert sorted(path.name for path in stores.iterdir()) == ["a.zarr", "b.zarr"]
    assert all(check(path).ok for path in stores.iterdir())


@pytest.mark.slow
def test_cancelling_a_run_stops_its_work_and_its_record_says_so(
    operator: Operator, out: Path, small_store: Path
) -> None:
    def engines() -> list[int]:
        return [p.pid for p in operator.processes() if "prefect.engine" in p.cmdline()]

    given = ("-p", f"store={small_store}", "-p", f"out={out}", "-p", "refresh=check", *SMALL)
    run = identity(operator.prefect("deployment", "run", "atlas-qc", *given))

    def record() -> list[dict[str, Any]]:
        ids = [r for r in operator.records(out) if r["run_id"] == run]
        return [r for r in ids if r["stages"]["check"]["state"] != "pending"]

    operator.wait_for(record, PATIENCE, "first stage")
    operator.api(f"flow_runs/{run}/set_state", {"state": {"type": "CANCELLING"}})
    operator.wait_for(
        lambda: operator.run(run)["state_type"] == "CANCELLED", PATIENCE, "cancelled"
    )
    operator.wait_for(lambda: not engines(), PATIENCE, "end of the run's processes")
    assert record()[0]["state"] == "cancelled"


@pytest.mark.slow
def test_names_that_are_unknown_or_ambiguous_are_answered_with_what_there_is(
    operator: Operator,
) -> None:
    answer = operator.prefect("deployment", "run", "atlas-umap")
    assert answer.returncode == 1
    assert "No deployment of a flow 'atlas-umap'" in answer.stderr
    assert "  atlas-convert/atlas-convert\n  atlas-qc/atlas-qc" in answer.stderr


@pytest.mark.slow
def test_ctrl_c_stops_all_of_it(operator: Operator) -> None:
    assert "PREFECT_API_URL=" in (operator.folder / ".env").read_text()
    assert operator.stop(signal.SIGINT) == 0
    assert operator.processes() == []
    assert not (operator.folder / ".env").exists()

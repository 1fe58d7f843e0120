import ast
import json
import subprocess
import sys
from multiprocessing import resource_tracker
from pathlib import Path

import anndata as ad
import psutil
import pytest

from .conftest import FLOW, SMALL


def test_the_file_is_a_flow_for_prefect_and_light_for_a_spawned_worker():
    from prefect.flows import Flow, load_flow_from_entrypoint

    flow = load_flow_from_entrypoint(f"{FLOW}:atlas_qc")
    assert isinstance(flow, Flow)
    assert flow.name == "atlas-qc"
    script = (
        "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__mp_main__');"
        "print([m for m in ('prefect', 'dask', 'numpy', 'zarr') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, FLOW], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_every_parameter_is_described_and_is_an_option_of_the_command_line():
    from prefect.flows import load_flow_from_entrypoint

    properties = load_flow_from_entrypoint(f"{FLOW}:atlas_qc").parameters.properties
    missing = [name for name, facts in properties.items() if not facts.get("description")]
    assert missing == []
    done = subprocess.run(
        [sys.executable, FLOW, "--help"], capture_output=True, text=True, check=True
    )
    renamed = {"counts": "not_counts"}
    for name in properties:
        assert f"--{renamed.get(name, name).replace('_', '-')}" in done.stdout


def test_defaults_are_the_same_for_the_flow_the_command_line_and_the_specs():
    from prefect.flows import load_flow_from_entrypoint

    from scgpu_tasks.job.commandline import parse_qc_pca
    from scgpu_tasks.job.mainjob import specs_of
    from scgpu_tasks.specs import HVGSpec, PCASpec, QCSpec

    properties = load_flow_from_entrypoint(f"{FLOW}:atlas_qc").parameters.properties
    options = parse_qc_pca(["--store", "x"])
    del options["debug"], options["store"]
    assert set(options) == set(properties) - {"store"}
    for name, value in options.items():
        assert properties[name].get("default") == (
            list(value) if isinstance(value, tuple) else value
        ), name
    assert specs_of(options) == (QCSpec(), HVGSpec(), PCASpec())


def test_two_runs_without_a_server_end_well_and_the_second_reuses_the_first(shell, small_store):
    first = shell.run("--store", str(small_store))
    assert first.returncode == 0, first.stderr
    assert first.stderr == "starting Prefect and Dask ...\n"
    record = shell.record()
    assert record["state"] == "completed"
    assert record["flow"] == "atlas-qc"
    assert f"report: {shell.out}/{record['name']}/report.html" in first.stdout
    assert shell.left_over() == []

    second = shell.run("--store", str(small_store), "--n-comps=10")
    assert second.returncode == 0, second.stderr
    assert shell.states() == {
        "convert": "skipped",
        "check": "cached",
        "load": "computed",
        "qc": "cached",
        "pca": "computed",
    }
    assert shell.left_over() == []
    folder = shell.out / shell.record()["name"]
    result = ad.read_zarr(folder / "results.zarr")
    assert result.obsm["X_pca"].shape == (result.n_obs, 10)
    assert {p.name for p in folder.iterdir()} == {
        "run.json",
        "report.html",
        "cells.parquet",
        "genes.parquet",
        "results.zarr",
    }


def test_a_record_says_what_ran_on_what_and_with_what(runs, small_store):
    record = runs.run(small_store)
    saved = json.loads((Path(record["record"]) / "run.json").read_text())
    assert saved["name"].startswith("small-")
    assert saved["run_id"]
    assert saved["start"] <= saved["end"]
    assert saved["parameters"]["n_comps"] == SMALL["n_comps"]
    assert saved["parameters"]["target_sum"] == 1e4
    store = saved["store"]
    assert store["path"] == str(small_store)
    assert store["shape"] == [1500, 800]
    assert store["nnz"] > 0
    assert store["stored_bytes"] > 0
    assert len(store["fingerprint"]) == 64
    assert list(saved["stages"]) == ["convert", "check", "load", "qc", "pca"]
    assert saved["stages"]["pca"]["bytes_read"] > 0
    assert saved["stages"]["pca"]["times_stored"] >= 0.9
    assert {"python", "scgpu-tasks", "zarr", "prefect"} <= set(saved["versions"])
    assert saved["hardware"]["cores"] >= 1


def test_two_runs_at_once_on_one_store_both_complete(shell_with_server, small_store):
    started = [shell_with_server.start("--store", str(small_store)) for _ in range(2)]
    for run in started:
        out, err = run.communicate(timeout=300)
        assert run.returncode == 0, err
        assert "report:" in out
    work = shell_with_server.out / ".work"
    for stage in ("check", "load", "qc", "pca"):
        assert len(list((work / stage).iterdir())) == 1
    records = [json.loads(p.read_text()) for p in shell_with_server.out.glob("*/run.json")]
    assert [r["state"] for r in records] == ["completed"] * 2
    assert records[0]["summary"] == records[1]["summary"]
    assert shell_with_server.left_over() == []


def test_the_flow_starts_and_closes_a_cluster_of_its_own(runs, small_store):
    # It stays for as long as this process.
    resource_tracker.ensure_running()
    before = set(psutil.Process().children(recursive=True))
    runs.scheduler = None
    record = runs.run(small_store, workers=1)
    assert record["state"] == "completed"
    assert set(psutil.Process().children(recursive=True)) <= before


def test_only_the_task_module_and_the_flows_import_prefect():
    package = FLOW.parents[1] / "scgpu_tasks"
    importers = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            if any(name.split(".")[0] in ("prefect", "prefect_dask") for name in names):
                importers.add(path.relative_to(package).as_posix())
    assert {name for name in importers if not name.startswith("operate/")} == {
        "flowrun.py",
        "tasks.py",
    }


@pytest.mark.parametrize("name", ["a/b", "..", "  ", "naïve run (1)", "x" * 20])
def test_a_run_name_becomes_a_folder_name(name):
    from scgpu_tasks.flowrun import CurrentRun

    folder = CurrentRun("atlas-qc", "id-1", name).folder_name
    assert Path(folder).name == folder
    assert folder not in ("", ".", "..")

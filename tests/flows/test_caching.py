import os
import shutil
from dataclasses import replace
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest

from scgpu_tasks.errors import StoreError
from scgpu_tasks.job import mainjob, steps
from scgpu_tasks.job.steps import Plan
from scgpu_tasks.job.workdir import WorkDir
from scgpu_tasks.specs import HVGSpec, PCASpec, QCSpec

COMPUTED = {
    "convert": "skipped",
    "check": "computed",
    "load": "computed",
    "qc": "computed",
    "pca": "computed",
}
CACHED = {**COMPUTED, "check": "cached", "load": "cached", "qc": "cached", "pca": "cached"}


@pytest.fixture
def store(small_store, tmp_path):
    """A store that a test may change."""
    return shutil.copytree(small_store, tmp_path / "atlas.zarr")


@pytest.fixture
def made(monkeypatch):
    """What each record with results was written from, by name."""
    names = []
    write = mainjob.write_made

    def note(folder, run, made):
        names.append(type(made).__name__)
        return write(folder, run, made)

    monkeypatch.setattr(mainjob, "write_made", note)
    return names


def rewrite_a_chunk(store):
    """Rewrite one file of X with the same bytes, size and modification time."""
    chunk = sorted((store / "X" / "data" / "c").rglob("*"))[0]
    before = chunk.stat()
    chunk.write_bytes(chunk.read_bytes())
    os.utime(chunk, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_second_run_reuses_everything_and_has_the_same_results(runs, store, made):
    first = runs.run(store)
    # Which device that is, the workers of the running cluster tell.
    second = runs.run(store, device="auto")
    assert second["cluster"]["device"] == "cpu"
    assert {n: e["state"] for n, e in first["stages"].items()} == COMPUTED
    assert {n: e["state"] for n, e in second["stages"].items()} == CACHED
    assert first["summary"] == second["summary"]
    assert first["stages"]["qc"]["times_stored"] == pytest.approx(1, abs=0.1)
    assert second["stages"]["qc"]["bytes_read"] == 0
    assert made == ["Computed", "Kept"]
    kept = ("cells.parquet", "genes.parquet", "results.zarr/zarr.json")
    for name in kept:
        files = [Path(run["record"], name).read_bytes() for run in (first, second)]
        assert files[0] == files[1], name
    assert ad.read_zarr(f"{second['record']}/results.zarr").obsm["X_pca"].shape[1] == 20


def test_other_components_reuse_check_and_qc(runs, store):
    runs.run(store)
    assert runs.states(store, n_comps=10) == {**CACHED, "load": "computed", "pca": "computed"}


def test_another_filter_reuses_check_only(runs, store):
    runs.run(store)
    assert runs.states(store, min_genes=30) == {**COMPUTED, "check": "cached"}


def test_a_chunk_rewritten_in_place_is_noticed(runs, store):
    runs.run(store)
    rewrite_a_chunk(store)
    assert runs.states(store) == COMPUTED


def test_damaged_and_deleted_results_are_recomputed(runs, store, made):
    first = runs.run(store)
    (qc,) = (runs.out / ".work" / "qc").iterdir()
    cells = qc / "cells.parquet"
    data = bytearray(cells.read_bytes())
    data[len(data) // 2] ^= 1
    cells.write_bytes(data)
    assert runs.states(store) == {**CACHED, "qc": "computed"}
    (pca,) = (runs.out / ".work" / "pca").iterdir()
    shutil.rmtree(pca)
    again = runs.run(store)
    assert {n: e["state"] for n, e in again["stages"].items()} == {**CACHED, "pca": "computed"}
    tables = [pd.read_parquet(f"{run['record']}/cells.parquet") for run in (first, again)]
    pd.testing.assert_frame_equal(*tables)
    (kept,) = (runs.out / ".work" / "record").iterdir()
    (kept / "shown.json").write_text("{}")
    assert runs.states(store) == CACHED
    assert made == ["Computed"] * 4


def test_refresh_recomputes_a_stage_and_all_after_it(runs, store, made):
    runs.run(store)
    assert runs.states(store, refresh="qc") == {**CACHED, "qc": "computed", "pca": "computed"}
    assert runs.states(store) == CACHED
    assert made == ["Computed", "Computed", "Kept"]


def test_a_source_is_converted_once_and_again_when_it_or_the_store_is_gone(
    runs, store, tmp_path
):
    made = tmp_path / "made.zarr"
    converted = {**COMPUTED, "convert": "computed"}
    assert runs.states(made, source=str(store)) == converted
    assert runs.states(made, source=str(store)) == {**CACHED, "convert": "cached"}
    os.utime(store / "X" / "zarr.json")
    assert runs.states(made, source=str(store)) == converted
    shutil.rmtree(made)
    assert runs.states(made, source=str(store)) == converted


def test_a_store_that_no_run_made_is_not_replaced_by_a_conversion(runs, store, tmp_path):
    other = shutil.copytree(store, tmp_path / "other.zarr")
    error, record = runs.failure(other, source=str(store))
    assert "--refresh convert" in str(error)
    assert record["error"]["stage"] == "convert"
    assert runs.states(other) == COMPUTED


@pytest.fixture
def plan(store, tmp_path):
    qc = QCSpec(min_genes=20)
    return Plan(
        store=str(store),
        fingerprint=steps.fingerprint(str(store), qc),
        work=str(tmp_path / "work"),
        qc=qc,
        hvg=HVGSpec(n_top_genes=200),
        pca=PCASpec(n_comps=5),
    )


def test_steps_work_without_prefect_and_dask(plan):
    done = [steps.check_step(plan), steps.load_step(plan), steps.qc_step(plan)]
    done.append(steps.pca_step(plan))
    assert [d["cached"] for d in done] == [False] * 4
    assert steps.pca_step(plan)["cached"]
    scores = np.load(f"{done[3]['path']}/X_pca.npy")
    assert scores.shape == (done[2]["summary"]["n_cells_kept"], 5)


def test_a_store_that_changes_while_a_stage_runs_leaves_no_result(plan, store):
    def change(_done, _total):
        rewrite_a_chunk(store)

    with pytest.raises(StoreError, match="changed while it was being read"):
        steps.qc_step(plan, progress=change)
    assert WorkDir(plan.work).find("qc", plan.key("qc")) is None
    assert list((WorkDir(plan.work).root / "qc").iterdir()) == []


def test_pca_without_its_qc_result_says_so(plan):
    with pytest.raises(StoreError, match="run QC again"):
        steps.pca_step(plan)


def test_a_plan_and_its_keys_survive_json(plan):
    import json

    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    assert again.key("pca") == plan.key("pca")
    other = replace(plan, pca=PCASpec(n_comps=6))
    assert other.key("qc") == plan.key("qc")
    assert other.key("pca") != plan.key("pca")


def test_names_that_change_after_the_last_stage_do_not_reach_the_record(
    runs, store, monkeypatch
):
    from scgpu_tasks.io import lazy

    read = lazy.read_tables

    def read_what_somebody_else_just_wrote(path):
        tables = read(path)
        rewrite_a_chunk(store)
        return tables

    monkeypatch.setattr(lazy, "read_tables", read_what_somebody_else_just_wrote)
    error, record = runs.failure(store)
    assert "changed while it was being read" in str(error)
    assert record["state"] == "failed"

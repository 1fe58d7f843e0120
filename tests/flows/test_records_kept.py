"""Records stay: of earlier runs of the same name, and of runs that a full disk stops."""

from __future__ import annotations

import json
import resource

import pytest

from scgpu_tasks.errors import OutputError

from .conftest import FLOW, SMALL


def test_a_second_run_of_the_same_name_leaves_the_first_record(runs, small_store):
    from prefect.flows import load_flow_from_entrypoint

    flow = load_flow_from_entrypoint(f"{FLOW}:atlas_qc").with_options(flow_run_name="nightly")
    given = {"scheduler": runs.scheduler, "device": "cpu", **SMALL}
    first = flow(store=str(small_store), out=str(runs.out), **given)
    second = flow(store=str(small_store), out=str(runs.out), **given)
    assert [first["record"], second["record"]] == [
        str(runs.out / "nightly"),
        str(runs.out / "nightly-2"),
    ]
    kept = json.loads((runs.out / "nightly" / "run.json").read_text())
    assert kept["run_id"] == first["run_id"] != second["run_id"]
    assert not list(runs.out.glob("nightly*/.*"))


def test_a_record_that_cannot_be_written_is_one_of_a_failed_run(runs, small_store):
    runs.run(small_store)
    before = set(runs.records())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The system then refuses longer files, as a full disk would.
    resource.setrlimit(resource.RLIMIT_FSIZE, (140_000, hard))
    try:
        with pytest.raises(OutputError, match="Make room"):
            runs.run(small_store)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    (folder,) = set(runs.records()) - before
    assert sorted(p.name for p in folder.iterdir()) == ["report.html", "run.json"]
    record = json.loads((folder / "run.json").read_text())
    assert (record["state"], record["error"]["stage"]) == ("failed", "record")
    assert "as its record was written" in (folder / "report.html").read_text()


def test_a_prefect_server_that_does_not_answer_is_named_and_recorded(shell, small_store):
    shell.environment["PREFECT_API_URL"] = "http://127.0.0.1:9/api"
    done = shell.run("--store", str(small_store))
    assert done.returncode == 1
    assert "no Prefect server answers where PREFECT_API_URL points" in done.stderr
    assert "127.0.0.1:9" in done.stderr
    assert "unset PREFECT_API_URL" in done.stderr
    record = shell.record()
    assert (record["state"], record["error"]["type"]) == ("failed", "ClusterError")
    assert "/report.html" in done.stderr
    assert shell.left_over() == []

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from scgpu_tasks.__main__ import main
from scgpu_tasks.records import write_run
from scgpu_tasks.records.listing import differences, find_records, open_record


@pytest.fixture
def out(tmp_path: Path, run: dict[str, Any], failed_run: dict[str, Any]) -> Path:
    """Three records: two that completed with other parameters, and one that failed."""
    out = tmp_path / "runs"
    qc = {"n_cells": 1500, "n_cells_kept": 1400, "n_genes_kept": 700, "n_hvg": 100}
    done = {
        **run,
        "state": "completed",
        "error": None,
        "parameters": {**run["parameters"], "n_comps": 10},
        "summary": {
            "qc": {**qc, "lost": {"cells": {"min_genes": 100}}},
            "pca": {"n_comps": 10, "variance_explained": 0.25},
        },
        "stages": {"qc": {"state": "computed", "seconds": 75.0}},
    }
    write_run(out / "first", done)
    other = {
        **done,
        "start": "2026-03-02T08:30:00+01:00",
        "parameters": {**done["parameters"], "n_comps": 20},
        "summary": {**done["summary"], "pca": {"n_comps": 20, "variance_explained": 0.375}},
        "stages": {"qc": {"state": "cached", "seconds": 0.0}},
    }
    write_run(out / "second", other)
    write_run(out / "broken", {**failed_run, "start": "2026-02-01T08:30:00+01:00"})
    (out / "no-record").mkdir()
    (out / "half").mkdir()
    (out / "half" / "run.json").write_text("{")
    return out


def test_records_are_listed_newest_first_with_what_they_found(out, capsys):
    assert [r.folder.name for r in find_records(out)] == ["second", "first", "broken"]
    assert main(["runs", "--out", str(out)]) == 0
    head, second, first, broken = capsys.readouterr().out.splitlines()
    for title in ("started", "run", "state", "store", "cells kept", "PCs", "variance", "time"):
        assert title in head
    assert "1,400 of 1,500 (93.3 %)" in first
    assert "25.0 %" in first
    assert "37.5 %" in second
    assert "failed in qc" in broken


def test_a_list_can_be_cut_down_and_read_by_programs(out, capsys):
    assert (
        main(["runs", "--out", str(out), "--state", "completed", "--last", "1", "--json"]) == 0
    )
    (facts,) = json.loads(capsys.readouterr().out)
    assert facts["name"] == "second"
    assert (facts["cells_kept"], facts["variance_explained"]) == (1400, 0.375)
    assert find_records(out, store="atlas.zarr") == find_records(out)
    assert find_records(out, store="las.zarr") == []


def test_two_runs_are_compared_by_what_differs(out, capsys):
    found = differences(open_record(out, "first"), open_record(out, "second"))
    assert found["parameters"] == {"n_comps": (10, 20)}
    assert found["results"] == {
        "pca n_comps": (10, 20),
        "pca variance_explained": (0.25, 0.375),
    }
    assert "versions" not in found
    assert main(["runs", "--out", str(out), "first", "second"]) == 0
    text = capsys.readouterr().out
    assert ["qc", "computed", "1", "min", "15", "s", "cached"] in map(
        str.split, text.splitlines()
    )
    assert ["n_comps", "10", "20"] in map(str.split, text.splitlines())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["first", "nowhere"], "no record nowhere"),
        (["first"], "name two runs"),
        (["--out", "not/there"], "no folder not/there"),
    ],
)
def test_what_is_not_there_is_said(out, capsys, arguments, message):
    assert main(["runs", "--out", str(out), *arguments]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"5", b"null", b"\xff\xfe", b"[]"])
def test_what_is_no_record_is_left_out_of_the_list(out, content):
    (out / "half" / "run.json").write_bytes(content)
    assert [r.folder.name for r in find_records(out)] == ["second", "first", "broken"]


@pytest.mark.parametrize("change", [{"start": None}, {"summary": []}, {"stages": {"qc": {}}}])
def test_a_record_with_a_part_of_another_kind_is_named_and_left_out(out, caplog, change):
    written = json.loads((out / "first" / "run.json").read_text())
    (out / "first" / "run.json").write_text(json.dumps(written | change))
    with caplog.at_level(logging.WARNING):
        assert [r.folder.name for r in find_records(out)] == ["second", "broken"]
    assert "first/run.json is no record of a run" in caplog.text

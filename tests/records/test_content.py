"""Records that something else wrote, or damaged: none takes the list down."""

import copy
import json
import math

import pytest

from scgpu_tasks.__main__ import main
from scgpu_tasks.errors import FormatError
from scgpu_tasks.job import living
from scgpu_tasks.records import write_run
from scgpu_tasks.records.content import load_run
from scgpu_tasks.records.listing import (
    compare_text,
    differences,
    find_records,
    list_text,
    open_record,
)

VALUES = (
    7,
    10**400,
    1.5,
    math.nan,
    True,
    None,
    "text",
    "\ud800",
    [],
    {"a": 1},
)


def paths(value, above=()):
    yield above
    if isinstance(value, dict):
        for name, item in value.items():
            yield from paths(item, (*above, name))


def changed(run, path, value):
    if not path:
        return value
    run = copy.deepcopy(run)
    part = run
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    return run


@pytest.fixture
def full(failed_run):
    counts = {"n_cells": 9, "n_cells_kept": 8, "n_genes_kept": 7, "n_hvg": 6, "note": 1.5}
    failed_run["summary"] = {
        "qc": {**counts, "lost": {"cells": {"min_genes": 1}}, "thresholds": {"min_genes": 2}},
        "pca": {"n_comps": 5, "variance_explained": 0.5},
    }
    return failed_run | {"cluster": {"workers": 2}}


def test_no_part_of_another_kind_takes_the_list_or_a_comparison_down(tmp_path, full):
    write_run(tmp_path / "good", full)
    good, refused = open_record(tmp_path, "good"), []
    assert good.run == full
    (tmp_path / "bad").mkdir()
    for path in paths(full):
        for value in VALUES:
            text = json.dumps(changed(full, path, value))
            (tmp_path / "bad" / "run.json").write_text(text)
            try:
                bad = open_record(tmp_path, "bad")
            except FormatError as error:
                refused.append(str(error))
                continue
            list_text([bad]).encode()
            compare_text(good, bad).encode()
            json.dumps([bad.facts(), differences(bad, good)], allow_nan=False)
    assert len(refused) > 100
    start = f"{tmp_path}/bad/run.json is no record of a run"
    assert all(message.startswith(start) for message in refused)
    (tmp_path / "bad" / "run.json").write_text(json.dumps(full | {"stages": [1]}))
    assert find_records(tmp_path) == [good]


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a":' * 100_000, "[" * 200 + "]" * 200, "1" * 5000, "x", "", "\x00"],
)
def test_what_is_no_json_of_a_run_is_left_out_and_refused_by_name(tmp_path, run, capsys, text):
    write_run(tmp_path / "good", run)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "run.json").write_text(text)
    assert main(["runs", "--out", str(tmp_path), "--json"]) == 0
    assert [r["name"] for r in json.loads(capsys.readouterr().out)] == ["good"]
    assert main(["runs", "--out", str(tmp_path), "good", "bad"]) == 1
    assert f"{tmp_path}/bad/run.json is no record of a run" in capsys.readouterr().err


def test_seconds_that_are_no_number_are_a_dash(tmp_path, run):
    (tmp_path / "run.json").write_text(json.dumps(run | {"seconds": math.nan}))
    assert "seconds" not in load_run(tmp_path)


def test_the_next_run_begins_though_a_killed_run_left_a_damaged_record(tmp_path, run):
    for name, content in (("a", "[" * 100_000), ("b", json.dumps(run | {"stages": 3}))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(content)
        (tmp_path / name / living.MARK).write_text(f"0123456789ab-{2**22 + 1}-345")
    living.SILENT_FOR_S, before = -1.0, living.SILENT_FOR_S
    try:
        assert living.sweep(tmp_path) == []
    finally:
        living.SILENT_FOR_S = before

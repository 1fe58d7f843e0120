import json
import os
import time

import pytest

from scgpu_tasks.__main__ import main
from scgpu_tasks.job import cache
from scgpu_tasks.job.owner import has_ended, owner
from scgpu_tasks.job.workdir import MANIFEST, WorkDir

DAY = 24 * 3600
AA, BB, CC = (letter * 40 for letter in "abc")


@pytest.fixture
def work(tmp_path):
    """Three stages of two stores, last used 0, 10 and 20 days ago."""
    work = WorkDir(tmp_path / "work")
    made = [("qc", AA, "a.zarr"), ("pca", BB, "a.zarr"), ("qc", CC, "b.zarr")]
    for days, (stage, key, name) in enumerate(made):
        with work.draft(stage) as draft:
            (draft.path / "values").write_bytes(bytes(10_000))
            done = draft.publish(key, inputs={"store": f"/data/{name}"}, summary={})
        used = time.time() - 10 * days * DAY
        os.utime(done.path / MANIFEST, (used, used))
    return work


def keys(work):
    return {entry.key for entry in cache.entries(work.root)}


def run(work, *arguments):
    return main(["cache", "--work", str(work.root), *arguments])


def test_what_is_kept_is_listed_and_nothing_is_removed_unasked(work, capsys):
    assert run(work, "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(e["key"], e["store"], e["removed"]) for e in listed] == [
        (CC, "/data/b.zarr", False),
        (BB, "/data/a.zarr", False),
        (AA, "/data/a.zarr", False),
    ]
    assert all(10_000 < e["bytes"] < 11_000 for e in listed)
    assert keys(work) == {AA, BB, CC}


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        (["--older-than", "15d"], {AA, BB}),
        (["--older-than", "9d"], {AA}),
        (["--keep", "25kB"], {AA, BB}),
        (["--keep", "0"], set()),
        (["--store", "a.zarr", "--all"], {CC}),
        (["--all"], set()),
        (["--all", "--dry-run"], {AA, BB, CC}),
    ],
)
def test_stages_are_removed_by_age_size_and_store(work, arguments, left):
    assert run(work, *arguments) == 0
    assert keys(work) == left


def test_what_a_run_needs_stays(work):
    with work.hold([BB]):
        assert run(work, "--all") == 0
        assert keys(work) == {BB}
        assert work.find("pca", BB) is not None
    assert run(work, "--all") == 0
    assert keys(work) == set()


def test_a_stage_that_a_run_begins_to_use_as_it_is_removed_comes_back(work, monkeypatch):
    answers = iter([set(), {BB}])
    monkeypatch.setattr("scgpu_tasks.job.workdir.held_keys", lambda _: next(answers))
    chosen = [entry for entry in cache.entries(work.root) if entry.key == BB]
    assert cache.remove(chosen) == []
    assert work.find("pca", BB) is not None


def test_what_a_killed_run_held_is_free_again(work):
    machine, _, started = owner().split("-")
    gone = f"{machine}-{2**22 + 1}-{started}"
    assert has_ended(gone)
    (work.root / ".held").mkdir()
    (work.root / ".held" / f"{gone}-0").write_text(AA)
    assert run(work, "--all") == 0
    assert keys(work) == set()
    work.clean()
    assert list((work.root / ".held").iterdir()) == []


def test_using_a_stage_makes_it_young(work):
    assert work.find("qc", CC) is not None
    assert next(entry.key for entry in cache.entries(work.root)) == BB


@pytest.mark.parametrize("option", [["--older-than", "soon"], ["--keep", "3 apples"]])
def test_a_measure_that_is_none_is_refused(work, capsys, option):
    assert run(work, *option) == 1
    assert "is not a" in capsys.readouterr().err


def test_folders_of_others_stay_whatever_is_asked(work, capsys):
    foreign = work.root / "ext" / "chrome"
    foreign.mkdir(parents=True)
    (foreign / MANIFEST).write_text('{"name": "x"}')
    (foreign / "thesis.txt").write_text("precious")
    assert run(work, "--all") == 0
    assert "chrome" not in capsys.readouterr().out
    assert (foreign / "thesis.txt").read_text() == "precious"


def test_a_note_of_a_run_that_is_no_text_is_passed_over(work):
    with work.hold([AA]):
        notes = [p for p in work.root.rglob("*") if p.is_file() and p.parent.name == ".held"]
        assert notes
        (notes[0].parent / "junk").write_bytes(b"\xff\xfe")
        assert run(work, "--all") == 0
        assert keys(work) == {AA}

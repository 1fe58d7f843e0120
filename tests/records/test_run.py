from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from scgpu_tasks.errors import OutputError
from scgpu_tasks.records import read_run, write_record, write_run
from scgpu_tasks.records.run import fresh_folder
from tests.records.conftest import Finished


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.fixture
def few_bytes() -> Iterator[Callable[[int], None]]:
    """Function that lets the system refuse files beyond a size, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda most: resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_values_that_json_lacks_become_what_every_reader_takes(tmp_path: Path) -> None:
    values = {
        "nan": float("nan"),
        "infinite": np.float32("inf"),
        "count": np.int64(2**40),
        "flag": np.bool_(True),
        "array": np.array([1.5, np.nan]),
        "path": Path("/a b"),
        "names": {"b", "a"},
        "tuple": (1, "é<"),
        3: None,
    }
    path = write_run(tmp_path / "new" / "run", {"parameters": values})

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    content = json.loads(path.read_text("utf-8"), parse_constant=refuse)
    assert content["parameters"] == {
        "nan": None,
        "infinite": None,
        "count": 2**40,
        "flag": True,
        "array": [1.5, None],
        "path": "/a b",
        "names": ["a", "b"],
        "tuple": [1, "é<"],
        "3": None,
    }
    assert read_run(path.parent) == content


def test_run_json_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    write_run(tmp_path, {"state": "running"})
    with pytest.raises(RuntimeError, match="no text"):
        write_run(tmp_path, {"state": "completed", "parameters": {"x": Unprintable()}})
    assert read_run(tmp_path) == {"state": "running"}
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


def test_run_json_gets_the_permissions_of_an_ordinary_file(tmp_path: Path) -> None:
    ordinary = tmp_path / "ordinary"
    ordinary.write_text("")
    assert write_run(tmp_path, {}).stat().st_mode == ordinary.stat().st_mode


def test_a_folder_that_cannot_be_made_is_named_with_the_option(
    tmp_path: Path, run: dict
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"file/run.*--out"):
        write_record(tmp_path / "file" / "run", run)


def test_runs_of_one_name_get_a_folder_each(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: fresh_folder(tmp_path, "nightly"), range(8)))
    numbered = {f"nightly-{number}" for number in range(2, 9)}
    assert {path.name for path in made} == {"nightly", *numbered}
    with pytest.raises(OutputError, match="--out"):
        fresh_folder(tmp_path / "nowhere", "nightly")


def test_a_record_that_finds_no_room_leaves_no_results(
    tmp_path: Path, run: dict, finished: Finished, few_bytes: Callable[[int], None]
) -> None:
    write_record(tmp_path, {**run, "state": "running"})
    data = {"obs": finished.obs, "var": finished.var, "qc": finished.qc, "pca": finished.pca}
    for most in (20_000, 100_000, 250_000):
        few_bytes(most)
        with pytest.raises(OutputError, match=r"cannot be written to .*Make room"):
            write_record(tmp_path, run, **data)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["report.html", "run.json"]
        assert read_run(tmp_path)["state"] == "running"


def test_a_record_of_a_run_that_only_began_is_run_json_and_report(
    tmp_path: Path, run: dict
) -> None:
    run["state"] = "running"
    report = write_record(tmp_path, run)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.html", "run.json"]
    assert report == tmp_path / "report.html"
    assert read_run(tmp_path) == run

"""Records from results that an earlier run kept."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scgpu_tasks.records import write_made
from scgpu_tasks.records.made import Computed, GoneError, Kept
from tests.records.conftest import Finished

# Neither the flow's modules nor a kept record need any of these.
HEAVY = ("anndata", "dask", "distributed", "matplotlib", "numba", "pandas", "pyarrow", "zarr")
COPY = f"""
import json, sys
from pathlib import Path
import scgpu_tasks.job.mainjob
from scgpu_tasks.records import write_made
from scgpu_tasks.records.made import Kept
run, kept, tables, record = sys.argv[1:]
write_made(record, json.loads(run), Kept(Path(kept), Path(tables)))
print([name for name in {HEAVY!r} if name in sys.modules])
"""


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def first(tmp_path: Path, run: dict, finished: Finished) -> Path:
    """A record, and in the folder ``kept`` beside it what was kept of it."""
    made = Computed(finished.obs, finished.var, finished.qc, finished.pca)
    record, kept = tmp_path / "first", tmp_path / "kept"
    write_made(record, run, made)
    kept.mkdir()
    made.keep(kept, record, run)
    return record


def test_kept_results_make_the_same_record_and_load_nothing_to_make_it_again(
    tmp_path: Path, run: dict, first: Path
) -> None:
    arguments = [json.dumps(run), tmp_path / "kept", first, tmp_path / "second"]
    done = subprocess.run(
        [sys.executable, "-c", COPY, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"
    assert files(tmp_path / "second") == files(first)


@pytest.mark.parametrize(
    "gone", ["kept/results.zarr", "kept/shown.json", "first/cells.parquet"]
)
def test_results_that_vanish_while_they_are_copied_are_told_from_a_full_disk(
    tmp_path: Path, run: dict, first: Path, gone: str
) -> None:
    path = tmp_path / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(GoneError, match="run again"):
        write_made(tmp_path / "second", run, Kept(tmp_path / "kept", first))
    assert list((tmp_path / "second").iterdir()) == []

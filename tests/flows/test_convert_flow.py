"""The conversion flow: what is new or changed, one failure among others, exit codes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp

from scgpu_tasks.errors import OutputError, ParameterError, ScgpuError, StoreError
from scgpu_tasks.io.checks import check
from scgpu_tasks.io.convert.many import convert_if_changed, match_sources

FLOW = Path(__file__).parents[2] / "flows" / "convert.py"


def write(path: Path, seed: int = 0) -> Path:
    """Write a small h5ad."""
    X = sp.random(50, 40, 0.3, "csr", dtype=np.float32, rng=np.random.default_rng(seed))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ad.AnnData(X).write_h5ad(path)
    return path


@pytest.fixture
def flow(server: str) -> Any:
    """Import flows/convert.py as a deployment does."""
    spec = importlib.util.spec_from_file_location("convert_flow", FLOW)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.atlas_convert


def test_a_folder_is_converted_and_then_only_what_changed(tmp_path: Path, flow: Any) -> None:
    (tmp_path / "in").mkdir()
    for name in ("a", "b"):
        write(tmp_path / "in" / f"{name}.h5ad")
    src, dst = str(tmp_path / "in"), str(tmp_path / "out")
    first = flow(src, dst)
    assert [found["state"] for found in first] == ["converted", "converted"]
    assert check(tmp_path / "out/a.zarr").ok
    assert [found["state"] for found in flow(src, dst)] == ["current", "current"]
    write(tmp_path / "in/b.h5ad", seed=1)
    write(tmp_path / "in/c.h5ad")
    again = flow(src, dst)
    assert [found["state"] for found in again] == ["current", "converted", "converted"]
    assert any("earlier state of the source" in note for note in again[1]["notes"])


def test_a_source_that_fails_does_not_stop_the_others(tmp_path: Path, flow: Any) -> None:
    (tmp_path / "a.h5ad").write_bytes(b"\x89HDF\r\n\x1a\n cut short")
    write(tmp_path / "b.h5ad")
    with pytest.raises(
        ScgpuError, match=r"1 of 2 sources failed:\nfailed .*a\.h5ad(.|\n)*HDF5"
    ):
        flow(str(tmp_path / "*.h5ad"), str(tmp_path / "out"))
    assert check(tmp_path / "out/b.zarr").ok


def test_the_command_line_converts_one_source(tmp_path: Path) -> None:
    write(tmp_path / "a.h5ad")
    command = [sys.executable, str(FLOW), str(tmp_path / "a.h5ad"), str(tmp_path / "b.zarr")]
    # A database of its own: that of the user may be of a newer Prefect.
    env = os.environ | {"PREFECT_HOME": str(tmp_path / "prefect")}
    answer = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert answer.returncode == 0, answer.stderr
    assert "converted" in answer.stdout
    assert "verified" in answer.stdout
    assert check(tmp_path / "b.zarr").ok


def test_names_of_stores_come_from_the_sources(tmp_path: Path) -> None:
    write(tmp_path / "x.y.h5ad")
    (tmp_path / "z.zarr.converting").mkdir()
    (tmp_path / "notes.txt").touch()
    expected = [(str(tmp_path / "x.y.h5ad"), str(tmp_path / "out/x.y.zarr"))]
    assert match_sources(str(tmp_path), str(tmp_path / "out")) == expected
    with pytest.raises(StoreError, match="no source matches"):
        match_sources(str(tmp_path / "*.zarr"), "out")
    convert_if_changed(tmp_path / "x.y.h5ad", tmp_path / "x.y.zarr")
    with pytest.raises(ParameterError, match="would both become"):
        match_sources(str(tmp_path), "out")


def test_a_store_that_came_from_elsewhere_is_not_replaced(tmp_path: Path) -> None:
    write(tmp_path / "a.h5ad")
    write(tmp_path / "b.h5ad", seed=1)
    convert_if_changed(tmp_path / "a.h5ad", tmp_path / "out.zarr")
    with pytest.raises(OutputError, match="exists"):
        convert_if_changed(tmp_path / "b.h5ad", tmp_path / "out.zarr")

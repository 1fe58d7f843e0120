"""What `open_rows` refuses, and how it says so."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import pandas as pd
import pytest
import zarr

from scgpu_tasks.errors import FormatError, ParameterError, StoreError
from scgpu_tasks.io.rows import open_rows
from tests.io.stores import sample, write


def rename(old: str, new: str) -> Callable[[Path], None]:
    return lambda store: (store / old).rename(store / new)


def csc(store: Path) -> None:
    shutil.rmtree(store)
    write(store, sample().tocsc())


def no_x(store: Path) -> None:
    shutil.rmtree(store)
    write(store, None, obs=pd.DataFrame(index=["a"]), var=pd.DataFrame(index=["b"]))


def strings(store: Path) -> None:
    root = zarr.open_group(store, mode="r+", use_consolidated=False)
    del root["X"]
    root.create_array("X", shape=(200, 60), dtype="<U3", fill_value="")
    root["X"].attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})


def attribute(name: str, value: Any) -> Callable[[Path], None]:
    def change(store: Path) -> None:
        zarr.open_group(store, path="X", mode="r+").attrs[name] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (csc, "CSC.*scgpu-tasks convert .* DST --csr"),
        (no_x, "has no X; it has no layers at all"),
        (rename("X", "layers/counts"), "has no X; its layers are counts"),
        (rename("obs", "bos"), None),
        (rename("zarr.json", "x.json"), "is not a zarr store"),
        (strings, "not numbers"),
        (rename("X/data", "X/values"), "has no array data"),
        (rename("X/indptr", "X/ptr"), "has no array indptr"),
        (attribute("encoding-type", "awkward-array"), "encoding-type 'awkward-array'"),
        (attribute("shape", [200]), "rows and columns are needed"),
        (attribute("shape", [-1, 60]), "rows and columns are needed"),
        (attribute("shape", [201, 60]), "201 rows but indptr has 201 entries, not 202"),
        (lambda store: (store / "X/zarr.json").write_text("{"), "is not JSON"),
        (lambda store: (store / "X/zarr.json").write_text("[]"), "not an object"),
        (lambda store: (store / "X/data/zarr.json").write_text("{}"), "node_type None"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_reason(
    tmp_path: Path, change: Callable[[Path], Any], message: str | None
) -> None:
    store = write(tmp_path / "a.zarr", sample())
    change(store)
    if message is None:
        open_rows(store)
        return
    with pytest.raises(FormatError, match=message):
        open_rows(store)


def test_h5ad_is_sent_to_the_converter(tmp_path: Path) -> None:
    path = tmp_path / "a.h5ad"
    ad.AnnData(sample()).write_h5ad(path)
    with pytest.raises(FormatError, match=r"HDF5 file.*scgpu-tasks convert"):
        open_rows(path)


def test_other_things_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="does not exist"):
        open_rows(tmp_path / "nothing.zarr")
    (tmp_path / "text").write_text("x")
    with pytest.raises(FormatError, match="is a file, not a zarr store"):
        open_rows(tmp_path / "text")
    with pytest.raises(FormatError, match="is remote"):
        open_rows("s3://bucket/a.zarr")
    zarr.open_group(tmp_path / "g.zarr", mode="w").create_array("X", shape=(3,), dtype="i4")
    with pytest.raises(FormatError, match="is not an AnnData store"):
        open_rows(tmp_path / "g.zarr")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FormatError, match=r"neither zarr.json nor .zgroup"):
        open_rows(tmp_path / "empty")
    store = write(tmp_path / "a.zarr", sample())
    with pytest.raises(FormatError, match="is not an AnnData store"):
        open_rows(store / "X")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"chunks": 0}, "at least 1 row"),
        ({"chunks": "big"}, "'auto'"),
        ({"chunks": [100, 99]}, "add up to 200"),
        ({"chunks": []}, "add up to 200"),
        ({"chunks": [-1, 201]}, "add up to 200"),
        ({"device": "tpu"}, "'cpu' or 'gpu'"),
        ({"max_bytes": 0}, "at least 1"),
    ],
)
def test_parameters_out_of_range_are_refused(
    tmp_path: Path, kwargs: dict[str, Any], message: str
) -> None:
    store = write(tmp_path / "a.zarr", sample())
    with pytest.raises(ParameterError, match=message):
        open_rows(store, **kwargs)


def test_rows_out_of_range_are_refused(small_store: Path) -> None:
    rows = open_rows(small_store)
    for start, stop in ((-1, 5), (5, 4), (0, 1501)):
        with pytest.raises(IndexError, match="of 1500"):
            rows.read(start, stop)

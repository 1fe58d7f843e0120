"""Columns of strings, read without an object for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from zarr.codecs import GzipCodec, ZstdCodec

from scgpu_tasks.errors import FormatError
from scgpu_tasks.io import strings
from scgpu_tasks.io.lazy import read_table
from scgpu_tasks.io.strings import read_element, read_strings

N = 60_000


def stored(values: list[str], **options: Any) -> zarr.Array:
    options = {"chunks": (7,), "compressors": ZstdCodec(level=1)} | options
    array = zarr.create_array({}, shape=(len(values),), dtype="str", fill_value="", **options)
    array[:] = np.array(values, dtype=object)
    return array


def read(array: zarr.Array) -> list[str]:
    parts = read_strings(array)
    assert parts is not None
    return pa.chunked_array(parts).to_pylist()


@given(st.lists(st.text(max_size=20), min_size=1, max_size=60), st.sampled_from([None, (21,)]))
def test_any_strings_are_read_as_written(values: list[str], shards: tuple[int] | None) -> None:
    assert read(stored(values, shards=shards)) == values
    assert read(stored(values, shards=shards, compressors=None)) == values


def test_chunks_that_are_not_stored_are_empty_strings() -> None:
    array = zarr.create_array({}, shape=(30,), chunks=(7,), dtype="str", fill_value="")
    array[7:14] = np.array(["x"] * 7, dtype=object)
    assert read(array) == [""] * 7 + ["x"] * 7 + [""] * 16


@pytest.mark.parametrize("options", [{"compressors": GzipCodec()}, {"fill_value": "none"}])
def test_arrays_of_other_kinds_are_left_to_zarr(options: dict[str, Any]) -> None:
    options = {"chunks": (7,)} | {"fill_value": ""} | options
    array = zarr.create_array({}, shape=(9,), dtype="str", **options)
    assert read_strings(array) is None


def cells() -> pd.DataFrame:
    names = pd.Index([f"cell-{i}-ä" for i in range(N)], name="barcode")
    plate = [f"plate {i}" for i in range(N)]
    some = pd.array([None if i % 7 == 0 else str(i) for i in range(N)], dtype="string")
    kind = pd.Categorical(np.arange(N) % 3)
    columns = {"plate": plate, "some": some, "kind": kind, "n": np.arange(N)}
    return pd.DataFrame(columns).set_index(names)


@pytest.fixture
def table(tmp_path: Path) -> zarr.Group:
    root = zarr.open_group(tmp_path / "a.zarr", mode="w")
    adata = ad.AnnData(np.zeros((N, 1), np.float32), cells())
    with ad.settings.override(allow_write_nullable_strings=True):
        adata.write_zarr(tmp_path / "a.zarr")
    return root


def test_a_table_is_read_as_anndata_reads_it(
    table: zarr.Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    monkeypatch.setattr(
        strings, "read_strings", lambda array: found.append(array.path) or read_strings(array)
    )
    pd.testing.assert_frame_equal(read_element(table["obs"]), ad.io.read_elem(table["obs"]))
    assert any("barcode" in path or "_index" in path for path in found)
    assert any("plate" in path for path in found)


def test_damaged_names_are_an_error_that_names_the_table(table: zarr.Group) -> None:
    path = Path(str(table.store_path).removeprefix("file://"))
    names = [f for f in path.rglob("*") if f.is_file() and "barcode" in f.parts]
    largest = max(names, key=lambda f: f.stat().st_size)
    raw = bytearray(largest.read_bytes())
    raw[-10] ^= 0xFF  # in the index of the shard
    largest.write_bytes(raw)
    with pytest.raises(FormatError, match=r"obs of .* cannot be read"):
        read_table(path, "obs")

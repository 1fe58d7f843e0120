from __future__ import annotations

import os
import shutil
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
import zarr

from scgpu_tasks.errors import FormatError, StoreError
from scgpu_tasks.io.fingerprint import scan_element, store_fingerprint, stored_bytes
from tests.io.stores import sample, write, write_csr

DOCUMENTS = ("zarr.json", ".zarray", ".zattrs", ".zgroup")


@pytest.fixture(params=["v2", "v3", "shards"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "a.zarr"
    if request.param == "shards":
        return write_csr(path, sample(), chunks=100, shard_of=5)
    return write_csr(path, sample(), chunks=100, zarr_format=int(request.param[1]))


def chunk_files(store: Path, element: str) -> list[Path]:
    named = ("zarr.json", ".zarray", ".zattrs", ".zgroup")
    return sorted(
        p for p in (store / element).rglob("*") if p.is_file() and p.name not in named
    )


def test_it_stays_the_same_while_nothing_changes(store: Path) -> None:
    first = store_fingerprint(store)
    ad.io.read_zarr(store)
    assert store_fingerprint(str(store) + "/") == first
    assert len(first) == 64


@pytest.mark.parametrize("element", ["X/data", "X/indices", "X/indptr", "obs", "var"])
def test_a_rewritten_chunk_of_the_same_size_changes_it(store: Path, element: str) -> None:
    first = store_fingerprint(store)
    chunk = chunk_files(store, element)[-1]
    stat = chunk.stat()
    chunk.write_bytes(chunk.read_bytes())
    # Even where the modification time is put back.
    os.utime(chunk, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert chunk.stat().st_size == stat.st_size
    assert store_fingerprint(store) != first


def swap(store: Path) -> None:
    a, b = chunk_files(store, "X/data")[:2]
    spare = a.with_name("spare")
    a.rename(spare)
    b.rename(a)
    spare.rename(b)


def edit_attribute(store: Path) -> None:
    zarr.open_group(store, path="X", mode="r+").attrs["note"] = "x"


def edit_root_attribute(store: Path) -> None:
    zarr.open_group(store, mode="r+", use_consolidated=False).attrs["note"] = "x"


def edit_column(store: Path) -> None:
    group = zarr.open_group(store, mode="r+", use_consolidated=False)
    ad.io.write_elem(group["obs"], "extra", np.arange(200))


@pytest.mark.parametrize(
    "change",
    [
        lambda store: chunk_files(store, "X/data")[0].unlink(),
        lambda store: chunk_files(store, "X/data")[0].rename(store / "X" / "data" / "99"),
        lambda store: (store / "X" / "data" / "99").write_bytes(b""),
        lambda store: chunk_files(store, "X/data")[0].write_bytes(b"short"),
        lambda store: shutil.rmtree(store / "X"),
        lambda store: shutil.rmtree(store / "obs"),
        swap,
        edit_attribute,
        edit_root_attribute,
        edit_column,
    ],
)
def test_any_change_of_an_element_changes_it(
    store: Path, change: Callable[[Path], Any]
) -> None:
    first = store_fingerprint(store)
    change(store)
    assert store_fingerprint(store) != first


def test_an_unrelated_element_does_not_change_it(store: Path) -> None:
    first = store_fingerprint(store)
    group = zarr.open_group(store, mode="r+", use_consolidated=False)
    ad.io.write_elem(group["obsm"], "X_pca", np.zeros((200, 3)))
    ad.io.write_elem(group["uns"], "note", "x")
    assert store_fingerprint(store) == first
    assert store_fingerprint(store, ("X", "obs", "var", "obsm")) != first


def test_consolidating_does_not_change_it(tmp_path: Path) -> None:
    store = write(tmp_path / "a.zarr", sample(), zarr_format=2)
    first = store_fingerprint(store)
    (store / ".zmetadata").unlink()
    assert store_fingerprint(store) == first


def test_elements_and_their_order_of_files_are_told_apart(store: Path) -> None:
    assert store_fingerprint(store, ("X",)) != store_fingerprint(store, ("obs",))
    assert store_fingerprint(store, ("X", "nothing")) != store_fingerprint(store, ("X",))


def test_a_layer_counts_where_it_is_asked_for(tmp_path: Path) -> None:
    store = write(tmp_path / "a.zarr", sample(), layers={"counts": sample()})
    elements = ("X", "obs", "var", "layers/counts")
    first, without = store_fingerprint(store, elements), store_fingerprint(store)
    chunk = chunk_files(store, "layers/counts")[0]
    chunk.write_bytes(chunk.read_bytes())
    assert store_fingerprint(store, elements) != first
    assert store_fingerprint(store) == without


def test_zip_members_count_by_their_content(tmp_path: Path) -> None:
    store = write(tmp_path / "a.zarr", sample())
    for name in ("b.zip", "c.zip"):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            for file in store.rglob("*"):
                if file.is_file():
                    archive.write(file, file.relative_to(store).as_posix())
    first = store_fingerprint(tmp_path / "b.zip")
    assert store_fingerprint(tmp_path / "c.zip") == first
    with zipfile.ZipFile(tmp_path / "b.zip", "a") as archive:
        archive.writestr("X/data/c/99", b"x")
    assert store_fingerprint(tmp_path / "b.zip") != first


def test_stored_bytes_are_the_sum_of_all_files(store: Path) -> None:
    for element in ("X", "X/data", "obs"):
        files = [p for p in (store / element).rglob("*") if p.is_file()]
        assert stored_bytes(store, element) == sum(p.stat().st_size for p in files)
    assert stored_bytes(store, "nothing") == 0


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="does not exist"):
        store_fingerprint(tmp_path / "nothing")
    (tmp_path / "a.h5ad").write_bytes(b"\x89HDF\r\n\x1a\n")
    with pytest.raises(FormatError, match="HDF5"):
        store_fingerprint(tmp_path / "a.h5ad")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may list any folder")
def test_a_folder_that_cannot_be_listed_is_named(store: Path) -> None:
    (store / "X").chmod(0)
    try:
        with pytest.raises(StoreError, match="files of X in"):
            store_fingerprint(store)
    finally:
        (store / "X").chmod(0o700)


@pytest.mark.slow
def test_a_hundred_thousand_files_take_seconds(tmp_path: Path) -> None:
    store = write(tmp_path / "a.zarr", sample())
    for folder in ("data", "indices"):
        target = store / "X" / folder / "c"
        for i in range(50_000):
            (target / str(i)).touch()
    start = time.perf_counter()
    scan_element(store, "X")
    assert time.perf_counter() - start < 10

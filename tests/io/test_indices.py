"""Shard indices that are kept from read to read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zarr

from scgpu_tasks.io import indices as module
from scgpu_tasks.io.indices import IndexCache, Stamp, indices
from scgpu_tasks.io.layout import absent_table, analyse_array
from tests.io.host_executor import HostPipeline
from tests.io.read_cases import open_with

VALUES = np.random.default_rng(0).poisson(1.0, 4_000).astype("f4")


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    indices.clear()
    yield
    indices.clear()


def write(path: Path, values: np.ndarray) -> Path:
    zarr.create_array(path, data=values, chunks=(100,), shards=(1_000,), overwrite=True)
    return path


def read(path: Path) -> np.ndarray:
    return np.asarray(open_with(path, "C", HostPipeline)[:])


def preads(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the index reads of one pass over the array."""
    sizes: list[int] = []
    real = os.pread

    def pread(fd: int, n: int, offset: int) -> bytes:
        sizes.append(n)
        return real(fd, n, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", pread)
        np.testing.assert_array_equal(read(path), VALUES)
    return [n for n in sizes if n == 16 * 10 + 4]


def test_an_index_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SETTLED_NS", 0)
    path = write(tmp_path / "a", VALUES)
    assert len(preads(path, monkeypatch)) == 4
    assert preads(path, monkeypatch) == []


def test_the_index_of_a_file_just_written_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a", VALUES)
    assert len(preads(path, monkeypatch)) == 4
    assert len(preads(path, monkeypatch)) == 4
    assert indices.nbytes == 0


def test_a_rewritten_shard_is_read_by_its_new_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SETTLED_NS", 0)
    path = write(tmp_path / "a", VALUES)
    read(path)
    shard = path / "c/1"
    before = shard.stat()
    write(path, VALUES[::-1].copy())
    # Also where whoever copies the file sets its time back.
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    np.testing.assert_array_equal(read(path), VALUES[::-1])
    (path / "c/2").unlink()
    assert not read(path)[2_000:3_000].any()


def test_no_more_than_so_many_bytes_are_kept(tmp_path: Path) -> None:
    layout = analyse_array(zarr.open_array(write(tmp_path / "a", VALUES)).metadata)
    table = absent_table(layout)
    cache = IndexCache(max_bytes=3 * 17 * 10)
    stamps = [Stamp(i, 1, 1, 1) for i in range(5)]
    for i, stamp in enumerate(stamps):
        cache.keep(f"{i}", stamp, layout, table)
        cache.keep(f"{i}", stamp, layout, table)
        assert cache.find("0", stamps[0], layout) is table
    assert cache.nbytes == 3 * 17 * 10
    assert [cache.find(f"{i}", s, layout) is table for i, s in enumerate(stamps)] == [
        True, False, False, True, True,
    ]  # fmt: skip
    assert cache.find("4", stamps[3], layout) is None

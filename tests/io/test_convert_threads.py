"""What threads do together: the same bytes, in bounded memory, and names among them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from scgpu_tasks.errors import CorruptChunkError
from scgpu_tasks.io.convert import ConvertSpec, convert_zarr, elements, encode, filework
from scgpu_tasks.io.convert.encode import FileWriter
from scgpu_tasks.io.convert.layout import plan_layout
from scgpu_tasks.io.convert.memory import threads_within
from scgpu_tasks.io.convert.worker import Task, Worker

from .test_convert_round_trip import assert_same, atlas, read, write

SMALL = ConvertSpec(chunk_bytes=1024, shard_bytes=32 * 1024)


@pytest.mark.parametrize("shape", [(5000,), (40, 301), (300, 7), (9, 10, 11)])
def test_a_file_has_the_same_bytes_in_whatever_order_its_pieces_are_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    monkeypatch.setattr(encode, "PIECE_BYTES", 2048)
    values = np.random.default_rng(0).integers(0, 9, shape).astype(np.float32)
    layout = plan_layout(shape, values.dtype, chunk_bytes=1000, shard_bytes=10**6)
    array = zarr.create_array(
        tmp_path / "a.zarr",
        shape=shape,
        dtype=values.dtype,
        chunks=layout.chunk,
        shards=layout.shard,
    )
    key = tmp_path / "a.zarr" / "/".join(["c", *("0" for _ in shape)])
    found = set()
    for step in (1, -1):
        writer = FileWriter(
            key, tmp_path / "part", layout, (0,) * len(shape), 3, lambda a, b: values[a:b]
        )
        numbers = range(len(writer.pieces))[::step]
        assert len(numbers) > 2
        assert [writer.write(n) for n in numbers] == [False] * (len(numbers) - 1) + [True]
        assert writer.finish().size == key.stat().st_size
        found.add(key.read_bytes())
        np.testing.assert_array_equal(array[...], values)
    assert len(found) == 1


def test_a_thread_with_no_file_of_its_own_helps_with_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode, "PIECE_BYTES", 2048)
    write(atlas(), tmp_path / "a.zarr", "zarr v3", 0)
    alone = ConvertSpec(chunk_bytes=1024, shard_bytes=10**7)
    convert_zarr(tmp_path / "a.zarr", tmp_path / "one.zarr", spec=alone, workers=1)
    both, begun = threading.Barrier(2), set()
    do = filework.FileWork.do

    def meeting(self: filework.FileWork, portion: range) -> bool:
        # The first two portions of this file wait for each other: one thread would wait long.
        if self.job.path == "X/data" and len(begun) < 2:
            begun.add(portion.start)
            both.wait(30)
        return do(self, portion)

    monkeypatch.setattr(filework.FileWork, "do", meeting)
    convert_zarr(tmp_path / "a.zarr", tmp_path / "two.zarr", spec=alone, workers=12)
    assert len(begun) == 2
    for name in ("data", "indices"):
        one, two = (tmp_path / f"{n}.zarr/X/{name}/c/0" for n in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize("method", ["write", "make_run"])
def test_memory_bounds_the_number_of_threads_and_not_the_processors(
    tmp_path: Path, method: str
) -> None:
    adata = atlas()
    adata.X = adata.X.tocsc()
    write(adata, tmp_path / "a.h5ad", "h5ad", 1)
    spec = ConvertSpec(csr=True)
    worker = Worker(Task(str(tmp_path / "a.h5ad"), str(tmp_path / "w"), spec, True, ""))
    most = threads_within(worker.values, method, 1000)
    assert 1 < most < 100
    assert threads_within(worker.values, method, 1000, 2 * 500_000_000) in (
        2 * most,
        2 * most + 1,
    )
    assert threads_within(worker.values, method, 2) == 2
    assert threads_within(worker.values, method, 1000, 1) == 1
    worker.source.close()


@pytest.mark.parametrize(
    ("form", "choice"), [("h5ad", 1), ("zarr v2", 1), ("zarr v2", 2), ("zarr v3", 0)]
)
def test_names_are_copied_and_compared_over_borders_of_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, choice: int
) -> None:
    monkeypatch.setattr(elements, "_STRINGS_PER_CHUNK", 7)
    adata = atlas(50, 30)
    adata.obs_names = [f"né{i}" * (i % 5) + "x" for i in range(50)]
    adata.obs_names_make_unique()
    adata.uns["empty"] = np.array(["", "", ""])
    source = tmp_path / ("a.h5ad" if form == "h5ad" else "a.zarr")
    write(adata, source, form, choice)
    convert_zarr(source, tmp_path / "b.zarr")
    assert_same(read(source), read(tmp_path / "b.zarr"))
    assert len(list((tmp_path / "b.zarr/obs/_index/values/c").iterdir())) == 8

    right = elements.write_strings

    def wrong(array: Any, number: int, values: np.ndarray, level: int) -> None:
        if number == 3 and "_index" in array.path:
            values = values.copy()
            values[2] = "other"
        right(array, number, values, level)

    monkeypatch.setattr(elements, "write_strings", wrong)
    with pytest.raises(CorruptChunkError, match="23 holds 'other' instead of the source"):
        convert_zarr(source, tmp_path / "c.zarr")

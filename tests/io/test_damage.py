"""Damaged files: the right values, or an error that names the place; never others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zarr.codecs import BloscCodec, Crc32cCodec, GzipCodec, ZstdCodec

from scgpu_tasks.errors import CorruptChunkError, FormatError
from scgpu_tasks.io.rows import open_rows
from tests.io.stores import all_rows, assert_same, sample, write, write_csr

CHUNK = 100
SHARD_OF = 5
INDEX_BYTES = 16 * SHARD_OF + 4


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_csr(tmp_path / "a.zarr", sample(), chunks=CHUNK, shard_of=SHARD_OF)


def file_of(store: Path, array: str, number: int) -> Path:
    return store / "X" / array / "c" / str(number)


def read_all(store: Path) -> Any:
    return open_rows(store).read(0, 200).to_matrix()


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-30])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def garbage(file: Path) -> None:
    file.write_bytes(bytes(range(256)) * (file.stat().st_size // 256 + 1))


def flip(position: int) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        raw = bytearray(file.read_bytes())
        raw[position] ^= 0x10
        file.write_bytes(raw)

    return change


@pytest.mark.parametrize("array", ["data", "indices"])
@pytest.mark.parametrize("change", [truncate, empty, garbage, flip(-1), flip(-INDEX_BYTES)])
def test_a_shard_with_a_damaged_index_is_named(
    sharded: Path, array: str, change: Callable[[Path], None]
) -> None:
    change(file_of(sharded, array, 2))
    with pytest.raises(CorruptChunkError) as caught:
        read_all(sharded)
    error = caught.value
    assert (error.array, error.shard) == (f"X/{array}", "c/2")
    assert error.store == str(sharded)
    assert "again from its source" in str(error) or "again from the source" in str(error)
    rows = open_rows(sharded)
    assert_same(rows.read(0, 30).to_matrix(), sample()[:30])


def index_of(raw: bytes) -> np.ndarray:
    return np.frombuffer(raw[-INDEX_BYTES:-4], "<u8").reshape(-1, 2)


@pytest.mark.parametrize("array", ["data", "indices"])
def test_a_damaged_chunk_in_a_shard_is_named(sharded: Path, array: str) -> None:
    file = file_of(sharded, array, 1)
    raw = bytearray(file.read_bytes())
    offset, size = (int(n) for n in index_of(bytes(raw))[3])
    raw[offset : offset + size] = bytes(size)
    file.write_bytes(raw)
    with pytest.raises(CorruptChunkError) as caught:
        read_all(sharded)
    error = caught.value
    assert (error.array, error.shard, error.chunk) == (f"X/{array}", "c/1", (SHARD_OF + 3,))
    # The chunks beside it can still be read.
    indptr = sample().indptr
    row = int(np.searchsorted(indptr, (SHARD_OF + 4) * CHUNK))
    assert_same(open_rows(sharded).read(row, 200).to_matrix(), sample()[row:])


def test_an_index_that_points_outside_the_file_is_named(sharded: Path) -> None:
    import google_crc32c

    file = file_of(sharded, "data", 0)
    raw = file.read_bytes()
    index = index_of(raw).copy()
    index[2, 0] = 10**9
    fixed = index.tobytes()
    crc = google_crc32c.value(fixed).to_bytes(4, "little")
    file.write_bytes(raw[:-INDEX_BYTES] + fixed + crc)
    with pytest.raises(CorruptChunkError, match="impossible place") as caught:
        read_all(sharded)
    assert (caught.value.shard, caught.value.chunk) == ("c/0", (2,))


@pytest.mark.parametrize("compressors", [ZstdCodec(), BloscCodec(), GzipCodec(), None])
@pytest.mark.parametrize("change", [truncate, empty])
@pytest.mark.parametrize("array", ["data", "indices"])
def test_a_cut_off_chunk_file_is_named(
    tmp_path: Path, compressors: Any, change: Callable[[Path], None], array: str
) -> None:
    store = write_csr(tmp_path / "a.zarr", sample(), chunks=CHUNK, compressors=compressors)
    change(file_of(store, array, 7))
    with pytest.raises(CorruptChunkError) as caught:
        read_all(store)
    error = caught.value
    assert (error.array, error.shard, error.chunk) == (f"X/{array}", "c/7", (7,))


def test_a_cut_off_chunk_file_of_zarr_v2_is_named(tmp_path: Path) -> None:
    store = write_csr(tmp_path / "a.zarr", sample(), chunks=CHUNK, zarr_format=2)
    truncate(store / "X" / "data" / "7")
    with pytest.raises(CorruptChunkError) as caught:
        read_all(store)
    assert (caught.value.shard, caught.value.chunk) == ("7", (7,))


def test_a_cut_off_chunk_of_a_dense_matrix_is_named(tmp_path: Path) -> None:
    x = sample().toarray()
    store = write(tmp_path / "a.zarr", x)
    attributes = json.loads((store / "X" / "zarr.json").read_text())["attributes"]
    root = zarr.open_group(store, mode="r+", use_consolidated=False)
    del root["X"]
    root.create_array("X", shape=x.shape, dtype="f4", chunks=(50, 20))[:] = x
    root["X"].attrs.update(attributes)
    truncate(store / "X" / "c" / "2" / "1")
    with pytest.raises(CorruptChunkError) as caught:
        open_rows(store).read(0, 200)
    error = caught.value
    assert (error.array, error.shard, error.chunk) == ("X", "c/2/1", (2, 1))
    np.testing.assert_array_equal(open_rows(store).read(0, 100).values, x[:100])


@pytest.mark.parametrize("shard_of", [None, SHARD_OF])
@pytest.mark.parametrize("array", ["data", "indices", "indptr"])
def test_a_lost_file_of_a_sparse_matrix_is_not_read_as_zeros(
    tmp_path: Path, array: str, shard_of: int | None
) -> None:
    store = write_csr(tmp_path / "a.zarr", sample(), chunks=CHUNK, shard_of=shard_of)
    file_of(store, array, 0).unlink()
    with pytest.raises(CorruptChunkError, match="missing") as caught:
        read_all(store)
    assert (caught.value.array, caught.value.shard) == (f"X/{array}", "c/0")


def test_a_missing_chunk_of_a_dense_matrix_is_fill_values(tmp_path: Path) -> None:
    store = write(tmp_path / "a.zarr", np.zeros((20, 5), np.float32))
    assert not list((store / "X").rglob("c/*"))
    np.testing.assert_array_equal(open_rows(store).read(0, 20).values, np.zeros((20, 5)))


def test_a_chunk_of_first_genes_that_zarr_left_out_is_no_damage(tmp_path: Path) -> None:
    # All column numbers are 0, so zarr writes no file for them.
    x = np.array([[5.0, 0], [0, 0], [7, 0]], np.float32)
    store = write(tmp_path / "a.zarr", sp.csr_matrix(x))
    assert not list((store / "X" / "indices").rglob("c/*"))
    np.testing.assert_array_equal(open_rows(store).read(0, 3).to_matrix().toarray(), x)


def left_out(path: Path, x: sp.csr_matrix, chunks: int) -> Path:
    """Write X with its indptr as zarr does by itself: chunks of zeros are no files."""
    store = write_csr(path, x, chunks=chunks)
    group = zarr.open_group(store, path="X", mode="r+", use_consolidated=False)
    group.create_array("indptr", data=x.indptr, chunks=(chunks,), overwrite=True)
    assert not file_of(store, "indptr", 0).exists()
    return store


@pytest.mark.parametrize(("empty_cells", "chunks"), [(0, 1), (3, 1), (40, 10), (45, 10)])
def test_chunks_of_empty_first_cells_that_zarr_left_out_are_no_damage(
    tmp_path: Path, empty_cells: int, chunks: int
) -> None:
    x = sp.vstack([sp.csr_matrix((empty_cells, 60), dtype=np.float32), sample(60)], "csr")
    rows = open_rows(left_out(tmp_path / "a.zarr", x, chunks), chunks=7)
    assert_same(all_rows(rows), x)
    assert_same(rows.read(0, empty_cells).to_matrix(), x[:empty_cells])


def test_a_file_lost_after_chunks_that_zarr_left_out_is_named(tmp_path: Path) -> None:
    x = sp.vstack([sp.csr_matrix((40, 60), dtype=np.float32), sample(60)], "csr")
    store = left_out(tmp_path / "a.zarr", x, 10)
    rows = open_rows(store)
    # The one after the last left out, and one further on.
    for number in (4, 7):
        file = file_of(store, "indptr", number)
        content = file.read_bytes()
        file.unlink()
        with pytest.raises(CorruptChunkError, match="have lost their place") as caught:
            open_rows(store)
        with pytest.raises(CorruptChunkError, match="have lost their place") as later:
            rows.read(number * 10 - 5, 99)
        for error in (caught.value, later.value):
            assert (error.array, error.shard) == ("X/indptr", f"c/{number}")
        file.write_bytes(content)
    assert_same(all_rows(rows), x)


def overwrite(array: str, position: int, value: int) -> Callable[[Path], None]:
    def change(store: Path) -> None:
        zarr.open_group(store, path="X", mode="r+")[array][position] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (overwrite("indptr", 50, 0), r"indptr of X .* falls from \d+ to 0 at row 49"),
        (
            overwrite("indptr", 200, 10**6),
            "rows 0 to 199 at values 0 to 1000000, but there are 3600",
        ),
        (overwrite("indptr", 0, -3), "puts rows 0 to 199 at values -3"),
        (overwrite("indptr", 0, 3), "runs from 3"),
    ],
)
def test_a_broken_indptr_is_refused_with_the_row(
    sharded: Path, change: Callable[[Path], None], message: str
) -> None:
    change(sharded)
    with pytest.raises(FormatError, match=message):
        open_rows(sharded)


def test_an_indptr_that_breaks_later_is_refused_with_the_row(sharded: Path) -> None:
    rows = open_rows(sharded)
    overwrite("indptr", 50, 0)(sharded)
    with pytest.raises(FormatError, match=r"falls from .* at row 49"):
        rows.read(10, 60)
    assert_same(rows.read(60, 70).to_matrix(), sample()[60:70])


@pytest.mark.parametrize("value", [60, 10**6, -1])
def test_a_column_out_of_range_is_refused_with_the_row(sharded: Path, value: int) -> None:
    indptr = sample().indptr
    overwrite("indices", int(indptr[120]) + 1, value)(sharded)
    with pytest.raises(FormatError, match=rf"column {value} in row 120, but .* 60 columns"):
        open_rows(sharded).read(100, 130)


def test_arrays_that_do_not_fit_each_other_are_refused(sharded: Path) -> None:
    zarr.open_group(sharded, path="X", mode="r+")["data"].resize((100,))
    with pytest.raises(FormatError, match="100 values but 3600 column indices"):
        open_rows(sharded)


@given(st.data())
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_damage_ends_in_right_values_or_a_named_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    checksummed = data.draw(st.sampled_from([[ZstdCodec(checksum=True)], [Crc32cCodec()]]))
    shard_of = data.draw(st.sampled_from([None, SHARD_OF]))
    store = write_csr(
        tmp_path_factory.mktemp("damage") / "a.zarr",
        sample(),
        chunks=CHUNK,
        shard_of=shard_of,
        compressors=checksummed,
    )
    files = sorted(
        p for name in ("data", "indices", "indptr") for p in (store / "X" / name).rglob("c/*")
    )
    file = data.draw(st.sampled_from(files))
    raw = bytearray(file.read_bytes())
    kind = data.draw(st.sampled_from(["flip", "cut", "zero", "delete", "swap", "append"]))
    at = data.draw(st.integers(0, len(raw) - 1))
    if kind == "flip":
        raw[at] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        del raw[at:]
    elif kind == "zero":
        raw[at : at + 50] = bytes(len(raw[at : at + 50]))
    elif kind == "append":
        raw += b"\x00" * 7
    if kind == "delete":
        file.unlink()
    elif kind == "swap":
        other = data.draw(st.sampled_from(files))
        raw, theirs = other.read_bytes(), bytes(raw)
        file.write_bytes(raw)
        other.write_bytes(theirs)
    else:
        file.write_bytes(raw)
    try:
        found = read_all(store)
    except (CorruptChunkError, FormatError) as error:
        assert "X/" in str(error) or "of X" in str(error)  # noqa: PT017 - both outcomes are right
    else:
        if kind != "swap":  # nothing in a chunk says where it belongs
            assert_same(found, sample())

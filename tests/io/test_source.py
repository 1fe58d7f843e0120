"""Every kind of source is opened for what it is, and its stamp changes when it does."""

from __future__ import annotations

import os
from pathlib import Path

import h5py
import numpy as np
import pytest
import zarr

from scgpu_tasks.errors import FormatError, MissingPackageError, StoreError
from scgpu_tasks.io.convert.h5chunks import H5Chunks, H5Contiguous
from scgpu_tasks.io.convert.zarrchunks import ZarrChunks
from scgpu_tasks.io.source import open_source, plain_attrs, source_stamp

from .test_convert_round_trip import atlas, write


@pytest.mark.parametrize(
    ("form", "name", "expected"),
    [
        ("h5ad", "a.h5ad", "h5ad file"),
        ("zarr v2", "a.zarr", "zarr v2 folder"),
        ("zarr v3", "a.zarr", "zarr v3 folder"),
    ],
)
def test_a_source_is_recognised_by_its_content(
    tmp_path: Path, form: str, name: str, expected: str
) -> None:
    write(atlas(), tmp_path / name, form, 0)
    # The name says nothing.
    (tmp_path / name).rename(tmp_path / "data")
    with open_source(tmp_path / "data") as source:
        assert source.form == expected
        assert source.is_local
        assert source.node("obs/group") is not None


def test_a_stamp_changes_with_any_chunk_and_not_with_the_name(tmp_path: Path) -> None:
    write(atlas(), tmp_path / "a.zarr", "zarr v3", 0)
    stamp = source_stamp(tmp_path / "a.zarr")
    (tmp_path / "a.zarr").rename(tmp_path / "b.zarr")
    assert source_stamp(tmp_path / "b.zarr") == stamp
    chunk = next((tmp_path / "b.zarr/X/data").rglob("c/*"))
    data = bytearray(chunk.read_bytes())
    data[-1] ^= 1
    chunk.write_bytes(data)
    changed = source_stamp(tmp_path / "b.zarr")
    assert changed != stamp
    (tmp_path / "b.zarr/X/data/extra").touch()
    assert source_stamp(tmp_path / "b.zarr") != changed


def test_a_stamp_of_an_h5ad_changes_when_it_is_written(tmp_path: Path) -> None:
    write(atlas(), tmp_path / "a.h5ad", "h5ad", 0)
    stamp = source_stamp(tmp_path / "a.h5ad")
    stat = (tmp_path / "a.h5ad").stat()
    os.utime(tmp_path / "a.h5ad", ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert source_stamp(tmp_path / "a.h5ad") != stamp


@pytest.mark.parametrize("name", ["a.h5ad", "a.zarr"])
def test_a_stamp_changes_where_size_and_time_of_a_rewritten_file_stay(
    tmp_path: Path, name: str
) -> None:
    write(atlas(), tmp_path / name, "h5ad" if name == "a.h5ad" else "zarr v3", 0)
    stamp = source_stamp(tmp_path / name)
    file = tmp_path / ("a.h5ad" if name == "a.h5ad" else "a.zarr/X/data/c/0")
    before, data = file.stat(), bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert source_stamp(tmp_path / name) != stamp


def test_a_url_that_needs_a_package_names_it() -> None:
    with pytest.raises((MissingPackageError, StoreError), match=r"pip install|not known"):
        open_source("s3://bucket/a.zarr")


def test_a_zip_behind_a_url_is_refused_with_advice() -> None:
    with pytest.raises(FormatError, match="must be copied to a local disk"):
        open_source("memory://x/a.zip")


def test_attributes_become_plain_values(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.attrs["n"] = np.int64(3)
        file.attrs["names"] = np.array(["a", "é"], dtype=h5py.string_dtype())
        file.attrs["bytes"] = np.bytes_(b"abc")
        file.attrs["none"] = h5py.Empty("f")
        file.attrs["flag"] = np.bool_(True)
        found = plain_attrs(file)
    assert found == {
        "n": 3,
        "names": ["a", "é"],
        "bytes": "abc",
        "none": None,
        "flag": True,
    }


VALUES = np.random.default_rng(0).integers(0, 99, (103, 37))
DTYPES = ("f4", ">f8", "i2", ">u4", "?", "c16", "f2")
RANGES = ((0, 103), (0, 1), (17, 64), (20, 40), (102, 103))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [
        {"chunks": (20, 10), "compression": "gzip"},
        {"chunks": (20, 37), "compression": "gzip", "shuffle": True},
        {"chunks": (7, 40), "maxshape": (None, 40)},
        {},
    ],
)
def test_chunks_of_an_h5ad_decode_as_hdf5_decodes_them(
    tmp_path: Path, dtype: str, options: dict[str, object]
) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("a", data=VALUES.astype(dtype), **options)
    with h5py.File(path) as file:
        node = file["a"]
        chunks = H5Chunks.of(node, path) or H5Contiguous.of(node, path)
        assert chunks is not None
        for start, stop in RANGES:
            out = np.empty((stop - start, 37), chunks.dtype)
            chunks.fill(start, stop, out)
            assert chunks.dtype.isnative
            np.testing.assert_array_equal(out, node[start:stop])


def test_what_only_hdf5_can_decode_is_left_to_it(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("lzf", data=VALUES, chunks=(10, 10), compression="lzf")
        file.create_dataset("checked", data=VALUES, chunks=(10, 10), fletcher32=True)
        file.create_dataset("words", data=["a", "b"])
        file.create_dataset("empty", shape=(0,), maxshape=(None,), dtype="f4")
        file.create_dataset("unwritten", shape=(9,), dtype="f4")
        for node in file.values():
            assert H5Chunks.of(node, path) is None
            assert H5Contiguous.of(node, path) is None
    with h5py.File(path, "w", userblock_size=512) as file:
        node = file.create_dataset("a", data=VALUES, chunks=(10, 10))
        assert H5Chunks.of(node, path) is None


def test_chunks_that_were_never_written_hold_the_fill_value(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        node = file.create_dataset("a", (100,), "i4", chunks=(10,), fillvalue=7)
        node[30:35] = 1
    array = zarr.create_array(
        tmp_path / "a.zarr", shape=(100,), dtype="i4", chunks=(10,), fill_value=7
    )
    array[30:35] = 1
    with h5py.File(path) as file:
        for chunks in (H5Chunks.of(file["a"], path), ZarrChunks.of(array)):
            assert chunks is not None
            out = np.empty(100, np.int32)
            chunks.fill(0, 100, out)
            np.testing.assert_array_equal(out, array[:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("codec", ["none", "blosc", "zstd", "gzip"])
def test_chunks_of_a_zarr_array_decode_as_zarr_decodes_them(
    tmp_path: Path, dtype: str, zarr_format: int, codec: str
) -> None:
    import numcodecs

    v2 = {
        "none": None,
        "blosc": numcodecs.Blosc(),
        "zstd": numcodecs.Zstd(),
        "gzip": numcodecs.GZip(),
    }
    v3 = {
        "none": None,
        "blosc": zarr.codecs.BloscCodec(),
        "zstd": zarr.codecs.ZstdCodec(),
        "gzip": zarr.codecs.GzipCodec(),
    }
    array = zarr.create_array(
        tmp_path / "a.zarr",
        shape=VALUES.shape,
        dtype=dtype,
        chunks=(20, 10),
        zarr_format=zarr_format,
        compressors=(v2 if zarr_format == 2 else v3)[codec],
    )
    array[:] = VALUES.astype(dtype)
    chunks = ZarrChunks.of(array)
    assert chunks is not None
    for start, stop in RANGES:
        out = np.empty((stop - start, 37), chunks.dtype)
        chunks.fill(start, stop, out)
        np.testing.assert_array_equal(out, array[start:stop])


def test_arrays_that_only_zarr_can_decode_are_left_to_it(tmp_path: Path) -> None:
    for n, options in enumerate(
        (
            {"shards": (40, 40)},
            {"filters": zarr.codecs.TransposeCodec(order=(1, 0))},
            {"zarr_format": 2, "order": "F"},
        )
    ):
        array = zarr.create_array(
            tmp_path / f"{n}.zarr", shape=(40, 40), dtype="i4", chunks=(10, 10), **options
        )
        assert ZarrChunks.of(array) is None

"""Blocks of a store in GPU memory, against the same blocks on the host."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import zarr
from zarr.codecs import BloscCodec, ZstdCodec

from scgpu_tasks.datasets import write_synthetic
from scgpu_tasks.errors import CorruptChunkError, DataError, FormatError
from scgpu_tasks.io import gpu_packages
from scgpu_tasks.io.counters import read_statistics
from scgpu_tasks.io.lazy import read_lazy
from scgpu_tasks.io.rows import open_rows
from scgpu_tasks.io.settings import ReadSettings
from tests.gpu.read_helpers import gpu_missing
from tests.io.stores import sample, write, write_csr

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(gpu_missing()), reason=gpu_missing()),
    pytest.mark.usefixtures("all_on_the_gpu"),
]


def test_single_rows_are_read_as_blocks_are(small_store: Path) -> None:
    gpu_packages.configure(ReadSettings())
    on_gpu, on_host = (open_rows(small_store, device=d) for d in ("gpu", "cpu"))
    for start, stop in ((0, 1), (700, 703), (1499, 1500)):
        found = on_gpu.read(start, stop).to_matrix()
        assert_same_csr(found, on_host.read(start, stop).to_matrix())
    assert all(counts["small_chunks"] for counts in read_statistics().values())


def assert_same_csr(found: Any, expected: Any) -> None:
    host = found.get()
    assert host.shape == expected.shape
    np.testing.assert_array_equal(host.indptr, expected.indptr)
    np.testing.assert_array_equal(host.indices, expected.indices)
    np.testing.assert_array_equal(host.data, expected.data)


def test_blocks_equal_those_on_the_host(small_store: Path) -> None:
    import cupy
    from cupyx.scipy.sparse import csr_matrix

    on_gpu, on_host = (open_rows(small_store, chunks=333, device=d) for d in ("gpu", "cpu"))
    for i in range(on_host.n_blocks):
        found, expected = on_gpu.read_block(i), on_host.read_block(i)
        assert isinstance(found.data, cupy.ndarray)
        assert found.indices.dtype == np.uint16
        assert found.indptr.dtype == np.int64
        assert found.stored_bytes == expected.stored_bytes
        matrix = found.to_matrix()
        assert isinstance(matrix, csr_matrix)
        assert matrix.indices.dtype == np.int32
        assert_same_csr(matrix, expected.to_matrix())


def test_a_gpu_ready_store_is_decoded_by_the_gpu_alone(small_store: Path) -> None:
    open_rows(small_store, device="gpu").read(0, 1500)
    found = {name.split("/")[-1]: counts for name, counts in read_statistics().items()}
    assert set(found) == {"data", "indices"}
    for counts in found.values():
        assert counts["gpu_chunks"] > 0
        assert not counts["host_requests"]
        assert not counts["refused_chunks"]


@pytest.mark.parametrize(
    "layout",
    [
        {"compressors": BloscCodec()},
        {"compressors": None},
        {"compressors": ZstdCodec(checksum=True)},
        {"zarr_format": 2},
        {"dtype": ">f4"},
        {"index_dtype": "int64", "indptr_dtype": "int32"},
        {"shard_of": 4},
        {"dtype": "float16"},
        {"dtype": "float64"},
        {"dtype": "uint8"},
    ],
)
def test_every_layout_gives_the_values_of_the_host(tmp_path: Path, layout: Any) -> None:
    store = write_csr(tmp_path / "a.zarr", sample(), chunks=100, **layout)
    for start, stop in ((0, 200), (13, 14), (50, 50), (199, 200)):
        found = open_rows(store, device="gpu").read(start, stop).to_matrix()
        assert_same_csr(found, sample()[start:stop])


def test_dense_blocks_are_cupy_arrays(tmp_path: Path) -> None:
    import cupy

    x = sample().toarray()
    rows = open_rows(write(tmp_path / "a.zarr", x), chunks=70, device="gpu")
    for i in range(rows.n_blocks):
        block = rows.read_block(i)
        assert isinstance(block.values, cupy.ndarray)
        np.testing.assert_array_equal(
            block.values.get(), x[rows.bounds[i] : rows.bounds[i + 1]]
        )
    assert isinstance(rows.to_dask()._meta, cupy.ndarray)


@pytest.mark.parametrize("shape", [(0, 5), (1, 5), (1, 1)])
def test_tiny_matrices_are_read(tmp_path: Path, shape: tuple[int, int]) -> None:
    for name, value in (("ones", 1.0), ("empty", 0.0)):
        x = sp.csr_matrix(np.full(shape, value, np.float32))
        rows = open_rows(write(tmp_path / name, x), device="gpu")
        assert_same_csr(rows.read(0, shape[0]).to_matrix(), x)


@pytest.mark.parametrize(
    ("dtype", "largest", "expected"),
    [
        ("uint16", 65_535, "float32"),
        ("int32", 2**24, "float32"),
        ("int32", 2**24 + 1, "float64"),
        ("int64", -(2**24) - 1, "float64"),
        ("uint32", 2**32 - 1, "float64"),
        ("bool", 1, "bool"),
    ],
)
def test_whole_numbers_become_floats_that_hold_them(
    tmp_path: Path, dtype: str, largest: int, expected: str
) -> None:
    x = sample()
    x.data[:] = 1
    data = x.data.astype(dtype)
    data[5] = largest
    store = write_csr(tmp_path / "a.zarr", x, dtype=dtype)
    zarr.open_group(store, path="X", mode="r+")["data"][:] = data
    matrix = open_rows(store, device="gpu").read(0, 200).to_matrix()
    assert matrix.dtype == expected
    np.testing.assert_array_equal(matrix.data.get().astype(dtype), data)


def test_whole_numbers_that_no_float_holds_are_refused(tmp_path: Path) -> None:
    store = write_csr(tmp_path / "a.zarr", sample(), dtype="int64")
    zarr.open_group(store, path="X", mode="r+")["data"][7] = 2**53 + 1
    with pytest.raises(DataError, match="cannot be held exactly"):
        open_rows(store, device="gpu").read(0, 200).to_matrix()


def test_dask_array_says_what_its_blocks_are(small_store: Path) -> None:
    from cupyx.scipy.sparse import csr_matrix

    lazy = read_lazy(small_store, chunks=400, device="gpu")
    assert isinstance(lazy.X._meta, csr_matrix)
    assert isinstance(lazy.obs["batch"].cat.codes.to_numpy(), np.ndarray)
    block = lazy.X.blocks[1].compute(scheduler="synchronous")
    assert isinstance(block, csr_matrix)
    assert_same_csr(block, open_rows(small_store).read(400, 800).to_matrix())


def test_scanpy_normalises_it(small_store: Path) -> None:
    import scanpy as sc

    on_host = read_lazy(small_store, chunks=400, device="cpu").X.compute()
    lazy = read_lazy(small_store, chunks=400, device="gpu")
    sc.pp.log1p(lazy)
    block = lazy.X.blocks[0].compute(scheduler="synchronous")
    found = block.sum(axis=1).get()
    expected = np.asarray(np.log1p(on_host[:400]).sum(axis=1))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_auto_takes_the_gpu(small_store: Path) -> None:
    from cupyx.scipy.sparse import csr_matrix

    assert isinstance(read_lazy(small_store).X._meta, csr_matrix)


def test_auto_cuts_large_stores_into_few_blocks_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cupy

    from scgpu_tasks.io import rows

    n_gpus = cupy.cuda.runtime.getDeviceCount()
    n_obs = 12_000 * n_gpus
    store = write_synthetic(tmp_path / "a.zarr", n_obs, 40, nnz_per_cell=2)
    monkeypatch.setattr(rows, "ROWS_PER_BLOCK", 100)
    nnz = open_rows(store, device="gpu").nnz
    assert nnz is not None
    # Blocks of so many values; but at least 8 a GPU, and at most 55.
    for blocks, expected in ((1, 8), (20, 20), (500, 55)):
        monkeypatch.setattr(rows, "GPU_BLOCK_VALUES", nnz // (blocks * n_gpus))
        assert open_rows(store, device="gpu").n_blocks == expected * n_gpus
    assert open_rows(store, device="cpu").n_blocks == 120 * n_gpus
    assert open_rows(store, device="gpu", max_bytes=2_000).n_blocks > 55 * n_gpus


@pytest.mark.parametrize("streams", ["default", "own"])
def test_threads_read_at_the_same_time(small_store: Path, streams: str) -> None:
    import cupy

    rows = open_rows(small_store, chunks=50, device="gpu")
    expected = open_rows(small_store).read(0, 1500).to_matrix()

    def check(i: int) -> None:
        own = streams == "own"
        with cupy.cuda.Stream(non_blocking=True) if own else cupy.cuda.Stream.null:
            # Work that still runs on memory that is freed and handed to the next read.
            scratch = cupy.ones((512, 512))
            for _ in range(20):
                scratch = scratch @ scratch * 1e-3
            del scratch
            matrix = rows.read_block(i).to_matrix()
            assert_same_csr(matrix, expected[50 * i : 50 * (i + 1)])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(check, [*range(rows.n_blocks)] * 3))


def test_values_come_to_the_device_of_the_calling_thread(small_store: Path) -> None:
    import cupy

    n_gpus = cupy.cuda.runtime.getDeviceCount()
    rows = open_rows(small_store, chunks=300, device="gpu")
    expected = open_rows(small_store).read(0, 1500).to_matrix()

    def check(i: int) -> None:
        device = i % n_gpus
        with cupy.cuda.Device(device):
            block = rows.read_block(i % rows.n_blocks)
            assert {a.device.id for a in (block.data, block.indices, block.indptr)} == {device}
            start = int(rows.bounds[i % rows.n_blocks])
            assert_same_csr(block.to_matrix(), expected[start : start + 300])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(check, range(20)))


def test_configuration_of_zarr_plays_no_part(small_store: Path) -> None:
    expected = open_rows(small_store).read(0, 100).to_matrix()
    for config in (
        {"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"},
        {"buffer": "zarr.buffer.gpu.Buffer", "ndbuffer": "zarr.buffer.gpu.NDBuffer"},
        {"array.order": "F"},
    ):
        with zarr.config.set(config):
            rows = pickle.loads(pickle.dumps(open_rows(small_store, device="gpu")))
            assert_same_csr(rows.read(0, 100).to_matrix(), expected)
            host = open_rows(small_store).read(0, 100).to_matrix()
            assert (host != expected).nnz == 0


@pytest.mark.parametrize("shard_of", [None, 5])
@pytest.mark.parametrize("array", ["data", "indices", "indptr"])
def test_lost_and_cut_off_files_are_named(
    tmp_path: Path, array: str, shard_of: int | None
) -> None:
    for how in ("lost", "cut"):
        store = write_csr(tmp_path / how, sample(), chunks=100, shard_of=shard_of)
        rows = open_rows(store, device="gpu")
        file = store / "X" / array / "c" / "0"
        raw = file.read_bytes()
        file.unlink() if how == "lost" else file.write_bytes(raw[: len(raw) // 2])
        with pytest.raises(CorruptChunkError) as caught:
            rows.read(0, 200)
        assert (caught.value.array, caught.value.shard) == (f"X/{array}", "c/0")
        file.write_bytes(raw)
        assert_same_csr(rows.read(0, 200).to_matrix(), sample())


def test_a_column_out_of_range_is_refused_with_the_row(tmp_path: Path) -> None:
    store = write_csr(tmp_path / "a.zarr", sample())
    place = int(sample().indptr[120]) + 1
    zarr.open_group(store, path="X", mode="r+")["indices"][place] = 60
    with pytest.raises(FormatError, match="column 60 in row 120"):
        open_rows(store, device="gpu").read(100, 130)

from __future__ import annotations

import os
import pickle
import shutil
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zarr.codecs import BloscCodec, GzipCodec, ZstdCodec

from scgpu_tasks.errors import StoreError
from scgpu_tasks.io import matrices
from scgpu_tasks.io.rows import Block, RowBlocks, open_rows
from tests.io.stores import all_rows, assert_same, sample, write, write_csr

VALUE_TYPES = ["bool", "uint8", "int32", "int64", "float16", "float32", "float64"]


# Equal to anndata's own reader, whatever was written


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("dtype", VALUE_TYPES)
@pytest.mark.parametrize("form", ["csr", "dense"])
def test_reads_what_anndata_wrote(
    tmp_path: Path, zarr_format: int, dtype: str, form: str
) -> None:
    x = sample()
    x.data = x.data.astype(dtype)
    x = x if form == "csr" else np.asarray(sample().todense()).astype(dtype)
    store = write(tmp_path / "a.zarr", x, zarr_format=zarr_format)
    rows = open_rows(store, chunks=37)
    assert rows.encoding == ("csr_matrix" if form == "csr" else "array")
    assert rows.dtype == ("float32" if dtype == "float16" else dtype)
    found = all_rows(rows)
    assert found.dtype == rows.dtype
    # SciPy, and so anndata, has no CSR of half precision.
    half = dtype == "float16" and form == "csr"
    assert_same(found, sample() if half else ad.io.read_zarr(store).X)


@st.composite
def matrix_and_layout(draw: st.DrawFn) -> tuple[Any, dict[str, Any], Any]:
    n_obs, n_vars = draw(st.integers(0, 40)), draw(st.integers(1, 30))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    lengths = rng.integers(0, min(n_vars, 8) + 1, n_obs)
    lengths[rng.random(n_obs) < 0.2] = 0
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    # Unsorted, duplicate, and explicit zeros: all legal.
    indices = rng.integers(0, n_vars, int(indptr[-1])).astype(np.int64)
    dtype = draw(st.sampled_from(["uint8", "int16", "int32", "float32", "float64", ">f4"]))
    data = rng.integers(0, 5, int(indptr[-1])).astype(dtype)
    x = sp.csr_matrix((n_obs, n_vars), dtype=np.float32)
    x.data, x.indices, x.indptr = data, indices, indptr
    zarr_format = draw(st.sampled_from([2, 3]))
    layout = {
        "zarr_format": zarr_format,
        "chunks": draw(st.integers(1, 50)),
        "shard_of": draw(st.sampled_from([None, 1, 3])) if zarr_format == 3 else None,
        "compressors": draw(
            st.sampled_from([None, ZstdCodec(level=1), BloscCodec(), GzipCodec()])
            if zarr_format == 3
            else st.sampled_from([None, "auto"])
        ),
        "index_dtype": draw(st.sampled_from(["uint8", "uint16", "int32", "int64", "uint32"])),
        "indptr_dtype": draw(st.sampled_from(["int32", "int64", "uint32", "uint64"])),
        "dtype": dtype,
    }
    cut = draw(
        st.one_of(
            st.just("auto"),
            st.integers(1, 50),
            st.lists(st.integers(0, 10)).map(lambda sizes: sizes),
        )
    )
    if isinstance(cut, list):
        kept = [n for i, n in enumerate(cut) if sum(cut[: i + 1]) <= n_obs]
        while sum(kept) > n_obs:
            kept.pop()
        cut = [*kept, n_obs - sum(kept)]
    return x, layout, cut


@given(matrix_and_layout())
@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_any_layout_and_any_cut_read_as_the_matrix_that_was_written(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[Any, dict[str, Any], Any]
) -> None:
    x, layout, cut = case
    store = write_csr(tmp_path_factory.mktemp("any") / "a.zarr", x, **layout)
    rows = open_rows(store, chunks=cut)
    assert rows.shape == x.shape
    assert rows.nnz == len(x.data)
    blocks = [rows.read_block(i) for i in range(rows.n_blocks)]
    assert [b.shape[0] for b in blocks] == np.diff(rows.bounds).tolist()
    assert sum(b.shape[0] for b in blocks) == x.shape[0]
    lengths = np.concatenate([np.diff(b.indptr) for b in blocks])
    np.testing.assert_array_equal(lengths, np.diff(x.indptr))
    np.testing.assert_array_equal(np.concatenate([b.indices for b in blocks]), x.indices)
    np.testing.assert_array_equal(np.concatenate([b.data for b in blocks]), x.data)
    np.testing.assert_array_equal(rows.block_nnz, [len(b.data) for b in blocks])
    for block in blocks:
        assert block.indices.dtype == layout["index_dtype"]
        assert block.indptr.dtype == np.int64
        assert block.indptr[0] == 0
        assert block.data.dtype.isnative
    dense = rows.to_dask().map_blocks(lambda b: b.toarray(), dtype=float).compute()
    expected = np.zeros(x.shape)
    np.add.at(
        expected, (np.repeat(np.arange(x.shape[0]), np.diff(x.indptr)), x.indices), x.data
    )
    np.testing.assert_array_equal(dense, expected)


@given(st.integers(0, 1500), st.integers(0, 1500))
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_range_of_rows_can_be_read(small_store: Path, a: int, b: int) -> None:
    start, stop = sorted((a, b))
    expected = _x_of(small_store)[start:stop]
    assert_same(open_rows(small_store).read(start, stop).to_matrix(), expected)


_X: dict[Path, Any] = {}


def _x_of(store: Path) -> Any:
    if store not in _X:
        x = ad.io.read_zarr(store).X
        _X[store] = sp.csr_matrix((x.data, x.indices.astype(np.int64), x.indptr), x.shape)
    return _X[store]


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("chunks", [(7, 5), (50, 60), (200, 1)])
def test_dense_chunks_of_any_shape_and_order_are_read(
    tmp_path: Path, order: Any, chunks: tuple[int, int]
) -> None:
    x = np.arange(200 * 60, dtype=np.float32).reshape(200, 60)
    store = write(tmp_path / "a.zarr", x, zarr_format=2)
    root = zarr.open_group(store, mode="r+", use_consolidated=False)
    attributes = dict(root["X"].attrs)
    del root["X"]
    root.create_array("X", shape=x.shape, dtype="f4", chunks=chunks, order=order)[:] = x
    root["X"].attrs.update(attributes)
    block = open_rows(store).read(13, 77)
    np.testing.assert_array_equal(block.values, x[13:77])
    assert block.values.flags.c_contiguous


def test_layers_are_found_by_name(tmp_path: Path) -> None:
    x, layer = sample(seed=1), sample(seed=2)
    store = write(tmp_path / "a.zarr", x, layers={"raw counts": layer})
    rows = open_rows(store, layer="raw counts")
    assert rows.element == "layers/raw counts"
    assert_same(all_rows(rows), layer)


@pytest.mark.parametrize("shape", [(0, 5), (1, 5), (5, 1), (1, 1)])
@pytest.mark.parametrize("form", ["csr", "dense", "empty"])
def test_tiny_matrices_are_read(tmp_path: Path, shape: tuple[int, int], form: str) -> None:
    dense = np.ones(shape, np.float32)
    x = dense if form == "dense" else sp.csr_matrix(dense * (form == "csr"))
    store = write(tmp_path / "a.zarr", x)
    rows = open_rows(store)
    assert rows.n_blocks == 1
    assert_same(all_rows(rows), x)
    assert rows.to_dask().compute().shape == shape


def test_encodings_of_old_anndata_are_read(tmp_path: Path) -> None:
    x = sample()
    old = {"h5sparse_format": "csr", "h5sparse_shape": list(x.shape)}
    store = write_csr(tmp_path / "a.zarr", x, zarr_format=2, attributes=old)
    (store / ".zattrs").unlink()
    assert_same(all_rows(open_rows(store)), x)


def test_dense_x_without_encoding_is_read(tmp_path: Path) -> None:
    x = sample().toarray()
    store = write(tmp_path / "a.zarr", x, zarr_format=2)
    (store / "X" / ".zattrs").unlink()
    np.testing.assert_array_equal(all_rows(open_rows(store)), x)


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_consolidated_metadata_are_not_needed(tmp_path: Path, zarr_format: int) -> None:
    x = sample()
    store = write(tmp_path / "a.zarr", x, zarr_format=zarr_format)
    if zarr_format == 2:
        (store / ".zmetadata").unlink()
    else:
        root = zarr.open_group(store, mode="r+", use_consolidated=False)
        root.attrs["encoding-version"] = "0.1.0"
        assert "consolidated_metadata" not in (store / "zarr.json").read_text()
    assert_same(all_rows(open_rows(store)), x)


@pytest.mark.parametrize("name", ["with space", "Größe-数", "a.zarr/", "percent%20.zarr"])
def test_any_path_will_do(tmp_path: Path, name: str) -> None:
    x = sample()
    write(tmp_path / name.rstrip("/"), x)
    assert_same(all_rows(open_rows(f"{tmp_path}/{name}")), x)
    assert_same(all_rows(open_rows(tmp_path / name)), x)


def test_a_relative_path_is_kept_as_an_absolute_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a.zarr", sample())
    monkeypatch.chdir(tmp_path)
    rows = open_rows("a.zarr")
    monkeypatch.chdir("/")
    assert rows.store == str(tmp_path / "a.zarr")
    assert_same(all_rows(rows), sample())


def test_zip_files_are_read(tmp_path: Path, small_store: Path) -> None:
    target = tmp_path / "a.zarr.zip"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for file in small_store.rglob("*"):
            if file.is_file():
                archive.write(file, file.relative_to(small_store).as_posix())
    rows = open_rows(target, chunks=700)
    assert_same(all_rows(rows), _x_of(small_store))
    folder = open_rows(small_store, chunks=700)
    assert [rows.read_block(i).stored_bytes for i in range(3)] == [
        folder.read_block(i).stored_bytes for i in range(3)
    ]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_folders_are_read(tmp_path: Path) -> None:
    store = write(tmp_path / "a.zarr", sample())
    folders = [store, *(p for p in store.rglob("*") if p.is_dir())]
    for folder in folders:
        folder.chmod(0o500)
    try:
        assert_same(all_rows(open_rows(store)), sample())
    finally:
        for folder in folders:
            folder.chmod(0o700)


def test_nothing_is_written_to_the_store(tmp_path: Path) -> None:
    store = write(tmp_path / "a.zarr", sample())
    before = {p: p.stat().st_mtime_ns for p in [store, *store.rglob("*")]}
    all_rows(open_rows(store))
    assert {p: p.stat().st_mtime_ns for p in [store, *store.rglob("*")]} == before


# Configuration, processes, threads


@pytest.mark.parametrize(
    "config",
    [
        {"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"},
        {"codec_pipeline.path": "zarr.core.codec_pipeline.FusedCodecPipeline"},
        {"array.order": "F"},
        {"array.read_missing_chunks": False},
        {"codec_pipeline.strict": True},
        {"buffer": "zarr.buffer.gpu.Buffer", "ndbuffer": "zarr.buffer.gpu.NDBuffer"},
    ],
)
@pytest.mark.parametrize("form", ["csr", "dense"])
def test_configuration_of_zarr_plays_no_part(
    tmp_path: Path, config: dict[str, Any], form: str
) -> None:
    x = sample() if form == "csr" else sample().toarray()
    store = write(tmp_path / "a.zarr", x)
    with zarr.config.set(config):
        assert_same(all_rows(open_rows(store, chunks=30)), x)


def test_pickles_are_small_whatever_the_size(small_store: Path) -> None:
    rows = open_rows(small_store)
    assert len(pickle.dumps(rows)) < 1200
    light = pickle.loads(pickle.dumps(open_rows(small_store, chunks=11)))
    assert_same(all_rows(light), _x_of(small_store))
    task = next(iter(open_rows(small_store, chunks=1).to_dask().dask.to_dict().values()))
    assert len(pickle.dumps(task)) < 1200


def test_a_process_that_never_opened_the_store_reads_it(small_store: Path) -> None:
    import multiprocessing

    rows = open_rows(small_store)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        total = pool.apply(_total, (rows,))
    assert total == float(_x_of(small_store).sum())


def _total(rows: RowBlocks) -> float:
    return float(rows.read(0, rows.shape[0]).data.sum(dtype=np.float64))


def test_threads_read_at_the_same_time(small_store: Path) -> None:
    rows = open_rows(small_store, chunks=50)
    with ThreadPoolExecutor(8) as pool:
        blocks = list(pool.map(rows.read_block, [*range(rows.n_blocks)] * 3))
    found = sp.vstack([b.to_matrix() for b in blocks[: rows.n_blocks]], format="csr")
    assert_same(found, _x_of(small_store))


def test_tokens_follow_the_content_and_the_cut(tmp_path: Path) -> None:
    from dask.base import tokenize

    store = write(tmp_path / "a.zarr", sample())
    first = open_rows(store, chunks=50)
    assert tokenize(first) == tokenize(open_rows(store, chunks=50))
    assert tokenize(first) != tokenize(open_rows(store, chunks=51))
    assert first.to_dask().name == open_rows(store, chunks=50).to_dask().name
    chunk = next(p for p in (store / "X/data").rglob("*") if p.is_file() and p.name == "0")
    chunk.write_bytes(chunk.read_bytes())
    assert tokenize(first) != tokenize(open_rows(store, chunks=50))


def test_a_replaced_store_is_opened_anew(tmp_path: Path) -> None:
    store = tmp_path / "a.zarr"
    write(store, sample(seed=1))
    rows = open_rows(store)
    assert_same(all_rows(rows), sample(seed=1))
    shutil.rmtree(store)
    write(store, sample(seed=2, density=0.1))
    assert_same(all_rows(rows), sample(seed=2, density=0.1))


def test_a_store_of_another_shape_is_noticed(tmp_path: Path) -> None:
    store = tmp_path / "a.zarr"
    rows = open_rows(write(store, sample()))
    all_rows(rows)
    shutil.rmtree(store)
    write(store, sample(n_obs=90))
    with pytest.raises(StoreError, match="the store was changed; open it again"):
        rows.read(0, 90)


def test_a_deleted_store_is_noticed(tmp_path: Path) -> None:
    rows = open_rows(write(tmp_path / "a.zarr", sample()))
    shutil.rmtree(tmp_path / "a.zarr")
    with pytest.raises(StoreError, match="does not exist"):
        rows.read(0, 1)


def test_few_matrices_are_kept_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrices, "_KEPT_OPEN", 3)
    for i in range(6):
        rows = open_rows(write(tmp_path / f"{i}.zarr", sample(5, 4)))
        rows.read(0, 5)
    assert len(matrices._open) == 3


def test_importing_the_reader_imports_no_gpu_library() -> None:
    import subprocess

    code = (
        "import sys, scgpu_tasks.io.lazy; "
        "sys.exit(bool({'cupy', 'cupyx', 'kvikio', 'rmm', 'nvidia'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Blocks


def test_blocks_are_cut_so_that_each_fits(small_store: Path) -> None:
    rows = open_rows(small_store, max_bytes=60_000)
    assert rows.n_blocks > 10
    assert (rows.block_nnz * 6 <= 60_000).all()
    assert rows.bounds[0] == 0
    assert rows.bounds[-1] == 1500
    assert rows.block_nnz.sum() == rows.nnz
    one = open_rows(small_store, max_bytes=1)
    assert one.n_blocks == 1500


def test_blocks_have_20000_rows_by_default(medium_store: Path) -> None:
    assert open_rows(medium_store).bounds.tolist() == [0, 20_000]


def test_blocks_of_too_many_values_are_halved() -> None:
    from scgpu_tasks.io.rows import _even_cut

    offsets = np.concatenate([[0], np.cumsum(np.full(100, 2**27))])
    bounds = _even_cut(100, 60, offsets, 2**31 - 1)
    assert (np.diff(offsets[bounds]) < 2**31).all()
    assert bounds[0] == 0
    assert bounds[-1] == 100


def test_stored_bytes_of_all_blocks_are_about_the_size_of_the_files(medium_store: Path) -> None:
    rows = open_rows(medium_store, chunks=20_000)
    files = sum(p.stat().st_size for p in (medium_store / "X").rglob("c/*"))
    assert rows.stored_bytes == pytest.approx(files, rel=0.01)
    assert rows.read_block(0).stored_bytes == files


def test_stored_bytes_of_a_part_count_whole_chunks(small_store: Path) -> None:
    rows = open_rows(small_store)
    part, whole = rows.read(0, 150).stored_bytes, rows.read(0, 1500).stored_bytes
    assert 0.05 * whole < part < 0.35 * whole


@pytest.mark.parametrize("compressors", [BloscCodec(), None])
@pytest.mark.parametrize("shard_of", [None, 4])
def test_stored_bytes_are_counted_in_every_layout(
    tmp_path: Path, compressors: Any, shard_of: int | None
) -> None:
    store = write_csr(
        tmp_path / "a.zarr", sample(), compressors=compressors, shard_of=shard_of, chunks=100
    )
    files = sum(p.stat().st_size for p in (store / "X").rglob("c/*"))
    found = open_rows(store).read(0, 200).stored_bytes
    assert found == pytest.approx(files, rel=0.15)


def test_matrices_have_32_bit_indices_where_they_suffice(small_store: Path) -> None:
    block = open_rows(small_store).read(0, 10)
    assert block.indices.dtype == np.uint16
    matrix = block.to_matrix()
    assert matrix.indices.dtype == matrix.indptr.dtype == np.int32
    assert matrix.has_canonical_format
    wide = Block((1, 2**40), 0, np.ones(1), np.array([2**39]), np.array([0, 1])).to_matrix()
    assert wide.indices.dtype == np.int64


def test_dask_array_computes_block_by_block(small_store: Path) -> None:
    lazy = open_rows(small_store, chunks=400).to_dask()
    assert lazy.chunks == ((400, 400, 400, 300), (800,))
    assert isinstance(lazy._meta, sp.csr_matrix)
    assert lazy.dtype == np.float32
    sums = lazy.map_blocks(lambda b: np.asarray(b.sum(axis=1)), chunks=(lazy.chunks[0], (1,)))
    np.testing.assert_allclose(
        sums.compute(scheduler="synchronous"), np.asarray(_x_of(small_store).sum(axis=1))
    )

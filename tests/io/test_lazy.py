from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import anndata as ad
import dask.array as da
import numpy as np
import pandas as pd
import pytest
import scanpy as sc
import scipy.sparse as sp
import zarr

from scgpu_tasks.errors import (
    CorruptChunkError,
    FormatError,
    MissingPackageError,
    ParameterError,
)
from scgpu_tasks.io.convert import convert_zarr
from scgpu_tasks.io.lazy import read_lazy, read_tables
from tests.io.stores import sample, write


@pytest.fixture
def in_memory(small_store: Path) -> ad.AnnData:
    adata = ad.io.read_zarr(small_store)
    x = adata.X
    adata.X = sp.csr_matrix((x.data, x.indices.astype(np.int32), x.indptr), x.shape)
    return adata


def test_it_equals_the_store_read_at_once(small_store: Path, in_memory: ad.AnnData) -> None:
    lazy = read_lazy(small_store, chunks=400, device="cpu")
    assert isinstance(lazy.X, da.Array)
    assert lazy.X.chunks[0] == (400, 400, 400, 300)
    pd.testing.assert_frame_equal(lazy.obs, in_memory.obs)
    pd.testing.assert_frame_equal(lazy.var, in_memory.var)
    assert (lazy.X.compute() != in_memory.X).nnz == 0


@pytest.mark.parametrize("form", ["csr", "dense"])
def test_scanpy_normalises_it_as_in_memory(
    small_store: Path, in_memory: ad.AnnData, tmp_path: Path, form: str
) -> None:
    if form == "dense":
        in_memory.X = in_memory.X.toarray()
        small_store = write(tmp_path / "a.zarr", in_memory.X)
    lazy = read_lazy(small_store, chunks=400, device="cpu")
    for adata in (lazy, in_memory):
        sc.pp.normalize_total(adata, target_sum=1e4)
        sc.pp.log1p(adata)
    found, expected = lazy.X.compute(), in_memory.X
    if form == "csr":
        found, expected = found.toarray(), expected.toarray()
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_scanpy_measures_and_chooses_genes_as_in_memory(
    small_store: Path, in_memory: ad.AnnData
) -> None:
    lazy = read_lazy(small_store, chunks=400, device="cpu")
    for adata in (lazy, in_memory):
        adata.var["mt"] = adata.var_names.str.startswith("MT-")
        sc.pp.calculate_qc_metrics(adata, qc_vars=["mt"], percent_top=None, inplace=True)
        sc.pp.normalize_total(adata, target_sum=1e4)
        sc.pp.log1p(adata)
        sc.pp.highly_variable_genes(adata, n_top_genes=100)
    np.testing.assert_allclose(
        lazy.obs["pct_counts_mt"], in_memory.obs["pct_counts_mt"], rtol=1e-5
    )
    np.testing.assert_array_equal(lazy.var["highly_variable"], in_memory.var["highly_variable"])


def test_subsets_stay_lazy_and_right(small_store: Path, in_memory: ad.AnnData) -> None:
    rows = np.arange(0, 1500, 7)
    part = read_lazy(small_store, device="cpu")[rows, :50]
    assert isinstance(part.X, da.Array)
    assert (part.X.compute() != in_memory.X[rows, :50]).nnz == 0


def test_layers_are_opened_by_name_in_the_same_blocks(tmp_path: Path) -> None:
    store = write(tmp_path / "a.zarr", sample(), layers={"a": sample(seed=3), "b": sample()})
    lazy = read_lazy(store, chunks=70, device="cpu", layers=["a"])
    assert {name for name in lazy.layers if name is not None} == {"a"}
    assert lazy.layers["a"].chunks == lazy.X.chunks
    assert (lazy.layers["a"].compute() != sample(seed=3)).nnz == 0
    with pytest.raises(FormatError, match="has no layers/c; its layers are a, b"):
        read_lazy(store, device="cpu", layers=["c"])
    with pytest.raises(ParameterError, match=r"\['a'\]"):
        read_lazy(store, device="cpu", layers="a")


def test_columns_of_every_kind_are_read(tmp_path: Path) -> None:
    names = [f"cell {i}" for i in range(6)]
    obs = pd.DataFrame(
        {
            "text": ["a", "ä", "", "d", "e", "f"],
            "category": pd.Categorical(list("aabbcc")),
            "nullable": pd.array([1, None, 3, 4, 5, 6], dtype="Int64"),
            "flag": pd.array([True, None, False, True, True, True], dtype="boolean"),
            "number": np.linspace(0, 1, 6),
        },
        index=pd.Index(names, name="barcode"),
    )
    for zarr_format in (2, 3):
        store = write(tmp_path / f"{zarr_format}", np.eye(6), obs=obs, zarr_format=zarr_format)
        expected = ad.io.read_zarr(store).obs
        pd.testing.assert_frame_equal(read_tables(store)[0], expected)


def test_tables_of_old_anndata_are_read(tmp_path: Path) -> None:
    store = write(tmp_path / "a.zarr", np.eye(3, dtype=np.float32), zarr_format=2)
    root = zarr.open_group(store, mode="r+", use_consolidated=False)
    del root["obs"], root["var"]
    records = np.array(
        [(b"a", 1, 0), (b"b", 2, 1), (b"c", 3, 0)],
        dtype=[("index", "S3"), ("n", "i4"), ("group", "i1")],
    )
    for name in ("obs", "var"):
        root.create_array(name, shape=(3,), dtype=records.dtype)[:] = records
    root["uns"].create_array("group_categories", shape=(2,), dtype="S2")[:] = [b"x", b"y"]
    obs = read_lazy(store, device="cpu").obs
    assert obs.index.tolist() == ["a", "b", "c"]
    assert obs["n"].tolist() == [1, 2, 3]
    assert obs["group"].tolist() == ["x", "y", "x"]


def test_tables_are_read_on_the_host_while_zarr_is_set_up_for_a_gpu(small_store: Path) -> None:
    gpu = {"buffer": "zarr.buffer.gpu.Buffer", "ndbuffer": "zarr.buffer.gpu.NDBuffer"}
    with zarr.config.set(gpu):
        lazy = read_lazy(small_store, device="cpu")
        assert zarr.config.get("buffer") == gpu["buffer"]
    assert lazy.shape == (1500, 800)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("obs", slice(0, 199)), "199 cells in obs and 60 genes in var"),
        (("var", slice(0, 59)), "200 cells in obs and 59 genes in var"),
    ],
)
def test_tables_of_another_length_are_refused(
    tmp_path: Path, change: tuple[str, slice], message: str
) -> None:
    store = write(tmp_path / "a.zarr", sample())
    root = zarr.open_group(store, mode="r+", use_consolidated=False)
    table = ad.io.read_elem(root[change[0]]).iloc[change[1]]
    ad.io.write_elem(root, change[0], table)
    with pytest.raises(FormatError, match=message):
        read_lazy(store, device="cpu")


def test_missing_or_damaged_tables_are_named(tmp_path: Path) -> None:
    store = write(tmp_path / "a.zarr", sample())
    (store / "var").rename(store / "rav")
    with pytest.raises(FormatError, match="has no var"):
        read_lazy(store, device="cpu")
    (store / "rav").rename(store / "var")
    for file in (store / "obs").rglob("c/*"):
        file.write_bytes(b"damage")
    with pytest.raises(FormatError, match=r"obs of .* cannot be read"):
        read_lazy(store, device="cpu")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [({"device": "tpu"}, "'auto', 'cpu' or 'gpu'"), ({"chunks": -5}, "at least 1 row")],
)
def test_parameters_out_of_range_are_refused(
    small_store: Path, kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ParameterError, match=message):
        read_lazy(small_store, **{"device": "cpu", **kwargs})


def test_without_a_gpu_auto_means_the_cpu_and_gpu_is_refused(small_store: Path) -> None:
    from scgpu_tasks.io.lazy import can_use_gpu

    if can_use_gpu():
        pytest.skip("there is a GPU here")
    assert isinstance(read_lazy(small_store).X._meta, sp.csr_matrix)
    with pytest.raises(MissingPackageError, match="GPU"):
        read_lazy(small_store, device="gpu")


def test_the_package_offers_it_by_name() -> None:
    import scgpu_tasks.io

    assert scgpu_tasks.io.read_lazy is read_lazy
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        scgpu_tasks.io.nothing  # noqa: B018


@pytest.mark.parametrize("table", ["obs", "var"])
def test_a_table_that_has_lost_its_names_is_refused(
    small_store: Path, tmp_path: Path, table: str
) -> None:
    store = Path(shutil.copytree(small_store, tmp_path / "a.zarr"))
    (lost,) = (store / table / "_index" / "values" / "c").iterdir()
    lost.unlink()
    with pytest.raises(CorruptChunkError, match="names would read as empty") as caught:
        read_lazy(store, device="cpu")
    assert f"array {table}/_index/values, shard c/0" in str(caught.value)


def test_a_file_of_a_column_that_the_converter_wrote_is_missed(
    small_store: Path, tmp_path: Path
) -> None:
    store = tmp_path / "a.zarr"
    convert_zarr(small_store, store)
    read_tables(store)
    (store / "obs" / "batch" / "codes" / "c" / "0").unlink()
    with pytest.raises(CorruptChunkError, match="the converter wrote this file") as caught:
        read_lazy(store, device="cpu")
    assert "array obs/batch/codes, shard c/0" in str(caught.value)

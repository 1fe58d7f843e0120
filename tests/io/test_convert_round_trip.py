"""Whatever AnnData goes in, the same comes out."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numcodecs
import numpy as np
import pytest
import scanpy as sc
import scipy.sparse as sp
import zarr
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from scgpu_tasks.errors import FormatError
from scgpu_tasks.io.checks import check
from scgpu_tasks.io.convert import ConvertSpec, convert_zarr

from .adatas import adatas, assert_same

EXAMPLES = int(os.environ.get("SCGPU_EXAMPLES", "15"))
H5 = (
    {},
    {"compression": "gzip"},
    {"compression": "lzf"},
    {"compression": "gzip", "shuffle": True},
)
COMPRESSORS = (None, numcodecs.Blosc("lz4"), numcodecs.Zstd(1), numcodecs.GZip(1))
SMALL = ConvertSpec(chunk_bytes=1024, shard_bytes=4096)


def write(adata: ad.AnnData, path: Path, form: str, choice: int) -> None:
    """Write a source with plain anndata."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if form == "h5ad":
            with h5py.File(path, "w") as file:
                ad.io.write_elem(file, "/", adata, dataset_kwargs=H5[choice])
            return
        root = zarr.open_group(path, mode="w", zarr_format=2 if form == "zarr v2" else 3)
        options: dict[str, Any] = {}
        if form == "zarr v2":
            options = {"compressor": COMPRESSORS[choice]}
        ad.io.write_elem(root, "/", adata, dataset_kwargs=options)


def read(path: Path) -> ad.AnnData:
    """Read a store with plain anndata."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ad.read_h5ad(path) if path.suffix == ".h5ad" else ad.read_zarr(path)


@pytest.mark.filterwarnings("ignore:Support for Awkward Arrays")
@settings(
    max_examples=EXAMPLES,
    # A failing example is small as it is, and shrinking takes minutes.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    adata=adatas(),
    form=st.sampled_from(("h5ad", "zarr v2", "zarr v3")),
    choice=st.integers(0, 3),
)
def test_any_anndata_comes_back_the_same(
    tmp_path: Path, adata: ad.AnnData, form: str, choice: int
) -> None:
    for path in tmp_path.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    source = tmp_path / ("a.h5ad" if form == "h5ad" else "a.zarr")
    try:
        write(adata, source, form, choice)
    except (ValueError, TypeError, OSError) as error:
        # What anndata itself cannot write is no source.
        note(f"not a source: {error}")
        return
    result = convert_zarr(source, tmp_path / "b.zarr", spec=SMALL, workers=2)
    assert result.verified
    assert_same(read(source), read(tmp_path / "b.zarr"))


def atlas(n: int = 300, m: int = 200, seed: int = 0) -> ad.AnnData:
    """Counts in CSR with a layer, raw, and an embedding."""
    rng = np.random.default_rng(seed)
    X = sp.random(n, m, 0.2, "csr", dtype=np.float32, rng=rng)
    X.data = np.ceil(X.data * 9)
    adata = ad.AnnData(X)
    adata.obs["group"] = rng.choice(["a", "b"], n)
    adata.layers["counts"] = X.astype(np.int32)
    adata.obsm["X_pca"] = rng.normal(size=(n, 5)).astype(np.float32)
    adata.raw = adata.copy()
    return adata


def test_scanpy_and_zarr_open_the_result(tmp_path: Path) -> None:
    adata = atlas()
    write(adata, tmp_path / "a.h5ad", "h5ad", 1)
    convert_zarr(tmp_path / "a.h5ad", tmp_path / "b.zarr")
    result = read(tmp_path / "b.zarr")
    # scanpy's compiled code wants one type for indices and indptr, as SciPy makes them.
    result.X = sp.csr_matrix((result.X.data, result.X.indices, result.X.indptr), result.shape)
    sc.pp.normalize_total(result, target_sum=1e4)
    sc.pp.log1p(result)
    assert result.X.sum() > 0
    root = zarr.open_group(tmp_path / "b.zarr", mode="r")
    assert root.metadata.zarr_format == 3
    assert root.metadata.consolidated_metadata is not None
    np.testing.assert_array_equal(root["X/data"][:], adata.X.data)
    # Without consolidated metadata zarr lists folders, and warns of what it does not know.
    plain = zarr.open_group(tmp_path / "b.zarr", mode="r", use_consolidated=False)
    assert sorted(plain) == sorted(root)
    assert sorted(plain["obs"]) == sorted(root["obs"])


@pytest.mark.parametrize("form", ["h5ad", "zarr v2", "zarr v3"])
def test_the_result_is_gpu_ready(tmp_path: Path, form: str) -> None:
    source = tmp_path / ("a.h5ad" if form == "h5ad" else "a.zarr")
    write(atlas(2_000, 400), source, form, 1)
    assert not (form != "zarr v3" and check(source).ok)
    convert_zarr(source, tmp_path / "b.zarr")
    report = check(tmp_path / "b.zarr")
    assert report.ok
    assert report.findings == ()
    assert all(array.gpu and array.codec == "zstd" for array in report.arrays)
    indices = next(array for array in report.arrays if array.path == "X/indices")
    assert indices.dtype == "uint16"


def test_a_zip_of_a_store_is_a_source(tmp_path: Path) -> None:
    write(atlas(), tmp_path / "a.zarr", "zarr v3", 0)
    shutil.make_archive(str(tmp_path / "a"), "zip", tmp_path / "a.zarr")
    convert_zarr(tmp_path / "a.zip", tmp_path / "b.zarr")
    assert_same(read(tmp_path / "a.zarr"), read(tmp_path / "b.zarr"))


def test_a_store_behind_fsspec_is_a_source(tmp_path: Path) -> None:
    import fsspec

    for form, name in (("h5ad", "a.h5ad"), ("zarr v3", "a.zarr")):
        write(atlas(), tmp_path / name, form, 0)
        fs = fsspec.filesystem("memory")
        fs.put(str(tmp_path / name), f"/{form.replace(' ', '')}/{name}", recursive=True)
        url = f"memory://{form.replace(' ', '')}/{name}"
        convert_zarr(url, tmp_path / "b.zarr", overwrite=True)
        assert_same(read(tmp_path / name), read(tmp_path / "b.zarr"))


def test_a_slash_in_a_column_name_is_refused_as_anndata_refuses_it(tmp_path: Path) -> None:
    write(atlas(), tmp_path / "a.h5ad", "h5ad", 0)
    with h5py.File(tmp_path / "a.h5ad", "a") as file:
        file["obs/x/y"] = np.arange(300)
        file["obs"].attrs["column-order"] = np.array(["group", "x/y"], dtype=object)
    with pytest.raises(FormatError, match=r"obs has a column named 'x/y'.*rename"):
        convert_zarr(tmp_path / "a.h5ad", tmp_path / "b.zarr")
    assert [path.name for path in tmp_path.iterdir()] == ["a.h5ad"]


def test_attributes_and_column_order_stay(tmp_path: Path) -> None:
    adata = atlas()
    for name in ("z", "a", "m"):
        adata.obs[name] = 1
    write(adata, tmp_path / "a.zarr", "zarr v3", 0)
    root = zarr.open_group(tmp_path / "a.zarr", mode="a", use_consolidated=False)
    root.attrs["mine"] = {"nested": [1, "é", None]}
    root["obs/z"].attrs["unit"] = "µm"
    convert_zarr(tmp_path / "a.zarr", tmp_path / "b.zarr")
    found = zarr.open_group(tmp_path / "b.zarr", mode="r")
    assert found.attrs["mine"] == {"nested": [1, "é", None]}
    assert found["obs/z"].attrs["unit"] == "µm"
    assert list(read(tmp_path / "b.zarr").obs.columns) == ["group", "z", "a", "m"]

"""Files of old anndata releases come out as anndata itself reads them."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import zarr

from scgpu_tasks.errors import FormatError
from scgpu_tasks.io.checks import check
from scgpu_tasks.io.convert import ConvertSpec, convert_zarr

from .test_convert_round_trip import assert_same, read

FOLDER = Path(__file__).parents[1] / "data/old"
OLD = sorted(FOLDER.glob("*.h5ad.gz"))


@pytest.fixture(params=OLD, ids=lambda path: path.name.removesuffix(".h5ad.gz"))
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """One file, unpacked."""
    path = tmp_path / request.param.name.removesuffix(".gz")
    path.write_bytes(gzip.decompress(request.param.read_bytes()))
    return path


def test_there_are_files_of_several_releases() -> None:
    assert len({path.name.split("-")[1] for path in OLD}) >= 3


@pytest.mark.parametrize("csr", [False, True])
def test_an_old_file_comes_out_as_anndata_reads_it(
    tmp_path: Path, old: Path, csr: bool
) -> None:
    spec = ConvertSpec(csr=csr, chunk_bytes=1024, shard_bytes=1024)
    result = convert_zarr(old, tmp_path / "b.zarr", spec=spec)
    assert result.shape == (11, 5)
    expected, found = read(old), read(tmp_path / "b.zarr")
    assert_same(expected, found)
    assert found.raw.shape == (11, 7)
    assert found.obs["group"].cat.categories.tolist() == ["a", "b", "c"]
    root = zarr.open_group(tmp_path / "b.zarr", mode="r")
    assert root["X"].attrs["encoding-type"] == (
        "csr_matrix" if sp.issparse(expected.X) else "array"
    )
    assert check(tmp_path / "b.zarr").ok


def test_old_counts_are_still_the_counts(tmp_path: Path, old: Path) -> None:
    convert_zarr(old, tmp_path / "b.zarr")
    X = read(tmp_path / "b.zarr").raw.X
    X = X.toarray() if sp.issparse(X) else X
    made = np.random.RandomState(0).poisson(0.6, (11, 7))
    np.testing.assert_array_equal(X, made)


@pytest.mark.parametrize(
    "name", ["anndata-0.7.8-sparse", "anndata-0.8.0-sparse", "anndata-0.8.0-dense"]
)
def test_an_old_zarr_store_comes_out_as_anndata_reads_it(tmp_path: Path, name: str) -> None:
    shutil.unpack_archive(FOLDER / f"{name}.zarr.zip", tmp_path / "a.zarr")
    convert_zarr(tmp_path / "a.zarr", tmp_path / "b.zarr")
    found = read(tmp_path / "b.zarr")
    assert_same(read(tmp_path / "a.zarr"), found)
    X = found.raw.X.toarray() if sp.issparse(found.raw.X) else found.raw.X
    np.testing.assert_array_equal(X, np.random.RandomState(0).poisson(0.6, (11, 7)))


def test_a_zarr_store_of_before_groups_is_refused_with_a_way_out(tmp_path: Path) -> None:
    shutil.unpack_archive(FOLDER / "anndata-0.6.22-dense.zarr.zip", tmp_path / "a.zarr")
    with pytest.raises(FormatError, match=r"before 0\.7.*save it as h5ad"):
        convert_zarr(tmp_path / "a.zarr", tmp_path / "b.zarr")
    assert [path.name for path in tmp_path.iterdir()] == ["a.zarr"]

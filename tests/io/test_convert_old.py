"""Files of old anndata releases come out as anndata itself reads them."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import zarr

from scgpu_tasks.io.check import check
from scgpu_tasks.io.convert import ConvertSpec, convert_zarr

from .test_convert_round_trip import assert_same, read

OLD = sorted((Path(__file__).parents[1] / "data/old").glob("*.h5ad.gz"))


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

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse.linalg import svds

from scgpu_tasks.datasets import DTYPES, MT_GENES, synthetic_counts, write_synthetic
from scgpu_tasks.errors import OutputError, ParameterError


def whole(n_obs: int, n_vars: int, **kwargs: object) -> sp.csr_matrix:
    return sp.vstack(list(synthetic_counts(n_obs, n_vars, **kwargs)), format="csr")


@given(st.integers(1, 400), st.integers(0, 3))
@settings(max_examples=15, deadline=None)
def test_counts_do_not_depend_on_the_block_size(cells_per_block: int, seed: int) -> None:
    one = whole(300, 120, seed=seed)
    many = whole(300, 120, seed=seed, cells_per_block=cells_per_block)
    assert (one != many).nnz == 0


def test_counts_do_not_depend_on_how_many_cells_are_drawn() -> None:
    assert (whole(2_500, 200)[:1_100] != whole(1_100, 200)).nnz == 0


def test_seeds_give_different_counts() -> None:
    assert (whole(50, 200, seed=1) != whole(50, 200, seed=2)).nnz > 0


@pytest.mark.parametrize("n_vars", [20, 777, 70_000])
def test_rows_are_canonical_whole_numbers(n_vars: int) -> None:
    counts = whole(200, n_vars)
    assert counts.has_canonical_format
    assert counts.indices.max() < n_vars
    assert counts.data.min() >= 1
    np.testing.assert_array_equal(counts.data, np.round(counts.data))


@pytest.mark.parametrize(("n_vars", "nnz"), [(2_000, 100), (2_000, 900), (20_000, 950)])
def test_cells_show_as_many_genes_as_asked_on_average(n_vars: int, nnz: int) -> None:
    assert whole(3_000, n_vars, nnz_per_cell=nnz).nnz / 3_000 == pytest.approx(nnz, rel=0.08)


def test_some_genes_are_never_seen_and_some_dominate() -> None:
    totals = np.asarray(whole(2_000, 2_000).sum(axis=0)).ravel()
    assert (totals == 0).sum() >= 2_000 // 50
    assert np.sort(totals)[-40:].sum() > 0.2 * totals.sum()


def test_written_store_reads_as_the_counts_it_was_made_from(small_store: Path) -> None:
    adata = ad.io.read_zarr(small_store)
    expected = whole(1_500, 800, nnz_per_cell=150, n_types=3, n_batches=2, seed=7)
    assert adata.shape == (1_500, 800)
    np.testing.assert_array_equal(adata.X.indptr, expected.indptr)
    np.testing.assert_array_equal(adata.X.indices, expected.indices)
    np.testing.assert_array_equal(adata.X.data, expected.data)


def test_genes_and_cells_are_named_as_in_an_atlas(medium_store: Path) -> None:
    adata = ad.io.read_zarr(medium_store)
    assert set(MT_GENES) <= set(adata.var_names)
    assert adata.var_names.str.startswith(("RPS", "RPL")).sum() == 90
    assert adata.var_names.is_unique
    assert adata.obs_names.is_unique
    assert set(adata.obs["batch"].cat.categories) == {"batch_1", "batch_2"}
    assert adata.obs["cell_type"].nunique() == 8


def test_bad_cells_can_be_told_by_mitochondrial_share_and_genes(medium_store: Path) -> None:
    adata = ad.io.read_zarr(medium_store)
    counts = adata.X.toarray()
    mt = counts[:, adata.var_names.str.startswith("MT-")].sum(axis=1) / counts.sum(axis=1)
    quality = adata.obs["quality"].to_numpy()
    genes = (counts > 0).sum(axis=1)
    assert mt[quality == "damaged"].min() > 0.25
    assert np.mean(mt[quality == "good"] < 0.2) > 0.99
    assert np.median(genes[quality == "empty droplet"]) < 0.2 * np.median(genes)


def test_cell_types_stand_apart_in_principal_components(medium_store: Path) -> None:
    adata = ad.io.read_zarr(medium_store)
    chosen = np.flatnonzero(adata.obs["quality"] == "good")[:1_000]
    x = adata.X[chosen].toarray()
    x = np.log1p(1e4 * x / x.sum(axis=1, keepdims=True))
    x -= x.mean(axis=0)
    scores = x @ svds(x, 7, random_state=0)[2].T
    types = adata.obs["cell_type"].cat.codes.to_numpy()[chosen]
    centres = np.stack([scores[types == t].mean(axis=0) for t in range(8)])
    nearest = ((scores[:, None] - centres) ** 2).sum(axis=-1).argmin(axis=1)
    assert np.mean(nearest == types) > 0.97


def test_layout_is_zstd_chunks_in_shards_with_small_indices(medium_store: Path) -> None:
    for name, dtype in (("data", "float32"), ("indices", "uint16"), ("indptr", "int64")):
        meta = json.loads((medium_store / "X" / name / "zarr.json").read_text())
        sharding = meta["codecs"][0]["configuration"]
        assert meta["data_type"] == dtype
        assert sharding["chunk_shape"][0] * np.dtype(dtype).itemsize == 256 * 1024
        assert [c["name"] for c in sharding["codecs"]] == ["bytes", "zstd"]
        assert sharding["codecs"][1]["configuration"]["level"] == 3
    root = json.loads((medium_store / "zarr.json").read_text())
    assert "X/data" in root["consolidated_metadata"]["metadata"]


def test_many_genes_need_wider_indices(tmp_path: Path) -> None:
    path = write_synthetic(tmp_path / "wide.zarr", 20, 66_000)
    assert json.loads((path / "X/indices/zarr.json").read_text())["data_type"] == "int32"


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_stored_in_the_type_asked_for(tmp_path: Path, dtype: str) -> None:
    path = write_synthetic(tmp_path / "a.zarr", 30, 50, dtype=dtype)
    assert ad.io.read_zarr(path).X.dtype == dtype


@pytest.mark.parametrize("n_obs", [0, 1])
def test_stores_of_no_cell_and_one_cell_can_be_read(tmp_path: Path, n_obs: int) -> None:
    path = write_synthetic(tmp_path / "a.zarr", n_obs, 50)
    assert ad.io.read_zarr(path).shape == (n_obs, 50)


def test_writing_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    digests = []
    for name in ("a", "b"):
        path = write_synthetic(tmp_path / name, 200, 100, chunk_bytes=2048, shard_bytes=8192)
        files = sorted(f for f in path.rglob("*") if f.is_file())
        digest = hashlib.sha256()
        for f in files:
            digest.update(str(f.relative_to(path)).encode() + f.read_bytes())
        digests.append(digest.hexdigest())
    assert digests[0] == digests[1]


def test_an_existing_store_stays_unless_told_otherwise(tmp_path: Path) -> None:
    path = write_synthetic(tmp_path / "a.zarr", 10, 50)
    with pytest.raises(OutputError, match="exists"):
        write_synthetic(path, 20, 50)
    assert ad.io.read_zarr(path).n_obs == 10
    assert ad.io.read_zarr(write_synthetic(path, 20, 50, overwrite=True)).n_obs == 20
    assert [p.name for p in tmp_path.iterdir()] == ["a.zarr"]


def test_a_folder_that_cannot_be_written_is_an_output_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write"):
        write_synthetic(tmp_path / "file" / "a.zarr", 10, 50)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"n_obs": -1}, "n_obs must be at least 0"),
        ({"n_vars": 5}, "n_vars must be at least 20"),
        ({"nnz_per_cell": 0}, "nnz_per_cell must be from 1 to half"),
        ({"nnz_per_cell": 99}, "nnz_per_cell must be from 1 to half"),
        ({"n_types": 0}, "n_types must be at least 1"),
        ({"n_types": 51}, "two genes each"),
        ({"n_batches": 0}, "n_batches must be at least 1"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"dtype": "float16"}, "dtype must be one of"),
        ({"chunk_bytes": 1}, "chunk_bytes must be at least 8"),
        ({"shard_bytes": 1024}, "shard_bytes must be at least 262144"),
    ],
)
def test_parameters_out_of_range_are_refused(
    tmp_path: Path, kwargs: dict[str, object], message: str
) -> None:
    good: dict[str, object] = {"n_obs": 10, "n_vars": 100}
    with pytest.raises(ParameterError, match=message):
        write_synthetic(tmp_path / "a.zarr", **(good | kwargs))
    assert not list(tmp_path.iterdir())

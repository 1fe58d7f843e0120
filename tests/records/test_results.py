from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import anndata as ad
import matplotlib
import numpy as np
import pandas as pd
import pytest
import scanpy as sc
import zarr

from scgpu_tasks.records import results, write_record
from scgpu_tasks.specs import QCSpec
from tests.records.conftest import finish


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, finished) -> Path:
    path = tmp_path_factory.mktemp("record") / "results.zarr"
    return results.write_results(path, finished.obs, finished.var, finished.qc, finished.pca)


def test_results_hold_the_kept_cells_and_genes_without_x(store: Path, finished) -> None:
    adata = ad.read_zarr(store)
    kept = finished.qc.cells["passed_qc"].to_numpy()
    kept_genes = finished.qc.genes["passed_qc"].to_numpy()
    assert 0 < kept.sum() < len(kept)
    assert adata.X is None
    assert list(adata.obs_names) == list(finished.obs.index[kept])
    assert list(adata.var_names) == list(finished.var.index[kept_genes])
    assert {"cell_type", "batch", "total_counts", "pct_counts_mt"} <= set(adata.obs)
    assert {"highly_variable", "means", "dispersions_norm"} <= set(adata.var)
    assert adata.uns["hvg"] == {"flavor": "seurat"}
    np.testing.assert_array_equal(
        adata.obs["total_counts"], finished.qc.cells["total_counts"][kept]
    )


def test_pca_is_where_scanpy_keeps_it(store: Path, finished) -> None:
    adata = ad.read_zarr(store)
    chosen = adata.var["highly_variable"].to_numpy()
    np.testing.assert_array_equal(adata.obsm["X_pca"], finished.pca.X_pca)
    np.testing.assert_array_equal(adata.varm["PCs"][chosen], finished.pca.PCs)
    assert chosen.sum() == finished.pca.PCs.shape[0]
    assert not adata.varm["PCs"][~chosen].any()
    np.testing.assert_array_equal(adata.uns["pca"]["variance"], finished.pca.variance)
    np.testing.assert_array_equal(
        adata.uns["pca"]["variance_ratio"], finished.pca.variance_ratio
    )
    assert adata.uns["pca"]["params"]["zero_center"]


@pytest.mark.filterwarnings("default")
def test_scanpy_goes_on_from_the_results(store: Path) -> None:
    adata = ad.read_zarr(store)
    with matplotlib.rc_context({"backend": "agg"}):
        sc.pl.pca(adata, color="cell_type", show=False)
        sc.pl.pca_variance_ratio(adata, show=False)
        sc.pl.pca_loadings(adata, show=False)
        matplotlib.pyplot.close("all")
    sc.pp.neighbors(adata, use_rep="X_pca")
    assert adata.obsp["distances"].shape == (adata.n_obs, adata.n_obs)


def test_a_column_of_the_store_gives_way_to_the_metric_of_the_same_name() -> None:
    names = pd.Index(["a", "b", "c"], name="barcode")
    obs = pd.DataFrame(
        {"total_counts": [9, 9, 9], "batch": pd.Categorical(["x", "y", "x"])}, index=names
    )
    metrics = pd.DataFrame({"total_counts": [1, 2, 3], "passed_qc": [True, False, True]})
    joined = results.join_columns(obs, metrics)
    assert list(joined["total_counts"]) == [1, 3]
    assert list(joined.columns) == ["batch", "total_counts", "passed_qc"]
    assert list(joined.index) == ["a", "c"]
    assert joined.index.name == "barcode"
    assert list(joined["batch"].cat.categories) == ["x"]


def test_categories_that_stay_keep_their_order():
    levels = pd.Categorical(["low", "high", "mid"], categories=["low", "mid", "high"])
    obs = pd.DataFrame({"level": levels}, index=["a", "b", "c"])
    metrics = pd.DataFrame({"passed_qc": [True, True, False]})
    joined = results.join_columns(obs, metrics)
    assert list(joined["level"]) == ["low", "high"]
    assert list(joined["level"].cat.categories) == ["low", "high"]


def test_strings_are_stored_in_the_encoding_that_every_reader_knows(store: Path) -> None:
    root = zarr.open_group(store, mode="r")
    assert root["obs/_index"].attrs["encoding-type"] == "string-array"
    assert root["var/_index"].attrs["encoding-type"] == "string-array"


def test_many_rows_are_cut_into_chunks_and_shards(
    tmp_path: Path, finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "ROWS_PER_CHUNK", 100)
    monkeypatch.setattr(results, "CHUNKS_PER_SHARD", 4)
    path = tmp_path / "results.zarr"
    results.write_results(path, finished.obs, finished.var, finished.qc, finished.pca)
    root = zarr.open_group(path, mode="r")
    assert root["obsm/X_pca"].chunks == (100, 10)
    assert root["obsm/X_pca"].shards is None
    assert root["obsm/X_pca"].compressors == ()
    assert root["obs/_index"].chunks == (100,)
    assert root["obs/total_counts"].chunks == (100,)
    adata = ad.read_zarr(path)
    np.testing.assert_array_equal(adata.obsm["X_pca"], finished.pca.X_pca)


@pytest.mark.parametrize(
    ("cells_as", "genes_as"),
    [("total_counts", "means"), ("passed_qc", "passed_qc"), ("pct_counts_mt", "mean_bin")],
)
def test_an_index_named_like_a_metric_is_renamed_and_keeps_its_names(
    tmp_path: Path, atlas: ad.AnnData, run: dict, cells_as: str, genes_as: str
) -> None:
    odd = atlas.copy()
    odd.obs.index.name, odd.var.index.name = cells_as, genes_as
    # A column of the store that has the name which comes to mind first.
    odd.obs[f"{cells_as}_index"] = "own"
    done = finish(odd, QCSpec(min_genes=60))
    record = tmp_path / "record"
    write_record(record, run, obs=done.obs, var=done.var, qc=done.qc, pca=done.pca)
    back = ad.read_zarr(record / "results.zarr")
    kept = done.qc.cells["passed_qc"].to_numpy()
    assert list(back.obs_names) == list(atlas.obs_names[kept])
    assert back.obs.index.name == f"{cells_as}_index_index"
    assert (back.obs[f"{cells_as}_index"] == "own").all()
    np.testing.assert_array_equal(back.obs["total_counts"], done.qc.cells["total_counts"][kept])
    assert set(back.var_names) <= set(atlas.var_names)
    assert "means" in back.var
    for name, names in (("cells", atlas.obs_names), ("genes", atlas.var_names)):
        table = pd.read_parquet(record / f"{name}.parquet")
        assert list(table.index) == list(names)
        assert table["passed_qc"].dtype == bool


def test_odd_columns_of_the_store_survive(tmp_path: Path) -> None:
    names = [f"c{i}" for i in range(4)]
    obs = pd.DataFrame(
        {
            "nullable": pd.array([1, None, 3, 4], dtype="Int64"),
            "flag": pd.array([True, None, False, True], dtype="boolean"),
            "text": ["a", None, "ü", "<b>"],
            "mixed order": pd.Categorical(list("baba"), categories=list("ba"), ordered=True),
        },
        index=names,
    )
    passed = [True, True, False, True]
    qc = SimpleNamespace(
        cells=pd.DataFrame({"passed_qc": passed}, index=names),
        genes=pd.DataFrame({"passed_qc": [True], "highly_variable": [False]}, index=["g"]),
        summary={},
    )
    path = results.write_results(tmp_path / "r.zarr", obs, pd.DataFrame(index=["g"]), qc)
    back = ad.read_zarr(path).obs
    expected = obs[passed]
    assert list(back["nullable"].isna()) == [False, True, False]
    assert list(back["flag"].isna()) == [False, True, False]
    assert back["text"].isna().tolist() == [False, True, False]
    assert back["text"].iloc[2] == "<b>"
    assert back["mixed order"].tolist() == expected["mixed order"].tolist()
    assert back["mixed order"].cat.ordered


def test_an_interrupted_write_leaves_the_earlier_results(
    tmp_path: Path, finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.zarr"
    results.write_results(path, finished.obs, finished.var, finished.qc, finished.pca)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(zarr, "consolidate_metadata", stop)
        with pytest.raises(KeyboardInterrupt):
            results.write_results(path, finished.obs, finished.var, finished.qc)
    assert "X_pca" in ad.read_zarr(path).obsm
    results.write_results(path, finished.obs, finished.var, finished.qc)
    assert "X_pca" not in ad.read_zarr(path).obsm
    assert [p.name for p in tmp_path.iterdir()] == ["results.zarr"]

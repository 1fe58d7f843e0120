"""The same numbers as scanpy, in float64, on the same cells."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scanpy as sc
import scipy.sparse as sp

from scgpu_tasks import hvg, pca, qc
from scgpu_tasks.datasets import write_synthetic
from scgpu_tasks.io.rows import open_rows
from scgpu_tasks.specs import HVGSpec, PCASpec, QCSpec
from scgpu_tasks.stages.pca import run_pca
from scgpu_tasks.stages.qc import run_qc

N_TOP = 2000
HVG_CASES = {
    "seurat": {"flavor": "seurat"},
    "cell_ranger": {"flavor": "cell_ranger"},
    "seurat by batch": {"flavor": "seurat", "batch_key": "batch"},
    "cell_ranger by batch": {"flavor": "cell_ranger", "batch_key": "batch"},
    "cutoffs": {"flavor": "seurat", "n_top_genes": None},
    "cutoffs by batch": {"flavor": "seurat", "n_top_genes": None, "batch_key": "batch"},
    "median target": {"flavor": "seurat", "target_sum": None},
}


def celltypist_sample() -> ad.AnnData:
    """559 human cells that the package celltypist ships as a table of counts."""
    spec = find_spec("celltypist")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the package celltypist: pip install celltypist==1.7.1")
    folder = Path(spec.submodule_search_locations[0])
    table = pd.read_csv(folder / "data/samples/sample_cell_by_gene.csv", index_col=0)
    adata = ad.AnnData(
        sp.csr_matrix(table.to_numpy(np.float64)),
        pd.DataFrame(index=table.index.astype(str)),
        pd.DataFrame(index=table.columns.astype(str)),
    )
    adata.obs["batch"] = pd.Categorical(np.where(np.arange(adata.n_obs) % 3, "a", "b"))
    return adata


def synthetic(store: Path) -> ad.AnnData:
    adata = ad.read_zarr(store)
    adata.X = adata.X.astype(np.float64)
    return adata


@pytest.fixture(scope="session")
def synthetic_50k(tmp_path_factory):
    path = tmp_path_factory.mktemp("parity") / "cells50k.zarr"
    return write_synthetic(path, 50_000, 8_000, nnz_per_cell=400, n_batches=3, seed=5)


@pytest.fixture(
    scope="module",
    params=[
        "celltypist",
        "medium",
        pytest.param("50k", marks=pytest.mark.slow),
    ],
)
def adata(request):
    if request.param == "celltypist":
        return celltypist_sample()
    store = "synthetic_50k" if request.param == "50k" else "medium_store"
    return synthetic(request.getfixturevalue(store))


QC = QCSpec(min_genes=200, max_pct_mt=20, min_cells=3)


def expected_filters(adata):
    """scanpy's metrics of all cells; its filters, cells first."""
    expected = ad.AnnData(adata.X.copy(), adata.obs.copy(), adata.var[[]].copy())
    expected.var["mt"] = expected.var_names.str.upper().str.startswith("MT-")
    sc.pp.calculate_qc_metrics(
        expected, qc_vars=["mt"], percent_top=(20, 50), inplace=True, log1p=True
    )
    keep = (expected.obs["n_genes_by_counts"] >= 200) & ~(expected.obs["pct_counts_mt"] > 20)
    kept = expected[keep.to_numpy()].copy()
    genes, n_cells = sc.pp.filter_genes(kept.X, min_cells=3, inplace=False)
    return expected, kept, np.asarray(genes), np.asarray(n_cells)


@pytest.fixture(scope="module")
def filtered(adata):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return expected_filters(adata)


def log_normalised(kept, genes, target_sum=1e4):
    """Normalise by totals over all genes; then drop the genes that did not pass."""
    counts = kept.copy()
    normal = counts.copy()
    sc.pp.normalize_total(normal, target_sum=target_sum)
    sc.pp.log1p(normal)
    normal.layers["counts"] = counts.X
    return normal[:, genes].copy()


def test_metrics_and_filters(adata, filtered):
    expected, _, genes, n_cells = filtered
    found = run_qc(
        adata.X,
        adata.obs,
        adata.var,
        QCSpec(min_genes=200, max_pct_mt=20, min_cells=3, percent_top=(20, 50)),
        HVGSpec(),
    )
    for mine, theirs in ((found.cells, expected.obs), (found.genes, expected.var)):
        columns = [c for c in theirs if c in mine]
        assert len(columns) >= 6
        for column in columns:
            a, b = mine[column].to_numpy(), theirs[column].to_numpy()
            if column.startswith("n_"):
                np.testing.assert_array_equal(a, b, err_msg=column)
            elif column.startswith("total_"):
                # celltypist's counts are whole but for their last digits.
                np.testing.assert_array_equal(np.rint(a), np.rint(b), err_msg=column)
                np.testing.assert_allclose(a, b, rtol=1e-14, err_msg=column)
            else:
                np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-12, err_msg=column)
    for column in ("pct_counts_in_top_20_genes", "pct_counts_in_top_50_genes", "pct_counts_mt"):
        assert column in found.cells
    np.testing.assert_array_equal(found.genes["passed_qc"], genes)
    np.testing.assert_array_equal(found.genes["n_cells_kept"], n_cells)


@pytest.mark.parametrize("case", HVG_CASES)
def test_highly_variable_genes(adata, filtered, case):
    options = {"n_top_genes": N_TOP, **HVG_CASES[case]}
    _, kept, genes, _ = filtered
    target = options.pop("target_sum", 1e4)
    expected = log_normalised(kept, genes, target)
    found = run_qc(
        adata.X, adata.obs, adata.var, QC, HVGSpec(target_sum=target, **options)
    ).genes[genes]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = sc.pp.highly_variable_genes(expected, inplace=False, **options)
    # With cutoffs by batch, scanpy sorts the table by name.
    theirs = theirs.loc[found.index]
    np.testing.assert_array_equal(found["highly_variable"], theirs["highly_variable"])
    for column in ("means", "dispersions", "dispersions_norm"):
        np.testing.assert_allclose(
            found[column], theirs[column], rtol=1e-6, atol=1e-9, err_msg=column
        )
    for column in ("highly_variable_nbatches", "highly_variable_intersection"):
        assert (column in found) == (column in theirs)
        if column in theirs:
            np.testing.assert_array_equal(found[column], theirs[column])


def test_seurat_v3(adata, filtered):
    pytest.importorskip("skmisc", reason="seurat_v3 needs scikit-misc")
    _, kept, genes, _ = filtered
    # Many rare genes have equal means, and loess cuts between neighbours: sums must be exact.
    counts, kept = adata.X.copy(), kept[:, genes].copy()
    for matrix in (counts, kept.X):
        matrix.data = np.rint(matrix.data)
    spec = HVGSpec(flavor="seurat_v3", n_top_genes=N_TOP)
    found = run_qc(counts, adata.obs, adata.var, QC, spec)
    theirs = sc.pp.highly_variable_genes(
        kept, flavor="seurat_v3", n_top_genes=N_TOP, inplace=False
    )
    mine = found.genes[genes]
    np.testing.assert_allclose(mine["variances_norm"], theirs["variances_norm"], rtol=1e-6)
    np.testing.assert_array_equal(mine["highly_variable"], theirs["highly_variable"])
    assert found.summary["passes"] == 2


def test_components(adata, filtered):
    _, kept, genes, _ = filtered
    found = run_qc(adata.X, adata.obs, adata.var, QC, HVGSpec(n_top_genes=N_TOP))
    components = run_pca(adata.X, found.cells, found.genes, 1e4, PCASpec(n_comps=30))
    expected = log_normalised(kept, genes)
    mask = found.genes["highly_variable"].to_numpy()
    expected.var["highly_variable"] = mask[genes]
    sc.pp.pca(expected, n_comps=30, svd_solver="arpack")
    loadings = expected.varm["PCs"][mask[genes]]
    assert_same_components(
        (components.PCs, components.variance, components.variance_ratio, components.X_pca),
        (
            loadings,
            expected.uns["pca"]["variance"],
            expected.uns["pca"]["variance_ratio"],
            expected.obsm["X_pca"],
        ),
    )


def assert_same_components(found, expected):
    """Variances; and loadings and scores where a component's variance stands alone."""
    loadings, variance, ratio, scores = found
    np.testing.assert_allclose(variance, expected[1], rtol=1e-6)
    np.testing.assert_allclose(ratio, expected[2], rtol=1e-6)
    gaps = np.diff(variance) / variance[:-1]
    separated = np.ones(len(variance), bool)
    separated[:-1] &= gaps < -1e-3
    separated[1:] &= gaps < -1e-3
    separated[-1] = False
    assert separated.sum() >= 3
    cosine = (loadings * expected[0]).sum(axis=0)
    assert (np.abs(cosine[separated]) > 0.999999).all()
    signed = expected[3] * np.sign(cosine)
    np.testing.assert_allclose(scores[:, separated], signed[:, separated], atol=1e-3)


def test_a_store_read_in_blocks_gives_scanpys_genes(synthetic_50k_or_medium):
    store, adata = synthetic_50k_or_medium
    _, kept, genes, _ = expected_filters(adata)
    found = run_qc(open_rows(store, chunks=3_000), adata.obs, adata.var, QC, HVGSpec())
    theirs = sc.pp.highly_variable_genes(
        log_normalised(kept, genes), n_top_genes=2000, inplace=False
    )
    np.testing.assert_array_equal(
        found.genes["highly_variable"][genes], theirs["highly_variable"]
    )


@pytest.fixture
def synthetic_50k_or_medium(medium_store):
    return medium_store, synthetic(medium_store)


def test_components_of_pbmc68k():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adata = sc.datasets.pbmc68k_reduced()
    adata.X = np.asarray(adata.X, np.float64)
    mine = ad.AnnData(adata.X.copy(), adata.obs.copy(), adata.var[["highly_variable"]].copy())
    before = mine.X.copy()
    sc.pp.pca(adata, n_comps=30, svd_solver="full")
    pca.pca(mine, 30, normalize=False)
    assert_same_components(
        *(
            (
                a.varm["PCs"],
                a.uns["pca"]["variance"],
                a.uns["pca"]["variance_ratio"],
                a.obsm["X_pca"],
            )
            for a in (mine, adata)
        )
    )
    np.testing.assert_array_equal(mine.X, before)
    assert mine.obsm["X_pca"].dtype == np.float32
    assert mine.uns["pca"]["params"]["mask_var"] == "highly_variable"


def test_the_public_functions_write_what_scanpy_writes():
    adata = celltypist_sample()
    mine, theirs = adata.copy(), adata.copy()
    for a in (mine, theirs):
        a.var["mt"] = a.var_names.str.startswith("MT-")
    qc.calculate_qc_metrics(mine, qc_vars="mt", inplace=True)
    sc.pp.calculate_qc_metrics(theirs, qc_vars="mt", inplace=True)
    assert list(mine.obs) == list(theirs.obs)
    assert list(mine.var) == list(theirs.var)
    for a, b in ((mine.obs, theirs.obs), (mine.var, theirs.var)):
        pd.testing.assert_frame_equal(a, b, check_dtype=False, rtol=1e-9)
    hvg.highly_variable_genes(mine, n_top_genes=500)
    pca.pca(mine, 20)
    sc.pp.normalize_total(theirs, target_sum=1e4)
    sc.pp.log1p(theirs)
    sc.pp.highly_variable_genes(theirs, n_top_genes=500)
    sc.pp.pca(theirs, 20)
    np.testing.assert_array_equal(mine.var["highly_variable"], theirs.var["highly_variable"])
    assert set(theirs.var) <= set(mine.var)
    assert mine.uns["hvg"] == theirs.uns["hvg"]
    assert set(mine.uns["pca"]) == set(theirs.uns["pca"])
    assert set(mine.uns["pca"]["params"]) == set(theirs.uns["pca"]["params"])
    np.testing.assert_allclose(
        mine.uns["pca"]["variance"], theirs.uns["pca"]["variance"], rtol=1e-6
    )
    assert (mine.varm["PCs"][~mine.var["highly_variable"]] == 0).all()
    assert (mine.X != adata.X).nnz == 0

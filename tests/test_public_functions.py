"""qc, hvg and pca on an AnnData: masks, layers, forms of X, refusals."""

from __future__ import annotations

import anndata as ad
import dask.array as da
import numpy as np
import pytest
import scipy.sparse as sp

import scgpu_tasks
from scgpu_tasks import hvg, pca, qc
from scgpu_tasks.errors import DataError, FormatError, ParameterError
from scgpu_tasks.specs import HVGSpec, QCSpec

SPEC = QCSpec(min_genes=30, max_pct_mt=70)


@pytest.fixture
def adata(small_store):
    return ad.read_zarr(small_store)


def test_filter_masks_marks_and_removes_nothing(adata):
    shape = adata.shape
    summary = qc.filter_masks(adata, SPEC)
    assert adata.shape == shape
    assert adata.obs["passed_qc"].sum() == summary["n_cells_kept"] < adata.n_obs
    assert adata.var["passed_qc"].sum() == summary["n_genes_kept"]
    assert "pct_counts_mt" in adata.obs


def test_one_call_does_what_the_separate_calls_do(adata):
    other = adata.copy()
    summary = qc.quality_control(adata, SPEC, HVGSpec(n_top_genes=100))
    assert summary["passes"] == 1
    qc.filter_masks(other, SPEC)
    hvg.highly_variable_genes(other, n_top_genes=100)
    np.testing.assert_array_equal(adata.var["highly_variable"], other.var["highly_variable"])
    np.testing.assert_allclose(adata.var["means"], other.var["means"], rtol=1e-12)


@pytest.mark.parametrize("form", ["lazy", "dask", "dense", "csc"])
def test_every_form_of_x_gives_the_same_components(adata, form, small_store):
    reference = adata.copy()
    if form == "lazy":
        adata = scgpu_tasks.read_lazy(small_store, chunks=400)
    elif form == "dask":
        adata.X = da.from_array(adata.X.toarray(), chunks=(500, -1)).map_blocks(sp.csr_matrix)
    else:
        adata.X = adata.X.toarray() if form == "dense" else adata.X.tocsc()
    for a in (adata, reference):
        qc.quality_control(a, SPEC, HVGSpec(n_top_genes=100))
        pca.pca(a, 10)
    np.testing.assert_allclose(adata.obsm["X_pca"], reference.obsm["X_pca"], atol=1e-5)
    np.testing.assert_allclose(adata.varm["PCs"], reference.varm["PCs"], atol=1e-9)


def test_cells_left_out_have_no_scores_and_genes_left_out_no_loadings(adata):
    qc.quality_control(adata, SPEC, HVGSpec(n_top_genes=100))
    pca.pca(adata, 10)
    kept = adata.obs["passed_qc"].to_numpy()
    assert np.isnan(adata.obsm["X_pca"][~kept]).all()
    assert np.isfinite(adata.obsm["X_pca"][kept]).all()
    assert (adata.varm["PCs"][~adata.var["highly_variable"]] == 0).all()


def test_a_layer_is_used_instead_of_x(adata):
    expected = adata.copy()
    adata.layers["counts"] = adata.X
    adata.X = sp.csr_matrix(adata.shape, dtype=np.float32)
    for a, layer in ((adata, "counts"), (expected, None)):
        qc.quality_control(a, SPEC, HVGSpec(n_top_genes=100), layer=layer)
        hvg.highly_variable_genes(a, n_top_genes=80, layer=layer)
        pca.pca(a, 10, layer=layer)
    np.testing.assert_array_equal(adata.obsm["X_pca"], expected.obsm["X_pca"])
    assert adata.uns["pca"]["params"]["layer"] == "counts"


def test_mask_var_takes_a_column_or_an_array(adata):
    mask = np.arange(adata.n_vars) % 5 == 0
    adata.var["mine"] = mask
    other = adata.copy()
    pca.pca(adata, 10, mask_var="mine", key_added="own")
    pca.pca(other, 10, mask_var=mask)
    np.testing.assert_array_equal(adata.obsm["own"], other.obsm["X_pca"])
    assert adata.uns["own"]["params"]["mask_var"] == "mine"


def test_totals_of_the_whole_store_are_used_when_genes_were_removed(adata):
    qc.quality_control(adata, SPEC, HVGSpec(n_top_genes=100))
    part = adata[:, adata.var["highly_variable"].to_numpy()].copy()
    pca.pca(adata, 10)
    pca.pca(part, 10)
    np.testing.assert_allclose(part.obsm["X_pca"], adata.obsm["X_pca"], atol=1e-5)


def test_default_number_of_components_fits_small_data(adata):
    part = adata[:30].copy()
    pca.pca(part, mask_var=None)
    assert part.obsm["X_pca"].shape == (30, 29)


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (
            lambda a: qc.calculate_qc_metrics(a, layer="raw"),
            ParameterError,
            "layer 'raw' is not",
        ),
        (
            lambda a: qc.calculate_qc_metrics(a, percent_top=(9_999,)),
            ParameterError,
            "percent_top",
        ),
        (lambda a: pca.pca(a, 10, mask_var="mine"), ParameterError, "mask_var 'mine'"),
        (
            lambda a: pca.pca(a, 10, mask_var=np.ones(3, bool)),
            ParameterError,
            "one for each gene",
        ),
        (lambda a: pca.pca(a, 10), ParameterError, r"quality_control.*mask_var=None"),
        (lambda a: pca.pca(a, 10_000, mask_var=None), ParameterError, "n_comps=10000"),
        (lambda a: hvg.highly_variable_genes(a, batch_key="donor"), ParameterError, "'donor'"),
    ],
)
def test_what_does_not_fit_is_refused(adata, call, kind, words):
    with pytest.raises(kind, match=words):
        call(adata)


def test_log_normalised_values_are_refused_with_advice(adata):
    adata.X = adata.X.log1p()
    with pytest.raises(DataError, match="expect_counts=False"):
        hvg.highly_variable_genes(adata)


def test_a_matrix_left_in_a_file_is_refused_with_advice(adata, tmp_path):
    adata.write_h5ad(tmp_path / "a.h5ad")
    backed = ad.read_h5ad(tmp_path / "a.h5ad", backed="r")
    with pytest.raises(FormatError, match="read_lazy"):
        qc.calculate_qc_metrics(backed)
    backed.file.close()


@pytest.mark.parametrize("shape", [(0, 30), (0, 0)])
@pytest.mark.parametrize("form", [np.asarray, sp.csr_matrix, da.from_array])
def test_no_cells_at_all_are_too_few_whatever_holds_x(shape, form):
    adata = ad.AnnData(form(np.zeros(shape, np.float32)))
    with pytest.raises(ParameterError, match="n_comps=2 components need as many cells, but 0"):
        pca.pca(adata, n_comps=2, mask_var=None)


def test_chunks_of_a_dask_array_without_rows_change_nothing():
    counts = np.random.default_rng(0).poisson(1, (60, 20)).astype(np.float32)
    x = da.from_array(counts, chunks=(20, 20))
    some = x.map_blocks(
        lambda block, block_id: block[: 0 if block_id[0] == 1 else None],
        chunks=((20, 0, 20), (20,)),
        dtype=x.dtype,
    )
    first, second = ad.AnnData(np.delete(counts, range(20, 40), axis=0)), ad.AnnData(some)
    for adata in (first, second):
        pca.pca(adata, n_comps=2, mask_var=None)
    np.testing.assert_allclose(first.obsm["X_pca"], second.obsm["X_pca"], rtol=1e-5)

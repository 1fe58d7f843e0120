"""run_qc: the same numbers however X is stored and cut, filters, refusals."""

from __future__ import annotations

import json

import dask.array as da
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from scgpu_tasks.errors import DataError, FormatError, ParameterError
from scgpu_tasks.io.rows import open_rows
from scgpu_tasks.specs import HVGSpec, QCSpec
from scgpu_tasks.stages.qc import Among, run_qc

from .atlases import Cut, atlas, names, scrambled

QC = QCSpec(min_genes=20, max_pct_mt=60)
HVG = HVGSpec(n_top_genes=50)


@pytest.fixture(scope="module")
def data():
    return atlas()


@pytest.fixture(scope="module")
def reference(data):
    return run_qc(data[0].astype(np.float64), *data[1:], QC, HVG, workers=1)


def same(result, reference, rtol=1e-9):
    for name in ("cells", "genes"):
        found, expected = getattr(result, name), getattr(reference, name)
        assert list(found) == list(expected)
        for column in found:
            a, b = found[column].to_numpy(), expected[column].to_numpy()
            exact = a.dtype.kind in "bi" or column.startswith(("total_counts", "mean_counts"))
            if exact:
                np.testing.assert_array_equal(a, b, err_msg=column)
            else:
                np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-12, err_msg=column)


@pytest.mark.parametrize("dtype", ["uint8", "int32", "uint16", "int64", "float32", "float64"])
def test_numbers_do_not_depend_on_the_type_of_x(data, dtype):
    matrix, obs, var = data
    small = matrix.copy()
    small.data = np.minimum(small.data, 255)
    same(run_qc(small.astype(dtype), obs, var, QC, HVG), run_qc(small, obs, var, QC, HVG))


def test_numbers_do_not_depend_on_the_form_of_x(data, reference, tmp_path):
    matrix, obs, var = data
    array = da.from_array(matrix.toarray(), chunks=(100, -1))
    for form in (matrix.toarray(), sp.csr_array(matrix), matrix.tocsc(), array):
        same(run_qc(form, obs, var, QC, HVG), reference)
    same(run_qc(array.map_blocks(sp.csr_matrix), obs, var, QC, HVG), reference)


@settings(max_examples=15)
@given(st.sets(st.integers(1, 599), max_size=12), st.integers(1, 5))
def test_numbers_do_not_depend_on_cut_or_workers(inner, workers):
    matrix, obs, var = atlas()
    source = Cut(matrix, [0, *sorted(inner), 600])
    reference = run_qc(matrix, obs, var, QC, HVG)
    same(run_qc(source, obs, var, QC, HVG, workers=workers), reference)


def test_same_cut_gives_the_same_bytes_for_any_number_of_workers(data):
    matrix, obs, var = data
    found = [
        run_qc(Cut(matrix, range(0, 601, 50)), obs, var, QC, HVG, workers=w).genes
        for w in (1, 2, 5)
    ]
    for other in found[1:]:
        pd.testing.assert_frame_equal(found[0], other, check_exact=True)


@settings(max_examples=10)
@given(st.integers(0, 2**31))
def test_unsorted_repeated_and_zero_entries_change_nothing(seed):
    matrix, obs, var = atlas(n_obs=200)
    mess = scrambled(matrix, np.random.default_rng(seed))
    before = [mess.data.copy(), mess.indices.copy(), mess.indptr.copy()]
    found = run_qc(Cut(mess, [0, 70, 200]), obs, var, QC, HVG)
    same(found, run_qc(matrix, obs, var, QC, HVG))
    for part, old in zip((mess.data, mess.indices, mess.indptr), before, strict=True):
        np.testing.assert_array_equal(part, old)


def test_a_store_gives_the_numbers_of_its_matrix(small_store):
    import anndata

    adata = anndata.read_zarr(small_store)
    spec = QCSpec(min_genes=30, max_pct_mt=70)
    found = run_qc(open_rows(small_store, chunks=333), adata.obs, adata.var, spec, HVG)
    same(found, run_qc(adata.X, adata.obs, adata.var, spec, HVG))
    assert found.summary["passes"] == 1
    assert found.summary["stored_bytes_read"] > 0


def test_empty_rows_and_columns_are_measured():
    matrix, obs, var = atlas(n_obs=200)
    values = matrix.toarray()
    values[[0, 50, 199]] = 0
    values[:, [0, 7, 399]] = 0
    found = run_qc(values, obs, var, QCSpec(min_genes=None, max_pct_mt=50, min_cells=None), HVG)
    empty = found.cells.iloc[[0, 50, 199]]
    assert empty["pct_counts_mt"].isna().all()
    assert empty["passed_qc"].all()
    assert (empty["log1p_total_counts"] == 0).all()
    assert (found.genes["n_cells_by_counts"].iloc[[0, 7, 399]] == 0).all()
    assert not found.genes["highly_variable"].iloc[[0, 7, 399]].any()


def test_one_cell_is_measured():
    matrix, obs, var = atlas(n_obs=1)
    spec = QCSpec(min_genes=None, max_pct_mt=None, min_cells=None)
    found = run_qc(matrix, obs, var, spec, HVG)
    assert found.cells["total_counts"].iloc[0] == matrix.sum()
    assert found.summary["n_hvg"] == 0


def test_thresholds_are_inclusive(data):
    matrix, obs, var = data
    n_genes, total = np.diff(matrix.indptr), np.asarray(matrix.sum(axis=1)).ravel()
    g, c = int(np.median(n_genes)), float(np.median(total))
    for spec, expected in (
        (QCSpec(min_genes=g, max_pct_mt=None), n_genes >= g),
        (QCSpec(min_genes=None, max_genes=g, max_pct_mt=None), n_genes <= g),
        (QCSpec(min_genes=None, min_counts=c, max_pct_mt=None), total >= c),
        (QCSpec(min_genes=None, max_counts=c, max_pct_mt=None), total <= c),
    ):
        found = run_qc(matrix, obs, var, spec, HVG)
        np.testing.assert_array_equal(found.cells["passed_qc"], expected)
        assert found.summary["n_cells_kept"] == expected.sum()


def test_genes_are_filtered_over_the_kept_cells_only():
    values = np.ones((6, 30))
    values[:3, 0] = 0
    values[0, 1] = 0
    values[5, 10:] = 0
    spec = QCSpec(min_genes=25, max_pct_mt=None, min_cells=3)
    found = run_qc(values, names(6, "c"), names(30, "g"), spec, HVGSpec(n_top_genes=5))
    assert found.cells["passed_qc"].tolist() == [True] * 5 + [False]
    assert found.genes["n_cells_by_counts"].iloc[:3].tolist() == [3, 5, 6]
    assert found.genes["n_cells_kept"].iloc[:3].tolist() == [2, 4, 5]
    assert found.genes["passed_qc"].iloc[:3].tolist() == [False, True, True]
    assert found.summary["lost"] == {"cells": {"min_genes": 1}, "genes": {"min_cells": 1}}


def test_totals_of_a_gene_are_exact_beyond_2_to_the_24():
    values = np.full((300, 4), 2**17 + 1, np.float32)
    values[:, 3] = np.arange(300) % 7
    spec = QCSpec(min_genes=None, max_pct_mt=None)
    found = run_qc(values, names(300, "c"), names(4, "g"), spec, HVGSpec(n_top_genes=2))
    assert found.genes["total_counts"].iloc[0] == 300 * (2**17 + 1)
    assert found.cells["total_counts"].iloc[1] == 3 * (2**17 + 1) + 1


def test_mad_limits_are_those_of_the_rule_and_cost_one_more_read(data):
    matrix, obs, var = data
    found = run_qc(matrix, obs, var, QCSpec(mad=True), HVG)
    assert found.summary["passes"] == 2
    cells = found.cells
    failed = np.zeros(len(obs), bool)
    for metric, n in (
        ("log1p_total_counts", 5),
        ("log1p_n_genes_by_counts", 5),
        ("pct_counts_in_top_20_genes", 5),
        ("pct_counts_mt", 3),
    ):
        x = cells[metric]
        middle = x.median()
        failed |= (x - middle).abs().to_numpy() > n * (x - middle).abs().median() + 1e-12
    failed |= (cells["pct_counts_mt"] > 8).to_numpy()
    np.testing.assert_array_equal(cells["passed_qc"], ~failed)
    assert set(found.summary["thresholds"]["mad"]) >= {"pct_counts_mt", "log1p_total_counts"}


def test_a_median_target_sum_costs_one_more_read_and_is_that_of_the_kept_cells(data):
    matrix, obs, var = data
    found = run_qc(matrix, obs, var, QC, HVGSpec(n_top_genes=50, target_sum=None))
    kept = found.cells.loc[found.cells["passed_qc"], "total_counts"]
    assert found.summary["target_sum"] == np.median(kept)
    assert found.summary["passes"] == 2
    fixed = HVGSpec(n_top_genes=50, target_sum=found.summary["target_sum"])
    same(found, run_qc(matrix, obs, var, QC, fixed))


def test_among_leaves_cells_and_genes_out(data):
    matrix, obs, var = data
    cells, genes = np.arange(600) % 2 == 0, np.arange(400) % 3 > 0
    found = run_qc(matrix, obs, var, QC, HVG, among=Among(cells, genes))
    assert not found.cells["passed_qc"][~cells].any()
    assert not found.genes["passed_qc"][~genes].any()
    other = run_qc(matrix[cells], obs[cells], var, QC, HVG, among=Among(None, genes))
    np.testing.assert_array_equal(
        found.genes["highly_variable"], other.genes["highly_variable"]
    )


def test_cells_without_a_batch_are_kept_and_choose_no_gene(data):
    matrix, obs, var = data
    obs = obs.copy()
    obs["batch"] = obs["batch"].where(np.arange(600) >= 100)
    spec = HVGSpec(n_top_genes=50, batch_key="batch")
    found = run_qc(matrix, obs, var, QC, spec)
    rest = run_qc(matrix[100:], obs[100:], var, QC, spec)
    assert found.summary["n_cells_kept"] > rest.summary["n_cells_kept"]
    np.testing.assert_allclose(
        found.genes["means"][rest.genes["passed_qc"]], rest.genes["means"].dropna()
    )


def test_summary_is_json(data, reference):
    text = json.dumps(reference.summary, allow_nan=False)
    assert json.loads(text)["thresholds"] == {"min_genes": 20, "max_pct_mt": 60, "min_cells": 3}


def test_x_is_never_changed(data):
    matrix, obs, var = data
    before = matrix.copy()
    run_qc(matrix, obs, var, QCSpec(mad=True), HVGSpec(n_top_genes=20, flavor="cell_ranger"))
    assert (matrix != before).nnz == 0
    dense = matrix.toarray()
    run_qc(dense, obs, var, QC, HVG)
    np.testing.assert_array_equal(dense, before.toarray())


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (-2.0, r"-2\.0 at cell 'c3' \(row 3\), gene 'g5'; counts are 0 or more"),
        (np.nan, "nan at cell 'c3'"),
        (np.inf, "inf at cell 'c3'"),
        (1.5, "not a whole number: it looks normalised"),
    ],
)
@pytest.mark.parametrize("form", [np.asarray, sp.csr_matrix])
def test_values_that_are_no_counts_are_refused_by_name(value, words, form):
    values = np.ones((9, 12))
    values[3, 5] = value
    values[3, 9] = -7.0
    values[7, 1] = -1.0
    with pytest.raises(DataError, match=words):
        run_qc(form(values), names(9, "c"), names(12, "g"), QC, HVG)


def test_values_that_are_no_counts_are_taken_when_told(data):
    matrix, obs, var = data
    spec = QCSpec(min_genes=20, max_pct_mt=None, expect_counts=False)
    found = run_qc(matrix / 2, obs, var, spec, HVG)
    assert found.summary["n_hvg"] == 50


@pytest.mark.parametrize(
    ("qc", "hvg", "words"),
    [
        (QCSpec(min_genes=10_000), HVG, "no cell of 600 passes.*min_genes removes 600"),
        (QC, HVGSpec(batch_key="donor"), "batch_key 'donor' is not a column of obs.*batch"),
        (QCSpec(percent_top=(500,)), HVG, "percent_top 500 is more than the 400 genes"),
        (QCSpec(qc_vars=("spike",)), HVG, "'spike' is neither a boolean column"),
        (QCSpec(min_genes=20, max_pct_mt=60, min_cells=10_000), HVG, "no gene is expressed by"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(data, qc, hvg, words):
    with pytest.raises(ParameterError, match=words):
        run_qc(*data, qc, hvg)


def test_tables_of_another_length_are_refused(data):
    matrix, obs, var = data
    with pytest.raises(FormatError, match="obs has 599 rows, but X is 600 x 400"):
        run_qc(matrix, obs[:599], var, QC, HVG)
    with pytest.raises(DataError, match="nothing to measure"):
        run_qc(matrix[:0], obs[:0], var, QC, HVG)


def test_max_pct_mt_without_mt_is_noted(data):
    found = run_qc(*data, QCSpec(min_genes=20, qc_vars=("ribo",)), HVG)
    assert any("max_pct_mt was not applied" in note for note in found.summary["notes"])


def test_cells_without_a_batch_are_noted(data):
    matrix, obs, var = data
    obs = obs.assign(batch=obs["batch"].astype(object).where(np.arange(len(obs)) % 10 > 0))
    found = run_qc(matrix, obs, var, QC, HVGSpec(n_top_genes=50, batch_key="batch"))
    assert any("60 cells have no batch" in note for note in found.summary["notes"])


def test_seurat_v3_refuses_too_few_genes_for_its_regression(data):
    pytest.importorskip("skmisc", reason="seurat_v3 needs scikit-misc")
    matrix, obs, var = data
    few = QCSpec(min_genes=0, max_pct_mt=None, min_cells=None)
    with pytest.raises(DataError, match=r"10 genes that vary for its regression, not [1-3]"):
        run_qc(matrix[:, :3], obs, var[:3], few, HVGSpec(flavor="seurat_v3", n_top_genes=2))

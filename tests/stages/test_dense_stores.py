"""Dense stores through QC and PCA: the numbers of the same matrix as CSR, and scanpy's."""

from __future__ import annotations

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scanpy as sc
import scipy.sparse as sp
import zarr
from zarr.codecs import TransposeCodec

from scgpu_tasks.io.rows import open_rows
from scgpu_tasks.specs import HVGSpec, PCASpec, QCSpec
from scgpu_tasks.stages.pca import run_pca
from scgpu_tasks.stages.qc import run_qc
from tests.io.stores import write

from .atlases import atlas

QC = QCSpec(min_genes=20, max_pct_mt=60)
HVG = HVGSpec(n_top_genes=50)


@pytest.fixture(scope="module")
def data():
    matrix, obs, var = atlas(n_obs=300, n_vars=200)
    matrix.data = np.minimum(matrix.data, 100)
    return matrix, obs, var


def stored(path, values, zarr_format=3, chunks=None, filters="auto", order=None):
    """Write a dense X; with `chunks`, once more in the form asked for."""
    write(path, values, zarr_format=zarr_format)
    if chunks is None:
        return path
    root = zarr.open_group(path, mode="r+", use_consolidated=False)
    attributes = dict(root["X"].attrs)
    del root["X"]
    kind = {} if order is None else {"order": order}
    array = root.create_array(
        "X", shape=values.shape, dtype=values.dtype, chunks=chunks, filters=filters, **kind
    )
    array[...] = values
    array.attrs.update(attributes)
    (path / ".zmetadata").unlink(missing_ok=True)
    return path


def assert_as_csr(path, matrix, obs, var, chunks=64):
    source = open_rows(path, chunks=chunks)
    found = run_qc(source, obs, var, QC, HVG)
    cut = np.append(np.arange(0, len(obs), chunks), len(obs))
    assert source.bounds.tolist() == cut.tolist()
    expected = run_qc(matrix, obs, var, QC, HVG)
    for name in ("cells", "genes"):
        pd.testing.assert_frame_equal(
            getattr(found, name), getattr(expected, name), rtol=1e-9, atol=1e-12
        )
    assert found.summary["stored_bytes_read"] > 0
    pca = PCASpec(n_comps=5)
    target = found.summary["target_sum"]
    dense = run_pca(source, found.cells, found.genes, target, pca)
    sparse = run_pca(matrix, found.cells, found.genes, target, pca)
    np.testing.assert_allclose(dense.variance, sparse.variance, rtol=1e-8)
    np.testing.assert_allclose(dense.X_pca, sparse.X_pca, atol=1e-4)


@pytest.mark.parametrize(
    "dtype",
    ["float16", "float32", "float64", "uint8", "int8", "int16", "uint32", "int64", ">i4"],
)
def test_a_dense_store_of_any_type_counts_as_the_same_csr(data, tmp_path, dtype):
    matrix, obs, var = data
    assert_as_csr(stored(tmp_path / "a.zarr", matrix.toarray().astype(dtype)), matrix, obs, var)


def test_a_dense_store_of_true_and_false_counts_as_ones(data, tmp_path):
    matrix, obs, var = data
    ones = matrix.copy()
    ones.data[:] = 1
    assert_as_csr(stored(tmp_path / "a.zarr", matrix.toarray() != 0), ones, obs, var)


@pytest.mark.parametrize(
    "form",
    [
        {"zarr_format": 2},
        {"zarr_format": 2, "chunks": (70, 30)},
        {"zarr_format": 2, "chunks": (70, 30), "order": "F"},
        {"chunks": (70, 30)},
        {"chunks": (70, 30), "filters": [TransposeCodec(order=(1, 0))]},
    ],
    ids=["v2", "v2 pieces", "v2 F order", "v3 pieces", "v3 F order"],
)
def test_a_dense_store_in_any_layout_counts_as_the_same_csr(data, tmp_path, form):
    matrix, obs, var = data
    assert_as_csr(stored(tmp_path / "a.zarr", matrix.toarray(), **form), matrix, obs, var)


def test_a_dense_store_gives_scanpys_numbers(data, tmp_path):
    matrix, obs, var = data
    source = open_rows(stored(tmp_path / "a.zarr", np.asfortranarray(matrix.toarray())))
    found = run_qc(source, obs, var, QC, HVG)
    adata = ad.AnnData(sp.csr_matrix(matrix, dtype=np.float64), obs=obs, var=var)
    adata.var["mt"] = adata.var_names.str.startswith("MT-")
    sc.pp.calculate_qc_metrics(
        adata, qc_vars=["mt"], percent_top=None, log1p=False, inplace=True
    )
    for name in ("n_genes_by_counts", "total_counts", "total_counts_mt"):
        np.testing.assert_array_equal(found.cells[name], adata.obs[name])
    for name in ("n_cells_by_counts", "total_counts"):
        np.testing.assert_array_equal(found.genes[name], adata.var[name])

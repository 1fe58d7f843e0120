"""run_pca against a dense computation; cuts, workers, memory, refusals."""

from __future__ import annotations

import json
import threading

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from distributed import Client, LocalCluster
from hypothesis import given, settings
from hypothesis import strategies as st

from scgpu_tasks.errors import DataError, OutputError, ParameterError
from scgpu_tasks.io.rows import open_rows
from scgpu_tasks.kernels.transform import Transform
from scgpu_tasks.specs import HVGSpec, PCASpec, QCSpec
from scgpu_tasks.stages import gram_room, held
from scgpu_tasks.stages import pca as pca_stage
from scgpu_tasks.stages.engine import Engine
from scgpu_tasks.stages.pca import masked_pca, run_pca
from scgpu_tasks.stages.pca_visits import SumGram
from scgpu_tasks.stages.qc import run_qc
from scgpu_tasks.stages.sources import as_source

from .atlases import Cut, atlas, scrambled

QC = QCSpec(min_genes=20, max_pct_mt=60)
SPEC = PCASpec(n_comps=10)


@pytest.fixture(scope="module")
def data():
    return atlas()


@pytest.fixture(scope="module")
def qc(data):
    return run_qc(*data, QC, HVGSpec(n_top_genes=60))


def dense_pca(matrix, qc, target_sum, n_comps):
    values = matrix.toarray().astype(float)
    total = values.sum(axis=1, keepdims=True)
    values = np.log1p(values * target_sum / np.maximum(total, 1))
    keep = qc.cells["passed_qc"].to_numpy()
    x = values[keep][:, qc.genes["highly_variable"].to_numpy()]
    centred = x - x.mean(axis=0)
    _, s, v = np.linalg.svd(centred, full_matrices=False)
    v = v[:n_comps].T
    v *= np.sign(v[np.abs(v).argmax(axis=0), np.arange(n_comps)])
    variance = s**2 / (len(x) - 1)
    return (
        centred @ v,
        v,
        variance[:n_comps],
        variance[:n_comps] / variance.sum(),
        x.mean(axis=0),
    )


def same(a, b):
    np.testing.assert_allclose(a.variance, b.variance, rtol=1e-9)
    np.testing.assert_allclose(a.variance_ratio, b.variance_ratio, rtol=1e-9)
    np.testing.assert_allclose(a.PCs, b.PCs, atol=1e-8)
    np.testing.assert_allclose(a.X_pca, b.X_pca, atol=1e-5)


def test_components_are_those_of_the_dense_matrix(data, qc):
    found = run_pca(data[0], qc.cells, qc.genes, 1e4, SPEC)
    scores, loadings, variance, ratio, mean = dense_pca(data[0], qc, 1e4, 10)
    np.testing.assert_allclose(found.PCs, loadings, atol=1e-8)
    np.testing.assert_allclose(found.X_pca, scores, atol=1e-4, rtol=1e-5)
    np.testing.assert_allclose(found.variance, variance, rtol=1e-10)
    np.testing.assert_allclose(found.variance_ratio, ratio, rtol=1e-10)
    np.testing.assert_allclose(found.mean, mean, rtol=1e-12)
    assert found.X_pca.dtype == np.float32
    assert found.PCs.dtype == np.float64


def test_largest_loading_of_each_component_is_positive(data, qc):
    PCs = run_pca(data[0], qc.cells, qc.genes, 1e4, SPEC).PCs
    assert (PCs[np.abs(PCs).argmax(axis=0), np.arange(10)] > 0).all()


@settings(max_examples=10)
@given(st.sets(st.integers(1, 599), max_size=12), st.integers(1, 4))
def test_numbers_do_not_depend_on_cut_or_workers(inner, workers):
    data = atlas()
    qc = run_qc(*data, QC, HVGSpec(n_top_genes=60))
    reference = run_pca(data[0], qc.cells, qc.genes, 1e4, SPEC)
    source = Cut(data[0], [0, *sorted(inner), 600])
    same(run_pca(source, qc.cells, qc.genes, 1e4, SPEC, workers=workers), reference)


@pytest.mark.parametrize("dtype", ["uint8", "int32", "float32", "float64"])
@pytest.mark.parametrize("form", [lambda m: m, lambda m: m.toarray()], ids=["csr", "dense"])
def test_numbers_do_not_depend_on_the_form_of_x(data, qc, dtype, form):
    matrix = data[0].copy()
    matrix.data = np.minimum(matrix.data, 255)
    reference = run_pca(matrix, qc.cells, qc.genes, 1e4, SPEC)
    same(run_pca(form(matrix.astype(dtype)), qc.cells, qc.genes, 1e4, SPEC), reference)


def test_unsorted_repeated_and_zero_entries_change_nothing(data, qc):
    mess = scrambled(data[0], np.random.default_rng(0))
    reference = run_pca(data[0], qc.cells, qc.genes, 1e4, SPEC)
    same(run_pca(Cut(mess, [0, 300, 600]), qc.cells, qc.genes, 1e4, SPEC), reference)


def everything(result):
    parts = (result.X_pca, result.PCs, result.variance, result.variance_ratio, result.mean)
    return b"".join(part.tobytes() for part in parts)


def test_same_cut_gives_the_same_bytes_for_any_number_of_workers_and_any_memory(
    data, qc, tmp_path, monkeypatch
):
    source = Cut(data[0], range(0, 601, 60))
    runs = [run_pca(source, qc.cells, qc.genes, 1e4, SPEC, workers=w) for w in (1, 2, 5)]
    assert [run.summary["passes"] for run in runs] == [1, 1, 1]
    # In threads: the budget of a worker, if another test left its client, is not this one.
    monkeypatch.setattr(held.memory, "budget", 0)
    runs.append(run_pca(source, qc.cells, qc.genes, 1e4, SPEC, workers=2))
    assert runs[-1].summary["passes"] == 2
    scratch = tmp_path / "s"
    runs.append(run_pca(source, qc.cells, qc.genes, 1e4, SPEC, workers=2, scratch=scratch))
    assert runs[-1].summary["passes"] == 1
    assert list((tmp_path / "s").iterdir()) == []
    path = tmp_path / "scores.npy"
    path.write_text("of an older run")
    runs.append(run_pca(source, qc.cells, qc.genes, 1e4, SPEC, workers=2, scores=path))
    assert np.load(path).tobytes() == runs[-1].X_pca.tobytes()
    assert isinstance(runs[-1].X_pca, np.memmap)
    assert len({everything(run) for run in runs}) == 1


def test_a_file_for_scores_that_cannot_be_written_is_named(data, qc, tmp_path):
    path = tmp_path / "none" / "scores.npy"
    with pytest.raises(OutputError, match=str(path)):
        run_pca(data[0], qc.cells, qc.genes, 1e4, SPEC, scores=path)


def test_a_budget_for_some_spans_reads_the_others_once_more(data, qc, monkeypatch):
    source = Cut(data[0], range(0, 601, 60))
    monkeypatch.setattr(held.memory, "budget", 20_000 + 600 * held.BYTES_PER_CELL)
    found = run_pca(source, qc.cells, qc.genes, 1e4, SPEC, workers=1)
    assert 1 < found.summary["passes"] < 2
    assert not held.memory._rows


def test_nothing_stays_held_after_an_error(data, qc, tmp_path, monkeypatch):
    class Broken(Cut):
        def read(self, start, stop):
            if start == 540:
                msg = "gone"
                raise OSError(msg)
            return super().read(start, stop)

    for budget in (2**20, 0):
        monkeypatch.setattr(held.memory, "budget", budget)
        source = Broken(data[0], range(0, 601, 60))
        scores = tmp_path / "scores.npy"
        with pytest.raises(OSError, match="gone"):
            run_pca(source, qc.cells, qc.genes, 1e4, SPEC, scratch=tmp_path, scores=scores)
        assert not held.memory._rows
        assert list(tmp_path.iterdir()) == []


def test_a_run_that_was_cut_short_makes_room(monkeypatch):
    rows = [held.Rows(np.zeros(2, np.int64), np.zeros(10, np.uint16), np.zeros(10), 5)]
    memory = held._Memory(200)
    assert memory.put(("old", 0), rows)
    assert memory.put(("new", 0), rows)
    assert not memory.put(("new", 1), rows)
    assert memory.take(("old", 0)) is None
    assert not memory.put(("new", 1), rows, taken=100)
    assert memory.take(("new", 0)) is not None


def test_a_cluster_gives_the_bytes_of_threads(small_store, tmp_path):
    import anndata

    adata = anndata.read_zarr(small_store)
    source = open_rows(small_store, chunks=200)
    qc = run_qc(source, adata.obs, adata.var, QC, HVGSpec(n_top_genes=100))
    alone = run_pca(source, qc.cells, qc.genes, 1e4, SPEC, workers=2)
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0"
        ) as cluster,
        Client(cluster),
    ):
        other = run_qc(source, adata.obs, adata.var, QC, HVGSpec(n_top_genes=100))
        found = run_pca(source, qc.cells, qc.genes, 1e4, SPEC)
        filed = run_pca(source, qc.cells, qc.genes, 1e4, SPEC, scores=tmp_path / "s.npy")
    pd.testing.assert_frame_equal(qc.genes, other.genes, check_exact=True)
    pd.testing.assert_frame_equal(qc.cells, other.cells, check_exact=True)
    assert everything(found) == everything(alone) == everything(filed)
    assert found.summary["passes"] < 2


def test_uncentred_components_are_those_of_truncated_svd(data, qc):
    from sklearn.decomposition import TruncatedSVD

    found = run_pca(data[0], qc.cells, qc.genes, 1e4, PCASpec(n_comps=8, zero_center=False))
    values = data[0].toarray().astype(float)
    values = np.log1p(values * 1e4 / np.maximum(values.sum(axis=1, keepdims=True), 1))
    keep, mask = qc.cells["passed_qc"].to_numpy(), qc.genes["highly_variable"].to_numpy()
    svd = TruncatedSVD(8, algorithm="arpack", random_state=0)
    scores = svd.fit_transform(sp.csr_matrix(values[keep][:, mask]))
    signs = np.sign((svd.components_.T * found.PCs).sum(axis=0))
    np.testing.assert_allclose(found.PCs * signs, svd.components_.T, atol=1e-8)
    np.testing.assert_allclose(found.X_pca * signs, scores, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found.variance, svd.explained_variance_, rtol=1e-9)
    np.testing.assert_allclose(found.variance_ratio, svd.explained_variance_ratio_, rtol=1e-9)


def test_large_means_do_not_cancel():
    rng = np.random.default_rng(0)
    values = 1e6 + rng.normal(size=(500, 20)) * np.arange(1, 21)
    from scgpu_tasks.kernels.transform import Transform
    from scgpu_tasks.stages.pca import masked_pca
    from scgpu_tasks.stages.sources import as_source

    found = masked_pca(
        as_source(values),
        np.ones(500, bool),
        np.ones(20, bool),
        np.ones(500),
        Transform.IDENTITY,
        PCASpec(n_comps=5),
    )
    expected = np.sort(np.linalg.eigvalsh(np.cov(values.T)))[::-1][:5]
    np.testing.assert_allclose(found.variance, expected, rtol=1e-3)


def test_more_genes_than_cells(data, qc):
    few = qc.cells.copy()
    few["passed_qc"] = few["passed_qc"] & (np.arange(600) < 40)
    found = run_pca(data[0], few, qc.genes, 1e4, SPEC)
    assert np.isfinite(found.X_pca).all()
    assert (found.variance > 0).all()


def test_counts_and_tables_are_never_changed(data, qc):
    before, cells, genes = data[0].copy(), qc.cells.copy(), qc.genes.copy()
    run_pca(data[0], qc.cells, qc.genes, 1e4, SPEC)
    assert (data[0] != before).nnz == 0
    pd.testing.assert_frame_equal(qc.cells, cells)
    pd.testing.assert_frame_equal(qc.genes, genes)


def test_summary_is_json(data, qc):
    summary = run_pca(data[0], qc.cells, qc.genes, 1e4, SPEC).summary
    assert json.loads(json.dumps(summary)) == summary
    assert (summary["n_genes"], summary["n_comps"]) == (60, 10)


def test_too_many_components_are_refused_with_both_numbers(data, qc):
    with pytest.raises(ParameterError, match=r"n_comps=70 .* but 60 are highly variable"):
        run_pca(data[0], qc.cells, qc.genes, 1e4, PCASpec(n_comps=70))
    few = qc.cells.copy()
    few["passed_qc"] = np.arange(600) < 5
    with pytest.raises(ParameterError, match=r"n_comps=10 .* but 5 passed QC"):
        run_pca(data[0], few, qc.genes, 1e4, SPEC)


def test_nan_in_x_is_refused(data, qc):
    matrix = data[0].copy()
    gene = int(np.flatnonzero(qc.genes["highly_variable"])[0])
    row = int(np.flatnonzero(matrix[:, gene].toarray().ravel() * qc.cells["passed_qc"])[0])
    matrix[row, gene] = np.nan
    with pytest.raises(DataError, match="NaN or infinite"):
        run_pca(matrix, qc.cells, qc.genes, 1e4, SPEC)


def test_a_scratch_folder_that_cannot_be_made_is_refused(data, qc, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot make the scratch folder"):
        run_pca(data[0], qc.cells, qc.genes, 1e4, SPEC, scratch=tmp_path / "file" / "s")


@pytest.mark.parametrize(("gigabytes", "at_once"), [(0.75, 1), (1.1, 2)])
def test_tasks_are_as_many_as_the_memory_holds_gram_matrices(
    data, monkeypatch, gigabytes, at_once
):
    monkeypatch.setattr(gram_room, "free_memory", lambda: int(gigabytes * 1e9))
    with Engine(as_source(data[0])) as engine:
        assert gram_room.tasks_at_once(engine, 4_100) == at_once
        assert gram_room.tasks_at_once(engine, 2_000) is None


def test_too_many_genes_for_the_memory_are_refused_before_x_is_read(data, monkeypatch):
    n_cells, n_genes = 60, 4_100
    monkeypatch.setattr(gram_room, "free_memory", lambda: 500_000_000)

    class Unread(Cut):
        def read(self, start, stop):
            msg = "X was read"
            raise AssertionError(msg)

    source = Unread(sp.csr_matrix((n_cells, n_genes), dtype=np.float32), [0, n_cells])
    words = r"4,100 genes needs 0\.6 GiB of memory, .* n_top_genes"
    with pytest.raises(ParameterError, match=words):
        masked_pca(
            source,
            np.ones(n_cells, bool),
            np.ones(n_genes, bool),
            np.ones(n_cells),
            Transform.LOG1P,
            SPEC,
        )


def test_one_task_at_a_time_gives_the_same_bytes(data, qc, monkeypatch):
    source = Cut(data[0], range(0, 601, 60))
    most, running, lock = 0, 0, threading.Lock()
    visit = SumGram.visit

    def counted(self, rows, start):
        nonlocal most, running
        with lock:
            running += 1
            most = max(most, running)
        visit(self, rows, start)
        with lock:
            running -= 1

    free = run_pca(source, qc.cells, qc.genes, 1e4, SPEC, workers=3)
    monkeypatch.setattr(SumGram, "visit", counted)
    monkeypatch.setattr(pca_stage, "tasks_at_once", lambda *_: 1)
    tight = run_pca(source, qc.cells, qc.genes, 1e4, SPEC, workers=3)
    assert most == 1
    assert tight.X_pca.tobytes() == free.X_pca.tobytes()

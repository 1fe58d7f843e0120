"""QC and PCA on a GPU against the same stages on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import zarr

from scgpu_tasks.errors import DataError, MissingPackageError
from scgpu_tasks.io.rows import open_rows
from scgpu_tasks.specs import HVGSpec, PCASpec, QCSpec
from scgpu_tasks.stages import held, resident
from scgpu_tasks.stages.pca import PCAResult, run_pca
from scgpu_tasks.stages.qc import QCResult, run_qc
from tests.gpu.kernel_cases import HostDecoded

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu_is_there")]

QC = QCSpec(min_genes=30, max_pct_mt=30.0)
HVG = HVGSpec(n_top_genes=200)
PCA = PCASpec(n_comps=10)


class Kept(HostDecoded):
    """Host-decoded blocks that may be kept: their content has a name."""

    @property
    def store(self) -> str:
        return str(self.rows.store)

    @property
    def element(self) -> str:
        return str(self.rows.element)

    @property
    def fingerprint(self) -> str:
        return str(self.rows.fingerprint)

    @property
    def nnz(self) -> int:
        return int(self.rows.nnz)


def tables(store: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    group = zarr.open_group(store, mode="r")
    return ad.io.read_elem(group["obs"]), ad.io.read_elem(group["var"])


def gpu_source(store: Path, chunks: Any = "auto") -> Any:
    try:
        return open_rows(store, chunks=chunks, device="gpu")
    except MissingPackageError as error:
        pytest.skip(str(error))


def both(
    source: Any, store: Path, qc: QCSpec = QC, hvg: HVGSpec = HVG, pca: PCASpec = PCA
) -> tuple[QCResult, PCAResult]:
    found = run_qc(source, *tables(store), qc, hvg)
    return found, run_pca(source, found.cells, found.genes, found.summary["target_sum"], pca)


def assert_equal(
    found: tuple[QCResult, PCAResult], expected: tuple[QCResult, PCAResult], separated: int = 5
) -> None:
    """Counts exactly, moments to 1e-9, variances to 1e-8, loadings of separated components."""
    for name in ("cells", "genes"):
        got, want = getattr(found[0], name), getattr(expected[0], name)
        assert list(got.columns) == list(want.columns)
        for column in want:
            if want[column].dtype.kind in "iub":
                np.testing.assert_array_equal(got[column], want[column], err_msg=column)
            else:
                np.testing.assert_allclose(
                    got[column].to_numpy(np.float64),
                    want[column].to_numpy(np.float64),
                    rtol=1e-7 if "disp" in column else 1e-9,
                    atol=1e-12,
                    err_msg=column,
                )
    got, want = found[1], expected[1]
    np.testing.assert_allclose(got.mean, want.mean, rtol=1e-9)
    np.testing.assert_allclose(got.variance, want.variance, rtol=1e-8)
    np.testing.assert_allclose(got.variance_ratio, want.variance_ratio, rtol=1e-8)
    cosines = np.abs((got.PCs * want.PCs).sum(axis=0))
    assert (cosines[:separated] > 0.999999).all()
    scale = np.abs(want.X_pca[:, :separated]).max()
    np.testing.assert_allclose(
        got.X_pca[:, :separated], want.X_pca[:, :separated], atol=1e-5 * scale
    )


@pytest.fixture(scope="module")
def expected(small_store: Path) -> tuple[QCResult, PCAResult]:
    return both(open_rows(small_store), small_store)


@pytest.mark.parametrize("chunks", [1, 97, 500, 1_499, "auto"])
def test_host_decoded_blocks_of_any_size_give_the_cpu_numbers(
    small_store: Path, expected: tuple[QCResult, PCAResult], chunks: Any
) -> None:
    if chunks == 1:
        chunks = [1, 3, 1_496]
    source = HostDecoded(open_rows(small_store, chunks=chunks))
    assert_equal(both(source, small_store), expected)


@pytest.mark.parametrize("chunks", [60, 97, 500, 1_499, "auto"])
def test_gpu_decoded_blocks_of_any_size_give_the_cpu_numbers(
    small_store: Path, expected: tuple[QCResult, PCAResult], chunks: Any
) -> None:
    assert_equal(both(gpu_source(small_store, chunks), small_store), expected)


def test_gpu_decoded_larger_store_gives_the_cpu_numbers(medium_store: Path) -> None:
    hvg = HVGSpec(n_top_genes=1_000, batch_key="batch")
    found = both(gpu_source(medium_store, 3_000), medium_store, hvg=hvg)
    assert_equal(found, both(open_rows(medium_store), medium_store, hvg=hvg))


@pytest.mark.parametrize(
    ("qc", "hvg"),
    [
        (replace(QC, mad=True), HVG),
        (replace(QC, percent_top=(20, 50), qc_vars=("mt", "ribo", "hb")), HVG),
        (QC, replace(HVG, target_sum=None)),
        (QC, replace(HVG, batch_key="batch")),
        (QC, replace(HVG, flavor="cell_ranger")),
        (QC, replace(HVG, n_top_genes=None)),
    ],
    ids=["mad", "percent_top", "median_target", "batches", "cell_ranger", "cutoffs"],
)
def test_options_give_the_cpu_numbers(small_store: Path, qc: QCSpec, hvg: HVGSpec) -> None:
    rows = open_rows(small_store, chunks=400)
    found = both(HostDecoded(rows), small_store, qc=qc, hvg=hvg)
    assert_equal(found, both(rows, small_store, qc=qc, hvg=hvg))


def test_seurat_v3_gives_the_cpu_genes(small_store: Path) -> None:
    pytest.importorskip("skmisc", reason="scikit-misc is not installed")
    hvg = replace(HVG, flavor="seurat_v3")
    rows = open_rows(small_store, chunks=400)
    found = both(HostDecoded(rows), small_store, hvg=hvg)
    assert_equal(found, both(rows, small_store, hvg=hvg))


def test_without_centring_the_cpu_numbers(small_store: Path) -> None:
    pca = PCASpec(n_comps=10, zero_center=False)
    rows = open_rows(small_store, chunks=400)
    found = both(HostDecoded(rows), small_store, pca=pca)
    assert_equal(found, both(rows, small_store, pca=pca))


def test_qc_and_pca_read_the_store_once_each(small_store: Path) -> None:
    source = HostDecoded(open_rows(small_store, chunks=400))
    qc, pca = both(source, small_store)
    assert qc.summary["passes"] == pca.summary["passes"] == 1


def test_too_small_a_budget_reads_again_and_gives_the_same_bytes(
    small_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = HostDecoded(open_rows(small_store, chunks=400))
    _, whole = both(source, small_store)
    monkeypatch.setattr(held, "gpu_memory", held._Memory(60_000))
    _, tight = both(source, small_store)
    assert 1 < tight.summary["passes"] <= 2
    assert tight.X_pca.tobytes() == whole.X_pca.tobytes()


@pytest.mark.parametrize("error", [MemoryError, cupy.cuda.memory.OutOfMemoryError])
def test_blocks_that_do_not_fit_are_cut_and_give_the_cpu_numbers(
    small_store: Path, expected: tuple[QCResult, PCAResult], error: type[MemoryError]
) -> None:
    class Tight(HostDecoded):
        def read(self, start: int, stop: int) -> Any:
            if stop - start > 150:
                raise error(*((1 << 30, 1 << 29) if error is not MemoryError else ()))
            return super().read(start, stop)

    assert_equal(both(Tight(open_rows(small_store, chunks=500)), small_store), expected)


def test_nothing_is_held_after_a_run(small_store: Path) -> None:
    both(HostDecoded(open_rows(small_store, chunks=400)), small_store)
    assert held.gpu_memory._size() == 0


def test_same_bytes_from_run_to_run(small_store: Path) -> None:
    source = HostDecoded(open_rows(small_store, chunks=200))
    first, second = both(source, small_store), both(source, small_store)
    assert first[0].genes.equals(second[0].genes)
    for name in ("X_pca", "PCs", "variance"):
        assert getattr(first[1], name).tobytes() == getattr(second[1], name).tobytes()


def test_log_normalised_values_are_refused_with_their_place(small_store: Path) -> None:
    rows = open_rows(small_store, chunks=400)

    class Logged(HostDecoded):
        def read(self, start: int, stop: int) -> Any:
            block = super().read(start, stop)
            block.data = cupy.log1p(block.data)
            return block

    with pytest.raises(DataError, match="not a whole number"):
        run_qc(Logged(rows), *tables(small_store), QC, HVG)


@pytest.fixture(scope="module")
def workers_and_threads(small_store: Path) -> tuple[Any, Any, Any]:
    """Results of a cluster of one GPU, of blocks kept on it, and of threads."""
    pytest.importorskip("dask_cuda", reason="dask-cuda is not installed")
    from scgpu_tasks.cluster import start_cluster

    source = gpu_source(small_store, 150)
    with start_cluster(device="gpu", workers=1):
        of_workers = both(source, small_store)
        kept = run_qc(source, *tables(small_store), QC, HVG, keep_blocks=True)
        target = kept.summary["target_sum"]
        of_kept = kept, run_pca(source, kept.cells, kept.genes, target, PCA)
    return of_workers, of_kept, both(source, small_store)


def assert_same_bytes(
    found: tuple[QCResult, PCAResult], expected: tuple[QCResult, PCAResult]
) -> None:
    assert found[0].genes.equals(expected[0].genes)
    assert found[0].cells.equals(expected[0].cells)
    for name in ("X_pca", "PCs", "variance", "mean"):
        got, want = getattr(found[1], name), getattr(expected[1], name)
        assert got.tobytes() == want.tobytes(), name


def test_a_cluster_gives_the_bytes_of_threads(workers_and_threads: Any) -> None:
    of_workers, _, of_threads = workers_and_threads
    assert of_workers[1].summary["passes"] == 1
    assert_same_bytes(of_workers, of_threads)


def test_blocks_kept_by_workers_spare_pca_its_read(workers_and_threads: Any) -> None:
    of_workers, of_kept, _ = workers_and_threads
    assert of_kept[1].summary["passes"] == 0
    assert of_kept[1].summary["stored_bytes_read"] == 0
    assert_same_bytes(of_kept, of_workers)


def test_blocks_kept_by_qc_spare_pca_its_read(
    small_store: Path, expected: tuple[QCResult, PCAResult]
) -> None:
    source = Kept(open_rows(small_store, chunks=200))
    qc = run_qc(source, *tables(small_store), QC, HVG, keep_blocks=True)
    assert resident.kept_bytes() > 0
    pca = run_pca(source, qc.cells, qc.genes, qc.summary["target_sum"], PCA)
    assert pca.summary["passes"] == 0
    assert resident.kept_bytes() == 0
    assert_equal((qc, pca), expected)


def test_blocks_that_do_not_fit_are_read_again(
    small_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Kept(open_rows(small_store, chunks=200))
    _, alone = both(source, small_store)
    monkeypatch.setattr(resident._store, "budget", 300_000)
    qc = run_qc(source, *tables(small_store), QC, HVG, keep_blocks=True)
    assert 0 < resident.kept_bytes() <= 300_000
    pca = run_pca(source, qc.cells, qc.genes, qc.summary["target_sum"], PCA)
    assert 0 < pca.summary["passes"] < 1
    # The Gram matrix of packed counts is that of the counts as stored.
    assert pca.X_pca.tobytes() == alone.X_pca.tobytes()

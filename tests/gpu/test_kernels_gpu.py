"""Every GPU kernel against its CPU form and against plain NumPy."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from scgpu_tasks.kernels.gram import finish, gram_add
from scgpu_tasks.kernels.moments import clipped_moments, gene_moments
from scgpu_tasks.kernels.project import project
from scgpu_tasks.kernels.qc import cell_metrics
from scgpu_tasks.kernels.rows import Rows, canonical_rows, dense_rows, make_rows, row_order
from scgpu_tasks.kernels.select import pack, select
from scgpu_tasks.kernels.transform import Transform
from tests.gpu.kernel_cases import dense, host, on_gpu, random_rows

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu_is_there")]

INDEX_TYPES = (np.uint16, np.int32, np.int64)
VALUE_TYPES = (np.uint8, np.uint16, np.int32, np.int64, np.float32, np.float64)
# Relative to the root of the product of two genes' sums of squares around their means.
GRAM_TOLERANCE = {
    "float64": 1e-11,
    "float64 syrk": 1e-11,
    "float32": 5e-6,
    "float16x2": 5e-6,
    "tf32x2": 1e-5,
    "tf32": 2e-3,
}


def assert_same(found: Any, expected: Any) -> None:
    np.testing.assert_array_equal(host(found), host(expected))


@pytest.mark.parametrize("index", INDEX_TYPES)
@pytest.mark.parametrize("shuffled", [False, True])
def test_order_of_indices_is_seen(index: Any, shuffled: bool) -> None:
    rows = random_rows(80, 300, index=index, shuffled=shuffled)
    assert row_order(on_gpu(rows)) == (True, not shuffled)


@pytest.mark.parametrize("index", INDEX_TYPES)
def test_one_index_that_is_no_column_is_seen(index: Any) -> None:
    rows = random_rows(80, 300, index=index)
    rows.indices[-1] = 300
    assert row_order(on_gpu(rows)) == (False, True)


def test_negative_index_is_seen() -> None:
    rows = random_rows(80, 300, index=np.int32)
    rows.indices[0] = -1
    assert not row_order(on_gpu(rows)).in_range


def test_one_repeated_index_is_not_canonical() -> None:
    rows = random_rows(80, 300)
    at = int(rows.indptr[41])
    rows.indices[at + 1] = rows.indices[at]
    assert row_order(on_gpu(rows)) == row_order(rows) == (True, False)


@pytest.mark.parametrize("value", VALUE_TYPES)
def test_unsorted_and_repeated_entries_become_canonical(value: Any) -> None:
    rows = random_rows(90, 200, value=value, largest=90, shuffled=True, repeats=True)
    found, expected = canonical_rows(on_gpu(rows)), canonical_rows(rows)
    for got, want in zip(found[:3], expected[:3], strict=True):
        assert_same(got, want)
        assert got.dtype == want.dtype
    assert row_order(found) == (True, True)


@pytest.mark.parametrize("value", [*VALUE_TYPES, np.int8, np.bool_])
def test_dense_blocks_become_rows(value: Any) -> None:
    values = dense(random_rows(40, 130, largest=90)).astype(value)
    found, expected = dense_rows(cupy.asarray(values)), dense_rows(values)
    assert_same(found.indptr, expected.indptr)
    assert_same(found.indices, expected.indices)
    assert_same(found.data, expected.data)


def test_nan_in_a_dense_block_is_a_value() -> None:
    values = np.zeros((3, 40), np.float32)
    values[1, 7] = np.nan
    found = dense_rows(cupy.asarray(values))
    assert np.isnan(host(found.data)).tolist() == [True]


def test_indptr_on_the_host_is_taken_to_the_device() -> None:
    rows = random_rows(50, 90)
    moved = make_rows(rows.indptr, cupy.asarray(rows.indices), cupy.asarray(rows.data), 90)
    assert row_order(moved) == (True, True)


@pytest.mark.parametrize("index", INDEX_TYPES)
@pytest.mark.parametrize("value", VALUE_TYPES)
def test_cell_metrics_equal_the_cpu(index: Any, value: Any) -> None:
    rows = random_rows(120, 500, index=index, value=value, largest=250, per_row=200)
    rng = np.random.default_rng(1)
    for n_sets in (0, 1, 3, 9):
        sets = rng.integers(0, 1 << n_sets, 500).astype(np.uint64)
        sets[rng.random(500) < 0.8] = 0
        found = cell_metrics(on_gpu(rows), sets, n_sets, (5, 20, 150))
        expected = cell_metrics(rows, sets, n_sets, (5, 20, 150))
        for name, want in vars(expected).items():
            assert_same(getattr(found, name), want)


@pytest.mark.parametrize(
    "values", [[3000.0, 5000.0, 1.0], [1.5, 0.25], [-2.0, 1.0, 4.0], [2047.0, 2048.0, 0.0]]
)
def test_top_totals_of_values_that_are_no_small_counts(values: list[float]) -> None:
    rows = random_rows(60, 400, value=np.float64, per_row=150)
    for i, value in enumerate(values * 10):
        rows.data[(i * 131) % len(rows.data)] = value
    none = np.zeros(400, np.uint64)
    found = cell_metrics(on_gpu(rows), none, 0, (1, 7, 100, 399))
    expected = cell_metrics(rows, none, 0, (1, 7, 100, 399))
    np.testing.assert_allclose(host(found.top_totals), expected.top_totals, rtol=1e-14)


def test_first_invalid_and_first_fractional_rows_are_named() -> None:
    rows = random_rows(200, 300)
    for row, value in ((150, np.nan), (130, -1.0), (140, np.inf), (60, 0.5), (90, 2.5)):
        nonempty = row + int(np.flatnonzero(np.diff(rows.indptr)[row:])[0])
        rows.data[rows.indptr[nonempty]] = value
    none = np.zeros(300, np.uint64)
    found = cell_metrics(on_gpu(rows), none, 0, ())
    expected = cell_metrics(rows, none, 0, ())
    assert found.invalid_row == expected.invalid_row
    assert found.fractional_row == expected.fractional_row


def grouping(n_rows: int, n_groups: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    return rng.integers(-1, n_groups, n_rows).astype(np.int32), rng.random(n_rows) * 3


@pytest.mark.parametrize("transform", list(Transform))
@pytest.mark.parametrize("n_groups", [1, 4])
def test_gene_moments_equal_the_cpu(transform: Transform, n_groups: int) -> None:
    rows = random_rows(900, 700, largest=5 if transform == Transform.EXPM1 else 400)
    group, factor = grouping(900, n_groups)
    found = gene_moments(on_gpu(rows), group, factor, transform, n_groups)
    expected = gene_moments(rows, group, factor, transform, n_groups)
    assert_same(found[0][:, :, :2], expected[0][:, :, :2])
    assert_same(found[1], expected[1])
    np.testing.assert_allclose(host(found[0]), expected[0], rtol=1e-11)


@pytest.mark.parametrize("index", INDEX_TYPES)
@pytest.mark.parametrize("value", VALUE_TYPES)
def test_gene_moments_of_every_type(index: Any, value: Any) -> None:
    rows = random_rows(100, 200, index=index, value=value, largest=200)
    group, factor = grouping(100, 2)
    found = gene_moments(on_gpu(rows), group, factor, Transform.SCALE, 2)
    expected = gene_moments(rows, group, factor, Transform.SCALE, 2)
    assert_same(found[0][:, :, :2], expected[0][:, :, :2])
    np.testing.assert_allclose(host(found[0]), expected[0], rtol=1e-11)


@pytest.mark.parametrize("kind", ["fractional", "negative", "nan"])
def test_totals_of_values_that_are_no_counts(kind: str) -> None:
    rows = random_rows(300, 200, value=np.float64, whole=kind != "fractional")
    if kind == "negative":
        rows.data[::17] = -3
    if kind == "nan":
        rows.data[5] = np.nan
    group, factor = grouping(300, 2)
    found = gene_moments(on_gpu(rows), group, factor, Transform.SCALE, 2)
    expected = gene_moments(rows, group, factor, Transform.SCALE, 2)
    assert_same(found[0][:, :, 1], expected[0][:, :, 1])
    np.testing.assert_allclose(host(found[0]), expected[0], rtol=1e-11, atol=1e-9)
    np.testing.assert_allclose(host(found[1]), expected[1], rtol=1e-11, atol=1e-9)


def test_totals_are_exact_beyond_what_float32_holds() -> None:
    n = 5_000
    indptr = np.arange(n + 1, dtype=np.int64) * 2
    indices = np.tile(np.array([0, 3], np.uint16), n)
    data = np.tile(np.array([16_777_213, 255], np.float32), n)
    rows = Rows(indptr, indices, data, 5)
    kept, _ = gene_moments(
        on_gpu(rows), np.zeros(n, np.int32), np.ones(n), Transform.IDENTITY, 1
    )
    assert host(kept)[0, [0, 3], 0].tolist() == [16_777_213.0 * n, 255.0 * n]
    metrics = cell_metrics(on_gpu(rows), np.zeros(5, np.uint64), 0, ())
    assert set(host(metrics.total).tolist()) == {16_777_213.0 + 255}


def test_one_gene_in_every_cell_does_not_overflow_its_word() -> None:
    n = 9_000
    rows = Rows(
        np.arange(n + 1, dtype=np.int64),
        np.full(n, 2, np.uint16),
        np.full(n, 255, np.uint8),
        4,
    )
    kept, _ = gene_moments(
        on_gpu(rows), np.zeros(n, np.int32), np.ones(n), Transform.IDENTITY, 1
    )
    assert host(kept)[0, 2].tolist() == [255.0 * n, n, 255.0 * n, 255.0**2 * n]


def test_more_genes_than_shared_memory_holds() -> None:
    rows = random_rows(60, 100_000, index=np.int32, per_row=800)
    group, factor = grouping(60, 1)
    found = gene_moments(on_gpu(rows), group, factor, Transform.LOG1P, 1)
    expected = gene_moments(rows, group, factor, Transform.LOG1P, 1)
    assert_same(found[0][:, :, :2], expected[0][:, :, :2])
    np.testing.assert_allclose(host(found[0]), expected[0], rtol=1e-11)


def test_clipped_moments_equal_the_cpu() -> None:
    rows = random_rows(400, 300)
    group, _ = grouping(400, 3)
    limit = np.random.default_rng(3).random((3, 300)) * 8
    limit[1] = np.inf
    np.testing.assert_allclose(
        host(clipped_moments(on_gpu(rows), group, limit)),
        clipped_moments(rows, group, limit),
        rtol=1e-12,
    )


@pytest.mark.parametrize("index", INDEX_TYPES)
@pytest.mark.parametrize("value", VALUE_TYPES)
def test_selected_columns_equal_the_cpu(index: Any, value: Any) -> None:
    rows = random_rows(150, 400, index=index, value=value, largest=200)
    rng = np.random.default_rng(2)
    keep = rng.random(150) < 0.7
    position = np.full(400, -1, np.int32)
    position[rng.choice(400, 90, replace=False)] = rng.permutation(90)
    found, expected = (select(r, keep, position, 90) for r in (on_gpu(rows), rows))
    for got, want in zip(found[:3], expected[:3], strict=True):
        assert_same(got, want)
        assert got.dtype == want.dtype


@pytest.mark.parametrize("largest", [200, 40_000, 70_000])
def test_counts_are_packed_into_the_smallest_type(largest: int) -> None:
    rows = random_rows(100, 200, largest=largest)
    rows.data[3] = largest
    found, expected = pack(on_gpu(rows)), pack(rows)
    assert found.data.dtype == expected.data.dtype
    assert_same(found.data, expected.data)


def test_fractions_are_not_packed() -> None:
    rows = random_rows(100, 200, whole=False)
    assert pack(on_gpu(rows)).data.dtype == np.float32


def gram_case(
    n_rows: int = 700, n_cols: int = 90, value: Any = np.float32
) -> tuple[Rows, np.ndarray, np.ndarray]:
    rows = random_rows(n_rows, n_cols, value=value, largest=200, per_row=40, shuffled=True)
    factor = np.random.default_rng(8).random(n_rows) * 20
    return rows, factor, np.log1p(dense(rows) * factor[:, None])


def gram_error(gram: np.ndarray, values: np.ndarray) -> float:
    expected = values.T @ values
    spread = np.sqrt(((values - values.mean(axis=0)) ** 2).sum(axis=0))
    spread[spread == 0] = 1
    return float((np.abs(gram - expected) / np.outer(spread, spread)).max())


@pytest.mark.parametrize("precision", GRAM_TOLERANCE)
@pytest.mark.parametrize(("stretch", "panel"), [(None, None), (64, 32), (100, 48)])
def test_gram_matrix_is_within_its_stated_tolerance(
    precision: str, stretch: int | None, panel: int | None
) -> None:
    from scgpu_tasks.kernels._gpu import gram as gpu

    rows, factor, values = gram_case()
    gram, sums = cupy.zeros((90, 90)), cupy.zeros(90)
    how: dict[str, Any] = {"precision": precision, "stretch": stretch, "panel": panel}
    gpu.gram_add(on_gpu(rows), factor, Transform.LOG1P, 90, gram, sums, **how)
    np.testing.assert_allclose(host(sums), values.sum(axis=0), rtol=1e-12)
    assert gram_error(host(gram), values) < GRAM_TOLERANCE[precision]
    assert_same(gram, host(gram).T)


def test_variances_are_not_biased() -> None:
    # A tensor core that truncates its sums makes all of them too small by about 1e-6.
    rows, factor, values = gram_case(n_rows=6_000)
    gram, sums = cupy.zeros((90, 90)), cupy.zeros(90)
    gram_add(on_gpu(rows), factor, Transform.LOG1P, 90, gram, sums)
    centred = values - values.mean(axis=0)
    found = host(gram) - np.outer(host(sums), host(sums)) / 6_000
    eigenvalues = np.linalg.eigvalsh(centred.T @ centred)[3:]
    np.testing.assert_allclose(np.linalg.eigvalsh(found)[3:], eigenvalues, rtol=1e-10)


def test_more_columns_than_shared_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    from scgpu_tasks.kernels._gpu import gram as gpu

    monkeypatch.setattr(gpu, "shared_bytes", lambda: 1024 + 300)
    rows, factor, values = gram_case()
    for precision, tolerance in GRAM_TOLERANCE.items():
        gram, sums = cupy.zeros((90, 90)), cupy.zeros(90)
        gpu.gram_add(on_gpu(rows), factor, Transform.LOG1P, 90, gram, sums, precision=precision)
        assert gram_error(host(gram), values) < tolerance


@pytest.mark.parametrize("n_dense", [0, 33, 90])
def test_partial_gram_is_finished_on_either_side(n_dense: int) -> None:
    rows, factor, values = gram_case()
    gram, sums = cupy.zeros((90, 90)), cupy.zeros(90)
    gram_add(on_gpu(rows), factor, Transform.LOG1P, n_dense, gram, sums)
    on_host = finish(host(gram), n_dense)
    assert gram_error(on_host, values) < GRAM_TOLERANCE["float64"]
    assert_same(finish(gram, n_dense), on_host)


@pytest.mark.parametrize("value", [np.uint8, np.uint16, np.float32, np.float64])
def test_blocks_add_up_to_one_gram_matrix(value: Any) -> None:
    rows, factor, values = gram_case(value=value)
    gram, sums = cupy.zeros((90, 90)), cupy.zeros(90)
    for a, b in ((0, 1), (1, 333), (333, 700)):
        first, last = rows.indptr[a], rows.indptr[b]
        part = Rows(
            rows.indptr[a : b + 1] - first,
            rows.indices[first:last],
            rows.data[first:last],
            90,
        )
        gram_add(on_gpu(part), factor[a:b], Transform.LOG1P, 90, gram, sums)
    np.testing.assert_allclose(host(sums), values.sum(axis=0), rtol=1e-12)
    assert gram_error(host(gram), values) < GRAM_TOLERANCE["float64"]


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_gram_of_values_of_any_size(scale: float) -> None:
    rows, factor, _ = gram_case(value=np.float64)
    rows = rows._replace(data=(rows.data - 3) * scale)
    gram, sums = cupy.zeros((90, 90)), cupy.zeros(90)
    gram_add(on_gpu(rows), factor, Transform.IDENTITY, 90, gram, sums)
    assert gram_error(host(gram), dense(rows)) < GRAM_TOLERANCE["float64"]


@pytest.mark.parametrize("precision", ["float16x2", "float64", "float64 syrk"])
def test_wide_gram_is_made_in_blocks(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from scgpu_tasks.kernels._gpu import gram as gpu

    monkeypatch.setattr(gpu, "_SCRATCH", 40_000)
    rows, factor, values = gram_case()
    gram, sums = cupy.zeros((90, 90)), cupy.zeros(90)
    gpu.gram_add(
        on_gpu(rows), factor, Transform.LOG1P, 90, gram, sums, precision=precision, stretch=32
    )
    assert gram_error(host(gram), values) < GRAM_TOLERANCE[precision]


@pytest.mark.parametrize("n_comps", [1, 50, 70])
@pytest.mark.parametrize("value", [np.uint8, np.float32])
def test_scores_equal_the_cpu(n_comps: int, value: Any) -> None:
    rows, factor, values = gram_case(value=value)
    rng = np.random.default_rng(4)
    components, offset = rng.normal(size=(90, n_comps)), rng.normal(size=n_comps)
    out = cupy.empty((700, n_comps), np.float32)
    project(on_gpu(rows), factor, Transform.LOG1P, components, offset, out)
    expected = values @ components - offset
    np.testing.assert_allclose(host(out), expected, atol=1e-6 * np.abs(expected).max())


def all_results(rows: Rows) -> list[bytes]:
    """Bytes of what every kernel makes of these rows."""
    group, factor = grouping(rows.n_rows, 2)
    moved = on_gpu(rows)
    found: list[Any] = []
    for transform in (Transform.SCALE, Transform.LOG1P):
        found += gene_moments(moved, group, factor, transform, 2)
    position = np.where(np.arange(rows.n_cols) % 3 == 0, np.arange(rows.n_cols) // 3, -1)
    n = int(position.max()) + 1
    chosen = select(moved, group >= 0, position.astype(np.int32), n)
    kept_factor = factor[group >= 0]
    gram, sums = cupy.zeros((n, n)), cupy.zeros(n)
    gram_add(chosen, kept_factor, Transform.LOG1P, n, gram, sums)
    scores = cupy.empty((chosen.n_rows, 20), np.float32)
    components = np.random.default_rng(0).normal(size=(n, 20))
    project(chosen, kept_factor, Transform.LOG1P, components, np.zeros(20), scores)
    found += [*chosen[:3], gram, sums, scores]
    found.append(cell_metrics(moved, np.zeros(rows.n_cols, np.uint64), 0, (20,)).total)
    return [host(array).tobytes() for array in found]


def test_same_bytes_twice() -> None:
    rows = random_rows(1_500, 600, whole=False)
    assert all_results(rows) == all_results(rows)


def test_threads_with_streams_of_their_own_give_the_same_bytes() -> None:
    cases = [random_rows(800, 600, seed=seed) for seed in range(4)]
    expected = [all_results(rows) for rows in cases]

    def work(rows: Rows) -> list[bytes]:
        with cupy.cuda.Stream(non_blocking=True) as stream:
            found = all_results(rows)
            stream.synchronize()
        return found

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, cases * 3)) == expected * 3


@pytest.mark.parametrize("n_rows", [0, 1])
def test_hardly_any_rows(n_rows: int) -> None:
    rows = Rows(np.zeros(n_rows + 1, np.int64), np.zeros(0, np.uint16), np.zeros(0, "f4"), 50)
    moved = on_gpu(rows)
    assert row_order(moved) == (True, True)
    group, factor = np.zeros(n_rows, np.int32), np.ones(n_rows)
    kept, left_out = gene_moments(moved, group, factor, Transform.SCALE, 1)
    assert not host(kept).any()
    assert not host(left_out).any()
    assert host(cell_metrics(moved, np.zeros(50, np.uint64), 0, (20,)).total).sum() == 0
    chosen = select(moved, np.ones(n_rows, bool), np.arange(50, dtype=np.int32), 50)
    gram, sums = cupy.zeros((50, 50)), cupy.zeros(50)
    gram_add(pack(chosen), factor, Transform.LOG1P, 50, gram, sums)
    assert not host(gram).any()
    assert len(host(canonical_rows(moved).data)) == 0

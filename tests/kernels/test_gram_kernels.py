"""Selection, Gram matrix and projection against plain NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

from scgpu_tasks.kernels import gram
from scgpu_tasks.kernels._cpu import gram as cpu_gram
from scgpu_tasks.kernels.project import project
from scgpu_tasks.kernels.rows import make_rows
from scgpu_tasks.kernels.select import pack, select
from scgpu_tasks.kernels.transform import Transform


def random_rows(seed, n=50, n_cols=30, density=0.3, top=6, dtype=np.float32):
    rng = np.random.default_rng(seed)
    values = rng.integers(1, top, (n, n_cols)) * (rng.random((n, n_cols)) < density)
    matrix = sp.csr_matrix(values.astype(dtype))
    rows = make_rows(matrix.indptr, matrix.indices.astype(np.uint16), matrix.data, n_cols)
    return values.astype(float), rows, rng


@given(
    st.integers(0, 2**31),
    st.sampled_from([0, 1, 7, 29, 30]),
    st.sampled_from([0.02, 0.3, 1.0]),
    st.sampled_from(list(Transform)),
)
def test_gram_of_any_dense_part_is_that_of_the_dense_matrix(seed, n_dense, density, transform):
    values, rows, rng = random_rows(seed, density=density)
    factor = rng.random(50)
    changed = {
        Transform.IDENTITY: values,
        Transform.SCALE: values * factor[:, None],
        Transform.LOG1P: np.log1p(values * factor[:, None]),
        Transform.EXPM1: np.expm1(values),
    }[transform]
    found, sums = np.zeros((30, 30)), np.zeros(30)
    gram.gram_add(rows, factor, transform, n_dense, found, sums)
    found = gram.finish(found, n_dense)
    np.testing.assert_allclose(found, changed.T @ changed, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(sums, changed.sum(axis=0), rtol=1e-12)
    np.testing.assert_array_equal(found, found.T)


def test_gram_adds_up_over_blocks_and_tiles(monkeypatch):
    values, rows, rng = random_rows(1, n=100)
    factor = rng.random(100)
    monkeypatch.setattr(cpu_gram, "_HEIGHTS", (7, 7))
    found, sums = np.zeros((30, 30)), np.zeros(30)
    for _ in range(2):
        gram.gram_add(rows, factor, Transform.LOG1P, 5, found, sums)
    changed = np.log1p(values * factor[:, None])
    np.testing.assert_allclose(gram.finish(found, 5), 2 * changed.T @ changed, rtol=1e-12)


def test_gram_takes_columns_in_any_order_within_a_row():
    values, rows, rng = random_rows(3)
    turn = rng.permutation(30).astype(np.uint16)
    found, sums = np.zeros((30, 30)), np.zeros(30)
    gram.gram_add(
        rows._replace(indices=turn[rows.indices]),
        np.ones(50),
        Transform.IDENTITY,
        6,
        found,
        sums,
    )
    expected = np.zeros((50, 30))
    expected[:, turn] = values
    np.testing.assert_allclose(gram.finish(found, 6), expected.T @ expected, rtol=1e-12)


def test_no_row_and_no_entry_make_a_gram_of_zeros():
    for indptr in ([0], [0, 0, 0]):
        rows = make_rows(np.array(indptr), np.zeros(0, np.uint16), np.zeros(0, np.float32), 4)
        found, sums = np.zeros((4, 4)), np.zeros(4)
        gram.gram_add(rows, np.ones(len(indptr) - 1), Transform.LOG1P, 2, found, sums)
        assert not gram.finish(found, 2).any()


def test_dense_part_grows_with_density():
    assert gram.dense_columns(np.full(100, 0.001)) == 0
    assert gram.dense_columns(np.full(100, 1.0)) == 100
    mixed = np.concatenate([np.full(50, 0.9), np.full(500, 0.002)])
    assert gram.dense_columns(mixed) == 50


def test_select_keeps_rows_and_places_columns():
    values, rows, rng = random_rows(5)
    keep = rng.random(50) < 0.5
    position = np.full(30, -1, np.int32)
    position[[20, 3, 7]] = [0, 1, 2]
    out = select(rows, keep, position, 3)
    matrix = sp.csr_matrix(
        (out.data, out.indices.astype(int), out.indptr), shape=(keep.sum(), 3)
    )
    np.testing.assert_array_equal(matrix.toarray(), values[keep][:, [20, 3, 7]])
    assert out.indices.dtype == np.uint16


def test_select_of_nothing():
    _, rows, _ = random_rows(5)
    nothing = select(rows, np.zeros(50, bool), np.zeros(30, np.int32), 1)
    assert nothing.n_rows == 0
    none = select(rows, np.ones(50, bool), np.full(30, -1, np.int32), 1)
    assert none.indptr[-1] == 0


def test_select_drops_explicit_zeros():
    rows = make_rows(np.array([0, 3]), np.array([0, 1, 2]), np.array([1.0, 0.0, 2.0]), 3)
    out = select(rows, np.ones(1, bool), np.arange(3, dtype=np.int32), 3)
    assert out.data.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1.0, 255.0], np.uint8),
        ([1.0, 256.0], np.uint16),
        ([1.0, 65536.0], np.float32),
        ([1.5, 2.0], np.float32),
        ([-1.0, 2.0], np.float32),
        ([np.nan, 2.0], np.float32),
    ],
)
def test_pack_takes_the_smallest_type_that_is_exact(values, kind):
    rows = make_rows(np.array([0, 2]), np.array([0, 1]), np.array(values, np.float32), 2)
    packed = pack(rows)
    assert packed.data.dtype == kind
    np.testing.assert_array_equal(packed.data.astype(np.float32), rows.data)


@given(st.integers(0, 2**31), st.sampled_from([np.uint8, np.float32, np.float64]))
def test_projection_is_that_of_the_dense_matrix(seed, dtype):
    values, rows, rng = random_rows(seed, dtype=dtype)
    factor, components, offset = rng.random(50), rng.normal(size=(30, 5)), rng.normal(size=5)
    out = np.empty((50, 5), np.float32)
    project(rows, factor, Transform.LOG1P, components, offset, out)
    expected = np.log1p(values * factor[:, None]) @ components - offset
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("value", [3.0, 63.0, 64.0, 1e6, 2.5])
def test_log1p_is_exact_for_small_large_and_fractional_values(value):
    rows = make_rows(np.array([0, 2]), np.array([0, 1]), np.array([value, value]), 2)
    found, sums = np.zeros((2, 2)), np.zeros(2)
    gram.gram_add(rows, np.array([0.37]), Transform.LOG1P, 0, found, sums)
    assert sums.tolist() == [np.log1p(value * 0.37)] * 2


@pytest.mark.parametrize("n", [1, 255, 256, 257, 600])
def test_panels_of_an_upper_triangle_make_the_symmetric_matrix(n):
    whole = np.random.default_rng(0).random((n, n))
    whole += whole.T
    panels = [whole[low : low + 256, low:].ravel() for low in range(0, n, 256)]
    assert (gram.from_upper(np.concatenate(panels), n) == whole).all()

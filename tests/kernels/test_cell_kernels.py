"""Cell metrics and gene moments against plain NumPy, over types and shapes."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

from scgpu_tasks.kernels.moments import clipped_moments, gene_moments
from scgpu_tasks.kernels.qc import cell_metrics
from scgpu_tasks.kernels.rows import make_rows
from scgpu_tasks.kernels.transform import Transform

N_GENES = 40


def make(values, dtype=np.float32, index_type=np.uint16):
    matrix = sp.csr_matrix(np.asarray(values, dtype))
    return make_rows(
        matrix.indptr, matrix.indices.astype(index_type), matrix.data, matrix.shape[1]
    )


@st.composite
def counts(draw):
    n = draw(st.integers(1, 12))
    seed = draw(st.integers(0, 2**32 - 1))
    density = draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    rng = np.random.default_rng(seed)
    values = rng.integers(1, draw(st.sampled_from([3, 200])), (n, N_GENES))
    return values * (rng.random((n, N_GENES)) < density)


@given(
    counts(), st.sampled_from([np.uint8, np.uint16, np.int32, np.int64, np.float32, np.float64])
)
def test_cell_metrics_are_those_of_the_dense_matrix(values, dtype):
    masks = np.zeros((3, N_GENES), bool)
    masks[0, :7], masks[1, 5:20] = True, True
    bits = (masks * (1 << np.arange(3))[:, None]).sum(axis=0).astype(np.uint64)
    tops = (1, 5, 20, N_GENES)
    found = cell_metrics(make(values, dtype), bits, 3, tops)
    np.testing.assert_array_equal(found.n_genes, (values != 0).sum(axis=1))
    np.testing.assert_array_equal(found.total, values.sum(axis=1))
    np.testing.assert_array_equal(found.set_totals, values @ masks.T)
    largest = -np.sort(-values, axis=1)
    expected = np.stack([largest[:, :top].sum(axis=1) for top in tops], axis=1)
    np.testing.assert_array_equal(found.top_totals, expected)
    assert (found.invalid_row, found.fractional_row) == (-1, -1)


def test_top_totals_of_large_and_of_fractional_values():
    values = np.array([[5000.0, 3, 70000, 1], [0.5, 2.25, 0, 1], [3, 3, 3, 3]])
    found = cell_metrics(make(values, np.float64), np.zeros(4, np.uint64), 0, (1, 2, 4))
    np.testing.assert_array_equal(
        found.top_totals, [[70000, 75000, 75004], [2.25, 3.25, 3.75], [3, 6, 12]]
    )


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
def test_first_row_that_holds_no_count_is_found(bad):
    values = np.ones((5, 4))
    values[2, 3] = bad
    values[4, 0] = bad
    assert cell_metrics(make(values), np.zeros(4, np.uint64), 0, ()).invalid_row == 2


def test_first_row_with_a_fraction_is_found():
    values = np.ones((5, 4))
    values[3, 1] = 0.25
    assert cell_metrics(make(values), np.zeros(4, np.uint64), 0, ()).fractional_row == 3


def test_negative_integers_are_found():
    values = np.ones((3, 4), np.int32)
    values[1, 0] = -2
    assert cell_metrics(make(values, np.int32), np.zeros(4, np.uint64), 0, ()).invalid_row == 1


def test_float32_totals_are_exact_beyond_2_to_the_24():
    values = np.full((1, 4), 2**24 - 1, np.float32)
    values[0, 3] = 1
    found = cell_metrics(make(values), np.array([1, 1, 0, 1], np.uint64), 1, (3,))
    assert found.total[0] == 3 * (2**24 - 1) + 1
    assert found.set_totals[0, 0] == 2 * (2**24 - 1) + 1


def test_uint8_and_int64_totals_do_not_wrap():
    assert (
        cell_metrics(
            make(np.full((1, 300), 255), np.uint8), np.zeros(300, np.uint64), 0, ()
        ).total[0]
        == 76500
    )
    big = np.full((1, 3), 2**40 + 1)
    assert cell_metrics(make(big, np.int64), np.zeros(3, np.uint64), 0, ()).total[0] == 3 * (
        2**40 + 1
    )


def expected_moments(values, group, factor, transform, n_groups):
    scaled = values * factor[:, None]
    changed = {
        Transform.IDENTITY: values.astype(float),
        Transform.SCALE: scaled,
        Transform.LOG1P: np.log1p(scaled),
        Transform.EXPM1: np.expm1(values.astype(float)),
    }[transform]
    kept = np.zeros((n_groups, values.shape[1], 4))
    for g in range(n_groups):
        of = group == g
        kept[g] = np.stack(
            [
                values[of].sum(axis=0),
                (values[of] != 0).sum(axis=0),
                changed[of].sum(axis=0),
                (changed[of] ** 2).sum(axis=0),
            ],
            axis=1,
        )
    out = group < 0
    return kept, np.stack([values[out].sum(axis=0), (values[out] != 0).sum(axis=0)], axis=1)


@given(
    counts(),
    st.sampled_from(list(Transform)),
    st.sampled_from([np.uint8, np.int32, np.float32]),
)
def test_gene_moments_are_those_of_the_dense_matrix(values, transform, dtype):
    if transform == Transform.EXPM1:
        values = values % 4
    rng = np.random.default_rng(values.sum())
    group = rng.integers(-1, 2, len(values)).astype(np.int32)
    factor = rng.random(len(values)) * 3
    kept, left_out = gene_moments(make(values, dtype), group, factor, transform, 2)
    expected_kept, expected_out = expected_moments(values, group, factor, transform, 2)
    np.testing.assert_array_equal(kept[:, :, :2], expected_kept[:, :, :2])
    np.testing.assert_allclose(kept, expected_kept, rtol=1e-12)
    np.testing.assert_array_equal(left_out, expected_out)


def test_gene_totals_are_exact_beyond_2_to_the_24():
    values = np.full((200, 2), 2**17 + 1, np.float32)
    kept, _ = gene_moments(
        make(values), np.zeros(200, np.int32), np.ones(200), Transform.SCALE, 1
    )
    assert kept[0, 0, 0] == 200 * (2**17 + 1)
    assert np.float32(values[:, 0]).cumsum(dtype=np.float32)[-1] != 200 * (2**17 + 1)


def test_explicit_zeros_do_not_count():
    rows = make_rows(np.array([0, 2]), np.array([0, 1]), np.array([0.0, 2.0]), 2)
    kept, _ = gene_moments(rows, np.zeros(1, np.int32), np.ones(1), Transform.SCALE, 1)
    assert kept[0, :, 1].tolist() == [0, 1]
    assert cell_metrics(rows, np.zeros(2, np.uint64), 0, ()).n_genes.tolist() == [1]


def test_clipped_moments():
    values = np.array([[5, 0, 9], [1, 2, 0], [7, 7, 7]])
    group = np.array([0, 1, -1], np.int32)
    limit = np.array([[3.0, 1, 4.5], [10, 1.5, 10]])
    out = clipped_moments(make(values), group, limit)
    np.testing.assert_array_equal(out[0], [[3, 9], [0, 0], [4.5, 20.25]])
    np.testing.assert_array_equal(out[1], [[1, 1], [1.5, 2.25], [0, 0]])


def test_counts_that_lost_their_last_digits_are_whole():
    values = np.array([[0.999999999999999, 1448.00000000001, 2.0]])
    found = cell_metrics(make(values, np.float64), np.zeros(3, np.uint64), 0, (1,))
    assert found.fractional_row == -1
    assert found.top_totals[0, 0] == 1448.00000000001


def test_totals_beyond_64_bits_are_rounded_and_do_not_wrap():
    huge = 2**62
    values = np.array([[huge, huge, huge, 3], [5, 0, 2**53 - 7, 1], [0, 0, huge, 0]])
    rows = make(values, np.int64)
    member = np.array([1, 1, 1, 0], np.uint64)
    found = cell_metrics(rows, member, 1, (2, 3, 4))
    assert found.total.tolist() == [3.0 * huge, 2.0**53 - 1, huge]
    assert found.set_totals[:, 0].tolist() == [3.0 * huge, 2.0**53 - 2, huge]
    assert found.top_totals[0].tolist() == [2.0 * huge, 3.0 * huge, 3.0 * huge]
    assert found.invalid_row == -1
    group, factor = np.array([0, 0, -1], np.int32), np.ones(3)
    kept, left_out = gene_moments(rows, group, factor, Transform.IDENTITY, 1)
    # A double near 2**62 is a multiple of 512, so 2**53 - 7 comes to the nearest of these.
    assert kept[0, :, 0].tolist() == [float(huge + 5), huge, float(huge + 2**53 - 7), 4]
    assert left_out[:, 0].tolist() == [0, 0, huge, 0]

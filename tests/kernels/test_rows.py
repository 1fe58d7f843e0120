"""Bare CSR rows: order, duplicates, dense blocks, refused parts."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

from scgpu_tasks.errors import FormatError
from scgpu_tasks.kernels.rows import canonical_rows, dense_rows, make_rows, row_order


def rows_of(indptr, indices, data, n_cols, index_type=np.int32, data_type=np.float32):
    return make_rows(
        np.array(indptr), np.array(indices, index_type), np.array(data, data_type), n_cols
    )


def dense(rows):
    out = np.zeros((rows.n_rows, rows.n_cols))
    for row in range(rows.n_rows):
        part = slice(rows.indptr[row], rows.indptr[row + 1])
        np.add.at(out[row], rows.indices[part].astype(int), rows.data[part].astype(float))
    return out


@pytest.mark.parametrize(
    "index_type", [np.uint8, np.uint16, np.int16, np.int32, np.uint32, np.int64]
)
def test_order_is_seen_in_every_index_type(index_type):
    assert row_order(rows_of([0, 2, 4], [1, 3, 0, 2], [1, 1, 1, 1], 4, index_type)) == (
        True,
        True,
    )
    assert row_order(rows_of([0, 2, 4], [3, 1, 0, 2], [1, 1, 1, 1], 4, index_type)) == (
        True,
        False,
    )
    assert row_order(rows_of([0, 2, 4], [1, 1, 0, 2], [1, 1, 1, 1], 4, index_type)) == (
        True,
        False,
    )
    assert row_order(rows_of([0, 2, 4], [1, 3, 0, 2], [1, 1, 1, 1], 3, index_type)) == (
        False,
        True,
    )


def test_a_row_may_begin_below_the_end_of_the_row_before():
    assert row_order(rows_of([0, 1, 2], [3, 0], [1, 1], 4)).canonical


def test_negative_columns_are_out_of_range():
    assert not row_order(rows_of([0, 1], [-1], [1], 4)).in_range


def test_rows_without_entries_and_matrices_without_columns():
    assert row_order(rows_of([0, 0, 0], [], [], 4)) == (True, True)
    assert row_order(rows_of([0, 0], [], [], 0)) == (True, True)


def test_65536_columns_fit_uint16():
    assert row_order(rows_of([0, 2], [0, 65535], [1, 1], 65536, np.uint16)) == (True, True)


@pytest.mark.parametrize("data_type", [np.uint8, np.int32, np.float32, np.float64])
def test_duplicates_are_summed_beyond_the_stored_type(data_type):
    rows = rows_of(
        [0, 4, 4, 6], [2, 0, 2, 1, 1, 1], [200, 1, 100, 7, 255, 255], 3, np.uint16, data_type
    )
    before = [part.copy() for part in rows[:3]]
    out = canonical_rows(rows)
    assert row_order(out).canonical
    np.testing.assert_array_equal(dense(out), [[1, 7, 300], [0, 0, 0], [0, 510, 0]])
    for part, old in zip(rows[:3], before, strict=True):
        np.testing.assert_array_equal(part, old)


def test_dense_blocks_keep_nan_and_drop_zeros():
    values = np.array([[0, 1.5, 0], [np.nan, 0, 0], [0, 0, 0]])
    rows = dense_rows(values)
    assert rows.indptr.tolist() == [0, 1, 2, 2]
    assert rows.indices.tolist() == [1, 0]
    np.testing.assert_array_equal(rows.data, [1.5, np.nan])


def test_stored_types_are_kept_where_kernels_take_them():
    indices, data = np.array([1], np.uint16), np.array([2], np.float32)
    rows = make_rows(np.array([0, 1], np.int64), indices, data, 3)
    assert np.shares_memory(rows.indices, indices)
    assert np.shares_memory(rows.data, data)


def test_other_types_are_widened_without_loss():
    rows = make_rows(
        np.array([0, 2], np.int32), np.array([0, 1], np.uint32), np.array([True, False]), 2
    )
    assert rows.indptr.dtype == np.int64
    assert rows.indices.dtype == np.int64
    assert rows.data.tolist() == [1, 0]
    big = np.array([2**32 - 1], np.uint32)
    assert make_rows(np.array([0, 1]), np.array([0]), big, 1).data.tolist() == [2**32 - 1]
    swapped = np.array([1.5], ">f4")
    assert make_rows(np.array([0, 1]), np.array([0]), swapped, 1).data.tolist() == [1.5]


@pytest.mark.parametrize(
    ("indptr", "n_indices", "n_data"),
    [([0, 2], 1, 1), ([1, 2], 2, 2), ([0, 2, 1, 2], 2, 2), ([0, 2], 2, 1)],
)
def test_parts_that_make_no_matrix_are_refused(indptr, n_indices, n_data):
    with pytest.raises(FormatError, match="indptr must rise from 0"):
        make_rows(np.array(indptr), np.zeros(n_indices, int), np.zeros(n_data), 3)


def test_arrays_of_an_unknown_library_are_refused():
    rows = make_rows(np.array([0, 1]), np.array([0]), np.array([1.0]), 1)
    with pytest.raises(FormatError, match=r"kernels take arrays of .*, not scipy"):
        row_order(rows._replace(data=sp.coo_array((1, 1))))


def test_duplicates_of_huge_values_do_not_wrap():
    rows = rows_of([0, 3], [1, 1, 1], [2**62] * 3, 2, data_type=np.int64)
    assert canonical_rows(rows).data.tolist() == [3 * 2.0**62]
    small = rows_of([0, 2], [1, 1], [2**31 - 1] * 2, 2, data_type=np.int32)
    assert canonical_rows(small).data.tolist() == [2**32 - 2]

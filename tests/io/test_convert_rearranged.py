"""Sorting, summing duplicates, CSC to CSR, other dtypes: as SciPy does it, out of core."""

from __future__ import annotations

import warnings
from pathlib import Path

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scgpu_tasks.errors import DataError, FormatError, ParameterError
from scgpu_tasks.io.convert import ConvertSpec, convert_zarr, transpose
from scgpu_tasks.io.convert import rearrange as rearrange_module

SMALL = {"chunk_bytes": 1024, "shard_bytes": 4096}


def messy(
    form: str, n: int, m: int, nnz: int, seed: int, dtype: str = "float32"
) -> sp.spmatrix:
    """Matrix with unsorted indices, duplicates, and empty rows."""
    rng = np.random.default_rng(seed)
    major, minor = (n, m) if form == "csr" else (m, n)
    counts = rng.multinomial(nnz, rng.dirichlet(np.full(major, 0.3)))
    indptr = np.concatenate(([0], np.cumsum(counts)))
    indices = rng.integers(0, minor, nnz).astype(np.int32)
    data = rng.integers(1, 5, nnz).astype(dtype)
    kind = sp.csr_matrix if form == "csr" else sp.csc_matrix
    return kind((data, indices, indptr), shape=(n, m))


def write(X: sp.spmatrix, path: Path) -> Path:
    """Write a matrix as X and as a layer, exactly as it is."""
    adata = ad.AnnData(sp.csr_matrix(X.shape, dtype=X.dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        root = zarr.open_group(path, mode="w", zarr_format=3)
        ad.io.write_elem(root, "/", adata)
        ad.io.write_elem(root, "X", X)
        ad.io.write_elem(root["layers"], "counts", X)
    return path


def parts(store: Path, element: str = "X") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Stored data, indices and indptr."""
    group = zarr.open_group(store, mode="r")[element]
    return tuple(group[name][:] for name in ("data", "indices", "indptr"))


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    # So that a small matrix has many blocks, runs and bands.
    monkeypatch.setattr(rearrange_module, "BLOCK", 64)
    monkeypatch.setattr(transpose, "RUN", 64)
    monkeypatch.setattr(transpose, "BAND", 50)


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    form=st.sampled_from(("csr", "csc")),
    shape=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    nnz=st.integers(0, 900),
    seed=st.integers(0, 10**6),
    options=st.sampled_from(
        (
            {"sort_indices": True},
            {"sum_duplicates": True},
            {"csr": True},
            {"csr": True, "sum_duplicates": True},
        )
    ),
)
def test_rearranged_matrices_are_what_scipy_makes(
    tmp_path: Path,
    form: str,
    shape: tuple[int, int],
    nnz: int,
    seed: int,
    options: dict[str, bool],
) -> None:
    X = messy(form, *shape, nnz, seed)
    source = write(X, tmp_path / "a.zarr")
    spec = ConvertSpec(**SMALL, **options)
    convert_zarr(source, tmp_path / "b.zarr", spec=spec, overwrite=True, workers=2)
    expected = X.tocsr(copy=True) if options.get("csr") else X.copy()
    if options.get("sum_duplicates"):
        expected.sum_duplicates()
    elif options.get("sort_indices") or form == "csc":
        expected.sort_indices()
    for element in ("X", "layers/counts"):
        data, indices, indptr = parts(tmp_path / "b.zarr", element)
        np.testing.assert_array_equal(indptr, expected.indptr)
        kind = type(expected)
        # Entries of one place have no order of their own; their sum and number count.
        found = kind((data, indices.astype(np.int32), indptr), shape=shape)
        assert (abs(found - expected)).nnz == 0
        assert found.has_sorted_indices or not (options.keys() - {"csr"})
        assert len(data) == expected.nnz
        encoding = zarr.open_group(tmp_path / "b.zarr", mode="r")[element].attrs[
            "encoding-type"
        ]
        assert encoding == f"{expected.format}_matrix"


def test_duplicates_keep_their_order_when_sorted(tmp_path: Path) -> None:
    X = sp.csr_matrix(
        (np.float32([1, 2, 3, 4]), np.int32([1, 0, 1, 0]), np.int32([0, 4])), shape=(1, 2)
    )
    write(X, tmp_path / "a.zarr")
    spec = ConvertSpec(sort_indices=True)
    convert_zarr(tmp_path / "a.zarr", tmp_path / "b.zarr", spec=spec)
    data, indices, _ = parts(tmp_path / "b.zarr")
    assert indices.tolist() == [0, 0, 1, 1]
    assert data.tolist() == [2, 4, 1, 3]


def test_without_options_nothing_moves(tmp_path: Path) -> None:
    X = messy("csc", 30, 20, 500, seed=1)
    write(X, tmp_path / "a.zarr")
    convert_zarr(tmp_path / "a.zarr", tmp_path / "b.zarr", spec=ConvertSpec(**SMALL))
    data, indices, indptr = parts(tmp_path / "b.zarr")
    np.testing.assert_array_equal(data, X.data)
    np.testing.assert_array_equal(indices, X.indices)
    np.testing.assert_array_equal(indptr, X.indptr)


def test_a_sum_that_the_type_cannot_hold_is_refused(tmp_path: Path) -> None:
    X = sp.csr_matrix((np.uint8([200, 100]), np.int32([1, 1]), np.int32([0, 2])), shape=(1, 2))
    write(X, tmp_path / "a.zarr")
    with pytest.raises(DataError, match=r"is 300, which uint8 cannot hold"):
        convert_zarr(
            tmp_path / "a.zarr", tmp_path / "b.zarr", spec=ConvertSpec(sum_duplicates=True)
        )
    spec = ConvertSpec(sum_duplicates=True, data_dtype="uint16")
    convert_zarr(tmp_path / "a.zarr", tmp_path / "b.zarr", spec=spec)
    assert parts(tmp_path / "b.zarr")[0].tolist() == [300]


@pytest.mark.parametrize(
    ("dtype", "to", "value"),
    [
        ("int64", "float32", 2**24 + 1),
        ("float64", "int32", 1.5),
        ("int32", "uint8", -1),
        ("float64", "float32", 1e300),
        ("int64", "uint64", -1),
        ("float32", "uint16", np.nan),
    ],
)
def test_a_value_that_would_change_is_refused_with_its_place(
    tmp_path: Path, dtype: str, to: str, value: float
) -> None:
    X = messy("csr", 30, 20, 400, seed=2, dtype=dtype)
    X.data[321] = value
    write(X, tmp_path / "a.zarr")
    with pytest.raises(DataError, match=rf"(X|counts)/data\[321\] is .*{to} cannot hold"):
        convert_zarr(tmp_path / "a.zarr", tmp_path / "b.zarr", spec=ConvertSpec(data_dtype=to))
    assert not (tmp_path / "b.zarr").exists()


def test_a_dtype_that_is_asked_for_applies_to_the_matrices_only(tmp_path: Path) -> None:
    write(messy("csr", 30, 20, 400, seed=2), tmp_path / "a.zarr")
    root = zarr.open_group(tmp_path / "a.zarr", mode="a")
    ad.io.write_elem(root["obsm"], "X_pca", np.full((30, 2), 0.1))
    spec = ConvertSpec(data_dtype="int32")
    convert_zarr(tmp_path / "a.zarr", tmp_path / "b.zarr", spec=spec)
    found = zarr.open_group(tmp_path / "b.zarr", mode="r")
    assert found["X/data"].dtype == found["layers/counts/data"].dtype == np.int32
    assert found["obsm/X_pca"].dtype == np.float64


@pytest.mark.parametrize(
    ("n", "dtype"),
    [(255, "uint8"), (256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")],
)
def test_indices_get_the_smallest_type_that_holds_every_column(
    tmp_path: Path, n: int, dtype: str
) -> None:
    X = sp.csr_matrix((np.float32([1.0]), np.int64([n - 1]), np.int64([0, 1])), shape=(1, n))
    write(X, tmp_path / "a.zarr")
    convert_zarr(tmp_path / "a.zarr", tmp_path / "b.zarr")
    _, indices, indptr = parts(tmp_path / "b.zarr")
    assert indices.dtype == dtype
    assert indices.tolist() == [n - 1]
    assert indptr.dtype == np.int32


@pytest.mark.parametrize(
    ("part", "at", "value", "match"),
    [
        ("indices", 17, 20, r"X/indices\[17\] is 20, and must be from 0 to 19"),
        ("indices", 5, -1, r"X/indices\[5\] is -1"),
        ("indptr", 3, 10**6, "X/indptr goes wrong at 4"),
        ("indptr", 0, 1, "X/indptr goes wrong at 0"),
        ("indptr", 30, 399, "X/indptr ends with 399, but 400 values"),
    ],
)
@pytest.mark.parametrize("csr", [False, True])
def test_a_damaged_matrix_is_refused_with_the_place(
    tmp_path: Path, part: str, at: int, value: int, match: str, csr: bool
) -> None:
    X = messy("csc" if csr else "csr", *((20, 30) if csr else (30, 20)), 400, seed=3)
    write(X, tmp_path / "a.zarr")
    zarr.open_array(tmp_path / "a.zarr/X" / part, mode="r+")[at] = value
    with pytest.raises(FormatError, match=match):
        convert_zarr(
            tmp_path / "a.zarr", tmp_path / "b.zarr", spec=ConvertSpec(csr=csr), workers=1
        )


def test_options_out_of_range_are_refused() -> None:
    for options in (
        {"level": 0},
        {"chunk_bytes": 1},
        {"shard_bytes": 100},
        {"data_dtype": "x"},
    ):
        with pytest.raises(ParameterError):
            ConvertSpec(**options)

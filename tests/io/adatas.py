"""AnnData objects of every kind, made by Hypothesis; and what makes two the same."""

from __future__ import annotations

from typing import Any

import anndata as ad
import awkward as ak
import numpy as np
import pandas as pd
import scipy.sparse as sp
from hypothesis import strategies as st

NUMBERS = (
    "float32",
    "float64",
    "float16",
    "int8",
    "int32",
    "int64",
    "uint16",
    "uint64",
    "bool",
)
_NOT_KEYS = {".", "..", "_index", "zarr.json", "index"}

# What a key of a store may hold: neither the path's slash nor HDF5's zero byte.
KEYS = st.text(
    st.characters(codec="utf-8", exclude_characters="/\\\0", exclude_categories=("Cs", "Cc")),
    min_size=1,
    max_size=8,
).filter(lambda key: key not in _NOT_KEYS and not key.startswith("__") and key.strip() == key)
WORDS = st.text(
    st.characters(codec="utf-8", exclude_categories=("Cs",), exclude_characters="\0")
)


@st.composite
def values(draw: st.DrawFn, shape: tuple[int, ...], dtype: str | None = None) -> np.ndarray:
    """Numbers of some dtype: small counts, extremes, NaN and infinities."""
    dtype = draw(st.sampled_from(NUMBERS)) if dtype is None else dtype
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    found = rng.poisson(0.7, shape).astype(dtype)
    if found.size and draw(st.booleans()):
        kind = np.dtype(dtype).kind
        extremes: list[Any] = [0, 1]
        if kind == "f":
            extremes = [np.nan, np.inf, -0.0, np.finfo(dtype).max, np.finfo(dtype).tiny]
        elif kind in "iu":
            extremes = [np.iinfo(dtype).max, np.iinfo(dtype).min]
        found.flat[rng.integers(found.size)] = extremes[rng.integers(len(extremes))]
    return found


@st.composite
def matrices(draw: st.DrawFn, shape: tuple[int, int]) -> Any:
    """Dense, CSR or CSC; sparse ones also unsorted and with explicit zeros."""
    form = draw(st.sampled_from(("dense", "csr", "csc")))
    dtype = draw(st.sampled_from([name for name in NUMBERS if name != "float16"]))
    dense = draw(values(shape, dtype))
    if form == "dense":
        return dense
    made = sp.csr_matrix(dense) if form == "csr" else sp.csc_matrix(dense)
    if made.nnz and draw(st.booleans()):
        made.data[draw(st.integers(0, made.nnz - 1))] = 0
    if draw(st.booleans()):
        for a, b in zip(made.indptr[:-1], made.indptr[1:], strict=True):
            made.indices[a:b] = made.indices[a:b][::-1].copy()
            made.data[a:b] = made.data[a:b][::-1].copy()
        made.has_sorted_indices = False
    return made


@st.composite
def columns(draw: st.DrawFn, n: int) -> Any:
    """One column of a data frame."""
    kind = draw(
        st.sampled_from(
            (
                "number",
                "string",
                "category",
                "ordered",
                "Int64",
                "UInt8",
                "boolean",
                "string-na",
            )
        )
    )
    if kind == "number":
        return draw(values((n,)))
    missing = np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)), dtype=bool)
    if kind in ("Int64", "UInt8", "boolean"):
        column = pd.array(draw(values((n,), "bool")).astype("int8"), dtype=kind)
        column[missing] = pd.NA
        return column
    words = draw(st.lists(WORDS, min_size=n, max_size=n))
    if kind == "string":
        return np.array(words, dtype=object)
    if kind == "string-na":
        column = pd.array(words, dtype=pd.StringDtype(na_value=pd.NA))
        column[missing] = pd.NA
        return column
    found = [None if gone else word for word, gone in zip(words, missing, strict=True)]
    return pd.Categorical(found, categories=sorted(set(words)), ordered=kind == "ordered")


@st.composite
def frames(draw: st.DrawFn, n: int) -> pd.DataFrame:
    """A data frame whose index has unique names of any characters."""
    index = draw(st.lists(WORDS, min_size=n, max_size=n, unique=True))
    data = draw(st.dictionaries(KEYS, columns(n), max_size=3))
    frame = pd.DataFrame(data, index=pd.Index(index, dtype=str))
    if draw(st.booleans()):
        frame.index.name = "name of it"
    return frame


def uns() -> st.SearchStrategy[dict[str, Any]]:
    """Nested dictionaries with everything that anndata stores."""
    record = np.array([(1, 2.5, b"ab"), (3, np.nan, b"")], dtype="i4,f8,S3")
    leaves = st.one_of(
        st.integers(-(2**62), 2**62),
        st.floats(allow_nan=False),
        st.booleans(),
        WORDS,
        st.just(None),
        st.just(np.array(["a", "é", ""], dtype=object)),
        st.just(record),
        values((3, 2)),
        values((0,)),
        matrices((3, 4)),
        frames(2),
    )
    return st.dictionaries(
        KEYS, st.recursive(leaves, lambda c: st.dictionaries(KEYS, c, max_size=2)), max_size=3
    )


@st.composite
def adatas(draw: st.DrawFn) -> ad.AnnData:
    """A whole object; also empty ones, and of one cell."""
    n, m = draw(st.tuples(st.integers(0, 9), st.integers(0, 9)))
    adata = ad.AnnData(
        X=draw(st.one_of(st.none(), matrices((n, m)))),
        obs=draw(frames(n)),
        var=draw(frames(m)),
        uns=draw(uns()),
    )
    if adata.X is not None and draw(st.booleans()):
        adata.raw = adata.copy()
    for key in draw(st.lists(KEYS, max_size=2, unique=True)):
        adata.layers[key] = draw(matrices((n, m)))
    for mapping, names in ((adata.obsm, adata.obs_names), (adata.varm, adata.var_names)):
        length = len(names)
        for key in draw(st.lists(KEYS, max_size=2, unique=True)):
            mapping[key] = draw(
                st.one_of(
                    values((length, 3)),
                    values((length, 2, 2)),
                    matrices((length, 4)),
                    frames(length).map(lambda f, names=names: f.set_index(names)),
                )
            )
    if n and draw(st.booleans()):
        adata.obsm["awkward"] = ak.Array([[1] * (i % 3) for i in range(n)])
    if draw(st.booleans()):
        adata.obsp["graph"] = draw(matrices((n, n)))
        adata.varp["graph"] = draw(matrices((m, m)))
    return adata


def assert_same(a: Any, b: Any, where: str = "") -> None:
    """Fail unless two objects hold the same, to the last bit; index dtypes may differ."""
    if isinstance(a, ad.AnnData):
        assert isinstance(b, ad.AnnData)
        assert a.shape == b.shape
        names = ("X", "obs", "var", "obsm", "varm", "obsp", "varp", "layers", "uns")
        for name in names:
            assert_same(getattr(a, name), getattr(b, name), name)
        # anndata does not read raw of an object without cells from zarr, whoever wrote it.
        assert (a.raw is None) == (b.raw is None) or not a.n_obs
        if a.raw is not None and b.raw is not None:
            for name in ("X", "var", "varm"):
                assert_same(getattr(a.raw, name), getattr(b.raw, name), f"raw/{name}")
    elif hasattr(a, "keys") and not isinstance(a, pd.DataFrame | ak.Array):
        assert set(a) == set(b), where
        for key in a:
            assert_same(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, pd.DataFrame):
        pd.testing.assert_frame_equal(a, b, check_exact=True, obj=where)
    elif sp.issparse(a):
        assert a.format == b.format, where
        assert a.shape == b.shape, where
        for part in ("indptr", "indices"):
            np.testing.assert_array_equal(getattr(a, part), getattr(b, part), err_msg=where)
        assert_same(a.data, b.data, where)
    elif isinstance(a, ak.Array):
        assert a.to_list() == b.to_list(), where
    elif isinstance(a, np.ndarray) and a.dtype.names:
        # anndata reads strings in records as fixed-width or as objects, by the file's form.
        assert a.dtype.names == b.dtype.names, where
        for name in a.dtype.names:
            np.testing.assert_array_equal(a[name].tolist(), b[name].tolist(), err_msg=where)
    elif isinstance(a, np.ndarray) and a.dtype.kind in "OUT":
        # Strings are objects from h5ad and NumPy's own from zarr.
        assert b.dtype.kind in "OUT", where
        assert a.tolist() == b.tolist(), where
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype, where
        assert a.shape == b.shape, where
        np.testing.assert_array_equal(a, b, err_msg=where)
        if a.dtype.kind in "fc":
            np.testing.assert_array_equal(np.signbit(a.real), np.signbit(b.real))
    elif isinstance(a, pd.api.extensions.ExtensionArray):
        pd.testing.assert_extension_array_equal(a, b, check_exact=True)
    else:
        # Old files give NumPy's scalars, new ones Python's.
        a, b = (v.item() if isinstance(v, np.generic) else v for v in (a, b))
        assert type(a) is type(b), where
        assert a == b, where

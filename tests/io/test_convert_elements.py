"""Single elements are compared with the source like everything else."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr

from scgpu_tasks.errors import CorruptChunkError, FormatError
from scgpu_tasks.io.convert import convert_zarr, elements
from scgpu_tasks.io.convert.compare import difference

from .test_convert_old import OLD
from .test_convert_round_trip import atlas, write

RECORDS = np.array([("a", 1.5), ("b", np.nan)], dtype=[("name", "S3"), ("x", "f8")])
ELEMENTS: dict[str, tuple[Any, Any]] = {
    "whole": (5, 6),
    "fraction": (0.5, 0.25),
    "truth": (True, False),
    "word": ("naïve", "naive"),
    "records": (RECORDS, np.array([("a", 1.5), ("b", 2.0)], dtype=RECORDS.dtype)),
}


def add_lists(uns: h5py.Group) -> None:
    uns.create_dataset("odd", (2,), dtype=h5py.vlen_dtype(np.int32))[0] = [1, 2]


def add_references(uns: h5py.Group) -> None:
    uns.create_dataset("odd", data=[uns.parent["X"].ref], dtype=h5py.ref_dtype)


def add_link(uns: h5py.Group) -> None:
    uns["odd"] = h5py.SoftLink("/nowhere")


def add_attribute(uns: h5py.Group) -> None:
    uns.create_group("odd").attrs["points_to"] = uns.parent["X"].ref


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("add", [add_lists, add_references, add_link, add_attribute])
def test_what_zarr_cannot_hold_is_named(tmp_path: Path, add: Any, verify: bool) -> None:
    adata = atlas(20, 10)
    adata.uns["k"] = 1
    adata.write_h5ad(tmp_path / "a.h5ad")
    with h5py.File(tmp_path / "a.h5ad", "a") as file:
        add(file["uns"])
    with pytest.raises(FormatError, match=r"uns/odd.* remove"):
        convert_zarr(tmp_path / "a.h5ad", tmp_path / "b.zarr", verify=verify)
    assert not (tmp_path / "b.zarr").exists()


@pytest.mark.parametrize("form", ["h5ad", "zarr v2"])
@pytest.mark.parametrize("name", ELEMENTS)
def test_a_single_element_that_came_out_wrong_is_named_with_both_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, name: str
) -> None:
    right, wrong = ELEMENTS[name]
    adata = atlas(20, 10)
    adata.uns["deep"] = {name: right}
    source = tmp_path / ("a.h5ad" if form == "h5ad" else "a.zarr")
    write(adata, source, form, 0)
    copy = elements.copy_element

    def miscopy(opened: Any, at: str, root: zarr.Group, path: str) -> None:
        copy(opened, at, root, path)
        if path == f"uns/deep/{name}":
            root[path][...] = wrong

    convert_zarr(source, tmp_path / "right.zarr")
    monkeypatch.setattr(elements, "copy_element", miscopy)
    with pytest.raises(CorruptChunkError, match=rf"uns/deep/{name}.*instead of") as caught:
        convert_zarr(source, tmp_path / "b.zarr")
    assert caught.value.array == f"uns/deep/{name}"
    assert not (tmp_path / "b.zarr").exists()


def test_obs_of_an_old_file_that_came_out_wrong_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = next(path for path in OLD if "0.5.10" in path.name)
    (tmp_path / "a.h5ad").write_bytes(gzip.decompress(old.read_bytes()))
    write_elem = ad.io.write_elem

    def miswrite(parent: Any, name: str, value: Any) -> None:
        if name == "obs" and isinstance(parent, zarr.Group):
            value = value.assign(group=value["group"].cat.rename_categories(["a", "b", "d"]))
        write_elem(parent, name, value)

    monkeypatch.setattr(elements.ad.io, "write_elem", miswrite)
    with pytest.raises(CorruptChunkError, match=r"obs/group.*instead of"):
        convert_zarr(tmp_path / "a.h5ad", tmp_path / "b.zarr")


FRAME = pd.DataFrame(
    {"n": [1, 2], "x": [np.nan, 0.5], "c": pd.Categorical(["u", None])}, index=["é", "f"]
)


@pytest.mark.parametrize(
    ("want", "found", "told"),
    [
        (FRAME, FRAME.assign(n=[1, 3]), r"t/n\[1\] is .*3.* instead of the source's .*2"),
        (FRAME, FRAME.rename(index={"f": "g"}), r"t/\(index\)\[1\] is 'g'"),
        (FRAME, FRAME.drop(columns="c"), "t has members"),
        (FRAME, FRAME.astype({"n": "int32"}), "t/n holds 2 values of int32"),
        (sp.eye(3, format="csr"), 2 * sp.eye(3, format="csr"), r"t/data"),
        (np.array([0.0]), np.array([-0.0]), r"t\[0\] is -0.0 instead of the source's 0.0"),
        (np.arange(3), np.arange(4), r"t has the shape \(4,\)"),
        (np.int64(3), np.float64(3), "t holds float64 instead of int64"),
        ("a", "b", "t.* is 'b'"),
    ],
)
def test_a_difference_is_found_and_placed(want: Any, found: Any, told: str) -> None:
    import re

    assert difference(want, want, "t") is None
    assert re.match(told, str(difference(want, found, "t")))


@pytest.mark.parametrize(
    ("want", "found"),
    [
        (FRAME, FRAME.copy()),
        (np.array([np.nan, -0.0]), np.array([np.nan, -0.0])),
        (RECORDS, RECORDS.copy()),
        (np.array([b"a"]), np.array(["a"], dtype=object)),
        (np.array(["a"], dtype=object), np.array(["a"], dtype=np.dtypes.StringDType())),
        (None, None),
    ],
)
def test_what_is_the_same_has_no_difference(want: Any, found: Any) -> None:
    assert difference(want, found) is None


def test_h5py_is_not_asked_for_what_it_cannot_give(tmp_path: Path) -> None:
    """An empty dataspace (null) is an element, too."""
    write(atlas(20, 10), tmp_path / "a.h5ad", "h5ad", 0)
    with h5py.File(tmp_path / "a.h5ad", "a") as file:
        file["uns/nothing"] = h5py.Empty("f4")
        file["uns/nothing"].attrs.update({"encoding-type": "null", "encoding-version": "0.1.0"})
    convert_zarr(tmp_path / "a.h5ad", tmp_path / "b.zarr")

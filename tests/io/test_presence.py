"""Files that are gone are told from files that nobody needs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr
from anndata.io import write_elem

from scgpu_tasks.errors import CorruptChunkError, FormatError
from scgpu_tasks.io import check, read_lazy
from scgpu_tasks.io.convert import ConvertSpec, convert_zarr
from scgpu_tasks.io.lazy import read_tables
from scgpu_tasks.io.rows import open_rows

SMALL = ConvertSpec(chunk_bytes=1024, shard_bytes=4096)


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    """Dense counts, a dense layer, columns named c, numeric, of two categories and of truth."""
    rng = np.random.default_rng(0)
    adata = ad.AnnData(rng.poisson(1.0, (200, 40)).astype(np.float32))
    adata.layers["c"] = adata.X + 1
    adata.obs["c"] = pd.Categorical(rng.choice(["a", "b"], 200))
    adata.obs["num"] = rng.integers(1, 9, 200)
    adata.obs["flag"] = rng.random(200) > 0.5
    adata.obs_names = [f"cell {i}" for i in range(200)]
    source = tmp_path / "source.h5ad"
    adata.write_h5ad(source)
    convert_zarr(source, tmp_path / "a.zarr", spec=SMALL)
    return tmp_path / "a.zarr"


def lose(store: Path, name: str) -> None:
    (store / name).unlink()


@pytest.mark.parametrize("element", ["X", "layers/c"])
def test_a_dense_matrix_that_lost_a_file_of_the_converters_is_refused(
    converted: Path, element: str
) -> None:
    lose(converted, f"{element}/c/1/0")
    layer = element.partition("/")[2] or None
    for open_it in (
        lambda: open_rows(converted, layer=layer),
        lambda: read_lazy(converted, device="cpu", layers=[layer] if layer else []),
    ):
        with pytest.raises(CorruptChunkError, match="the converter wrote this file") as caught:
            open_it()
        assert f"array {element}, shard c/1/0" in str(caught.value)
    assert f"{element}: lost the file c/1/0" in "\n".join(map(str, check(converted).findings))


def without_column(group: zarr.Group) -> None:
    del group["obs/c"]
    group["obs"].attrs["column-order"] = ["num", "flag"]


def as_categories(group: zarr.Group) -> None:
    write_elem(group["obs"], "num", pd.Categorical(["x", "y"] * 100))


def new_var(group: zarr.Group) -> None:
    var = pd.DataFrame({"n": np.arange(40)}, index=[f"gene {i}" for i in range(40)])
    write_elem(group, "var", var)


def one_category(group: zarr.Group) -> None:
    write_elem(group["obs"], "c", pd.Categorical(["only"] * 200))


def no_layer(group: zarr.Group) -> None:
    del group["layers/c"]


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
@pytest.mark.parametrize(
    "change", [without_column, as_categories, new_var, one_category, no_layer]
)
def test_what_was_changed_on_purpose_is_not_missed(
    converted: Path, change: Callable[[zarr.Group], None]
) -> None:
    group = zarr.open_group(converted, mode="r+", use_consolidated=False)
    change(group)
    zarr.consolidate_metadata(converted)
    want = ad.io.read_zarr(converted)
    lazy = read_lazy(converted, device="cpu")
    pd.testing.assert_frame_equal(lazy.obs, want.obs)
    pd.testing.assert_frame_equal(lazy.var, want.var)
    assert not any(finding.refused for finding in check(converted).findings)


@pytest.mark.parametrize(
    "counts",
    [
        sp.csr_matrix((3_000, 20), dtype=np.float32),
        sp.csr_matrix(np.ones((3_000, 1), np.float32)),
    ],
    ids=["no counts", "one gene"],
)
def test_chunks_of_zeros_that_zarr_leaves_out_are_not_missed(
    tmp_path: Path, counts: sp.csr_matrix
) -> None:
    ad.AnnData(counts).write_zarr(tmp_path / "a.zarr")
    assert not any(finding.refused for finding in check(tmp_path / "a.zarr").findings)
    found: Any = read_lazy(tmp_path / "a.zarr", device="cpu").X
    assert (found.compute() != counts).nnz == 0


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "{}", '{"shards": [], "files": {}}', '{"shards": {}, "files": {"a/c/0": 1}}'],
)
def test_a_damaged_manifest_keeps_nobody_from_reading(converted: Path, text: str) -> None:
    (path,) = converted.rglob(".scgpu-manifest.json")
    path.write_text(text)
    assert read_lazy(converted, device="cpu").shape == (200, 40)
    assert not any(finding.refused for finding in check(converted).findings)


def test_names_may_be_categories(tmp_path: Path) -> None:
    adata = ad.AnnData(np.ones((4, 3), np.float32))
    adata.obs.index = pd.CategoricalIndex(["d", "a", "b", "c"])
    adata.write_zarr(tmp_path / "a.zarr")
    assert check(tmp_path / "a.zarr").shape == (4, 3)
    convert_zarr(tmp_path / "a.zarr", tmp_path / "b.zarr")
    assert list(read_tables(tmp_path / "b.zarr")[0].index) == ["d", "a", "b", "c"]


def test_a_column_that_lost_what_says_how_to_read_it_is_refused(
    tmp_path: Path, small_store: Path
) -> None:
    store = Path(shutil.copytree(small_store, tmp_path / "a.zarr"))
    group = zarr.open_group(store, mode="r+", use_consolidated=False)
    del group["obs/batch"].attrs["encoding-type"]
    with pytest.raises(FormatError, match="obs/batch is a group without encoding-type"):
        read_tables(store)

"""Damaged metadata documents: an error that names the file, whichever it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from scgpu_tasks.errors import FormatError
from scgpu_tasks.io.lazy import read_tables
from scgpu_tasks.io.rows import open_rows
from tests.io.stores import sample, write


def cut_off(raw: bytes) -> bytes:
    return raw[: len(raw) // 2]


def no_utf8(raw: bytes) -> bytes:
    return raw[:1] + b"\xe5" + raw[1:]


def control_character(raw: bytes) -> bytes:
    return raw[:1] + b"\x00" + raw[1:]


def emptied(raw: bytes) -> bytes:
    return b""


def listed(raw: bytes) -> bytes:
    return b"[1]"


@pytest.fixture(scope="module", params=[3, 2])
def store(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    obs = pd.DataFrame(
        {"kind": pd.Categorical(["a", "b"] * 100), "n": pd.array([1, None] * 100, "Int64")},
        index=[f"c{i}" for i in range(200)],
    )
    path = tmp_path_factory.mktemp("stores") / "a.zarr"
    return write(path, sample(), obs=obs, zarr_format=request.param)


def documents(store: Path) -> list[Path]:
    names = ("zarr.json", ".zgroup", ".zarray", ".zattrs")
    read = ("obs", "var", "X")
    return sorted(
        file
        for file in store.rglob("*")
        if file.name in names
        and (file.parent == store or file.relative_to(store).parts[0] in read)
    )


def read(store: Path) -> None:
    rows = open_rows(store)
    rows.read(0, rows.shape[0])
    read_tables(store)


@pytest.mark.parametrize("change", [cut_off, no_utf8, control_character, emptied, listed])
def test_a_document_that_cannot_be_parsed_is_named(
    store: Path, change: Callable[[bytes], bytes]
) -> None:
    assert len(documents(store)) > 15
    for file in documents(store):
        raw = file.read_bytes()
        file.write_bytes(change(raw))
        try:
            with pytest.raises(FormatError) as caught:
                read(store)
        finally:
            file.write_bytes(raw)
        assert str(caught.value).startswith(f"{file.relative_to(store)} of {store} ")
        assert "restore this file from a copy" in str(caught.value)
    read(store)


@pytest.mark.parametrize("kind", ["catagorical", "", 7, None])
def test_an_encoding_that_anndata_does_not_know_is_named(store: Path, kind: Any) -> None:
    folder = store / "obs" / "kind"
    file = next(folder / n for n in ("zarr.json", ".zattrs") if (folder / n).exists())
    raw = file.read_bytes()
    content = json.loads(raw)
    content.get("attributes", content)["encoding-type"] = kind
    file.write_text(json.dumps(content))
    try:
        with pytest.raises(FormatError, match=r"obs of .* cannot be read .*'kind'"):
            read_tables(store)
    finally:
        file.write_bytes(raw)


def test_attributes_that_are_no_object_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.zarr", np.ones((3, 2), np.float32))
    for name in ("X", "obs"):
        file = path / name / "zarr.json"
        raw = file.read_bytes()
        file.write_text(json.dumps(json.loads(raw) | {"attributes": [1]}))
        with pytest.raises(FormatError, match=rf"{name}/zarr.json of .* has attributes \[1\]"):
            read(path)
        file.write_bytes(raw)

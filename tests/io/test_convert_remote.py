"""Stores that go to an object store: complete or not there, whatever happens."""

from __future__ import annotations

import uuid
import warnings
from pathlib import Path
from typing import Any

import anndata as ad
import fsspec
import pytest
import zarr

from scgpu_tasks.errors import CorruptChunkError, OutputError, ParameterError
from scgpu_tasks.io.convert import ConvertSpec, convert_zarr
from scgpu_tasks.io.source import fsspec_store

from .test_convert_round_trip import assert_same, atlas, read, write

SPEC = ConvertSpec(chunk_bytes=1024, shard_bytes=8 * 1024)


@pytest.fixture
def url() -> str:
    """A place in memory that nobody else uses."""
    return f"memory://{uuid.uuid4().hex}/b.zarr"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write(atlas(), tmp_path / "a.h5ad", "h5ad", 1)
    return tmp_path / "a.h5ad"


def remote(url: str) -> ad.AnnData:
    """Read a store from its URL."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ad.read_zarr(zarr.open_group(fsspec_store(url, read_only=True), mode="r"))


def files(url: str) -> dict[str, bytes]:
    """Everything below a URL."""
    fs, path = fsspec.core.url_to_fs(url)
    return {name.removeprefix(path): fs.cat_file(name) for name in sorted(fs.find(path))}


def test_a_store_is_uploaded_whole(tmp_path: Path, source: Path, url: str) -> None:
    staging = tmp_path / "staging"
    convert_zarr(source, url, spec=SPEC, staging=staging)
    assert_same(read(source), remote(url))
    convert_zarr(source, tmp_path / "b.zarr", spec=SPEC)
    local = {
        f"/{path.relative_to(tmp_path / 'b.zarr')}": path.read_bytes()
        for path in (tmp_path / "b.zarr").rglob("*")
        if path.is_file()
    }
    assert files(url) == local
    assert list(staging.iterdir()) == []


def test_an_upload_that_breaks_off_leaves_no_store_and_is_gone_on_with(
    tmp_path: Path, source: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs, _ = fsspec.core.url_to_fs(url)
    put, sent = fs.pipe_file, []

    def breaking(path: str, value: bytes, *args: Any, **kwargs: Any) -> None:
        if len(sent) == 40:
            msg = "connection reset"
            raise OSError(msg)
        sent.append(path)
        put(path, value, *args, **kwargs)

    monkeypatch.setattr(fs, "pipe_file", breaking)
    with pytest.raises(OutputError, match="connection reset; run the same command again"):
        convert_zarr(source, url, spec=SPEC, staging=tmp_path)
    assert "/zarr.json" not in files(url)
    first, sent[:] = set(sent), []
    monkeypatch.setattr(fs, "pipe_file", lambda p, v, *a, **k: (sent.append(p), put(p, v)))
    result = convert_zarr(source, url, spec=SPEC, staging=tmp_path)
    assert result.shards_reused == result.shards
    assert not first & set(sent)
    assert sent[-1].endswith("b.zarr/zarr.json")
    assert_same(read(source), remote(url))


def test_a_file_that_arrives_damaged_is_noticed(
    tmp_path: Path, source: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs, _ = fsspec.core.url_to_fs(url)
    put = fs.pipe_file
    monkeypatch.setattr(fs, "pipe_file", lambda path, value: put(path, value[:-1] + b"\0"))
    with pytest.raises(CorruptChunkError, match="what was uploaded is not what is there now"):
        convert_zarr(source, url, spec=SPEC, staging=tmp_path)
    assert "/zarr.json" not in files(url)


def test_an_existing_store_is_refused_and_replaced_without_a_rest(
    tmp_path: Path, source: Path, url: str
) -> None:
    convert_zarr(source, url, spec=SPEC, staging=tmp_path)
    with pytest.raises(OutputError, match="exists; choose another name"):
        convert_zarr(source, url, spec=SPEC, staging=tmp_path)
    with pytest.raises(ParameterError, match="the source itself"):
        convert_zarr(url, url, overwrite=True)
    write(atlas(100, 50), tmp_path / "small.h5ad", "h5ad", 1)
    convert_zarr(tmp_path / "small.h5ad", url, overwrite=True, staging=tmp_path)
    assert_same(read(tmp_path / "small.h5ad"), remote(url))
    convert_zarr(tmp_path / "small.h5ad", tmp_path / "c.zarr")
    found = {str(p.relative_to(tmp_path / "c.zarr")) for p in (tmp_path / "c.zarr").rglob("*")}
    assert {name.lstrip("/") for name in files(url)} <= found

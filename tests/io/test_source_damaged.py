"""Metadata that zarr cannot take: check and convert name the file."""

import json
import shutil
from pathlib import Path

import pytest

from scgpu_tasks.errors import FormatError
from scgpu_tasks.io.checks import check
from scgpu_tasks.io.convert import convert_zarr
from scgpu_tasks.io.source import open_source
from tests.io.stores import sample, write


@pytest.fixture(scope="module", params=[3, 2])
def store(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    path = tmp_path_factory.mktemp("stores") / "a.zarr"
    return write(path, sample(), zarr_format=request.param)


def damages(raw: bytes) -> list[bytes]:
    content = json.loads(raw)
    found = [b"x", b"", b"[1]", b"[" * 100_000]
    if "node_type" in content:
        changes = [
            {"attributes": 3},
            {"zarr_format": 7},
            {"node_type": "x"},
        ]
        if content["node_type"] == "array":
            changes.append({"shape": None})
        else:
            changes.append({"attributes": []})
        found += [json.dumps(content | change).encode() for change in changes]
    elif "zarr_format" in content:
        found.append(json.dumps(content | {"zarr_format": 7}).encode())
    return found


def convert(store: Path) -> None:
    convert_zarr(store, store.parent / "to.zarr")


@pytest.mark.parametrize("folder", ["", "X/data", "obs"])
def test_check_and_convert_name_the_document_that_is_damaged(
    store: Path, tmp_path: Path, folder: str
) -> None:
    store = shutil.copytree(store, tmp_path / "a.zarr")
    (store / ".zmetadata").unlink(missing_ok=True)
    if (store / "zarr.json").exists():
        content = json.loads((store / "zarr.json").read_bytes())
        content.pop("consolidated_metadata", None)
        (store / "zarr.json").write_text(json.dumps(content))
    for file in (store / folder / n for n in ("zarr.json", ".zgroup", ".zarray", ".zattrs")):
        if not file.exists():
            continue
        raw = file.read_bytes()
        for damage in damages(raw):
            file.write_bytes(damage)
            for step in (check, convert) if damage == b"x" else (check,):
                with pytest.raises(FormatError) as caught:
                    step(store)
                assert str(caught.value).startswith(f"{file.relative_to(store)} of {store} ")
        file.write_bytes(raw)
    check(store)


@pytest.mark.parametrize("damage", [b"x", b"[1]", b'{"metadata": 3}'])
def test_damaged_consolidated_metadata_is_named(
    store: Path, tmp_path: Path, damage: bytes
) -> None:
    path = shutil.copytree(store, tmp_path / "a.zarr")
    file = path / "zarr.json"
    if file.exists():
        content = json.loads(file.read_bytes())
        file.write_text(json.dumps(content | {"consolidated_metadata": damage.decode()}))
    else:
        (path / ".zmetadata").write_bytes(damage)
    with pytest.raises(FormatError, match="metadata"):
        open_source(path)

"""Whether a converted store is still what the converter wrote, file by file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from scgpu_tasks.errors import FormatError, OutputError, StoreError
from scgpu_tasks.io.convert.runner import default_threads
from scgpu_tasks.io.manifest import file_crc32c, manifest_path, read_manifest
from scgpu_tasks.io.source import absolute, is_url


def file_sums(store: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Size in bytes and CRC-32C of files of a store, by name."""

    def look(name: str) -> dict[str, Any]:
        size, crc32c = file_crc32c(store / name)
        return {"size": size, "crc32c": crc32c}

    with ThreadPoolExecutor(default_threads()) as pool:
        return dict(zip(names, pool.map(look, names), strict=True))


def list_files(store: Path) -> dict[str, int]:
    """Names and sizes in bytes of all files of a store but the manifest."""
    manifest = manifest_path(store)
    return {
        str(path.relative_to(store)): size for path, size in _files(store) if path != manifest
    }


def _files(folder: Path) -> Iterator[tuple[Path, int]]:
    with os.scandir(folder) as found:
        for entry in found:
            if entry.is_dir():
                yield from _files(Path(entry.path))
            else:
                yield Path(entry.path), entry.stat().st_size


def verify_store(path: str | os.PathLike[str]) -> list[str]:
    """Read all files of a converted store again and compare them with its manifest.

    Parameters
    ----------
    path
        A store that `convert_zarr` wrote, on a file system.

    Returns
    -------
    Every file that differs, and how; empty where all is as it was written.

    Raises
    ------
    StoreError
        There is no such store, or a file of it cannot be read.
    FormatError
        It has no manifest that lists all of its files.
    """
    text = absolute(path)
    if is_url(text):
        msg = f"{text}: only a store on a file system can be verified; copy it to one first"
        raise FormatError(msg)
    if not Path(text).is_dir():
        msg = f"there is no store at {text} to verify; check the path"
        raise StoreError(msg)
    manifest = read_manifest(text)
    if manifest is None or "files" not in manifest:
        msg = (
            f"{text} has no manifest with the checksums of its files, so there is nothing to "
            "compare them with; convert it with scgpu-tasks convert"
        )
        raise FormatError(msg)
    wanted = manifest["shards"] | manifest["files"]
    try:
        return list(_differences(Path(text), wanted))
    except OSError as error:
        msg = f"the files of {text} cannot be read: {error}"
        raise StoreError(msg) from error


def _differences(store: Path, wanted: dict[str, dict[str, Any]]) -> Iterator[str]:
    sizes = list_files(store)
    alike = sorted(name for name in wanted if sizes.get(name) == wanted[name]["size"])
    sums = file_sums(store, alike)
    for name in sorted(wanted.keys() | sizes):
        if name not in sizes:
            yield f"{name} is missing"
        elif name not in wanted:
            yield f"{name} was added"
        elif name not in sums:
            yield f"{name} has {sizes[name]} bytes instead of {wanted[name]['size']}"
        elif sums[name] != wanted[name]:
            found, expected = sums[name]["crc32c"], wanted[name]["crc32c"]
            yield f"{name} was changed: its CRC-32C is {found} instead of {expected}"


def is_untouched(store: str | os.PathLike[str], src: str | os.PathLike[str]) -> bool:
    """Whether a store was converted from this source, in any state, and not changed since.

    Only such a store may be replaced without being asked: nothing in it is lost.

    Parameters
    ----------
    store, src
        The store, and the source that it should have been made of.

    Returns
    -------
    False also where there is no manifest to tell by.
    """
    manifest = read_manifest(absolute(store))
    if manifest is None or manifest.get("source") != absolute(src) or "files" not in manifest:
        return False
    return not verify_store(store)


def require_untouched(store: str, src: str) -> None:
    """Refuse to replace a store that would take something with it.

    Raises
    ------
    OutputError
        It was not converted from this source, or was changed since.
    """
    if not is_untouched(store, src):
        msg = (
            f"{store} exists, and was not converted from {src}, or was changed since; choose "
            "another name, or allow overwriting it with all that is in it (overwrite=True, "
            "--overwrite)"
        )
        raise OutputError(msg)

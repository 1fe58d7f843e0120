"""Files of a zarr store that were lost, where zarr itself would read zeros or empty names.

zarr leaves out chunks that hold nothing but the fill value, so a file that was lost looks like
one that never was. In these places such a chunk cannot be, or is most unlikely.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import zarr

from scgpu_tasks.errors import CorruptChunkError
from scgpu_tasks.io.manifest import file_crc32c, manifest_path, read_manifest

# Array, and key of one of its chunks or shards.
_CHUNK = re.compile(r"(.+)/(c(?:/\d+)+)")


def require_written(store: str, under: str = "", *, remedy: str) -> None:
    """Refuse a store in a local folder that lacks a file which `convert_zarr` wrote.

    Parameters
    ----------
    store
        Folder of the store; one without a manifest is not looked at.
    under
        Only files whose names in the store begin so.
    remedy
        What to do, for the message.

    Raises
    ------
    CorruptChunkError
        With array and file.
    """
    for array, key in lost_files(store, under):
        found = (
            f"the converter wrote this file, and it is missing; {remedy}, or, if the array was "
            f"changed on purpose, delete {manifest_path(store)}"
        )
        raise CorruptChunkError(found, store=store, array=array, shard=key)


def lost_files(store: str, under: str = "") -> Iterator[tuple[str, str]]:
    """Yield array and key of each chunk or shard that `convert_zarr` wrote and that is gone."""
    manifest = read_manifest(store) or {}
    shards, others = manifest.get("shards"), manifest.get("files")
    if not (isinstance(shards, dict) and isinstance(others, dict)):
        return
    wanted = shards | others
    for name in sorted(wanted):
        found = _CHUNK.fullmatch(name)
        if found is None or not name.startswith(under) or Path(store, name).exists():
            continue
        if not _was_replaced(Path(store), found[1], wanted):
            yield found[1], found[2]


def _was_replaced(store: Path, array: str, wanted: dict[str, Any]) -> bool:
    """Whether somebody has removed an array since, or written it anew.

    Of a column of several arrays, such as codes and categories, one tells of the others.
    """
    column = "/".join(array.split("/")[:2])
    names = [f"{array}/zarr.json"]
    if array.startswith(("obs/", "var/")) and column != array:
        names += [name for name in wanted if name.startswith(f"{column}/")]
    for name in names:
        path = store / name
        if not path.exists():
            if name.endswith("/zarr.json"):
                return True
            continue
        # Of small files only, and only where something is missing.
        size, crc32c = file_crc32c(path)
        if wanted.get(name) != {"size": size, "crc32c": crc32c}:
            return True
    return False


def require_names(root: zarr.Group, table: str, *, remedy: str) -> None:
    """Refuse a table in a local folder that has lost a file of its names.

    Parameters
    ----------
    root
        The store.
    table
        ``"obs"``, ``"var"`` or the like; one that is not there, or no group, is not looked at.
    remedy
        What to do, for the message.

    Raises
    ------
    CorruptChunkError
        With array and file.
    """
    lost = lost_names(root, table)
    if lost is not None:
        names, key = lost
        found = f"the file is missing, and its names would read as empty; {remedy}"
        store = str(names.store.root)  # type: ignore[attr-defined]
        raise CorruptChunkError(found, store=store, array=names.path, shard=key)


def lost_names(root: zarr.Group, table: str) -> tuple[zarr.Array[Any], str] | None:
    """Find a file of a table's names that is not there: array and key; None where all are."""
    group: Any = root.get(table)
    if not isinstance(group, zarr.Group):
        return None
    node: Any = group.get(str(group.attrs.get("_index", "_index")))
    names = None if node is None else names_array(node)
    # A single name may be empty; several would be the same.
    if not isinstance(names, zarr.Array) or names.ndim != 1 or names.shape[0] < 2:
        return None
    return next(((names, key) for key, *_ in missing_files(names)), None)


def names_array(index: Any) -> Any:
    """Array of an index: itself, or that of its values, or of its categories' codes."""
    if not hasattr(index, "keys"):
        return index
    return next((index[name] for name in ("values", "codes") if name in index), None)


def missing_files(array: zarr.Array[Any]) -> Iterator[tuple[str, int, int]]:
    """Yield key, first and last row + 1 of each chunk or shard of an array without a file."""
    cut = array.shards or array.chunks
    folder = str(Path(array.store.root, array.path))  # type: ignore[attr-defined]
    key = array.metadata.encode_chunk_key
    for at in product(*(range(-(-n // c)) for n, c in zip(array.shape, cut, strict=True))):
        # There may be a hundred thousand, for each of which a Path takes longer than the call.
        if not os.path.exists(f"{folder}/{key(at)}"):  # noqa: PTH110
            start = at[0] * cut[0]
            yield key(at), start, min(start + cut[0], array.shape[0])

"""Files of a zarr store that were lost, where zarr itself would read zeros or empty names.

zarr leaves out chunks that hold nothing but the fill value, so a file that was lost looks like
one that never was. In these places such a chunk cannot be, or is most unlikely.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import zarr

from scgpu_tasks.errors import CorruptChunkError
from scgpu_tasks.io.manifest import manifest_path, read_manifest


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
    manifest = read_manifest(store)
    if manifest is None or "files" not in manifest:
        return
    for name in sorted(manifest["shards"] | manifest["files"]):
        array, _, chunk = name.partition("/c/")
        # An array may have been removed, and its chunks with it.
        if (
            chunk
            and name.startswith(under)
            and Path(store, array, "zarr.json").exists()
            and not Path(store, name).exists()
        ):
            found = (
                f"the converter wrote this file, and it is missing; {remedy}, or, if the "
                f"array was changed on purpose, delete {manifest_path(store)}"
            )
            raise CorruptChunkError(found, store=store, array=array, shard=f"c/{chunk}")


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
    names = node.get("values") if isinstance(node, zarr.Group) else node
    if not isinstance(names, zarr.Array) or names.ndim != 1:
        return None
    # One name may be empty; several would be the same.
    gone = (key for key, start, stop in missing_files(names) if stop - start > 1)
    return next(((names, key) for key in gone), None)


def missing_files(array: zarr.Array[Any]) -> Iterator[tuple[str, int, int]]:
    """Yield key, first and last row + 1 of each chunk or shard of an array without a file."""
    cut = array.shards or array.chunks
    folder = Path(array.store.root, array.path)  # type: ignore[attr-defined]
    key = array.metadata.encode_chunk_key
    for at in product(*(range(-(-n // c)) for n, c in zip(array.shape, cut, strict=True))):
        if not (folder / key(at)).exists():
            start = at[0] * cut[0]
            yield key(at), start, min(start + cut[0], array.shape[0])

"""Whether a zarr source has all the files whose absence would read as zeros or empty names.

zarr leaves out chunks that hold nothing but the fill value, so a file that was lost looks like
one that never was. In these places such a chunk cannot be, or is most unlikely.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.storage import LocalStore

from scgpu_tasks.errors import CorruptChunkError
from scgpu_tasks.io.convert.manifest import manifest_path, read_manifest
from scgpu_tasks.io.convert.plan import SparseItem
from scgpu_tasks.io.convert.values import Values

# So few stored values may well all be zeros; so few, repeated, all in the first column.
_FEW, _FEW_PLACES = 64, 1024
_REMEDY = "copy the source again from where it came from"


def require_files(values: Values) -> None:
    """Refuse a source in a local folder that has lost a file.

    Looked at are values and column numbers of sparse matrices, the names of cells and genes,
    and, in a store that `convert_zarr` wrote, every file it wrote.

    Raises
    ------
    CorruptChunkError
        With array and file.
    """
    root = values.source.root
    if not isinstance(root, zarr.Group) or type(root.store) is not LocalStore:
        return
    _require_those_written(str(root.store.root))
    for item in values.plan.sparse:
        _require_matrix(values, item)
    for name in ("obs", "var", "raw/var"):
        if name in root and hasattr(root[name], "keys"):
            _require_names(values, f"{name}/{root[name].attrs.get('_index', '_index')}")


def _require_those_written(store: str) -> None:
    manifest = read_manifest(store)
    if manifest is None or "files" not in manifest:
        return
    for name in sorted(manifest["shards"] | manifest["files"]):
        array, _, chunk = name.partition("/c/")
        # An array may have been removed, and its chunks with it.
        if (
            chunk
            and Path(store, array, "zarr.json").exists()
            and not Path(store, name).exists()
        ):
            found = (
                f"the converter wrote this file, and it is missing; {_REMEDY}, or, if the "
                f"array was changed on purpose, delete {manifest_path(store)}"
            )
            raise CorruptChunkError(found, store=store, array=array, shard=f"c/{chunk}")


def _require_matrix(values: Values, item: SparseItem) -> None:
    group: Any = values.source.root[item.source]
    data, indices = group["data"], group["indices"]
    for key, start, stop in missing_files(data):
        if stop - start <= _FEW:
            continue
        found = (
            "the file is missing, and its values would read as zeros; if they truly are, "
            f"remove them (eliminate_zeros) and write the source again; else {_REMEDY}"
        )
        raise _lost(data, key, found)
    for key, start, stop in missing_files(indices):
        # A chunk of zeros may be left out. Zero is the first gene, which a row has once.
        if stop - start <= _FEW_PLACES or item.minor == 1:
            continue
        indptr = values.reader(f"{item.source}/indptr")(0, item.major + 1)
        if np.diff(np.clip(indptr.astype(np.int64), start, stop)).max(initial=0) > 1:
            raise _lost(indices, key, f"the file is missing; {_REMEDY}")


def _require_names(values: Values, where: str) -> None:
    node: Any = values.source.root.get(where)
    names = node.get("values") if isinstance(node, zarr.Group) else node
    if not isinstance(names, zarr.Array) or names.ndim != 1:
        return
    for key, start, stop in missing_files(names):
        # One name may be empty; several would be the same.
        if stop - start > 1:
            found = f"the file is missing, and its names would read as empty; {_REMEDY}"
            raise _lost(names, key, found)


def missing_files(array: zarr.Array[Any]) -> Iterator[tuple[str, int, int]]:
    """Yield key, first and last row + 1 of each chunk or shard of an array without a file."""
    cut = array.shards or array.chunks
    folder = Path(array.store.root, array.path)  # type: ignore[attr-defined]
    key = array.metadata.encode_chunk_key
    for at in product(*(range(-(-n // c)) for n, c in zip(array.shape, cut, strict=True))):
        if not (folder / key(at)).exists():
            start = at[0] * cut[0]
            yield key(at), start, min(start + cut[0], array.shape[0])


def _lost(array: zarr.Array[Any], key: str, found: str) -> CorruptChunkError:
    store = str(array.store.root)  # type: ignore[attr-defined]
    return CorruptChunkError(found, store=store, array=array.path, shard=key)

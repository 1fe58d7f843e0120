"""Whether a zarr source has all the files whose absence would read as zeros or empty names."""

from __future__ import annotations

from typing import Any

import numpy as np
import zarr
from zarr.storage import LocalStore

from scgpu_tasks.errors import CorruptChunkError
from scgpu_tasks.io.convert.plan import SparseItem
from scgpu_tasks.io.convert.values import Values
from scgpu_tasks.io.presence import missing_files, require_names, require_written

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
    require_written(str(root.store.root), remedy=_REMEDY)
    for item in values.plan.sparse:
        _require_matrix(values, item)
    for name in ("obs", "var", "raw/var"):
        require_names(root, name, remedy=_REMEDY)


def _require_matrix(values: Values, item: SparseItem) -> None:
    data, indices = (
        values.source.node(f"{item.source}/{name}") for name in ("data", "indices")
    )
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


def _lost(array: zarr.Array[Any], key: str, found: str) -> CorruptChunkError:
    store = str(array.store.root)  # type: ignore[attr-defined]
    return CorruptChunkError(found, store=store, array=array.path, shard=key)

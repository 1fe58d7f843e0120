"""Write a CSR element of an AnnData zarr v3 store, shard by shard, in the GPU-ready layout."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import zarr
from zarr.codecs import ZstdCodec

from scgpu_tasks.io.arrays import attach_pipeline, fused_pipeline


def create_store(
    path: str | os.PathLike[str], *, obs: pd.DataFrame, var: pd.DataFrame
) -> zarr.Group:
    """Make a zarr v3 AnnData store that has obs, var and no X yet.

    Returns
    -------
    Its root group, open for writing.
    """
    root = zarr.open_group(str(path), mode="w", zarr_format=3)
    with warnings.catch_warnings():
        # anndata warns that zarr v3 has no specified form for its strings.
        warnings.simplefilter("ignore")
        ad.io.write_elem(root, "/", ad.AnnData(obs=obs, var=var))
    return zarr.open_group(str(path), mode="r+", zarr_format=3, use_consolidated=False)


def consolidate(path: str | os.PathLike[str]) -> None:
    """Write the consolidated metadata of a finished store."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Consolidated metadata is currently not part")
        zarr.consolidate_metadata(str(Path(path)))


class CSRWriter:
    """Appends rows to a CSR element; holds one unfinished shard of each array in memory.

    Parameters
    ----------
    root
        Open group of the store.
    element
        Where the matrix goes, such as ``X``.
    shape
        Rows and columns; as many rows must be appended.
    dtype, index_dtype
        Stored types of ``data`` and ``indices``; ``indptr`` is int64.
    expected_nnz
        Keeps the shards of a small matrix small.
    chunk_bytes, shard_bytes
        Decoded size of a chunk and of a shard in bytes.
    level
        zstd level.
    """

    def __init__(
        self,
        root: zarr.Group,
        element: str,
        *,
        shape: tuple[int, int],
        dtype: np.dtype,
        index_dtype: np.dtype,
        expected_nnz: int,
        chunk_bytes: int,
        shard_bytes: int,
        level: int,
    ) -> None:
        attributes: dict[str, Any] = {
            "encoding-type": "csr_matrix",
            "encoding-version": "0.1.0",
            "shape": list(shape),
        }
        group = root.require_group(element)
        group.attrs.update(attributes)
        layout = {"chunk_bytes": chunk_bytes, "shard_bytes": shard_bytes, "level": level}
        self._data = _Appender(group, "data", dtype, expected_nnz, **layout)
        self._indices = _Appender(group, "indices", index_dtype, expected_nnz, **layout)
        self._indptr = _Appender(group, "indptr", np.dtype(np.int64), shape[0] + 1, **layout)
        self._indptr.append(np.zeros(1, np.int64))
        self._nnz = 0

    def append(self, data: np.ndarray, indices: np.ndarray, indptr: np.ndarray) -> None:
        """Append rows; `indptr` starts at 0 and has one entry more than there are rows."""
        self._data.append(data)
        self._indices.append(indices)
        self._indptr.append(indptr[1:].astype(np.int64) + self._nnz)
        self._nnz += int(indptr[-1])

    def close(self) -> None:
        """Write what is left in memory."""
        for appender in (self._data, self._indices, self._indptr):
            appender.flush()


class _Appender:
    """One growing 1-d array that is written a whole shard at a time."""

    def __init__(
        self,
        group: zarr.Group,
        name: str,
        dtype: np.dtype,
        expected: int,
        *,
        chunk_bytes: int,
        shard_bytes: int,
        level: int,
    ) -> None:
        chunk = max(1, chunk_bytes // dtype.itemsize)
        per_shard = max(1, min(shard_bytes // chunk_bytes, -(-expected // chunk)))
        array: zarr.Array[Any] = group.create_array(
            name,
            shape=(0,),
            dtype=dtype,
            chunks=(chunk,),
            shards=(chunk * per_shard,),
            compressors=ZstdCodec(level=level, checksum=True),
            fill_value=0,
            # A chunk that is missing must always mean damage.
            config={"write_empty_chunks": True},
        )
        self._array = attach_pipeline(array, fused_pipeline(array))
        self._buffer = np.empty(chunk * per_shard, dtype)
        self._used = 0
        self._written = 0

    def append(self, values: np.ndarray) -> None:
        """Take values; write each shard that they fill."""
        while len(values):
            n = min(len(values), len(self._buffer) - self._used)
            self._buffer[self._used : self._used + n] = values[:n]
            self._used += n
            values = values[n:]
            if self._used == len(self._buffer):
                self.flush()

    def flush(self) -> None:
        """Write what is in memory."""
        if not self._used:
            return
        start, self._written = self._written, self._written + self._used
        self._array.resize((self._written,))
        self._array[start : self._written] = self._buffer[: self._used]
        self._used = 0

"""Arrays of strings with one axis, read and written without the detours of zarr and h5py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import zarr
from numcodecs import VLenUTF8
from zarr.core.buffer import cpu
from zarr.core.metadata import ArrayV2Metadata
from zarr.core.sync import sync

from scgpu_tasks.io.convert.chunks import decode_blosc
from scgpu_tasks.io.convert.compress import compress
from scgpu_tasks.io.strings import file_reader

# Strings in a file of an array, and a function that returns the decoded chunks in one.
_Files = tuple[int, Callable[[int], list[bytes]]]


class Texts:
    """Row ranges of an array of strings, of a source or a store.

    Parameters
    ----------
    node
        HDF5 dataset or zarr array; of one with several axes, all of the others are read.
    """

    def __init__(self, node: h5py.Dataset | zarr.Array[Any]) -> None:
        self._node = node
        self._files = _files(node) if isinstance(node, zarr.Array) and node.ndim == 1 else None
        self._kept: tuple[int, np.ndarray] | None = None

    def __call__(self, start: int, stop: int) -> np.ndarray:
        """Rows start:stop as Python strings; `stop` may lie beyond the end."""
        stop = min(stop, self._node.shape[0])
        if self._files is not None:
            try:
                return self._from_files(*self._files, start, stop)
            except (ValueError, RuntimeError, OSError):
                # zarr can read it after all, or tell what is wrong.
                self._files = None
        if isinstance(self._node, h5py.Dataset):
            return np.asarray(self._node.asstr()[start:stop], dtype=object)
        return np.asarray(self._node[start:stop], dtype=object)

    def _from_files(
        self, size: int, read: Callable[[int], list[bytes]], start: int, stop: int
    ) -> np.ndarray:
        parts = []
        for number in range(start // size, -(-stop // size)):
            if self._kept is None or self._kept[0] != number:
                values = np.concatenate([VLenUTF8().decode(data) for data in read(number)])
                if len(values) != size:
                    msg = f"{len(values)} strings instead of {size}"
                    raise ValueError(msg)
                self._kept = (number, values)
            parts.append(self._kept[1][max(start - number * size, 0) : stop - number * size])
        return np.concatenate(parts) if len(parts) != 1 else parts[0]


def write_strings(array: zarr.Array[Any], number: int, values: np.ndarray, level: int) -> None:
    """Write a chunk of an array in a folder whose chunks are ``vlen-utf8`` in zstd."""
    full = np.full(array.chunks, "", dtype=object)
    full[: len(values)] = values
    store: Any = array.store
    path = Path(store.root) / array.path / array.metadata.encode_chunk_key((number,))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(compress(VLenUTF8().encode(full), level))


def _files(array: zarr.Array[Any]) -> _Files | None:
    """How to read an array of strings; None where only zarr can."""
    metadata = array.metadata
    if not isinstance(metadata, ArrayV2Metadata):
        return file_reader(array)
    filters: Any = metadata.filters or ()
    compressor: Any = metadata.compressor
    if len(filters) != 1 or not isinstance(filters[0], VLenUTF8):
        return None

    def read(number: int) -> list[bytes]:
        path = array.store_path / metadata.encode_chunk_key((number,))
        found = sync(path.get(prototype=cpu.buffer_prototype))
        if found is None:
            msg = "a chunk that is not stored"
            raise ValueError(msg)
        data: Any = found.to_bytes()
        if compressor is not None and compressor.codec_id == "blosc":
            data = decode_blosc(data, int.from_bytes(data[4:8], "little"))
        elif compressor is not None:
            data = compressor.decode(data)
        return [data]

    return array.chunks[0], read

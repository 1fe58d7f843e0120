"""Chunks of an HDF5 dataset, read and decoded without the HDF5 library and its lock."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from itertools import product
from math import prod
from pathlib import Path

import deflate
import h5py
import numpy as np
from numcodecs import blosc, zstd

from scgpu_tasks.errors import CorruptChunkError

Decoder = Callable[[bytes | bytearray, int], bytes | bytearray]
_DEFLATE, _SHUFFLE, _BLOSC, _ZSTD = 1, 2, 32001, 32015


def _inflate(data: bytes | bytearray, size: int) -> bytes | bytearray:
    try:
        return deflate.zlib_decompress(data, size)
    except deflate.DeflateError as error:
        msg = f"gzip: {error}"
        raise ValueError(msg) from error


_DECODERS: dict[int, Decoder] = {
    _DEFLATE: _inflate,
    _BLOSC: lambda data, _: blosc.decompress(bytes(data)),
    _ZSTD: lambda data, _: zstd.decompress(bytes(data)),
}


class H5Chunks:
    """Row ranges of a dataset whose bytes are where the file says.

    Use `H5Chunks.of`, which returns None for a dataset that needs the HDF5 library.
    """

    def __init__(self, dataset: h5py.Dataset, path: Path, filters: tuple[int, ...]) -> None:
        self.path, self.array, self.filters = path, str(dataset.name).strip("/"), filters
        self.shape: tuple[int, ...] = dataset.shape
        self.stored = np.dtype(dataset.dtype.str)
        self.dtype = self.stored.newbyteorder("=")
        self.chunks: tuple[int, ...] | None = dataset.chunks
        self.fill = dataset.fillvalue
        self._fd = os.open(path, os.O_RDONLY)
        self._close = os.close
        if self.chunks is None:
            self._offset = dataset.id.get_offset()
            return
        grid = tuple(-(-n // c) for n, c in zip(self.shape, self.chunks, strict=True))
        # Place of each chunk in the file, its stored size, and filters left out for it.
        self._table = np.zeros((*grid, 3), np.int64)

        def note(info: h5py.h5d.StoreInfo) -> None:
            at = tuple(o // c for o, c in zip(info.chunk_offset, dataset.chunks, strict=True))
            self._table[at] = (info.byte_offset, info.size, info.filter_mask)

        dataset.id.chunk_iter(note)

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self._close(self._fd)

    @classmethod
    def of(cls, dataset: h5py.Dataset, path: Path) -> H5Chunks | None:
        """Reader of a dataset, or None where only the HDF5 library can read it."""
        file = dataset.file
        if file.driver != "sec2" or not dataset.shape or not prod(dataset.shape):
            return None
        if dataset.external or dataset.is_virtual or dataset.dtype.kind not in "biufc":
            return None
        # A dataset reached through an external link lies in another file.
        if not path.samefile(file.filename):
            return None
        # HDF5 packs complex and boolean values the way NumPy does only in their usual form.
        if dataset.id.get_type().get_size() != dataset.dtype.itemsize:
            return None
        plist = dataset.id.get_create_plist()
        if dataset.chunks is None:
            if plist.get_layout() != h5py.h5d.CONTIGUOUS or dataset.id.get_offset() is None:
                return None
            return cls(dataset, path, ())
        filters = tuple(plist.get_filter(i)[0] for i in range(plist.get_nfilters()))
        if any(f not in _DECODERS and f != _SHUFFLE for f in filters):
            return None
        return cls(dataset, path, filters)

    def __call__(self, start: int, stop: int) -> np.ndarray:
        """Rows start:stop in native byte order."""
        shape = (stop - start, *self.shape[1:])
        if self.chunks is None:
            row = prod(self.shape[1:]) * self.stored.itemsize
            data = self._pread(self._offset + start * row, (stop - start) * row, "contiguous")
            return (
                np.frombuffer(data, self.stored).reshape(shape).astype(self.dtype, copy=False)
            )
        out = np.empty(shape, self.dtype)
        rows = range(start // self.chunks[0], -(-stop // self.chunks[0]))
        grid = self._table.shape[1:-1]
        for at in product(rows, *map(range, grid)):
            values = self._chunk(at)
            low = at[0] * self.chunks[0]
            a, b = max(start, low), min(stop, low + self.chunks[0])
            where, part = [slice(a - start, b - start)], [slice(a - low, b - low)]
            for i, n, c in zip(at[1:], self.shape[1:], self.chunks[1:], strict=True):
                width = min(c, n - i * c)
                where.append(slice(i * c, i * c + width))
                part.append(slice(0, width))
            out[tuple(where)] = values[tuple(part)]
        return out

    def _chunk(self, at: tuple[int, ...]) -> np.ndarray:
        chunks = self.chunks or ()
        offset, size, mask = map(int, self._table[at])
        if not size:
            return np.full(chunks, self.fill, self.stored)
        name = ".".join(map(str, at))
        data: bytes | bytearray = self._pread(offset, size, name)
        nbytes = prod(chunks) * self.stored.itemsize
        try:
            for i in reversed(range(len(self.filters))):
                if mask >> i & 1:
                    continue
                kind = self.filters[i]
                if kind == _SHUFFLE:
                    data = _unshuffle(data, self.stored.itemsize)
                else:
                    data = _DECODERS[kind](data, nbytes)
        except (ValueError, RuntimeError, zlib.error) as error:
            found = f"a chunk does not decode ({error})"
            raise self._corrupt(found, name) from error
        if len(data) != nbytes:
            found = f"a chunk decodes to {len(data)} bytes instead of {nbytes}"
            raise self._corrupt(found, name)
        return np.frombuffer(data, self.stored).reshape(chunks)

    def _pread(self, offset: int, size: int, name: str) -> bytes:
        parts = []
        while size:
            data = os.pread(self._fd, size, offset)
            if not data:
                found = f"the file ends {size} bytes too early"
                raise self._corrupt(found, name)
            parts.append(data)
            size -= len(data)
            offset += len(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _corrupt(self, found: str, name: str) -> CorruptChunkError:
        msg = f"{found}; the source is damaged, copy it again from where it came from"
        return CorruptChunkError(msg, store=str(self.path), array=self.array, shard=name)


def _unshuffle(data: bytes | bytearray, itemsize: int) -> bytes:
    """Undo HDF5's byte shuffle; bytes after the last whole value stay where they are."""
    count = len(data) // itemsize
    body = np.frombuffer(data, np.uint8, count * itemsize)
    return body.reshape(itemsize, count).T.tobytes() + bytes(data[count * itemsize :])

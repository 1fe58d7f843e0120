"""Chunks of an HDF5 dataset, read and decoded without the HDF5 library and its lock."""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import prod
from pathlib import Path

import h5py
import numpy as np

from scgpu_tasks.io.convert import chunks as decode
from scgpu_tasks.io.convert.chunks import BLOCK, Bytes, Chunks, Decoder
from scgpu_tasks.io.source import reading

_DEFLATE, _SHUFFLE, _BLOSC, _ZSTD = 1, 2, 32001, 32015
_DECODERS: dict[int, Decoder] = {
    _DEFLATE: decode.inflate_zlib,
    _BLOSC: decode.decode_blosc,
    _ZSTD: decode.decode_zstd,
}


class H5Chunks(Chunks):
    """A dataset whose chunks are where the file says.

    Use `H5Chunks.of`, which returns None for a dataset that needs the HDF5 library.
    """

    def __init__(self, dataset: h5py.Dataset, path: Path, filters: tuple[int, ...]) -> None:
        name = str(dataset.name).strip("/")
        super().__init__(str(path), name, dataset.shape, dataset.chunks, dataset.dtype)
        self._path, self._filters, self._fill = path, filters, dataset.fillvalue
        self._fd, self._close = os.open(path, os.O_RDONLY), os.close
        grid = tuple(-(-n // c) for n, c in zip(self.shape, self.chunks, strict=True))
        # Place of each chunk in the file, its stored size, and filters left out for it.
        self._table = np.zeros((*grid, 3), np.int64)

        def note(info: h5py.h5d.StoreInfo) -> None:
            at = tuple(o // c for o, c in zip(info.chunk_offset, self.chunks, strict=True))
            self._table[at] = (info.byte_offset, info.size, info.filter_mask)

        dataset.id.chunk_iter(note)

    def __del__(self) -> None:
        if hasattr(self, "_close"):
            self._close(self._fd)

    @classmethod
    def of(cls, dataset: h5py.Dataset, path: Path) -> H5Chunks | None:
        """Return a reader of the dataset, or None where only the HDF5 library can read it."""
        if not dataset.chunks or not in_plain_file(dataset, path):
            return None
        plist = dataset.id.get_create_plist()
        filters = tuple(plist.get_filter(i)[0] for i in range(plist.get_nfilters()))
        if any(f not in _DECODERS and f != _SHUFFLE for f in filters):
            return None
        return cls(dataset, path, filters)

    def chunk(self, at: tuple[int, ...]) -> np.ndarray:
        """Return one chunk."""
        offset, size, mask = map(int, self._table[at])
        with reading(self.store, f"chunk {self.name_of(at)} of {self.array}"):
            data = os.pread(self._fd, size, offset)
        return self._decoded(data, at, size, mask)

    def _decoded(self, data: Bytes, at: tuple[int, ...], size: int, mask: int) -> np.ndarray:
        if not size:
            return np.full(self.chunks, self._fill, self.stored)
        if len(data) != size:
            found = f"the file ends {size - len(data)} bytes too early"
            raise self.corrupt(found, self.name_of(at))
        try:
            for i in reversed(range(len(self._filters))):
                if mask >> i & 1:
                    continue
                kind = self._filters[i]
                if kind == _SHUFFLE:
                    data = _unshuffle(data, self.stored.itemsize)
                else:
                    data = _DECODERS[kind](data, self.chunk_bytes)
        except (ValueError, RuntimeError) as error:
            found = f"a chunk does not decode ({error})"
            raise self.corrupt(found, self.name_of(at)) from error
        return self.as_chunk(data, at)

    def fill(self, start: int, stop: int, out: np.ndarray) -> None:
        """Put rows start:stop into `out`."""
        if len(self.shape) > 1:
            super().fill(start, stop, out)
            return
        # h5py makes chunks of 16 to 128 KiB, and they mostly follow each other in the file.
        n = self.chunks[0]
        first, last = start // n, -(-stop // n)
        for a, b in _runs(self._table, first, last):
            places = self._table[a:b].tolist()
            begin, length = places[0][0], sum(size for _, size, _ in places)
            with reading(self.store, f"chunk {a} of {self.array}"):
                data = memoryview(os.pread(self._fd, length, begin))
            for number, (offset, size, mask) in enumerate(places, a):
                part = data[offset - begin : offset - begin + size]
                values = self._decoded(part, (number,), size, mask)
                low, high = max(start, number * n), min(stop, number * n + n)
                out[low - start : high - start] = values[low - number * n : high - number * n]

    def stream(self, at: tuple[int, ...]) -> Iterator[Bytes] | None:
        """Return the decoded bytes of one chunk a piece at a time."""
        offset, size, mask = map(int, self._table[at])
        blocks = self.pread_blocks(self._path, offset, size)
        match self._filters:
            case _ if not size or mask:
                return None
            case ():
                return blocks
            case (kind,) if kind == _DEFLATE:
                return decode.stream_deflate(blocks, 15)
            case (kind,) if kind == _ZSTD:
                return decode.stream_zstd(blocks)
        return None


class H5Contiguous(Chunks):
    """A dataset that lies in one piece: rows are read where they are."""

    def __init__(self, dataset: h5py.Dataset, path: Path) -> None:
        name = str(dataset.name).strip("/")
        super().__init__(str(path), name, dataset.shape, dataset.shape, dataset.dtype)
        self._offset = int(dataset.id.get_offset())
        self._fd, self._close = os.open(path, os.O_RDONLY), os.close

    def __del__(self) -> None:
        if hasattr(self, "_close"):
            self._close(self._fd)

    @classmethod
    def of(cls, dataset: h5py.Dataset, path: Path) -> H5Contiguous | None:
        """Return a reader of the dataset, or None where only the HDF5 library can read it."""
        if dataset.chunks or not in_plain_file(dataset, path):
            return None
        layout = dataset.id.get_create_plist().get_layout()
        if layout != h5py.h5d.CONTIGUOUS or dataset.id.get_offset() is None:
            return None
        return cls(dataset, path)

    def chunk(self, at: tuple[int, ...]) -> np.ndarray:
        """Return everything."""
        del at
        out = np.empty(self.shape, self.stored)
        self.fill(0, self.shape[0], out)
        return out

    def fill(self, start: int, stop: int, out: np.ndarray) -> None:
        """Put rows start:stop into `out`."""
        row = prod(self.shape[1:]) * self.stored.itemsize
        size = (stop - start) * row
        with reading(self.store, self.array):
            data = os.pread(self._fd, size, self._offset + start * row)
        if len(data) != size:
            found = f"the file ends {size - len(data)} bytes too early"
            raise self.corrupt(found, "contiguous")
        out[...] = np.frombuffer(data, self.stored).reshape(out.shape)


def in_plain_file(dataset: h5py.Dataset, path: Path) -> bool:
    """Whether the bytes of a dataset of numbers lie in this file as NumPy would have them."""
    file = dataset.file
    if file.driver != "sec2" or not dataset.shape or not prod(dataset.shape):
        return False
    if dataset.external or dataset.is_virtual or dataset.dtype.kind not in "biufc":
        return False
    # Behind a block of the user's, HDF5 before 1.14.4 gives places that are off by its size.
    if file.userblock_size:
        return False
    # A dataset reached through an external link lies in another file.
    if not path.samefile(file.filename):
        return False
    size: int = dataset.id.get_type().get_size()
    return size == dataset.dtype.itemsize


def _runs(table: np.ndarray, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Cut chunks first:last into runs that lie one behind the other in the file."""
    ends = table[first : last - 1, 0] + table[first : last - 1, 1]
    apart = ends != table[first + 1 : last, 0]
    size = 0
    a = first
    for b in range(first + 1, last + 1):
        size += int(table[b - 1, 1])
        if b == last or apart[b - 1 - first] or size >= BLOCK:
            yield a, b
            a, size = b, 0


def _unshuffle(data: Bytes, itemsize: int) -> bytes:
    """Undo HDF5's byte shuffle; bytes after the last whole value stay where they are."""
    count = len(data) // itemsize
    body = np.frombuffer(data, np.uint8, count * itemsize)
    return body.reshape(itemsize, count).T.tobytes() + bytes(data[count * itemsize :])

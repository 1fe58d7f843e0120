"""Rows of a source array, decoded by as many threads as ask, in bounded memory.

h5py decodes under a lock that all threads share. So the places of the chunks in the file are
looked up once, and the bytes are read and decoded without HDF5. What this cannot decode goes
through h5py or zarr.

Chunks that share rows form a band. A band that is small is decoded whole and the last one is
kept, by each thread. A large one (a source stored as one giant chunk is the extreme) is decoded
once into a scratch file and read from there: a read would otherwise decode all of it each time.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import zarr

from scgpu_tasks.errors import CorruptChunkError, ScgpuError
from scgpu_tasks.io.arrays import attach_pipeline, host_pipeline
from scgpu_tasks.io.convert.h5chunks import H5Chunks
from scgpu_tasks.io.source import Source

BAND_BYTES = 32 * 1024 * 1024


class ArrayReader:
    """Reads row ranges of one array of a source.

    Parameters
    ----------
    source
        The open source; it must stay open.
    path
        The array in it, such as ``X/data``.
    scratch
        Folder for the decoded bands of an array with large chunks.
    """

    def __init__(self, source: Source, path: str, scratch: Path) -> None:
        node = source.node(path)
        self.source, self.path, self.scratch = source, path, scratch
        self.shape: tuple[int, ...] = tuple(node.shape)
        self.dtype = native(node.dtype)
        self._read = _direct_reader(node, source)
        chunks = node.chunks
        self.band_rows = int(chunks[0]) if chunks else 0
        self._row_bytes = prod(self.shape[1:]) * self.dtype.itemsize
        self._kept = threading.local()
        self._locks: dict[int, threading.Lock] = {}
        self._lock = threading.Lock()

    @property
    def band_bytes(self) -> int:
        """Decoded bytes of a band of chunks; 0 where rows can be read one by one."""
        return min(self.band_rows, self.shape[0]) * self._row_bytes

    @property
    def spills(self) -> bool:
        """Whether bands are decoded into scratch files."""
        return self.band_bytes > BAND_BYTES

    def __call__(self, start: int, stop: int) -> np.ndarray:
        """Rows start:stop, of the source's dtype in native byte order.

        Raises
        ------
        CorruptChunkError
            The source does not decode there.
        """
        if not self.band_rows:
            return self._decode(start, stop)
        out = np.empty((stop - start, *self.shape[1:]), self.dtype)
        # Bands that lie wholly inside need not be kept: read them in one go.
        first, last = -(-start // self.band_rows), stop // self.band_rows
        if last > first and not self.spills:
            a, b = first * self.band_rows, last * self.band_rows
            out[a - start : b - start] = self._decode(a, b)
            edges = [(start, a), (b, stop)]
        else:
            edges = [(start, stop)]
        for a, b in edges:
            while a < b:
                band = a // self.band_rows
                end = min(b, (band + 1) * self.band_rows)
                at = band * self.band_rows
                out[a - start : end - start] = self._band(band)[a - at : end - at]
                a = end
        return out

    def _band(self, band: int) -> np.ndarray:
        if not self.spills:
            kept = self._kept.__dict__
            if kept.get("band") != band:
                kept.clear()
                kept["values"] = self._decode(*self._band_range(band))
                kept["band"] = band
            values: np.ndarray = kept["values"]
            return values
        with self._lock:
            lock = self._locks.setdefault(band, threading.Lock())
        with lock:
            path = self._spilled(band)
        start, stop = self._band_range(band)
        return np.memmap(path, self.dtype, "r", shape=(stop - start, *self.shape[1:]))

    def _band_range(self, band: int) -> tuple[int, int]:
        return band * self.band_rows, min((band + 1) * self.band_rows, self.shape[0])

    def _spilled(self, band: int) -> Path:
        name = f"{self.path.replace('/', '~')}.{band}"
        path = self.scratch / name
        if not path.exists():
            part = self.scratch / f"{name}.{uuid.uuid4().hex}.part"
            self.scratch.mkdir(parents=True, exist_ok=True)
            start, stop = self._band_range(band)
            self._decode(start, stop).tofile(part)
            part.replace(path)
        return path

    def _decode(self, start: int, stop: int) -> np.ndarray:
        try:
            return self._read(start, stop)
        except ScgpuError:
            raise
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            msg = (
                f"rows {start}:{stop} cannot be decoded ({error}); the source is damaged or "
                "incomplete, copy it again from where it came from"
            )
            raise CorruptChunkError(msg, store=self.source.path, array=self.path) from error


def native(dtype: np.dtype) -> np.dtype:
    """Return the same type in the machine's byte order, without HDF5's metadata."""
    return np.dtype(dtype.str).newbyteorder("=")


def _direct_reader(
    node: h5py.Dataset | zarr.Array, source: Source
) -> Callable[[int, int], np.ndarray]:
    if isinstance(node, zarr.Array):
        array: zarr.Array[Any] = attach_pipeline(node, host_pipeline(node))
        dtype = native(node.dtype)

        def read(start: int, stop: int) -> np.ndarray:
            return np.asarray(array[start:stop]).astype(dtype, copy=False)

        return read
    if source.is_local and os.name == "posix":
        chunks = H5Chunks.of(node, Path(source.path))
        if chunks is not None:
            return chunks
    dtype = native(node.dtype)

    def read_h5(start: int, stop: int) -> np.ndarray:
        return np.asarray(node[start:stop]).astype(dtype, copy=False)

    return read_h5

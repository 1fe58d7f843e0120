"""Rows of a source array, decoded by as many threads as ask, in bounded memory.

h5py decodes under a lock that all threads share, and zarr on one event loop. So chunks are read
and decoded directly where that is possible; what is left goes through h5py or zarr.

Chunks that share rows form a band. A band that is small is decoded whole and the last one is
kept, by each thread. A large one (a source stored as one giant chunk is the extreme) is decoded
once into a scratch file and read from there: a read would otherwise decode all of it each time.
"""

from __future__ import annotations

import json
import os
import threading
import uuid
import zlib
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import zarr

from scgpu_tasks.errors import CorruptChunkError, ScgpuError
from scgpu_tasks.io.arrays import attach_pipeline, host_pipeline
from scgpu_tasks.io.convert.chunks import Chunks
from scgpu_tasks.io.convert.h5chunks import H5Chunks, H5Contiguous
from scgpu_tasks.io.convert.prepared import file_name
from scgpu_tasks.io.convert.zarrchunks import ZarrChunks
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
        self.dtype = np.dtype(node.dtype.str).newbyteorder("=")
        self._chunks = _direct(node, source)
        self._node = node
        if self._chunks is None and isinstance(node, zarr.Array):
            attach_pipeline(node, host_pipeline(node))
        in_one = isinstance(self._chunks, H5Contiguous) or not node.chunks
        self.band_rows = 0 if in_one else int(node.chunks[0])
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

    @property
    def whole_bytes(self) -> int:
        """Memory that decoding takes beyond a few MiB: the size of a chunk, or nothing."""
        if not self.spills:
            return 0
        if self._chunks is None:
            return self.band_bytes
        streamed = self._chunks.stream(next(self._chunks.touched(0, 1))) is not None
        return 0 if streamed and self._one_chunk_wide else self._chunks.chunk_bytes

    @property
    def _one_chunk_wide(self) -> bool:
        chunks = self._chunks
        return chunks is not None and chunks.chunks[1:] == self.shape[1:]

    def __call__(self, start: int, stop: int) -> np.ndarray:
        """Rows start:stop, of the source's dtype in native byte order.

        Raises
        ------
        CorruptChunkError
            The source does not decode there.
        """
        if self.band_rows and start // self.band_rows == (stop - 1) // self.band_rows:
            band = start // self.band_rows
            low = band * self.band_rows
            return self._native(self._band(band)[start - low : stop - low])
        out = np.empty((stop - start, *self.shape[1:]), self.dtype)
        if not self.band_rows:
            self._decode(start, stop, out)
            return out
        # Bands that lie wholly inside need not be kept: decode them in place.
        first, last = -(-start // self.band_rows), stop // self.band_rows
        edges = [(start, stop)]
        if last > first and not self.spills:
            a, b = first * self.band_rows, last * self.band_rows
            self._decode(a, b, out[a - start : b - start])
            edges = [(start, a), (b, stop)]
        for a, b in edges:
            while a < b:
                band = a // self.band_rows
                end, low = min(b, (band + 1) * self.band_rows), band * self.band_rows
                out[a - start : end - start] = self._band(band)[a - low : end - low]
                a = end
        return out

    def release(self) -> None:
        """Forget the band that is kept for this thread."""
        self._kept.__dict__.clear()

    def _band(self, band: int) -> np.ndarray:
        if self.spills:
            with self._lock:
                lock = self._locks.setdefault(band, threading.Lock())
            with lock:
                return self._spilled(band)
        kept = self._kept.__dict__
        if kept.get("band") != band:
            kept.clear()
            kept["values"], kept["band"] = self._decoded(band), band
        found: np.ndarray = kept["values"]
        return found

    def _decoded(self, band: int) -> np.ndarray:
        if self._chunks is not None and self._one_chunk_wide:
            return self._chunks.chunk((band, *(0 for _ in self.shape[1:])))
        start, stop = self._band_range(band)
        values = np.empty((stop - start, *self.shape[1:]), self.dtype)
        self._decode(start, stop, values)
        return values

    def _native(self, values: np.ndarray) -> np.ndarray:
        return values.astype(self.dtype, copy=False)

    def _band_range(self, band: int) -> tuple[int, int]:
        return band * self.band_rows, min((band + 1) * self.band_rows, self.shape[0])

    def _spilled(self, band: int) -> np.ndarray:
        path = self.scratch / f"{file_name(self.path)}.{band}"
        start, stop = self._band_range(band)
        shape = (stop - start, *self.shape[1:])
        dtype = self.dtype if self._chunks is None else self._chunks.stored
        if not path.exists():
            part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
            self.scratch.mkdir(parents=True, exist_ok=True)
            if not self._stream(band, part, prod(shape) * dtype.itemsize):
                values = np.memmap(part, dtype, "w+", shape=shape)
                self._decode(start, stop, values)
                values.flush()
            _label(part, self._identity(band), prod(shape) * dtype.itemsize)
            part.replace(path)
        self._check_identity(path, band, prod(shape) * dtype.itemsize)
        return np.memmap(path, dtype, "r", shape=shape)

    def _identity(self, band: int) -> bytes:
        dtype = self.dtype if self._chunks is None else self._chunks.stored
        of = [self.source.path, self.path, band, self.shape, dtype.str]
        return json.dumps(of).encode()

    def _check_identity(self, path: Path, band: int, nbytes: int) -> None:
        """Refuse a scratch file that holds something else: it is what verifying reads too."""
        wanted = self._identity(band)
        with path.open("rb") as file:
            file.seek(nbytes)
            found = file.read()
        if found != wanted:
            msg = (
                f"the scratch file {path} holds {found[:200]!r} instead of {wanted!r}; run the "
                "conversion again"
            )
            raise CorruptChunkError(msg, store=self.source.path, array=self.path)

    def _stream(self, band: int, path: Path, nbytes: int) -> bool:
        """Decode a band of one chunk into a file a piece at a time; False if it cannot."""
        chunks = self._chunks
        if chunks is None or not self._one_chunk_wide:
            return False
        at = (band, *(0 for _ in self.shape[1:]))
        pieces = chunks.stream(at)
        if pieces is None:
            return False
        name = chunks.name_of(at)
        size = 0
        try:
            with path.open("wb") as file:
                for piece in pieces:
                    size += len(piece)
                    file.write(piece)
        # pyarrow and zlib have errors of their own.
        except (ValueError, RuntimeError, OSError, zlib.error) as error:
            if isinstance(error, OSError) and error.errno:
                raise
            found = f"a chunk does not decode ({error})"
            raise chunks.corrupt(found, name) from error
        if size < nbytes:
            found = f"a chunk decodes to {size} bytes instead of {chunks.chunk_bytes}"
            raise chunks.corrupt(found, name)
        return True

    def _decode(self, start: int, stop: int, out: np.ndarray) -> None:
        if self._chunks is not None:
            self._chunks.fill(start, stop, out)
            return
        try:
            out[...] = self._node[start:stop]
        except ScgpuError:
            raise
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            msg = (
                f"rows {start}:{stop} cannot be decoded ({error}); the source is damaged or "
                "incomplete, copy it again from where it came from"
            )
            raise CorruptChunkError(msg, store=self.source.path, array=self.path) from error


def _label(path: Path, identity: bytes, nbytes: int) -> None:
    """Write behind the values of a scratch file what they are."""
    with path.open("r+b") as file:
        # A chunk at the edge of an array holds more rows than the array.
        file.truncate(nbytes)
        file.seek(nbytes)
        file.write(identity)


def _direct(node: h5py.Dataset | zarr.Array[Any], source: Source) -> Chunks | None:
    if isinstance(node, zarr.Array):
        return ZarrChunks.of(node)
    if not source.is_local or os.name != "posix":
        return None
    path = Path(source.path)
    return H5Chunks.of(node, path) or H5Contiguous.of(node, path)

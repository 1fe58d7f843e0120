"""Chunks of a source array, read from its file and decoded without the library's locks."""

from __future__ import annotations

import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import prod
from pathlib import Path

import deflate
import numpy as np
import pyarrow as pa
from numcodecs import blosc, lz4, zstd

from scgpu_tasks.errors import CorruptChunkError
from scgpu_tasks.io.source import reading

Bytes = bytes | bytearray | memoryview
Decoder = Callable[[Bytes, int], Bytes]
BLOCK = 1 << 20


class Chunks(ABC):
    """Row ranges of an array that is cut into chunks.

    Attributes
    ----------
    store, array
        Where it is, for errors.
    shape, chunks
        Of the array, and of a chunk.
    stored
        dtype in the file; `dtype` is the same in native byte order.
    """

    def __init__(
        self,
        store: str,
        array: str,
        shape: Sequence[int],
        chunks: Sequence[int],
        stored: np.dtype,
    ) -> None:
        self.store, self.array = store, array
        self.shape, self.chunks = tuple(map(int, shape)), tuple(map(int, chunks))
        self.stored = np.dtype(stored.str)
        self.dtype = self.stored.newbyteorder("=")
        self.chunk_bytes = prod(self.chunks) * self.stored.itemsize

    @abstractmethod
    def chunk(self, at: tuple[int, ...]) -> np.ndarray:
        """Return one chunk, of full size also at the edge of the array."""

    def chunk_into(self, at: tuple[int, ...], out: np.ndarray) -> bool:
        """Decode one chunk to where it is wanted; False where nothing can."""
        del at, out
        return False

    def stream(self, at: tuple[int, ...]) -> Iterator[Bytes] | None:
        """Return the decoded bytes of one chunk a piece at a time; None where nothing can."""
        del at
        return None

    def fill(self, start: int, stop: int, out: np.ndarray) -> None:
        """Put rows start:stop into `out`.

        Raises
        ------
        CorruptChunkError
            A chunk does not decode.
        """
        for at in self.touched(start, stop):
            low = at[0] * self.chunks[0]
            whole = len(at) == 1 and start <= low and low + self.chunks[0] <= stop
            if whole and self.chunk_into(at, out[low - start : low - start + self.chunks[0]]):
                continue
            values = self.chunk(at)
            a, b = max(start, low), min(stop, low + self.chunks[0])
            where, part = [slice(a - start, b - start)], [slice(a - low, b - low)]
            for i, n, c in zip(at[1:], self.shape[1:], self.chunks[1:], strict=True):
                width = min(c, n - i * c)
                where.append(slice(i * c, i * c + width))
                part.append(slice(0, width))
            out[tuple(where)] = values[tuple(part)]

    def touched(self, start: int, stop: int) -> Iterator[tuple[int, ...]]:
        """Yield the places in the grid of the chunks that hold rows start:stop."""
        grid = [range(-(-n // c)) for n, c in zip(self.shape[1:], self.chunks[1:], strict=True)]
        rows = range(start // self.chunks[0], -(-stop // self.chunks[0]))
        return product(rows, *grid)

    def as_chunk(self, data: Bytes, at: tuple[int, ...]) -> np.ndarray:
        """Give decoded bytes the chunk's shape.

        Raises
        ------
        CorruptChunkError
            There are too few or too many.
        """
        if len(data) != self.chunk_bytes:
            found = f"a chunk decodes to {len(data)} bytes instead of {self.chunk_bytes}"
            raise self.corrupt(found, self.name_of(at))
        return np.frombuffer(data, self.stored).reshape(self.chunks)

    def name_of(self, at: tuple[int, ...]) -> str:
        """Return what to call a chunk in errors."""
        return ".".join(map(str, at))

    def pread_blocks(self, path: Path, offset: int, size: int) -> Iterator[bytes]:
        """Yield a part of a file a block at a time; ends early where the file does."""
        with reading(self.store, f"{self.array} ({path})"), path.open("rb") as file:
            while size:
                data = os.pread(file.fileno(), min(BLOCK, size), offset)
                if not data:
                    return
                yield data
                offset += len(data)
                size -= len(data)

    def corrupt(self, found: str, name: str) -> CorruptChunkError:
        """Return the error for a chunk that does not decode."""
        msg = f"{found}; the source is damaged, copy it again from where it came from"
        return CorruptChunkError(msg, store=self.store, array=self.array, shard=name)


def inflate_zlib(data: Bytes, size: int) -> Bytes:
    """Decode a zlib stream."""
    try:
        return deflate.zlib_decompress(data, size)
    except deflate.DeflateError as error:
        msg = f"zlib: {error}"
        raise ValueError(msg) from error


def inflate_gzip(data: Bytes, size: int) -> Bytes:
    """Decode a gzip file."""
    try:
        return deflate.gzip_decompress(data, size)
    except deflate.DeflateError as error:
        msg = f"gzip: {error}"
        raise ValueError(msg) from error


def decode_blosc(data: Bytes, size: int) -> Bytes:
    """Decode a blosc buffer."""
    out = np.empty(size, np.uint8)
    decode_blosc_into(data, out)
    return out.data


def decode_blosc_into(data: Bytes, out: np.ndarray) -> None:
    """Decode a blosc buffer to where it is wanted."""
    # blosc believes its header, and would read past the end of a buffer that was cut short.
    if len(data) < 16:
        msg = f"blosc: {len(data)} bytes are less than a header"
        raise ValueError(msg)
    decoded, stored = (int.from_bytes(data[i : i + 4], "little") for i in (4, 12))
    if (decoded, stored) != (out.nbytes, len(data)):
        msg = (
            f"blosc: {len(data)} bytes that claim to be {stored} and to decode to {decoded} "
            f"instead of {out.nbytes}"
        )
        raise ValueError(msg)
    blosc.decompress(data, out)


def decode_zstd(data: Bytes, size: int) -> Bytes:
    """Decode zstd frames."""
    del size
    return zstd.decompress(data)


def decode_lz4(data: Bytes, size: int) -> Bytes:
    """Decode numcodecs' lz4 buffer."""
    del size
    return lz4.decompress(data)


def raw(data: Bytes, size: int) -> Bytes:
    """Return the bytes themselves."""
    del size
    return data


def stream_deflate(blocks: Iterator[bytes], wbits: int) -> Iterator[bytes]:
    """Decode a zlib or gzip stream a piece at a time."""
    decoder = zlib.decompressobj(wbits)
    for block in blocks:
        rest = block
        while rest:
            yield decoder.decompress(rest, BLOCK)
            rest = decoder.unconsumed_tail
    yield decoder.flush()


def stream_zstd(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Decode a zstd stream a piece at a time."""
    with pa.CompressedInputStream(pa.PythonFile(_Readable(blocks), "r"), "zstd") as file:
        while piece := file.read(BLOCK):
            yield piece


class _Readable:
    """A file over blocks of bytes."""

    closed = False

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks, self._rest = blocks, b""

    def read(self, size: int = -1) -> bytes:
        """Return at most `size` bytes; none at the end."""
        if not self._rest:
            self._rest = next(self._blocks, b"")
        data, self._rest = (
            (self._rest, b"") if size < 0 else (self._rest[:size], self._rest[size:])
        )
        return data

    def close(self) -> None:
        """Nothing is open."""
        self.closed = True

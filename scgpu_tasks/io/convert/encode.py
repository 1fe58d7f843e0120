"""Write one file of an array: zstd chunks, the shard index, its checksum."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import google_crc32c
import numpy as np

from scgpu_tasks.io.convert.compress import compress_chunks
from scgpu_tasks.io.convert.gpu_compress import Slabs
from scgpu_tasks.io.convert.layout import Layout

PIECE_BYTES = 2 * 1024 * 1024
_ABSENT = np.uint64(2**64 - 1)
_libc = ctypes.CDLL(None)
_SYNC_FILE_RANGE_WRITE = 2
# Rows start:stop of an array, as they are to be stored.
Rows = Callable[[int, int], np.ndarray]


@dataclass(frozen=True)
class Written:
    """One finished file: bytes on disk, CRC-32C of them, bytes of values in it."""

    size: int
    crc32c: str
    decoded: int


def pieces(layout: Layout, start: int, stop: int) -> list[tuple[int, int]]:
    """Row ranges of about `PIECE_BYTES`, cut at chunk borders, that together are start:stop."""
    row_bytes = max(1, prod(layout.shape[1:]) * layout.itemsize)
    chunk_rows = layout.chunk[0]
    step = max(1, PIECE_BYTES // (row_bytes * chunk_rows)) * chunk_rows
    return [(a, min(a + step, stop)) for a in range(start, stop, step)]


class FileWriter:
    """One file of an array, encoded by one thread or several and put in place by a rename.

    Parameters
    ----------
    target
        Where the file goes; its folder is made.
    scratch
        A name nobody else uses, on the same file system.
    layout, coords
        Of the array; which of its files this is.
    level
        Of zstd.
    rows
        Returns the values; called for one of `pieces` at a time.
    numbers
        Whether they are column numbers.
    """

    most_waiting = 16
    """Encoded pieces that may wait in memory for one before them."""

    def __init__(
        self,
        target: Path,
        scratch: Path,
        layout: Layout,
        coords: tuple[int, ...],
        level: int,
        rows: Rows,
        *,
        numbers: bool = False,
    ) -> None:
        self._target, self._scratch = target, scratch
        self._layout, self._level, self._rows = layout, level, rows
        self._numbers = numbers
        box = layout.box(coords)
        self.pieces = pieces(layout, box[0].start, box[0].stop)
        grid = [-(-f // c) for f, c in zip(layout.file_shape, layout.chunk, strict=True)]
        self._index = np.full((prod(grid), 2), _ABSENT, dtype="<u8")
        self._lock = threading.Lock()
        # Encoded pieces that wait for one before them.
        self._encoded: dict[int, tuple[bytes, list[int], int]] = {}
        self.written = self._chunks = 0
        self._size = self._crc = self._decoded = 0
        self._file = scratch.open("wb")

    def write(self, number: int) -> bool:
        """Encode one of the pieces; it is written once all before it are.

        Returns
        -------
        Whether this was the last piece that was missing.
        """
        values = self._rows(*self.pieces[number])
        nbytes = values.nbytes
        flat = chunk_bytes(values, self._layout)
        del values
        chunk = self._layout.chunk_nbytes
        frames, sizes = compress_chunks(flat, chunk, self._level, numbers=self._numbers)
        with self._lock:
            self._encoded[number] = (frames, sizes, nbytes)
            while self.written in self._encoded:
                self._append(*self._encoded.pop(self.written))
                self.written += 1
            return self.written == len(self.pieces)

    def _append(self, frames: bytes | memoryview, sizes: list[int], nbytes: int) -> None:
        ends = self._size + np.cumsum(sizes)
        part = self._index[self._chunks : self._chunks + len(sizes)]
        part[:, 0], part[:, 1] = ends - sizes, sizes
        self._chunks += len(sizes)
        self._decoded += nbytes
        for at in range(0, len(frames), PIECE_BYTES):
            self._put(bytes(frames[at : at + PIECE_BYTES]))

    def _put(self, data: bytes) -> None:
        self._file.write(data)
        self._size += len(data)
        self._crc = google_crc32c.extend(self._crc, data)

    def finish(self) -> Written:
        """Write the index, and put the complete file in place."""
        if self._layout.shard:
            table = self._index.tobytes()
            self._put(table)
            self._put(google_crc32c.value(table).to_bytes(4, "little"))
        self._file.flush()
        _start_writeback(self._file.fileno())
        self._file.close()
        self._target.parent.mkdir(parents=True, exist_ok=True)
        self._scratch.replace(self._target)
        return Written(self._size, f"{self._crc:08x}", self._decoded)

    def abort(self) -> None:
        """Remove what was written so far."""
        # Closing flushes, which fails again on a full disk.
        with contextlib.suppress(OSError):
            self._file.close()
        self._scratch.unlink(missing_ok=True)


class GpuFileWriter(FileWriter):
    """One file of an array whose chunks a GPU compresses, all at once.

    Parameters
    ----------
    slabs
        Where the pieces are collected.
    target, scratch, layout, coords, level, rows, numbers
        As of `FileWriter`; nvCOMP has no levels.
    """

    most_waiting = 2**31

    def __init__(
        self,
        slabs: Slabs,
        target: Path,
        scratch: Path,
        layout: Layout,
        coords: tuple[int, ...],
        level: int,
        rows: Rows,
        *,
        numbers: bool = False,
    ) -> None:
        self._slabs, self._slab = slabs, slabs.take()
        self._filled, self._returned = 0, False
        try:
            self._slab.begin(layout.file_nbytes // layout.chunk_nbytes, layout.chunk_nbytes)
            super().__init__(target, scratch, layout, coords, level, rows, numbers=numbers)
        except BaseException:
            self._return()
            raise

    def write(self, number: int) -> bool:
        """Collect one of the pieces; the last one has all of them compressed and written.

        Returns
        -------
        Whether this was the last piece that was missing.
        """
        values = self._rows(*self.pieces[number])
        nbytes = values.nbytes
        flat = chunk_bytes(values, self._layout)
        n = len(flat) // self._layout.chunk_nbytes
        first = first_chunk(self._layout, self.pieces[number][0] - self.pieces[0][0])
        self._slab.put(first, flat)
        with self._lock:
            self._decoded += nbytes
            self._filled = max(self._filled, first + n)
            self.written += 1
            if self.written < len(self.pieces):
                return False
        frames, sizes = self._slab.compress(self._filled)
        self._append(frames, sizes, 0)
        self._return()
        return True

    def abort(self) -> None:
        """Remove what was written so far."""
        super().abort()
        self._return()

    def _return(self) -> None:
        with self._lock:
            returned, self._returned = self._returned, True
        if not returned:
            self._slabs.give_back(self._slab)


def _start_writeback(fd: int) -> None:
    """Have the disk begin to write now, so that the last sync finds little left to do."""
    sync_file_range = getattr(_libc, "sync_file_range", None)
    if sync_file_range is not None:
        zero = ctypes.c_int64(0)
        sync_file_range(fd, zero, zero, _SYNC_FILE_RANGE_WRITE)


def first_chunk(layout: Layout, row: int) -> int:
    """Place of the chunk that begins with a row of a file, among the chunks of the file."""
    rest = zip(layout.shape[1:], layout.chunk[1:], strict=True)
    return row // layout.chunk[0] * prod(-(-n // c) for n, c in rest)


def chunk_bytes(values: np.ndarray, layout: Layout) -> np.ndarray:
    """Bytes of the chunks that hold some rows, one after another; zeros beyond the edges."""
    if layout.chunk[1:] != layout.shape[1:] or len(values) % layout.chunk[0]:
        counts = [-(-n // c) for n, c in zip(values.shape, layout.chunk, strict=True)]
        full = np.zeros(
            [n * c for n, c in zip(counts, layout.chunk, strict=True)], values.dtype
        )
        full[tuple(map(slice, values.shape))] = values
        # Axes by turns: place in the grid, place in the chunk.
        turned = full.reshape(
            [n for pair in zip(counts, layout.chunk, strict=True) for n in pair]
        )
        axes = range(2 * len(counts))
        values = turned.transpose(*axes[::2], *axes[1::2])
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)

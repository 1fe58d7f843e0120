"""Write one file of an array: zstd chunks, the shard index, its checksum."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import google_crc32c
import numpy as np
import zstandard

from scgpu_tasks.io.convert.layout import Layout

PIECE_BYTES = 1024 * 1024
_ABSENT = np.uint64(2**64 - 1)
_local = threading.local()
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


def compress(values: bytes | memoryview | np.ndarray, level: int) -> bytes:
    """Return one zstd frame with the content size and a checksum.

    The checksum costs next to nothing, and lets every reader notice a flipped bit that would
    otherwise decode to other values.
    """
    codecs = _local.__dict__.setdefault("codecs", {})
    if level not in codecs:
        codecs[level] = zstandard.ZstdCompressor(level=level, write_checksum=True)
    return codecs[level].compress(values)


def encoder_version() -> str:
    """Name of what decides the stored bytes of equal values."""
    return f"zstd {'.'.join(map(str, zstandard.ZSTD_VERSION))}"


def pieces(layout: Layout, start: int, stop: int) -> list[tuple[int, int]]:
    """Row ranges of about a MiB, cut at chunk borders, that together are start:stop."""
    row_bytes = max(1, prod(layout.shape[1:]) * layout.itemsize)
    chunk_rows = layout.chunk[0]
    step = max(1, PIECE_BYTES // (row_bytes * chunk_rows)) * chunk_rows
    return [(a, min(a + step, stop)) for a in range(start, stop, step)]


def write_file(
    target: Path, scratch: Path, layout: Layout, coords: tuple[int, ...], level: int, rows: Rows
) -> Written:
    """Encode one file of an array and put it in place by a rename.

    Parameters
    ----------
    target
        Where the file goes; its folder is made.
    scratch
        A name nobody else uses, on the same file system.
    rows
        Returns the values; called for about a MiB at a time, in order.
    """
    box = layout.box(coords)
    decoded = 0
    with scratch.open("wb") as file:
        out = _Writer(file.write)
        grid = [-(-f // c) for f, c in zip(layout.file_shape, layout.chunk, strict=True)]
        index = np.full((*grid, 2), _ABSENT, dtype="<u8")
        for start, stop in pieces(layout, box[0].start, box[0].stop):
            values = rows(start, stop)
            decoded += values.nbytes
            frames, place = [], out.size
            for at in range(0, stop - start, layout.chunk[0]):
                part = values[at : at + layout.chunk[0]]
                row = (start + at - box[0].start) // layout.chunk[0]
                for rest in np.ndindex(*grid[1:]):
                    frame = compress(_chunk(part, rest, layout), level)
                    index[(row, *rest)] = (place, len(frame))
                    frames.append(frame)
                    place += len(frame)
            out(b"".join(frames))
        if layout.shard:
            table = index.tobytes()
            out(table)
            out(google_crc32c.value(table).to_bytes(4, "little"))
        file.flush()
        _start_writeback(file.fileno())
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch.replace(target)
    return Written(out.size, f"{out.crc:08x}", decoded)


def _start_writeback(fd: int) -> None:
    """Have the disk begin to write now, so that the last sync finds little left to do."""
    sync_file_range = getattr(_libc, "sync_file_range", None)
    if sync_file_range is not None:
        zero = ctypes.c_int64(0)
        sync_file_range(fd, zero, zero, _SYNC_FILE_RANGE_WRITE)


class _Writer:
    """Counts and checksums what it hands on."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self.size = 0
        self.crc = 0

    def __call__(self, data: bytes) -> None:
        self._write(data)
        self.size += len(data)
        self.crc = google_crc32c.extend(self.crc, data)


def _chunk(part: np.ndarray, rest: tuple[int, ...], layout: Layout) -> np.ndarray:
    """One chunk, contiguous, filled up with zeros at the edges of the array."""
    cut = [slice(i * c, (i + 1) * c) for i, c in zip(rest, layout.chunk[1:], strict=True)]
    values = part[(slice(None), *cut)]
    if values.shape != layout.chunk:
        full = np.zeros(layout.chunk, layout.dtype)
        full[tuple(slice(0, n) for n in values.shape)] = values
        values = full
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def file_crc32c(path: Path) -> tuple[int, str]:
    """Size of a file and CRC-32C of its bytes, in hex."""
    crc = size = 0
    with path.open("rb") as file:
        while block := file.read(PIECE_BYTES):
            crc = google_crc32c.extend(crc, block)
            size += len(block)
    return size, f"{crc:08x}"

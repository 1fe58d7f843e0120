"""Read back what was written, and compare it with the source."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.storage import LocalStore

from scgpu_tasks.errors import CorruptChunkError
from scgpu_tasks.io.arrays import attach_pipeline, host_pipeline
from scgpu_tasks.io.convert.compress import decompress_chunks
from scgpu_tasks.io.convert.encode import chunk_bytes, first_chunk
from scgpu_tasks.io.convert.layout import Layout
from scgpu_tasks.io.convert.progress import Job
from scgpu_tasks.io.convert.values import Values
from scgpu_tasks.io.layout import Refusal, analyse_array, parse_shard_index

# Of a zstd frame: bytes before its descriptor, and the bit of it that announces a checksum.
_HEADER, _HAS_CHECKSUM = 4, 4


class FileCheck:
    """Reads a file back and compares every byte with the source.

    The first rows are read through zarr, as everybody will; the others frame by frame with
    zstd's own library, many at a time without the interpreter's lock, which takes half as long.

    Parameters
    ----------
    values
        What it should hold.
    store
        Folder of the store.
    job
        The file.
    """

    def __init__(self, values: Values, store: Path, job: Job) -> None:
        self._store, self._job = store, job
        self._layout, self._rows = values.plan.array(job.path).layout, values.rows(job.path)
        # A path in a string would be parsed, and may hold a "#".
        self._array: zarr.Array[Any] = zarr.open_array(
            LocalStore(store, read_only=True), path=job.path, mode="r", zarr_format=3
        )
        attach_pipeline(self._array, host_pipeline(self._array))
        self._start = self._layout.box(job.coords)[0].start
        self._table = self._find_chunks()

    def __call__(self, start: int, stop: int) -> None:
        """Compare some rows, from the border of a chunk on; threads may do so at once.

        Raises
        ------
        CorruptChunkError
            They differ: names the array, shard, chunk, position and both values.
        """
        want = self._rows(start, stop)
        if start > self._start and self._has_frames_of(want, start):
            return
        job, store = self._job, self._store
        try:
            found = np.asarray(self._array[start:stop])
        except (RuntimeError, ValueError, OSError) as error:
            msg = f"rows {start}:{stop} cannot be read back ({error}); run the conversion again"
            raise CorruptChunkError(
                msg, store=str(store), array=job.path, shard=job.key
            ) from error
        if not same_bytes(want, found):
            raise _difference(want, found, start, self._layout, store, job)

    def _find_chunks(self) -> np.ndarray | None:
        """Offset and size of each chunk of a shard; None where zarr is to read everything."""
        layout = analyse_array(self._array.metadata)
        if isinstance(layout, Refusal) or not (layout.sharded and layout.index_at_end):
            return None
        n = layout.index_nbytes
        with (self._store / self._job.key).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - n))
            raw = file.read(n)
        place: dict[str, Any] = {
            "store": str(self._store),
            "array": self._job.path,
            "shard": self._job.key,
        }
        table = parse_shard_index(raw, size, layout, **place)
        if table.damage.any():
            msg = "an entry of the shard's index lies outside; run the conversion again"
            raise CorruptChunkError(msg, **place)
        entries = np.stack([table.offset, table.size], axis=1)
        rows = entries[table.size > 0]
        borders = np.append(rows[:, 0], size - n)
        # As they are written: from the start of the file to its index, without a gap.
        in_line = borders[0] == 0 and (borders[1:] == rows.sum(axis=1)).all()
        return entries if in_line else None

    def _has_frames_of(self, want: np.ndarray, start: int) -> bool:
        """Whether these rows are what the frames of their chunks decode to.

        False where that cannot be told: zarr says then what is wrong.
        """
        if self._table is None:
            return False
        wanted, nbytes = chunk_bytes(want, self._layout), self._layout.chunk_nbytes
        first = first_chunk(self._layout, start - self._start)
        rows = self._table[first : first + len(wanted) // nbytes]
        if (rows[:, 1] <= _HEADER).any():
            return False
        begin, length = int(rows[0, 0]), int(rows[:, 1].sum())
        with (self._store / self._job.key).open("rb", buffering=0) as file:
            stored = os.pread(file.fileno(), length, begin)
        # A frame that announces no checksum would be decoded without, and its end be left over.
        heads = np.frombuffer(stored, np.uint8)[rows[:, 0] - begin + _HEADER]
        if len(stored) != length or not (heads & _HAS_CHECKSUM).all():
            return False
        try:
            found = decompress_chunks(stored, rows[:, 1], nbytes)
        except ValueError:
            return False
        parts = wanted.reshape(-1, nbytes)
        return all((part == chunk).all() for part, chunk in zip(parts, found, strict=True))


def same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays are the same to the last bit, so that NaN equals NaN."""
    if a.shape != b.shape or a.dtype.newbyteorder("=") != b.dtype.newbyteorder("="):
        return False
    left, right = np.ascontiguousarray(a), np.ascontiguousarray(b)
    return bool((left.reshape(-1).view(np.uint8) == right.reshape(-1).view(np.uint8)).all())


def _difference(
    want: np.ndarray, found: np.ndarray, start: int, layout: Layout, store: Path, job: Job
) -> CorruptChunkError:
    raw = [np.ascontiguousarray(v).view(f"V{v.dtype.itemsize}") for v in (want, found)]
    place = np.argwhere(raw[0] != raw[1])[0]
    position = (start + int(place[0]), *(int(i) for i in place[1:]))
    chunk = tuple(p // c for p, c in zip(position, layout.chunk, strict=True))
    msg = (
        f"position {', '.join(map(str, position))} holds {found[tuple(place)]!r} instead of "
        f"the source's {want[tuple(place)]!r}; run the conversion again"
    )
    return CorruptChunkError(msg, store=str(store), array=job.path, shard=job.key, chunk=chunk)

"""One request to read: its files, their indices, and the plan made from them.

Files are opened here and indices read on the host; nothing touches a GPU.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import google_crc32c
import numpy as np
from numcodecs.zstd import Zstd
from numpy.typing import NDArray
from zarr.storage._common import StorePath

from scgpu_tasks.errors import CorruptChunkError, StoreError
from scgpu_tasks.io.indices import Stamp, indices
from scgpu_tasks.io.layout import (
    ArrayLayout,
    ChunkTable,
    absent_table,
    parse_shard_index,
    whole_file_table,
)
from scgpu_tasks.io.nvcomp import frame_content_nbytes
from scgpu_tasks.io.plan import Jobs, ReadPlan, make_plan
from scgpu_tasks.io.selection import Ints, select_pieces

MAX_OPEN = 64
"""Files of one request that are kept open; where there are more, each is opened in turn."""

# Threads that plan at once take turns at the interpreter's lock, and all of them begin to read
# only when the last is done; one after another, the first soon keeps disk and decoder busy.
_planning = threading.Lock()


class Handle(Protocol):
    """An open file: ``kvikio.CuFile``, or a Python file."""

    def fileno(self) -> int:
        """Return the file descriptor."""

    def close(self) -> None:
        """Close the file."""


@dataclass
class StoredFile:
    """A shard, or a chunk of an array without shards.

    Parameters
    ----------
    path
        On the local disk.
    store, array, key
        Root of the store, path of the array in it, key of the file below the array.
    stamp
        Version whose index was read; None where the file does not exist.
    """

    path: str
    store: str
    array: str
    key: str
    stamp: Stamp | None = None

    @property
    def place(self) -> dict[str, Any]:
        """Where a damage lies, for CorruptChunkError."""
        return {"store": self.store, "array": self.array, "shard": self.key}


class Request:
    """What one call of ``CodecPipeline.read`` asks for.

    Parameters
    ----------
    layout
        Of the array.
    batch
        zarr's tuples of byte getter, array spec, chunk selection, output selection and flag.
    key_parts
        Number of path components of a chunk key.
    out_shape, out_strides
        Of the output; strides in bytes.
    drop_axes
        Axes that zarr squeezes out.
    opener
        Opens a file by path.

    Attributes
    ----------
    files
        The files, in the order of ``batch``.
    plan
        What to read.

    Raises
    ------
    CorruptChunkError
        A shard index is damaged, or an entry of it that is needed.
    UnsupportedRequestError
        The selection is of an unknown form; the caller falls back.
    """

    def __init__(
        self,
        layout: ArrayLayout,
        batch: Sequence[tuple[Any, ...]],
        key_parts: int,
        out_shape: tuple[int, ...],
        out_strides: tuple[int, ...],
        drop_axes: tuple[int, ...],
        opener: Callable[[str], Handle],
    ) -> None:
        self.layout = layout
        self.files = [_stored_file(item[0], key_parts) for item in batch]
        self._opener = opener
        self._open: dict[int, Handle] = {}
        try:
            tables = [self._table(number) for number in range(len(self.files))]
            with _planning:
                pieces = [
                    select_pieces(layout, item[2], item[3], drop_axes, out_shape, out_strides)
                    for item in batch
                ]
                self.plan: ReadPlan = make_plan(list(zip(pieces, tables, strict=True)))
            self._refuse_damage()
        except BaseException:
            self.close()
            raise
        self.file_sizes: Ints = np.array(
            [0 if f.stamp is None else f.stamp.size for f in self.files], dtype=np.int64
        )

    def handle(self, number: int) -> Handle:
        """Return an open handle of a file, of the version whose index was read."""
        handle = self._open.get(number)
        if handle is None:
            handle = self._open_file(number)
            found = None if handle is None else os.fstat(handle.fileno())
            if handle is None or found is None or _stamp(found) != self.files[number].stamp:
                msg = f"{self.files[number].path} changed while it was read; read it again"
                raise StoreError(msg)
        return handle

    def open_on_host(self) -> None:
        """Open what is not open yet by the operating system alone, which is sooner done."""
        self._opener = _open_unbuffered

    def trim(self) -> None:
        """Close files where the request has too many to keep them all open."""
        if len(self.files) > MAX_OPEN:
            self.close()

    def close(self) -> None:
        """Close all files."""
        handles, self._open = list(self._open.values()), {}
        for handle in handles:
            handle.close()

    def __enter__(self) -> Request:
        """Return itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close all files."""
        self.close()

    def stored_bytes(self, jobs: Jobs, row: int) -> bytes:
        """Read the stored bytes of one chunk on the host."""
        number, size = int(jobs.file[row]), int(jobs.size[row])
        raw = os.pread(self.handle(number).fileno(), size, int(jobs.offset[row]))
        if len(raw) != size:
            msg = f"read {len(raw)} of {size} bytes of a chunk; the file was cut off"
            raise CorruptChunkError(msg, **self.files[number].place)
        return raw

    def decode_on_host(self, jobs: Jobs, row: int, why: str = "") -> NDArray[np.uint8]:
        """Decode one chunk with zstd's own library.

        Parameters
        ----------
        jobs, row
            The chunk.
        why
            Why the GPU refused it, for the message; empty where it was not asked.

        Raises
        ------
        CorruptChunkError
            The host refuses it too.
        """
        raw = self.stored_bytes(jobs, row)
        try:
            return decode_chunk(raw, self.layout)
        except (ValueError, RuntimeError, MemoryError) as error:
            found = f"{why}; {error}" if why else error
            msg = f"a chunk cannot be decoded ({found}); write it again from the source"
            raise self.corrupt(jobs, row, msg) from error

    def corrupt(self, jobs: Jobs, row: int, message: str) -> CorruptChunkError:
        """Return the error that names a chunk."""
        file, layout = self.files[int(jobs.file[row])], self.layout
        inner = np.unravel_index(int(jobs.chunk[row]), layout.grid) if layout.ndim else ()
        outer = [int(part) for part in re.findall(r"\d+", file.key)]
        chunk = tuple(
            o * g + int(i) for o, g, i in zip(outer, layout.grid, inner, strict=False)
        )
        return CorruptChunkError(message, chunk=chunk, **file.place)

    def _table(self, number: int) -> ChunkTable:
        file, layout = self.files[number], self.layout
        # Every call that waits gives up the interpreter's lock, and getting it back from other
        # reads takes longer than the call: a shard whose index is known takes one.
        file.stamp = _stat(file.path)
        if file.stamp is None:
            return absent_table(layout)
        if not layout.sharded:
            return whole_file_table(file.stamp.size, layout)
        known = indices.find(file.path, file.stamp, layout)
        if known is not None:
            return known
        handle = self._open_file(number)
        if handle is None:
            file.stamp = None
            return absent_table(layout)
        fd = handle.fileno()
        file.stamp = _stamp(os.fstat(fd))
        size, n = file.stamp.size, layout.index_nbytes
        raw = os.pread(fd, n, max(size - n, 0) if layout.index_at_end else 0)
        self.trim()
        table = parse_shard_index(raw, size, layout, **file.place)
        indices.keep(file.path, file.stamp, layout, table)
        return table

    def _open_file(self, number: int) -> Handle | None:
        path = self.files[number].path
        try:
            handle = self._opener(path)
        except (OSError, RuntimeError) as error:
            if _stat(path) is None:
                return None
            msg = f"{path} cannot be opened: {error}"
            raise StoreError(msg) from error
        self._open[number] = handle
        return handle

    def _refuse_damage(self) -> None:
        damaged = self.plan.damaged
        if len(damaged) == 0:
            return
        file = self.files[int(damaged.file[0])]
        size = 0 if file.stamp is None else file.stamp.size
        what = "its entry in the shard's index" if self.layout.sharded else "its file"
        msg = (
            f"{what} does not fit a file of {size} bytes with chunks of at most "
            f"{self.layout.max_stored_nbytes}: cut off or damaged; write it again"
        )
        raise self.corrupt(damaged, 0, msg)


def decode_chunk(raw: bytes, layout: ArrayLayout) -> NDArray[np.uint8]:
    """Decode the stored bytes of one chunk on the host.

    Raises
    ------
    ValueError, RuntimeError
        The bytes are damaged.
    """
    if layout.crc32c:
        raw, stored = raw[:-4], int.from_bytes(raw[-4:], "little")
        found = google_crc32c.value(raw)
        if found != stored:
            msg = f"checksum {found:08x}, stored is {stored:08x}"
            raise ValueError(msg)
    if layout.zstd:
        # A frame may come after others that are skipped. What a first one states is not
        # believed: a damaged one could ask for any amount of memory.
        skipped = raw[1:4] == b"\x2a\x4d\x18"
        stated = None if skipped else frame_content_nbytes(raw)
        if stated is not None and stated > layout.chunk_nbytes:
            msg = f"a frame of {stated} bytes for a chunk of {layout.chunk_nbytes}"
            raise ValueError(msg)
        raw = Zstd().decode(raw)
    if len(raw) != layout.chunk_nbytes:
        msg = f"{len(raw)} bytes for a chunk of {layout.chunk_nbytes}"
        raise ValueError(msg)
    return np.frombuffer(raw, dtype=np.uint8)


def _open_unbuffered(path: str) -> Handle:
    return open(path, "rb", buffering=0)  # noqa: PTH123  a Path takes longer than the call


def _stored_file(getter: StorePath, key_parts: int) -> StoredFile:
    parts = getter.path.split("/")
    root = str(getter.store.root)  # type: ignore[attr-defined]
    return StoredFile(
        path=f"{root}/{getter.path}",
        store=root,
        array="/".join(parts[:-key_parts]),
        key="/".join(parts[-key_parts:]),
    )


def _stamp(found: os.stat_result) -> Stamp:
    return Stamp(found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _stat(path: str) -> Stamp | None:
    # As zarr's LocalStore: a directory under a chunk's key is no chunk.
    try:
        found = os.stat(path)  # noqa: PTH116  a Path for every chunk costs more than the call
    except (FileNotFoundError, NotADirectoryError):
        return None
    return None if stat.S_ISDIR(found.st_mode) else _stamp(found)

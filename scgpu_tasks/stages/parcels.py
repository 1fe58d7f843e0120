"""Large results of tasks, handed from worker to client through memory that both can map.

A worker on the client's machine writes its result's arrays to a file in shared memory, and the
client maps it: a matrix of scores then costs one copy, not a trip through two sockets. Where
there is no such memory, or too little, or the worker is on another machine, a result travels as
any other.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import mmap
import os
import pickle
import shutil
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from scgpu_tasks.io.output import write_error

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a folder of its own is made in it
# Smaller results are quicker on their way than a file is made.
MIN_BYTES = 1 << 20
_ALIGN = 64
_PREFIX, _LOCK = "scgpu-", "lock"


@dataclass(frozen=True)
class Parcel:
    """A pickled result whose arrays are in a file, one after the other."""

    pickled: bytes
    path: str
    sizes: tuple[int, ...]


class RowTarget(Protocol):
    """Where tasks may leave rows of a result."""

    def write(self, first: int, rows: np.ndarray) -> bool:
        """Put rows from row `first` on; False where this process cannot."""

    def map(self) -> np.ndarray:
        """Give the array."""


@dataclass(frozen=True)
class LocalArray:
    """An array of this process."""

    array: np.ndarray

    def write(self, first: int, rows: np.ndarray) -> bool:
        """See `RowTarget`."""
        self.array[first : first + len(rows)] = rows
        return True

    def map(self) -> np.ndarray:
        """See `RowTarget`."""
        return self.array


@dataclass(frozen=True)
class SharedArray:
    """An array in shared memory."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def map(self) -> np.ndarray:
        """Map the array; it outlives its file."""
        with Path(self.path).open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), 0)
        return np.frombuffer(mapped, self.dtype, int(np.prod(self.shape))).reshape(self.shape)

    def write(self, first: int, rows: np.ndarray) -> bool:
        """See `RowTarget`."""
        rows = np.ascontiguousarray(rows, self.dtype).reshape(-1)
        at = first * int(np.prod(self.shape[1:])) * self.dtype.itemsize
        skip = at % mmap.ALLOCATIONGRANULARITY
        if not len(rows):
            return True
        try:
            with Path(self.path).open("r+b", buffering=0) as file:
                # Mapped: writes to one file would wait for one another.
                mapped = mmap.mmap(file.fileno(), skip + rows.nbytes, offset=at - skip)
        except FileNotFoundError:
            return False
        np.frombuffer(mapped, self.dtype, len(rows), skip)[:] = rows
        return True


@dataclass(frozen=True)
class FileArray:
    """An array in a ``.npy`` file, which takes no memory while its rows are written.

    The file has another name until it is mapped: one that is half written is none.

    Attributes
    ----------
    path
        The file in the end.
    part
        The file until then.
    offset
        Where the first row begins in it.
    shape, dtype
        Of the array.
    witness
        A file that only processes of the writer's machine see; None: only its own process
        writes. Of two machines that write to a file which they share, one may see old bytes.
    """

    path: str
    part: str
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    witness: str | None = None

    @classmethod
    def create(
        cls, path: str | os.PathLike[str], shape: tuple[int, ...], dtype: Any
    ) -> FileArray:
        """Write a header, and reserve the room for the rows.

        Raises
        ------
        OutputError
            It cannot be written, there is no room, or something else has that name.
        """
        final, dtype = Path(path).absolute(), np.dtype(dtype)
        part = final.with_name(f".{final.name}-{uuid.uuid4().hex}")
        header = {
            "descr": np.lib.format.dtype_to_descr(dtype),
            "fortran_order": False,
            "shape": shape,
        }
        try:
            if final.exists() and not final.is_file():
                raise OSError(errno.EEXIST, "something that is no file has that name")
            with part.open("xb") as file:
                np.lib.format.write_array_header_1_0(file, header)
                offset, size = file.tell(), math.prod(shape) * dtype.itemsize
                file.flush()
                os.posix_fallocate(file.fileno(), offset, max(size, 1))
                file.truncate(offset + size)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise write_error(error, final) from error
        return cls(str(final), str(part), offset, shape, dtype)

    def discard(self) -> None:
        """Remove what was never finished."""
        with contextlib.suppress(OSError):
            Path(self.part).unlink(missing_ok=True)

    def write(self, first: int, rows: np.ndarray) -> bool:
        """See `RowTarget`."""
        if self.witness is not None and not Path(self.witness).exists():
            return False
        values = np.ascontiguousarray(rows, self.dtype)
        left = memoryview(values.reshape(-1).view(np.uint8))
        at = self.offset + first * math.prod(self.shape[1:]) * self.dtype.itemsize
        try:
            with Path(self.part).open("r+b", buffering=0) as file:
                while left:
                    done = os.pwrite(file.fileno(), left, at)
                    left, at = left[done:], at + done
        except OSError as error:
            raise write_error(error, self.path) from error
        return True

    def map(self) -> np.ndarray:
        """Give the file its name, in the place of an older one, and map it, read-only."""
        try:
            Path(self.part).replace(self.path)
        except OSError as error:
            raise write_error(error, self.path) from error
        return np.load(self.path, mmap_mode="r", allow_pickle=False)


class Mailbox:
    """A folder for parcels; deleted with what is left in it when closed.

    `address` is what workers need; None where this machine has no shared memory.
    """

    def __init__(self) -> None:
        self.address: str | None = None
        if SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK):
            _sweep()
            self.address = tempfile.mkdtemp(prefix=_PREFIX, dir=SHARED_MEMORY)
            # Held until this process ends, however it ends.
            self._lock = (Path(self.address) / _LOCK).open("xb")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def open(self, value: Any) -> Any:
        """Unpack a result; one that came without a parcel is handed back as it is."""
        return _unpack(value) if isinstance(value, Parcel) else value

    def send(self, value: Any) -> Any:
        """Make a parcel of something for workers; they may unpack it more than once."""
        return pack(value, self.address)

    def discard(self, value: Any) -> None:
        """Delete a parcel that nobody needs any more."""
        if isinstance(value, Parcel):
            Path(value.path).unlink(missing_ok=True)

    def array(self, shape: tuple[int, ...], dtype: Any) -> SharedArray | None:
        """Make an array that workers on this machine can write to, if there is room."""
        if self.address is None:
            return None
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        path = Path(self.address) / uuid.uuid4().hex
        try:
            with path.open("xb") as file:
                os.posix_fallocate(file.fileno(), 0, max(size, 1))
        except OSError:
            path.unlink(missing_ok=True)
            return None
        return SharedArray(str(path), shape, np.dtype(dtype))

    def reach(self, home: RowTarget) -> RowTarget | None:
        """Let workers on this machine fill an array or a file of this process, if they can."""
        if isinstance(home, FileArray) and self.address is not None:
            return replace(home, witness=str(Path(self.address) / _LOCK))
        return home if isinstance(home, SharedArray) else None

    def close(self) -> None:
        """Delete the folder."""
        if self.address is not None:
            shutil.rmtree(self.address, ignore_errors=True)
            self._lock.close()


def _sweep() -> None:
    """Delete mailboxes whose process was killed."""
    for lock in SHARED_MEMORY.glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError), lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)


def pack(value: Any, address: str | None) -> Any:
    """Make a parcel of a result, if it is large and the mailbox is on this machine."""
    if address is None or not Path(address).is_dir():
        return value
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    views = [buffer.raw() for buffer in buffers]
    sizes = tuple(view.nbytes for view in views)
    if sum(sizes) < MIN_BYTES:
        return value
    path = Path(address) / uuid.uuid4().hex
    try:
        _write(path, views)
    except OSError:
        # Most likely too little shared memory.
        path.unlink(missing_ok=True)
        return value
    return Parcel(pickled, str(path), sizes)


def unpack_sent(value: Any) -> Any:
    """Unpack what `Mailbox.send` made, without consuming it.

    Raises
    ------
    FileNotFoundError
        This process does not see the sender's shared memory.
    """
    return _unpack(value, keep=True) if isinstance(value, Parcel) else value


def _starts(sizes: Sequence[int]) -> list[int]:
    starts = [0]
    for size in sizes:
        starts.append(-(-(starts[-1] + size) // _ALIGN) * _ALIGN)
    return starts


def _write(path: Path, views: Sequence[memoryview]) -> None:
    starts = _starts([view.nbytes for view in views])
    with path.open("xb") as file:
        # Reserved first: writing to shared memory that has run out would be fatal.
        os.posix_fallocate(file.fileno(), 0, max(starts[-1], 1))
        for start, view in zip(starts, views, strict=False):
            file.seek(start)
            file.write(view)


def _unpack(parcel: Parcel, *, keep: bool = False) -> Any:
    starts = _starts(parcel.sizes)
    # What another process may unpack as well must not be changed by this one.
    access = mmap.ACCESS_COPY if keep else mmap.ACCESS_WRITE
    with Path(parcel.path).open("r+b") as file:
        mapped = memoryview(mmap.mmap(file.fileno(), max(starts[-1], 1), access=access))
    if not keep:
        with contextlib.suppress(FileNotFoundError):
            # The mapping lives on until the arrays are gone.
            Path(parcel.path).unlink()
    views = [
        mapped[start : start + size] for start, size in zip(starts, parcel.sizes, strict=False)
    ]
    # Made by a task of our own.
    return pickle.loads(parcel.pickled, buffers=views)  # noqa: S301

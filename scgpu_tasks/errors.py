"""What can go wrong, as exceptions that say what to do.

Each kind is also the built-in kind a caller would expect, so ``except ValueError`` works too.
They pickle, because most of them are raised on a Dask worker.
"""

from __future__ import annotations


class ScgpuError(Exception):
    """Base class of every error that scgpu_tasks raises on purpose."""


class StoreError(ScgpuError, OSError):
    """A store is missing, cannot be opened, or changed while it was read."""


class FormatError(ScgpuError, ValueError):
    """A store or an element in it has a form that this step cannot take."""


class DataError(ScgpuError, ValueError):
    """Values are not what the step needs, such as negative or log-normalised counts."""


class ParameterError(ScgpuError, ValueError):
    """A parameter is out of range, or does not fit this store."""


class OutputError(ScgpuError, OSError):
    """A result cannot be written."""


class ClusterError(ScgpuError, RuntimeError):
    """A Dask cluster cannot be started, reached or kept alive."""


class OutOfMemoryError(MemoryError, ScgpuError):
    """A block does not fit into the memory of a worker or its GPU, however it is cut."""

    # MemoryError first: the other way round Dask cannot unpickle it.


class MissingPackageError(ScgpuError, ImportError):
    """An optional package or a GPU is missing; the message has the ``pip install`` line."""


class CorruptChunkError(ScgpuError, OSError):
    """Stored bytes do not decode to what the metadata promises.

    Parameters
    ----------
    message
        What was expected, what was found, and what to do.
    store
        Path or URL of the store.
    array
        Path of the array in the store, such as ``X/data``.
    shard
        Key of the file that holds the chunk, such as ``c/3``; of the chunk itself where the
        array is not sharded.
    chunk
        Coordinates of the inner chunk in the array's chunk grid, where known.
    """

    def __init__(
        self,
        message: str,
        *,
        store: str = "",
        array: str = "",
        shard: str = "",
        chunk: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.store = store
        self.array = array
        self.shard = shard
        self.chunk = chunk

    def __str__(self) -> str:
        """Message, then the place of the damage."""
        place = [("store", self.store), ("array", self.array), ("shard", self.shard)]
        if self.chunk is not None:
            place.append(("chunk", str(self.chunk)))
        where = ", ".join(f"{name} {value}" for name, value in place if value)
        return f"{self.message} ({where})" if where else self.message

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the place of the damage."""
        state = {"store": self.store, "array": self.array, "shard": self.shard}
        return (_corrupt_chunk, (self.message, state, self.chunk))


def _corrupt_chunk(
    message: str, place: dict[str, str], chunk: tuple[int, ...] | None
) -> CorruptChunkError:
    return CorruptChunkError(message, chunk=chunk, **place)

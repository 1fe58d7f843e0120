"""How a converted array is cut into chunks and shards."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np

CHUNK_BYTES = 256 * 1024
SHARD_BYTES = 128 * 1024 * 1024


@dataclass(frozen=True)
class Layout:
    """Shape, type and cutting of one array of the destination.

    Attributes
    ----------
    shape, dtype
        Of the array; the dtype as NumPy's string, little-endian.
    chunk
        Shape of an inner chunk (of a whole chunk where there are no shards).
    shard
        Shape of a shard, a multiple of `chunk`; None: one chunk holds the array.
    """

    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...]
    shard: tuple[int, ...] | None

    @property
    def itemsize(self) -> int:
        """Bytes of one value."""
        return np.dtype(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array, decoded."""
        return prod(self.shape) * self.itemsize

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Shape of what one file holds."""
        return self.shard or self.chunk

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of one chunk, decoded."""
        return prod(self.chunk) * self.itemsize

    @property
    def file_nbytes(self) -> int:
        """Bytes of a whole file, decoded; those at the edges hold less."""
        return prod(self.file_shape) * self.itemsize

    def files(self) -> list[tuple[int, ...]]:
        """Coordinates of all files, in C order; none for an empty array."""
        if not prod(self.shape):
            return []
        counts = [-(-n // s) for n, s in zip(self.shape, self.file_shape, strict=True)]
        return list(product(*map(range, counts)))

    def box(self, coords: tuple[int, ...]) -> tuple[slice, ...]:
        """Part of the array that one file holds."""
        return tuple(
            slice(c * s, min((c + 1) * s, n))
            for c, s, n in zip(coords, self.file_shape, self.shape, strict=True)
        )

    def file_bytes(self, coords: tuple[int, ...]) -> int:
        """Return the decoded bytes of the part of the array that one file holds."""
        return prod(s.stop - s.start for s in self.box(coords)) * self.itemsize

    def to_json(self) -> dict[str, Any]:
        """All fields."""
        return {
            "shape": list(self.shape),
            "dtype": self.dtype,
            "chunk": list(self.chunk),
            "shard": list(self.shard) if self.shard else None,
        }


def plan_layout(
    shape: tuple[int, ...],
    dtype: np.dtype,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    shard_bytes: int = SHARD_BYTES,
) -> Layout:
    """Cut an array so that chunks and shards have about the sizes asked for.

    Chunks hold whole rows where a row fits into one; shards always do.
    """
    dtype = np.dtype(dtype).newbyteorder("<")
    room = max(1, chunk_bytes // dtype.itemsize)
    chunk: list[int] = []
    for i, n in enumerate(shape):
        rest = prod(shape[i + 1 :])
        chunk.append(min(max(1, n), max(1, room // max(1, rest))))
        room = max(1, room // chunk[-1])
    counts = [-(-n // c) for n, c in zip(shape, chunk, strict=True)]
    if prod(counts) <= 1:
        return Layout(tuple(shape), dtype.str, tuple(chunk), None)
    whole = [n * c for n, c in zip(counts[1:], chunk[1:], strict=True)]
    row_bytes = chunk[0] * prod(whole) * dtype.itemsize
    per_shard = min(counts[0], max(1, shard_bytes // row_bytes))
    return Layout(tuple(shape), dtype.str, tuple(chunk), (per_shard * chunk[0], *whole))


def index_dtype(n: int) -> np.dtype:
    """Return the smallest unsigned type for the numbers 0 to n − 1."""
    for name in ("u1", "u2", "u4"):
        if n <= np.iinfo(name).max + 1:
            return np.dtype(f"<{name}")
    return np.dtype("<u8")


def indptr_dtype(nnz: int) -> np.dtype:
    """int32 where it can count all stored values, else int64; no reader takes less."""
    return np.dtype("<i4") if nnz <= np.iinfo(np.int32).max else np.dtype("<i8")

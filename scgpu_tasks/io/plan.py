"""What one request reads: which chunks, in which extents of which files, and where they go.

Arrays from the shard index to the decoder; nothing here is done once per chunk. Pure NumPy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from scgpu_tasks.io.layout import ChunkTable
from scgpu_tasks.io.selection import Ints, Pieces

PAGE = 4096
"""Extents start and end at multiples of this many bytes, which GPUDirect Storage needs."""

MAX_GAP = 64 * 1024
"""Chunks at most this many bytes apart are read in one go."""

_FAR = 2**43  # larger than any file


@dataclass
class Jobs:
    """Chunks of a request and the walks from each to the output, one row a chunk.

    Parameters
    ----------
    file
        int64 (n,): number of the file among those of the request.
    chunk
        int64 (n,): number of the chunk in its file's grid, C order.
    offset, size
        int64 (n,): where its stored bytes lie in the file; size −1 where it is absent.
    walk
        int64 (n, 3 + 4 × axes): first byte in the decoded chunk, first byte in the output,
        number of elements, then for each axis count, source stride, target stride and first
        table entry or −1. The scatter kernel reads this form, with addresses added.
    whole
        bool (n,): the piece is the whole chunk in the chunk's own byte order.
    """

    file: Ints
    chunk: Ints
    offset: Ints
    size: Ints
    walk: Ints
    whole: NDArray[np.bool_]

    def __len__(self) -> int:
        """Return the number of chunks."""
        return len(self.chunk)

    def take(self, which: slice | NDArray[np.integer] | NDArray[np.bool_]) -> Jobs:
        """Return a selection of rows."""
        return Jobs(
            self.file[which], self.chunk[which], self.offset[which], self.size[which],
            self.walk[which], self.whole[which],
        )  # fmt: skip

    @property
    def axes(self) -> int:
        """Number of axes that every walk has."""
        return (self.walk.shape[1] - 3) // 4


@dataclass
class ReadPlan:
    """All that one request reads.

    Parameters
    ----------
    present
        Chunks to decode, by file and then by offset.
    absent
        Chunks that are not stored: the fill value goes where their walks lead.
    damaged
        Chunks whose entry in the index cannot be true.
    source_table, target_table
        int64: byte offsets for axes selected by index arrays.
    """

    present: Jobs
    absent: Jobs
    damaged: Jobs
    source_table: Ints
    target_table: Ints


def make_plan(parts: Sequence[tuple[Pieces, ChunkTable]]) -> ReadPlan:
    """Join the pieces of a request's files, in the order of its files.

    Parameters
    ----------
    parts
        The pieces of every file and the table of its chunks.
    """
    jobs, damage, n_table = [], [], 0
    for number, (pieces, table) in enumerate(parts):
        jobs.append(_jobs_of(number, pieces, table, n_table))
        damage.append(table.damage[pieces.chunk])
        n_table += len(pieces.source_table)
    joined = _join(jobs)
    damaged = np.concatenate(damage)
    absent = joined.size < 0
    kept = ~(absent | damaged)
    present = joined if kept.all() else joined.take(kept)
    # Shards mostly hold their chunks in order.
    if not _in_order(present):
        present = present.take(np.lexsort((present.offset, present.file)))
    return ReadPlan(
        present=present,
        absent=joined.take(absent),
        damaged=joined.take(damaged),
        source_table=np.concatenate([p.source_table for p, _ in parts]),
        target_table=np.concatenate([p.target_table for p, _ in parts]),
    )


def _join(parts: Sequence[Jobs]) -> Jobs:
    if len(parts) == 1:
        return parts[0]
    names = ("file", "chunk", "offset", "size", "walk", "whole")
    return Jobs(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def _in_order(jobs: Jobs) -> bool:
    place = jobs.file * _FAR + jobs.offset
    return bool((place[1:] >= place[:-1]).all())


def _jobs_of(number: int, pieces: Pieces, table: ChunkTable, n_table: int) -> Jobs:
    n, axes = pieces.count.shape
    walk = np.empty((n, 3 + 4 * axes), dtype=np.int64)
    walk[:, 0], walk[:, 1] = pieces.source, pieces.target
    walk[:, 2] = pieces.count.prod(axis=1)
    walk[:, 3::4] = pieces.count
    walk[:, 4::4] = pieces.source_stride
    walk[:, 5::4] = pieces.target_stride
    walk[:, 6::4] = np.where(pieces.table < 0, -1, pieces.table + n_table)
    return Jobs(
        file=np.full(n, number, dtype=np.int64),
        chunk=pieces.chunk,
        offset=table.offset[pieces.chunk],
        size=table.size[pieces.chunk],
        walk=walk,
        whole=pieces.whole,
    )


@dataclass
class Extents:
    """Stretches of files that hold the chunks of one batch, and where they go in a buffer.

    Parameters
    ----------
    file, start, length, position
        int64, one entry an extent: file number, bytes in the file, first byte in the buffer.
    chunk_position
        int64, one entry a chunk: where its stored bytes begin in the buffer.
    nbytes
        Size of the buffer.
    """

    file: Ints
    start: Ints
    length: Ints
    position: Ints
    chunk_position: Ints
    nbytes: int

    def __iter__(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield (file, start, length, position) of every extent as integers."""
        columns = (self.file, self.start, self.length, self.position)
        return zip(*(c.tolist() for c in columns), strict=True)


def find_extents(jobs: Jobs, file_sizes: Ints, *, max_gap: int = MAX_GAP) -> Extents:
    """Return the extents to read for chunks that are sorted by file and offset.

    Parameters
    ----------
    jobs
        Chunks that are present; at least one.
    file_sizes
        Size in bytes of every file of the request; no extent goes past the end.
    max_gap
        Chunks of one file at most this many bytes apart share an extent.
    """
    first = jobs.file * _FAR + jobs.offset
    reach = np.maximum.accumulate(first + jobs.size)
    new = np.flatnonzero(np.concatenate(([True], first[1:] > reach[:-1] + max_gap)))
    last = np.append(new[1:], len(jobs)) - 1
    file = jobs.file[new]
    start = jobs.offset[new] // PAGE * PAGE
    stop = -(-(reach[last] - file * _FAR) // PAGE) * PAGE
    length = np.minimum(stop, file_sizes[file]) - start
    padded = -(-length // PAGE) * PAGE
    position = np.cumsum(padded) - padded
    extent = np.repeat(np.arange(len(new)), np.diff(np.append(new, len(jobs))))
    return Extents(
        file=file,
        start=start,
        length=length,
        position=position,
        chunk_position=position[extent] + jobs.offset - start[extent],
        nbytes=int(padded.sum()),
    )


def cut_batches(n: int, most: int, first: int = 0) -> list[slice]:
    """Cut ``n`` chunks into batches of at most ``most``, evenly after a first of ``first``."""
    first = min(first, most, n)
    batches = -(-(n - first) // most)
    edges = [first + (n - first) * i // batches for i in range(batches + 1)] if batches else [n]
    return [slice(a, b) for a, b in pairwise([0, *edges] if first else edges)]

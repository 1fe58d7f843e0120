"""Spans of blocks, and what one task does with the blocks of its span."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from scgpu_tasks.kernels.rows import Rows
from scgpu_tasks.stages import resident
from scgpu_tasks.stages.sources import BlockSource, block_rows

# At most about twice as many spans, however long the matrix.
_SPANS = 64
# Rows that a CPU reads at a time.
_PIECE_ROWS = 10_000
# On GPUs a span's results cross to the host, and blocks are large already.
_GPU_SPANS = 28


@dataclass(frozen=True)
class Span:
    """Consecutive blocks that one task visits."""

    number: int
    bounds: tuple[int, ...]

    @property
    def start(self) -> int:
        """First row."""
        return self.bounds[0]

    @property
    def stop(self) -> int:
        """Row after the last."""
        return self.bounds[-1]

    @property
    def n_blocks(self) -> int:
        """Number of blocks."""
        return len(self.bounds) - 1


class SpanTask(Protocol):
    """Work on the blocks of one span; picklable, with no more data than the span needs."""

    prefer: str | None
    """Address of the worker that had better run it, if any."""

    def recall(self) -> bool:
        """Do the work on rows that an earlier task held; False if they must be read."""

    def visit(self, rows: Rows, start: int) -> None:
        """Take in rows that begin at row `start` of the matrix."""

    def result(self) -> Any:
        """Hand over what was made of the rows, once all were visited."""


@dataclass
class Visit:
    """What a task hands back: its result, what it read, and which worker ran it."""

    value: Any
    rows_read: int
    stored_bytes: int
    where: str | None = None


def spans_of(source: BlockSource) -> list[Span]:
    """Spans of a matrix; they depend on its blocks only."""
    bounds = [int(bound) for bound in source.bounds]
    n_blocks = len(bounds) - 1
    length = max(1, n_blocks // (_GPU_SPANS if on_gpu(source) else _SPANS))
    firsts = range(0, n_blocks, length)
    return [
        Span(number, tuple(bounds[first : min(first + length, n_blocks) + 1]))
        for number, first in enumerate(firsts)
    ]


def run_span(
    source: BlockSource, span: Span, task: SpanTask, *blocks: Any, keep: bool = False
) -> Visit:
    """Visit the blocks of a span; on a worker, or in a thread.

    Parameters
    ----------
    blocks
        The span's blocks, where they are computed already; else `source` reads them, unless
        they are kept on this process's GPU.
    keep
        Whether to keep blocks on the GPU, as far as there is room.
    """
    stored = 0
    with _stream(source):
        if task.recall():
            return Visit(task.result(), 0, 0)
        matrix = resident.identity(source) if on_gpu(source) else None
        n_read = 0
        for i, (start, stop) in enumerate(_pieces(source, span)):
            place = resident.Place(matrix, start, stop) if matrix else None
            with _naming_rows(start, stop):
                pieces = resident.find(place) if place else None
                if pieces is None:
                    block = blocks[i] if blocks else source.read(start, stop)
                    n_read += stop - start
                    stored += int(getattr(block, "stored_bytes", 0))
                    pieces = block_rows(block, source.shape[1])
                    del block
                    if keep and place:
                        resident.keep(place, pieces)
                _visit(task, pieces, start)
                del pieces
        return Visit(task.result(), n_read, stored)


def _pieces(source: BlockSource, span: Span) -> list[tuple[int, int]]:
    """Rows to read at a time: a block; on a CPU less, where any rows can be read.

    A smaller piece costs nothing there: one read keeps all cores decoding anyway.
    """
    blocks = list(itertools.pairwise(span.bounds))
    if on_gpu(source) or not getattr(source, "any_rows", True):
        return blocks
    pieces: list[tuple[int, int]] = []
    for start, stop in blocks:
        n = max(1, -(-(stop - start) // _PIECE_ROWS))
        cuts = [start + (stop - start) * i // n for i in range(n + 1)]
        pieces += itertools.pairwise(cuts)
    return pieces


def _visit(task: SpanTask, pieces: Sequence[Rows], start: int) -> None:
    for rows in pieces:
        task.visit(rows, start)
        start += rows.n_rows


def on_gpu(source: BlockSource) -> bool:
    """Tell whether a source reads its blocks to a GPU."""
    return getattr(source, "device", "cpu") == "gpu"


def _stream(source: BlockSource) -> contextlib.AbstractContextManager[Any]:
    """Give the thread a stream of its own, where blocks are read to a GPU."""
    if not on_gpu(source):
        return contextlib.nullcontext()
    from scgpu_tasks.kernels._gpu.streams import own_stream

    return own_stream()


@contextlib.contextmanager
def _naming_rows(start: int, stop: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"in rows {start}:{stop} of the matrix")
        raise

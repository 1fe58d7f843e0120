"""Spans of blocks, and what one task does with the blocks of its span."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from scgpu_tasks.kernels.rows import Rows
from scgpu_tasks.stages import resident
from scgpu_tasks.stages.short_memory import with_less
from scgpu_tasks.stages.sources import BlockSource, block_rows
from scgpu_tasks.stages.timing import Watch

# Bytes of a value and its column number.
_VALUE_BYTES = 8
# At most about twice as many spans, however long the matrix.
_SPANS = 64
# Rows that a CPU reads at a time.
_PIECE_ROWS = 10_000
# On GPUs a span's results cross to the host, among them a Gram matrix. This suits the threads
# of one, two and four GPUs.
_GPU_SPANS = 16


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
    seconds: dict[str, float] = field(default_factory=dict)


def spans_of(source: BlockSource) -> list[Span]:
    """Spans of a matrix; they depend on its blocks only."""
    bounds = [int(bound) for bound in source.bounds]
    n_blocks = len(bounds) - 1
    if on_gpu(source):
        n = min(_GPU_SPANS, n_blocks)
        cuts = [n_blocks * i // n for i in range(n + 1)] if n else [0]
        return [
            Span(i, tuple(bounds[a : b + 1]))
            for i, (a, b) in enumerate(itertools.pairwise(cuts))
        ]
    length = max(1, n_blocks // _SPANS)
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
    watch = Watch()
    with _stream(source):
        if task.recall():
            watch.lap("computing")
            value = task.result()
            watch.lap("handing over")
            return Visit(value, 0, 0, seconds=watch.seconds)
        visitor = _Visitor(source, task, watch, keep=keep)
        for i, (start, stop) in enumerate(_pieces(source, span)):
            with _naming_rows(start, stop):
                if blocks:
                    visitor.visit(start, stop, blocks[i])
                else:
                    visitor.read(start, stop)
        value = task.result()
        watch.lap("handing over")
        return Visit(value, visitor.n_read, visitor.stored, seconds=watch.seconds)


class _Visitor:
    """Takes a task through the rows of its span."""

    def __init__(
        self, source: BlockSource, task: SpanTask, watch: Watch, *, keep: bool
    ) -> None:
        self.source, self.task, self.watch, self.keep = source, task, watch, keep
        self.on_gpu = on_gpu(source)
        self.matrix = resident.identity(source) if self.on_gpu else None
        self.n_read = self.stored = 0

    def read(self, start: int, stop: int) -> None:
        """Visit rows that must be read; on a GPU that is short of memory, part by part."""
        if not self.on_gpu:
            self._read(start, stop)
            return
        try:
            self._read(start, stop)
        except MemoryError:
            short = True
        else:
            short = False
        # Out of the handler, whose traceback holds on to the block.
        if short:
            can_cut = bool(getattr(self.source, "any_rows", True))
            self.keep = False
            size = self._bytes(start, stop)
            with_less(self._read, start, stop, can_cut=can_cut, n_bytes=size)

    def _read(self, start: int, stop: int) -> None:
        place = resident.Place(self.matrix, start, stop) if self.matrix else None
        kept = resident.find(place) if place else None
        if kept is not None:
            _visit(self.task, kept, start)
            self.watch.lap("computing")
            return
        block = self.source.read(start, stop)
        self.watch.lap("reading")
        self.visit(start, stop, block)

    def visit(self, start: int, stop: int, block: Any) -> None:
        """Visit a block that was read."""
        stored = int(getattr(block, "stored_bytes", 0))
        pieces = block_rows(block, self.source.shape[1])
        del block
        if self.keep and self.matrix:
            resident.keep(resident.Place(self.matrix, start, stop), pieces)
        _visit(self.task, pieces, start)
        self.n_read += stop - start
        self.stored += stored
        self.watch.lap("computing")

    def _bytes(self, start: int, stop: int) -> int:
        n_rows, n_cols = self.source.shape
        stored = getattr(self.source, "nnz", None) or n_rows * n_cols
        return int(stored * (stop - start) / max(n_rows, 1)) * _VALUE_BYTES


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

"""Spans of blocks, and what one task does with the blocks of its span."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from scgpu_tasks.errors import OutOfMemoryError
from scgpu_tasks.kernels.rows import Rows
from scgpu_tasks.stages import resident
from scgpu_tasks.stages.host_memory import current_worker, free_memory
from scgpu_tasks.stages.short_memory import Need, with_less
from scgpu_tasks.stages.sources import BlockSource, block_rows
from scgpu_tasks.stages.timing import Watch

# Bytes of a value and its column number.
_VALUE_BYTES = 8
# At most about twice as many spans, however long the matrix.
_SPANS = 64
# Rows that a CPU reads at a time.
_PIECE_ROWS = 10_000
# Memory that a CPU needs for rows while it reads and visits them, as a multiple of their
# decoded size: stored bytes, decoded chunks, values and columns in other types.
_PIECE_ROOM = 2
_LEAST_ROOM = 1 << 24
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
    cut: int = 0
    """Blocks that did not fit into memory, and were worked on in parts."""
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
    source: BlockSource,
    span: Span,
    task: SpanTask,
    *blocks: Any,
    keep: bool = False,
    parts: int = 1,
    check: Callable[[], None] | None = None,
) -> Visit:
    """Visit the blocks of a span; on a worker, or in a thread.

    Parameters
    ----------
    blocks
        The span's blocks, where they are computed already; else `source` reads them, unless
        they are kept on this process's GPU.
    keep
        Whether to keep blocks on the GPU, as far as there is room.
    parts
        Into how many parts to cut each block, where it can be cut.
    check
        Called before each read; raises where there is no use in going on.
    """
    watch = Watch()
    with _stream(source):
        if task.recall():
            watch.lap("computing")
            value = task.result()
            watch.lap("handing over")
            return Visit(value, 0, 0, seconds=watch.seconds)
        visitor = _Visitor(source, task, watch, keep=keep)
        pieces = _pieces(source, span, parts)
        for i, (start, stop) in enumerate(pieces):
            if check is not None:
                check()
            with _naming_rows(start, stop):
                if blocks:
                    visitor.visit(start, stop, blocks[i])
                else:
                    visitor.read(start, stop)
        value = task.result()
        watch.lap("handing over")
        n_cut = visitor.cut or (
            span.n_blocks if parts > 1 and len(pieces) > span.n_blocks else 0
        )
        return Visit(value, visitor.n_read, visitor.stored, None, n_cut, watch.seconds)


class _Visitor:
    """Takes a task through the rows of its span."""

    def __init__(
        self, source: BlockSource, task: SpanTask, watch: Watch, *, keep: bool
    ) -> None:
        self.source, self.task, self.watch, self.keep = source, task, watch, keep
        self.on_gpu = on_gpu(source)
        self.matrix = resident.identity(source) if self.on_gpu else None
        self.n_read = self.stored = self.cut = 0
        self._visiting = False

    def read(self, start: int, stop: int) -> None:
        """Visit rows that must be read; where memory is short, part by part."""
        try:
            self._read(start, stop)
        except MemoryError as error:
            if self._visiting and not self.on_gpu:
                # A visit on a CPU may have added some of the rows already.
                raise OutOfMemoryError(self._need(start, stop).advice(error)) from error
            short = True
        else:
            short = False
        # Out of the handler, whose traceback holds on to the block.
        if short:
            can_cut = bool(getattr(self.source, "any_rows", True))
            self.keep = False
            parts = with_less(self._read, self._need(start, stop), can_cut=can_cut)
            self.cut += parts > 1

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
        self._visiting = True
        _visit(self.task, pieces, start)
        self._visiting = False
        self.n_read += stop - start
        self.stored += stored
        self.watch.lap("computing")

    def _need(self, start: int, stop: int) -> Need:
        nnz = _nnz(self.source, start, stop)
        return Need(start, stop, nnz, nnz * _VALUE_BYTES, self.on_gpu)


def _nnz(source: BlockSource, start: int, stop: int) -> int:
    """Count stored values of some rows: of a store's whole blocks exactly, else their share."""
    offsets = getattr(source, "offsets", None)
    if offsets is not None and len(offsets):
        at = np.interp([start, stop], source.bounds, offsets)
        return round(float(at[1] - at[0]))
    n_rows, n_cols = source.shape
    stored = getattr(source, "nnz", None) or n_rows * n_cols
    return int(stored * (stop - start) / max(n_rows, 1))


def _pieces(source: BlockSource, span: Span, parts: int) -> list[tuple[int, int]]:
    """Rows to read at a time: a block; on a CPU less, where any rows can be read.

    A smaller piece costs nothing there: one read keeps all cores decoding anyway.
    """
    blocks = list(itertools.pairwise(span.bounds))
    if not getattr(source, "any_rows", True) or (on_gpu(source) and parts == 1):
        return blocks
    pieces: list[tuple[int, int]] = []
    room = None if on_gpu(source) else _room_for_a_piece()
    for start, stop in blocks:
        n = parts
        if room is not None:
            needed = _PIECE_ROOM * _VALUE_BYTES * _nnz(source, start, stop)
            n *= max(-(-(stop - start) // _PIECE_ROWS), -(-needed // room), 1)
        n = min(n, max(stop - start, 1))
        cuts = [start + (stop - start) * i // n for i in range(n + 1)]
        pieces += itertools.pairwise(cuts)
    return pieces


def _room_for_a_piece() -> int:
    """Memory that one thread may take for rows under way."""
    worker = current_worker()
    threads = 1 if worker is None else worker.state.nthreads
    return max(3 * free_memory() // (4 * threads), _LEAST_ROOM)


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

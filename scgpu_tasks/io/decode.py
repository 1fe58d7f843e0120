"""Serve a request on a GPU: read, check, decode and place chunks, batch by batch.

For every batch of chunks: KvikIO reads their extents into device memory; one upload brings
pointers, sizes and walks; then on one stream the frames are checked, decoded by nvCOMP, judged,
and scattered where they are not wanted whole. The next batch is read meanwhile, and decoded on
a stream of its own: the host waits only for files and for verdicts. A request of a few chunks
is decoded on the host, which takes a fraction of the decoder's latency.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scgpu_tasks.errors import ClusterError, FormatError, StoreError
from scgpu_tasks.io import gpu_packages, nvcomp, scratch
from scgpu_tasks.io.counters import ArrayCounts
from scgpu_tasks.io.gpu_packages import load_cupy
from scgpu_tasks.io.layout import ArrayLayout
from scgpu_tasks.io.plan import Extents, Jobs, cut_batches, find_extents
from scgpu_tasks.io.request import Request
from scgpu_tasks.io.scratch import Reader, Slot
from scgpu_tasks.io.selection import UnsupportedRequestError

VERDICTS = {
    2: "the CRC-32C of its stored bytes differs",
    4: "no single zstd frame that states the size of a chunk",
    8: "the blocks of its zstd frame contradict each other",
    16: "nvCOMP refused it",
    32: "nvCOMP decoded another number of bytes",
    64: "the checksum of its decoded bytes differs",
}
"""Bits of a verdict, as ``chunks.cu`` sets them."""

_TO_DEVICE, _TO_HOST = 1, 2
_THREADS = 256
_LEAST_FIRST = 256  # chunks of a first batch; fewer take the decoder as long
_SLACK = 65536  # bytes after the last chunk, for a decoder that looks past a damaged one
_IN_FLIGHT = 256  # extents that are read at the same time; each may be a file of its own


def execute(
    open_request: Callable[[Callable[[str], Any]], Request],
    target: Any,
    ready: Any,
    *,
    strict: bool,
) -> tuple[Request, ArrayCounts]:
    """Serve a request.

    Parameters
    ----------
    open_request
        Makes the request, given a function that opens files.
    target
        CuPy array to read into, any strides.
    ready
        Event after which it may be written; None: it may now.
    strict
        Whether a chunk that only the host can decode is an error.

    Returns
    -------
    The request, and how many chunks and bytes took which path. All of ``target`` is written
    when this returns.

    Raises
    ------
    CorruptChunkError
        Stored bytes are damaged.
    StoreError
        A file cannot be read, or changed meanwhile.
    UnsupportedRequestError
        Not for the GPU after all; the caller falls back.
    FormatError
        In strict mode, where a chunk had to be decoded on the host.
    ClusterError
        The decoder hangs, now or since an earlier read of this process.
    """
    cp = load_cupy()
    with cp.cuda.Device(target.device.id):
        pool = scratch.pool_of(target.device.id)
        step = nvcomp.load().alignments.input
        if step > 1:
            # Chunks lie at any byte of a shard.
            msg = f"a decoder that takes chunks only at multiples of {step} bytes"
            raise UnsupportedRequestError(msg)
        with open_request(gpu_packages.open_file) as request, pool.borrow() as reader:
            for slot in reader.slots if ready is not None else ():
                slot.stream.wait_event(ready)
            # What is allocated below belongs to the first slot's stream.
            with reader.slots[0].stream:
                counts = _Run(request, target, reader, pool.batch_bytes).run(strict=strict)
        return request, counts


class _Run:
    """One request on one reader."""

    def __init__(self, request: Request, target: Any, reader: Reader, batch_bytes: int) -> None:
        self.request, self.layout, self.plan = request, request.layout, request.plan
        self.reader, self.target = reader, target
        self.base = int(target.data.ptr)
        self.counts = ArrayCounts()
        self.refused: list[tuple[Jobs, NDArray[np.uint8]]] = []
        most = max(1, batch_bytes // self.layout.chunk_nbytes)
        most = min(most, gpu_packages.settings().batch_chunks)
        n, first = len(self.plan.present), 0
        # Where nothing keeps the decoder busy, it begins on a part while more is read.
        if n > 2 * _LEAST_FIRST and not scratch.is_decoding(reader.device):
            first = max(_LEAST_FIRST, min(n, most) // 4)
        self.batches = cut_batches(n, most, first)
        self.tables = self._upload_tables()
        self.fill = _fill_words(self.layout)

    def run(self, *, strict: bool) -> ArrayCounts:
        """Read all batches, then what the GPU refused."""
        self._fill_absent()
        n = len(self.plan.present)
        if self.layout.zstd and n <= gpu_packages.settings().small_request:
            self._read_small()
        else:
            self._read_batches()
        if self.refused:
            self._decode_refused(strict=strict)
        self.reader.synchronize()
        self.counts.absent_chunks = len(self.plan.absent)
        self.counts.gpu_bytes = self.counts.gpu_chunks * self.layout.chunk_nbytes
        return self.counts

    def _read_batches(self) -> None:
        slots = self.reader.slots
        waiting: list[tuple[Slot, Jobs] | None] = [None] * len(slots)
        for i, batch in enumerate(self.batches):
            which = i % len(slots)
            slot, jobs = slots[which], self.plan.present.take(batch)
            self._collect(waiting[which])
            waiting[which] = None
            extents = find_extents(jobs, self.request.file_sizes)
            self._read(extents, slot)
            self._launch(jobs, extents, slot)
            waiting[which] = (slot, jobs)
        for pending in waiting:
            self._collect(pending)

    def _read_small(self) -> None:
        """Read and decode a few chunks on the host, copy them once, and place them there."""
        jobs, nbytes = self.plan.present, self.layout.chunk_nbytes
        n, slot = len(jobs), self.reader.slots[0]
        if n == 0:
            return
        self.request.open_on_host()
        room = n * nbytes + 7 & ~7
        pinned = slot.upload.reserve(room + jobs.walk.nbytes)
        for row in range(n):
            chunk = self.request.decode_on_host(jobs, row)
            pinned[row * nbytes : (row + 1) * nbytes] = chunk
        self.request.trim()
        self.counts.small_chunks += n
        start = int(pinned.ctypes.data)
        runs = _runs(jobs, self.layout)
        if runs is not None:
            for row, (source, target, length) in enumerate(runs):
                self._copy(self.base + target, start + row * nbytes + source, length, slot)
            return
        base = int(slot.decoded.reserve(room + jobs.walk.nbytes, slot.stream).data.ptr)
        walk = np.array(jobs.walk, order="C")
        walk[:, 0] += base + np.arange(n) * nbytes
        walk[:, 1] += self.base
        pinned[room : room + walk.nbytes] = walk.reshape(-1).view(np.uint8)
        self._copy(base, start, room + walk.nbytes, slot)
        self._scatter(base + room, walk)

    def _copy(self, target: int, source: int, nbytes: int, slot: Slot) -> None:
        runtime = load_cupy().cuda.runtime
        runtime.memcpyAsync(target, source, nbytes, _TO_DEVICE, slot.stream.ptr)

    def _read(self, extents: Extents, slot: Slot) -> None:
        """Read the extents into the slot's device memory, many at the same time."""
        memory = slot.stored.reserve(extents.nbytes + _SLACK, slot.stream)
        parts, task = list(extents), gpu_packages.io_task(extents.nbytes)
        for first in range(0, len(parts), _IN_FLIGHT):
            self._read_parts(parts[first : first + _IN_FLIGHT], memory, task)
            self.request.trim()
        self.counts.gpu_stored_bytes += int(extents.length.sum())

    def _read_parts(
        self, parts: Sequence[tuple[int, int, int, int]], memory: Any, task: int
    ) -> None:
        futures, errors = [], []
        try:
            for file, start, length, position in parts:
                part = memory[position : position + length]
                handle: Any = self.request.handle(file)
                futures.append((handle.pread(part, length, start, task), file, length))
        finally:
            # Every read that was begun must end before the memory is used for anything else.
            for future, file, length in futures:
                try:
                    got = future.get()
                except (OSError, RuntimeError) as error:
                    errors.append((file, str(error)))
                else:
                    if got != length:
                        errors.append((file, f"{got} of {length} bytes were read"))
        if errors:
            file, what = errors[0]
            msg = f"{self.request.files[file].path} cannot be read: {what}"
            raise StoreError(msg)

    def _launch(self, jobs: Jobs, extents: Extents, slot: Slot) -> None:
        """Enqueue checks, decoding, verdicts and placing of one batch."""
        with slot.stream:
            self._enqueue(jobs, extents, slot)

    def _enqueue(self, jobs: Jobs, extents: Extents, slot: Slot) -> None:
        layout, n, stream = self.layout, len(jobs), slot.stream
        sources = extents.chunk_position + int(slot.stored.reserve(0, stream).data.ptr)
        sizes = jobs.size - (4 if layout.crc32c else 0)
        walk = jobs.walk.copy()
        walk[:, 1] += self.base
        if layout.zstd:
            targets = walk[:, 1].copy()
            partial = ~jobs.whole | (targets % self.reader.nvcomp.alignments.output != 0)
            if partial.any():
                k = int(partial.sum())
                room = slot.decoded.reserve(k * layout.chunk_nbytes, stream)
                targets[partial] = int(room.data.ptr) + np.arange(k) * layout.chunk_nbytes
            walk[:, 0] += targets
            walk = walk[partial]
        else:
            targets = np.empty(0, dtype=np.int64)
            walk[:, 0] += sources
        capacity = np.full(n, layout.chunk_nbytes)
        at = self._upload([sources, sizes, capacity, targets, walk], slot, n)
        self._check(at, n, int(jobs.size.max()), slot)
        if layout.zstd:
            self._decode(at, n, slot)
        if layout.zstd or layout.crc32c:
            verdict = slot.verdict.reserve(n)
            load_cupy().cuda.runtime.memcpyAsync(
                verdict.ctypes.data, at["verdict"], n, _TO_HOST, stream.ptr
            )
        self._scatter(at["walk"], walk)
        stream.record(slot.done)

    def _upload(self, arrays: Sequence[NDArray[Any]], slot: Slot, n: int) -> dict[str, int]:
        """Copy the arrays of a batch to the device in one go; return where they begin.

        After them lie the arrays that only the device writes.
        """
        names = ("source", "size", "capacity", "target", "walk")
        flat = [np.ascontiguousarray(a, dtype=np.int64).reshape(-1) for a in arrays]
        total = sum(a.nbytes for a in flat)
        pinned = slot.upload.reserve(total)[:total].view(np.int64)
        np.concatenate(flat, out=pinned)
        memory = slot.arrays.reserve(total + 49 * n + 64, slot.stream)
        base = int(memory.data.ptr)
        self._copy(base, int(pinned.ctypes.data), total, slot)
        at, position = {}, base
        for name, array in zip(names, flat, strict=True):
            at[name] = position
            position += array.nbytes
        for name, width in (
            ("actual", 8),
            ("lanes", 32),
            ("status", 4),
            ("crc", 4),
            ("verdict", 1),
        ):
            at[name] = position
            position += width * n
        return at

    def _check(self, at: dict[str, int], n: int, max_stored: int, slot: Slot) -> None:
        """Enqueue what can be known of the stored bytes before they are decoded."""
        layout, reader = self.layout, self.reader
        crc = at["crc"] if layout.crc32c else 0
        if layout.crc32c:
            reader.nvcomp.crc32c(
                at["source"], at["size"], n, max_stored, at["crc"], slot.stream.ptr
            )
        pointers = tuple(np.uint64(p) for p in (at["source"], at["size"], at["verdict"], crc))
        if layout.zstd:
            spare = np.uint64(reader.spare.data.ptr), np.uint64(reader.spare.nbytes)
            content = np.uint64(layout.chunk_nbytes)
            # Every frame takes a course of its own: threads of one warp would wait for each
            # other.
            reader.kernels.check_frames((n,), (1,), (*pointers, np.uint32(n), content, *spare))
        elif layout.crc32c:
            reader.kernels.check_crcs((-(-n // 32),), (32,), (*pointers, np.uint32(n)))

    def _decode(self, at: dict[str, int], n: int, slot: Slot) -> None:
        layout, reader = self.layout, self.reader
        nbytes = reader.nvcomp.decode_temp_nbytes(n, layout.chunk_nbytes, slot.stream.ptr)
        temp = slot.temp.reserve(max(nbytes, 8), slot.stream)
        reader.nvcomp.decode(
            at["source"], at["size"], at["capacity"], at["actual"], n, int(temp.data.ptr),
            nbytes, at["target"], at["status"], slot.stream.ptr,
        )  # fmt: skip
        count, content = np.uint32(n), np.uint64(layout.chunk_nbytes)
        names = ("source", "size", "target", "actual", "status", "verdict", "lanes")
        pointers = tuple(np.uint64(at[name]) for name in names)
        reader.kernels.hash_lanes((-(-n // 8),), (32,), (*pointers[2:], count, content))
        reader.kernels.judge((-(-n // 32),), (32,), (*pointers, count, content))

    def _scatter(self, address: int, walk: NDArray[np.int64]) -> None:
        """Enqueue the moves of all jobs at this address; ``walk`` is their host copy."""
        n = len(walk)
        if n == 0:
            return
        blocks = -(-int(walk[:, 2].max()) // (_THREADS * 4))
        self.reader.kernels.scatter(
            (min(blocks, 256), min(n, 65535)),
            (_THREADS,),
            (
                np.uint64(address),
                np.uint32(n),
                np.uint32((walk.shape[1] - 3) // 4),
                *(np.uint64(t.data.ptr if t is not None else 0) for t in self.tables),
                np.uint32(self.layout.dtype.itemsize),
                *self.fill,
            ),
        )

    def _upload_tables(self) -> tuple[Any, Any]:
        if len(self.plan.source_table) == 0:
            return None, None
        cp = load_cupy()
        tables = cp.asarray(self.plan.source_table), cp.asarray(self.plan.target_table)
        # Both slots read them.
        self.reader.slots[0].stream.synchronize()
        return tables

    def _fill_absent(self) -> None:
        """Enqueue the fill value for all chunks that are not stored."""
        if len(self.plan.absent) == 0:
            return
        walk = self.plan.absent.walk.copy()
        walk[:, 0] = 0
        walk[:, 1] += self.base
        self._move_now(walk)

    def _move_now(self, walk: NDArray[np.int64]) -> None:
        jobs = load_cupy().asarray(np.ascontiguousarray(walk))
        self._scatter(int(jobs.data.ptr), walk)
        # Both the jobs and what they point at may go when this returns.
        self.reader.slots[0].stream.synchronize()

    def _collect(self, pending: tuple[Slot, Jobs] | None) -> None:
        """Wait for a batch, and note the chunks that the GPU refused."""
        if pending is None:
            return
        slot, jobs = pending
        self._wait(slot, jobs)
        verdict = np.zeros(len(jobs), dtype=np.uint8)
        if self.layout.zstd or self.layout.crc32c:
            verdict = slot.verdict.reserve(len(jobs))[: len(jobs)].copy()
        bad = np.flatnonzero(verdict)
        self.counts.gpu_chunks += len(jobs) - len(bad)
        if bad.size:
            self.refused.append((jobs.take(bad), verdict[bad]))

    def _wait(self, slot: Slot, jobs: Jobs) -> None:
        """Wait for a batch, but not for ever: nvCOMP can hang on a damaged stream."""
        limit = gpu_packages.settings().decode_seconds
        if slot.wait(limit):
            return
        scratch.give_up(self.reader.device)
        why = f"the GPU's decoder had not come back from its batch after {limit:g} s"
        for row in range(len(jobs)):
            self.request.decode_on_host(jobs, row, why)
        msg = f"a batch of {len(jobs)} sound chunks: {why}. {scratch.GIVEN_UP}"
        raise ClusterError(msg)

    def _decode_refused(self, *, strict: bool) -> None:
        """Decode on the host what the GPU refused, one chunk at a time: there are few."""
        cp = load_cupy()
        for jobs, verdict in self.refused:
            for row in range(len(jobs)):
                why = _describe(int(verdict[row]))
                chunk = self.request.decode_on_host(jobs, row, why)
                if strict:
                    msg = f"the GPU cannot decode a chunk: {why}; or switch strict mode off"
                    error = self.request.corrupt(jobs, row, msg)
                    raise FormatError(str(error))
                memory = cp.asarray(chunk)
                walk = jobs.walk[row : row + 1].copy()
                walk[:, 0] += int(memory.data.ptr)
                walk[:, 1] += self.base
                self._move_now(walk)
                self.counts.refused_chunks[why] += 1
        self.request.trim()


def _runs(jobs: Jobs, layout: ArrayLayout) -> list[tuple[int, int, int]] | None:
    """First byte in the chunk and in the output, and length, where every piece is one run."""
    walk, itemsize = jobs.walk, layout.dtype.itemsize
    if jobs.axes == 1:
        plain = (walk[:, 4] == itemsize) & (walk[:, 5] == itemsize) & (walk[:, 6] < 0)
    else:
        plain = jobs.whole
    if not plain.all():
        return None
    columns = walk[:, 0], walk[:, 1], walk[:, 2] * itemsize
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _describe(verdict: int) -> str:
    return ", ".join(text for bit, text in VERDICTS.items() if verdict & bit)


def _fill_words(layout: ArrayLayout) -> tuple[np.uint64, np.uint64]:
    """Return the bytes of the fill value as two words."""
    raw = np.asarray(layout.fill_value, dtype=layout.dtype).tobytes().ljust(16, b"\0")
    low, high = np.frombuffer(raw, dtype="<u8")
    return np.uint64(low), np.uint64(high)

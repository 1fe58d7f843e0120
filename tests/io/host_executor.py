"""The GPU read path executed by NumPy, so that every decision in it is tested without a GPU.

Requests, shard indices, plans, extents and batches are the shipped code. Only what a device
does is done here: extents are read from the files into one buffer, frames are decoded by
zstd, and elements are moved as the scatter kernel's jobs say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
from zarr.codecs import ZstdCodec  # noqa: F401  zarr must register its codecs first

from scgpu_tasks.io.counters import ArrayCounts
from scgpu_tasks.io.pipeline import KvikioCodecPipeline
from scgpu_tasks.io.plan import cut_batches, find_extents
from scgpu_tasks.io.request import Request, decode_chunk

BATCH = 3  # chunks a batch: small, so that every test has several


class HostPipeline(KvikioCodecPipeline):
    """Takes NumPy outputs for device memory."""

    def _is_for_gpu(self, target: Any) -> bool:
        return isinstance(target, np.ndarray)

    def _mark(self, target: Any) -> Any:
        return None

    def _can_begin(self, target: Any) -> bool:
        return True

    def _most_on_host(self) -> int:
        return 2

    def _upload(self, host: Any, target: Any, ready: Any) -> None:
        target[...] = host

    def _execute(
        self, open_request: Callable[[Any], Request], target: Any, ready: Any
    ) -> tuple[Request, ArrayCounts]:
        with open_request(lambda path: open(path, "rb")) as request:  # noqa: PTH123
            touched = len(request.plan.present) + len(request.plan.absent)
            assert not on_event_loop() or touched <= self._most_on_host()
            return request, execute(request, target)


def on_event_loop() -> bool:
    """Whether this is the thread that all requests of zarr go through."""
    try:
        return bool(asyncio.get_running_loop())
    except RuntimeError:
        return False


def execute(request: Request, out: np.ndarray) -> ArrayCounts:
    plan, layout, counts = request.plan, request.layout, ArrayCounts()
    tables = plan.source_table, plan.target_table
    memory = _bytes_of(out)
    fill = np.frombuffer(np.asarray(layout.fill_value, layout.dtype).tobytes(), np.uint8)
    for walk in plan.absent.walk:
        _scatter(walk, fill, memory, layout.dtype.itemsize, tables, fixed=True)
    for batch in cut_batches(len(plan.present), BATCH):
        jobs = plan.present.take(batch)
        extents = find_extents(jobs, request.file_sizes)
        buffer = np.full(extents.nbytes, 0xA5, dtype=np.uint8)
        for file, start, length, position in extents:
            handle: Any = request.handle(file)
            handle.seek(start)
            got = np.frombuffer(handle.read(length), np.uint8)
            assert len(got) == length
            buffer[position : position + length] = got
            counts.gpu_stored_bytes += length
        request.trim()
        for row in range(len(jobs)):
            at, size = int(extents.chunk_position[row]), int(jobs.size[row])
            raw = buffer[at : at + size].tobytes()
            assert raw == request.stored_bytes(jobs, row)
            try:
                chunk = decode_chunk(raw, layout)
            except (ValueError, RuntimeError):
                chunk = request.decode_on_host(jobs, row, "damaged")
            _place(jobs, row, chunk, memory, layout, tables)
    counts.gpu_chunks = len(plan.present)
    counts.absent_chunks = len(plan.absent)
    return counts


def _place(jobs: Any, row: int, chunk: Any, memory: Any, layout: Any, tables: Any) -> None:
    if jobs.whole[row]:
        at = int(jobs.walk[row, 1])
        memory[at : at + layout.chunk_nbytes] = chunk
    else:
        _scatter(jobs.walk[row], chunk, memory, layout.dtype.itemsize, tables)


def _scatter(
    walk: Any, chunk: Any, memory: Any, itemsize: int, tables: Any, *, fixed: bool = False
) -> None:
    source, target = np.array([walk[0]]), np.array([walk[1]])
    for count, source_stride, target_stride, table in walk[3:].reshape(-1, 4):
        i = np.arange(count)
        if table < 0:
            along = i * source_stride, i * target_stride
        else:
            along = tables[0][table + i], tables[1][table + i]
        source = (source[:, None] + along[0]).reshape(-1)
        target = (target[:, None] + along[1]).reshape(-1)
    assert len(source) == walk[2]
    if fixed:
        source = np.zeros_like(source)
    byte = np.arange(itemsize)
    assert source.min() >= 0
    assert target.min() >= 0
    memory[target[:, None] + byte] = chunk[source[:, None] + byte]


def _bytes_of(out: np.ndarray) -> np.ndarray:
    """Return the memory of an output, from its first element on, as bytes."""
    span = sum((n - 1) * s for n, s in zip(out.shape, out.strides, strict=True))
    flat = np.lib.stride_tricks.as_strided(
        out.reshape(-1)[:1].view(np.uint8) if out.flags.c_contiguous else _first(out),
        shape=(span + out.itemsize,),
        strides=(1,),
    )
    assert np.shares_memory(flat, out)
    return flat


def _first(out: np.ndarray) -> np.ndarray:
    corner = out[(slice(0, 1),) * out.ndim]
    return np.lib.stride_tricks.as_strided(corner, shape=(1,), strides=(out.itemsize,)).view(
        np.uint8
    )

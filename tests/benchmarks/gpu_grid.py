"""Where the time of GPU reads goes, and which settings are best on this machine.

    python -m tests.benchmarks.gpu_grid STORE [--nnz 2000000000] [--parts NAME ...]

Parts: kernels, the decoder and the checks around it alone, by number of chunks; small, requests
of few chunks on the host and on the GPU; grid, threads by shards a block by chunks a decoder
call, then KvikIO's threads by task sizes; stages, a breakdown of a read of the whole store;
rows, the same through RowBlocks.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.gpu_read import (
    MIB,
    blocks_of,
    decode_lane,
    open_arrays,
    read_all,
    read_block,
    ready_chunks,
    timed,
)

PARTS = ("kernels", "small", "grid", "stages", "rows")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("store", type=Path)
    parser.add_argument("--nnz", type=int, default=2_000_000_000)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    args = parser.parse_args()
    from scgpu_tasks.io.switch import enable

    with enable():
        arrays = open_arrays(args.store)
    nnz = min(args.nnz, arrays["data"].shape[0])
    started = time.perf_counter()
    best: dict[str, Any] = {"threads": 4, "shards": 4}
    for part in args.parts:
        print(f"\n== {part}, at {time.perf_counter() - started:.0f} s", flush=True)
        globals()[f"part_{part}"](args, arrays, nnz, best)
    print(f"\ndone, {time.perf_counter() - started:.0f} s; {best}", flush=True)


@contextmanager
def configured(**changes: Any) -> Iterator[None]:
    """Read with these settings, from empty scratch on."""
    from scgpu_tasks.io import gpu_packages, scratch

    before = gpu_packages.configure(replace(gpu_packages.settings(), **changes))
    try:
        yield
    finally:
        scratch.release_memory()
        gpu_packages.configure(before)


def row(*cells: Any) -> None:
    shown = [f"{c:.3g}" if isinstance(c, float) else str(c) for c in cells]
    print("  " + "".join(f"{c:>12}" for c in shown), flush=True)


# The decoder alone


def part_kernels(
    args: argparse.Namespace, arrays: dict[str, Any], nnz: int, best: dict[str, Any]
) -> None:
    del nnz, best
    row("array", "chunks", "check/1", "check/32", "nvCOMP", "hash", "crc32c", "GB/s")
    for name, array in arrays.items():
        for n in (1, 64, 256, 512, 1024, 2048, 4096):
            kernel_times(args.store / "X" / name, array, n)


def kernel_times(path: Path, array: Any, n: int) -> None:
    """Milliseconds of each kernel for ``n`` chunks, alone on the device."""
    import cupy as cp

    from scgpu_tasks.io import nvcomp, scratch
    from scgpu_tasks.io.layout import analyse_array

    layout: Any = analyse_array(array.metadata)
    lib, kernels = nvcomp.load(), scratch._kernels(0)
    buffer, sources, sizes = ready_chunks(path, layout, n)
    n = len(sources)
    lane = decode_lane(lib, n, layout.chunk_nbytes)
    verdict, lanes = cp.ones(n, cp.uint8), cp.zeros(4 * n, cp.uint64)
    crc, spare = cp.zeros(n, cp.uint32), cp.zeros(16, cp.uint8)
    u64, u32 = np.uint64, np.uint32
    at = [u64(a.data.ptr) for a in (sources, sizes, verdict)]
    tail = (u32(n), u64(layout.chunk_nbytes))

    def check(block: int) -> None:
        grid = (-(-n // block),)
        more = (u64(0), *tail, u64(spare.data.ptr), u64(16))
        kernels.check_frames(grid, (block,), (*at, *more))

    def hashes() -> None:
        verdict.fill(1)
        args = (lane.targets, lane.actual, lane.status, verdict, lanes)
        at = tuple(u64(a.data.ptr) for a in args)
        kernels.hash_lanes((-(-n // 8),), (32,), (*at, *tail))

    def crcs() -> None:
        most, stream = int(sizes.max()), lane.stream.ptr
        lib.crc32c(sources.data.ptr, sizes.data.ptr, n, most, crc.data.ptr, stream)

    with lane.stream:
        times = [
            device_ms(call, lane.stream)
            for call in (
                lambda: check(1),
                lambda: check(32),
                lambda: lane.decode(lib, sources, sizes),
                hashes,
                crcs,
            )
        ]
    rate = n * layout.chunk_nbytes / times[2] / 1e6
    row(path.name, n, *times, rate)
    del buffer


def device_ms(call: Callable[[], None], stream: Any) -> float:
    import cupy as cp

    found = []
    for _ in range(4):
        first, last = cp.cuda.Event(), cp.cuda.Event()
        first.record(stream)
        call()
        last.record(stream)
        last.synchronize()
        found.append(cp.cuda.get_elapsed_time(first, last))
    return min(found)


# Few chunks


def part_small(
    args: argparse.Namespace, arrays: dict[str, Any], nnz: int, best: dict[str, Any]
) -> None:
    del nnz, best
    row("array", "chunks", "host, ms", "GPU, ms", "least", "least")
    for name, array in arrays.items():
        for k in (1, 2, 4, 8, 16, 32, 64, 128):
            found = []
            for most in (10_000, 0):
                with configured(small_request=most):
                    found.append(request_ms(array, k))
            row(name, k, found[0][0], found[1][0], found[0][1], found[1][1])
    one_chunk_apart(args.store, arrays["data"])


def request_ms(array: Any, k: int) -> tuple[float, float]:
    n, times = array.chunks[0], []
    for i in range(25):
        start = (i * 977) % (array.shape[0] // n - k) * n
        times.append(1000 * timed(lambda s=start: read_block(array, s, s + k * n)))
    return statistics.median(times[5:]), min(times[5:])


def one_chunk_apart(store: Path, array: Any) -> None:
    """What one chunk takes on the GPU's way: KvikIO alone, nvCOMP alone, and the rest."""
    import cupy as cp
    import kvikio

    from scgpu_tasks.io import nvcomp
    from scgpu_tasks.io.layout import analyse_array

    layout: Any = analyse_array(array.metadata)
    path = store / "X/data"
    _, sources, sizes = ready_chunks(path, layout, 1)
    lib, lane = nvcomp.load(), decode_lane(nvcomp.load(), 1, layout.chunk_nbytes)

    def decode() -> None:
        lane.decode(lib, sources, sizes)
        lane.stream.synchronize()

    buffer, nbytes = cp.empty(65536, cp.uint8), int(sizes[0])

    def read() -> None:
        with kvikio.CuFile(str(path / "c/0"), "r") as file:
            file.pread(buffer[:nbytes], nbytes, 0).get()

    decoding = min(1000 * timed(decode) for _ in range(20))
    opening = min(1000 * timed(lambda: kvikio.CuFile(path / "c/0").close()) for _ in range(20))
    reading = min(1000 * timed(read) for _ in range(20))
    with configured(small_request=0):
        total = request_ms(array, 1)[1]
    print(
        f"  one chunk by GPU: {total:.2f} ms = nvCOMP {decoding:.2f} + KvikIO {reading:.2f} "
        f"(open {opening:.2f}) + overhead {total - decoding - reading:.2f}"
    )
    with configured(small_request=16):
        total = request_ms(array, 1)[1]
    print(f"  one chunk by the host: {total:.2f} ms")


# Settings


def part_grid(
    args: argparse.Namespace, arrays: dict[str, Any], nnz: int, best: dict[str, Any]
) -> None:
    del args
    row("threads", "shards", "chunks", "GB/s", "best s", "all s")
    fastest = float("inf")
    for chunks, shards, threads in itertools.product((512, 1024, 2048), (2, 4, 8), (2, 4, 8)):
        changes = {"batch_chunks": chunks, "batch_bytes": chunks * 256 * 1024}
        with configured(**changes):
            times = times_of(arrays, nnz, threads, shards)
        report((threads, shards, chunks), arrays, nnz, times)
        if min(times) < fastest:
            fastest = min(times)
            best.update(threads=threads, shards=shards, **changes)
    sized = {k: best[k] for k in ("batch_chunks", "batch_bytes")}
    print(f"  best: {best}")
    row("io threads", "most MiB", "least MiB", "GB/s", "best s", "all s")
    tasks = ((16, 16), (16, 4), (16, 2), (8, 2), (4, 1))
    fastest = float("inf")
    for io, (most, least) in itertools.product((8, 12, 16, 24), tasks):
        changes = {
            "io_threads": io,
            "io_task_bytes": most * MIB,
            "io_least_bytes": least * MIB,
        }
        with configured(**changes, **sized):
            times = times_of(arrays, nnz, best["threads"], best["shards"])
        report((io, most, least), arrays, nnz, times)
        if min(times) < fastest:
            fastest = min(times)
            best.update(changes)
    print(f"  best: {best}")


def times_of(arrays: dict[str, Any], nnz: int, threads: int, shards: int) -> list[float]:
    blocks = blocks_of(arrays, nnz, shards)
    return [timed(lambda: read_all(arrays, blocks, threads)) for _ in range(3)]


def report(what: tuple[int, ...], arrays: dict[str, Any], nnz: int, times: list[float]) -> None:
    nbytes = nnz * sum(a.dtype.itemsize for a in arrays.values())
    shown = " ".join(f"{t:.3f}" for t in times)
    row(*what, nbytes / min(times) / 1e9, min(times), f"  {shown}")


# Stages of a read


class Trace:
    """Times of calls by name, and of what they put on the device."""

    def __init__(self) -> None:
        self.calls: dict[str, list[float]] = defaultdict(list)
        self.events: list[tuple[str, Any, Any]] = []

    @contextmanager
    def watch(self, *watched: tuple[Any, str, str]) -> Iterator[None]:
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in watched]
        for owner, name, label in watched:
            setattr(owner, name, self._timed(getattr(owner, name), label))
        try:
            yield
        finally:
            for owner, name, function in before:
                setattr(owner, name, function)

    def _timed(self, function: Any, label: str) -> Any:
        import cupy as cp

        on_device = label.startswith("GPU ")

        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            if on_device:
                first, last = cp.cuda.Event(), cp.cuda.Event()
                first.record()
            try:
                return function(*args, **kwargs)
            finally:
                if on_device:
                    last.record()
                    kind = f"{args[0].layout.chunk_nbytes // 1024} KiB"
                    self.events.append((f"{label[4:]} {kind}", first, last))
                self.calls[label].append(time.perf_counter() - started)

        return call


def part_stages(
    args: argparse.Namespace, arrays: dict[str, Any], nnz: int, best: dict[str, Any]
) -> None:
    del args
    names = {k: v for k, v in best.items() if k not in ("threads", "shards")}
    for threads in sorted({1, best["threads"]}):
        with configured(**names):
            blocks = blocks_of(arrays, nnz, best["shards"])
            read_all(arrays, blocks, threads)
            stages(arrays, blocks, threads)


def stages(arrays: dict[str, Any], blocks: list[tuple[str, int, int]], threads: int) -> None:
    import cupy as cp

    from scgpu_tasks.io import decode, gpu_packages, pipeline, request

    trace, run = Trace(), decode._Run
    base = cp.cuda.Event()
    watched = (
        (pipeline.KvikioCodecPipeline, "_read", "request"),
        (request.Request, "__init__", "  open and plan"),
        (gpu_packages, "open_file", "    open a file"),
        (run, "_read", "  read"),
        (run, "_launch", "  launch"),
        (run, "_collect", "  wait for the GPU"),
        (run, "_enqueue", "GPU all of a batch"),
        (run, "_check", "GPU check"),
        (run, "_decode", "GPU decode, judge"),
    )
    with trace.watch(*watched):
        base.record()
        base.synchronize()
        wall = timed(lambda: read_all(arrays, blocks, threads))
    print(f"  {threads} threads: {wall:.3f} s for {len(blocks)} requests")
    row("calls", "sum, s", "mean, ms", "stage")
    for label, times in sorted(trace.calls.items(), key=lambda item: item[0].startswith("GPU")):
        name = f"  {label}" if not label.startswith("GPU") else f"  host side of {label}"
        print(f"  {len(times):>12}{sum(times):>12.3f}{1000 * np.mean(times):>12.2f} {name}")
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for label, first, last in trace.events:
        start = cp.cuda.get_elapsed_time(base, first)
        found[label].append((start, start + cp.cuda.get_elapsed_time(first, last)))
    for label, spans in sorted(found.items()):
        mean = np.mean([b - a for a, b in spans])
        print(
            f"  {len(spans):>12}{union(spans) / 1000:>12.3f}{mean:>12.2f}   GPU: {label}, "
            f"union in s, mean in ms; first from {min(spans)[0]:.1f} ms, "
            f"last to {max(b for _, b in spans):.1f} ms"
        )
    spans = [s for label in found if label.startswith("all") for s in found[label]]
    print(f"  device has work for {union(spans) / 1000:.3f} s of {wall:.3f} s")


def union(spans: list[tuple[float, float]]) -> float:
    total, reached = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return total


# Rows


def part_rows(
    args: argparse.Namespace, arrays: dict[str, Any], nnz: int, best: dict[str, Any]
) -> None:
    from scgpu_tasks.io import arrays as io_arrays
    from scgpu_tasks.io.rows import open_rows

    del nnz
    names = {k: v for k, v in best.items() if k not in ("threads", "shards")}
    rows = open_rows(args.store, device="gpu")
    per_value = sum(a.dtype.itemsize for a in arrays.values())
    mean = int(rows.block_nnz.mean()) // 1_000_000
    print(f"  {rows.n_blocks} blocks of {mean} million values on average")
    row("threads", "together", "GB/s", "best s")
    before = io_arrays._LONG
    # Together: where a GPU is idle.
    for together, threads in itertools.product((True, False), (1, 2, 4, 6)):
        io_arrays._LONG = before if together else 2**62
        with configured(**names), ThreadPoolExecutor(threads) as pool:
            seconds = min(timed(lambda p=pool: read_rows(rows, p)) for _ in range(3))
        row(threads, together, rows.nnz * per_value / seconds / 1e9, seconds)
    io_arrays._LONG = before


def read_rows(rows: Any, pool: ThreadPoolExecutor) -> None:
    import cupy as cp

    lock, total = threading.Lock(), [0]

    def one(i: int) -> None:
        block = rows.read_block(i)
        cp.cuda.get_current_stream().synchronize()
        with lock:
            total[0] += len(block.data)

    list(pool.map(one, range(rows.n_blocks)))
    if total[0] != rows.nnz:
        raise RuntimeError(f"{total[0]} of {rows.nnz} values were read")


if __name__ == "__main__":
    main()

"""How fast a CSR store comes into GPU memory, next to what the machine could do at best.

    python -m tests.benchmarks.gpu_read STORE [--nnz 2000000000] [--json FILE]
    python -m tests.benchmarks.gpu_read STORE --lazy [--json FILE]

Without --lazy, one GPU: X/data and X/indices through zarr and KvikioCodecPipeline with 1, 2,
4 and 8 threads; in the same run the ceilings, KvikIO alone reading the same files and nvCOMP
alone decoding the same chunks where they lie on the device, and zarrs decoding on all cores
followed by a copy. With --lazy: read_lazy on a cluster of all GPUs, summing every value.
STORE is made by make_gpu_atlas.py, whose truth.json says what the sums must be.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import zarr

MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("store", type=Path)
    parser.add_argument("--nnz", type=int, default=2_000_000_000)
    parser.add_argument("--shards", type=int, default=8, help="shards of a block")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 6, 8])
    parser.add_argument("--host-nnz", type=int, default=402_653_184)
    parser.add_argument("--lazy", action="store_true")
    parser.add_argument("--workers", type=int, default=0, help="GPUs of --lazy; 0: all")
    parser.add_argument("--worker-threads", type=int, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result = run_lazy(args) if args.lazy else run_reads(args)
    print_table(result)
    print(json.dumps(result), flush=True)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


def print_table(result: dict[str, Any]) -> None:
    for name, value in result.items():
        if isinstance(value, dict):
            print(f"{name}:")
            for key, inner in value.items():
                print(f"  {key:<44} {inner}")
        else:
            print(f"{name:<46} {value}")


# One GPU


def run_reads(args: argparse.Namespace) -> dict[str, Any]:
    import cupy as cp

    from scgpu_tasks.io import scratch
    from scgpu_tasks.io.switch import enable, read_statistics, release_memory, reset_statistics

    free_before = cp.cuda.runtime.memGetInfo()[0]
    enabled = enable()
    arrays = open_arrays(args.store)
    nnz = min(args.nnz, arrays["data"].shape[0])
    shard = arrays["data"].shards[0]
    blocks = blocks_of(arrays, nnz, args.shards)
    decoded = sum((b - a) * arrays[n].dtype.itemsize for n, a, b in blocks)
    result: dict[str, Any] = {
        "device": cp.cuda.runtime.getDeviceProperties(0)["name"].decode(),
        "cores": len(os.sched_getaffinity(0)),
        "nnz": nnz,
        "decoded_GB": round(decoded / 1e9, 2),
    }
    result["exact"] = check_sums(args.store, arrays, blocks, nnz)
    statistics_of = read_statistics()
    result["paths"] = {Path(k).name: v for k, v in statistics_of.items()}
    reset_statistics()

    best = 0.0
    for threads in args.threads:
        times = [timed(lambda t=threads: read_all(arrays, blocks, t)) for _ in range(9)]
        seconds = min(times)
        # Asking for the free memory takes a while, so it is asked in a pass of its own.
        with peak_memory() as peak:
            read_all(arrays, blocks, threads)
        best = max(best, decoded / seconds / 1e9)
        result[f"{threads} threads"] = {
            "seconds": round(seconds, 3),
            "seconds, median of 9": round(statistics.median(times), 3),
            "decoded GB/s": round(decoded / seconds / 1e9, 1),
            "peak device memory, MiB": round((free_before - peak()) / MIB),
            "scratch kept, MiB": round(scratch.scratch_held() / MIB),
        }
    result["best decoded GB/s"] = round(best, 1)
    result["given back by release_memory, MiB"] = round(release_memory() / MIB)
    result["one chunk of 256 KiB, ms"] = one_chunk(args.store, arrays["data"])
    enabled.disable()

    reading, stored = ceiling_of_reading(args.store, nnz, shard)
    decoding = ceiling_of_decoding(args.store, arrays, nnz)
    optimal = max(reading, decoding)
    result["ceilings"] = {
        "KvikIO alone, s": round(reading, 3),
        "KvikIO alone, stored GB/s": round(stored / reading / 1e9, 1),
        "nvCOMP alone, s": round(decoding, 3),
        "nvCOMP alone, decoded GB/s": round(decoded / decoding / 1e9, 1),
        "optimal (the slower of both), s": round(optimal, 3),
    }
    result["share of the optimum"] = round(best * 1e9 / (decoded / optimal), 3)
    host = host_rate(args.store, min(args.host_nnz, nnz))
    result["zarrs on all cores and copy, decoded GB/s"] = round(host, 2)
    result["times as fast as zarrs and copy"] = round(best / host, 1)
    return result


def blocks_of(arrays: dict[str, Any], nnz: int, shards: int) -> list[tuple[str, int, int]]:
    step = arrays["data"].shards[0] * shards
    edges = itertools.pairwise([*range(0, nnz, step), nnz])
    # As RowBlocks reads them; data has fewer stored bytes, so that decoding starts sooner.
    return [(name, a, b) for a, b in edges for name in ("data", "indices")]


def open_arrays(store: Path) -> dict[str, Any]:
    return {name: zarr.open_array(store / "X" / name, mode="r") for name in ("data", "indices")}


def read_block(array: Any, start: int, stop: int) -> Any:
    from zarr.core.buffer import gpu

    return array.get_basic_selection(slice(start, stop), prototype=gpu.buffer_prototype)


def read_all(arrays: dict[str, Any], blocks: list[tuple[str, int, int]], threads: int) -> None:
    def one(block: tuple[str, int, int]) -> int:
        name, start, stop = block
        return int(read_block(arrays[name], start, stop).size)

    if threads == 1:
        for block in blocks:
            one(block)
        return
    with ThreadPoolExecutor(threads) as pool:
        total = sum(pool.map(one, blocks))
    if total != sum(b - a for _, a, b in blocks):
        raise RuntimeError(f"{total} values were read")


def timed(call: Callable[[], None]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def check_sums(
    store: Path, arrays: dict[str, Any], blocks: list[tuple[str, int, int]], nnz: int
) -> str:
    """Sum every value that was read, and compare with what was written."""
    import cupy as cp

    totals = {"data": 0, "indices": 0}
    for name, start, stop in blocks:
        wide = cp.float64 if name == "data" else cp.int64
        totals[name] += int(read_block(arrays[name], start, stop).sum(dtype=wide))
    truth = json.loads((store / "truth.json").read_text())
    if nnz != truth["nnz"]:
        return f"part of the store: {totals}"
    same = totals == {"data": truth["data_sum"], "indices": truth["indices_sum"]}
    if not same:
        raise RuntimeError(f"sums {totals}, written were {truth}")
    return f"yes, {totals}"


@contextmanager
def peak_memory() -> Iterator[Callable[[], int]]:
    """Sample how little device memory was free."""
    import cupy as cp

    least, done = [cp.cuda.runtime.memGetInfo()[0]], threading.Event()

    def sample() -> None:
        while not done.wait(0.005):
            least[0] = min(least[0], cp.cuda.runtime.memGetInfo()[0])

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield lambda: least[0]
    finally:
        done.set()
        thread.join()


def one_chunk(store: Path, array: Any) -> dict[str, float]:
    """What one chunk takes on the host, and by GPU beside KvikIO and nvCOMP alone."""
    from scgpu_tasks.io import gpu_packages

    # By turns: processors that just slept are slower than those that repeat themselves.
    bare = host_parts_of_a_chunk(store / "X/data", array)
    times, alone = chunk_times(array, 300, bare)
    found = spread(times, "")
    found["host alone: file, zstd and copy"] = round(statistics.median(alone), 3)
    found["overhead"] = round(found["median"] - statistics.median(alone), 3)
    before = gpu_packages.configure(replace(gpu_packages.settings(), small_request=0))
    try:
        found |= spread(chunk_times(array, 60)[0], "by GPU: ")
    finally:
        gpu_packages.configure(before)
    reading, decoding = parts_of_a_chunk(store / "X/data", array)
    found["KvikIO alone"], found["nvCOMP alone"] = round(reading, 3), round(decoding, 3)
    found["by GPU: overhead"] = round(found["by GPU: median"] - reading - decoding, 3)
    return found


def host_parts_of_a_chunk(path: Path, array: Any) -> Callable[[], None]:
    """Return a call that reads a chunk, decodes it by zstd, and copies it to the device."""
    import cupy as cp
    from numcodecs.zstd import Zstd

    from scgpu_tasks.io.layout import analyse_array, parse_shard_index

    layout: Any = analyse_array(array.metadata)
    file = path / "c" / "0"
    raw = file.read_bytes()
    table = parse_shard_index(
        raw[-layout.index_nbytes :], len(raw), layout, store="", array="", shard="0"
    )
    target = cp.empty(layout.chunk_nbytes, cp.uint8)
    numbers = itertools.cycle(range(layout.chunks_per_file))

    def one() -> None:
        i = next(numbers)
        with file.open("rb", buffering=0) as opened:
            stored = os.pread(opened.fileno(), int(table.size[i]), int(table.offset[i]))
        target.set(np.frombuffer(Zstd().decode(stored), np.uint8))
        cp.cuda.get_current_stream().synchronize()

    return one


def chunk_times(
    array: Any, n: int, between: Callable[[], None] = lambda: None
) -> tuple[list[float], list[float]]:
    """Milliseconds of reading one chunk, and of another call by turns with it; sorted."""
    width, times, others = array.chunks[0], [], []
    for i in range(n):
        start = i % (array.shape[0] // width) * width
        times.append(1000 * timed(lambda s=start: read_block(array, s, s + width)))
        others.append(1000 * timed(between))
    return sorted(times[n // 10 :]), sorted(others[n // 10 :])


def spread(times: list[float], prefix: str) -> dict[str, float]:
    return {
        f"{prefix}median": round(statistics.median(times), 3),
        f"{prefix}least": round(times[0], 3),
        f"{prefix}95 %": round(times[int(0.95 * len(times))], 3),
    }


def parts_of_a_chunk(path: Path, array: Any) -> tuple[float, float]:
    """Median milliseconds of KvikIO opening and reading a chunk, and of nvCOMP decoding it."""
    import cupy as cp
    import kvikio

    from scgpu_tasks.io import nvcomp
    from scgpu_tasks.io.layout import analyse_array

    layout: Any = analyse_array(array.metadata)
    _, sources, sizes = ready_chunks(path, layout, 1)
    lib, lane = nvcomp.load(), decode_lane(nvcomp.load(), 1, layout.chunk_nbytes)
    nbytes = int(sizes[0])
    buffer = cp.empty(nbytes, cp.uint8)

    def read() -> None:
        with kvikio.CuFile(str(path / "c/0"), "r") as file:
            file.pread(buffer, nbytes, 0).get()

    def decode() -> None:
        lane.decode(lib, sources, sizes)
        lane.stream.synchronize()

    return tuple(  # type: ignore[return-value]
        statistics.median([1000 * timed(call) for _ in range(60)]) for call in (read, decode)
    )


def ceiling_of_reading(store: Path, nnz: int, shard: int) -> tuple[float, int]:
    """Seconds that KvikIO alone takes to read the same shards, the best of several ways."""
    import cupy as cp
    import kvikio

    from scgpu_tasks.io.gpu_packages import require_gpu

    require_gpu()
    n = -(-nnz // shard)
    paths = [
        store / "X" / name / "c" / str(i) for i in range(n) for name in ("indices", "data")
    ]
    sizes = [p.stat().st_size for p in paths]
    room = max(sizes)
    best = float("inf")
    for in_flight in (4, 8, 16):
        buffers = [cp.empty(room, dtype=cp.uint8) for _ in range(in_flight)]
        cp.cuda.get_current_stream().synchronize()

        def read(which: int, buffers: list[Any] = buffers, step: int = in_flight) -> None:
            for path, size in list(zip(paths, sizes, strict=True))[which::step]:
                with kvikio.CuFile(path, "r") as file:
                    got = file.read(buffers[which][:size], size, 0)
                if got != size:
                    raise RuntimeError(f"{got} of {size} bytes")

        def read_all_files(read: Callable[[int], None] = read, step: int = in_flight) -> None:
            with ThreadPoolExecutor(step) as pool:
                list(pool.map(read, range(step)))

        best = min(best, *(timed(read_all_files) for _ in range(3)))
        del buffers, read, read_all_files
    gc.collect()
    cp.get_default_memory_pool().free_all_blocks()
    return best, sum(sizes)


def ceiling_of_decoding(store: Path, arrays: dict[str, Any], nnz: int) -> float:
    """Seconds that nvCOMP alone would take for all chunks, from batches that lie ready."""
    return sum(
        decode_rate(store / "X" / name, array, min(nnz, array.shape[0]))
        for name, array in arrays.items()
    )


def ready_chunks(path: Path, layout: Any, most: int) -> tuple[Any, Any, Any]:
    """Stored bytes of the first chunks on the device, and their addresses and sizes."""
    import cupy as cp

    from scgpu_tasks.io.layout import parse_shard_index

    stored, offsets, sizes, base = [], [], [], 0
    for i in range(-(-most // layout.chunks_per_file)):
        file = path / "c" / str(i)
        if not file.exists():
            break
        raw = file.read_bytes()
        table = parse_shard_index(
            raw[-layout.index_nbytes :], len(raw), layout, store="", array="", shard=str(i)
        )
        present = table.size >= 0
        offsets.append(table.offset[present] + base)
        sizes.append(table.size[present])
        stored.append(np.frombuffer(raw, np.uint8))
        base += len(raw)
    buffer = cp.asarray(np.concatenate(stored))
    sources = cp.asarray(np.concatenate(offsets)[:most] + int(buffer.data.ptr))
    return buffer, sources, cp.asarray(np.concatenate(sizes)[:most])


@dataclass
class Lane:
    """A stream and what nvCOMP needs to decode on it."""

    stream: Any
    out: Any
    targets: Any
    capacity: Any
    temp: Any
    actual: Any
    status: Any

    def decode(self, lib: Any, sources: Any, sizes: Any) -> None:
        lib.decode(
            sources.data.ptr, sizes.data.ptr, self.capacity.data.ptr, self.actual.data.ptr,
            len(sources), self.temp.data.ptr, self.temp.nbytes, self.targets.data.ptr,
            self.status.data.ptr, self.stream.ptr,
        )  # fmt: skip


def decode_lane(lib: Any, n: int, nbytes: int) -> Lane:
    import cupy as cp

    stream = cp.cuda.Stream(non_blocking=True)
    out = cp.empty(n * nbytes, dtype=cp.uint8)
    lane = Lane(
        stream,
        out,
        cp.asarray(np.arange(n) * nbytes + int(out.data.ptr)),
        cp.full(n, nbytes, dtype=cp.uint64),
        cp.empty(max(lib.decode_temp_nbytes(n, nbytes, stream.ptr), 8), dtype=cp.uint8),
        cp.zeros(n, dtype=cp.uint64),
        cp.zeros(n, dtype=cp.int32),
    )
    cp.cuda.runtime.deviceSynchronize()
    return lane


def decode_rate(path: Path, array: Any, nnz: int) -> float:
    import cupy as cp

    from scgpu_tasks.io import nvcomp
    from scgpu_tasks.io.layout import ArrayLayout, analyse_array

    layout = analyse_array(array.metadata)
    if not isinstance(layout, ArrayLayout):
        raise TypeError(str(layout))
    lib, nbytes = nvcomp.load(), layout.chunk_nbytes
    _buffer, sources, sizes = ready_chunks(path, layout, max(1, 1024 * MIB // nbytes))
    best = float("inf")
    # Whole and halved batches on one to four streams: the best that the device can do.
    for part, streams in itertools.product((1, 2, 4), (1, 2, 4)):
        n = len(sources) // part
        lanes = [decode_lane(lib, n, nbytes) for _ in range(streams)]

        def decode(lanes: list[Lane] = lanes, n: int = n) -> None:
            for _ in range(4):
                for lane in lanes:
                    lane.decode(lib, sources[:n], sizes[:n])
            cp.cuda.runtime.deviceSynchronize()

        decode()
        if any(int(cp.abs(lane.status).max()) != 0 for lane in lanes):
            raise RuntimeError("nvCOMP could not decode")
        seconds = min(timed(decode) for _ in range(2)) / (4 * streams * n)
        best = min(best, seconds)
        del lanes, decode
    gc.collect()
    cp.get_default_memory_pool().free_all_blocks()
    return best * (nnz * layout.dtype.itemsize / nbytes)


def host_rate(store: Path, nnz: int) -> float:
    """Decoded GB/s of zarrs on all cores, then a copy to the device."""
    import cupy as cp

    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
        arrays = open_arrays(store)

    def read() -> None:
        for array in arrays.values():
            cp.asarray(array[:nnz])
            cp.cuda.get_current_stream().synchronize()

    read()
    seconds = min(timed(read) for _ in range(2))
    return nnz * sum(a.dtype.itemsize for a in arrays.values()) / seconds / 1e9


# Dask


def run_lazy(args: argparse.Namespace) -> dict[str, Any]:
    import dask
    from distributed import Client

    from scgpu_tasks.cluster import make_cluster
    from scgpu_tasks.io.lazy import read_lazy

    truth = json.loads((args.store / "truth.json").read_text())
    result: dict[str, Any] = {"worker threads": args.worker_threads}
    options = {"workers": args.workers or None, "threads": args.worker_threads}
    with make_cluster("gpu", **options) as cluster, Client(cluster) as client:
        result["workers"] = len(cluster.workers)
        started = time.perf_counter()
        adata = read_lazy(args.store, device="gpu")
        result["open, s"] = round(time.perf_counter() - started, 2)
        result["blocks"] = adata.X.numblocks[0]
        for attempt in ("first pass, s", "second pass, s", "third pass, s"):
            started = time.perf_counter()
            parts = [dask.delayed(sum_block)(b) for b in adata.X.to_delayed().ravel()]
            sums = dask.compute(*parts)
            result[attempt] = round(time.perf_counter() - started, 3)
            data = sum(s[0] for s in sums)
            indices = sum(s[1] for s in sums)
            if (data, indices) != (truth["data_sum"], truth["indices_sum"]):
                raise RuntimeError(f"sums {data}, {indices}; written were {truth}")
        result["exact"] = f"yes, {data} and {indices}"
        from scgpu_tasks.io.switch import read_statistics, release_memory

        result["paths"] = {
            str(i): stats for i, stats in enumerate(client.run(read_statistics).values())
        }
        result["given back, MiB"] = round(release_memory(client) / MIB)
    return result


def sum_block(block: Any) -> tuple[int, int]:
    import cupy as cp

    return int(block.data.sum(dtype=cp.float64)), int(block.indices.sum(dtype=cp.int64))


if __name__ == "__main__":
    main()

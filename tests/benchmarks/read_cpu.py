"""What reading in blocks of rows costs beside zarrs alone, on the CPU.

    python tests/benchmarks/read_cpu.py [STORE] [--cells 200000] [--genes 20000] [--rounds 5]

Without STORE a synthetic one is made in a temporary folder. Each round reads all of X twice on
as many threads as there are cores: the bare arrays through zarrs, and `open_rows` blocks. Wall
time is what users feel; processor time is what a busy machine does not distort.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import zarr

from scgpu_tasks.datasets import write_synthetic
from scgpu_tasks.io.arrays import attach_pipeline, host_pipeline
from scgpu_tasks.io.rows import open_rows


def processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def timed(read: Callable[[Any], object], items: Iterable[Any]) -> tuple[float, float]:
    """Return wall and processor seconds of reading all items."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        wall, processor = time.perf_counter(), processor_seconds()
        for _ in pool.map(read, items):
            pass
        return time.perf_counter() - wall, processor_seconds() - processor


def compare(store: str, rounds: int) -> None:
    began = time.perf_counter()
    rows = open_rows(store)
    print(f"open_rows: {time.perf_counter() - began:.2f} s, {rows}")
    group = zarr.open_group(store, path="X", mode="r")
    arrays = [attach_pipeline(a, host_pipeline(a)) for a in (group["data"], group["indices"])]
    ranges = list(zip(rows.offsets[:-1].tolist(), rows.offsets[1:].tolist(), strict=True))

    def read_arrays(bounds: tuple[int, int]) -> None:
        for array in arrays:
            array[bounds[0] : bounds[1]]

    def read_rows(i: int) -> int:
        return rows.read_block(i).stored_bytes

    ratios = []
    for _ in range(rounds):
        bare = timed(read_arrays, ranges)
        ours = timed(read_rows, range(rows.n_blocks))
        ratios.append((ours[0] / bare[0], ours[1] / bare[1]))
        print(
            f"zarrs {bare[0]:6.2f} s wall {bare[1]:6.2f} s processor   "
            f"rows {ours[0]:6.2f} s wall {ours[1]:6.2f} s processor"
        )
    wall, processor = (statistics.median(column) for column in zip(*ratios, strict=True))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"ratio, median of {rounds}: wall {wall:.2f}, processor {processor:.2f}")
    print(f"peak memory {peak:.2f} GiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("store", nargs="?")
    parser.add_argument("--cells", type=int, default=200_000)
    parser.add_argument("--genes", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.store:
        compare(args.store, args.rounds)
        return
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        store = write_synthetic(f"{folder}/atlas.zarr", args.cells, args.genes)
        print(f"write_synthetic: {time.perf_counter() - began:.1f} s")
        compare(str(store), args.rounds)


if __name__ == "__main__":
    main()

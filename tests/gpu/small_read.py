"""A few small reads of every kind, for compute-sanitizer.

compute-sanitizer --tool memcheck python -m tests.gpu.small_read FOLDER [--kinds read damage]

The sanitizer runs every kernel a hundred times slower: the arrays hold a few kilobytes.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import zarr

from scgpu_tasks.errors import CorruptChunkError
from scgpu_tasks.io import scratch
from tests.gpu.read_helpers import PROTOTYPE, open_gpu, reads_as
from tests.io.damage import damage
from tests.io.read_cases import CHAINS, read, seeded

STARTED = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kinds", nargs="+", default=["read", "damage"])
    args = parser.parse_args()
    say("imported")
    scratch.configure(replace(scratch.settings(), small_request=0, io_task_bytes=2**20))
    scratch.require_gpu()
    say("libraries loaded")
    with scratch.pool_of(0).borrow():
        say("kernels compiled")
    if "read" in args.kinds:
        reads(args.folder)
    if "damage" in args.kinds:
        damages(args.folder)
    say("done")


def say(what: str) -> None:
    print(f"{time.perf_counter() - STARTED:6.1f} s  {what}", flush=True)


def reads(folder: Path) -> None:
    """Whole and partial chunks, steps, index arrays, absent chunks, odd addresses."""
    values = np.random.default_rng(0).integers(0, 9, (12, 10)).astype("u2")
    values[:4, :5] = 0
    rows = np.array([1, 5, 11])
    for name, chain in CHAINS.items():
        path = folder / f"read-{name}"
        zarr.create_array(path, data=values, chunks=(4, 5), shards=(8, 10), compressors=chain)
        array = open_gpu(path)
        cases = (
            ("basic", (slice(None), slice(None)), values),
            ("basic", (slice(1, 11, 3), 2), values[1:11:3, 2]),
            ("orthogonal", (rows, slice(1, 7)), values[rows, 1:7]),
        )
        for kind, selection, want in cases:
            if not reads_as(array, kind, selection, want):
                raise SystemExit(f"wrong values: {name}, {kind}, {selection}")
        say(f"read {name}")


def damages(folder: Path) -> None:
    """Bits of chunks and of shard indices."""
    values = np.random.default_rng(1).poisson(1.5, 4 * 600).astype("f4")
    for name, chain in CHAINS.items():
        found = 0
        for seed in range(3):
            path = folder / f"damaged-{seed}-{name}"
            zarr.create_array(
                path, data=values, chunks=(600,), shards=(2_400,), compressors=chain
            )
            damage(seeded(seed), sorted((path / "c").iterdir()), 4)
            try:
                read(open_gpu(path), "basic", (slice(None),), PROTOTYPE)
            except CorruptChunkError:
                found += 1
        say(f"damage {name}: {found} of 3 found")


if __name__ == "__main__":
    main()
